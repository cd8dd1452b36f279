"""Verification of one step's trees: logits in, choices out.

Knows: which logit rows belong to which tree, the requests' parameters, which rule is in force. Does not know: the
rules themselves (verify.py), models, caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core import Request
from forerun.errors import GrammarError, LogitsError
from forerun.kernels.device import all_to_host, to_device, to_host
from forerun.kernels.draws import PlainTree
from forerun.kernels.ops import Kernels, NoiseKeys
from forerun.speculation import verify
from forerun.speculation.draft import Draft, PendingDrafts, pending_of
from forerun.speculation.growth import as_temperatures, noise_keys
from forerun.speculation.noise import Purpose, step_position, stream_id, uniform
from forerun.speculation.sampling import (
    ShapedRow,
    give_up_at,
    is_drawable,
    is_plain,
    mask_ready,
    probabilities,
    shape_row,
)
from forerun.speculation.verify import Choice


class Candidate(NamedTuple):
    """A draft to verify, and its root's row of the logits; the rows of its other nodes follow."""

    draft: Draft
    first_row: int

    @property
    def request(self) -> Request:
        """The draft's request."""
        return self.draft.request


class CoupledVerifier:
    """Every token is the target's own choice under the position's noise.

    Requests with no parameters but the temperature are decided by the kernels, in one call. The others walk down
    together, a level at a time, so that only rows on accepted paths are shaped. Both choose the same tokens.
    """

    def __init__(self, kernels: Kernels, at_once: bool = False) -> None:
        """`at_once`: the kernels choose the tokens of all nodes before the walk, so that drafts may be pending."""
        self._kernels = kernels
        self._at_once = at_once

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Decide every candidate from logits [R, vocab_size]; a request with unusable logits gets its error.

        Pending drafts are read together with the choices: here the host waits for the device, and nowhere else.
        """
        pending = pending_of([candidate.draft for candidate in candidates])
        if pending is not None:
            return self._verify_pending(logits, candidates, pending)
        plain = [candidate for candidate in candidates if is_plain(candidate.request.params)]
        decided = self._walk_plain(logits, plain)
        if len(plain) == len(candidates):
            return decided
        shaped = [candidate for candidate in candidates if not is_plain(candidate.request.params)]
        either = iter(decided), iter(self._walk_shaped(logits, shaped))
        return [next(either[not is_plain(candidate.request.params)]) for candidate in candidates]

    def _walk_plain(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Whose rows go to the draw as they are."""
        paths = self._kernels.walk_trees(logits, [_plain_tree(candidate) for candidate in candidates])
        return [
            Choice(nodes, token) if token >= 0 else _stopped(candidate, nodes, bad_logits(candidate.request))
            for (nodes, token), candidate in zip(paths, candidates, strict=True)
        ]

    def _walk_shaped(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Level by level."""
        walks = [_Walk(candidate) for candidate in candidates]
        active = [walk for walk in walks if walk.shape(logits)]
        while active:
            tokens = self._choose(active)
            active = [walk for walk, token in zip(active, tokens, strict=True) if walk.advance(token)]
            give_up_s = give_up_at()
            active = [walk for walk in active if walk.goes_on(give_up_s) and walk.shape(logits)]
        return [walk.outcome for walk in walks if walk.outcome is not None]

    def reads_pending(self, requests: Sequence[Request]) -> bool:
        """Whether drafts of these requests may be pending: all nodes' tokens are chosen at once."""
        return self._at_once and all(is_plain(request.params) for request in requests)

    def _verify_pending(
        self, logits: Tensor, candidates: Sequence[Candidate], pending: PendingDrafts
    ) -> list[Choice | LogitsError]:
        chosen = self._choose_pending(logits, candidates, pending)  # [nodes]
        sizes = [candidate.draft.num_nodes for candidate in candidates]
        unread, tokens = all_to_host(pending.unread, chosen)
        pending.finish(unread)
        walks = [_Walk(candidate) for candidate in candidates]
        for walk, own in zip(walks, tokens.split_with_sizes(sizes), strict=True):
            walk.follow(own.tolist())
        return [walk.outcome for walk in walks if walk.outcome is not None]

    def _choose_pending(self, logits: Tensor, candidates: Sequence[Candidate], pending: PendingDrafts) -> Tensor:
        """The target's token after every node, before the host knows the nodes -> [nodes] int64."""
        nodes = [
            (candidate.request, candidate.first_row + row, depth)
            for candidate in candidates
            for row, depth in enumerate(candidate.draft.rows().depths)
        ]
        requests = [request for request, _, _ in nodes]
        columns = torch.stack([
            *noise_keys([request.seed for request in requests], [request.root_position + 1 for request in requests],
                        [stream_id(request.sample_index, Purpose.TARGET) for request in requests]),
            torch.tensor([depth for _, _, depth in nodes]),
            torch.tensor([row for _, row, _ in nodes]),
            as_temperatures([request.params.temperature for request in requests]).view(torch.int64),
        ])  # fmt: skip
        seeds, roots, streams, depths, rows, heat = to_device(columns, logits.device)  # each [nodes]
        drawn = pending.rows(_placed(candidates))
        depths.index_copy_(0, drawn.rows, drawn.depths)
        keys = NoiseKeys(seeds, roots + depths, streams)
        return self._kernels.gumbel_argmax(logits.index_select(0, rows), heat.view(torch.float64), keys)

    def _choose(self, walks: Sequence[_Walk]) -> list[int]:
        """The target's token after each walk's current node; -1 where there is none."""
        rows, requests = [walk.shaped for walk in walks], [walk.candidate.request for walk in walks]
        keys = noise_keys(
            [request.seed for request in requests],
            [walk.position for walk in walks],
            [stream_id(request.sample_index, Purpose.TARGET) for request in requests],
        )
        heat = as_temperatures([row.temperature for row in rows])
        stacked = torch.stack([row.logits for row in rows])  # [n, V]
        chosen: list[int] = to_host(self._kernels.gumbel_argmax(stacked, heat, keys)).tolist()
        return chosen


def _plain_tree(candidate: Candidate) -> PlainTree:
    """What the kernels must know of a draft."""
    draft, request = candidate.draft, candidate.request
    stream = stream_id(request.sample_index, Purpose.TARGET)
    heat, position = request.params.temperature, request.root_position + 1
    tree = draft.tree
    return PlainTree(
        candidate.first_row, tree.tokens, tree.parents, draft.verified, heat, request.seed, position, stream
    )


class _Walk:
    """One request's way down its tree, and the rows it needs for it."""

    __slots__ = ("candidate", "outcome", "path", "shaped")

    shaped: ShapedRow  # the current node's row, once `shape` has made it

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.path = verify.CoupledWalk(candidate.draft.tree, candidate.draft.verified)
        self.outcome: Choice | LogitsError | None = None

    @property
    def position(self) -> int:
        """Position of the token to choose next."""
        return self.candidate.request.root_position + len(self.path.nodes)

    @property
    def row(self) -> int:
        """The current node's row of the logits."""
        return self.candidate.first_row + self.candidate.draft.row_of(self.path.nodes[-1])

    def shape(self, logits: Tensor) -> bool:
        """Bring the current node's row under the request's parameters; whether that was possible."""
        node = self.path.nodes[-1]
        path = self.candidate.draft.tree.path_tokens(node) if node else ()
        try:
            self.shaped = shape_row(logits[self.row], self.candidate.request, path)  # [vocab_size]
        except LogitsError as error:
            self.outcome = _stopped(self.candidate, self.path.nodes, error)
        return self.outcome is None

    def follow(self, tokens: Sequence[int]) -> None:
        """Walk to the end along the tokens chosen after every verified node."""
        while self.advance(tokens[self.candidate.draft.row_of(self.path.nodes[-1])]):
            pass

    def goes_on(self, give_up_s: float) -> bool:
        """Whether the next token can be chosen by `give_up_s`; else the walk ends with the last one, a step early.

        The choices are the same in whatever steps they are made.
        """
        path = self.candidate.draft.tree.path_tokens(self.path.nodes[-1])
        if not mask_ready(self.candidate.request, path, give_up_s):
            self.outcome = _one_early(self.candidate, self.path.nodes)
        return self.outcome is None

    def advance(self, token: int) -> bool:
        """Take the chosen token; whether the walk goes on."""
        if token >= 0:
            self.outcome = self.path.advance(token)
        else:
            self.outcome = _stopped(self.candidate, self.path.nodes, bad_logits(self.candidate.request))
        return self.outcome is None


def _one_early(candidate: Candidate, nodes: Sequence[int]) -> Choice:
    """The walk without its last node, whose token is known: the next step goes on there."""
    return Choice(tuple(nodes[:-1]), candidate.draft.tree.tokens[nodes[-1]])


def _stopped(candidate: Candidate, nodes: Sequence[int], error: LogitsError) -> Choice | LogitsError:
    """The outcome of a walk after whose last node no token can be chosen: at the root that is the request's error."""
    return error if len(nodes) == 1 else _one_early(candidate, nodes)


def _placed(candidates: Sequence[Candidate]) -> list[tuple[Draft, int]]:
    """The drafts that are pending, each with its root's place where all nodes follow each other."""
    drafts = [candidate.draft for candidate in candidates]
    ends = accumulate(draft.num_nodes for draft in drafts)
    return [(d, end - d.num_nodes) for d, end in zip(drafts, ends, strict=True) if d.pending is not None]


class RejectionVerifier:
    """Accept or replace drafts so that the output has the target's distribution."""

    def __init__(self, chain_rule: str) -> None:
        self._chain_rule = verify.verify_chain_block if chain_rule == "block" else verify.verify_chain_token

    def reads_pending(self, requests: Sequence[Request]) -> bool:
        """Never: deciding needs q."""
        return False

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Decide every candidate from logits [R, vocab_size]; a request with unusable logits gets its error."""
        give_up_s = give_up_at()
        return [self._verify_one(logits, candidate, give_up_s) for candidate in candidates]

    def _verify_one(self, logits: Tensor, candidate: Candidate, give_up_s: float) -> Choice | LogitsError:
        request, tree = candidate.request, candidate.draft.tree
        target = _Distributions(logits, candidate, give_up_s).at
        accept = partial(_step_uniform, request, Purpose.ACCEPT)
        rule = self._chain_rule if tree.is_chain else verify.verify_tree
        try:
            return rule(tree, target, accept, partial(_draw, request))
        except LogitsError as error:
            return error


class _Distributions:
    """The target's distribution at each node, computed when a rule asks for it. A rule asks once for each node."""

    def __init__(self, logits: Tensor, candidate: Candidate, give_up_s: float) -> None:
        self._logits = logits
        self._candidate = candidate
        self._give_up_s = give_up_s

    def at(self, node: int) -> Tensor:
        """p after `node` -> [vocab_size] float64; raises LogitsError for what cannot be had, or not by `give_up_s`."""
        candidate = self._candidate
        path = candidate.draft.tree.path_tokens(node)
        if path and not mask_ready(candidate.request, path, self._give_up_s):
            raise GrammarError("the mask after a draft has not arrived")
        row = shape_row(self._logits[candidate.first_row + node], candidate.request, path)
        if not is_drawable(row.logits):
            raise bad_logits(candidate.request)
        return probabilities(row)


def _step_uniform(request: Request, purpose: Purpose, node: int, index: int) -> float:
    position = step_position(request.root_position, node)
    return uniform(request.seed, position, stream_id(request.sample_index, purpose), index)


def _draw(request: Request, weights: Tensor, node: int) -> int:
    """A token with probability proportional to weights [vocab_size], by inversion."""
    cumulative = weights.cumsum(0)
    point = _step_uniform(request, Purpose.RECOVER, node, 0) * float(cumulative[-1])
    token = int(torch.searchsorted(cumulative, torch.tensor(point, dtype=torch.float64), right=True))
    return min(token, int(weights.nonzero()[-1]))


def bad_logits(request: Request) -> LogitsError:
    """The error of a request whose logits hold NaN or infinity, or allow no token."""
    return LogitsError(
        f"request {request.request_id}: the logits at position {request.root_position} hold NaN or infinity, or its "
        "sampling parameters leave no token; check the checkpoint, or relax allowed_token_ids, bad_words or the grammar"
    )
