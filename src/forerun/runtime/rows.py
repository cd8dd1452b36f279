"""Heads beside the output layer: rows of the target's states in, logits of all depths of drafts out, and trees of them.

Knows: how such passes are recorded, which candidates a depth has. Does not know: what a head computes, which paths are
kept (`speculation.best_first`, on a device `runtime.head_trees`).

Every node of a depth has the same logits. Where it has the same candidates, too (no noise or shaping of its own), the
likeliest paths of ranks are kept; else trees are filled level by level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.chances import LEAST_RANKS, head_log_chances
from forerun.kernels.device import all_to_host, indices_on, to_device
from forerun.kernels.ops import Kernels
from forerun.kernels.select import recording
from forerun.models.base import RowPasses
from forerun.models.batch import SequenceRows
from forerun.runtime.head_trees import HeadTrees
from forerun.runtime.recorded import MAX_RECORDED_ROWS
from forerun.speculation.best_first import Candidates, best_products
from forerun.speculation.drawn import Drawn, DrawnTree
from forerun.speculation.growth import Place, TreeNoise
from forerun.speculation.tree import ROOT

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Program

_LEVEL_WIDTH = 4  # children where a tree is filled level by level and would else end at its first


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
        can_rank = [noise.can_rank(index) for index in range(len(noise.requests))]
        if self._trees is not None and noise.by_depth is not None and all(can_rank):
            return self._trees.enqueue(features, noise.by_depth.tensors(), width)
        logits = self.logits(features, min(self._passes.num_depths, noise.sizes[0]))  # [R, depths, V]
        drawn: dict[int, DrawnTree] = {}
        for draw, wanted in ((_products, True), (_levels, False)):
            chosen = [index for index, can in enumerate(can_rank) if can is wanted]
            if chosen:
                # a copy only where some must be left out
                rows = logits if len(chosen) == len(can_rank) else logits[indices_on(chosen, logits.device)]
                drawn |= zip(chosen, draw(noise.of(chosen), rows, width), strict=True)
        return [drawn[index] for index in range(len(can_rank))]


def _products(noise: TreeNoise, logits: Tensor, width: int) -> list[DrawnTree]:
    """The likeliest paths of ranks, from logits [R, depths, V]."""
    ids, scores = noise.rank_depths(logits, max(width, LEAST_RANKS))
    is_greedy = to_device(torch.tensor([request.params.greedy for request in noise.requests]), logits.device)
    chances = head_log_chances(logits, scores, is_greedy[:, None, None])
    log_chances = chances.masked_fill(ids < 0, -torch.inf)  # also heads without an answer
    tokens, best = (ranks[:, :, :width].tolist() for ranks in all_to_host(ids, log_chances))  # [R, depths, ranks]
    return [best_products(*of_tree) for of_tree in zip(tokens, best, noise.sizes, strict=True)]


def _levels(noise: TreeNoise, logits: Tensor, width: int) -> list[DrawnTree]:
    """Node by node and level by level while there is room, from logits [R, depths, V]."""
    width = min(width, _LEVEL_WIDTH)
    trees = [Candidates(size, width) for size in noise.sizes]
    leaves = [[ROOT] for _ in trees]
    for depth in range(logits.shape[1]):
        places = [
            (index, Place(noise.requests[index], node, tree.path_tokens(node)))
            for index, (tree, nodes) in enumerate(zip(trees, leaves, strict=True))
            for node in nodes
        ]
        if not places:
            break
        rows = logits[indices_on([index for index, _ in places], logits.device), depth]  # [num_leaves, V]
        children = iter(noise.draw([place for _, place in places], rows, width))
        leaves = [tree.fill(nodes, children) for tree, nodes in zip(trees, leaves, strict=True)]
    return [tree.finish() for tree in trees]


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
