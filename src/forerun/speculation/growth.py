"""How draft trees grow: the one place where draft tokens are drawn and q is recorded.

Knows: a drafter's logits, the request's sampling parameters, the noise. Does not know: how a drafter computes.

Under the coupled rule children are the best of log q + G with the *target's* noise of that position, so a good
drafter guesses the very token the target will choose. Under the rejection rule they are drawn without replacement
from q with noise of their own, and q is kept beside them: a drafter only hands in logits, so it cannot report a q
that was not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core import Request
from forerun.kernels.ops import Kernels, NoiseKeys
from forerun.speculation.noise import Purpose, step_position, stream_id
from forerun.speculation.sampling import ShapedRow, probabilities, shape_row
from forerun.speculation.tree import ROOT, DraftTree

# Widths below one come from the rejection rule's need to decide how much to draw before seeing what was drawn: a
# child's chance by its rank alone. Rough figures; they steer cost, never correctness.
_RANK_SURVIVAL = (0.6, 0.2, 0.1, 0.05)


@dataclass(slots=True)
class Draft:
    """A tree being drafted for one request: at most `max_nodes` nodes, root included."""

    request: Request
    max_nodes: int
    tree: DraftTree = field(init=False)
    survival: list[float] = field(init=False)  # log chance of each node, the drafter's own estimate

    def __post_init__(self) -> None:
        self.tree = DraftTree(self.request.token_ids[-1])
        self.survival = [0.0]

    @property
    def num_free(self) -> int:
        """Nodes that may still be added."""
        return self.max_nodes - len(self.tree)

    def add_chain(self, tokens: Sequence[int], source: str) -> None:
        """Guess `tokens` one after the other below the root, as many as fit, chosen without randomness."""
        self.tree.add_chain(ROOT, tokens[: self.num_free], source)
        self.survival += [0.0] * (len(self.tree) - len(self.survival))


class Leaf(NamedTuple):
    """A node whose children are to be drawn."""

    draft: Draft
    node: int


class TreeGrower:
    """Draws children for tree nodes from a drafter's logits."""

    def __init__(self, kernels: Kernels, coupled: bool) -> None:
        self._kernels = kernels
        self._coupled = coupled

    def grow(self, leaves: Sequence[Leaf], logits: Tensor, width: int, source: str) -> list[list[int]]:
        """Draw up to `width` children for every leaf from logits [num_leaves, vocab_size] -> new nodes by leaf."""
        rows = [
            shape_row(logits[i], leaf.draft.request, leaf.draft.tree.path_tokens(leaf.node))
            for i, leaf in enumerate(leaves)
        ]
        stacked = (
            logits
            if all(r.logits.data_ptr() == logits[i].data_ptr() for i, r in enumerate(rows))
            else (
                torch.stack([row.logits for row in rows])  # [num_leaves, vocab_size]
            )
        )
        if width == 1:
            ids = self._kernels.gumbel_argmax(stacked, _temperatures(rows), self._keys(leaves))
            return [
                self._append(leaf, row, [token], None, source)
                for leaf, row, token in zip(leaves, rows, ids.tolist(), strict=True)
            ]
        ids, scores = self._kernels.gumbel_topk(stacked, _temperatures(rows), self._keys(leaves), width)
        return [
            self._append(leaf, row, tokens, values, source)
            for leaf, row, tokens, values in zip(leaves, rows, ids.tolist(), scores.tolist(), strict=True)
        ]

    def _keys(self, leaves: Sequence[Leaf]) -> NoiseKeys:
        pairs = [self._key(leaf) for leaf in leaves]
        return noise_keys([leaf.draft.request.seed for leaf in leaves], [p for p, _ in pairs], [s for _, s in pairs])

    def _key(self, leaf: Leaf) -> tuple[int, int]:
        """(position, stream): the target's own noise of the position, or fresh noise of this step and node."""
        request = leaf.draft.request
        if self._coupled:
            position = request.root_position + leaf.draft.tree.depths[leaf.node] + 1
            return position, stream_id(request.sample_index, Purpose.TARGET)
        return step_position(request.root_position, leaf.node), stream_id(request.sample_index, Purpose.DRAFT)

    def _append(
        self, leaf: Leaf, row: ShapedRow, tokens: list[int], scores: list[float] | None, source: str
    ) -> list[int]:
        draft, node = leaf
        kept = [token for token in tokens if token >= 0][: draft.num_free]
        if not kept:
            return []
        random = not self._coupled and row.temperature > 0.0
        new = draft.tree.draw_children(node, kept, probabilities(row) if random else None, source)
        draft.survival += self._child_survival(draft.survival[node], len(new), scores, random)
        return new

    def _child_survival(self, parent: float, num: int, scores: list[float] | None, by_rank: bool) -> list[float]:
        """Log chances of the children: from their scores where any pruning is exact, else from their rank alone."""
        if scores is None or by_rank:
            return [parent + math.log(_RANK_SURVIVAL[min(rank, len(_RANK_SURVIVAL) - 1)]) for rank in range(num)]
        weights = [math.exp(score - scores[0]) for score in scores[:num]]
        return [parent + math.log(max(weight / sum(weights), 1e-9)) for weight in weights]


def noise_keys(seeds: Sequence[int], positions: Sequence[int], streams: Sequence[int]) -> NoiseKeys:
    """Keys as tensors; 64-bit seeds keep their bits."""
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return NoiseKeys(*torch.tensor([signed, positions, streams], dtype=torch.int64).unbind(0))  # each [R]


def _temperatures(rows: Sequence[ShapedRow]) -> Tensor:
    return torch.tensor([row.temperature for row in rows], dtype=torch.float64)  # [R]
