"""Who drafts, how much, and which nodes are verified.

Knows: costs, chances, the exploration budget, what became of each step. Does not know: how drafters draft, what a pass
computes, acceptance rules.

`plan` is asked before a step and changes nothing; scheduler and drafters get a set of pure queries. `learn` is told of
every step and alone changes what a policy knows. What a policy decides changes speed, never tokens under the coupled
rule; under the rejection rule it decides before anything is drawn, so the distribution stays the target's.

*Before a drafter drafts* the step is planned for all requests together, each node's chance being that of its rank.
*While it drafts* level by level it stops where the next level promises less than it costs. *After it drafted* nodes of
all requests are kept by their own chances. A text to be read first is an investment: the rest of the answer must pay.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from forerun.core import Request
from forerun.drafters.base import DraftCall
from forerun.policy.acceptance import LEAST, MEMORY, PRIOR, PROMISED, Acceptance, Tally, is_promised
from forerun.policy.base import StepPlan, StepResult
from forerun.policy.costs import RISE, Costs
from forerun.policy.exploration import SPREAD, Exploration
from forerun.policy.planner import Outlook, expected_gains, found_by_depth, plan_call, worth_verifying
from forerun.policy.reasons import why_plain
from forerun.speculation.draft import Draft, Proposal, pending_of

# The first step of a trial is slow, drafts being out of the caches and behind. Four steps: batches 0.96, two: 0.99.
TRIAL_STEPS, TRIAL_DRAFTS = 2, 3
# Plain steps after drafts or a prompt from which on they are as quick as in plain decoding, the target's weights being
# back in the caches (`mini` on an EPYC: 1520, 1350, 910, 820, 750, 780 us after a prompt; 670 later).
WARM_AFTER: Final = 5
# One in so many steps of a rest is timed: learning takes 20 us a step there, 25 if all are (`ngram`; EPYC, Zen 5).
TIMED: Final = 8
USUAL_OUTPUT: Final = 128.0  # tokens an answer is expected to have until some were seen: soon forgotten


@dataclass(slots=True)
class AdaptivePolicy:
    """The most expected tokens per second, at the price of a little exploration."""

    max_nodes: int
    costs: Costs
    may_prune: bool  # under the coupled rule; else trees are verified as they were drawn
    looks_at_drafts: bool = True  # always, so that the step waits for drafts; else only at what was read anyway
    acceptance: Acceptance = field(default_factory=Acceptance)
    adapted: WeakKeyDictionary[object, Acceptance] = field(default_factory=WeakKeyDictionary)  # by requests' adapter
    exploration: Exploration = field(default_factory=Exploration)
    usual_output: float = USUAL_OUTPUT
    # lately: the steps' time in plain steps, and the tokens a request they gave
    speedup: Tally = field(default_factory=partial(Tally, PRIOR, PRIOR))
    readers: frozenset[str] = frozenset()  # members that read a request's prediction
    trial: str | None = None  # the member that is tried
    _gained_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by member that was asked
    _num_plain: int = 0  # steps since drafts were asked for, or a prompt was read
    _trial_left: int = 0  # steps
    _num_trials: Counter[str] = field(default_factory=Counter)  # by member
    _until_trial: int = 0  # steps until one is considered while others draft
    _rest: int = 0  # steps the current rest has
    _rest_left: int = 0

    # -- queries ------------------------------------------------------------------------------------------------

    def plan(self, requests: Sequence[Request]) -> StepPlan:
        """Nobody drafts while the policy rests, drafts lost too much, or a plain step is due; but see `is_promised`."""
        rests = self._rest_left > 0 and all(request.num_output > 0 for request in requests)
        knows_plain = self.costs.knows_plain and not self.exploration.wants_plain
        is_open = not rests and self.exploration.may_draft and knows_plain
        return AdaptivePlan(self, max(len(requests), 1), is_open, knows_plain)

    def wants(self, member: str, draft: Draft) -> bool:
        """Whether drafts of the member would pay for this request alone."""
        return AdaptivePlan(self, 1, True).wanted(member, [draft])[0] > 0

    def plain_step_s(self, num_requests: int) -> float:
        """A step without drafts, be it between such with drafts."""
        return self.costs.step_s(num_requests, False)

    def plain_s(self, num_requests: int) -> float | None:
        """See `Policy`."""
        return self.costs.plain_s(num_requests)

    def num_left(self, request: Request) -> float:
        """Tokens the answer is expected to have still."""
        return min(max(self.usual_output - request.num_output, self.usual_output / 4), request.num_remaining)

    def acceptance_of(self, request: Request) -> Acceptance:
        """That of the request's adapter; what is known without one, until there is more."""
        return self.acceptance if request.adapter is None else self.adapted.get(request.adapter, self.acceptance)

    def reading_s(self, member: str, request: Request) -> float:
        """Seconds the member needs for what it has missed of a request: nothing that lay in the prefix cache."""
        num_read, num_preemptions = request.last_asked.get(member, (request.num_cached_tokens, 0))
        if request.num_preemptions > num_preemptions:
            num_read = 0
        return self.costs.calls[member].reading_s(len(request.token_ids) - num_read)

    def gained_s(self, member: str) -> float:
        """See `DraftPlan`."""
        return self._gained_s.get(member, 0.0)

    def explain(self, request: Request) -> str | None:
        """See `policy.reasons`."""
        return why_plain(self, request)

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, result: StepResult) -> None:
        """Costs, chances, and whether it paid."""
        if (num_tokens := sum([len(outcome.tokens) for outcome in result.outcomes])) == 0:
            return
        num, plain_s = len(result.outcomes), self.plain_step_s(len(result.outcomes))
        self.exploration.meet(plain_speed := num / plain_s)
        if self._rests_through(result):
            return
        rest_s, calls_s = self._learn_step(result)
        reading_s = sum(map(self._learn_call, result.calls, calls_s)) if calls_s else 0.0
        spent_s = rest_s + sum(calls_s) - reading_s
        self.speedup.add(max(spent_s / plain_s, 1.0), num_tokens / num, MEMORY)  # no step is quicker than a plain one
        for member in {call.member for call in result.calls}:
            self._gained_s[member] += num_tokens / num * (self.costs.plain_s(num) or plain_s) - spent_s - reading_s
        only_measured, is_warm = self.exploration.wants_plain and not result.calls, self._num_plain >= WARM_AFTER
        self.exploration.book(spent_s * plain_speed, reading_s * plain_speed, num_tokens, bool(result.calls), is_warm)
        self._num_plain = 0 if result.calls or result.num_span else self._num_plain + 1
        for request, draft, tokens in result.outcomes:
            for proposal in draft.proposals if tokens else ():
                self._learned(request).learn(request, proposal, tokens)
            if request.finish_reason is not None:
                self.usual_output += RISE * (request.num_output - self.usual_output)
        if not only_measured:
            self._settle(result)

    def _rests_through(self, result: StepResult) -> bool:
        """Of a plain step of a rest only the time is learned, now and then: Python between passes slows these, too."""
        if self._rest_left <= 1 or self._num_plain < WARM_AFTER or result.calls or result.num_span:
            return False
        if any(request.finish_reason is not None or draft.max_nodes > 1 for request, draft, _ in result.outcomes):
            return False
        self._rest_left -= 1
        self.exploration.rest(len(result.outcomes))
        if self._rest_left % TIMED == 0:
            self.speedup.add(TIMED, TIMED, MEMORY**TIMED)
            self._learn_step(result)
        return True

    def _learned(self, request: Request) -> Acceptance:
        """What takes in how the request fares; that of a new adapter begins with what is known without one."""
        if request.adapter is not None and request.adapter not in self.adapted:
            self.adapted[request.adapter] = deepcopy(self.acceptance)
        return self.acceptance_of(request)

    def _learn_step(self, result: StepResult) -> tuple[float, list[float]]:
        """-> seconds of the step without calls, and of each call.

        Where prompts were read the step counts as usual. Where the device drew drafts in the time of the pass, what the
        pass took beyond the usual is the call's.
        """
        drafts = result.num_rows > len(result.outcomes)
        calls_s = [call.seconds for call in result.calls]
        usual_s, rest_s = self.costs.step_s(result.num_rows, drafts), result.seconds.own_s - sum(calls_s)
        if result.calls and (last := result.calls[-1]).is_pending:
            if result.num_span:
                most = max(asked.num_drafts for asked in last.asked)
                usual_call_s = self.costs.calls[last.member].call_s(max(most, 1), len(last.asked))
                calls_s[-1] = max(usual_call_s, last.seconds)
            else:
                calls_s[-1] += max(rest_s - usual_s, 0.0)
            return usual_s if result.num_span else min(rest_s, usual_s), calls_s
        if result.num_span:
            return usual_s, calls_s
        if not drafts and not calls_s and self._num_plain >= WARM_AFTER:  # tokens that a grammar forces are drafts
            self.costs.learn_plain(result.num_rows, rest_s)
        self.costs.learn_step(result.num_rows, drafts, rest_s)
        return rest_s, calls_s

    def _learn_call(self, call: DraftCall, seconds: float) -> float:
        num_drafts = depth = num_read = 0
        for asked in call.asked:
            self._learned(asked.request).learn_call(call.member, asked.num_drafts > 0)
            num_drafts, depth = max(num_drafts, asked.num_drafts), max(depth, asked.depth)
            num_read += asked.num_read
        return self.costs.learn_call(call.member, len(call.asked), num_drafts, depth, num_read, seconds)

    def _settle(self, result: StepResult) -> None:
        """Rests grow while nobody is worth asking. Now and then, who was not asked is considered for a trial."""
        self._until_trial -= 1
        if result.calls:
            self._rest = self._rest_left = 0
            self._trial_left -= self.trial is not None
            if self._trial_left <= 0:
                self.trial = None
        elif self._rest_left > 0:
            self._rest_left -= 1
            return
        else:
            self._rest = self._rest_left = min(max(2 * self._rest, 1), SPREAD)
            self._until_trial, self.trial = 0, None  # who was to be tried could not draft: others shall be
        if self._until_trial <= 0 and self.trial is None:
            self._until_trial = SPREAD
            self._begin_trial([outcome.request for outcome in result.outcomes], {call.member for call in result.calls})

    def _begin_trial(self, requests: Sequence[Request], asked: Set[str]) -> None:
        """Try the member that was tried least, of those that were not asked and whose price is covered."""
        plain_s = self.plain_step_s(len(requests))
        for member in sorted(self.costs.calls.keys() - asked, key=lambda name: (self._num_trials[name], name)):
            price_s = TRIAL_STEPS * self._price_s(member, len(requests))
            price_s += min(self.reading_s(member, request) for request in requests)
            if not self._might_pay(member, len(requests), plain_s):
                price_s = math.inf  # tried all the same, but rarely: costs may be other than they seem
            if self.exploration.covers(price_s * len(requests) / plain_s):
                self._num_trials[member] += 1
                self.trial, self._trial_left, self._rest_left = member, TRIAL_STEPS, 0
                return

    def _might_pay(self, member: str, num_requests: int, plain_s: float) -> bool:
        """Whether drafts that are as often right as is ever believed would gain anything at this load."""
        gains = expected_gains((1.0 - LEAST,), (), self.max_nodes - 1)
        plain, call_s = Outlook(num_requests, num_requests, plain_s), self.costs.calls[member].call_s
        return any(plan_call([gains] * num_requests, plain, self.costs.step_s, call_s, num_requests / plain_s)[0])

    def _price_s(self, member: str, num_requests: int) -> float:  # by which a few drafts make a plain step longer
        step_s = self.costs.step_s(num_requests + TRIAL_DRAFTS) + self.costs.calls[member].call_s(TRIAL_DRAFTS, 1)
        return max(step_s - self.plain_step_s(num_requests), 0.0)


@dataclass(slots=True)
class AdaptivePlan:
    """One step of an adaptive policy: pure queries of what it knows."""

    policy: AdaptivePolicy
    num_requests: int
    is_open: bool  # somebody may be asked
    knows_plain: bool = True  # what plain steps take

    @property
    def speed(self) -> float:
        """Tokens a second that decoding gives at this load: what a second is worth."""
        return max(self.policy.speedup.rate, 1.0) * self.num_requests / self.policy.plain_step_s(self.num_requests)

    @property
    def looks_at_drafts(self) -> bool:
        """See `StepPlan`."""
        return self.policy.looks_at_drafts

    def max_nodes(self, request: Request) -> int:
        """A fair share of the rows whose cost is known; none where nobody would be asked."""
        most = self.policy.max_nodes
        if most <= 1 or not request.speculate or not (self.is_open or self._is_promised(request)):
            return 1
        share = max(1 + TRIAL_DRAFTS, self.policy.costs.passes.max_rows // self.num_requests)
        return max(1, min(most, share, request.max_nodes or most))

    def sizes(self, member: str, drafts: Sequence[Draft]) -> Sequence[int]:
        """Drafts the member is asked for, request by request; 0: it is not asked."""
        policy, is_reader = self.policy, member in self.policy.readers
        promised = [min(PROMISED, d.room) if is_reader and self._is_promised(d.request) else 0 for d in drafts]
        if not self.is_open:
            return promised
        sizes = list(map(max, self.wanted(member, drafts), promised))
        if policy.trial == member and not any(sizes):
            best = max(range(len(drafts)), key=partial(self._promise, member, drafts))
            return [min(TRIAL_DRAFTS, drafts[best].room) if index == best else 0 for index in range(len(drafts))]
        if self._may_choose and policy.costs.calls[member].draws_levels:  # it stops by itself; few it draws as a chain
            return [draft.room if size > TRIAL_DRAFTS else size for draft, size in zip(drafts, sizes, strict=True)]
        return sizes

    def _is_promised(self, request: Request) -> bool:
        return self.knows_plain and is_promised(request, self.policy.readers, not self.policy.exploration.may_draft)

    def _promise(self, member: str, drafts: Sequence[Draft], index: int) -> tuple[float, float]:
        """The less there is to read the better, then the likelier."""
        request = drafts[index].request
        return -self.policy.reading_s(member, request), self.policy.acceptance_of(request).rates(request, member)[0]

    @property
    def _may_choose(self) -> bool:
        """Chances of drafts are known before they are verified, and may decide."""
        return self.policy.may_prune and self.policy.looks_at_drafts

    def _gains(self, member: str, draft: Draft) -> list[float]:
        """What each next node of the member is expected to add to the step's tokens."""
        found = found_by_depth(draft.tree.depths, draft.survival) if len(draft.tree) > 1 else []
        return expected_gains(self.policy.acceptance_of(draft.request).rates(draft.request, member), found, draft.room)

    def wanted(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """Drafts of the member that pay, request by request."""
        gains = [self._gains(member, draft) for draft in drafts]
        without, costs = self._outlook(drafts), self.policy.costs
        call_s = costs.calls[member].call_s
        sizes, after = plan_call(gains, without, costs.step_s, call_s, self.speed)
        if not any(sizes):
            return sizes
        brought = after.tokens - without.tokens
        saved_s = brought / self.speed - (after.seconds - without.seconds)  # a step
        token_s, miss_s = saved_s / brought, call_s(max(sizes), 1)
        return [
            size if self._is_worth(member, draft.request, sum(of_request[:size]), token_s, miss_s) else 0
            for size, of_request, draft in zip(sizes, gains, drafts, strict=True)
        ]

    def _is_worth(self, member: str, request: Request, tokens: float, token_s: float, miss_s: float) -> bool:
        """Whether what drafts save pays for calls that find nothing, and over the rest of the answer for reading."""
        found, num_left = self.policy.acceptance_of(request).found(member), self.policy.num_left(request)
        saved_s = found * tokens * token_s - (1.0 - found) * miss_s
        return saved_s > 0.0 and num_left / (1.0 + tokens) * saved_s >= self.policy.reading_s(member, request)

    def _outlook(self, drafts: Sequence[Draft]) -> Outlook:
        """The step as it is so far: other requests get one token each."""
        n, costs = self.num_requests, self.policy.costs
        num_nodes = sum([len(draft.tree) - 1 for draft in drafts])
        if num_nodes == 0:
            return Outlook(n, n, costs.step_s(n, False))
        found = sum(sum(found_by_depth(d.tree.depths, d.survival)) for d in drafts if len(d.tree) > 1)
        return Outlook(n + found, n + num_nodes, costs.step_s(n + num_nodes))

    def gained_s(self, member: str) -> float:
        """See `DraftPlan`."""
        return self.policy.gained_s(member)

    def least_chance(self, member: str) -> float:
        """What a level must promise: what it and a row cost, in tokens of plain passes."""
        if not self._may_choose:
            return 0.0
        n, costs, most = self.num_requests, self.policy.costs, self.policy.max_nodes
        row_s = max(costs.step_s(n + most) - costs.step_s(n + 1), 0.0) / max(most - 1, 1)
        return min(self.speed / n * (costs.calls[member].level_s + row_s), 1.0)

    def log_chances(self, request: Request, proposal: Proposal) -> Sequence[float]:
        """By how often such estimates were right."""
        return self.policy.acceptance_of(request).log_chances(proposal)

    def prune(self, drafts: Sequence[Draft]) -> None:
        """Over all requests the likeliest nodes are kept, as long as they raise the expected tokens per second."""
        if not self.policy.may_prune or pending_of(drafts) is not None:
            return
        kept = worth_verifying(
            [draft.survival for draft in drafts], self.num_requests, self.policy.costs.step_s, self.speed
        )
        for draft, nodes in zip(drafts, kept, strict=True):
            readers = self.policy.readers if self._is_promised(draft.request) else ()
            wanted = sorted({*nodes}.union(*(each.nodes for each in draft.proposals if each.member in readers)))
            if len(wanted) < len(draft.tree):
                draft.keep(wanted)
