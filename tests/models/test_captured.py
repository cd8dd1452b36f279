"""Captured passes: what is filled up changes nothing, a size is captured once, and what does not fit goes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.kernels.triton.graphs import ROW_SIZES, LastUsed, Result, size_for
from forerun.models.base import PassOutput, passes_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.loader import load_model
from forerun.runtime.bind import bind
from tests.models import factory

BLOCK = 4


class Replayed:
    """What a graph does, on the host: runs again and writes into the tensors of the first run."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        self.num_captures += 1
        made: Any = run()

        def replay() -> None:
            self.num_replays += 1
            again: Any = run()
            made.logits.copy_(again.logits)
            for layer, state in again.hidden.items():
                made.hidden[layer].copy_(state)

        return made, replay


class Both:
    """A model, the same captured, and a pool for each."""

    def __init__(self, folder: Path, hidden: Sequence[int]) -> None:
        kernels = factory.make_kernels()
        self.model: Any = load_model(folder, kernels).model
        self.pools = [[_pool(spec) for spec in self.model.kv_specs] for _ in range(2)]
        self.capture, self.hidden = Replayed(), tuple(hidden)
        self.captured = bind(passes_of(self.model, self.hidden), kernels, self.pools[1], BLOCK, self.capture)

    def run(self, *rows: SequenceRows) -> tuple[PassOutput, PassOutput]:
        batch = ForwardBatch.build(rows, BLOCK)
        plain = self.model.forward(batch, self.pools[0], self.hidden)
        return plain, self.captured.run(batch)


def _pool(spec: Any) -> Any:
    from forerun.kernels.ops import LayerKV

    return LayerKV.zeros(24, spec.num_kv_heads, spec.head_dim, BLOCK, spec.dtype, spec.latent)


def tree(
    request: str, table: Sequence[int], known: int, tokens: Sequence[int], start: int | None = None
) -> SequenceRows:
    """Known tokens from `start` on, then a root with the other tokens as its children."""
    masks = [1, *(1 | 1 << node for node in range(1, len(tokens)))]
    start = known if start is None else start
    span = [3 + position for position in range(start, known)]
    return SequenceRows(
        request, table, start, span, known, tokens, range(len(tokens)), masks, [0] + [1] * (len(tokens) - 1)
    )


@pytest.mark.parametrize("case", ["qwen3", "mixtral", "deepseek"])
def test_a_filled_up_batch_gives_the_bits_of_its_own_rows(case: str, tmp_path: Path) -> None:
    both = Both(factory.make_checkpoint(case, tmp_path), (0, 1))
    steps = [
        (tree("a", range(6), 7, (5, 6, 7), start=0),),  # a prompt: most rows want no logits
        (tree("a", range(6), 8, (5, 6, 7)),),
        (tree("a", range(6), 9, (9, 4)), tree("b", range(6, 10), 0, (8, 8, 2))),
        (tree("a", range(6), 10, (1, 2, 3)),),
        (tree("b", range(6, 10), 1, (1,)), tree("a", range(6), 11, (7,)), tree("c", range(10, 12), 0, (3, 5, 6))),
    ]
    for rows in steps:
        plain, captured = both.run(*rows)
        assert torch.equal(captured.logits, plain.logits)
        assert all(torch.equal(captured.hidden[layer], plain.hidden[layer]) for layer in both.hidden)
        for mine, theirs in zip(*both.pools, strict=True):
            assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    assert (both.capture.num_captures, both.capture.num_replays) == (3, 1)  # 4 rows of 1, 8 of 2, 8 of 4 sequences


def test_states_are_the_callers_to_keep(tmp_path: Path) -> None:
    both = Both(factory.make_checkpoint("llama", tmp_path), (1,))
    _, first = both.run(tree("a", range(6), 0, (5, 6)))
    kept = first.hidden[1].clone()
    both.run(tree("a", range(6), 0, (9, 8)))
    assert both.capture.num_replays == 1 and torch.equal(first.hidden[1], kept)


def test_sizes() -> None:
    assert size_for(0, 1, 1) is None and size_for(ROW_SIZES[-1] + 1, 1, 1) is None
    assert size_for(1, 1, 1) == (1, 1, 512)
    assert size_for(17, 3, 513) == (32, 4, 1024)
    assert size_for(65, 65, 5000) == (96, 128, 8192)
    for num_rows in range(1, 257):
        size = size_for(num_rows, 1, 512)
        assert size is not None and num_rows <= size.num_rows <= max(2 * num_rows, 16) and size.max_visible == 512


def test_what_was_used_last_is_kept() -> None:
    kept: LastUsed[int, str] = LastUsed(2)
    kept.put(1, "one")
    kept.put(2, "two")
    assert kept.get(1) == "one"
    kept.put(3, "three")
    assert [kept.get(key) for key in (1, 2, 3)] == ["one", None, "three"]
