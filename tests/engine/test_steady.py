"""Steps that are made at once: the same steps as phase by phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.drafters.base import Observed
from forerun.drafters.recycling import PATIENCE
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.engine.steady import SteadySteps
from forerun.errors import LogitsError
from forerun.policy.base import StepResult
from forerun.weights.resolve import resolve_model
from tests.support import mini
from tests.support.adapters import write_adapter

pytest.importorskip("forerun.kernels.cpu._native")
PROMPT = "The cat sat on the mat"
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"adaptive": False, "ngram_min": 1},
    "suffix": {"adaptive": False},
    "draft": {"adaptive": False, "tree_width": 1},
    "mtp": {"adaptive": False, "tree_width": 1},  # a state of the target for every row
    "eagle": {"adaptive": False, "tree_width": 1},  # those of three layers
    "medusa": {"adaptive": False, "tree_width": 1},  # that after the last norm
    "portfolio=ngram+draft": {"adaptive": False},
}


def engine(drafter: str = "none", at_once: bool = True, **options: Any) -> LLM:
    llm = mini.drafting(drafter, **{**DRAFTERS.get(drafter, {}), **options})
    if not at_once:
        llm.engine.steady = None
    return llm


def start(llm: LLM, prompt: Any, **params: Any) -> RequestGroup:
    options = {name: params.pop(name) for name in ("deadline_s", "speculate", "max_nodes", "lora") if name in params}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **params})
    group = llm.prepare(prompt, sampling, **options)
    llm.start(group)
    return group


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many steps were made at once, and how many pass by pass."""
    found, at_once, phases = Counter[str](), SteadySteps.step, Engine._go_on

    def counting(self: SteadySteps, *given: Any) -> Any:
        changed = at_once(self, *given)
        found.update(["at once"] * (changed is not None))
        return changed

    def noted(self: Engine, *given: Any) -> Any:
        found["by phase"] += 1
        return phases(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(SteadySteps, "step", counting)
        patch.setattr(Engine, "_go_on", noted)
        yield found


# -- the same steps ---------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """A request, the step with which it comes, and that with which it is given up."""

    prompt: list[int]
    params: dict[str, Any]
    comes: int
    aborted: int | None


def asked(random: Random, stops: list[int]) -> Asked:
    prompt = mini.plain().tokenizer.encode(random.choice(mini.PROMPTS) * random.choice([1, 1, 3]))
    params: dict[str, Any] = {
        "temperature": random.choice([0.0, 0.7, 1.0]),
        "seed": random.getrandbits(64),
        "max_tokens": random.randint(1, 30),
    }
    usual: list[dict[str, Any]] = [
        {"stop_token_ids": stops},
        {"stop": ("e ", "th")},
        {"n": 2},
        {"max_nodes": 2},
        {"speculate": False},
        {"deadline_s": random.randint(5, 25)},
    ]
    unusual: list[dict[str, Any]] = [{"top_k": 5}, {"logprobs": 2}, {"min_tokens": 1}, {"prompt_logprobs": 0}]
    for each in usual + unusual:
        if random.random() < (0.03 if each in unusual else 0.15):
            params |= each
    aborted = random.randint(1, 30) if random.random() < 0.2 else None
    return Asked(prompt, params, random.choice([0, random.randint(1, 20)]), aborted)


class Watched:
    """An engine, and all that can be seen of its steps but times."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.learned, self.changed, self.observed = llm, list[Any](), list[Any](), list[Any]()
        self.cached = list[Any]()  # after each step
        self.now = 0.0
        llm.engine.scheduler.clock = lambda: self.now
        policy = llm.engine.policy
        inner = policy.learn

        class Listening:
            def __getattr__(_, name: str) -> Any:
                return getattr(policy, name)

            def learn(_, result: StepResult) -> None:
                self.learned.append(_told(result))
                inner(result)

        llm.engine.policy = Listening()  # type: ignore[assignment]
        observe = llm.engine.drafter.observe

        def observing(observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
            self.observed.append([(seen.request.request_id, *seen[2:], _states_of(seen, hidden)) for seen in observed])
            observe(observed, hidden)

        llm.engine.drafter.observe = observing  # type: ignore[method-assign]

    def play(self, wanted: list[Asked]) -> list[RequestGroup]:
        groups = dict[int, RequestGroup]()
        while len(groups) < len(wanted) or self.llm.engine.has_work:
            for index, each in enumerate(wanted):
                if each.comes <= self.now and index not in groups:
                    groups[index] = start(self.llm, each.prompt, **each.params)
                if each.aborted is not None and each.aborted <= self.now and index in groups:
                    self.llm.abort(groups[index].request_id)
            if self.llm.engine.has_work:
                self.changed.append([group.request_id for group in self.llm.step()])
            self.llm.engine.scheduler.check_integrity()
            self.cached.append(_cached(self.llm))
            self.now += 1
        return [groups[index] for index in range(len(wanted))]


def _told(result: StepResult) -> Any:
    outcomes = [
        (request.request_id, request.finish_reason, tuple(tokens), draft.max_nodes, draft.proposals)
        for request, draft, tokens in result.outcomes
    ]
    calls = [
        (call.member, call.is_pending, [(a.request.request_id, *a[1:]) for a in call.asked]) for call in result.calls
    ]
    return outcomes, calls, result.num_rows, result.num_span


def _states_of(seen: Observed, hidden: dict[int, Tensor]) -> dict[int, list[list[float]]]:
    """What a drafter may read of the target's layers."""
    return {layer: states[list(seen.rows)].tolist() for layer, states in hidden.items()}


def _cached(llm: LLM) -> Any:
    """The blocks that others may use, what is known of them, and behind which ones they come."""
    cache = llm.engine.scheduler.prefix_cache
    nodes = [] if cache is None else cache._nodes.values()
    found = []
    for node in nodes:
        last, parent = llm.engine.boundaries.of(node.block), -1 if node.parent is None else node.parent.block
        states = None if last is None else tuple(last.tolist())
        found.append((node.block, tuple(node.tokens), tuple(node.ready), parent, states))
    return sorted(found)


def _shown(group: RequestGroup) -> list[Any]:
    found = []
    for output in group.output().outputs:
        stats = output.stats
        served = stats.num_preemptions, stats.num_cached_tokens
        counts = stats.num_tokens, stats.num_steps, stats.num_plain_steps, *served
        drafts = stats.drafters, stats.trees, stats.why_plain, output.token_sources
        reasons = output.finish_reason, output.stop_reason, str(output.error)
        found.append((output.token_ids, output.text, output.logprobs, reasons, counts, drafts))
    return found


@pytest.mark.parametrize("drafter", list(DRAFTERS))
@pytest.mark.parametrize("seed", range(3))
def test_every_step_is_the_same_phase_by_phase(drafter: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the policy learns, which groups change, the prefix cache after each step; text and figures at the end."""
    random = Random(f"{seed} {drafter}")
    usual = mini.alone(mini.plain(), [PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    wanted = [asked(random, random.sample(usual, 3)) for _ in range(5)]
    wanted.append(Asked([*usual[:20]], {"max_tokens": 30}, comes=60, aborted=None))  # alone at last
    block_size = random.choice([4, 16])
    options = {
        "max_num_seqs": random.choice([1, 3, 8]),
        "max_num_batched_tokens": random.choice([6, 64, 512]),
        "max_num_batched_nodes": random.choice([None, 7]),
        "block_size": block_size,
        "prefix_caching": seed != 1,
        "max_model_len": 128,
        "num_kv_blocks": 128 // block_size + random.choice([2, 40]),  # hardly more than the longest needs, or enough
    }
    at_once, by_phase = (Watched(engine(drafter, way, **options)) for way in (True, False))
    with counted(monkeypatch) as steps:
        first = at_once.play(wanted)
    second = by_phase.play(wanted)
    assert [_shown(group) for group in first] == [_shown(group) for group in second]
    assert at_once.learned == by_phase.learned and at_once.changed == by_phase.changed
    assert at_once.observed == by_phase.observed
    assert steps["at once"] > 0 or drafter == "suffix", "trees go phase by phase"
    assert at_once.llm.engine.scheduler.pool.num_used == 0
    assert at_once.cached == by_phase.cached and any(at_once.cached) == (seed != 1)


@pytest.mark.parametrize("prompt", [mini.PROMPTS[5], "A"])
def test_rows_of_a_drafter_that_come_after_their_block_is_full_are_shared_at_once(prompt: str) -> None:
    """A draft model lacks the row of the last draft that was accepted until it drafts again."""
    wanted = [Asked(mini.plain().tokenizer.encode(prompt), {"temperature": 0.0, "max_tokens": 40}, 0, None)]
    ways = [Watched(engine("draft", way, max_draft_tokens=1, block_size=4)) for way in (True, False)]
    for watched in ways:
        watched.play(wanted)
    assert ways[0].cached == ways[1].cached
    assert any(ready < (4,) for cached in ways[1].cached for _, _, ready, *_ in cached), "no block waits for its rows"


# -- which steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "mtp", "eagle", "medusa"])
def test_all_steps_of_a_usual_request_but_that_of_its_prompt(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine(drafter)
    with counted(monkeypatch) as steps:
        group = start(llm, PROMPT, max_tokens=20)
        while llm.engine.has_work:
            llm.step()
    assert steps == {"by phase": 1, "at once": group.samples[0].num_steps - 1}


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {"repetition_penalty": 1.2}),
        ({}, {"temperature": 1.0, "top_p": 0.9}),
        ({}, {"logprobs": 0}),
        ({}, {"prompt_logprobs": 0}),
        ({}, {"logit_bias": {5: 1.0}}),
        ({}, {"min_tokens": 3}),
        ({"verification": "rejection"}, {"temperature": 1.0}),
    ],
    ids=["penalty", "filter", "logprobs", "prompt-logprobs", "bias", "min-tokens", "rejection"],
)
def test_unusual_steps_go_phase_by_phase(
    options: dict[str, Any], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(**options)
    with counted(monkeypatch) as steps:
        start(llm, PROMPT, max_tokens=6, **params)
        while llm.engine.has_work:
            llm.step()
    assert steps == {"by phase": 6}


def test_steps_whose_logits_somebody_reads_go_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prompt, and while drafts may still be wanted."""
    llm = engine("recycling")
    with counted(monkeypatch) as steps:
        start(llm, PROMPT, max_tokens=6, speculate=False)
        while llm.engine.has_work:
            llm.step()
    assert steps == {"by phase": 1 + PATIENCE, "at once": 5 - PATIENCE}


def test_requests_of_an_adapter_go_phase_by_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native call computes the base alone."""
    llm = engine()
    llm.load_adapter("one", str(write_adapter(tmp_path / "one", resolve_model("mini"), ("q_proj",))))
    try:
        with counted(monkeypatch) as steps:
            start(llm, PROMPT, max_tokens=6, lora="one")
            while llm.engine.has_work:
                llm.step()
    finally:
        llm.unload_adapter("one")  # other tests have the same weights
    assert steps == {"by phase": 6}


def test_a_trace_shows_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine("ngram")
    group = llm.prepare(mini.PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    group.samples[0].trace = []
    llm.start(group)
    while llm.engine.has_work:
        llm.step()
    trace = group.samples[0].take_trace()
    assert sum(len(step.emitted) for step in trace) == 20 and len(trace) == group.samples[0].num_steps
    assert group.output().outputs[0].stats.num_first == len(trace[0].emitted)


def test_a_new_request_is_served_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    start(llm, PROMPT, max_tokens=30)
    for _ in range(4):
        llm.step()
    second = start(llm, "Once upon", max_tokens=5)
    llm.step()
    assert second.samples[0].request.num_output == 1


def test_chains_of_more_rows_than_a_recorded_pass_takes_go_phase_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine("ngram", max_draft_tokens=12, max_num_batched_tokens=512)
    with counted(monkeypatch) as steps:
        groups = [start(llm, mini.PROMPTS[5] * 2, max_tokens=20, seed=seed) for seed in range(8)]
        while llm.engine.has_work:
            llm.step()
    assert steps["by phase"] > 1
    [alone] = mini.alone(
        mini.plain(), [mini.PROMPTS[5] * 2], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    )
    assert {group.output().outputs[0].token_ids for group in groups} == {alone}


def test_logits_that_are_unusable_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native call says that there are some, and the step is made again phase by phase."""
    llm = engine()
    good, bad = (start(llm, prompt, max_tokens=9) for prompt in (PROMPT, "def add(a, b):"))
    for _ in range(3):
        llm.step()
    llm.engine.kv_cache.layers[0].values[bad.samples[0].request.block_ids[0]] = math.nan
    with counted(monkeypatch) as steps:
        llm.step()
        assert steps == Counter({"by phase": 1}) and bad.finished
        while llm.engine.has_work:
            llm.step()
    usual = mini.alone(mini.plain(), [PROMPT], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))[0]
    assert good.output().outputs[0].token_ids == usual and steps == Counter({"at once": 5, "by phase": 1})
    assert isinstance(bad.output().outputs[0].error, LogitsError)


def test_nothing_is_kept_of_requests_that_ended() -> None:
    llm = engine()
    start(llm, PROMPT, max_tokens=4)
    while llm.engine.has_work:
        llm.step()
    assert llm.engine.steady is not None and not llm.engine.steady._requests and not llm.engine.steady._entries


def test_times_add_up() -> None:
    llm = engine("ngram")
    group = start(llm, mini.PROMPTS[5], max_tokens=30)
    while llm.engine.has_work:
        llm.step()
    timings, stats = llm.timings, group.output().outputs[0].stats
    assert all(seconds > 0.0 for seconds in timings.values())
    total = sum(seconds for phase, seconds in timings.items() if phase.endswith("_s"))
    assert 0.0 < stats.verify_s < stats.step_s < total and stats.draft_s > 0.0
