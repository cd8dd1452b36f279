"""Trees of a draft model: each is drawn from what the model says after that path, whatever was accepted before.

A tree's KV lies where its nodes were expanded, and the nodes that are kept are numbered anew; rows that are taken for
known tokens later must be those tokens'.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.assemble import no_corpus
from forerun.config import DrafterConfig
from forerun.drafters.base import DrafterContext
from forerun.drafters.registry import spec_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.decoder import Decoder
from forerun.speculation.growth import TreeGrower
from tests.models import factory
from tests.support import tiny
from tests.support.drafting import overhear

LAYERS = 2
NUM_BLOCKS, BLOCK_SIZE = 40, 4
LIMITS: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_drawn_from_the_models_own_logits(width: int, temperature: float, limits: dict[str, int]) -> None:
    model, wanted = tiny.target(LAYERS), tiny.groups(4, temperature=temperature)
    options = DrafterConfig(name="draft", model="itself", max_draft_tokens=9, tree_width=width, adaptive=False)
    made = tiny.engine(model, options, **limits)
    ear = overhear(made)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.plain(model, wanted)
    assert sum(stat.num_steps for stat in stats) < sum(stat.num_tokens for stat in stats) / 2
    heard = ear.heard[:: max(1, len(ear.heard) // 40)]
    assert len({len(path) for _, path, _ in heard}) > 1
    for known, path, row in heard:  # rows of a tree may lie in another order, and sums be rounded otherwise
        expected = last_logits(model, [*known, *path])
        assert torch.allclose(row, expected, atol=1e-5), (float((row - expected).abs().max()), len(known), path)


def last_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The model's logits [V] after these tokens, all computed in one pass over an empty pool."""
    rows = SequenceRows("alone", list(range(NUM_BLOCKS)), 0, tokens, len(tokens), span_logits=True)
    batch = ForwardBatch.build([rows], BLOCK_SIZE)
    return model.forward(batch, factory.new_kvs(model, NUM_BLOCKS, BLOCK_SIZE)).logits[-1]


def test_quick_targets_get_chains_unless_told_otherwise() -> None:
    """Levels of trees are laid out in Python, which a pass of a small model does not pay for."""
    small = tiny.target(LAYERS)

    def width(name: str, num_bytes: int | None = None, tree_width: int | None = None) -> int:
        options = DrafterConfig(name=name, model="d", tree_width=tree_width)
        model: Any = small if num_bytes is None else Weighing(num_bytes)
        grower = TreeGrower(tiny.kernels(), coupled=True)
        return DrafterContext(
            spec_of(name), options, model, None, tiny.kernels(), grower, 4, 64, lambda name: model, no_corpus
        ).width

    assert [width(name) for name in ("draft", "mtp", "ngram")] == [1, 1, 1] and width("eagle") > 1
    assert width("draft", tree_width=2) == 2
    assert all(width(name, num_bytes=10**9) > 1 for name in ("draft", "mtp", "eagle", "medusa"))


class Weighing:
    """What is asked of a target here."""

    def __init__(self, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
