"""What a policy learns of time where drafts are read with the target's choices: a card draws them in the pass's time.

The made-up card takes so long for a pass and so long for a draft; the host sees one time for both.
"""

from __future__ import annotations

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.engine.policy import StepCosts, VerifyCost
from forerun.engine.policy_adaptive import AdaptivePolicy
from forerun.speculation.draft import Draft, PendingDrafts
from tests.support.hopeful import show_plain_steps

MEMBER = "m"
ENQUEUED_S, DRAFT_S, OVERHEAD_S = 0.01, 0.05, 0.02
SIZE, NUM_REQUESTS = 4, 4
NUM_ROWS = NUM_REQUESTS * (1 + SIZE)


def pass_s(num_rows: int) -> float:
    return 1.0 + 0.002 * num_rows


def policy(draft_s: float) -> AdaptivePolicy:
    """It was told at start what calls for one request take."""
    costs = StepCosts(VerifyCost({num_rows: pass_s(num_rows) for num_rows in (1, 2, 4, 8, 16, 32, 64)}))
    made = AdaptivePolicy(9, costs, may_prune=True, prunes=False)
    made.expect(MEMBER, {size: ENQUEUED_S + draft_s * size for size in (1, 2, 4, 8)})
    show_plain_steps(made, pass_s(NUM_REQUESTS), NUM_REQUESTS)
    for _ in range(3):  # the ledger does not count the first with drafts
        unlearned_step(made, NUM_REQUESTS, late=False, drawn_s=0.0)
        made.ledger.book(0.0, 1.0, drafts=True)
    return made


def step(taught: AdaptivePolicy, late: bool, drawn_s: float, slower: float = 1.0) -> None:
    """All requests get `SIZE` drafts, drawn in `drawn_s`, and have one right; passes are `slower` than at start."""
    whole_s = slower * pass_s(NUM_ROWS) + unlearned_step(taught, NUM_REQUESTS, late, drawn_s)
    taught.learn_step_cost(NUM_ROWS, whole_s, OVERHEAD_S)


def unlearned_step(taught: AdaptivePolicy, num: int, late: bool, drawn_s: float) -> float:
    """Up to the time of the pass -> seconds of drafting that are in it."""
    taught.begin_step(num)
    asked = [drafted(str(index)) for index in range(num)]
    if late:
        taught.learn_pending_cost(MEMBER, ENQUEUED_S, asked)
    else:
        taught.learn_member_cost(MEMBER, ENQUEUED_S + drawn_s, asked)
    for draft in asked:
        taught.learn(draft.request, SIZE, 2, 1)
    return drawn_s if late else 0.0


def plain_step(taught: AdaptivePolicy, slower: float = 1.0) -> None:
    taught.begin_step(NUM_REQUESTS)
    for index in range(NUM_REQUESTS):
        taught.learn(drafted(str(index)).request, 0, 0, 0)
    taught.learn_step_cost(NUM_REQUESTS, slower * pass_s(NUM_REQUESTS), OVERHEAD_S)


def drafted(name: str) -> Draft:
    draft = Draft(Request(name, (1,), SamplingParams(), seed=0, max_len=10_000), SIZE + 1)
    draft.add_chain(range(2, 2 + SIZE), MEMBER)
    return draft


def pending() -> Draft:
    draft = Draft(Request("r", (1,), SamplingParams(), seed=0, max_len=10_000), SIZE + 1)
    PendingDrafts([draft], torch.zeros(0), lambda _: None, torch.zeros(1, SIZE, dtype=torch.int64))
    return draft


@pytest.mark.parametrize("guessed_s", [DRAFT_S / 4, DRAFT_S])
def test_a_late_calls_cost_is_learned_as_if_it_had_been_waited_for(guessed_s: float) -> None:
    """The cost of a call for three requests, which nobody measured at start, and what the ledger sees of the step."""
    late, early = policy(guessed_s), policy(guessed_s)
    for made in (late, early):
        for _ in range(40):
            plain_step(made)
        for _ in range(60):
            step(made, made is late, drawn_s=4.0 * DRAFT_S)
    expected = ENQUEUED_S + 4.0 * DRAFT_S
    for made in (late, early):
        assert made._cost(MEMBER, SIZE, NUM_REQUESTS) == pytest.approx(expected, rel=0.01)
        assert made.costs.pass_s(NUM_ROWS) == pytest.approx(pass_s(NUM_ROWS), rel=0.01)
    assert late.ledger.balance_s == pytest.approx(early.ledger.balance_s)
    assert late.costs.overhead_s == pytest.approx(early.costs.overhead_s)


def test_plain_passes_are_not_believed_dearer_for_what_drafts_took() -> None:
    taught = policy(DRAFT_S)
    plain_step(taught)
    before = taught.plain_step_s(NUM_REQUESTS)
    for _ in range(50):
        step(taught, late=True, drawn_s=0.9)
    assert taught.plain_step_s(NUM_REQUESTS) == pytest.approx(before, rel=0.02)
    assert taught._cost(MEMBER, SIZE, NUM_REQUESTS) == pytest.approx(ENQUEUED_S + 0.9, rel=0.02)


def test_what_plain_steps_say_of_slower_passes_holds_for_late_ones() -> None:
    """Contexts grew, passes take half as long again: plain steps tell, and the call is not charged for it."""
    taught = policy(DRAFT_S)
    for _ in range(60):
        plain_step(taught, slower=1.5)
        for _ in range(3):
            step(taught, late=True, drawn_s=DRAFT_S, slower=1.5)
    assert taught.costs.pass_s(NUM_ROWS) == pytest.approx(1.5 * pass_s(NUM_ROWS), rel=0.01)
    assert taught._cost(MEMBER, SIZE, NUM_REQUESTS) == pytest.approx(ENQUEUED_S + DRAFT_S, rel=0.05)


def test_a_pass_believed_too_slow_makes_no_call_cheaper_than_its_enqueueing() -> None:
    taught = policy(DRAFT_S)
    for _ in range(40):
        step(taught, late=True, drawn_s=DRAFT_S, slower=0.5)
    assert taught._cost(MEMBER, SIZE, NUM_REQUESTS) == pytest.approx(ENQUEUED_S, rel=0.01)


def test_a_step_that_also_read_a_prompt_teaches_no_time_and_is_booked() -> None:
    """Its pass took longer for other rows; the call counts as what such calls take."""
    taught, num = policy(DRAFT_S), 3  # whose calls are guessed from those for one
    for _ in range(3):
        plain_step(taught)
    known, balance_s = taught._cost(MEMBER, SIZE, num), taught.ledger.balance_s
    unlearned_step(taught, num, late=True, drawn_s=5.0)
    taught.begin_step(num)
    assert taught._cost(MEMBER, SIZE, num) == known
    plain_s, whole_s = taught.plain_step_s(num), taught.costs.step_s(num * (1 + SIZE), True) + known
    assert plain_s is not None
    assert taught.ledger.balance_s - balance_s == pytest.approx(2 * plain_s - 0.99 * whole_s, rel=0.01)


def test_what_was_not_read_is_not_pruned_and_what_was_is() -> None:
    """Rows that are dear: of drafts nobody waited for, lookups', the unlikely are cut on a card, too."""
    taught = AdaptivePolicy(9, StepCosts(VerifyCost({1: 1.0, 64: 64.0})), may_prune=True, prunes=False)
    for is_late in (True, False):
        draft = pending() if is_late else drafted("r")
        draft.survival[1:] = [-5.0] * (len(draft.survival) - 1)
        taught.admit([draft], 1)
        assert draft.num_nodes == (SIZE + 1 if is_late else 1)
