"""Steps whose passes run ahead in one native call: the same steps, one by one, as without."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.core import Request
from forerun.engine import ahead
from forerun.engine.outputs import RequestGroup
from forerun.errors import LogitsError
from forerun.speculation.draft import Draft
from forerun.speculation.verifier import Candidate, CoupledVerifier
from tests.support import mini

pytest.importorskip("forerun.kernels.cpu._native")
PROMPT = "The cat sat on the mat"


@pytest.fixture(autouse=True)
def long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes in a call as the limits allow, however slow the machine is."""
    monkeypatch.setattr(ahead, "MAX_CALL_S", 60.0)


def engine(max_num_steps: int = 16, **options: Any) -> LLM:
    llm = mini.drafting(options.pop("drafter", "none"), **options)
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_num_steps=max_num_steps)
    return llm


def start(llm: LLM, prompt: Any, **params: Any) -> RequestGroup:
    group = llm.prepare(prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **params}))
    for sample in group.samples:
        sample.trace = []
    llm.start(group)
    return group


def calls_and_steps(llm: LLM) -> tuple[int, int]:
    return int(llm.timings["calls"]), int(llm.timings["steps"])


# -- the same steps ---------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request that comes, and is given up, when another one or itself has so many tokens."""

    prompt: list[int]
    params: dict[str, Any]
    comes_at: int  # tokens of the request before it
    aborted_at: int | None  # its own


def asked(random: Random, stops: list[int]) -> Asked:
    start = random.choice(mini.PROMPTS)
    params = {
        "temperature": random.choice([0.0, 0.7, 1.0]),
        "seed": random.getrandbits(64),
        "max_tokens": random.randint(1, 30),
        "stop_token_ids": stops if random.random() < 0.4 else (),
        "stop": ("e ",) if random.random() < 0.1 else (),
        "top_k": 5 if random.random() < 0.1 else 0,
        "logprobs": 2 if random.random() < 0.2 else None,
        "n": 2 if random.random() < 0.1 else 1,
    }
    tokens = mini.plain().tokenizer.encode(start)
    aborted_at = random.randint(1, 20) if params["n"] == 1 and random.random() < 0.2 else None
    return Asked(tokens, params, random.randint(0, 12), aborted_at)


def run(llm: LLM, wanted: list[Asked]) -> list[RequestGroup]:
    """Everything that depends on how far requests are happens at the same tokens, whatever a call runs."""
    groups: list[RequestGroup] = []
    while len(groups) < len(wanted) or llm.engine.has_work:
        while len(groups) < len(wanted) and (not groups or _reached(groups[-1], wanted[len(groups)].comes_at)):
            each = wanted[len(groups)]
            groups.append(start(llm, each.prompt, **each.params))
        llm.step()
        llm.engine.scheduler.check_integrity()
        for group, each in zip(groups, wanted, strict=False):
            if each.aborted_at is not None and _reached(group, each.aborted_at):
                llm.abort(group.request_id)
    return groups


def _reached(group: RequestGroup, num_tokens: int) -> bool:
    return group.finished or group.samples[0].request.num_output >= num_tokens


def told(group: RequestGroup, with_steps: bool = True) -> list[Any]:
    """What a user can see of a request, but for times."""
    said = []
    for sample, output in zip(group.samples, group.output().outputs, strict=True):
        stats, reasons = output.stats, (output.finish_reason, output.stop_reason)
        answer = output.token_ids, output.text, reasons, output.logprobs
        counts = stats.num_tokens, stats.num_steps, stats.num_plain_steps, stats.drafters, stats.why_plain
        trace = [step._replace(time_s=0.0) for step in sample.trace or ()]
        said.append((answer, counts, output.token_sources, trace) if with_steps else answer)
    return said


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_the_one_that_runs_alone(drafter: str, seed: int) -> None:
    random = Random(seed)
    usual = mini.alone(mini.plain(), [PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    wanted = [asked(random, random.sample(usual, 3)) for _ in range(5)]
    options = {
        "max_num_seqs": random.choice([1, 3, 8]),
        "block_size": random.choice([4, 16]),
        "prefix_caching": seed % 2 == 0,
        "max_model_len": 128,
        "drafter": drafter,
    }
    if drafter == "ngram":
        options |= {"adaptive": False, "ngram_min": 1, "max_draft_tokens": random.choice([1, 4, 7])}
    is_tight = seed >= 2
    if is_tight:  # hardly more blocks than the longest request needs: requests are preempted
        options["num_kv_blocks"] = 128 // options["block_size"] + 2
    one_by_one, many = engine(1, **options), engine(**options)  # of n-gram drafts some are right, and most are not
    with_steps = not (is_tight and drafter == "ngram")  # where drafts have no blocks, steps depend on who has them
    first, second = (run(llm, wanted) for llm in (many, one_by_one))
    assert [told(group, with_steps) for group in first] == [told(group, with_steps) for group in second]
    assert many.engine.scheduler.pool.num_used == 0
    calls, steps = calls_and_steps(many)
    assert calls < steps and calls_and_steps(one_by_one)[0] == calls_and_steps(one_by_one)[1]
    assert many.engine.ahead._texts == {}


def test_a_call_runs_as_many_steps_as_the_limits_say() -> None:
    llm = engine(max_num_steps=5)
    start(llm, PROMPT, max_tokens=22)
    calls = []
    while llm.engine.has_work:
        llm.step()
        calls.append(calls_and_steps(llm)[0])
    # the prompt; a step alone, which says what a pass takes; 4 calls of 5 steps
    assert calls == [1, 2, *[3 + i // 5 for i in range(20)]]


@pytest.mark.parametrize("pass_s", [0.004, 0.04])
def test_a_call_lasts_no_longer_than_a_burst_may(pass_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MAX_CALL_S", 0.01)
    monkeypatch.setattr(ahead, "_seconds", lambda passes: pass_s * len(passes))
    llm = engine()
    start(llm, PROMPT, max_tokens=22)
    while llm.engine.has_work:
        llm.step()
    calls, steps = calls_and_steps(llm)
    assert (calls, steps) == ((12, 22) if pass_s < 0.01 else (22, 22))


def test_nothing_runs_behind_a_stop_token() -> None:
    usual = mini.alone(mini.plain(), [PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    stop = next(token for token in usual[8:] if usual.index(token) >= 8)
    llm = engine()
    group = start(llm, PROMPT, stop_token_ids=(stop,))
    left = []
    while llm.engine.has_work:
        llm.step()
        left.append(len(llm.engine.ahead._passes))
    assert group.output().outputs[0].finish_reason == "stop" and group.samples[0].request.num_output == len(left)
    assert left[2:] == list(range(usual.index(stop) - 2, -1, -1)), "the call ended with the token that ends the request"


def test_a_new_request_waits_for_what_ran_ahead_and_nothing_runs_twice() -> None:
    llm = engine()
    first = start(llm, PROMPT, max_tokens=40)
    for _ in range(4):
        llm.step()
    calls, left = calls_and_steps(llm)[0], len(llm.engine.ahead._passes)
    assert left == 14
    second = start(llm, "Once upon", max_tokens=5)
    for _ in range(left):
        llm.step()
    assert calls_and_steps(llm)[0] == calls and second.samples[0].request.num_output == 0
    llm.step()
    assert second.samples[0].request.num_output == 1 and first.samples[0].request.num_output == 4 + left + 1


def test_passes_that_ran_in_vain_are_dropped_and_their_time_counts() -> None:
    llm = engine()
    group = start(llm, PROMPT)
    for _ in range(4):
        llm.step()
    ahead_s = sum(each.seconds for each in llm.engine.ahead._passes)
    before = llm.timings["forward_s"]
    llm.abort(group.request_id)
    assert llm.engine.ahead.is_empty and llm.timings["forward_s"] == pytest.approx(before + ahead_s) and ahead_s > 0.0
    again = start(llm, PROMPT)
    while llm.engine.has_work:
        llm.step()
    usual = mini.alone(mini.plain(), [PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    assert again.output().outputs[0].token_ids == usual


def test_a_steps_time_is_its_own() -> None:
    llm = engine()
    start(llm, PROMPT, max_tokens=18)
    forward_s = [0.0]
    while llm.engine.has_work:
        llm.step()
        forward_s.append(llm.timings["forward_s"])
    steps = [after - before for before, after in pairwise(forward_s)]
    assert calls_and_steps(llm) == (3, 18) and min(steps) > 0.0
    assert max(steps[2:]) < sum(steps[2:]) / 2, "no step has the time of the others"
    assert all(seconds >= 0.0 for seconds in llm.timings.values())


def test_chains_copied_from_the_text_run_ahead_too() -> None:
    """A text that repeats itself: drafts are accepted whole, and the last step takes what is left."""
    llm = engine(drafter="ngram", adaptive=False, max_draft_tokens=4, ngram_min=1)
    group = start(llm, mini.PROMPTS[5] * 3, max_tokens=60)
    while llm.engine.has_work:
        llm.step()
    calls, steps = calls_and_steps(llm)
    stats = group.output().outputs[0].stats
    assert calls < steps / 2 and stats.drafters["ngram"].accepted > 10 and llm.engine.ahead._texts == {}


def test_a_request_that_may_not_be_drafted_for_ahead_goes_on_one_by_one() -> None:
    """Its drafter failed once: the plan is the same, but nobody is asked."""
    llm = engine(drafter="ngram", adaptive=False)
    group = start(llm, PROMPT, max_tokens=12)
    group.samples[0].request.failed_drafters = ("ngram",)
    while llm.engine.has_work:
        llm.step()
    calls, steps = calls_and_steps(llm)
    assert calls == steps == 12


# -- what runs one by one ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {"repetition_penalty": 1.2}),
        ({}, {"temperature": 1.0, "top_p": 0.9}),
        ({}, {"min_tokens": 5}),
        ({"verification": "rejection"}, {"temperature": 1.0}),
        ({"drafter": "suffix", "adaptive": False}, {}),
        ({"drafter": "draft", "adaptive": False}, {}),
    ],
    ids=["penalty", "filter", "mask", "rejection", "trees", "draft-model"],
)
def test_steps_that_need_python_in_between_run_one_by_one(options: dict[str, Any], params: dict[str, Any]) -> None:
    llm = engine(**options)
    start(llm, PROMPT, max_tokens=12, **params)
    while llm.engine.has_work:
        llm.step()
    calls, steps = calls_and_steps(llm)
    assert calls == steps


def test_requests_that_ask_for_no_drafts_run_ahead_beside_a_drafter() -> None:
    llm = engine(drafter="ngram", adaptive=False)
    group = start(llm, PROMPT, max_tokens=18)
    group.samples[0].request.speculate = False
    while llm.engine.has_work:
        llm.step()
    assert calls_and_steps(llm) == (3, 18)


def test_a_row_that_allows_no_token_is_an_error_here_too() -> None:
    request = Request("r", (1, 2), SamplingParams(temperature=0.0), seed=0, max_len=9)
    verifier: Any = CoupledVerifier(mini.plain().kernels)
    given: Any = None
    (good,) = verifier.verify(given, [Candidate(Draft(request, 1), 0, ((0,), 7))])
    (bad,) = verifier.verify(given, [Candidate(Draft(request, 1), 0, ((0,), -1))])
    assert good == ((0,), 7) and isinstance(bad, LogitsError)
