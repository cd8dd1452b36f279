"""The curve: what is timed, in which order, and how the figures follow from the times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.bench import bandwidth, prefill
from forerun.bench.curve import check_cases, in_turns, measure, read_gb_per_s, rows
from forerun.bench.passes import TimedPasses
from forerun.bench.shapes import SHAPES, Shape, read_shape
from forerun.bench.synthetic import bytes_needed, random_decoder
from forerun.bench.weight_kinds import GGUF_TYPES, read_kind
from forerun.errors import ConfigError, ResourceError
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels
from forerun.models.base import state_specs_of
from forerun.models.config import ModelConfig
from forerun.models.families import FAMILIES
from tests.models.factory import CASES, SIZES


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakePasses:
    """A pass takes a second and another for every token and ten tokens of context; the warm-up takes far longer."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.order: list[tuple[int, int]] = []

    def chain(self, context: int, tokens: int) -> tuple[int, int]:
        return context, tokens

    def run(self, batch: tuple[int, int]) -> None:
        context, tokens = batch
        warm = batch in self.order
        self.order.append(batch)
        self.clock.now += (1 + tokens + context / 10) * (1 if warm else 1000)

    def bytes_read(self, context: int, tokens: int) -> int:
        return 10**9 * (context + tokens)


def tiny(case: str = "llama") -> Shape:
    model_type, fields = CASES[case]
    raw = {"model_type": model_type, **SIZES, **fields}
    return Shape("tiny", raw, ModelConfig.read(raw, FAMILIES[model_type]), FAMILIES[model_type])


def passes(kernels: Kernels, weights: str = "bf16", max_rows: int = 40) -> TimedPasses:
    return TimedPasses(random_decoder(tiny(), read_kind(weights), kernels, max_rows), kernels, max_rows)


def test_rows_hold_medians_ratios_and_bandwidth() -> None:
    clock = FakeClock()
    fake = FakePasses(clock)
    measured = measure(fake, [2, 4], [0, 10], 3, lambda: 5e9, clock=clock)
    assert rows(measured, fake, [2, 4]) == [
        {"tokens": 2, "context": 0, "ms": 3000.0, "ratio": 1.5, "gb_per_s": 0.667},
        {"tokens": 4, "context": 0, "ms": 5000.0, "ratio": 2.5, "gb_per_s": 0.8},
        {"tokens": 2, "context": 10, "ms": 4000.0, "ratio": 1.3333, "gb_per_s": 3.0},
        {"tokens": 4, "context": 10, "ms": 6000.0, "ratio": 2.0, "gb_per_s": 2.333},
    ]
    assert read_gb_per_s(measured) == 5.0


def test_passes_take_turns_and_every_second_turn_runs_backwards() -> None:
    done: list[str] = []
    actions: dict[str, Callable[[], None]] = {name: lambda n=name: done.append(n) for name in "abc"}  # type: ignore[misc]
    speeds = iter([1.0, 9.0, 4.0])
    measured = in_turns(actions, 3, lambda: next(speeds))
    assert "".join(done) == "abc" + "abc" + "cba" + "abc"
    assert measured.read_speeds == [1.0, 9.0, 4.0] and all(len(times) == 3 for times in measured.seconds.values())


@pytest.mark.parametrize(("tokens", "contexts"), [([0], [1]), ([65], [1]), ([1], [100]), ([4], [97])])
def test_impossible_passes_are_refused(tokens: list[int], contexts: list[int]) -> None:
    check_cases([4], [96], 100)
    with pytest.raises(ConfigError, match="must be from"):
        check_cases(tokens, contexts, 100)


def test_prompts_are_cut_into_chunks_whose_last_row_alone_has_logits() -> None:
    batches = passes(select_kernels("reference")).chunks(33, 16)
    assert [batch.num_rows for batch in batches] == [16, 16, 1]
    assert [len(batch.logit_rows) for batch in batches] == [0, 0, 1]
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(33))
    with pytest.raises(ConfigError, match="from 1 to 64"):
        prefill.check_prompts([65], 16, 64)
    with pytest.raises(ConfigError, match="--chunk"):
        prefill.check_prompts([4], 0, 64)


def test_a_chain_sees_the_context_and_its_own_ancestors() -> None:
    batch = passes(select_kernels("reference")).chain(20, 3)
    assert batch.positions.tolist() == [20, 21, 22] and batch.rows.prefix_lens.tolist() == [20] * 3
    assert batch.rows.tree_masks.tolist() == [1, 3, 7] and batch.logit_rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("weights", ["bf16", "f32", "fp8", "nf4", "int4:16", "gguf:Q4_K", "gguf:q6_k"])
def test_random_models_compute_finite_logits_of_ordinary_size(weights: str) -> None:
    built = passes(select_kernels("auto", threads=1), weights)
    logits = built.runner.run(built.chain(20, 3)).logits
    assert logits.shape == (3, SIZES["vocab_size"]) and bool(logits.isfinite().all())
    assert 0.1 < float(logits.std()) < 10


def test_dense_passes_are_recorded_and_count_their_bytes() -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    built = passes(select_kernels("cpu", threads=1))
    assert built.recorded
    heads, layers = tiny().config.heads, tiny().config.num_layers
    per_position = 2 * heads.num_kv * heads.head_dim * 2 * layers
    assert built.bytes_read(20, 3) == built.weight_bytes + 23 * per_position
    table = SIZES["vocab_size"] * SIZES["hidden_size"] * 2
    assert 0 < built.weight_bytes - table < built.model.weight_bytes - table, "the embedding table is not read"


def test_windows_bound_the_bytes_read() -> None:
    kernels = select_kernels("reference")
    built = TimedPasses(random_decoder(tiny("mistral-window"), read_kind("bf16"), kernels, 40), kernels, 40)
    assert built.bytes_read(30, 1) == built.bytes_read(20, 1) < built.bytes_read(20, 2)


@pytest.mark.parametrize("case", ["mixtral", "qwen2-moe", "deepseek"])
@pytest.mark.parametrize("weights", ["bf16", "int4:16"])
def test_mixtures_and_latents_can_be_measured(case: str, weights: str) -> None:
    kernels, kind = select_kernels("auto", threads=1), read_kind(weights)
    built = TimedPasses(random_decoder(tiny(case), kind, kernels, 40), kernels, 40)
    logits = built.runner.run(built.chain(20, 3)).logits
    assert bool(logits.isfinite().all()) and 0.1 < float(logits.std()) < 10
    assert built.model.weight_bytes < 1.5 * bytes_needed(tiny(case).config, kind, kernels, 40)
    few, many = (built.bytes_read(20, rows) - built.bytes_read(19, rows + 1) for rows in (1, 30))
    assert few < 0 == many, "one row reads its own experts only"


@pytest.mark.parametrize("case", ["qwen3.5", "falcon-h1"])
def test_recurrent_layers_can_be_measured_and_accept_the_chain(case: str) -> None:
    kernels, kind = select_kernels("auto", threads=1), read_kind("int4:16")
    built = TimedPasses(random_decoder(tiny(case), kind, kernels, 40), kernels, 40)
    built.run(built.chain(20, 3))
    for chunk in [*built.chunks(33, 16), built.chain(0, 3)]:
        built.run(chunk)
    logits = built.runner.run(built.chain(3, 2)).logits
    assert bool(logits.isfinite().all()) and 0.1 < float(logits.std()) < 10
    with pytest.raises(RuntimeError, match="goes on after 5 tokens, its state after 4"):
        built.runner.run(built.chain(5, 1))
    states = sum(spec.bytes_per_slot for spec in state_specs_of(built.model))
    assert built.bytes_read(0, 1) > built.weight_bytes + 2 * states


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_named_shapes_are_readable(name: str) -> None:
    assert read_shape(name).config.num_layers == SHAPES[name]["num_hidden_layers"]


def test_a_config_file_is_a_shape_and_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="models of type mamba"):
        read_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="shapes are qwen2.5-0.5b"):
        read_shape("gpt-9")


def test_weight_kinds() -> None:
    assert read_kind("BF16").dtype is torch.bfloat16 and read_kind("gguf:F16").dtype is torch.float16
    layout = read_kind("int4:32").grouped
    assert layout is not None and (layout.bits, layout.group_size, layout.zero) == (4, 32, 8)
    assert {name: read_kind(f"gguf:{name.upper()}").grouped for name in GGUF_TYPES} == GGUF_TYPES
    for wrong in ("int9", "int4:20", "gguf:Q4_K_M", "fp7", ""):
        with pytest.raises(ConfigError):
            read_kind(wrong)


@pytest.mark.parametrize("weights", ["gguf:q4_k", "fp8", "nf4"])
def test_the_estimate_covers_what_is_allocated(weights: str) -> None:
    kernels, kind = select_kernels("reference"), read_kind(weights)
    built = random_decoder(tiny(), kind, kernels, 40)
    assert built.weight_bytes < bytes_needed(tiny().config, kind, kernels, 40) < 4 * built.weight_bytes


def test_bandwidth_is_read_on_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda: 8 << 20)
    before = torch.get_num_threads()
    with bandwidth.reader(select_kernels("reference"), 3) as read_speed:
        assert 1e7 < read_speed() < 1e13
    assert torch.get_num_threads() == before


def test_the_kernels_own_read_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Engine:
        def stream_read(self, address: int, num_bytes: int) -> None:
            calls.append(num_bytes)

    class Table:
        engine, device = Engine(), torch.device("cpu")

    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda: 1 << 20)
    with bandwidth.reader(Table(), 1) as read_speed:  # type: ignore[arg-type]
        assert read_speed() > 0
    assert calls == [1 << 20]


def test_copying_counts_both_ways() -> None:
    speeds = [bandwidth.copier(torch.device("cpu"), 1 << 20)() for _ in range(3)]
    assert all(1e8 < speed < 1e13 for speed in speeds)


def test_the_buffer_is_larger_than_the_largest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, size in enumerate(("48K", "2048K", "400M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert bandwidth.largest_cache(tmp_path) == 400 << 20 and bandwidth.largest_cache(tmp_path / "none") == 0
    monkeypatch.setattr(bandwidth, "largest_cache", lambda: 400 << 20)
    monkeypatch.setattr(bandwidth, "available_bytes", lambda: 1 << 40)
    assert bandwidth.buffer_bytes() == 800 << 20
    monkeypatch.setattr(bandwidth, "available_bytes", lambda: 1 << 30)
    with pytest.raises(ResourceError, match="buffer of 0.84 GB"):
        bandwidth.buffer_bytes()
