"""Which nodes of a growing tree are expanded: likely ones, as long as a level is worth its pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.kernels.ops import RIVALS_SCALE, LayerKV
from forerun.kernels.reference import ReferenceKernels
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.eager import EagerRunner
from forerun.speculation.best_first import Candidates
from forerun.speculation.draft import Draft, hand_over
from forerun.speculation.growth import Children, TreeGrower
from forerun.speculation.tree import ROOT
from tests.support.drafting import root_rows


class Flat:
    """Gives every row the same logits, and counts the rows of every pass."""

    def __init__(self, chances: Sequence[float]) -> None:
        self._logits = torch.tensor(chances).log() * RIVALS_SCALE  # [V]: tokens are drawn with these chances
        self.num_rows: list[int] = []

    def run(self, batch: ForwardBatch, _: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
        self.num_rows.append(batch.num_rows)
        return PassOutput(self._logits.expand(batch.num_rows, -1))


def grown(flat: Flat, least: float, num_requests: int) -> tuple[list[Draft], list[set[int]]]:
    """Trees of two nodes a draft, and which of their nodes were computed."""
    params = SamplingParams(temperature=0.0)
    requests = [Request(f"{i}", (1, 2), params, seed=0, block_ids=[0, 1]) for i in range(num_requests)]
    drafts = [Draft(request, 7, least=least) for request in requests]
    grower, runner = TreeGrower(ReferenceKernels(), True), EagerRunner(Passes(flat.run, flat.run, 4), (), 8)
    drawn = runner.draw([root_rows(request) for request in requests], None, grower.noise(drafts), 2)
    return drafts, hand_over(drafts, drawn)


def test_the_likeliest_are_expanded() -> None:
    tree = Candidates(num_kept=6, width=2)
    new = tree.hang(ROOT, Children([10, 11, 12], [math.log(chance) for chance in (0.2, 0.5, 0.1)], None))
    kept = tree.kept()
    assert tree.expand(tree.useful(new, kept), kept) == [2, 1]  # their rows are given out in that order


@pytest.mark.parametrize(("least", "num_passes"), [(0.71, 1), (0.69, 2)])
def test_a_level_is_left_out_where_its_leaves_are_seldom_right_together(least: float, num_passes: int) -> None:
    flat = Flat([0.1, 0.2, 0.5, 0.2])
    drafts, computed = grown(flat, least, 1)
    assert flat.num_rows == [1, 2][:num_passes]
    assert computed == [{ROOT} if num_passes == 1 else {ROOT, 1, 2}]
    assert list(drafts[0].tree.tokens)[:3] == [2, 2, 1]  # what was drawn is kept, expanded or not


@pytest.mark.parametrize(("least", "num_passes"), [(1.41, 1), (1.39, 2)])
def test_requests_share_a_level(least: float, num_passes: int) -> None:
    flat = Flat([0.1, 0.2, 0.5, 0.2])
    grown(flat, least, 2)
    assert flat.num_rows == [2, 4][:num_passes]
