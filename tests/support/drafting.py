"""Watches a drafter's logits inside an engine and compares them with a reference's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from torch import Tensor

import forerun
from forerun.engine.engine import Engine
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children, Place, TreeGrower, TreeNoise
from forerun.speculation.tree import ROOT
from tests.support import tiny
from tests.support.heads import Reference, States

PACKAGE = Path(forerun.__file__).parent


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


def overhear(made: Engine, stride: int = 7) -> Overheard:
    """Stand between the engine's drafter, of several the first, and its grower."""
    drawer = tiny.inner(made)._drawer
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


def watch_chains(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Note every native call that drafts chains: the files of ours on its call stack, outermost first."""
    from forerun.kernels.cpu import _native

    stacks: list[list[str]] = []
    native = _native.CpuEngine.draft_chains

    def noted(*args: object) -> None:
        named = [Path(frame.filename) for frame in reversed(inspect.stack(context=0)[1:])]
        ours = [path.relative_to(PACKAGE).as_posix() for path in named if path.is_relative_to(PACKAGE)]
        stacks.append([file for file, _ in groupby(ours)])
        native(*args)

    monkeypatch.setattr(_native.CpuEngine, "draft_chains", noted)
    return stacks
