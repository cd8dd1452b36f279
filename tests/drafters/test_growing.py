"""Which nodes of a growing tree are expanded: likely ones, as long as a level is worth its pass."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.drafters.growing import Grove
from forerun.kernels.ops import RIVALS_SCALE
from forerun.kernels.reference import ReferenceKernels
from forerun.speculation.best_first import Candidates
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children, TreeGrower
from forerun.speculation.tree import ROOT


def drafts_of(least: float, num_requests: int) -> list[Draft]:
    params = SamplingParams(temperature=0.0)
    return [Draft(Request(f"{i}", (1, 2), params, seed=0), 7, least=least) for i in range(num_requests)]


def logits_of(chances: list[float]) -> torch.Tensor:
    """A row [V] from which tokens are drawn with these chances."""
    return torch.tensor(chances).log() * RIVALS_SCALE


def test_the_likeliest_are_expanded() -> None:
    tree = Candidates(root_token=2, num_kept=6, width=2)
    new = tree.hang(ROOT, Children([10, 11, 12], [math.log(chance) for chance in (0.2, 0.5, 0.1)], None))
    kept = tree.kept()
    assert tree.expand(tree.useful(new, kept), kept) == [2, 1]  # their rows are given out in that order


@pytest.mark.parametrize(("least", "is_worth"), [(0.69, True), (0.71, False)])
def test_a_level_is_left_out_where_its_leaves_are_seldom_right_together(least: float, is_worth: bool) -> None:
    drafts = drafts_of(least, 1)
    grove = Grove(TreeGrower(ReferenceKernels(), True), drafts, 2, "x")
    grove.grow(logits_of([0.1, 0.2, 0.5, 0.2])[None])
    assert bool(grove.rows()) is is_worth
    assert grove.finish() == [{ROOT, 1, 2} if is_worth else {ROOT}]
    assert list(drafts[0].tree.tokens) == [2, 2, 1]  # what was drawn is kept, expanded or not


@pytest.mark.parametrize(("least", "is_worth"), [(1.39, True), (1.41, False)])
def test_requests_share_a_level(least: float, is_worth: bool) -> None:
    grove = Grove(TreeGrower(ReferenceKernels(), True), drafts_of(least, 2), 2, "x")
    grove.grow(logits_of([0.1, 0.2, 0.5, 0.2]).expand(2, 4))
    assert len(grove.rows()) == 2 * is_worth
