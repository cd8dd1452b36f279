"""Layer skip: a part of the target drafts into the target's own KV, and changes no token."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM
from forerun.config import DrafterConfig
from forerun.core import Request, SamplingParams
from forerun.drafters import layer_skip
from forerun.drafters.layer_skip import SPEC, LayerRunner, build, spread_layers
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.models.base import Model, passes_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.models.layer_search import Sample, find_layers
from forerun.models.subset import subset_decoder
from forerun.quant.dense import DenseWeight
from forerun.runtime.bind import bind
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.models import factory
from tests.support import harness, tiny
from tests.support.drafting import context_of
from tests.support.toy import ToyModel

NUM_LAYERS = 6
USEFUL = (1, 4)  # the other layers of `sparse` add nothing


def config(
    layers: tuple[int, ...] | None = None, max_draft_tokens: int = 4, tree_width: int = 1, adaptive: bool = False
) -> DrafterConfig:
    return DrafterConfig(
        name="layer_skip",
        layers=layers,
        max_draft_tokens=max_draft_tokens,
        tree_width=tree_width,
        adaptive=adaptive,
    )


@pytest.fixture(scope="module")
def sparse() -> Decoder:
    """A random decoder in which all layers but USEFUL write zeros to the residual stream."""
    model = tiny.target(NUM_LAYERS)

    def silenced(index: int) -> Any:
        layer = model.parts.layers[index]
        if index in USEFUL:
            return layer
        return replace(layer, attention=_silent(layer.attention), mlp=_silent(layer.mlp))

    parts = replace(model.parts, layers=tuple(silenced(index) for index in range(NUM_LAYERS)))
    return Decoder(parts, model.max_position, model.kv_specs[0].dtype)


def _silent(inner: Any) -> Any:
    """A sublayer followed by a matrix of zeros, with all that it does to the pool."""
    width = factory.SIZES["hidden_size"]
    zeros = DenseWeight(tiny.kernels(), torch.zeros(width, width))

    class Silent(type(inner)):  # type: ignore[misc]
        def __call__(self, *args: Any) -> torch.Tensor:
            return zeros.matmul(super().__call__(*args), None)

    made = copy(inner)
    made.__class__ = Silent
    return made


# -- the subset -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(0, 1, 2), (1, 4), (5,), (0, 2, 3, 4, 5)])
def test_a_subset_is_the_model_stored_without_the_other_layers(layers: tuple[int, ...]) -> None:
    tokens, stored = [(7 * i) % 90 + 3 for i in range(20)], tiny.random_layers(NUM_LAYERS)
    smaller = tiny.llama([stored[index] for index in layers])
    part = subset_decoder(tiny.target(NUM_LAYERS), layers)
    found, wanted = (factory.Runner(model, len(tokens)).span(tokens).logits for model in (part, smaller))
    assert torch.equal(found, wanted)


def test_a_subset_holds_nothing_of_itsown() -> None:
    model = tiny.target(NUM_LAYERS)
    part = subset_decoder(model, (0, 3))
    assert part.parts.layers[1] is model.parts.layers[3] and part.parts.lm_head is model.parts.lm_head
    assert part.kv_specs == (model.kv_specs[0], model.kv_specs[3])


@pytest.mark.parametrize("layers", [(), (0, 6), (-1, 2), (2, 1), (1, 1), tuple(range(NUM_LAYERS))])
def test_layers_that_do_not_fit_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="some of 0 to 5"):
        build(
            context_of(
                SPEC, tiny.target(NUM_LAYERS), tiny.kernels(), TreeGrower(tiny.kernels(), True), 4, layers=layers
            )
        )


def test_a_target_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="transformers"):
        harness.engine(config((0,)), model=ToyModel())


def test_a_target_of_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="got none"):
        tiny.engine(tiny.target(1), config())


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(2, (0,)), (3, (0, 2)), (4, (0, 3)), (8, (0, 2, 5, 7)), (16, (0, 2, 4, 6, 9, 11, 13, 15))],
)
def test_layers_to_begin_with(num_layers: int, layers: tuple[int, ...]) -> None:
    assert spread_layers(num_layers) == layers


# -- exactness --------------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...] | None, int, int]] = {
    "early-exit": ((0, 1, 2, 3), 4, 1),
    "subset": ((0, 2, 3, 5), 5, 1),
    "found": (None, 4, 1),
    "tree": ((0, 1, 2, 3, 4), 12, 3),
    "found-tree": (None, 9, 4),
}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_plain_decoding(shape: str, temperature: float) -> None:
    model, wanted = tiny.target(NUM_LAYERS), tiny.groups(5, temperature=temperature, max_tokens=24)
    tokens, stats = tiny.run(tiny.engine(model, config(*SHAPES[shape])), wanted)
    assert tokens == tiny.expected(NUM_LAYERS, 5, temperature=temperature, max_tokens=24)
    assert tiny.num_accepted(stats) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},
        {"num_kv_blocks": 26},
        {"max_num_seqs": 2},
        {"block_size": 16},
        {"kv_cache_dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize("shape", ["found", "tree"])
def test_chunks_preemption_and_queues(shape: str, options: dict[str, Any]) -> None:
    model, wanted = tiny.target(NUM_LAYERS), tiny.groups(7, n=2)
    made = tiny.engine(model, config(*SHAPES[shape]), **options)
    tokens, stats = tiny.run(made, wanted)
    if "kv_cache_dtype" in options:  # other roundings: the same on both sides
        assert tokens == [tiny.run(tiny.engine(model, **options), [group])[0][0] for group in wanted]
    else:
        assert tokens == tiny.expected(NUM_LAYERS, 7, n=2)
    assert sum(stat.num_preemptions for stat in stats) > 0 or "num_kv_blocks" not in options
    assert tiny.num_accepted(stats) > 0
    assert tiny.run(made, wanted)[0] == tokens, "with what the prefix cache kept"


@pytest.mark.parametrize("shape", ["early-exit", "found-tree"])
def test_rejection_rule(shape: str) -> None:
    model, options = tiny.target(NUM_LAYERS), {"verification": "rejection", "max_num_batched_tokens": 19}
    sampled = tiny.groups(5)
    first, stats = tiny.run(tiny.engine(model, config(*SHAPES[shape]), **options), sampled)
    assert first == tiny.run(tiny.engine(model, config(*SHAPES[shape]), **options), sampled)[0]
    assert tiny.num_accepted(stats) > 0 and all(len(sample) == 20 for group in first for sample in group)
    greedy = tiny.groups(4, temperature=0.0)
    tokens = tiny.run(tiny.engine(model, config(*SHAPES[shape]), **options), greedy)[0]
    assert tokens == tiny.plain(model, greedy)


@pytest.mark.parametrize("params", [{"top_k": 6}, {"repetition_penalty": 1.3}])
def test_sampling_parameters(params: dict[str, Any]) -> None:
    model, wanted = tiny.target(NUM_LAYERS), tiny.groups(4, **params)
    tokens, stats = tiny.run(tiny.engine(model, config((0, 1, 2, 3, 4))), wanted)
    assert tokens == tiny.plain(model, wanted)
    assert tiny.num_accepted(stats) > 0


def test_budgets_follow_the_policy() -> None:
    model, wanted = tiny.target(NUM_LAYERS), tiny.groups(4)
    assert tiny.run(tiny.engine(model, config(adaptive=True)), wanted)[0] == tiny.plain(model, wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree_width", [1, 3])
def test_all_layers_that_matter_accept_everything(sparse: Decoder, temperature: float, tree_width: int) -> None:
    """Coupled drafts of a part that computes the whole model's logits are the target's own choices."""
    wanted = tiny.groups(3, temperature=temperature, max_tokens=21)
    tokens, stats = tiny.run(tiny.engine(sparse, config(USEFUL, 4 if tree_width == 1 else 12, tree_width)), wanted)
    assert tokens == tiny.plain(sparse, wanted)
    for stat in stats:
        if tree_width == 1:  # the first step computes the prompt and drafts nothing
            assert stat.num_steps == 5 and tiny.num_accepted([stat]) == 16
        else:
            assert stat.acceptance_length > 2  # logits are flat, so a tree that goes by chances is wide


def test_all_layers_of_the_model_draft_its_own_tokens() -> None:
    """The engine's model itself over the shared rows: what the drafter computes is not changed by where it writes."""
    model, [group] = tiny.target(NUM_LAYERS), tiny.groups(1, temperature=0.0)
    made = tiny.engine(model, config((0, 1, 2)))
    tiny.inner(made).runner = bind(passes_of(model), tiny.kernels(), made.kv_cache.layers, made.kv_cache.block_size)
    tokens, [stat] = tiny.run(made, [group])
    assert tokens == tiny.plain(model, [group])
    assert stat.num_steps == 5 and tiny.num_accepted([stat]) == 16 - 1  # the last step has room for 4 tokens in all


def own(made: Engine) -> LayerRunner:
    runner = tiny.inner(made).runner
    assert isinstance(runner, LayerRunner)
    return runner


# -- the search -------------------------------------------------------------------------------------------------------


def test_the_search_finds_the_layers_that_matter(sparse: Decoder) -> None:
    made = tiny.engine(sparse, config(None))
    runner = own(made)
    assert runner.layers == (0, 2, 5) and not set(USEFUL) <= set(runner.layers)
    wanted = tiny.groups(3, temperature=0.0)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.plain(sparse, wanted)
    assert set(USEFUL) < set(runner.layers) and len(runner.layers) == 3
    assert sum(stat.num_tokens for stat in stats) > 2.5 * sum(stat.num_steps for stat in stats)


def test_there_is_no_search_where_layers_have_a_part_of_each_token(tmp_path: Path) -> None:
    llm = LLM(str(factory.make_checkpoint("gemma4-wide", tmp_path)), threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    plain, drafted = (
        made.generate([[5, 6, 7, 8, 5, 6]], params)[0].outputs[0]
        for made in (llm, llm.with_drafter("layer_skip", adaptive=False))
    )
    assert drafted.token_ids == plain.token_ids


def test_the_search_repeats() -> None:
    runs = []
    for _ in range(2):
        made = tiny.engine(tiny.target(NUM_LAYERS), config(None))
        runs.append((tiny.run(made, tiny.groups(4, max_tokens=60))[0], own(made).layers))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_free", [1, 3, 20, 64])
def test_the_search_is_the_plain_recursion(num_free: int) -> None:
    """However many rows are free at a time, the layers are those of the recursion written down literally."""
    model, tokens, first, num_tokens = tiny.target(NUM_LAYERS), [(11 * i) % 90 + 3 for i in range(18)], 13, 4
    runner = factory.Runner(model, len(tokens) + 64)
    runner.span(tokens)
    before = [(kv.keys.clone(), kv.values.clone()) for kv in runner.kvs]
    sample = Sample(tokens[first : first + num_tokens], first, runner.table, len(tokens), num_free, 4)
    for num_kept in (1, 3, 5):
        assert find_layers(model, runner.kvs, sample, num_kept) == literal_search(model, tokens, first, 4, num_kept)
    known = len(tokens) // 4  # whole blocks of known tokens
    for kv, (keys, values) in zip(runner.kvs, before, strict=True):
        assert torch.equal(kv.keys[:known], keys[:known]) and torch.equal(kv.values[:known], values[:known])


def literal_search(model: Decoder, tokens: list[int], first: int, num_tokens: int, num_kept: int) -> tuple[int, ...]:
    """CLaSp's recursion over whole states, every layer application done alone by a model of one layer."""
    num_layers = len(model.parts.layers)
    left_out = num_layers - num_kept
    truth = factory.Runner(model, len(tokens)).span(tokens, hidden=range(num_layers + 1)).hidden
    truth = {index: truth[index][first : first + num_tokens] for index in truth}
    best: dict[tuple[int, int], tuple[torch.Tensor, tuple[int, ...]]] = {(0, 0): (truth[0], ())}
    for index in range(num_layers):
        for count in range(index + 2):
            options = []
            if count and (index, count - 1) in best:
                state, gone = best[index, count - 1]
                options.append((state, (*gone, index)))
            if (index, count) in best:
                state, gone = best[index, count]
                options.append((apply_layer(model, index, state, tokens, first), gone))
            best[index + 1, count] = max(options, key=lambda option: likeness(option[0], truth[index + 1]))
    return tuple(index for index in range(num_layers) if index not in best[num_layers, left_out][1])


def likeness(state: torch.Tensor, truth: torch.Tensor) -> float:
    return float(((state * truth).sum(1) / state.norm(dim=1) / truth.norm(dim=1)).mean())


def apply_layer(model: Decoder, index: int, states: torch.Tensor, tokens: list[int], first: int) -> torch.Tensor:
    """Layer `index` on each row of `states` in the place of its token, on a pool of true rows."""
    made = []
    for offset, state in enumerate(states):
        runner = factory.Runner(model, len(tokens))
        runner.span(tokens)
        position = first + offset
        rows = SequenceRows("r", runner.table, position, [0], position + 1)
        residual = state[None].clone()
        layer = model.parts.layers[index]
        batch = ForwardBatch.build([rows], 4)
        last, residual = layer(layer.enter(residual), residual, batch, runner.kvs[index])
        made.append(residual + last)
    return torch.cat(made)


# -- native chains ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_native_chains_are_the_levels(coupled: bool, temperature: float) -> None:
    """One call of the recorded layers draws the tokens, and records the q, of levels drawn in Python."""
    pytest.importorskip("forerun.kernels.cpu._native")
    model = tiny.target(NUM_LAYERS)
    sides = [drafts_of(model, native, coupled, temperature) for native in (True, False)]
    for mine, other in zip(*sides, strict=True):
        assert len(mine.tree) == mine.max_nodes and list(mine.tree.tokens) == list(other.tree.tokens)
        for node in range(len(mine.tree)):
            q, other_q = mine.tree.proposal(node), other.tree.proposal(node)
            assert (q is None) == (other_q is None) == (coupled or temperature == 0.0 or node == len(mine.tree) - 1)
            assert q is None or other_q is None or torch.equal(q, other_q)


def drafts_of(model: Decoder, native: bool, coupled: bool, temperature: float) -> list[Draft]:
    kernels = tiny.kernels() if native else select_kernels("reference")
    grower, options = TreeGrower(tiny.kernels(), coupled), {"max_draft_tokens": 6, "layers": (0, 1, 4)}
    drafter: Any = layer_skip.build(context_of(layer_skip.SPEC, model, kernels, grower, 4, **options))
    kvs = factory.new_kvs(model, 40)
    drafter.attach(kvs, ())
    assert drafter.runner.replays == native
    drafts = []
    for index in range(3):
        prompt = tuple((37 * index + 11 * i) % 90 + 3 for i in range(9 + index))
        request = Request(str(index), prompt, SamplingParams(temperature=temperature), seed=2**63 + index)
        request.block_ids, request.num_computed = list(range(10 * index, 10 * index + 10)), len(prompt) - 1
        fill(model, kvs, request)
        drafts.append(Draft(request, 2 + 2 * index))
    drafter.propose(drafts)
    return drafts


def fill(model: Model, kvs: Any, request: Request) -> None:
    """Compute all known tokens before the root."""
    span = request.token_ids[: request.root_position]
    rows = SequenceRows(request.request_id, request.block_ids, 0, span, request.root_position)
    model.forward(ForwardBatch.build([rows], 4), kvs)
