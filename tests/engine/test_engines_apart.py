"""Engines on the same weights, stepped in turns or on threads: each does what it does alone, step for step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.engine.outputs import RequestGroup
from forerun.kernels.select import recording
from tests.models import factory
from tests.support import mini

Found = list[tuple[tuple[int, ...], int, int]]  # tokens, steps, drafts that were accepted
DRAFTERS = ("ngram", "suffix", "recycling", "draft", "layer_skip", "medusa", "eagle", "mtp", "portfolio")
FIXED = {"adaptive": False, "max_num_seqs": 4, "max_model_len": 128}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that runs through transformers, with the vocabulary of the tests' small models."""
    return factory.save_checkpoint(factory.random_hf_model("gpt2"), tmp_path_factory.mktemp("gpt2"))


def start(llm: LLM, prompts: Sequence[Any], seed: int) -> list[RequestGroup]:
    params = [SamplingParams(max_tokens=20, temperature=0.7, seed=seed + i, ignore_eos=True) for i in range(9)]
    groups = [llm.prepare(prompt, params[i]) for i, prompt in enumerate(prompts)]
    for group in groups:
        llm.start(group)
    return groups


def found(groups: Sequence[RequestGroup]) -> Found:
    samples = [group.output().outputs[0] for group in groups]
    assert not any(sample.error or sample.stats.failed_drafters for sample in samples)
    return [(s.token_ids, s.stats.num_steps, s.stats.trees.accepted) for s in samples]


def alone(llm: LLM, prompts: Sequence[Any], seed: int) -> Found:
    groups = start(llm, prompts, seed)
    while llm.engine.has_work:
        llm.step()
    return found(groups)


def in_turns(engines: Sequence[LLM], prompts: Sequence[Sequence[Any]]) -> list[Found]:
    """One step each, again and again; the requests of all engines have the same names."""
    groups = [start(llm, own, 10 * i) for i, (llm, own) in enumerate(zip(engines, prompts, strict=True))]
    while any(llm.engine.has_work for llm in engines):
        for llm in engines:
            if llm.engine.has_work:
                llm.step()
    return [found(own) for own in groups]


def new_engines(plain: LLM, drafter: str, **options: Any) -> list[LLM]:
    return [plain.with_drafter(drafter, **{**FIXED, **options}) for _ in range(2)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_engines_in_turns_do_what_each_does_alone(drafter: str) -> None:
    name = "portfolio=suffix+recycling+draft" if drafter == "portfolio" else drafter
    prompts = [mini.PROMPTS[:3], mini.PROMPTS[3:]]
    expected = [alone(llm, own, 10 * i) for i, (llm, own) in enumerate(zip(_new(name), prompts, strict=True))]
    assert in_turns(_new(name), prompts) == expected
    assert sum(accepted for own in expected for _, _, accepted in own) > 0


def _new(name: str) -> list[LLM]:
    return new_engines(mini.plain(), name)


@pytest.mark.parametrize("drafter", ["draft", "portfolio=ngram+draft"])
def test_engines_on_a_transformers_model_in_turns(gpt2: Path, drafter: str) -> None:
    """Target and draft keep states of their own, by names that every engine counts from 0."""
    plain = LLM(str(gpt2), **{**FIXED, "max_model_len": 64})
    options = {"draft_model": str(gpt2), "max_draft_tokens": 4, "tree_width": 1, "max_model_len": 64}
    prompts = [[[5, 9, 40, 33, 7], [61, 62, 8]], [[90, 17, 21, 30, 5, 5, 9], [3, 3]]]
    engines = [new_engines(plain, drafter, **options) for _ in range(2)]
    expected = [alone(llm, own, 10 * i) for i, (llm, own) in enumerate(zip(engines[0], prompts, strict=True))]
    assert in_turns(engines[1], prompts) == expected
    assert [[tokens for tokens, _, _ in own] for own in expected] == [
        [tokens for tokens, _, _ in alone(plain.with_drafter("none"), own, 10 * i)] for i, own in enumerate(prompts)
    ]


def test_an_engine_is_built_while_another_computes() -> None:
    """A pass is recorded by calling the ops of the kernels all engines share; other threads must not be recorded."""
    kernels = factory.make_kernels()
    x, weight = torch.randn(3, 8), torch.ones(8)
    expected = kernels.rms_norm(x, weight, 1e-6)
    with ThreadPoolExecutor(1) as thread, recording(kernels, 4) as recorder:
        if recorder is None:
            pytest.skip("these kernels record nothing")
        assert torch.equal(thread.submit(kernels.rms_norm, x, weight, 1e-6).result(timeout=30), expected)
        kernels.embedding(recorder.inputs.token_ids, torch.randn(5, 8))
        assert recorder.num_steps == 1, "this thread's ops are written down"


def test_weights_packed_on_several_threads_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on the same kernels load their drafters whenever they are made: here while a piece is being started."""
    arenas: Any = pytest.importorskip("forerun.kernels.cpu.arena")
    arena, size = arenas.WeightArena(), 1 << 18
    arena.take(1, torch.float32)
    others: list[Future[torch.Tensor]] = []

    def another_takes(*_: int) -> None:
        if not others:
            others.append(threads.submit(arena.take, size, torch.float32))
            wait(others, timeout=0.2)

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(arenas, "_native", SimpleNamespace(prefer_huge_pages=another_takes))
        own = arena.take(arenas._PIECE_BYTES, torch.float32)
    other = others[0].result(timeout=30)
    assert len(other) == size
    low, high = sorted((own, other), key=torch.Tensor.data_ptr)
    assert low.data_ptr() + low.nbytes <= high.data_ptr()
