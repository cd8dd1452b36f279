"""A recorded forward gives the bits of the model's own, and steps aside where it cannot serve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.kernels.select import select_kernels
from forerun.models.base import Model, Passes, PassOutput, passes_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.bind import bind
from forerun.runtime.recorded import MAX_RECORDED_ROWS
from forerun.runtime.runner import Runner
from tests.models import factory
from tests.support import mini

BLOCK_SIZE = 4
pytest.importorskip("forerun.kernels.cpu._native")


def batch(num_span: int, parents: list[int], start: int = 0) -> ForwardBatch:
    masks, depths = factory.tree_masks(parents)
    rows = SequenceRows(
        request_id="r",
        block_table=list(range(40))[::-1],
        start=start,
        span=[(7 * i) % 90 for i in range(start, start + num_span)],
        tree_start=start + num_span,
        tree_tokens=[(11 * i) % 90 for i in range(len(parents))],
        tree_rows=range(len(parents)),
        tree_masks=masks,
        tree_depths=depths,
    )
    return ForwardBatch.build([rows], BLOCK_SIZE)


@pytest.fixture(scope="module")
def models() -> tuple[Model, Runner, list, list]:  # type: ignore[type-arg]
    """The embedded target, plain and recorded, each on a pool of its own."""
    kernels, model = mini.plain().kernels, mini.plain().loaded.model
    own = factory.new_kvs(model, 40, BLOCK_SIZE)
    recorded = factory.new_kvs(model, 40, BLOCK_SIZE)
    return model, bind(passes_of(model, (0, 3)), kernels, recorded, BLOCK_SIZE), own, recorded


@pytest.mark.parametrize(
    ("num_span", "parents"), [(0, [-1]), (5, [-1, 0, 0, 1, 2]), (9, []), (3, [-1]), (MAX_RECORDED_ROWS + 6, [-1, 0])]
)
def test_bits_of_the_models_own_forward(models, num_span: int, parents: list[int]) -> None:  # type: ignore[no-untyped-def]
    model, recorded, own_kvs, recorded_kvs = models
    assert recorded.replays
    rows = batch(num_span, parents)
    plain, replayed = model.forward(rows, own_kvs, (0, 3)), recorded.run(rows)
    assert replayed.logits.shape == (len(parents), model.vocab_size)
    assert torch.equal(plain.logits, replayed.logits)
    assert all(torch.equal(plain.hidden[i], replayed.hidden[i]) for i in (0, 3))
    for a, b in zip(own_kvs, recorded_kvs, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_outputs_are_not_overwritten_by_the_next_run(models) -> None:  # type: ignore[no-untyped-def]
    _, recorded, _, _ = models
    first = recorded.run(batch(4, [-1])).logits
    kept = first.clone()
    recorded.run(batch(2, [-1, 0]))
    assert torch.equal(first, kept)


def test_the_reference_is_not_recorded() -> None:
    model = mini.plain().loaded.model
    kvs = factory.new_kvs(model, 4, BLOCK_SIZE)
    assert not bind(passes_of(model), select_kernels("reference"), kvs, BLOCK_SIZE).replays


def test_what_cannot_be_recorded_stays_as_it_is() -> None:
    model = mini.plain().loaded.model

    def odd(batch: ForwardBatch, _: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
        return PassOutput(model.forward(batch, kvs).logits * 2)

    passes = Passes(odd, odd, model.vocab_size)
    assert not bind(passes, mini.plain().kernels, factory.new_kvs(model, 4, BLOCK_SIZE), BLOCK_SIZE).replays
    assert mini.plain().generate("A")[0].finished, "the kernels compute again"
