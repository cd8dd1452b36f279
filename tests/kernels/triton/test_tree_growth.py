"""Trees grown by Triton's kernels: every number of every level is that of the torch version, ties and idle rows too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.triton.support import moved
from torch import Tensor

from forerun.kernels import tree_growth as plain
from forerun.kernels.tree_growth import MOST_NODES, NodeRows, TreeNodes, TreeRoom

BLOCK_SIZE = 4
WHERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def triton() -> Any:
    pytest.importorskip("triton")
    from forerun.kernels.triton import tree_growth

    return tree_growth


class Level:
    """What is drawn for a level: log chances of few values, so that many paths tie, some above 0, some of no token."""

    def __init__(self, noise: torch.Generator, num_trees: int, num_leaves: int, width: int, missing: float) -> None:
        shape = (num_trees, num_leaves, width)
        steps = torch.randint(-1, 4, shape, generator=noise).double() * -0.1
        never = torch.rand(shape, generator=noise) < missing
        self.log_chances = steps.masked_fill(never, -torch.inf).sort(dim=2, descending=True).values
        self.ids = torch.randint(0, 50, shape, generator=noise).masked_fill(self.log_chances == -torch.inf, -1)
        silent = torch.rand(num_trees, num_leaves, generator=noise) < missing  # no answer at all
        self.ids[silent] = -1
        self.log_chances[silent] = -torch.inf
        self.log_chances[torch.rand(shape, generator=noise) < missing / 4] = torch.nan  # of scores that are infinite


def room_of(noise: torch.Generator, num_trees: int) -> TreeRoom:
    starts = torch.randint(0, 9, (num_trees,), generator=noise, dtype=torch.int32)
    blocks = -(-(9 + MOST_NODES) // BLOCK_SIZE)
    tables = torch.randperm(num_trees * blocks, generator=noise).int().view(num_trees, blocks)
    return TreeRoom(starts, tables, BLOCK_SIZE, shift=1)


def on(device: str, values: Any) -> Any:
    """Tensors of a tuple there."""
    return type(values)(*(moved(value, torch.device(device)) for value in values))


def grown_alike(triton: Any, budgets: Tensor, width: int, num_levels: int, seed: int, missing: float) -> int:
    """Grow trees on both sides, compared after every level -> how often a tree had no leaf."""
    noise, num_trees, num_idle = torch.Generator().manual_seed(seed), len(budgets), 0
    room = room_of(noise, num_trees)
    there, own_budgets = on(WHERE, room), budgets.to(WHERE)
    nodes, rows = plain.new_trees(num_trees, torch.device("cpu")), None
    own, own_rows = plain.new_trees(num_trees, torch.device(WHERE)), None
    for _ in range(num_levels - 1):
        drawn = Level(noise, num_trees, nodes.leaves.shape[1], width, missing)
        ids, log_chances = drawn.ids.to(WHERE), drawn.log_chances.to(WHERE)
        nodes, rows = plain.grow_trees(nodes, budgets, drawn.ids, drawn.log_chances, room, rows)
        own, own_rows = triton.grow_trees(own, own_budgets, ids, log_chances, there, own_rows)
        assert_same(own, nodes)
        assert_same(own_rows, rows)
        num_idle += int((nodes.leaves[:, 0] < 0).sum())
    drawn = Level(noise, num_trees, nodes.leaves.shape[1], width, missing)
    most = int(budgets.max())
    kept = plain.keep_trees(nodes, budgets, drawn.ids, drawn.log_chances, most)
    found = triton.keep_trees(own, own_budgets, drawn.ids.to(WHERE), drawn.log_chances.to(WHERE), most)
    assert torch.equal(found.cpu(), kept)
    assert ((kept[0] >= 0).sum(1) <= budgets).all()
    return num_idle


def assert_same(found: TreeNodes | NodeRows, expected: TreeNodes | NodeRows) -> None:
    """Column by column, types too."""
    for name, own, other in zip(expected._fields, found, expected, strict=True):
        assert own.dtype is other.dtype and torch.equal(own.cpu(), other), name


@settings(max_examples=5, deadline=None)
@given(
    budgets=st.lists(st.integers(0, 63), min_size=1, max_size=3),
    width=st.sampled_from([1, 3, 4]),  # each is compiled where there is a GPU
    num_levels=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
    missing=st.sampled_from([0.0, 0.1, 0.6]),
)
def test_every_level_is_torchs(
    triton: Any, budgets: list[int], width: int, num_levels: int, seed: int, missing: float
) -> None:
    grown_alike(triton, torch.tensor(sorted(budgets, reverse=True)).clamp(min=0), width, num_levels, seed, missing)


@pytest.mark.parametrize(("width", "budgets"), [(16, [63, 17]), (7, [30])])
def test_wide_trees_are_torchs(triton: Any, width: int, budgets: list[int]) -> None:
    grown_alike(triton, torch.tensor(budgets), width, num_levels=3, seed=width, missing=0.02)


def test_trees_that_go_on_idly_are_torchs(triton: Any) -> None:
    num_idle = grown_alike(triton, torch.tensor([20, 9, 1, 0, 3]), width=3, num_levels=8, seed=5, missing=0.3)
    assert num_idle > 10
