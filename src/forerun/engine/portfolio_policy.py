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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.core import Request
from forerun.engine.calibration import Calibration
from forerun.engine.explain import needed_rate, shortfall
from forerun.engine.policy import StepCosts
from forerun.engine.policy_ledger import Ledger
from forerun.speculation.growth import Draft, Part

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 63)  # numbers of drafts whose cost is kept apart
_HOPELESS = 0.02  # chance of a right path below which deeper ones are not looked at
_CHEAP = 0.05  # of a plain pass: members below this are asked whatever others may find
_PROBE_EVERY = 8  # steps after which a member that was not asked is tried once more
_LONGEST_REST = 16  # steps for which a member is not even thought about; the first rest is one step, then ever longer
_PROBE_DRAFTS = 3
_FINDS, _MISSES = 0.5, 0.1  # how fast the share of times a member finds something follows one time of a request
_OVERALL = 0.03  # and of any
_PAST_BEST = 5  # more drafts than so many past the best number are not looked at
_PROBE_SHARE = 0.01  # of the time that trials may take
_LONG_LAG = 32  # tokens whose reading takes so much longer than drafting that it tells what reading costs
_STEPS_A_COST = 16  # for which a step's cost is taken to stay as it is
_RISE, _FALL, _MAX_JUMP = 0.1, 0.5, 4.0  # how far and how fast a cost follows one measurement
_LEAST_GAIN = 1.02  # expected speed over doing without, from which a costly member is worth its uncertainty
_GUESSED_SHARE = 0.15  # a draft's cost over a plain pass, until it was measured
_USUAL_OUTPUT = 128.0  # tokens an answer is expected to have


@dataclass(slots=True)
class MemberCost:
    """Seconds a member takes for a call, by the number of levels it went, and for reading what it had missed."""

    by_size: dict[int, float] = field(default_factory=dict)
    catch_up_s: float = 0.0  # a known token
    empty_s: float = 0.0  # a call that found nothing
    found: float = 1.0  # share of the calls that found something, over all requests
    _worked_out: dict[int, float] = field(default_factory=dict)  # since the last measurement, by number of drafts

    def __call__(self, num_drafts: int) -> float | None:
        """The cost of a call for so many drafts; None as long as nothing was measured."""
        if num_drafts not in self._worked_out:
            if not self.by_size:
                return None
            known = min(self.by_size, key=lambda size: abs(math.log(size / num_drafts)))
            self._worked_out[num_drafts] = self.by_size[known] * max(1.0, num_drafts / known)
        return self._worked_out[num_drafts]

    def learn(self, num_drafts: int, seconds: float) -> None:
        """A running mean that falls quickly and rises slowly."""
        size = max(size for size in _SIZES if size <= max(num_drafts, 1))
        known = self.by_size.get(size)
        self.by_size[size] = seconds if known is None else _follow(known, seconds)
        self._worked_out.clear()

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Reading so many tokens took this long; the drafts after it count as reading."""
        each = seconds / num_tokens
        self.catch_up_s = each if self.catch_up_s == 0.0 else _follow(self.catch_up_s, each)


def _follow(known: float, seen: float) -> float:
    seen = min(seen, _MAX_JUMP * known)
    return known + (_FALL if seen < known else _RISE) * (seen - known)


class Asking(NamedTuple):
    """The best number of drafts to ask a member for, the tokens per second it promises, and those without it."""

    size: int
    speed: float
    speed_without: float
    seconds: float  # of such a step

    @property
    def saved_s(self) -> float:
        """What a step that finds as much as expected saves over doing without."""
        return self.seconds * (self.speed / self.speed_without - 1.0)


@dataclass(slots=True)
class Rest:
    """How long a member that was not worth asking is left alone: thinking about it costs time too."""

    length: int = 0  # of the current rest, in steps
    passed: int = 0  # of it
    waited: int = 0  # steps since the member was asked or tried
    found: float = 1.0  # share of the times it was asked when it found something to draft

    def goes_on(self) -> bool:
        """Another step has passed, and the rest is not over."""
        self.waited += 1
        self.passed += 1
        if self.passed < self.length:
            return True
        self.length, self.passed = min(max(2 * self.length, 1), _LONGEST_REST), 0
        return False


@dataclass(slots=True)
class PortfolioPolicy:
    """The policy of an engine whose drafter is a portfolio, and the portfolio's guide."""

    max_nodes: int
    costs: StepCosts
    may_prune: bool  # under the coupled rule; else trees are verified as they were drawn
    calibration: Calibration = field(default_factory=Calibration)
    _num_deciding: int = 1
    _members: dict[str, MemberCost] = field(default_factory=dict)
    _resting: dict[tuple[str, str], Rest] = field(default_factory=dict)  # by request and member not worth asking
    _read: dict[tuple[str, str], int] = field(default_factory=dict)  # known tokens when it was asked last
    _step_costs: dict[int, float] = field(default_factory=dict)  # with drafts, by rows, as worked out lately
    _num_steps: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def expect(self, member: str, costs: Mapping[int, float]) -> None:
        """A member of the portfolio, and seconds its calls took when tried at start, by number of drafts."""
        cost = self._members.setdefault(member, MemberCost())
        for num_drafts, seconds in costs.items():
            cost.learn(num_drafts, seconds)

    def begin_step(self, num_deciding: int) -> None:
        """Remember the load: rows of all requests share one pass."""
        self._num_deciding = max(1, num_deciding)
        self.ledger.begin_step()
        self._num_steps += 1
        if self._num_steps % _STEPS_A_COST == 0:
            self._step_costs.clear()

    def _step_s(self, num_rows: int) -> float:
        """A step with drafts over so many rows; what is worked out is used for some steps, since working takes time."""
        if num_rows not in self._step_costs:
            self._step_costs[num_rows] = self.costs.step_s(num_rows, True)
        return self._step_costs[num_rows]

    def node_budget(self, request: Request) -> int:
        """Room for drafts: a fair share of the rows whose cost is known."""
        if not request.speculate or self.max_nodes <= 1 or not self.ledger.is_open:
            return 1
        if self._all_rest(request.request_id):
            return 1
        share = max(2, self.costs.verify_cost.max_rows // self._num_deciding)
        return max(1, min(self.max_nodes, share, request.max_nodes or self.max_nodes))

    def _all_rest(self, request_id: str) -> bool:
        """No member is to be thought about in this step, which is then a plain one and as quick as those are."""
        rests = [self._resting.get((request_id, member)) for member in self._members]
        if not rests or any(rest is None or rest.passed + 1 >= rest.length for rest in rests):
            return False
        return all(rest is not None and rest.goes_on() for rest in rests)

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
        resting = self._resting.setdefault(key, Rest(found=self._members.setdefault(member, MemberCost()).found))
        if resting.goes_on():
            return 1
        plan = self._best(member, draft)
        if self._is_worth(member, draft, plan):
            self._resting[key] = Rest(found=resting.found)
            return plan.size + 1
        if resting.waited < self._probe_every(member) or self._catch_up_s(member, draft.request) > self.costs.pass_s(1):
            return 1
        self._resting[key] = Rest(length=resting.length, found=resting.found)
        return min(_PROBE_DRAFTS, draft.num_free) + 1

    def _probe_every(self, member: str) -> float:
        """Steps between trials: the dearer they are, the rarer."""
        n = self._num_deciding
        price_s = self._cost(member, _PROBE_DRAFTS) + self._step_s(n + _PROBE_DRAFTS) - self.costs.step_s(n, False)
        return max(_PROBE_EVERY, price_s / (_PROBE_SHARE * self.costs.pass_s(n)))

    def _pays_for_asking(self, member: str, draft: Draft, plan: Asking) -> bool:
        """Whether what the member finds, when it finds something, is worth the times it finds nothing."""
        found = self._resting[draft.request.request_id, member].found
        return found * plan.saved_s > (1.0 - found) * self._members[member].empty_s

    def _is_worth(self, member: str, draft: Draft, plan: Asking) -> bool:
        if plan.speed <= plan.speed_without or not self._pays_for_asking(member, draft, plan):
            return False
        if self._cost(member, plan.size) < _CHEAP * self.costs.pass_s(1):
            return True
        left = min(_USUAL_OUTPUT, draft.request.num_remaining)
        saved_s = left * (1 / plan.speed_without - 1 / plan.speed)
        return plan.speed >= _LEAST_GAIN * plan.speed_without and saved_s >= self._catch_up_s(member, draft.request)

    def _best(self, member: str, draft: Draft) -> Asking:
        """How many drafts of the member, on top of what is there, promise the most tokens per second.

        The member's likeliest nodes come first; one that is right adds a token unless an earlier member's node holds it
        already, which is guessed as if the nodes were a chain.
        """
        found = self._found_by_depth(draft)
        rates = self.calibration.rank_rates(draft.request.request_id, member)
        tokens, chance, there = 1.0 + sum(found), 1.0, len(draft.tree)
        rows = self._num_deciding
        without = tokens / (self._step_s(rows * there) if there > 1 else self.costs.step_s(rows, False))
        best, best_speed, best_s = 0, without, tokens / without
        for size in range(1, draft.num_free + 1):
            chance *= rates[min(size, len(rates)) - 1]
            tokens += chance * (1.0 - (found[size - 1] if size <= len(found) else 0.0))
            seconds = self._step_s(rows * (there + size)) + self._cost(member, size)
            if tokens / seconds > best_speed:
                best, best_speed, best_s = size, tokens / seconds, seconds
            if chance < _HOPELESS or size >= best + _PAST_BEST:
                break
        return Asking(best, best_speed, without, best_s)

    def _found_by_depth(self, draft: Draft) -> list[float]:
        """Chance that earlier members' nodes hold the right token, by depth."""
        mass = [0.0] * max(draft.tree.depths)
        for depth, chance in zip(draft.tree.depths[1:], draft.survival[1:], strict=True):
            mass[depth - 1] += math.exp(chance)
        return [min(m, 1.0) for m in mass]

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
        num_drafts = max(len(draft.tree) for draft in asked) - 1
        if num_caught_up < _LONG_LAG:  # reading is an investment, which `_is_worth` weighs, no loss of this step
            self.ledger.note_drafting(seconds)
        if num_caught_up >= _LONG_LAG:
            cost.learn_catch_up(seconds, num_caught_up)
        elif num_drafts > 0:  # finding nothing may be much cheaper than drafting
            cost.learn(num_drafts, seconds)
        else:
            cost.empty_s = seconds if cost.empty_s == 0.0 else _follow(cost.empty_s, seconds)
        for draft in asked:
            key = draft.request.request_id, member
            self._read[key] = len(draft.request.token_ids)
            rest, found = self._resting.setdefault(key, Rest()), len(draft.tree) > 1
            rest.found += (_FINDS if found else _MISSES) * (found - rest.found)
            cost.found += _OVERALL * (found - cost.found)

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Keep, over all requests, the likeliest nodes as long as they raise the expected tokens per second."""
        if not self.may_prune:
            return
        ranked = sorted(
            (-draft.survival[node], node, index)
            for index, draft in enumerate(drafts)
            for node in range(1, len(draft.tree))
        )
        if not ranked:
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
            speed = tokens / self._step_s(num_deciding + count)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Members are scored one by one, see `learn_parts`."""
        self.ledger.note_tokens(num_accepted + 1)

    def learn_parts(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Score every member's tree on the tokens that followed."""
        for part in draft.parts:
            self.calibration.learn(draft.request.request_id, part, tokens)

    def learn_draft_cost(self, seconds: float, num_drafted: int) -> None:
        """Members' costs are measured one by one, see `learn_member_cost`."""

    def learn_catch_up(self, seconds: float, num_tokens: int) -> None:
        """Members' costs are measured one by one, see `learn_member_cost`."""

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Leave it to the costs and the ledger."""
        drafts = num_rows > self._num_deciding
        self.costs.learn(num_rows, drafts, forward_s, overhead_s)
        self.ledger.book(forward_s + overhead_s, self.costs.step_s(self._num_deciding, False), drafts)

    def explain(self, request: Request) -> str | None:
        """No member's drafts are right often enough for what it costs; what is missing, member by member."""
        if self.ledger.is_spent:
            return "drafts have cost more than they gained lately; they are tried again now and then"
        plain, n = 1.0 / self.costs.step_s(self._num_deciding, False), self._num_deciding
        said = []
        for member in sorted(self._members):
            sizes = [size for size in _SIZES if size < self.max_nodes]
            step_s = {size: self.costs.step_s(n * (size + 1), True) + self._cost(member, size) for size in sizes}
            rate = self.calibration.rank_rates(request.request_id, member)[0]
            said.append(shortfall(f"drafts of {member}", rate, needed_rate(step_s, plain)))
        return "; ".join(filter(None, said)) if all(said) and said else None

    def end(self, request: Request) -> None:
        """Forget what was learned about the request alone."""
        self.calibration.forget(request.request_id)
        for known in (self._resting, self._read):
            for key in [key for key in known if key[0] == request.request_id]:
                del known[key]
