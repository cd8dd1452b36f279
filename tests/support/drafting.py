"""Watches a drafter's logits inside an engine and compares them with a reference's."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import forerun
from forerun.assemble import no_corpus
from forerun.config import DrafterConfig
from forerun.core import Request
from forerun.drafters.base import DrafterContext, DrafterSpec
from forerun.engine.engine import Engine
from forerun.kernels.ops import Kernels
from forerun.models.base import Model
from forerun.models.batch import SequenceRows
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Children, Place, TreeGrower, TreeNoise
from forerun.speculation.tree import ROOT
from tests.support import tiny
from tests.support.heads import ChainedReference, Reference, States

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


def draw_children(grower: TreeGrower, draft: Draft, logits: Tensor, width: int) -> None:
    """Draw children of the root from logits [V]."""
    [(tokens, log_chances, q)] = grower.draw([Place(draft.request, ROOT, ())], logits[None], width)
    draft.add_drawn(ROOT, tokens, log_chances, q)


def context_of(
    spec: DrafterSpec, model: Model, kernels: Kernels, grower: TreeGrower, block_size: int, max_rows: int = 64,
    **options: Any,
) -> DrafterContext:  # fmt: skip
    """What a drafter is built from in a test; a draft model is the target itself."""
    config = DrafterConfig(name=spec.name, model="itself" if spec.model else None, **options)
    return DrafterContext(spec, config, model, None, kernels, grower, block_size, max_rows, lambda _: model, no_corpus)


def overhear(made: Engine, stride: int = 7) -> Overheard:
    """Stand between the engine's drafter, of several the first, and its grower."""
    drafter = tiny.inner(made)
    ear = drafter.grower = Overheard(drafter.grower, stride)
    return ear


def assert_as_computed(ear: Overheard, reference: Reference | ChainedReference, states: States) -> None:
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

    def noted(*args: object) -> object:
        named = [Path(frame.filename) for frame in reversed(inspect.stack(context=0)[1:])]
        ours = [path.relative_to(PACKAGE).as_posix() for path in named if path.is_relative_to(PACKAGE)]
        stacks.append([file for file, _ in groupby(ours)])
        return native(*args)

    monkeypatch.setattr(_native.CpuEngine, "draft_chains", noted)
    return stacks


def root_rows(request: Request) -> SequenceRows:
    """The root alone, whose tokens before it were read."""
    root = request.root_position
    return SequenceRows(
        request_id=request.request_id,
        block_table=request.block_ids,
        start=root,
        span=(),
        tree_start=root,
        tree_tokens=request.token_ids[root:],
        tree_rows=(ROOT,),
        tree_masks=(1,),
        tree_depths=(0,),
    )


def reachable_strings(root: object) -> set[str]:
    """All that can be reached from an object without passing through code, however its state is laid out."""
    found, seen, open_ = set(), {id(root)}, [root]
    while open_:
        one = open_.pop()
        if isinstance(one, str):
            found.add(one)
        elif not isinstance(one, type | ModuleType | FunctionType):
            keys = list(one) if isinstance(one, dict) else []  # which the collector leaves out where all are strings
            news = [other for other in (*gc.get_referents(one), *keys) if id(other) not in seen]
            seen.update(map(id, news))
            open_ += news
    return found
