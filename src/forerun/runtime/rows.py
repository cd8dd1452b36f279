"""Passes of heads beside the output layer: rows of the target's states in, logits of all depths out.

Knows: how such passes are recorded. Does not know: what a head computes, requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ChainNoise, Kernels
from forerun.kernels.select import recording
from forerun.models.base import RowPasses
from forerun.runtime.drawn import EnqueuedDrafts
from forerun.runtime.head_trees import HeadTrees
from forerun.runtime.recorded import MAX_RECORDED_ROWS

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Program


class RowRunner:
    """Executes them: by `run`, which may replay, and whole trees by `trees`, where levels need not be read."""

    def __init__(self, passes: RowPasses, run: Callable[[Tensor, int], Tensor], trees: HeadTrees | None = None) -> None:
        self._passes = passes
        self._run = run
        self._trees = trees

    @torch.no_grad()
    def run(self, x: Tensor, num_depths: int) -> Tensor:
        """States x [R, H] -> logits of the first depths [R, num_depths, V]; they may lie where the next call's will."""
        return self._run(x, num_depths).view(x.shape[0], num_depths, self._passes.vocab_size)

    @torch.no_grad()
    def enqueue(self, x: Tensor, noise: ChainNoise, width: int) -> EnqueuedDrafts | None:
        """Trees of up to `width` children a node below states x [R, H], the largest first; nothing is waited for.

        `noise`: of chains as long as the trees may have nodes. None where logits are read in between.
        """
        return None if self._trees is None else self._trees.enqueue(x, noise, width)


def record_rows(passes: RowPasses, kernels: Kernels) -> Callable[[Tensor, int], Tensor]:
    """The pass of every number of depths, recorded where it can be; with more rows than were recorded for, as it is."""
    try:
        programs = [_record(passes, kernels, depths) for depths in range(1, passes.num_depths + 1)]
    except KernelError:  # an op the recorder cannot write down
        return passes.run

    def run(x: Tensor, num_depths: int) -> Tensor:
        program = programs[num_depths - 1]
        if program is None or x.shape[0] > program.max_rows:
            return passes.run(x, num_depths)
        (rows,) = program.run_on(x, x.shape[0] * num_depths)
        return rows

    return run


def _record(passes: RowPasses, kernels: Kernels, num_depths: int) -> Program | None:
    """The pass of so many depths; None if the kernels cannot record."""
    options = {"feature_size": passes.feature_size, "logits_a_row": num_depths}
    with recording(kernels, MAX_RECORDED_ROWS, **options) as recorder, torch.no_grad():
        if recorder is None:
            return None
        assert recorder.inputs.features is not None
        return recorder.finish([passes.run(recorder.inputs.features, num_depths)])
