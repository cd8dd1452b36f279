"""Who drafts, how much, and which nodes are verified: by expected tokens per second of the whole step.

Knows: costs of steps and of members, chances of nodes. Does not know: how members draft, what a pass does. It is the
guide of a `drafters.portfolio.Portfolio`, in which a single drafter stands too when it is to be guided.

Four ideas. *Before a member drafts* a step is planned for all requests together (`policy_plan`), with every node's
chance as its rank fared so far; nothing is always a choice, and where drafts could not pay were they nearly always
right, the load is too high and nobody is asked, so that no drafter reads prompts in vain. *After it drafted* nodes of
all requests are admitted in the order of their chances, now those of the very nodes (`calibration`), while expected
tokens per second rise (DSpark, algorithm 1). *What has to be read first* is an investment, made where the rest of the
answer pays for it. *Trials* of what is not worth it now take a small share of the time, and a ledger of what drafting
really gave stops everything where all estimates are wrong (`policy_ledger`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core import Request
from forerun.engine.calibration import MOST_LIKELY, Calibration
from forerun.engine.explain import best_speed, needed_rate, shortfall
from forerun.engine.policy import StepCosts
from forerun.engine.policy_ledger import Ledger
from forerun.engine.policy_members import LONG_LAG, SIZES, Held, MemberCost, Pause, Rest, most_drafts
from forerun.engine.policy_plan import Outlook, Plan, Prices, found_by_depth, plan_call, profits_s
from forerun.speculation.growth import Draft, Part

_HOPELESS = 0.02  # chance of a right path below which deeper ones are not looked at
_CHEAP = 0.05  # of a plain pass: members below this are asked whatever others may find
_LEAST_GAIN = 0.02  # of a plain step's speed that a costly member must promise to be worth its uncertainty
_PROBE_EVERY = 8  # steps without the member after which a request may be tried once more
_PROBE_DRAFTS = 3
_PROBE_SHARE = 0.005  # of the time that trials may take
_MOST_SAVED = 4.0  # plain steps of it that may be saved up, and are there at the beginning
_STEPS_A_COST = 8  # for which a step's cost is taken to stay as it is
_STEPS_A_LOAD_TRIAL = 256  # of which one is open to trials though no drafts seem to pay among so many requests
_GUESSED_SHARE = 0.15  # a draft's cost over a plain pass, until it was measured
_GUESSED_READING = 32  # known tokens read in the time of a draft, until it was measured
_USUAL_OUTPUT, _OUTPUT_RISE, _LEAST_LEFT = 128.0, 0.2, 24  # tokens an answer is expected to have, and to have left
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
    _resting: dict[tuple[str, str], Rest] = field(default_factory=dict)  # by request and member not worth asking
    _read: dict[tuple[str, str], int] = field(default_factory=dict)  # known tokens when it was asked last
    _step_costs: dict[int, float] = field(default_factory=dict)  # with drafts, by rows, as worked out lately
    _plain_costs: dict[int, float] = field(default_factory=dict)  # without, by requests; likewise
    _may_pay: dict[int, bool] = field(default_factory=dict)  # drafting could pay among so many requests; likewise
    _num_steps: int = 0
    _held: dict[str, Held] = field(default_factory=dict)  # what members were asked for last
    _for_trials_s: dict[str, float] = field(default_factory=dict)  # what each member's trials may take now
    _usual_output: float = _USUAL_OUTPUT
    _late: tuple[str, float, Sequence[Draft]] | None = None  # a call of this step: member, enqueueing, drafts

    def __post_init__(self) -> None:
        self._plain_s = self.costs.step_s(1, False)

    def expect(self, member: str, costs: Mapping[int, float]) -> None:
        """A member of the portfolio, and seconds its calls took when tried at start, by number of drafts."""
        cost = self._cost_of(member)
        for num_drafts, seconds in costs.items():
            cost.learn(num_drafts, seconds)

    # -- a step begins ------------------------------------------------------------------------------------------

    def begin_step(self, num_deciding: int) -> None:
        """Remember the load: rows of all requests share one pass."""
        self._settle_late(None)
        if self.ledger.is_waiting:  # the last step also read a prompt: what it took beside that must be guessed
            self.ledger.book(self._step_s(self._num_rows), self._plain_s, drafts=True)
        self._pause.begin_step(is_new_load=num_deciding != self._num_deciding)
        self._num_deciding, self._num_rows = max(1, num_deciding), 0
        self._num_steps += 1
        if self._num_steps % _STEPS_A_COST == 0:
            for known in (self._step_costs, self._plain_costs, self._may_pay):
                known.clear()
        self._plain_s = self._plain_step_s()
        self.ledger.begin_step()
        self._is_open = not self._pause.goes_on and self.ledger.is_open and self._load_allows()

    def node_budget(self, request: Request) -> int:
        """Room for drafts: a fair share of the rows whose cost is known; none where nobody would be asked."""
        if not self._is_open or not request.speculate or self.max_nodes <= 1 or self._all_rest(request.request_id):
            return 1
        share = max(_LEAST_ROOM, self.costs.verify_cost.max_rows // self._num_deciding)
        return max(1, min(self.max_nodes, share, request.max_nodes or self.max_nodes))

    def _plain_step_s(self) -> float:
        known = self._plain_costs.get(self._num_deciding)
        if known is None:
            known = self._plain_costs[self._num_deciding] = self.costs.step_s(self._num_deciding, False)
        return known

    def _load_allows(self) -> bool:
        """Whether drafts that are nearly always right would gain anything in a step of so many requests."""
        known = self._may_pay.get(self._num_deciding)
        if known is None:
            known = not self._members or self.max_nodes <= 1 or any(map(self._may_gain, self._members))
            self._may_pay[self._num_deciding] = known
        return known or self._num_steps % _STEPS_A_LOAD_TRIAL == 0

    def _may_gain(self, member: str) -> bool:
        n, p = self._num_deciding, MOST_LIKELY
        plain, sizes = n / self._plain_s, [size for size in SIZES if size < self.max_nodes]
        most = max(
            (n + of * p * (1 - p**size) / (1 - p)) / (self._step_s(n + of * size) + self._cost(member, size, of))
            for size in sizes
            for of in {1, n}
        )
        return most >= (1.0 + _LEAST_GAIN) * plain

    def _all_rest(self, request_id: str) -> bool:
        """No member is to be thought about in this step, which is then a plain one and as quick as those are."""
        resting = self._resting
        rests = [resting.get((request_id, member)) for member in self._members]
        if not rests or any(rest is None or rest.is_over_next for rest in rests):
            return False
        return all(rest is not None and rest.goes_on(self._pause.stride) for rest in rests)

    def plain_step_s(self, num_requests: int) -> float | None:
        """A step without drafts."""
        return self.costs.step_s(num_requests, False)

    def _step_s(self, num_rows: int) -> float:
        """A step with drafts over so many rows; what is worked out is used for some steps, since working takes time."""
        known = self._step_costs.get(num_rows)
        if known is None:
            known = self._step_costs[num_rows] = self.costs.step_s(num_rows, True)
        return known

    # -- before a member drafts ---------------------------------------------------------------------------------

    def quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        """See `drafters.portfolio.Guide`."""
        held = self._held.get(member)
        if held is not None and held.serves(drafts):
            self._pause.note(len(drafts), len(drafts))
            return held.quotas
        quotas = self._new_quotas(member, drafts)
        self._held[member] = Held.of(drafts, quotas)
        return quotas

    def _new_quotas(self, member: str, drafts: Sequence[Draft]) -> list[int]:
        sizes = [0] * len(drafts)
        rests = [self._rest_of(member, draft.request) for draft in drafts]
        awake = [index for index, rest in enumerate(rests) if not rest.goes_on(self._pause.stride)]
        if awake:
            for index, size in zip(awake, self._sizes(member, [drafts[index] for index in awake]), strict=True):
                sizes[index] = size
                if size:
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

    def _prices(self, member: str) -> Prices:
        cost = self._cost_of(member)
        if cost.by_size:
            return Prices(self._step_s, cost.of_call)
        return Prices(self._step_s, lambda size, _: _GUESSED_SHARE * size * self.costs.verify_cost(1))

    def _outlook(self, drafts: Sequence[Draft]) -> Outlook:
        """The step as it is so far: other requests get one token each."""
        n = self._num_deciding
        num_nodes = sum(len(draft.tree) - 1 for draft in drafts)
        found = sum(sum(found_by_depth(draft.tree.depths, draft.survival)) for draft in drafts) if num_nodes else 0.0
        return Outlook(n + found, n + num_nodes, self._step_s(n + num_nodes) if num_nodes else self._plain_s)

    def _gains(self, member: str, draft: Draft) -> list[float]:
        """What each next node of the member is expected to add to the step's tokens.

        The member's likeliest nodes come first; one that is right adds a token unless an earlier member's node holds it
        already, which is guessed as if the nodes were a chain.
        """
        found = found_by_depth(draft.tree.depths, draft.survival) if len(draft.tree) > 1 else []
        rates = self.calibration.rank_rates(draft.request.request_id, member)
        gains, chance = [], 1.0
        for place in range(draft.num_free):
            chance *= rates[min(place, len(rates) - 1)]
            if chance < _HOPELESS:
                break
            gains.append(chance * (1.0 - found[place]) if place < len(found) else chance)
        return gains

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
        """Ask for one request more that it is not worth asking for, when time for a trial has been saved up."""
        rests = {index: self._rest_of(member, drafts[index].request) for index in awake if not sizes[index]}
        due = [index for index, rest in rests.items() if rest.waited >= _PROBE_EVERY and drafts[index].num_free > 0]
        if not due:
            return
        chosen = max(due, key=lambda index: rests[index].waited * self._first_rate(member, drafts[index]))
        draft = drafts[chosen]
        price_s = self._price_of_trial(member, sizes) + self._catch_up_s(member, draft.request)
        saved_s = self._for_trials_s.get(member, _MOST_SAVED * self._plain_s)
        if price_s <= saved_s:
            self._for_trials_s[member] = saved_s - price_s
            sizes[chosen] = min(_PROBE_DRAFTS, draft.num_free)
            rests[chosen].waited = rests[chosen].passed = 0

    def _first_rate(self, member: str, draft: Draft) -> float:
        return self.calibration.rank_rates(draft.request.request_id, member)[0]

    def _price_of_trial(self, member: str, sizes: Sequence[int]) -> float:
        """Seconds by which a trial makes a step with these sizes longer."""
        asked, size, rows = sum(s > 0 for s in sizes), max(sizes), self._num_deciding + sum(sizes)
        call_s = self._cost(member, size, asked) if asked else 0.0
        step_s = self._step_s(rows) if asked else self._plain_s
        more_s = self._cost(member, max(size, _PROBE_DRAFTS), asked + 1) + self._step_s(rows + _PROBE_DRAFTS)
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
        key = request.request_id, member
        known = self._resting.get(key)
        if known is None:
            known = self._resting[key] = Rest(found=self._cost_of(member).found)
        return known

    # -- after it drafted ---------------------------------------------------------------------------------------

    def log_survival(self, part: Part, draft: Draft) -> list[float]:
        """See `drafters.portfolio.Guide`."""
        return self.calibration.log_survival(draft.request.request_id, part)

    def admit(self, drafts: Sequence[Draft], num_deciding: int) -> None:
        """Keep, over all requests, the likeliest nodes as long as they raise the expected tokens per second."""
        if not self.may_prune or any(draft.late for draft in drafts):
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
        tokens, step_s = float(num_deciding), self._step_s
        best, best_speed = 0, tokens / self._plain_s
        for count, (minus_chance, _, _) in enumerate(ranked, 1):
            tokens += math.exp(-minus_chance)
            speed = tokens / step_s(num_deciding + count)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    # -- learning -----------------------------------------------------------------------------------------------

    def learn(self, request: Request, num_drafted: int, num_tested: int, num_accepted: int) -> None:
        """Members are scored one by one, see `learn_parts`."""
        if self._is_open:  # else this is a plain step, of which only the time counts
            self._num_rows += 1 + num_drafted
            self.ledger.note_tokens(num_accepted + 1)

    def learn_parts(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Score every member's tree on the tokens that followed."""
        for part in draft.parts:
            self.calibration.learn(draft.request.request_id, part, tokens)

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
            found = len(draft.tree) > 1
            self._rest_of(member, draft.request).learn_found(found)
            cost.learn_found(found)

    def _usual_s(self, member: str, asked: Sequence[Draft]) -> float:
        return self._cost(member, max(most_drafts(asked), 1), len(asked))

    def learn_late_cost(self, member: str, seconds: float, asked: Sequence[Draft]) -> None:
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
        """Leave it to the costs and the ledger; save up for trials."""
        drafts, is_late = num_rows > self._num_deciding, self._late is not None
        if is_late:
            forward_s -= self._settle_late(forward_s - self.costs.pass_s(num_rows))
        self.costs.learn(num_rows, drafts, None if is_late else forward_s, overhead_s)
        self.ledger.book(forward_s + overhead_s, self._plain_s, drafts)
        most_s = _MOST_SAVED * self._plain_s
        for member, saved_s in self._for_trials_s.items():
            self._for_trials_s[member] = min(saved_s + _PROBE_SHARE * (forward_s + overhead_s), most_s)

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
        for known in (self._resting, self._read):
            for member in self._members:
                known.pop((request.request_id, member), None)
