"""Heads beside the output layer: rows of the target's states in, logits of all depths of drafts out.

Knows: how such passes are recorded. Does not know: what a head computes, trees of its logits (`runtime.depths`, on a
device `runtime.head_trees`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import Kernels
from forerun.kernels.select import recording
from forerun.models.base import RowPasses
from forerun.models.batch import SequenceRows
from forerun.runtime.depths import can_rank, draw_depths
from forerun.runtime.head_trees import HeadTrees
from forerun.runtime.recorded import MAX_RECORDED_ROWS
from forerun.speculation.drawn import Drawn
from forerun.speculation.growth import TreeNoise

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Program


class RowRunner:
    """Implements `runtime.runner.Drawer`: by `run`, which may replay, or with whole trees by `trees`."""

    def __init__(self, passes: RowPasses, run: Callable[[Tensor, int], Tensor], trees: HeadTrees | None = None) -> None:
        self._passes = passes
        self._run = run
        self._trees = trees

    @torch.no_grad()
    def logits(self, x: Tensor, num_depths: int) -> Tensor:
        """States x [R, H] -> logits of the first depths [R, num_depths, V]; the next call may overwrite them."""
        return self._run(x, num_depths).view(x.shape[0], num_depths, self._passes.vocab_size)

    @torch.no_grad()
    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Drawer`; features [R, H]: the state each root was chosen from. No row of a root is computed."""
        assert features is not None
        if self._trees is not None and noise.by_depth is not None and all(can_rank(noise)):
            return self._trees.enqueue(features, noise.by_depth.tensors(), width)
        return draw_depths(noise, self.logits(features, min(self._passes.num_depths, noise.sizes[0])), width)


def record_rows(passes: RowPasses, kernels: Kernels) -> Callable[[Tensor, int], Tensor]:
    """The pass for every number of depths, recorded if possible; batches with more rows run eagerly."""
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
