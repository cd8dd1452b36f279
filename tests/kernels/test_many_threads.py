"""A pass on many more threads than there are cores: the same bits, as many barriers, the weights in even parts, and
none waits for one that is held up."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.cases import cpu_kernels
from tests.support.programs import native_test

from forerun.bench.passes import TimedPasses
from forerun.bench.shapes import SHAPES, read_shape
from forerun.bench.synthetic import random_decoder
from forerun.bench.weight_kinds import read_kind
from forerun.kernels.ops import Kernels, LayerKV

THREADS = (8, 16, 64)


def run_passes(kernels: Any, weights: str) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of chains of several lengths, and how often the threads met in each."""
    torch.manual_seed(0)
    passes = TimedPasses(random_decoder(read_shape("small"), read_kind(weights), kernels, 400), kernels, 400)
    logits, jobs = [], []
    for tokens in (1, 8):
        before = kernels.engine.num_jobs
        logits.append(passes.runner.run(passes.chain(300, tokens)).logits.clone())
        jobs.append(kernels.engine.num_jobs - before)
    return logits, jobs


@pytest.mark.parametrize("weights", ["bf16", "gguf:q4_k"])
def test_bits_and_barriers_do_not_depend_on_the_number_of_threads(weights: str) -> None:
    expected, _ = run_passes(cpu_kernels(threads=1), weights)
    met = []
    for threads in THREADS:
        logits, jobs = run_passes(cpu_kernels(threads=threads), weights)
        assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))
        met.append(jobs)
    assert met[0] == met[1] == met[2] and min(met[0]) > 0
    assert max(met[0]) <= 11 * 6 + 4, "products, their rounding, activations and two of attention in each of 6 layers"


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("threads", THREADS)
def test_each_thread_owns_an_even_part_of_the_weights(shape: str, rows: int, threads: int) -> None:
    kernels: Any = cpu_kernels(threads=threads)
    raw = SHAPES[shape]
    hidden, inner, layers = raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"]
    fused = hidden + 2 * raw["num_key_value_heads"] * hidden // raw["num_attention_heads"]
    matrices = [(fused, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * layers
    matrices.append((raw["vocab_size"], hidden))
    from forerun.kernels.cpu import _native

    read = [0] * threads
    for n, k in matrices:
        layout = _native.GroupedLayout(k, 32, 4, 1, False, 1, 0, 1.0, 0, 0, 0, 0)
        owned = kernels.engine.owned_panels(rows, n, k, layout)
        assert sum(owned) == -(-n // 16)
        read = [done + panels * layout.panel_bytes for done, panels in zip(read, owned, strict=True)]
    assert max(read) < 1.04 * sum(read) / threads


def gated(kernels: Kernels) -> object:
    return kernels.gated_act(torch.ones(1, 2 * 8192), "silu")


def one_row(kernels: Kernels) -> object:
    return kernels.linear(torch.ones(1, 512), kernels.pack_linear(torch.ones(512, 512)))


def embedded(kernels: Kernels) -> object:
    return kernels.embedding(torch.arange(512), torch.ones(512, 512))


def normed(kernels: Kernels) -> object:
    return kernels.rms_norm(torch.ones(64, 2048), torch.ones(2048), 1e-6)


def moved(kernels: Kernels) -> object:
    rows = torch.arange(64, dtype=torch.int32)
    return kernels.move_rows([LayerKV.zeros(8, 4, 128, 16, torch.float32)], rows + 64, rows)


def copied(kernels: Any) -> object:
    x, y = torch.randn(512, 512), torch.empty(512, 512)
    rows = torch.arange(512).flip(0).contiguous()
    kernels.engine.select_rows(x.data_ptr(), rows.data_ptr(), y.data_ptr(), 512, 512)
    assert torch.equal(y, x[rows])
    kernels.engine.copy_columns(x.data_ptr(), y.data_ptr(), 512, 256, 512, 256, 512, 0)
    assert torch.equal(y[:, :256], x[:, 256:])
    kernels.engine.fill(y.data_ptr(), 512, 512, 3.0)
    assert bool((y == 3.0).all())
    return y


@pytest.mark.parametrize("work", [gated, one_row, embedded, normed, moved, copied])
def test_work_that_grows_with_model_or_batch_is_divided(work: Callable[[Kernels], object]) -> None:
    """Not divided: one row's norm, rotation and rounding, which are short beside its products."""
    kernels: Any = cpu_kernels(threads=64)
    before = kernels.engine.num_jobs
    work(kernels)
    assert kernels.engine.num_jobs - before >= (3 if work is copied else 1)


def test_what_was_moved_while_other_rows_move_is_what_lay_there_before() -> None:
    """Rows move in their order, head by head: each target is free by then."""
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        one, many = (LayerKV.zeros(8, 4, 64, 16, dtype) for _ in range(2))
        for kv in (one, many):
            generator = torch.Generator().manual_seed(0)
            for pool in (kv.keys, kv.values, kv.key_scales, kv.value_scales):
                if pool is not None:
                    pool.copy_(torch.randint(-99, 99, pool.shape, generator=generator))
        rows = torch.arange(60, dtype=torch.int32)
        cpu_kernels(threads=1).move_rows([one], rows + 7, rows)
        cpu_kernels(threads=16).move_rows([many], rows + 7, rows)
        assert torch.equal(one.keys, many.keys) and torch.equal(one.values, many.values)


def test_the_others_do_the_chunks_of_a_caller_that_is_held_up() -> None:
    """csrc/tests/thread_pool.cpp holds it up until they have; of 2 to 4 threads none helped it once."""
    printed = subprocess.run([native_test("thread_pool")], check=True, stdout=subprocess.PIPE, text=True).stdout
    *pools, (own_us, wall_us) = [tuple(map(int, line.split())) for line in printed.splitlines()]
    assert [threads for threads, _, _ in pools] == [2, 3, 7, 8, 9, 17]
    assert all(own <= 1 for _, _, own in pools), pools
    assert 0 < own_us < wall_us / 2, "waiting for a worker that has no core counted as the step's own time"
