"""Watches a drafter's logits inside an engine and compares them with a reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children, Place, TreeGrower, TreeNoise
from forerun.speculation.tree import ROOT
from tests.support.heads import Reference, States


class Overheard(TreeGrower):
    """A grower that notes every `stride`-th row of logits with the known tokens and the path it stands for."""

    def __init__(self, inner: TreeGrower, stride: int) -> None:
        self.__dict__.update(inner.__dict__)
        self.heard: list[tuple[list[int], list[int], Tensor]] = []
        self._stride, self._count = stride, 0

    def noise(self, drafts: Sequence[Draft]) -> TreeNoise:
        """Chains are drawn level by level, too, where they can be heard."""
        return replace(super().noise(drafts), by_depth=None)

    def draw(self, places: Sequence[Place], logits: Tensor, width: int) -> list[Children]:
        for place, row in zip(places, logits, strict=True):
            self._count += 1
            if self._count % self._stride == 0:
                self.heard.append((list(place.request.token_ids), list(place.path), row.clone()))
        return super().draw(places, logits, width)


def draw_children(grower: TreeGrower, draft: Draft, logits: Tensor, width: int, source: str) -> None:
    """Draw children of the root from logits [V]."""
    [(tokens, log_chances, q)] = grower.draw([Place(draft.request, ROOT, ())], logits[None], width)
    draft.add_drawn(ROOT, tokens, log_chances, q, source)


def unguarded(made: Engine) -> Any:
    """The engine's single drafter without what keeps its errors from the engine: a test wants to see them."""
    drafter: Any = made.drafter
    made.drafter = getattr(drafter, "inner", drafter)
    return made.drafter


def overhear(made: Engine, stride: int = 7) -> Overheard:
    """Stand between the engine's drafter, of several the first, and its grower."""
    drafter = unguarded(made)
    if hasattr(drafter, "members"):
        drafter.members = tuple(getattr(member, "inner", member) for member in drafter.members)
        drafter = drafter.members[0]
    drawer = drafter._drawer
    ear = drawer._grower = Overheard(drawer._grower, stride)
    return ear


def assert_as_computed(ear: Overheard, reference: Reference, states: States) -> None:
    """Every row heard is what the reference computes, for drafts of several depths and texts of several lengths."""
    assert ear.heard
    for known, drafted, row in ear.heard[:: max(1, len(ear.heard) // 60)]:
        wanted = reference.after(known, drafted, states)
        assert torch.equal(row == -torch.inf, wanted == -torch.inf)
        finite = wanted > -torch.inf
        error = float((row[finite] - wanted[finite]).abs().max() / wanted[finite].abs().max())
        assert error < 1e-3, (error, len(known), drafted)  # rounding grows from draft to draft
    assert len({len(drafted) for _, drafted, _ in ear.heard}) > 1
    assert len({len(known) for known, _, _ in ear.heard}) > 3
