"""Verification of one step's trees: logits in, choices out.

Knows: which logit rows belong to which tree, the requests' parameters, which rule is in force. Does not know: the
rules themselves (verify.py), models, caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from forerun.core import Request
from forerun.errors import LogitsError
from forerun.kernels.device import all_to_host, indices_on, to_device, to_host
from forerun.kernels.ops import Kernels, NoiseKeys
from forerun.speculation import verify
from forerun.speculation.growth import Draft, as_temperatures, noise_keys
from forerun.speculation.late import LateDrafts
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
from forerun.speculation.tree import DraftTree
from forerun.speculation.verify import Choice


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tree to verify and where its logits are: node i's row is `first_row + i`."""

    request: Request
    tree: DraftTree
    first_row: int


class CoupledVerifier:
    """Every token is the target's own choice under the position's noise.

    All requests walk down together, a level at a time, and only rows on accepted paths are ever looked at. With
    `at_once` the tokens of all nodes are chosen in one call before the walk, where nothing but the temperature matters:
    on a card that is cheaper than waiting for it at every level. Both choose the same tokens.
    """

    coupled = True

    def __init__(self, kernels: Kernels, at_once: bool = False) -> None:
        self._kernels = kernels
        self._at_once = at_once

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Decide every candidate from logits [R, vocab_size]; a request with unusable logits gets its error."""
        walks = [_Walk(candidate) for candidate in candidates]
        if self._at_once:
            self._walk_plain(logits, [walk for walk in walks if is_plain(walk.candidate.request.params)])
        active = [walk for walk in walks if walk.outcome is None]
        while active:
            tokens = self._choose(logits, active)
            active = [walk for walk, token in zip(active, tokens, strict=True) if walk.advance(token)]
            give_up_s = give_up_at()
            active = [walk for walk in active if walk.goes_on(give_up_s)]
        return [walk.outcome for walk in walks if walk.outcome is not None]

    def takes_late(self, requests: Sequence[Request]) -> bool:
        """Whether drafts of these requests may be read with the choices: all nodes' tokens are chosen at once."""
        return self._at_once and all(is_plain(request.params) for request in requests)

    def verify_late(
        self, logits: Tensor, deciding: Sequence[tuple[Draft, int]], late: LateDrafts
    ) -> list[Choice | LogitsError]:
        """`verify` for drafts of which some are to be read first, each with its root's row of the logits.

        Drafts and choices come in one piece: here the host waits for the device, and nowhere else.
        """
        chosen = self._choose_late(logits, deciding, late)  # [nodes]
        sizes = [len(draft.tree) for draft, _ in deciding]
        unread, tokens = all_to_host(late.unread, chosen)
        late.finish(unread)
        walks = [_Walk(Candidate(draft.request, draft.tree, row)) for draft, row in deciding]
        for walk, own in zip(walks, tokens.split_with_sizes(sizes), strict=True):
            walk.follow(own.tolist())
        return [walk.outcome for walk in walks if walk.outcome is not None]

    def _choose_late(self, logits: Tensor, deciding: Sequence[tuple[Draft, int]], late: LateDrafts) -> Tensor:
        """The target's token after every node, without a word from the device -> [nodes] int64."""
        nodes = [(draft, row + node, node) for draft, row in deciding for node in range(len(draft.tree))]
        requests = [draft.request for draft, _, _ in nodes]
        columns = torch.stack([
            *noise_keys([request.seed for request in requests], [request.root_position + 1 for request in requests],
                        [stream_id(request.sample_index, Purpose.TARGET) for request in requests]),
            torch.tensor([draft.tree.depths[node] for draft, _, node in nodes]),
            torch.tensor([row for _, row, _ in nodes]),
            as_temperatures([request.params.temperature for request in requests]).view(torch.int64),
        ])  # fmt: skip
        seeds, roots, streams, depths, rows, heat = to_device(columns, logits.device)  # each [nodes]
        drawn = late.rows(_placed(deciding), logits.shape[1])
        if drawn.depths is not None:
            depths.index_copy_(0, drawn.rows, drawn.depths)
        keys = NoiseKeys(seeds, roots + depths, streams)
        return self._kernels.gumbel_argmax(logits.index_select(0, rows), heat.view(torch.float64), keys)

    def _walk_plain(self, logits: Tensor, walks: Sequence[_Walk]) -> None:
        """Walk to the end along tokens that are chosen for all nodes in one call."""
        places = [(walk.candidate, node) for walk in walks for node in range(len(walk.candidate.tree))]
        if not places:
            return
        rows = [candidate.first_row + node for candidate, node in places]
        picked = logits if rows == list(range(len(logits))) else logits[indices_on(rows, logits.device)]  # [nodes, V]
        positions = [c.request.root_position + c.tree.depths[node] + 1 for c, node in places]
        requests = [candidate.request for candidate, _ in places]
        chosen = self._argmax(picked, requests, positions, [request.params.temperature for request in requests])
        tokens = {(id(candidate), node): token for (candidate, node), token in zip(places, chosen, strict=True)}
        for walk in walks:
            walk.follow([tokens[id(walk.candidate), node] for node in range(len(walk.candidate.tree))])

    def _choose(self, logits: Tensor, walks: Sequence[_Walk]) -> list[int]:
        """The target's token after each walk's current node; -1 where there is none."""
        requests, positions = [walk.candidate.request for walk in walks], [walk.position for walk in walks]
        if _are_as_they_lie(walks):  # plain decoding of many: their rows are megabytes, which need not be copied
            first = walks[0].row
            temperatures = [request.params.temperature for request in requests]
            return self._argmax(logits[first : first + len(walks)], requests, positions, temperatures)
        rows = [walk.shape(logits) for walk in walks]
        stacked = torch.stack([row.logits for row in rows])  # [n, V]
        return self._argmax(stacked, requests, positions, [row.temperature for row in rows])

    def _argmax(
        self, logits: Tensor, requests: Sequence[Request], positions: Sequence[int], temperatures: Sequence[float]
    ) -> list[int]:
        """The choice of every row [n, V] under the noise of its position; -1 where there is none."""
        keys = noise_keys(
            [request.seed for request in requests],
            positions,
            [stream_id(request.sample_index, Purpose.TARGET) for request in requests],
        )
        chosen: list[int] = to_host(self._kernels.gumbel_argmax(logits, as_temperatures(temperatures), keys)).tolist()
        return chosen


class _Walk:
    """One request's way down its tree, and the rows it needs for it."""

    __slots__ = ("candidate", "outcome", "path")

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.path = verify.CoupledWalk(candidate.tree)
        self.outcome: Choice | LogitsError | None = None

    @property
    def position(self) -> int:
        """Position of the token to choose next."""
        return self.candidate.request.root_position + len(self.path.nodes)

    @property
    def row(self) -> int:
        """The current node's row of the logits."""
        return self.candidate.first_row + self.path.nodes[-1]

    def shape(self, logits: Tensor) -> ShapedRow:
        """The current node's row under the request's parameters."""
        node = self.path.nodes[-1]
        row = logits[self.row]  # [vocab_size]
        return shape_row(row, self.candidate.request, self.candidate.tree.path_tokens(node) if node else ())

    def follow(self, tokens: Sequence[int]) -> None:
        """Walk to the end along the tokens chosen after every node."""
        while self.advance(tokens[self.path.nodes[-1]]):
            pass

    def goes_on(self, give_up_s: float) -> bool:
        """Whether the next token can be chosen by `give_up_s`; else the walk ends with the last one, a step early.

        The choices are the same in whatever steps they are made.
        """
        node = self.path.nodes[-1]
        tree = self.candidate.tree
        if not mask_ready(self.candidate.request, tree.path_tokens(node), give_up_s):
            self.outcome = Choice(tuple(self.path.nodes[:-1]), tree.tokens[node])
        return self.outcome is None

    def advance(self, token: int) -> bool:
        """Take the chosen token; whether the walk goes on."""
        self.outcome = self.path.advance(token) if token >= 0 else bad_logits(self.candidate.request)
        return self.outcome is None


def _placed(deciding: Sequence[tuple[Draft, int]]) -> list[tuple[Draft, int]]:
    """The drafts that are late, each with its root's place where all nodes follow each other."""
    ends = accumulate(len(draft.tree) for draft, _ in deciding)
    return [(draft, end - len(draft.tree)) for (draft, _), end in zip(deciding, ends, strict=True) if draft.late]


def _are_as_they_lie(walks: Sequence[_Walk]) -> bool:
    """The walks' rows of the logits follow each other, and go to the draw as they are."""
    first = walks[0].row
    return all(walk.row == first + i and is_plain(walk.candidate.request.params) for i, walk in enumerate(walks))


class RejectionVerifier:
    """Accept or replace drafts so that the output has the target's distribution."""

    coupled = False

    def __init__(self, chain_rule: str) -> None:
        self._chain_rule = verify.verify_chain_block if chain_rule == "block" else verify.verify_chain_token

    def takes_late(self, requests: Sequence[Request]) -> bool:
        """Never: q is looked at before and while it decides."""
        return False

    def verify_late(
        self, logits: Tensor, deciding: Sequence[tuple[Draft, int]], late: LateDrafts
    ) -> list[Choice | LogitsError]:
        """See `takes_late`."""
        raise AssertionError("drafts must be read before this rule")

    def verify(self, logits: Tensor, candidates: Sequence[Candidate]) -> list[Choice | LogitsError]:
        """Decide every candidate from logits [R, vocab_size]; a request with unusable logits gets its error."""
        return [self._verify_one(logits, candidate) for candidate in candidates]

    def _verify_one(self, logits: Tensor, candidate: Candidate) -> Choice | LogitsError:
        if not candidate.tree.is_chain:
            return _run_rule(verify.verify_tree, logits, candidate)
        outcome = _run_rule(self._chain_rule, logits, candidate)
        if isinstance(outcome, LogitsError):  # block verification looks ahead; the token rule stops where plain would
            return _run_rule(verify.verify_chain_token, logits, candidate)
        return outcome


def _run_rule(rule: verify.Rule, logits: Tensor, candidate: Candidate) -> Choice | LogitsError:
    request = candidate.request
    accept = partial(_step_uniform, request, Purpose.ACCEPT)
    try:
        return rule(candidate.tree, _Distributions(logits, candidate).at, accept, partial(_draw, request))
    except LogitsError as error:
        return error


class _Distributions:
    """The target's distribution at each node, computed when a rule asks for it."""

    def __init__(self, logits: Tensor, candidate: Candidate) -> None:
        self._logits = logits
        self._candidate = candidate
        self._known: dict[int, Tensor] = {}

    def at(self, node: int) -> Tensor:
        """p after `node` -> [vocab_size] float64."""
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: int) -> Tensor:
        candidate = self._candidate
        raw = self._logits[candidate.first_row + node]  # [vocab_size]
        row = shape_row(raw, candidate.request, candidate.tree.path_tokens(node))
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
