"""Which members of a portfolio draft, how much, and which of their nodes are verified: by expected tokens per second.

Knows: costs of steps and of members, chances of nodes. Does not know: how members draft, what a pass does. It is the
guide of a `drafters.portfolio.Portfolio`, in which a single drafter stands too when it is to be guided.

Before a member is asked, its gain is guessed from how it fared; members that cost next to nothing are asked whenever
they are worth that, of the others the one with the best expected speed, if any beats going on without it. After
drafting, nodes of all requests are admitted in the order of their chances while expected tokens per second rise
(DSpark, algorithm 1; SmartSpec's goodput). Sources: `reference` formulas of sections 8 and 13.6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.core import Request
from forerun.engine.calibration import Calibration
from forerun.engine.explain import needed_rate, shortfall
from forerun.engine.policy import StepCosts
from forerun.speculation.growth import Draft, Part

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)  # numbers of drafts a member may be asked for
_CHEAP = 0.05  # of a plain pass: members below this are asked whatever others may find
_PROBE_EVERY = 24  # steps after which a member that was not asked is tried once more
_PROBE_DRAFTS = 3
_LONG_LAG = 32  # tokens whose reading takes so much longer than drafting that it tells what reading costs
_RISE, _FALL, _MAX_JUMP = 0.1, 0.5, 4.0  # how far and how fast a cost follows one measurement
_LEAST_GAIN = 1.02  # expected speed over doing without, from which a costly member is worth its uncertainty
_GUESSED_SHARE = 0.15  # a draft's cost over a plain pass, until it was measured
_USUAL_OUTPUT = 128.0  # tokens an answer is expected to have


@dataclass(slots=True)
class MemberCost:
    """Seconds a member takes for a call, by the number of levels it went, and for reading what it had missed."""

    by_size: dict[int, float] = field(default_factory=dict)
    catch_up_s: float = 0.0  # a known token

    def __call__(self, num_drafts: int) -> float | None:
        """The cost of a call for so many drafts; None as long as nothing was measured."""
        if not self.by_size:
            return None
        known = min(self.by_size, key=lambda size: abs(math.log(size / num_drafts)))
        return self.by_size[known] * max(1.0, num_drafts / known)

    def learn(self, num_drafts: int, seconds: float) -> None:
        """A running mean that falls quickly and rises slowly."""
        size = max(size for size in _SIZES if size <= max(num_drafts, 1))
        known = self.by_size.get(size)
        self.by_size[size] = seconds if known is None else _follow(known, seconds)

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Reading so many tokens took this long; the drafts after it count as reading."""
        each = seconds / num_tokens
        self.catch_up_s = each if self.catch_up_s == 0.0 else _follow(self.catch_up_s, each)


def _follow(known: float, seen: float) -> float:
    seen = min(seen, _MAX_JUMP * known)
    return known + (_FALL if seen < known else _RISE) * (seen - known)


@dataclass(slots=True)
class PortfolioPolicy:
    """The policy of an engine whose drafter is a portfolio, and the portfolio's guide."""

    max_nodes: int
    costs: StepCosts
    may_prune: bool  # under the coupled rule; else trees are verified as they were drawn
    calibration: Calibration = field(default_factory=Calibration)
    _num_deciding: int = 1
    _members: dict[str, MemberCost] = field(default_factory=dict)
    _waited: dict[tuple[str, str], int] = field(default_factory=dict)  # steps since a member was asked, by request
    _read: dict[tuple[str, str], int] = field(default_factory=dict)  # known tokens when it was asked last

    def begin_step(self, num_deciding: int) -> None:
        """Remember the load: rows of all requests share one pass."""
        self._num_deciding = max(1, num_deciding)

    def node_budget(self, request: Request) -> int:
        """Room for drafts: a fair share of the rows whose cost is known."""
        if not request.speculate or self.max_nodes <= 1:
            return 1
        share = max(2, self.costs.verify_cost.max_rows // self._num_deciding)
        return max(1, min(self.max_nodes, share, request.max_nodes or self.max_nodes))

    def plain_step_s(self, num_requests: int) -> float | None:
        """A step without drafts."""
        return self.costs.step_s(num_requests, False)

    # -- before a member drafts ---------------------------------------------------------------------------------

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """See `drafters.portfolio.Guide`."""
        return [self._quota(member, draft) for draft in drafts]

    def _quota(self, member: str, draft: Draft) -> int:
        """The size with the best expected speed, 1 where that is not better than without; now and then a probe."""
        key = draft.request.request_id, member
        best = max(self._sizes(draft), key=lambda size: self._speed(member, draft, size))
        if self._is_worth(member, draft, best):
            self._waited[key] = 0
            return best + 1
        waited = self._waited.get(key, 0) + 1
        self._waited[key] = waited
        if waited < _PROBE_EVERY or self._catch_up_s(member, draft.request) > self.costs.pass_s(1):
            return 1
        self._waited[key] = 0
        return min(_PROBE_DRAFTS, draft.num_free) + 1

    def _sizes(self, draft: Draft) -> list[int]:
        return [size for size in _SIZES if size < draft.num_free] + [draft.num_free]

    def _is_worth(self, member: str, draft: Draft, size: int) -> bool:
        without, gained = self._speed(member, draft, 0), self._speed(member, draft, size)
        if gained <= without:
            return False
        if self._cost(member, size) < _CHEAP * self.costs.pass_s(1):
            return True
        left = min(_USUAL_OUTPUT, draft.request.num_remaining)
        return gained >= _LEAST_GAIN * without and left * (1 / without - 1 / gained) >= self._catch_up_s(
            member, draft.request
        )

    def _speed(self, member: str, draft: Draft, size: int) -> float:
        """Expected tokens per second of this request's share if the member adds `size` drafts to what is there."""
        found = self._found_by_depth(draft)
        added = self._added_by_depth(member, draft.request, size)
        depths = max(len(found), len(added))
        padded = zip(found + [0.0] * (depths - len(found)), added + [0.0] * (depths - len(added)), strict=True)
        tokens = 1.0 + sum(1.0 - (1.0 - f) * (1.0 - a) for f, a in padded)
        rows = self._num_deciding * (len(draft.tree) + size)
        cost = self._cost(member, size) if size else 0.0
        return tokens / (self.costs.step_s(rows, rows > self._num_deciding) + cost)

    def _found_by_depth(self, draft: Draft) -> list[float]:
        """Chance that earlier members' nodes hold the right token, by depth."""
        mass = [0.0] * max(draft.tree.depths)
        for depth, chance in zip(draft.tree.depths[1:], draft.survival[1:], strict=True):
            mass[depth - 1] += math.exp(chance)
        return [min(m, 1.0) for m in mass]

    def _added_by_depth(self, member: str, request: Request, size: int) -> list[float]:
        """Chance that a path of the member is right down to each depth."""
        chances, chance = [], 1.0
        for depth in range(1, size + 1):
            chance *= self.calibration.path_rate(request.request_id, member, depth)
            chances.append(chance)
            if chance < 0.01:
                break
        return chances

    def _cost(self, member: str, size: int) -> float:
        measured = self._members.setdefault(member, MemberCost())(size)
        return measured if measured is not None else _GUESSED_SHARE * size * self.costs.verify_cost(1)

    def _catch_up_s(self, member: str, request: Request) -> float:
        """Seconds the member needs for what it has missed of a request since it was asked last."""
        lag = len(request.token_ids) - self._read.get((request.request_id, member), 0)
        return self._members.setdefault(member, MemberCost()).catch_up_s * lag

    # -- after it drafted ---------------------------------------------------------------------------------------

    def log_survival(self, part: Part, draft: Draft) -> list[float]:
        """See `drafters.portfolio.Guide`."""
        return self.calibration.log_survival(draft.request.request_id, part)

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """See `drafters.portfolio.Guide`."""
        cost = self._members.setdefault(member, MemberCost())
        num_caught_up = sum(draft.num_caught_up for draft in asked)
        if num_caught_up >= _LONG_LAG:
            cost.learn_catch_up(seconds, num_caught_up)
        else:
            cost.learn(max(len(draft.tree) for draft in asked) - 1, seconds)
        for draft in asked:
            self._read[draft.request.request_id, member] = len(draft.request.token_ids)

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Keep, over all requests, the likeliest nodes as long as they raise the expected tokens per second."""
        ranked = sorted(
            (-draft.survival[node], node, index)
            for index, draft in enumerate(drafts)
            for node in range(1, len(draft.tree))
        )
        if not self.may_prune or not ranked:
            return
        kept: list[list[int]] = [[0] for _ in drafts]
        for _, node, index in ranked[: self._num_worth(ranked, num_deciding)]:
            kept[index].append(node)
        for draft, nodes in zip(drafts, kept, strict=True):
            if len(nodes) < len(draft.tree):
                draft.keep(sorted(nodes))

    def _num_worth(self, ranked: Sequence[tuple[float, int, int]], num_deciding: int) -> int:
        """How many of the nodes, best first, give the most tokens per second."""
        tokens = float(num_deciding)
        best, best_speed = 0, tokens / self.costs.step_s(num_deciding, False)
        for count, (minus_chance, _, _) in enumerate(ranked, 1):
            tokens += math.exp(-minus_chance)
            speed = tokens / self.costs.step_s(num_deciding + count, True)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Members are scored one by one, see `learn_parts`."""

    def learn_parts(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Score every member's tree on the tokens that followed."""
        for part in draft.parts:
            self.calibration.learn(draft.request.request_id, part, tokens)

    def learn_draft_cost(self, seconds: float, num_drafted: int) -> None:
        """Members' costs are measured one by one, see `learn_member_cost`."""

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Members' costs are measured one by one, see `learn_member_cost`."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Leave it to the costs."""
        self.costs.learn(num_rows, num_rows > self._num_deciding, forward_s, overhead_s)

    def explain(self, request: Request) -> str | None:
        """No member's drafts are right often enough for what it costs; what is missing, member by member."""
        plain, n = 1.0 / self.costs.step_s(self._num_deciding, False), self._num_deciding
        said = []
        for member in sorted(self._members):
            sizes = [size for size in _SIZES if size < self.max_nodes]
            step_s = {size: self.costs.step_s(n * (size + 1), True) + self._cost(member, size) for size in sizes}
            rate = self.calibration.path_rate(request.request_id, member, 1)
            said.append(shortfall(f"drafts of {member}", rate, needed_rate(step_s, plain)))
        return "; ".join(filter(None, said)) if all(said) and said else None

    def end(self, request: Request) -> None:
        """Forget what was learned about the request alone."""
        self.calibration.forget(request.request_id)
        for known in (self._waited, self._read):
            for key in [key for key in known if key[0] == request.request_id]:
                del known[key]
