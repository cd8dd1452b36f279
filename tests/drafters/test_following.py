"""Following a request: states in any pieces are the states; when rows are read, and who is not followed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.drafters.base import Observed
from forerun.drafters.following import MOST_UNREAD, FeatureFollower, Follow, Thrift, side_by_side

WIDTH = 3


def states(start: int, num: int) -> Tensor:
    """The state of position p is p, p + 1000: two layers."""
    rows = torch.arange(start, start + num)[:, None].float()
    return torch.cat([rows.expand(-1, WIDTH), rows.expand(-1, WIDTH) + 1000], dim=1)


def piece(start: int, num: int, gaps: bool = False) -> Callable[[], Tensor]:
    """The states among others of their step, which are rubbish."""
    places = [2 + i * (2 if gaps else 1) for i in range(num)]
    whole = torch.full((places[-1] + 3, 2 * WIDTH), -1.0)
    whole[places] = states(start, num)
    return partial(side_by_side, whole.split(WIDTH, dim=1), places)


def test_states_in_pieces_are_the_states() -> None:
    follow = Follow(1, 0, torch.zeros(0, 2 * WIDTH))
    for start, num, gaps in ((0, 4, False), (4, 1, False), (5, 3, True), (8, 1, False)):
        follow.add(start, num, piece(start, num, gaps))
    assert follow.reaches(10) and not follow.reaches(11)
    assert torch.equal(follow.take(1, 10), states(0, 9))
    follow.advance(10)
    assert follow.first == 8 and torch.equal(follow.take(9, 10), states(8, 1)), "the last may be read once more"
    follow.add(9, 4, piece(9, 4, True))
    follow.add(11, 1, piece(11, 1))  # known again from there on
    assert follow.reaches(13) and not follow.reaches(14)
    assert torch.equal(follow.take(10, 13), states(9, 3))


def test_what_others_computed_without_leaving_states_is_lost() -> None:
    follow = Follow(4, 8, torch.zeros(0, 0))
    follow.add(8, 2, piece(8, 2))
    assert follow.is_broken(10) and not follow.reaches(10)
    sound = Follow(8, 7, states(7, 1))
    sound.add(8, 2, piece(8, 2))
    assert not sound.is_broken(10) and torch.equal(sound.take(8, 11), states(7, 3))


def decoded(request: Request, num_rows: int, num_nodes: int) -> Observed:
    """A step that computed `num_rows` rows of known tokens, the last `num_nodes` of them nodes of a draft."""
    request.num_computed += num_rows
    request.token_ids.extend([7] * (request.num_computed + 1 - len(request.token_ids)))
    return Observed(request, range(num_rows), tuple(range(num_nodes)), (7,) * num_nodes)


def follower_of(adaptive: bool, sees_slot_zero: bool = False) -> FeatureFollower:
    head: Any = SimpleNamespace(hidden_layers=(0,), sees_slot_zero=sees_slot_zero, state_size=WIDTH)
    options = SimpleNamespace(adaptive=adaptive)
    context: Any = SimpleNamespace(kernels=SimpleNamespace(device=torch.device("cpu")), options=options)
    return FeatureFollower(head, context)


def test_what_drafts_gained_is_what_their_plan_says() -> None:
    follower, request = follower_of(adaptive=True), Request("a", (1,) * 10, SamplingParams(), 0)
    plan = SimpleNamespace(gained_s=lambda member: {"eagle": 2.5}[member])
    follower.wanted([SimpleNamespace(plan=plan, member="eagle", request=request)])  # type: ignore[list-item]
    follower.observe([], {}, lambda spans: None)
    assert follower._thrift is not None and follower._thrift.gained_s == 2.5


@pytest.mark.parametrize("sees_slot_zero", [False, True])
def test_a_request_that_begins_anew_is_followed(sees_slot_zero: bool) -> None:
    follower, request = follower_of(True, sees_slot_zero), Request("a", (1,) * 10, SamplingParams(), 0)
    follower.resume(request, 0, None)
    assert follower.reads(request)


def test_prompts_and_ended_requests_are_read_at_once_decoded_tokens_of_all_together() -> None:
    follower, reads = follower_of(adaptive=False), list[dict[str, int]]()
    requests = [Request(name, (1,) * 10, SamplingParams(), 0) for name in "ab"]

    def step(num_rows: int, num_nodes: int) -> dict[str, int]:
        """-> how far each request was read."""
        reads.append({})
        seen = [decoded(request, num_rows, num_nodes) for request in requests]
        follower.observe(seen, {0: torch.zeros(num_rows, WIDTH)}, read)
        return reads[-1]

    def read(ends: Any) -> None:
        for request, end in ends:
            reads[-1][request.request_id] = end
            follower.read(request, end)

    assert step(10, 0) == {"a": 10, "b": 10}, "a prompt"
    quiet = MOST_UNREAD // 2
    assert [step(1, 1) for _ in range(quiet)] == [{}] * quiet
    assert follower.num_ready(requests[0]) == (10,), "the prefix cache is told of no row that is not computed"
    assert step(1, 1) == {"a": 11 + quiet, "b": 11 + quiet}
    requests[1].finish_reason = "stop"
    assert step(1, 1) == {"b": 12 + quiet}, "nobody reads it later"


STEP_S = 0.01


def steps(thrift: Thrift, num: int, gained: float, share: float, start: float) -> float:
    """Steps whose drafts gain a share of their time, and reading costs one."""
    for _ in range(num):
        total = thrift.gained_s + gained * STEP_S
        thrift.learn(total, start, STEP_S * share)
        start += STEP_S
    return start


@pytest.mark.parametrize(
    ("gained", "share", "follows"), [(0.0, 0.1, False), (0.0, 0.001, True), (0.3, 0.1, True), (0.1, 0.1, False)]
)
def test_following_must_be_cheap_or_paid_for_by_drafts(gained: float, share: float, follows: bool) -> None:
    thrift, follow = Thrift(), Follow(1, 0, torch.zeros(0, WIDTH))
    steps(thrift, 300, gained, share, 0.0)
    assert thrift.allows == follows and not thrift.leaves(follow), "whom drafts were wanted for lately stays"
    follow.num_idle = 1000
    assert thrift.leaves(follow) != follows


def test_gains_pay_for_some_requests_but_not_for_ever() -> None:
    thrift = Thrift()
    now = steps(thrift, 1000, 1.0, 0.0, 0.0)
    now = steps(thrift, 20, 0.0, 0.5, now)
    assert thrift.allows
    steps(thrift, 60, 0.0, 0.5, now)
    assert not thrift.allows


def test_after_a_while_without_following_it_is_tried_again() -> None:
    thrift = Thrift()
    now = steps(thrift, 3000, -0.5, 0.5, 0.0)
    assert not thrift.allows
    steps(thrift, 6000, 0.0, 0.0, now)
    assert thrift.allows


def test_idle_time_pays_for_nothing() -> None:
    thrift = Thrift()
    now = steps(thrift, 300, 0.0, 0.1, 0.0)
    for _ in range(50):
        now += 3600.0
        thrift.learn(0.0, now, 0.0)
    assert not thrift.allows
