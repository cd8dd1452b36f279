"""What was right so often will be right as often: by rank, by estimate, and by request."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from forerun.core import Request, SamplingParams
from forerun.policy.acceptance import LEAST, Acceptance
from forerun.speculation.draft import Draft, Proposal
from forerun.speculation.tree import ROOT


def request() -> Request:
    return Request("r", (1,), SamplingParams(), seed=0, max_len=10_000)


def chain(tokens: Sequence[int], chance: float = 1.0) -> Proposal:
    draft = Draft(request(), 64, member="m")
    node = ROOT
    for depth, token in enumerate(tokens, 1):
        node = draft.add(node, token, depth * math.log(chance))
    return draft.proposal_of("m")


def test_nodes_are_believed_as_far_as_they_were_right() -> None:
    known, asked = Acceptance(), request()
    for _ in range(60):
        known.learn(asked, chain([2, 3, 4]), [2, 9])  # the first is right, the second never
    chances = [math.exp(chance) for chance in known.log_chances(chain([5, 6, 7]))]
    assert chances[0] == 1.0 and 0.85 < chances[1] <= 1.0 - LEAST and chances[2] < 0.1 * chances[1]


def test_estimates_are_scored_by_what_they_came_to() -> None:
    known = Acceptance()
    for index in range(100):
        known.learn(request(), chain([2], 0.8), [2] if index % 2 else [3])
        known.learn(request(), chain([2], 0.1), [3])
    sure, unsure = (math.exp(known.log_chances(chain([2], chance))[1]) for chance in (0.8, 0.1))
    assert sure == pytest.approx(0.5, abs=0.1) and unsure < 0.06
    assert 0.3 < math.exp(known.log_chances(chain([2], 0.4))[1]) < 0.5, "a band nobody saw is believed"


def test_siblings_share_what_can_be_right() -> None:
    draft, known = Draft(request(), 9, member="m"), Acceptance()
    for token, chance in ((2, 0.8), (3, 0.1)):
        draft.add(ROOT, token, math.log(chance))
    for _ in range(80):
        known.learn(request(), draft.proposal_of("m"), [3])
    likely, unlikely = (math.exp(chance) for chance in known.log_chances(draft.proposal_of("m"))[1:])
    assert unlikely > 0.8 and likely < 0.15


def test_ranks_of_a_chain_are_chances_to_go_on() -> None:
    known, fresh = Acceptance(), request()
    assert len(set(known.rates(fresh, "m"))) == 1
    for index in range(300):
        known.learn(request(), chain([2, 3, 4]), [[9], [2, 9], [2, 3, 9], [2, 3, 4, 5]][index % 4])
    first, second, third = known.rates(fresh, "m")[:3]
    assert (first, second, third) == pytest.approx((0.75, 0.67, 0.5), abs=0.08)


def test_what_lies_behind_the_known_text_counts_neither_way() -> None:
    """Where fewer nodes are verified than drafted, the others must not look wrong."""
    known = Acceptance()
    for _ in range(50):
        known.learn(request(), chain([2, 3, 4, 5]), [2])
    assert known.rates(request(), "m")[0] > 0.9 and known.rates(request(), "m")[1] > 0.5


def test_a_request_fares_as_usual_until_it_has_shown_otherwise() -> None:
    known, good, bad = Acceptance(), request(), request()
    for _ in range(30):
        known.learn(good, chain([2, 3]), [2, 3, 4])
        known.learn(bad, chain([2, 3]), [9])
    rates = [known.rates(asked, "m")[0] for asked in (bad, request(), good)]
    assert rates == sorted(rates) and rates[0] < 0.5 * rates[2] and min(rates) >= LEAST


def test_calls_that_find_nothing_are_counted() -> None:
    known = Acceptance()
    assert known.found("m") == 1.0
    for index in range(200):
        known.learn_call("m", index % 4 == 0)
    assert known.found("m") == pytest.approx(0.25, abs=0.1)
