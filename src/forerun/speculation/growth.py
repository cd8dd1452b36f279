"""How draft trees grow: the one place where draft tokens are drawn and q is recorded.

Knows: a drafter's logits, the request's sampling parameters, the noise. Does not know: how a drafter computes.

Under the coupled rule children are the best of log q + G with the *target's* noise of that position, so a good
drafter guesses the very token the target will choose. Under the rejection rule they are drawn without replacement
from q with noise of their own, and q is kept beside them: a drafter only hands in logits, so it cannot report a q
that was not used.

**How likely a child is.** The target's choice is the argmax of log p / T + G, the drafter's of log q / T + G with the
same noise: they differ by the drafter's error. So a token is the safer the further its score leads the others', and its
chance is a softmax of the scores themselves. q alone says little: a token that q makes unlikely was chosen because its
noise is large, and the target sees that noise, too. (Measured on the `mini` family: docs/log.md, 2026-11-22.) At
temperature 0 there is no noise, and the same softmax is of q, sharpened, among the best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core import Request
from forerun.kernels.device import all_to_host
from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE, ChainNoise, Chains, Kernels, NoiseKeys
from forerun.speculation.late import LateDrafts
from forerun.speculation.noise import Purpose, step_position, stream_id
from forerun.speculation.sampling import ShapedRow, give_up_at, is_plain, probabilities, shape_draft
from forerun.speculation.tree import ROOT, DraftTree

# A child's chance by its rank alone, for the rejection rule, which must not prune a node by its own value. Rough
# figures: they steer cost, never correctness.
_RANK_SURVIVAL = (0.6, 0.2, 0.1, 0.05)


@dataclass(slots=True)
class Draft:
    """A tree being drafted for one request: at most `max_nodes` nodes, root included."""

    request: Request
    max_nodes: int
    num_caught_up: int = 0  # known tokens the drafter had to compute before it could draft
    tree: DraftTree = field(init=False)
    survival: list[float] = field(init=False)  # log chance of each node, the drafter's own estimate
    parts: list[Part] = field(default_factory=list)  # what the members of a portfolio proposed
    births: list[int] = field(init=False)  # index of each node in the tree of the member that proposed it first
    least: float = 0.0  # chance that nodes at the ends are right, of a call's drafts together, worth another level
    may_be_late: bool = False  # the step reads its tokens with the target's choices, see `speculation.late`
    late: LateDrafts | None = None  # what it waits for

    def __post_init__(self) -> None:
        self.tree = DraftTree(self.request.token_ids[-1])
        self.survival, self.births = [0.0], [ROOT]

    @property
    def num_free(self) -> int:
        """Nodes that may still be added."""
        return self.max_nodes - len(self.tree)

    def add_chain(self, tokens: Sequence[int], source: str) -> None:
        """Guess `tokens` one after the other below the root, as many as fit, chosen without randomness."""
        self.tree.add_chain(ROOT, tokens[: self.num_free], source)
        self.survival += [0.0] * (len(self.tree) - len(self.survival))

    def add(self, parent: int, token: int, log_survival: float, source: str) -> int:
        """Guess `token` below `parent`, chosen without randomness -> its node; there must be room for it."""
        node = self.tree.add(parent, token, source)
        if node == len(self.survival):
            self.survival.append(log_survival)
        return node

    def graft(self, part: Part, log_survival: Sequence[float]) -> None:
        """Add a member's tree as far as there is room; a node that is there already keeps its better chance."""
        self.parts.append(part)
        tree, here = part.tree, {ROOT: ROOT}
        for node in range(1, len(tree)):
            parent, token = here.get(tree.parents[node]), tree.tokens[node]
            if parent is None or (self.num_free == 0 and self.tree.child_with(parent, token) is None):
                continue
            here[node] = self.add(parent, token, log_survival[node], part.member)
            self.survival[here[node]] = max(self.survival[here[node]], log_survival[node])
            self.births += [node] * (len(self.tree) - len(self.births))
        for node, place in here.items():
            self.tree.adopt_proposal(place, tree.proposal(node))

    def keep(self, nodes: Sequence[int]) -> None:
        """Prune to `nodes`, ascending, every one with its parent. Exact only where no q was recorded."""
        self.tree = self.tree.subset(nodes)
        self.survival = [self.survival[node] for node in nodes]
        self.births = [self.births[node] for node in nodes]


@dataclass(frozen=True, slots=True)
class Part:
    """What one member of a portfolio proposed for a request."""

    member: str
    tree: DraftTree
    survival: Sequence[float]  # log chance of each node, the member's own estimate


class Leaf(NamedTuple):
    """A node whose children are to be drawn."""

    draft: Draft
    node: int


class TreeGrower:
    """Draws children for tree nodes from a drafter's logits."""

    def __init__(self, kernels: Kernels, coupled: bool) -> None:
        self._kernels = kernels
        self._coupled = coupled

    @property
    def coupled(self) -> bool:
        """Trees are grown for the coupled rule."""
        return self._coupled

    def grow(self, leaves: Sequence[Leaf], logits: Tensor, width: int, source: str) -> list[list[int]]:
        """Draw up to `width` children for every leaf from logits [num_leaves, vocab_size] -> new nodes by leaf."""
        shaped, temperatures = _shape(leaves, logits)
        num_ranks = min(max(width, NUM_RIVALS), shaped.shape[1])
        ids, scores = self._kernels.gumbel_topk(shaped, as_temperatures(temperatures), self._keys(leaves), num_ranks)
        ids, chances = all_to_host(ids, _log_chances(scores))
        return [
            self._append(
                leaf,
                ShapedRow(shaped[i], temperatures[i]) if self._records(temperatures[i]) else None,
                tokens[:width],
                log_chances,
                source,
            )
            for i, (leaf, tokens, log_chances) in enumerate(zip(leaves, ids.tolist(), chances.tolist(), strict=True))
        ]

    def _records(self, temperature: float) -> bool:
        """q must be kept beside the children."""
        return not self._coupled and temperature > 0.0

    def _keys(self, leaves: Sequence[Leaf]) -> NoiseKeys:
        pairs = [self._key(leaf) for leaf in leaves]
        return noise_keys([leaf.draft.request.seed for leaf in leaves], [p for p, _ in pairs], [s for _, s in pairs])

    def _key(self, leaf: Leaf) -> tuple[int, int]:
        """(position, stream): the target's own noise of the position, or fresh noise of this step and node."""
        request, depth = leaf.draft.request, leaf.draft.tree.depths[leaf.node]
        return self._noise_position(request, leaf.node, depth), self._stream(request)

    def _noise_position(self, request: Request, node: int, depth: int) -> int:
        if self._coupled:
            return request.root_position + depth + 1
        return step_position(request.root_position, node)

    def _stream(self, request: Request) -> int:
        return stream_id(request.sample_index, Purpose.TARGET if self._coupled else Purpose.DRAFT)

    def can_rank(self, request: Request) -> bool:
        """Whether a node's children are the same for all nodes with the same logits and depth."""
        return is_plain(request.params) and not self._records(request.params.temperature)

    def rank_depths(self, requests: Sequence[Request], logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
        """The best tokens at every depth from logits [num_requests, depths, vocab_size], for requests that `can_rank`.

        Their ids and scores, best first, as `Kernels.gumbel_topk` gives them -> each [num_requests, depths, num_ranks].
        """
        num_requests, depths, vocab_size = logits.shape
        places = [(request, depth) for request in requests for depth in range(depths)]
        keys = noise_keys(
            [request.seed for request, _ in places],
            [request.root_position + depth + 1 for request, depth in places],
            [self._stream(request) for request, _ in places],
        )
        heat = as_temperatures([request.params.temperature for request, _ in places])
        num_ranks = min(num_ranks, vocab_size)
        ids, scores = self._kernels.gumbel_topk(logits.reshape(-1, vocab_size), heat, keys, num_ranks)
        return ids.view(num_requests, depths, num_ranks), scores.view(num_requests, depths, num_ranks)

    def chain_noise(self, drafts: Sequence[Draft]) -> ChainNoise | None:
        """The noise of chains that fill `drafts`, longest first; None if a drafter's logits must be shaped first."""
        requests = [draft.request for draft in drafts]
        if not all(is_plain(request.params) for request in requests):
            return None
        lengths = [draft.num_free for draft in drafts]
        assert lengths == sorted(lengths, reverse=True) and all(len(draft.tree) == 1 for draft in drafts)
        steps = range(lengths[0])
        wide = [*(request.seed for request in requests), *(self._stream(request) for request in requests)]
        wide += [self._noise_position(request, step, step) for step in steps for request in requests]  # node = depth
        wide += [sum(length > step for length in lengths) for step in steps]
        num = len(drafts)
        parts = _signed(wide).split_with_sizes([num, num, num * len(steps), len(steps)])
        seeds, streams, positions, num_active = parts
        heat = as_temperatures([request.params.temperature for request in requests])
        return ChainNoise(heat, seeds, streams, positions.view(len(steps), num), num_active, least_of(drafts))

    def must_keep_logits(self, drafts: Sequence[Draft]) -> bool:
        """Whether q has to be recorded for one of these drafts."""
        return any(self._records(draft.request.params.temperature) for draft in drafts)

    def append_chains(self, drafts: Sequence[Draft], chains: Chains, source: str) -> None:
        """Hang chains below the roots: tokens drawn with `chain_noise`, ended by -1, and what they were drawn from."""
        for i, (draft, column) in enumerate(zip(drafts, chains.ids.T.tolist(), strict=True)):
            temperature = draft.request.params.temperature
            logits = chains.logits if self._records(temperature) else None
            for step, token in enumerate(takewhile(lambda token: token >= 0, column)):
                q = None if logits is None else ShapedRow(logits[step, i], temperature)
                self._append(Leaf(draft, step), q, [token], None, source)

    def _append(
        self, leaf: Leaf, q: ShapedRow | None, tokens: list[int], log_chances: list[float] | None, source: str
    ) -> list[int]:
        """Hang drawn tokens below a leaf; `q` is what they were drawn from, None without randomness to account for."""
        draft, node = leaf
        kept = [token for token in tokens if token >= 0][: draft.num_free]
        if not kept:
            return []
        new = draft.tree.draw_children(node, kept, probabilities(q) if q is not None else None, source)
        draft.survival += _child_survival(draft.survival[node], len(new), None if q is not None else log_chances)
        return new


def _child_survival(parent: float, num: int, log_chances: list[float] | None) -> list[float]:
    """Log chances of the first children, where any pruning is exact; else (None) from their rank alone."""
    if log_chances is None:
        return [parent + math.log(_RANK_SURVIVAL[min(rank, len(_RANK_SURVIVAL) - 1)]) for rank in range(num)]
    return [parent + min(chance, 0.0) for chance in log_chances[:num]]


def _log_chances(scores: Tensor) -> Tensor:
    """Of the best scores [R, ranks] of rows, best first; estimates only: they steer what is tried, never the text."""
    scaled = scores / RIVALS_SCALE
    return scaled - scaled[:, :NUM_RIVALS].logsumexp(1, keepdim=True)


def _shape(leaves: Sequence[Leaf], logits: Tensor) -> tuple[Tensor, list[float]]:
    """Logits under each leaf's own parameters and prefix, and the temperature that is left to apply."""
    if all(is_plain(leaf.draft.request.params) for leaf in leaves):
        return logits, [leaf.draft.request.params.temperature for leaf in leaves]
    give_up_s = give_up_at()
    rows = [
        shape_draft(logits[i], leaf.draft.request, leaf.draft.tree.path_tokens(leaf.node), give_up_s)
        for i, leaf in enumerate(leaves)
    ]
    return torch.stack([row.logits for row in rows]), [row.temperature for row in rows]  # [num_leaves, vocab_size]


def least_of(drafts: Sequence[Draft]) -> float:
    """The chance from which another level of these drafts is drawn."""
    return min(draft.least for draft in drafts)


def noise_keys(seeds: Sequence[int], positions: Sequence[int], streams: Sequence[int]) -> NoiseKeys:
    """Keys as tensors; 64-bit seeds keep their bits."""
    return NoiseKeys(*_signed([*seeds, *positions, *streams]).split_with_sizes([len(seeds)] * 3))  # each [R]


def _signed(values: Sequence[int]) -> Tensor:
    """64-bit words by their bits -> [len(values)] int64."""
    return torch.from_numpy(np.array([v - (1 << 64) if v >> 63 else v for v in values], dtype=np.int64))


def as_temperatures(values: Sequence[float]) -> Tensor:
    """Temperatures as the kernels take them -> [R] float64."""
    return torch.from_numpy(np.array(values, dtype=np.float64))
