"""Trees of heads' guesses grown without the host's looking: node for node those the host's heap finds, ties alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.kernels.select import select_kernels
from forerun.models.base import RowPasses
from forerun.runtime.bind import bind_rows
from forerun.runtime.runner import Drawer
from forerun.speculation.draft import Draft, hand_over
from forerun.speculation.drawn import Drawn, PendingTrees
from forerun.speculation.growth import TreeGrower
from tests.models.test_device_trees import drafts_of, told
from tests.support.enqueued import Enqueued

VOCAB, STATE, HEADS = 23, 2, 5
KERNELS = select_kernels("reference")


class Fake:
    """Logits of few values, so that many are equal; heads that say nothing, and some that know few tokens."""

    def __init__(self, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self._table = torch.randint(-2, 3, (37, VOCAB), generator=noise).float()
        self._table[torch.rand(37, generator=noise) < 0.1] = float("nan")  # rows without an answer
        few = torch.rand(37, generator=noise) < 0.3
        self._table[few[:, None] & (torch.rand(37, VOCAB, generator=noise) < 0.85)] = -torch.inf
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, x: Tensor, num_heads: int) -> Tensor:
        """States [R, STATE] -> [R * heads, V]."""
        self.sizes.append((len(x), num_heads))
        rows = x[:, :1].long() * 5 + torch.arange(num_heads)  # [R, heads]
        return self._table[rows.flatten() % 37]


def heads(fake: Fake, capture: Enqueued | None = None) -> Drawer:
    """On a device if something captures, else on the host."""
    return bind_rows(RowPasses(fake, HEADS, VOCAB, STATE), KERNELS, capture)


def states(num: int, seed: int) -> Tensor:
    return torch.randint(0, 37, (num, STATE), generator=torch.Generator().manual_seed(seed)).float()


def draw(trees: Drawer, drafts: Sequence[Draft], x: Tensor, width: int) -> Drawn:
    drawn = trees.draw((), x, TreeGrower(KERNELS, True).noise(drafts), width)
    hand_over(drafts, drawn)
    return drawn


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=5),
    width=st.integers(1, 20),
    temperatures=st.lists(st.sampled_from([0.0, 1.0, 0.6]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_a_tree_is_the_hosts(sizes: list[int], width: int, temperatures: list[float], seed: int) -> None:
    fake, x = Fake(seed), states(len(sizes), seed)
    ours, theirs = (drafts_of(sizes, temperatures, seed) for _ in range(2))
    draw(heads(fake, Enqueued()), ours, x, width)
    draw(heads(fake), theirs, x, width)
    assert told(ours) == told(theirs)
    for draft in ours:
        chances, parents = draft.survival, draft.tree.parents
        assert all(chances[parents[node]] >= chances[node] for node in range(1, len(draft.tree)))


def test_what_verification_reads_on_the_device_is_the_tree() -> None:
    drafts, fake, x = drafts_of([9, 6, 20], [0.0, 0.7], 5), Fake(5), states(3, 5)
    enqueued = draw(heads(fake, Enqueued()), drafts, x, 3)
    assert isinstance(enqueued, PendingTrees)
    for index, draft in enumerate(drafts):
        num = len(draft.tree) - 1
        columns = (enqueued.tokens, enqueued.depths, enqueued.masks)
        on_device = [column[index, :num].tolist() for column in columns]
        assert on_device == [list(of[1:]) for of in (draft.tree.tokens, draft.tree.depths, draft.tree.masks)]
        assert (enqueued.tokens[index, num:] == -1).all()
    assert max(max(draft.tree.depths) for draft in drafts) > 1


def test_a_size_is_captured_once_whatever_comes_of_it() -> None:
    capture, fake = Enqueued(), Fake(1)
    trees = heads(fake, capture)
    for seed in range(3):
        draw(trees, drafts_of([6, 3, 3], [1.0], seed), states(3, seed), 4)
    assert (capture.num_captures, capture.num_runs) == (1, 3)
    assert fake.sizes == [(4, HEADS)] * 3  # of a size with four rows


def test_trees_of_about_the_same_size_share_a_program() -> None:
    capture, fake = Enqueued(), Fake(4)
    trees = heads(fake, capture)
    for size in (13, 16, 14, 15, 33, 48, 49, 63):
        ours, theirs = (drafts_of([size, size // 2], [1.0], size) for _ in range(2))
        draw(trees, ours, states(2, size), 3)
        draw(heads(fake), theirs, states(2, size), 3)
        assert told(ours) == told(theirs)
    assert (capture.num_captures, capture.num_runs) == (3, 8)


@pytest.mark.parametrize(("num_nodes", "num_heads"), [(1, 1), (3, 3), (60, HEADS)])
def test_no_more_heads_are_asked_than_a_tree_may_be_deep(num_nodes: int, num_heads: int) -> None:
    fake = Fake(2)
    draw(heads(fake, Enqueued()), drafts_of([num_nodes], [0.0], 0), states(1, 0), 4)
    assert fake.sizes == [(1, num_heads)]


def test_more_requests_than_any_graph_has_rows_are_drawn_as_they_come() -> None:
    capture, fake = Enqueued(), Fake(3)
    ours, theirs = (drafts_of([2] * 300, [1.0], 3) for _ in range(2))
    x = states(300, 3)
    draw(heads(fake, capture), ours, x, 3)
    draw(heads(fake), theirs, x, 3)
    assert told(ours) == told(theirs) and capture.num_runs == 0
