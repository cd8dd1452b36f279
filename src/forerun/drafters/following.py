"""How far a network that drafts has read each request, and what it is fed beside tokens.

Knows: which rows are computed, positions, the target's states, whether following is worth its time. Does not know:
networks, batches, how drafts are drawn.

**Which row of a head lies where.** The row of position j reads the token there and the target's state of the token
before: it depends on tokens up to j, so blocks of its KV can be shared by their prefix. It was trained to stand at
position j - 1, that of the state. Position 0 has no row. Heads that draft in blocks read the state of the token itself:
they have a row of every known token, and none of the root, whose state is not known.

**When heads read.** Rows of known tokens are computed from the target's true states. Rows of a prompt are computed at
once, because other requests may wait for its blocks; those of decoded tokens when drafts are next wanted, when the
request ends, or when `MOST_UNREAD` wait, in one pass for all requests. Until then the prefix cache knows that these
rows are missing. While drafting the head is fed its own output; those rows are computed again once the tokens are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from forerun.core import Request
from forerun.drafters.base import DrafterContext, Observed
from forerun.kernels.cores import step_clock
from forerun.kernels.device import indices_on
from forerun.models.base import CommittedPath, Model
from forerun.models.heads.block import BlockHead
from forerun.models.heads.head import DraftHead
from forerun.speculation.draft import Draft

MOST_UNREAD = 64  # decoded tokens of all requests whose states are kept unread

Span = tuple[Request, int, int]  # rows start .. end-1 of a request's known tokens
Read = Callable[[Iterable[tuple[Request, int]]], None]  # computes the known rows below each request's end


class Follower:
    """How far a network has read: here one that runs on the target's own KV, and so has no rows to compute itself.

    Networks with KV of their own have followers that build on this one.
    """

    hidden_layers: tuple[int, ...] = ()  # of the target, whose states it feeds the network

    def start(self, request: Request) -> int:
        """The first row that is not computed."""
        return request.root_position

    def can_draft(self, request: Request) -> bool:
        """Whether all rows below the root are computed, or can be."""
        return request.num_computed == request.root_position

    def features(self, spans: Sequence[Span]) -> Tensor | None:
        """What the network is fed beside these tokens -> [M, W]."""

    def read(self, request: Request, end: int) -> None:
        """The rows below `end` are computed."""

    def drew(self, request: Request, nodes: set[int]) -> None:
        """All rows below the root are computed, and those of tree nodes that were drawn, each in its own row."""

    def wanted(self, drafts: Sequence[Draft]) -> None:
        """Drafts are asked for."""

    def reads(self, request: Request) -> bool:
        """See `StatesReader`."""
        return True

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor], read: Read) -> None:
        """A step is over; rows that should not wait are `read`."""

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """See `Drafter`."""
        return ()

    def resume(self, request: Request, num_ready: int, boundary: Tensor | None) -> None:
        """See `Drafter`; `num_ready` rows were computed by others."""

    def end(self, request_id: str) -> None:
        """Forget the request."""


class TokenFollower(Follower):
    """Follows for a draft model, which is fed tokens alone and reads when drafts are wanted: counts computed rows."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._num_read: dict[str, int] = {}  # known tokens
        self._nodes: dict[str, set[int]] = {}  # tree nodes of the step, beyond those

    def start(self, request: Request) -> int:
        """Behind the known tokens it has read."""
        return self._num_read.get(request.request_id, 0)

    def can_draft(self, request: Request) -> bool:
        """All tokens are known; those to be read must have rows in this model, which may have fewer than the target."""
        return max(request.token_ids[self.start(request) :]) < self._model.vocab_size

    def read(self, request: Request, end: int) -> None:
        """Count them."""
        self._num_read[request.request_id] = end

    def drew(self, request: Request, nodes: set[int]) -> None:
        """Those of the nodes that are accepted will count."""
        self._num_read[request.request_id] = request.root_position
        self._nodes[request.request_id] = nodes

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor], read: Read) -> None:
        """Accepted nodes this model had computed are known tokens now; the rest is forgotten."""
        paths = []
        for request_id, accepted in ((seen.request.request_id, seen.nodes) for seen in observed):
            if request_id in self._nodes:
                nodes = tuple(takewhile(self._nodes.pop(request_id).__contains__, accepted))
                self._num_read[request_id] += len(nodes)
                paths.append(CommittedPath(request_id, nodes))
        self._model.commit(paths)

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """What is known; nothing of a model that keeps a state of its own outside the pool."""
        return (self.start(request),) if self._model.kv_specs else ()

    def resume(self, request: Request, num_ready: int, boundary: Tensor | None) -> None:
        """Go on behind the rows in the pool; the root is always computed again."""
        self._num_read[request.request_id] = min(num_ready, request.root_position)

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._num_read.pop(request_id, None)
        self._nodes.pop(request_id, None)
        self._model.release(request_id)


class FeatureFollower(Follower):
    """Follows for a head: keeps the target's states until the rows that need them are computed."""

    def __init__(self, head: DraftHead | BlockHead, context: DrafterContext) -> None:
        self.hidden_layers = head.hidden_layers
        self._lag = 0 if isinstance(head, BlockHead) else 1
        self._first_row = 0 if head.sees_slot_zero else 1
        # before the first token: a row at position 0, where one reads that state, is fed zeros
        num_before = max(self._lag - self._first_row, 0)
        self._before = torch.zeros(num_before, head.state_size, device=context.kernels.device)  # [1 or 0, W]
        self._follows: dict[str, Follow] = {}
        self._left: set[str] = set()  # requests that are not followed
        self._thrift = Thrift() if context.options.adaptive else None
        self._clock = step_clock(context.kernels.device)  # the policy's, on which drafts gain
        self._gained_s = 0.0  # by drafts since the beginning, as their plan said last

    def start(self, request: Request) -> int:
        """Behind the rows that are computed from true states."""
        return self._follows[request.request_id].num_ready

    def can_draft(self, request: Request) -> bool:
        """The state of the token before the root is known: not in a request's very first step."""
        follow, end = self._follows.get(request.request_id), request.root_position + self._lag
        return request.root_position > 0 and follow is not None and follow.reaches(end)

    def features(self, spans: Sequence[Span]) -> Tensor:
        """The states these rows read; where that is each token's own, none for the root."""
        taken = [self._follows[request.request_id].take(start, end) for request, start, end in spans]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def read(self, request: Request, end: int) -> None:
        """Their states are not needed any more."""
        self._follows[request.request_id].advance(end)

    def drew(self, request: Request, nodes: set[int]) -> None:
        """The root's row was computed from a true state if it reads that of the token before; other nodes' were not."""
        self.read(request, request.root_position + self._lag)

    def wanted(self, drafts: Sequence[Draft]) -> None:
        """Following may pay."""
        self._gained_s = drafts[0].plan.gained_s(drafts[0].member)
        for draft in drafts:
            if (follow := self._follows.get(draft.request.request_id)) is not None:
                follow.num_idle = 0

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor], read: Read) -> None:
        """Keep the states of what became known; compute rows that complete a block, or have become many."""
        began = self._clock()
        layers = [hidden[layer] for layer in self.hidden_layers] if hidden else []
        followed = [seen for seen in observed if self._add(seen, layers)] if hidden else []
        num_unread = sum([seen.request.num_computed - self.start(seen.request) for seen in followed])
        due = [seen.request for seen in followed if num_unread > MOST_UNREAD or _is_due(seen)]
        if due:
            read((request, request.num_computed) for request in due)
        if self._thrift is not None:
            self._thrift.learn(self._gained_s, began, self._clock() - began if hidden else 0.0)

    def _add(self, seen: Observed, layers: Sequence[Tensor]) -> bool:
        """Keep a request's states; whether all rows can be computed now."""
        request, start = seen.request, seen.request.num_computed - len(seen.rows)
        follow = self._following(request, start) if seen.rows else None
        if follow is None:
            return False
        follow.add(start, len(seen.rows), partial(side_by_side, layers, seen.rows))
        follow.num_idle += 1
        if follow.is_broken(request.num_computed) or (self._thrift is not None and self._thrift.leaves(follow)):
            self._left.add(request.request_id)
            del self._follows[request.request_id]
            return False
        return follow.reaches(request.num_computed)

    def _following(self, request: Request, start: int) -> Follow | None:
        """How a request is followed, if it is."""
        if request.request_id in self._left:
            return None
        follow = self._follows.get(request.request_id)
        if follow is None or (start == 0 and follow.end > 0):
            if not self._may_follow(request):
                return None
            follow = Follow(self._first_row, self._first_row - self._lag, self._before, self._lag)
            self._follows[request.request_id] = follow
        return follow

    def reads(self, request: Request) -> bool:
        """Whether the request is followed, which is decided when it begins."""
        return self._following(request, request.num_computed) is not None

    def _may_follow(self, request: Request) -> bool:
        """Else it is left for good."""
        if self._thrift is None or self._thrift.allows:
            return True
        self._left.add(request.request_id)
        return False

    def num_ready(self, request: Request) -> tuple[int, ...]:
        """What is computed of known tokens."""
        follow = self._follows.get(request.request_id)
        return (min(follow.num_ready, request.num_computed) if follow is not None else 0,)

    def resume(self, request: Request, num_ready: int, boundary: Tensor | None) -> None:
        """Go on from the state of the token before the first that the target computes."""
        if request.num_computed > 0 and self._may_follow(request):
            states = torch.empty(0, 0) if boundary is None else boundary[None].clone()  # [0 or 1, W]
            first = request.num_computed - len(states)
            follow = Follow(max(num_ready, self._first_row), first, states, self._lag)
            if follow.is_broken(request.num_computed):
                self._left.add(request.request_id)
            else:
                self._follows[request.request_id] = follow

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._follows.pop(request_id, None)
        self._left.discard(request_id)


class RootFollower(Follower):
    """Follows for a head that reads the target's own KV: keeps the state of the token before each root, and no more."""

    def __init__(self, head: DraftHead) -> None:
        self.hidden_layers = head.hidden_layers
        self._states: dict[str, tuple[int, Tensor]] = {}  # the position it will be fed at, and the state [1, W]

    def can_draft(self, request: Request) -> bool:
        """That state is known: not in a request's very first step."""
        return super().can_draft(request) and self._states.get(request.request_id, (-1,))[0] == request.root_position

    def features(self, spans: Sequence[Span]) -> Tensor:
        """The states of the tokens before the roots."""
        return torch.cat([self._states[request.request_id][1] for request, _, _ in spans])

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor], read: Read) -> None:
        """Keep the state of the last token computed; there is nothing to read."""
        layers = [hidden[layer] for layer in self.hidden_layers]
        for request, rows, _, _ in observed:
            if rows:
                state = side_by_side(layers, rows[-1:]).clone()  # the step's whole states need not stay
                self._states[request.request_id] = request.num_computed, state

    def end(self, request_id: str) -> None:
        """Forget the request."""
        self._states.pop(request_id, None)


def _is_due(seen: Observed) -> bool:
    """Others may go on from these rows soon, or nobody computes them later."""
    return len(seen.rows) > len(seen.nodes) or seen.request.finish_reason is not None


def side_by_side(layers: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Ascending rows of the layers' states [M, H] as a step left them -> [num_rows, W]; a view where it can be one."""
    first, num = rows[0], len(rows)
    if rows[-1] - first == num - 1:
        parts = [states[first : first + num] for states in layers]
    else:
        chosen = indices_on(rows, layers[0].device)
        parts = [states.index_select(0, chosen) for states in layers]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Follow:
    """Rows below `num_ready` are computed from true states.

    The states, each [W], are the target's, of the tokens from position `first` up to `end`; the row of position j needs
    that of j - lag. They begin later than needed where somebody else computed the tokens between; then there is nothing
    to do. They are joined only when they are read: while nobody drafts, following must cost next to nothing.
    """

    __slots__ = ("_lag", "_pieces", "_states", "end", "first", "num_idle", "num_ready")

    def __init__(self, num_ready: int, first: int, states: Tensor, lag: int = 1) -> None:
        """`states` [n, W], of the tokens from position `first` on."""
        self.num_ready, self._lag = num_ready, lag
        self.first, self.end = first, first + len(states)
        self._states = states  # the first of them, joined
        self._pieces: list[Callable[[], Tensor]] = []  # those of later steps, when they are read
        self.num_idle = 0  # steps since drafts were wanted

    def add(self, start: int, num: int, piece: Callable[[], Tensor]) -> None:
        """`num` states [num, W] of the tokens from position `start` on; what was known from there on is replaced."""
        if not self.first <= start <= self.end or self.first == self.end:
            self.first, self._states, self._pieces = start, piece(), []
        elif start < self.end:
            self._states, self._pieces = self._joined()[: start - self.first], [piece]
        else:
            self._pieces.append(piece)
        self.end = start + num

    def reaches(self, end: int) -> bool:
        """Whether all rows from `num_ready`, or from the last, up to `end` can be computed."""
        return min(self.num_ready, end - 1) - self._lag >= self.first and end - self._lag <= self.end

    def is_broken(self, num_computed: int) -> bool:
        """Others computed tokens whose states are not known: the rows behind `num_ready` will never be computed."""
        return self.num_ready - self._lag < self.first and self.num_ready <= num_computed

    def take(self, start: int, end: int) -> Tensor:
        """The states the rows start .. end-1 need, as far as they are known -> [end - start, W]."""
        before = self.first + self._lag
        return self._joined()[start - before : end - before]

    def advance(self, end: int) -> None:
        """Rows below `end` are computed; only what the last of them read may be needed again."""
        self.num_ready = end
        done = end - 1 - self._lag - self.first
        if done > 0:
            self._states = self._joined()[done:].clone()  # the steps' whole states need not stay
            self.first += done

    def _joined(self) -> Tensor:
        if self._pieces:
            self._states = torch.cat([self._states, *(piece() for piece in self._pieces)])
            self._pieces = []
        return self._states


_FALL, _RISE = 0.3, 0.03  # what a shorter and a longer step count for in the usual time of one
_LONGEST = 2.0  # times the usual; what a step took beyond that was a prompt, or idle time
_AFFORDED = 0.01  # share of the time that following may take where drafts do not pay for it
_FIRST, _MOST, _OWED = 8.0, 32.0, 64.0  # steps whose time following may lose, save up, and owe at most
# Following costs so many times what reading takes. Beside it the target's last layer computes rows that nobody else
# reads, and each step hands states over (`mini`, prompts of 40 tokens, answers of 27: 1.0 ms and 0.9 to 1.6 ms).
_TIMES = 2.0
_PATIENCE = 48  # steps after which a request nobody drafts for may be left


class Thrift:
    """Bounds what following costs where drafts do not pay for it.

    A head that lags too far behind cannot draft. So there is an account: reading is a debt, which what drafts gain and
    a small share of the time pay. While it is high no request is followed, and steps are those of plain decoding.
    """

    def __init__(self) -> None:
        self._debt_s = 0.0
        self.gained_s = 0.0  # by drafts, as was told last
        self._step_s = 0.0  # usual; until it is known everything is followed
        self._began: float | None = None

    def learn(self, gained_s: float, began: float, reading_s: float) -> None:
        """A step is over; it was observed from `began` on, which took `reading_s`.

        `gained_s`: what drafts have gained since the beginning.
        """
        if self._began is not None:
            usual_s = self._step_s or began - self._began
            step_s = min(began - self._began, _LONGEST * usual_s)
            self._step_s = usual_s + (_FALL if step_s < usual_s else _RISE) * (step_s - usual_s)
        debt_s = self._debt_s + _TIMES * reading_s - (gained_s - self.gained_s) - _AFFORDED * self._step_s
        self._began, self.gained_s = began, gained_s
        self._debt_s = min(max(debt_s, -_MOST * self._step_s), _OWED * self._step_s)

    @property
    def allows(self) -> bool:
        """Whether to follow requests whose drafts may never be wanted."""
        return self._step_s == 0.0 or self._debt_s <= _FIRST * self._step_s

    def leaves(self, follow: Follow) -> bool:
        """Whether to follow a request no longer."""
        return follow.num_idle >= _PATIENCE and not self.allows
