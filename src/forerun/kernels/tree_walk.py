"""Walking down draft trees by the coupled rule: the reference, for kernels that choose the tokens of all nodes at once.

Knows: nodes, rows of logits, noise keys. Does not know: requests, parameters that shape logits; whose rule this is
(`speculation.verify`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels.device import indices_on, to_host
from forerun.kernels.draws import PlainTree, words
from forerun.kernels.ops import Kernels, NoiseKeys


def walk_trees(kernels: Kernels, logits: Tensor, trees: Sequence[PlainTree]) -> list[tuple[tuple[int, ...], int]]:
    """See `Kernels.walk_trees`."""
    if not trees:
        return []
    rows = [tree.first_row + row for tree in trees for row in range(len(tree.verified))]
    picked = logits if rows == list(range(len(logits))) else logits[indices_on(rows, logits.device)]  # [nodes, V]
    heat = torch.tensor([tree.temperature for tree in trees for _ in tree.verified], dtype=torch.float64)
    tokens = iter(to_host(kernels.gumbel_argmax(picked, heat, _keys(trees))).tolist())
    return [_walk(tree, [next(tokens) for _ in tree.verified]) for tree in trees]


def _keys(trees: Sequence[PlainTree]) -> NoiseKeys:
    """Of the token after every verified node."""
    keys = [(tree.seed, tree.position + depth, tree.stream) for tree in trees for depth in _depths(tree)]
    return NoiseKeys(*(words(column) for column in zip(*keys, strict=True)))  # each [nodes]


def _depths(tree: PlainTree) -> list[int]:
    """Of the verified nodes, whose parents come before them and are verified, too."""
    depths = {0: 0}
    for node in tree.verified[1:]:
        depths[node] = depths[tree.parents[node]] + 1
    return list(depths.values())


def _walk(tree: PlainTree, chosen: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Along the tokens chosen after every verified node, as far as the tree goes."""
    after = dict(zip(tree.verified, chosen, strict=True))
    children = {(tree.parents[node], tree.tokens[node]): node for node in tree.verified[1:]}
    nodes = [0]
    while (child := children.get((nodes[-1], after[nodes[-1]]))) is not None:
        nodes.append(child)
    return tuple(nodes), after[nodes[-1]]
