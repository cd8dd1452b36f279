"""How draft trees grow: the one place where draft tokens are drawn and q is recorded.

Knows: a drafter's logits, the request's sampling parameters, the noise. Does not know: how a drafter computes.

Under the coupled rule children are the best of log q + G with the *target's* noise of that position, so a good
drafter guesses the very token the target will choose. Under the rejection rule they are drawn without replacement
from q with noise of their own, and q is kept beside them: a drafter only hands in logits, so it cannot report a q
that was not used.

**How likely a child is.** The target's choice is the argmax of log p / T + G, the drafter's of log q / T + G with the
same noise: they differ by the drafter's error. So a token is the safer the further its score leads the others', and its
chance is a softmax of the scores themselves. q alone says little: a token that q makes unlikely was chosen because its
noise is large, and the target sees that noise, too. (Measured on the `mini` family: docs/log.md, "Trees".) At
temperature 0 there is no noise, and the same softmax is of q, sharpened, among the best tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.core import Request
from forerun.kernels.chances import rival_log_chances
from forerun.kernels.device import all_to_host
from forerun.kernels.draws import ChainNoise, words
from forerun.kernels.ops import NUM_RIVALS, Kernels, NoiseKeys
from forerun.speculation.draft import Draft
from forerun.speculation.drawn import DrawnTree
from forerun.speculation.noise import Purpose, step_position, stream_id
from forerun.speculation.sampling import ShapedRow, give_up_at, is_plain, probabilities, shape_draft

# A child's chance by its rank alone, for the rejection rule, which must not prune a node by its own value. Rough
# figures: they steer cost, never correctness.
_RANK_SURVIVAL = (0.6, 0.2, 0.1, 0.05)


class Place(NamedTuple):
    """Where children are drawn: after a path of drafted tokens."""

    request: Request
    node: int  # its number among all nodes drawn for the request in this step; 0 is the root
    path: Sequence[int]  # tokens below the root, the node's own last


class Children(NamedTuple):
    """Tokens drawn after a place, in draw order."""

    tokens: list[int]
    log_chances: list[float]  # of each given its parent; never above 0
    q: Tensor | None  # [vocab_size] float64: what they were drawn from; None: chosen without randomness


class TreeGrower:
    """Draws children for tree nodes from a drafter's logits."""

    def __init__(self, kernels: Kernels, coupled: bool, vocab_size: int | None = None) -> None:
        """`vocab_size`: columns of the target's logits; None: as many as a drafter's own. Output layers are padded, so
        models with the same tokenizer may have different numbers of rows (Qwen2.5-0.5B 151936, -7B 152064).
        """
        self._kernels = kernels
        self._coupled = coupled
        self._vocab_size = vocab_size

    @property
    def coupled(self) -> bool:
        """Whether trees are grown for the coupled rule."""
        return self._coupled

    def draw(self, places: Sequence[Place], logits: Tensor, width: int) -> list[Children]:
        """Draw up to `width` children at every place from logits [num_places, columns]."""
        shaped, temperatures = _shape(places, self.fitted(logits))
        num_ranks = min(max(width, NUM_RIVALS), shaped.shape[1])
        ids, scores = self._kernels.gumbel_topk(shaped, as_temperatures(temperatures), self._keys(places), num_ranks)
        ids, chances = all_to_host(ids, rival_log_chances(scores))
        columns = zip(ids.tolist(), chances.tolist(), shaped, temperatures, strict=True)
        return [self._children(tokens[:width], *of_place) for tokens, *of_place in columns]

    def fitted(self, logits: Tensor) -> Tensor:
        """Logits of a drafter [R, columns] over the target's tokens: those it has no row for cannot be drawn."""
        num = logits.shape[1] if self._vocab_size is None else self._vocab_size
        if num == logits.shape[1]:
            return logits
        return pad(logits, (0, num - logits.shape[1]), value=-torch.inf).contiguous()  # a negative pad cuts

    def is_narrower(self, num_columns: int) -> bool:
        """Whether logits of so many columns name tokens that the target has not."""
        return self._vocab_size is not None and self._vocab_size < num_columns

    def _children(self, tokens: list[int], log_chances: list[float], logits: Tensor, temperature: float) -> Children:
        drawn = [token for token in tokens if token >= 0]
        if self._records(temperature):
            q = probabilities(ShapedRow(logits, temperature))
            drawn = [token for token in drawn if float(q[token]) > 0.0]  # others are no draws from q: it underflowed
            return Children(drawn, by_rank(len(drawn)), q)
        return Children(drawn, [min(chance, 0.0) for chance in log_chances[: len(drawn)]], None)

    def _records(self, temperature: float) -> bool:
        """Whether q must be kept with the children."""
        return not self._coupled and temperature > 0.0

    def _keys(self, places: Sequence[Place]) -> NoiseKeys:
        """The target's own noise of the position, or fresh noise of this step and node."""
        return noise_keys(
            [place.request.seed for place in places],
            [self._noise_position(request, node, len(path)) for request, node, path in places],
            [self._stream(place.request) for place in places],
        )

    def _noise_position(self, request: Request, node: int, depth: int) -> int:
        if self._coupled:
            return request.root_position + depth + 1
        return step_position(request.root_position, node)

    def _stream(self, request: Request) -> int:
        return stream_id(request.sample_index, Purpose.TARGET if self._coupled else Purpose.DRAFT)

    def noise(self, drafts: Sequence[Draft]) -> TreeNoise:
        """The noise for the trees of these drafts, the largest first."""
        requests, sizes = [draft.request for draft in drafts], [draft.num_free for draft in drafts]
        assert sizes == sorted(sizes, reverse=True)
        records = [self._records(request.params.temperature) for request in requests]
        least = min([draft.least for draft in drafts])
        plain = all(is_plain(request.params) for request in requests)
        by_depth = self._by_depth(requests, sizes, least) if plain else None
        return TreeNoise(self, requests, sizes, records, least, by_depth)

    def _by_depth(self, requests: Sequence[Request], sizes: Sequence[int], least: float) -> ChainNoise:
        steps = range(sizes[0])
        return ChainNoise(
            [request.params.temperature for request in requests],
            [request.seed for request in requests],
            [self._stream(request) for request in requests],
            [self._noise_position(request, step, step) for step in steps for request in requests],  # node = depth
            [sum([size > step for size in sizes]) for step in steps],
            least,
        )

    def rank_depths(self, requests: Sequence[Request], logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
        """See `TreeNoise.rank_depths`."""
        num_requests, depths, _ = logits.shape
        fitted = self.fitted(logits.flatten(0, 1))  # [R * depths, vocab_size]
        places = [(request, depth) for request in requests for depth in range(depths)]
        keys = noise_keys(
            [request.seed for request, _ in places],
            [request.root_position + depth + 1 for request, depth in places],
            [self._stream(request) for request, _ in places],
        )
        heat = as_temperatures([request.params.temperature for request, _ in places])
        num_ranks = min(num_ranks, fitted.shape[1])
        ids, scores = self._kernels.gumbel_topk(fitted, heat, keys, num_ranks)
        return ids.view(num_requests, depths, num_ranks), scores.view(num_requests, depths, num_ranks)


@dataclass(frozen=True, slots=True)
class TreeNoise:
    """The noise of one call's trees, the largest first; all that a runner needs to know of the requests."""

    _grower: TreeGrower
    requests: Sequence[Request]
    sizes: Sequence[int]  # nodes each tree may have below its root
    records: Sequence[bool]  # whether q must be kept beside a tree's nodes
    least: float  # see `Draft.least`
    by_depth: ChainNoise | None  # of chains of these sizes; None if logits must be shaped by each node's path

    def of(self, chosen: Sequence[int]) -> TreeNoise:
        """The noise of some trees, ascending, to be drawn on the host."""
        return TreeNoise(
            self._grower,
            [self.requests[index] for index in chosen],
            [self.sizes[index] for index in chosen],
            [self.records[index] for index in chosen],
            self.least,
            None,
        )

    def draw(self, places: Sequence[Place], logits: Tensor, width: int) -> list[Children]:
        """See `TreeGrower`."""
        return self._grower.draw(places, logits, width)

    def must_fit(self, num_columns: int) -> bool:
        """Whether logits of so many columns must be cut before tokens are drawn from them."""
        return self._grower.is_narrower(num_columns)

    def can_rank(self, index: int) -> bool:
        """Whether a node's children are the same for all nodes of a tree with the same logits and depth."""
        return is_plain(self.requests[index].params) and not self.records[index]

    def rank_depths(self, logits: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
        """The best tokens at every depth from logits [R, depths, vocab_size], of trees that `can_rank`.

        Their ids and scores, best first, as `Kernels.gumbel_topk` gives them -> each [R, depths, num_ranks].
        """
        return self._grower.rank_depths(self.requests, logits, num_ranks)

    def chains(self, drawn: Sequence[tuple[Sequence[int], Sequence[float]]], logits: Tensor | None) -> list[DrawnTree]:
        """Chains drawn with `by_depth` as trees, given each one's tokens and the log chances of its paths.

        logits [steps, R, vocab_size]: what they were drawn from, if that was kept. The last token of the longest
        possible chain has not been through the network.
        """
        trees = []
        for (tokens, log_chances), size in zip(drawn, self.sizes, strict=True):
            places = [node if node < size else -1 for node in range(1, len(tokens) + 1)]
            trees.append(DrawnTree(tokens, range(len(tokens)), log_chances, places, {}))
        return trees if logits is None else self.recorded(trees, logits)

    def recorded(self, chains: Sequence[DrawnTree], logits: Tensor) -> list[DrawnTree]:
        """Chains and, where it must be kept, the q they were drawn from: of logits [steps, R, vocab_size]."""
        found = []
        for index, chain in enumerate(chains):
            heat, steps = self.requests[index].params.temperature, range(len(chain.tokens))
            if self.records[index]:
                own = self._grower.fitted(logits[:, index])  # [steps, vocab_size]
                drawn_from = {step: probabilities(ShapedRow(own[step], heat)) for step in steps}
                survival = list(accumulate(by_rank(1) * len(steps)))
                chain = chain._replace(log_chances=survival, drawn_from=drawn_from)
            found.append(chain)
        return found


def by_rank(num: int) -> list[float]:
    """Log chances of the first children by rank, for trees whose drawn tokens must not influence pruning."""
    return [math.log(_RANK_SURVIVAL[min(rank, len(_RANK_SURVIVAL) - 1)]) for rank in range(num)]


def _shape(places: Sequence[Place], logits: Tensor) -> tuple[Tensor, list[float]]:
    """Logits under each place's own parameters and prefix, and the temperature that is left to apply."""
    if all(is_plain(place.request.params) for place in places):
        return logits, [place.request.params.temperature for place in places]
    give_up_s = give_up_at()
    rows = [shape_draft(logits[i], request, path, give_up_s) for i, (request, _, path) in enumerate(places)]
    return torch.stack([row.logits for row in rows]), [row.temperature for row in rows]  # [num_places, vocab_size]


def noise_keys(seeds: Sequence[int], positions: Sequence[int], streams: Sequence[int]) -> NoiseKeys:
    """Keys as tensors; 64-bit seeds keep their bits."""
    return NoiseKeys(*words([*seeds, *positions, *streams]).split_with_sizes([len(seeds)] * 3))  # each [R]


def as_temperatures(values: Sequence[float]) -> Tensor:
    """Temperatures as the kernels take them -> [R] float64."""
    return torch.from_numpy(np.array(values, dtype=np.float64))
