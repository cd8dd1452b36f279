"""Everything a model computes with lies where its kernels run, shown on torch's meta device, which has no numbers.

An op of torch on tensors of two devices raises, and the kernels here look at every tensor they are given.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cache.kv_cache import KVCache, Move
from forerun.cache.states import RecurrentStates
from forerun.kernels.gates import inner_size
from forerun.kernels.ops import LayerKV
from forerun.kernels.ranks import Ranks
from forerun.kernels.recurrent_ops import Walk
from forerun.kernels.reference import ReferenceHeads, ReferenceKernels, ReferenceLinear
from forerun.layers.embedding import TableEmbedding
from forerun.models.base import CommittedPath, KeepsSlots, state_specs_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.loader import load_model
from tests.models import factory
from tests.support.ranks import on_ranks

META = torch.device("meta")


class MetaKernels(ReferenceKernels):
    """Shapes alone; every tensor an op gets must be on the meta device."""

    name, device = "meta", META

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name not in SHAPES:
            return found

        def op(*given: Any, **named: Any) -> Any:
            assert not [t for t in tensors_of((given, named)) if t.device != META], name
            self.seen.add(name)
            return SHAPES[name](*given)

        return op

    def pack_linear(self, weight: Tensor) -> ReferenceLinear:
        return ReferenceLinear(weight.to(META))

    def pack_heads(self, weight: Tensor) -> ReferenceHeads:
        return ReferenceHeads(weight.to(META))

    def pack_experts(self, gate_up: Any, down: Any, activation: str, *_: Any) -> Any:
        return (gate_up, down)


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device=META)


def like_first(x: Tensor, *_: Any) -> Tensor:
    return empty(*x.shape)


SHAPES: dict[str, Any] = {
    "linear": lambda x, weight, bias=None: empty(x.shape[0], weight.shape[0]),
    "embedding": lambda ids, table: empty(len(ids), table.shape[1]),
    "rms_norm": like_first,
    "add_rms_norm": like_first,
    "scaled": like_first,
    "gated_act": lambda x, activation: empty(x.shape[0], inner_size(x.shape[1], activation)),
    "rope_and_cache": lambda *_: None,
    "latent_rope_and_cache": lambda *_: None,
    "attention": lambda qkv, heads, *_: empty(qkv.shape[0], heads.num_q * heads.head_dim),
    "latent_attention": lambda queries, layout, *_: empty(queries.shape[0], layout.num_heads * layout.rank),
    "linear_heads": lambda x, w: empty(x.shape[0], x.shape[1] + w.shape[0] * (w.shape[1] - w.shape[2])),
    "route": like_first,
    "experts": like_first,
    "move_rows": lambda *_: None,
    "causal_conv": like_first,
    "gated_delta": lambda qkv, gates, heads, *_: empty(len(qkv), heads.values_size),
    "mamba2": lambda rows, steps, heads, *_: empty(len(rows), heads.values_size),
}


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor inside."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    return [t for part in value for t in tensors_of(part)] if isinstance(value, (tuple, list)) else []


def batch() -> ForwardBatch:
    """A span of three tokens, then a root with two children."""
    rows = SequenceRows("", (2, 0), 0, (5, 6, 7), 3, (8, 9, 4), (0, 1, 2), (1, 3, 5), (0, 1, 1))
    return ForwardBatch.build([rows], 4)


@pytest.mark.parametrize("case", ["llama-tied-biased", "qwen3", "mixtral", "qwen2-moe", "deepseek", "gpt-oss"])
def test_a_forward_stays_on_the_device_of_its_kernels(case: str, tmp_path: Path) -> None:
    kernels: Any = MetaKernels()
    model: Any = load_model(factory.make_checkpoint(case, tmp_path), kernels).model
    pool = KVCache(kernels, model.kv_specs, 3, 4)
    assert all(tensor.device == META for tensor in tensors_of(pool.layers))
    out = model.forward(batch(), pool.layers, (0, 1))
    assert model.device == out.logits.device == META and out.logits.shape == (3, factory.VOCAB_SIZE)
    assert out.hidden[1].device == META and {"linear", "add_rms_norm"} < kernels.seen
    pool.commit([Move((0, 1), (3, 5), (3, 4))])
    assert "move_rows" in kernels.seen


@pytest.mark.parametrize(
    ("case", "num_stages"),
    [("llama-tied-biased", 2), ("olmo2", 1), ("qwen3.5", 1), ("lfm2", 1), ("falcon-h1-norm", 2), ("phi3", 2)],
)
def test_parts_of_ranks_stay_on_the_device_of_their_kernels(
    case: str, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of shards and of stages, and what they hand on; not of experts, whose rows the host has to know."""
    monkeypatch.setattr(TableEmbedding, "_rows", lambda self, ids: empty(len(ids), self.shape[1]))
    folder = factory.make_checkpoint(case, tmp_path)

    def run(ranks: Ranks) -> None:
        for index in range(num_stages):
            kernels: Any = MetaKernels()
            model: Any = load_model(folder, kernels, ranks=ranks, stage=(index, num_stages)).model
            sent = list[Tensor]()
            model.neighbours = SimpleNamespace(send=sent.append, receive=lambda shape: empty(*shape))
            pool = KVCache(kernels, model.kv_specs, 3, 4)
            if isinstance(model, KeepsSlots):
                model = model.with_states(RecurrentStates(state_specs_of(model), 1, META))
            out = model.forward(batch(), pool.layers, (0, 1))
            assert all(each.device == META and each.dtype == torch.float32 for each in (out.logits, *sent))
            assert len(sent) == (index + 1 < num_stages)

    on_ranks(2, run)


@pytest.mark.parametrize(
    "case", ["qwen3.5", "qwen3-next", "lfm2", "granite-hybrid-moe", "falcon-h1-norm", "nemotron-h", "kimi-linear"]
)
def test_recurrent_layers_stay_on_the_device_of_their_kernels(case: str, tmp_path: Path) -> None:
    """Passes, replays of accepted drafts, states that are kept."""
    kernels: Any = MetaKernels()
    model: Any = load_model(factory.make_checkpoint(case, tmp_path), kernels).model
    pool, states = KVCache(kernels, model.kv_specs, 3, 4), RecurrentStates(model.state_specs, 3, META)
    own = model.with_states(states)
    out = own.forward(batch(), pool.layers, (0, 1))
    assert out.logits.device == out.hidden[1].device == META and "causal_conv" in kernels.seen
    own.commit([CommittedPath("", (0, 2))])
    states.keep("", 0, in_answer=False)
    states.restore("s", 0)
    assert all(tensor.device == META for tensor in tensors_of(states.layers))
    assert states.begin("", 5) != states.begin("s", 5)


def test_a_batch_goes_over_whole() -> None:
    host = batch()
    assert host.on(torch.device("cpu")) is host
    moved = host.on(META)
    for field in fields(ForwardBatch):
        there, here = tensors_of(getattr(moved, field.name)), tensors_of(getattr(host, field.name))
        assert [(t.device, t.dtype, t.shape) for t in there] == [(META, t.dtype, t.shape) for t in here]
    assert moved.rows.max_visible == host.rows.max_visible and moved.sequences is host.sequences


def test_columns_that_go_over_together_come_apart_again() -> None:
    from forerun.models.batch import _moved

    columns = [torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64), torch.tensor([3])]
    assert all(torch.equal(a, b) for a, b in zip(_moved(columns, torch.device("cpu")), columns, strict=True))


def test_a_walk_goes_over_whole() -> None:
    for parents in ([-1, 0, 1, 1], [-1, 0]):  # with drafts and without
        host = Walk.build([4, 2], [2, 1], [parents, [-1]])
        moved = host.on(torch.device("cpu", 0))  # another name of the same device, so that everything is copied
        assert host.on(torch.device("cpu")) is host is not moved
        for there, here in zip(tensors_of(moved), tensors_of(host), strict=True):
            assert torch.equal(there, here) and there.dtype is here.dtype


def test_a_pool_is_made_where_it_is_asked_for() -> None:
    for dtype in (torch.bfloat16, torch.int8):
        pool = LayerKV.zeros(2, 1, 8, 4, dtype, device=META)
        assert all(tensor.device == META for tensor in tensors_of(pool))
