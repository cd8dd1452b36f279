"""Passes executed op by op, and drafts drawn level by level on the host.

Knows: which rows a level's pass computes, when another level is worth its pass. Does not know: what passes compute,
which nodes are likely (`speculation.best_first`). Runners that replay passes fall back to this where they cannot, with
the same bits. What is no pass but gives logits level by level grows its trees here, too (`grow_levels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from forerun.kernels.device import to_device
from forerun.kernels.draws import ChainNoise
from forerun.kernels.ops import LayerKV
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.speculation.best_first import Candidates
from forerun.speculation.drawn import Drawn, DrawnTree
from forerun.speculation.growth import Place, TreeNoise
from forerun.speculation.tree import ROOT

# trees, the leaves of each that get children, what the rows above these gave [leaves, F] -> what rows of these give
Level = Callable[[Sequence[Candidates], Sequence[Sequence[int]], Tensor | None], PassOutput]


class EagerRunner:
    """Implements `runtime.runner.Runner`; those who replay passes build on it."""

    replays = False

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], block_size: int) -> None:
        self._passes = passes
        self._kvs = kvs
        self._block_size = block_size

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._passes.first(batch, features, self._kvs)

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """The pass over one level of drafts, fed with what the pass above gave [M, `Passes.fed_size`]."""
        return self._passes.below(batch, features, self._kvs)

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`: a level a pass, each node's logits shaped by its own path where that is asked for.

        A network that advances states draws chains, from states that are given up afterwards.
        """
        return self._draw_levels(self._batch(roots), features, noise, width)

    def _draw_levels(
        self, batch: ForwardBatch, features: Tensor | None, noise: TreeNoise, width: int
    ) -> list[DrawnTree]:
        roots, rows_of = batch.sequences, _next_root if self._passes.advances_states else _level

        def below(trees: Sequence[Candidates], leaves: Sequence[Sequence[int]], fed: Tensor | None) -> PassOutput:
            levels = zip(roots, trees, leaves, strict=True)
            return self.run_below(self._batch([rows_of(*of_tree) for of_tree in levels if of_tree[2]]), fed)

        return grow_levels(noise, width, self.run(batch, features), below)

    def _noise_at_once(self, noise: TreeNoise) -> ChainNoise | None:
        """The noise with which all levels can be drawn without the host; None if logits need more than noise."""
        needs_host = noise.must_fit(self._passes.vocab_size) or bool(self._passes.hidden_layers)
        return None if needs_host else noise.by_depth

    def _batch(self, rows: Sequence[SequenceRows]) -> ForwardBatch:
        return ForwardBatch.build(rows, self._block_size, self._passes.shift)


def grow_levels(
    noise: TreeNoise, width: int, out: PassOutput, below: Level, most_levels: int | None = None
) -> list[DrawnTree]:  # fmt: skip
    """Trees drawn level by level, the first from what the pass over the roots gave.

    `most_levels`: there are no logits for more; None: for any number.
    """
    trees = [Candidates(size, width) for size in noise.sizes]
    leaves, num_levels = [[ROOT] for _ in trees], 1
    while True:
        new = _drawn(noise, trees, leaves, out.logits, width)
        above, leaves = leaves, _next_leaves(trees, new, noise.least)
        if not any(leaves) or num_levels == most_levels:
            return [tree.finish() for tree in trees]
        out = below(trees, leaves, _gathered(out.features, _rows_above(trees, above, leaves)))
        num_levels += 1


def _drawn(
    noise: TreeNoise, trees: Sequence[Candidates], leaves: Sequence[Sequence[int]], logits: Tensor, width: int
) -> list[list[int]]:
    """The children of every tree's leaves, drawn from logits [number of leaves, V] -> their nodes."""
    of_trees = zip(noise.requests, trees, leaves, strict=True)
    places = [Place(request, node, tree.path_tokens(node)) for request, tree, nodes in of_trees for node in nodes]
    children = iter(noise.draw(places, logits, width))
    hung = zip(trees, leaves, strict=True)
    return [[child for node in nodes for child in tree.hang(node, next(children))] for tree, nodes in hung]


def _next_leaves(trees: Sequence[Candidates], new: Sequence[Sequence[int]], least: float) -> list[list[int]]:
    """The nodes just drawn that get children; none if their chances do not justify another pass."""
    kept = [(tree, tree.kept()) for tree in trees]
    leaves = [tree.useful(nodes, known) for (tree, known), nodes in zip(kept, new, strict=True)]
    if sum(tree.chance(nodes) for tree, nodes in zip(trees, leaves, strict=True)) < least:
        return [[] for _ in leaves]
    return [tree.expand(nodes, known) for (tree, known), nodes in zip(kept, leaves, strict=True)]


def _rows_above(
    trees: Sequence[Candidates], above: Sequence[Sequence[int]], leaves: Sequence[Sequence[int]]
) -> list[int]:
    """The rows of the last pass's output that these leaves hang from."""
    found, first = [], 0
    for tree, old, new in zip(trees, above, leaves, strict=True):
        rows = {node: first + index for index, node in enumerate(old)}
        found += [rows[tree.parents[node]] for node in new]
        first += len(old)
    return found


def _gathered(made: Tensor | None, rows: Sequence[int]) -> Tensor | None:
    if made is None:
        return None
    return made.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), made.device))  # [leaves, H]


def _level(root: SequenceRows, tree: Candidates, nodes: Sequence[int]) -> SequenceRows:
    """The rows of these nodes, after all known tokens."""
    paths = [tree.path(node) for node in nodes]
    return SequenceRows(
        request_id=root.request_id,
        block_table=root.block_table,
        start=root.tree_start,
        span=(),
        tree_start=root.tree_start,
        tree_tokens=[tree.tokens[node] for node in nodes],
        tree_rows=[tree.places[node] for node in nodes],
        tree_masks=[1 | sum(1 << tree.places[above] for above in path) for path in paths],
        tree_depths=[len(path) for path in paths],
    )


def _next_root(root: SequenceRows, tree: Candidates, nodes: Sequence[int]) -> SequenceRows:
    """The row of a chain's last draft as that of a known token, which advances states."""
    [node] = nodes
    at = root.tree_start + len(tree.path(node))
    return root._replace(start=at, span=(), tree_start=at, tree_tokens=[tree.tokens[node]])
