"""Who drafts, how much, and which nodes are verified: by expected tokens per second of the whole step.

Knows: costs of steps and of members, chances of nodes. Does not know: how members draft, what a pass does. It is the
guide of a `drafters.portfolio.Portfolio`, in which a single drafter stands too when it is to be guided.

*Before a member drafts* a step is planned for all requests together (`policy_plan`), with every node's chance as its
rank fared so far; where drafts could not pay were they nearly always right nobody is asked, so that no prompt is read
in vain. *While it drafts* level by level it stops where the next promises less than it costs. *After it drafted* nodes
of all requests are admitted by their chances, now those of the very nodes (`calibration`; DSpark, algorithm 1). *What
has to be read first* is an investment, made where the rest of the answer pays for it. *Trials* of what is not worth it
are paid from what drafting really gained: a ledger of that stops everything where all estimates are wrong
(`policy_ledger`). Steps in which nobody is asked are slept through, as quick as without drafts (`policy_rest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core import Request
from forerun.engine.calibration import Calibration
from forerun.engine.explain import best_speed, needed_rate, shortfall
from forerun.engine.policy import CostMemo, StepCosts
from forerun.engine.policy_ledger import Ledger
from forerun.engine.policy_members import LONG_LAG, SIZES, Held, MemberCost, most_drafts
from forerun.engine.policy_plan import (
    Outlook,
    Plan,
    Prices,
    best_gain,
    expected_gains,
    found_by_depth,
    plan_call,
    profits_s,
    worth_verifying,
)
from forerun.engine.policy_rest import LONGEST_REST, Pause, Rest, Rests, Trials
from forerun.speculation.draft import Draft, Proposal

_CHEAP = 0.05  # of a plain pass: members below this are asked whatever others may find
_LEAST_GAIN = 0.02  # of a plain step's speed that a costly member must promise to be worth its uncertainty
_PROBE_EVERY = 8  # steps without the member after which a request may be tried once more
_PROBE_DRAFTS = 3
_BURST = 4  # steps of a trial: the first is slow, drafts being out of the caches and behind
_STEPS_A_COST = 8  # for which a step's cost is taken to stay as it is
_STEPS_A_LOAD_TRIAL = 256  # of which one is open to trials though no drafts seem to pay among so many requests
_TOKENS_A_PASS, _GOES_ON = 1.3, 0.75  # in the time of a plain pass, and the chance that a right path goes on right
_HIGHEST_LEAST = 0.5  # chance of a level's leaves above which the level is drawn whatever it costs
_GUESSED_SHARE = 0.15  # a draft's cost over a plain pass, until it was measured
_GUESSED_READING = 32  # known tokens read in the time of a draft, until it was measured
_USUAL_OUTPUT, _OUTPUT_RISE, _LEAST_LEFT = 128.0, 0.2, 24  # tokens an answer is expected to have, and to have left
_ROWS = 8  # over which the price of a row is taken
_LEAST_ROOM = 4  # nodes a request may have at any load


@dataclass(slots=True)
class AdaptivePolicy:
    """The policy of an engine that may draft as it likes, and its portfolio's guide."""

    max_nodes: int
    costs: StepCosts
    may_prune: bool  # under the coupled rule; else trees are verified as they were drawn
    prunes: bool = True  # always, so that it waits for drafts; else only what was read anyway
    calibration: Calibration = field(default_factory=Calibration)
    ledger: Ledger = field(default_factory=Ledger)
    _is_open: bool = True  # somebody may be asked in this step
    _pause: Pause = field(default_factory=Pause)
    _num_deciding: int = 1
    _plain_s: float = 0.0  # of a step of so many without drafts
    _num_rows: int = 0  # of this step so far
    _members: dict[str, MemberCost] = field(default_factory=dict)
    _resting: Rests = field(default_factory=Rests)  # of members not worth asking for a request
    _read: dict[tuple[str, str], int] = field(default_factory=dict)  # known tokens when it was asked last
    _steps: CostMemo = field(init=False)
    _may_pay: dict[int, bool] = field(default_factory=dict)  # drafting could pay among so many requests, lately
    _num_steps: int = 0
    _load_tried: int = 0  # the step that was last open to trials whatever the load
    _held: dict[str, Held] = field(default_factory=dict)  # what members were asked for last
    _trials: Trials = field(default_factory=Trials)
    _usual_output: float = _USUAL_OUTPUT
    _late: tuple[str, float, Sequence[Draft]] | None = None  # a call of this step: member, enqueueing, drafts

    def __post_init__(self) -> None:
        self._steps = CostMemo(self.costs)
        self._plain_s = self._steps.plain_s(1)

    def expect(self, member: str, costs: Mapping[int, float]) -> None:
        """A member of the portfolio, and seconds its calls took when tried at start, by number of drafts."""
        cost = self._cost_of(member)
        cost.draws_levels = bool(costs)
        for num_drafts, seconds in costs.items():
            cost.learn(num_drafts, seconds)

    # -- a step begins ------------------------------------------------------------------------------------------

    def begin_step(self, num_deciding: int) -> None:
        """Remember the load: rows of all requests share one pass."""
        self._settle_late(None)
        self._num_steps += 1
        self._pause.begin_step(is_new_load=num_deciding != self._num_deciding)
        if self._pause.goes_on:
            self._is_open = False
            return
        self._book_last_steps()
        self._num_deciding, self._num_rows = max(1, num_deciding), 0
        self._plain_s = self._steps.plain_s(self._num_deciding)
        self.ledger.begin_step()
        self._is_open = self.ledger.is_open and self._load_allows()
        if not self._is_open:
            self._pause.stay(self.ledger.steps_shut(self._plain_s) or LONGEST_REST)

    def _book_last_steps(self) -> None:
        """Those slept through, or one that also read a prompt: what it took beside that must be guessed."""
        num_slept, forward_s, overhead_s = self._pause.wake()
        if num_slept:
            self.costs.learn(self._num_deciding, False, forward_s / num_slept, overhead_s / num_slept)
            self.ledger.book(forward_s + overhead_s, self._plain_s, False, num_slept)
        elif self.ledger.is_waiting:
            self.ledger.book(self._steps.drafted_s(self._num_rows), self._plain_s, drafts=True)
        if num_slept or self._num_steps % _STEPS_A_COST == 0:
            self._steps.forget()
            self._may_pay.clear()

    def node_budget(self, request: Request) -> int:
        """Room for drafts: a fair share of the rows whose cost is known; none where nobody would be asked."""
        if not self._is_open or not request.speculate or self.max_nodes <= 1 or self._rests(request):
            return 1
        share = max(_LEAST_ROOM, self.costs.verify_cost.max_rows // self._num_deciding)
        return max(1, min(self.max_nodes, share, request.max_nodes or self.max_nodes))

    def _load_allows(self) -> bool:
        """Whether drafts that are nearly always right would gain anything in a step of so many requests."""
        known = self._may_pay.get(self._num_deciding)
        if known is None:
            known = not self._members or self.max_nodes <= 1 or any(map(self._may_gain, self._members))
            self._may_pay[self._num_deciding] = known
        return known or self._tries_any_load()

    def _tries_any_load(self) -> bool:
        """What seems hopeless is looked at now and then."""
        if self._num_steps < self._load_tried + _STEPS_A_LOAD_TRIAL:
            return False
        self._load_tried = self._num_steps
        return True

    def _may_gain(self, member: str) -> bool:
        sizes = [size for size in SIZES if size < self.max_nodes]
        prices = Prices(self._steps.drafted_s, lambda size, of: self._cost(member, size, of))
        return best_gain(self._num_deciding, self._plain_s, sizes, prices) >= 1.0 + _LEAST_GAIN

    def _rests(self, request: Request) -> bool:
        """No member is to be thought about in this step, which is then a plain one and as quick as those are."""
        return self._resting.all_go_on(request.request_id, self._members, self._pause.stride)

    def plain_step_s(self, num_requests: int) -> float | None:
        """A step without drafts."""
        return self._steps.plain_s(num_requests)

    # -- before a member drafts ---------------------------------------------------------------------------------

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """See `drafters.portfolio.Guide`."""
        held = self._held.get(member)
        if held is not None and held.serves(drafts):
            self._pause.note(len(drafts), len(drafts))
            return held.quotas
        quotas = self._new_quotas(member, drafts)
        is_trial = self._trials.began(member, self._num_steps)
        self._held[member] = Held.of(drafts, quotas, _BURST - 1) if is_trial else Held.of(drafts, quotas)
        return quotas

    def _new_quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        sizes = [0] * len(drafts)
        rests = [self._rest_of(member, draft.request) for draft in drafts]
        awake = [index for index, rest in enumerate(rests) if not rest.goes_on(self._pause.stride)]
        if awake:
            for index, size in zip(awake, self._sizes(member, [drafts[index] for index in awake]), strict=True):
                if size:
                    sizes[index] = self._room(member, drafts[index], size)
                    rests[index].end()
            self._try_one(member, drafts, awake, sizes)
        self._pause.note(len(awake), sum(size > 0 for size in sizes))
        return [size + 1 for size in sizes]

    def _sizes(self, member: str, drafts: Sequence[Draft]) -> Sequence[int]:
        """How many drafts each request gets; planned once more without those for which it is not worth it."""
        without, prices = self._outlook(drafts), self._prices(member)
        gains = [self._gains(member, draft) for draft in drafts]
        plan = plan_call(gains, without, prices)
        worth = [
            plan.sizes[index] > 0 and self._is_worth(member, draft, sum(gains[index][: plan.sizes[index]]), profit_s)
            for index, (draft, profit_s) in enumerate(zip(drafts, profits_s(plan, gains, without), strict=True))
        ]
        if sum(worth) < plan.num_asked:
            plan = plan_call([g if w else [] for g, w in zip(gains, worth, strict=True)], without, prices)
        return plan.sizes if self._gains_enough(plan, without) else [0] * len(drafts)

    @property
    def _looks_at_drafts(self) -> bool:
        """Chances of drafts are known before they are verified, and may decide."""
        return self.may_prune and self.prunes

    def _room(self, member: str, draft: Draft, size: int) -> int:
        """For so many nodes it is worth asking; who draws level by level may go on as long as levels promise enough."""
        if not (self._looks_at_drafts and self._cost_of(member).draws_levels):
            return size
        return min(draft.room, self.calibration.reach(member))

    def _prices(self, member: str) -> Prices:
        cost = self._cost_of(member)
        if cost.by_size:
            return Prices(self._steps.drafted_s, cost.of_call)
        return Prices(self._steps.drafted_s, lambda size, _: _GUESSED_SHARE * size * self.costs.verify_cost(1))

    def _outlook(self, drafts: Sequence[Draft]) -> Outlook:
        """The step as it is so far: other requests get one token each."""
        n = self._num_deciding
        num_nodes = sum(len(draft.tree) - 1 for draft in drafts)
        found = sum(sum(found_by_depth(draft.tree.depths, draft.survival)) for draft in drafts) if num_nodes else 0.0
        return Outlook(n + found, n + num_nodes, self._steps.drafted_s(n + num_nodes) if num_nodes else self._plain_s)

    def _gains(self, member: str, draft: Draft) -> list[float]:
        """What each next node of the member is expected to add to the step's tokens."""
        found = found_by_depth(draft.tree.depths, draft.survival) if len(draft.tree) > 1 else []
        rates = self.calibration.rank_rates(draft.request.request_id, member)
        return expected_gains(rates, found, min(draft.room, self.calibration.reach(member)))

    def _is_worth(self, member: str, draft: Draft, tokens: float, profit_s: float) -> bool:
        """Whether what is saved pays for calls that find nothing, and over the rest of the answer for reading first."""
        found, empty_s = self._rest_of(member, draft.request).found, self._cost_of(member).empty_s
        num_steps = self._num_left(draft.request) / (1.0 + tokens)
        return (
            found * profit_s > (1.0 - found) * empty_s
            and num_steps * profit_s >= self._catch_up_s(member, draft.request)
        )  # fmt: skip

    def _gains_enough(self, plan: Plan, without: Outlook) -> bool:
        share = plan.num_asked / self._num_deciding
        is_cheap = plan.call_s < _CHEAP * self._plain_s
        return plan.speed > without.speed and (is_cheap or plan.speed >= (1.0 + _LEAST_GAIN * share) * without.speed)

    def _num_left(self, request: Request) -> float:
        """Tokens the answer is expected to have still."""
        return min(max(self._usual_output - request.num_output, _LEAST_LEFT), request.num_remaining)

    def _try_one(self, member: str, drafts: Sequence[Draft], awake: Sequence[int], sizes: list[int]) -> None:
        """Ask for one request more that it is not worth asking for, when a trial can be paid."""
        rests = {index: self._rest_of(member, drafts[index].request) for index in awake if not sizes[index]}
        due = [index for index, rest in rests.items() if rest.waited >= _PROBE_EVERY and drafts[index].room > 0]
        if not due:
            return
        rates = {index: self.calibration.rank_rates(drafts[index].request.request_id, member)[0] for index in due}
        chosen = max(due, key=lambda index: rests[index].waited * rates[index])
        draft = drafts[chosen]
        price_s = self._price_of_trial(member, sizes) + self._catch_up_s(member, draft.request)
        if self._trials.may_begin(member, self._num_steps, _BURST * price_s, self.ledger.balance_s):
            sizes[chosen] = min(_PROBE_DRAFTS, draft.room, self.calibration.reach(member))
            rests[chosen].waited = rests[chosen].passed = 0

    def _price_of_trial(self, member: str, sizes: Sequence[int]) -> float:
        """Seconds by which a trial makes a step with these sizes longer."""
        asked, size, rows = sum(s > 0 for s in sizes), max(sizes), self._num_deciding + sum(sizes)
        call_s = self._cost(member, size, asked) if asked else 0.0
        step_s = self._steps.drafted_s(rows) if asked else self._plain_s
        more_s = self._cost(member, max(size, _PROBE_DRAFTS), asked + 1) + self._steps.drafted_s(rows + _PROBE_DRAFTS)
        return max(more_s - call_s - step_s, 0.0)

    def _cost(self, member: str, size: int, num_requests: int = 1) -> float:
        return self._prices(member).call_s(size, num_requests)

    def _catch_up_s(self, member: str, request: Request) -> float:
        """Seconds the member needs for what it has missed of a request since it was asked last."""
        lag, cost = len(request.token_ids) - self._read.get((request.request_id, member), 0), self._cost_of(member)
        if cost.catch_up_s == 0.0 and cost.by_size and lag >= LONG_LAG:
            return cost.of_call(1) * lag / _GUESSED_READING
        return cost.catch_up_s * lag

    def _cost_of(self, member: str) -> MemberCost:
        known = self._members.get(member)
        if known is None:
            known = self._members[member] = MemberCost()
        return known

    def _rest_of(self, member: str, request: Request) -> Rest:
        return self._resting.of(request.request_id, member, self._cost_of(member).found)

    def least_chance(self, member: str) -> float:
        """See `drafters.portfolio.Guide`: what a level and a node of it cost is what they must promise to save."""
        if not self._looks_at_drafts:
            return 0.0
        n = self._num_deciding
        row_s = max(self._steps.drafted_s(n + _ROWS) - self._steps.drafted_s(n + 1), 0.0) / (_ROWS - 1)
        share = (self._cost_of(member).level_s + row_s) / self._plain_s
        return min(_TOKENS_A_PASS / _GOES_ON * share, _HIGHEST_LEAST)

    # -- after it drafted ---------------------------------------------------------------------------------------

    def log_survival(self, proposal: Proposal, draft: Draft) -> list[float]:
        """See `drafters.portfolio.Guide`."""
        return self.calibration.log_survival(draft.request.request_id, proposal)

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Keep, over all requests, the likeliest nodes as long as they raise the expected tokens per second."""
        if not self.may_prune or any(draft.pending is not None for draft in drafts):
            return
        chances = [[math.exp(chance) for chance in draft.survival[1:]] for draft in drafts]
        kept = worth_verifying(chances, self._outlook_drafted(num_deciding), self._steps.drafted_s)
        for draft, nodes in zip(drafts, kept, strict=True):
            if len(nodes) < draft.num_nodes:
                draft.keep(nodes)

    def _outlook_drafted(self, num_deciding: int) -> Outlook:
        """The step without nodes: a row less than with one, but no plain step, since caches hold what drafted."""
        one_s, two_s = (self._steps.drafted_s(num_deciding + nodes) for nodes in (1, 2))
        return Outlook(float(num_deciding), num_deciding, max(2 * one_s - two_s, self._plain_s))

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Members are scored one by one, see `learn_proposals`."""
        if self._is_open:  # else this is a plain step, of which only the time counts
            self._num_rows += 1 + num_drafted
            self.ledger.note_tokens(num_accepted + 1)

    def learn_proposals(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Score every member's proposal on the tokens that followed."""
        for proposal in draft.proposals:
            self.calibration.learn(draft.request.request_id, proposal, tokens)

    def learn_member_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """See `drafters.portfolio.Guide`."""
        reading_s = self._cost_of(member).learn_call(seconds, asked, lambda: self._usual_s(member, asked))
        self.ledger.note_reading(reading_s)
        self._note_call(member, seconds - reading_s, asked)

    def _note_call(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        self.ledger.note_drafting(seconds)
        cost = self._cost_of(member)
        for draft in asked:
            self._read[draft.request.request_id, member] = len(draft.request.token_ids)
            found = draft.num_own > 0
            self._rest_of(member, draft.request).learn_found(found)
            cost.learn_found(found)

    def _usual_s(self, member: str, asked: Sequence[Draft]) -> float:
        return self._cost(member, max(most_drafts(asked), 1), len(asked))

    def learn_pending_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
        """See `drafters.portfolio.Guide`."""
        self._late = member, seconds, asked

    def _settle_late(self, rest_s: float | None) -> float:
        """The late call took what is left of its step's time; None: not known, it counts as usual -> its share."""
        if self._late is None:
            return 0.0
        (member, seconds, asked), self._late = self._late, None
        if rest_s is None:
            self._note_call(member, max(self._usual_s(member, asked), seconds), asked)
            return 0.0
        self.learn_member_cost(member, seconds + max(rest_s, 0.0), asked)
        return max(rest_s, 0.0)

    def learn_step_cost(self, num_rows: int, forward_s: float, overhead_s: float) -> None:
        """Leave it to the costs and the ledger."""
        if self._pause.goes_on:
            self._pause.sleep_through(forward_s, overhead_s)
            return
        drafts, is_late = num_rows > self._num_deciding, self._late is not None
        if is_late:
            forward_s -= self._settle_late(forward_s - self.costs.pass_s(num_rows))
        self.costs.learn(num_rows, drafts, None if is_late else forward_s, overhead_s)
        self.ledger.book(forward_s + overhead_s, self._plain_s, drafts)

    def explain(self, request: Request) -> str | None:
        """No member's drafts are right often enough for what it costs; what is missing, member by member."""
        if self.ledger.is_spent:
            return "drafts have cost more than they gained lately; they are tried again now and then"
        said = [self._missing(request, member) for member in sorted(self._members)]
        return "; ".join(filter(None, said)) if all(said) and said else None

    def _missing(self, request: Request, member: str) -> str | None:
        """Why it is not worth asking a member; None if it is."""
        n, sizes = self._num_deciding, [size for size in SIZES if size < self.max_nodes]
        step_s = {size: self.costs.step_s(n * (size + 1), True) + self._cost(member, size, n) for size in sizes}
        plain_s, rate = self.costs.step_s(n, False), self.calibration.rank_rates(request.request_id, member)[0]
        saved_s = self._num_left(request) * (plain_s - 1.0 / best_speed(rate, step_s))
        said = shortfall(f"drafts of {member}", rate, needed_rate(step_s, 1.0 / plain_s))
        if said is None and saved_s < n * self._catch_up_s(member, request):
            return f"reading the text {member} has missed would cost more than its drafts would gain"
        return said

    def end(self, request: Request) -> None:
        """Learn how long answers are; forget what was learned about the request alone."""
        self._usual_output += _OUTPUT_RISE * (request.num_output - self._usual_output)
        self._pause.end()
        self.calibration.forget(request.request_id)
        self._resting.forget(request.request_id, self._members)
        for member in self._members:
            self._read.pop((request.request_id, member), None)
