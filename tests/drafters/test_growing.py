"""Which nodes of a growing tree are expanded: likely ones, as long as a level is worth its pass."""

from __future__ import annotations

import math

import pytest

from forerun.core import Request, SamplingParams
from forerun.drafters.growing import Growth
from forerun.speculation.growth import Draft
from forerun.speculation.tree import ROOT


def grown(chances: list[float], least: float, num_drafts: int = 6) -> tuple[Growth, list[int]]:
    """A tree with children of these chances below its root, and which of them are to be expanded."""
    draft = Draft(Request("r", (1, 2), SamplingParams(), seed=0), 1 + num_drafts)
    growth = Growth(draft, 2, least)
    new = [growth.scratch.add(ROOT, 10 + i, math.log(chance), "x") for i, chance in enumerate(chances)]
    return growth, growth.next_leaves(new)


def test_the_likeliest_are_expanded() -> None:
    assert grown([0.2, 0.5, 0.1], least=0.0)[1] == [2, 1]  # their rows are given out in that order


@pytest.mark.parametrize(("least", "expected"), [(0.69, [2, 1]), (0.71, [])])
def test_a_level_is_left_out_where_its_leaves_are_seldom_right_together(least: float, expected: list[int]) -> None:
    growth, leaves = grown([0.2, 0.5, 0.1], least)
    assert leaves == expected
    assert growth.finish() >= {ROOT}
    assert list(growth.draft.tree.tokens) == [2, 10, 11, 12]  # what was drawn is kept, expanded or not
