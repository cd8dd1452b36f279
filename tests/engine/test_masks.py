"""Masks that come late: the same tokens whenever they come, nobody else waits, and who gets none fails alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.core import Request, SamplingParams, TokenBits
from forerun.engine.outputs import RequestGroup
from forerun.errors import GrammarError
from forerun.speculation.sampling import WAIT_S
from tests.support import harness
from tests.support.toy import ToyModel

VOCAB = 24
NO_BYTES: Any = "x"


class Parity:
    """The parity of allowed tokens alternates with the length of the output."""

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        return [token for token in range(VOCAB) if token % 2 == len(output_token_ids) % 2]


class Late(Parity):
    """The same mask, but each prefix is there only after it was asked for some random number of times.

    `first`: the number for the empty prefix; None: random, too. From `never` tokens on the mask never comes.
    """

    def __init__(self, seed: int, most: int = 4, never: int | None = None, first: int | None = None) -> None:
        self._rng, self._most, self._never = random.Random(seed), most, never
        self._missing: dict[tuple[int, ...], int] = {} if first is None else {(): first}
        self.num_pending = 0

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        prefix = tuple(output_token_ids)
        if self._never is not None and len(prefix) >= self._never:
            raise GrammarError("this mask never comes")
        missing = self._missing.setdefault(prefix, self._rng.randint(0, self._most))
        self._missing[prefix] = max(0, missing - 1)
        self.num_pending += missing > 0
        return missing == 0

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        if self._never is not None and len(output_token_ids) >= self._never:
            raise GrammarError("this mask never comes")
        return super().allowed(output_token_ids)


class Waited(Parity):
    """A mask that is never there, and how long it was waited for."""

    waited_s = 0.0

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        self.waited_s += wait_s
        return False


def request(index: int, grammar: Parity | None, temperature: float = 1.0) -> RequestGroup:
    prompt = [(7 * index + i * i) % VOCAB for i in range(3 + 9 * index)]
    params = SamplingParams(max_tokens=24, seed=index, grammar=grammar, temperature=temperature)
    return harness.request(index, prompt, params)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
def test_tokens_do_not_depend_on_when_masks_come(drafter: str) -> None:
    temperatures = (0.0, 0.8, 0.8, 0.0)
    expected = [request(i, Parity(), temperature) for i, temperature in enumerate(temperatures)]
    harness.run(harness.engine("none", model=ToyModel()), expected)
    for seed in range(3):
        masks = [Late(seed + i) for i in range(4)]
        late = [request(i, mask, temperatures[i]) for i, mask in enumerate(masks)]
        harness.run(harness.engine(drafter, model=ToyModel(), max_num_batched_tokens=16), late)
        for ours, theirs in zip(late, expected, strict=True):
            assert ours.output().outputs[0].token_ids == theirs.output().outputs[0].token_ids
        assert all(mask.num_pending > 10 for mask in masks)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("drafter", ["ngram", "draft-tree"])
def test_masks_hold_whenever_they_come(drafter: str, verification: str) -> None:
    group = request(1, Late(5))
    harness.run(harness.engine(drafter, model=ToyModel(), verification=verification), [group])
    tokens = group.output().outputs[0].token_ids
    assert len(tokens) == 24 and all(token % 2 == i % 2 for i, token in enumerate(tokens))


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_who_gets_no_mask_fails_alone(drafter: str, verification: str) -> None:
    groups = [request(0, None), request(1, Late(1, never=9)), request(2, Late(2))]
    made = harness.engine(drafter, model=ToyModel(), verification=verification)
    harness.run(made, groups)
    outs = [group.output().outputs[0] for group in groups]
    assert [out.finish_reason for out in outs] == ["length", "error", "length"]
    assert isinstance(outs[1].error, GrammarError) and len(outs[1].token_ids) <= 9
    made.scheduler.check_integrity()
    assert not made.records
    same_name = Waited()
    made.masks.begin_step([request(1, same_name).samples[0].request])
    assert same_name.waited_s > 0.0, "who failed is forgotten: another request of its name is waited for"


class Dies(Parity):
    """A mask whose process dies after it was asked so many times: what had arrived may or may not be told."""

    def __init__(self, left: int) -> None:
        self._left = left

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        self._left -= 1
        if self._left < 0:
            raise GrammarError("it has died")
        return True

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        if self._left <= 0:
            raise GrammarError("it has died")
        return super().allowed(output_token_ids)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_mask_that_dies_at_any_moment_ends_its_request_alone(drafter: str, verification: str) -> None:
    for left in range(1, 40):
        groups = [request(0, None), request(1, Dies(left)), request(2, Parity())]
        made = harness.engine(drafter, model=ToyModel(), verification=verification)
        harness.run(made, groups)
        reasons = [group.output().outputs[0].finish_reason for group in groups]
        assert reasons == ["length", "error", "length"] or (left > 20 and reasons[1] == "length")
        assert not any(health.num_errors for health in made.drafter.health.values())


class Broken(Parity):
    """A mask of the user's that says, or raises, this after four tokens."""

    def __init__(self, said: object) -> None:
        self._said = said

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        if len(output_token_ids) < 4:
            return super().allowed(output_token_ids)
        if isinstance(self._said, Exception):
            raise self._said
        return self._said  # type: ignore[return-value]


@pytest.mark.parametrize("drafter", ["none", "draft", "draft-tree"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("said", [KeyError("x"), [-1], [VOCAB], ["a"], 7, TokenBits(NO_BYTES)])
def test_a_users_grammar_that_fails_ends_its_request_alone(drafter: str, verification: str, said: object) -> None:
    groups = [request(0, None), request(1, Broken(said))]
    made = harness.engine(drafter, model=ToyModel(), verification=verification)
    harness.run(made, groups)
    outs = [group.output().outputs[0] for group in groups]
    assert [out.finish_reason for out in outs] == ["length", "error"]
    assert isinstance(outs[1].error, GrammarError) and len(outs[1].token_ids) == 4


class Unready(Parity):
    """A user's mask that does not know when it is ready."""

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        raise KeyError("x")


def test_a_users_grammar_that_is_never_ready_ends_its_request_alone() -> None:
    groups = [request(0, None), request(1, Unready())]
    harness.run(harness.engine("draft", model=ToyModel()), groups)
    outs = [group.output().outputs[0] for group in groups]
    assert [out.finish_reason for out in outs] == ["length", "error"] and isinstance(outs[1].error, GrammarError)


def test_nobody_waits_for_anothers_mask() -> None:
    slow, quick = request(0, Late(0, most=0, first=500)), request(1, None)
    made = harness.engine("ngram", model=ToyModel())
    made.add(slow)
    made.add(quick)
    num_steps = 0
    while not quick.finished:
        made.step()
        num_steps += 1
    assert num_steps <= 26 and slow.output().outputs[0].token_ids == ()
    harness.run(made, [])
    assert len(slow.output().outputs[0].token_ids) == 24


class Slow(Parity):
    """A mask that is there for the next token, and for drafts behind it takes longer than anybody waits."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.waited_s = 0.0

    def ready(self, output_token_ids: Sequence[int], wait_s: float = 0.0) -> bool:
        assert self.request is not None
        if len(output_token_ids) <= self.request.num_output:
            return True
        self.waited_s += wait_s
        return False


@pytest.mark.parametrize("drafter", ["draft", "draft-tree"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_masks_of_drafts_that_are_late_are_done_without(
    drafter: str, verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose masks are late goes on a step later, with what was decided."""
    slow = Slow()
    monkeypatch.setattr("forerun.speculation.sampling.perf_counter", lambda: slow.waited_s)
    early = list[int]()

    def allowed(output_token_ids: Sequence[int]) -> Sequence[int]:
        assert slow.request is not None
        early.extend([len(output_token_ids)] if len(output_token_ids) > slow.request.num_output else [])
        return Parity.allowed(slow, output_token_ids)

    monkeypatch.setattr(slow, "allowed", allowed)
    group = request(1, slow)
    slow.request = group.samples[0].request
    harness.run(harness.engine(drafter, model=ToyModel(), verification=verification), [group])
    tokens = group.output().outputs[0].token_ids
    assert len(tokens) == 24 and all(token % 2 == i % 2 for i, token in enumerate(tokens))
    assert not early, "a mask that had not arrived was asked for what it allows"


@pytest.mark.parametrize("drafter", ["draft", "draft-tree"])
def test_many_slow_masks_take_no_more_of_a_step_than_one(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting is shared: of a level of drafts, and of a level of choices, everybody's masks have one moment in all."""
    masks = [Slow() for _ in range(6)]
    monkeypatch.setattr("forerun.speculation.sampling.perf_counter", lambda: sum(mask.waited_s for mask in masks))
    groups = [request(i, mask) for i, mask in enumerate(masks)]
    for mask, group in zip(masks, groups, strict=True):
        mask.request = group.samples[0].request
    made, waits = harness.engine(drafter, model=ToyModel()), []
    for group in groups:
        made.add(group)
    for _ in range(20):
        before = sum(mask.waited_s for mask in masks)
        made.step()
        waits.append((sum(mask.waited_s for mask in masks) - before) / WAIT_S)
    assert 0 < max(waits) < 12  # up to 9 levels of drafts, a level of choices, the step's beginning


def test_what_waits_for_a_pass_does_not_wait_for_a_mask() -> None:
    """A GPU's results are delivered while the next pass computes, and where there is none, all the same."""
    slow = request(0, Late(0, most=0, first=50))
    made, delivered = harness.engine("none", model=ToyModel()), []
    made.meanwhile = lambda: delivered.append(len(slow.samples[0].request.output_token_ids))
    made.add(slow)
    for num_steps in range(1, 8):
        assert made.step() == [] and len(delivered) == num_steps
    harness.run(made, [])


class Forms:
    """Of five tokens the first is free and the other four follow from where they are; `tells` says so ahead."""

    def __init__(self, tells: bool = True, lies: bool = False) -> None:
        self._shift = 1 if lies else 0
        if tells:
            self.forced = self._forced

    def allowed(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        place = len(output_token_ids)
        return list(range(VOCAB)) if place % 5 == 0 else [3 * place % VOCAB]

    def _forced(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        place = len(output_token_ids)
        end = -(-place // 5) * 5
        return [(3 * at + self._shift) % VOCAB for at in range(place, end)]


def form(index: int, grammar: Forms, **params: object) -> RequestGroup:
    given = {"max_tokens": 40, "seed": index, "temperature": 1.0, **params}
    return harness.request(index, [1, 2, 3 + index], SamplingParams(grammar=grammar, **given))  # type: ignore[arg-type]


DRAFTING = ["ngram", "suffix", "draft", "draft-adaptive", "draft-tree", "portfolio", "portfolio-unguided"]


@pytest.mark.parametrize("drafter", DRAFTING)
def test_forced_tokens_are_drafted_by_the_grammar(drafter: str) -> None:
    expected = harness.run(harness.engine("none", model=ToyModel()), [form(i, Forms(tells=False)) for i in range(3)])
    told, untold = ([form(i, Forms(tells)) for i in range(3)] for tells in (True, False))
    assert harness.run(harness.engine(drafter, model=ToyModel()), told) == expected
    assert harness.run(harness.engine(drafter, model=ToyModel()), untold) == expected
    outs = [group.output().outputs[0] for group in told]
    assert all(out.stats.drafters["grammar"].accepted >= 10 for out in outs)
    assert all("grammar" not in group.output().outputs[0].stats.drafters for group in untold)
    if drafter == "draft-adaptive":  # the others draft what is forced, too, or nothing that is right
        assert max(out.stats.num_steps for out in outs) <= 20


@pytest.mark.parametrize("drafter", ["ngram", "draft-tree", "portfolio"])
def test_forced_tokens_keep_the_rejection_rule_in_the_grammar(drafter: str) -> None:
    group = form(1, Forms())
    [[tokens]] = harness.run(harness.engine(drafter, model=ToyModel(), verification="rejection"), [group])
    assert all(at % 5 == 0 or token == 3 * at % VOCAB for at, token in enumerate(tokens))
    assert group.output().outputs[0].stats.drafters["grammar"].accepted >= 20


@pytest.mark.parametrize("drafter", ["ngram", "draft-adaptive"])
def test_forced_tokens_that_are_wrong_change_nothing(drafter: str) -> None:
    lying, honest = [form(2, Forms(lies=True))], [form(2, Forms(tells=False))]
    made = harness.engine(drafter, model=ToyModel())
    assert harness.run(made, lying) == harness.run(harness.engine("none", model=ToyModel()), honest)
    count = lying[0].output().outputs[0].stats.drafters["grammar"]
    assert count.drafted > 0 and count.accepted == 0


class Mistaken(Forms):
    """Says `said`, or raises it, instead of what is forced."""

    def __init__(self, said: object) -> None:
        super().__init__()
        self._said, self.num_asked = said, 0

    def _forced(self, output_token_ids: Sequence[int]) -> Sequence[int]:
        self.num_asked += 1
        if isinstance(self._said, Exception):
            raise self._said
        return self._said  # type: ignore[return-value]


@pytest.mark.parametrize("drafter", ["ngram", "draft-adaptive"])
@pytest.mark.parametrize(
    ("said", "is_error"),
    [([10**6], False), ([-5], False), ([2**40], False), ([VOCAB], False), ([1, 2**70, 1], False),
     (RuntimeError("it has no idea"), True), (None, True), (["a"], True), (7, True)],
)  # fmt: skip
def test_forced_tokens_that_are_none_are_left_out(
    drafter: str, said: object, is_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected = harness.run(harness.engine("none", model=ToyModel()), [form(i, Forms(tells=False)) for i in range(2)])
    mistaken = Mistaken(said)
    groups, made = [form(0, mistaken), form(1, Forms())], harness.engine(drafter, model=ToyModel())
    assert harness.run(made, groups) == expected
    assert [group.output().outputs[0].finish_reason for group in groups] == ["length"] * 2
    assert groups[1].output().outputs[0].stats.drafters["grammar"].accepted >= 10, "the other is drafted for"
    assert len(caplog.records) == (mistaken.num_asked == 1) == is_error, "said once, and not asked again"
    assert not made.masks._unforced


def test_nothing_is_forced_without_a_drafter_or_against_a_request_s_wish() -> None:
    plain, off, small = (form(i, Forms()) for i in range(3))
    harness.run(harness.engine("none", model=ToyModel()), [plain])
    off.samples[0].request.speculate = False
    small.samples[0].request.max_nodes = 3
    harness.run(harness.engine("ngram", model=ToyModel()), [off, small])
    for group, most in ((plain, 0), (off, 0), (small, 2)):
        stats = group.output().outputs[0].stats
        assert stats.num_steps >= 40 / (1 + most)
        assert (stats.trees.drafted > 0) == (most > 0)
