"""Anything at once: random requests on random engines that share a model get the text each gets alone, undrafted.

A seed is drawn anew for each run and printed. FORERUN_FUZZ_SEED=N begins with scenario N, which is what a failure
names; FORERUN_FUZZ_SECONDS bounds how long scenarios are begun.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random, SystemRandom
from time import perf_counter
from typing import Any

import pytest

from forerun import LLM
from forerun.core import CompletionOutput
from forerun.engine.outputs import RequestGroup
from forerun.errors import DeadlineError
from tests.models import factory
from tests.support import mini
from tests.support.random_requests import COMMON, HEADS, NATIVE, PLAIN, STATELESS, Asked, Clock, Dice, EvenOdd, World

SECONDS = 3.0
LEAST_SCENARIOS = 4  # however slow the machine is: each world once


@contextmanager
def grammars(llm: LLM) -> Iterator[list[Any]]:
    """Makers of masks as the server makes them, where its compiler is installed."""
    pytest.importorskip("xgrammar")
    from forerun.server.grammar_compiler import GrammarCompiler
    from forerun.server.structured import GrammarSpec

    compiler = GrammarCompiler(llm.tokenizer, llm.loaded.model.vocab_size, 60.0)
    specs = [
        GrammarSpec("regex", "[a-f ]{3,30}"),
        GrammarSpec("json", '{"type": "array", "items": {"type": "integer"}}'),
    ]
    try:
        yield [lambda spec=spec: compiler.mask(spec) for spec in specs]
    finally:
        compiler.close()


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[World]]:
    """The embedded family with all its heads, tiny native models, and two that run through transformers."""
    made = []
    theirs = ("gpt2", COMMON, 32), ("bloom", COMMON, 32)  # over the pool, a token a call
    cases = ("qwen2-windows", NATIVE, 64), ("qwen3-next", STATELESS, 64), *theirs
    for name, drafters, max_len in cases:
        folder = tmp_path_factory.mktemp(name)
        if name in factory.CASES:
            factory.make_checkpoint(name, folder)
        else:
            factory.save_checkpoint(factory.random_hf_model(name), folder)
        llm = LLM(str(folder), **{**PLAIN, "max_model_len": max_len})
        made.append(World(name, llm, str(folder), drafters, (), (lambda: EvenOdd(factory.VOCAB_SIZE),)))
    plain = LLM("mini", **PLAIN)
    with grammars(plain) as own:
        yield [World("mini", plain, "mini-draft", (*NATIVE, *HEADS), mini.PROMPTS, (*own,)), *made]


@pytest.mark.slow
def test_everything_at_once(worlds: list[World]) -> None:
    given = os.environ.get("FORERUN_FUZZ_SEED")
    first = int(given) if given else SystemRandom().randrange(1 << 32)
    seconds = float(os.environ.get("FORERUN_FUZZ_SECONDS", SECONDS))
    print(f"scenarios from FORERUN_FUZZ_SEED={first} on")
    began, covered, scenario = perf_counter(), Counter[str](), first
    while scenario < first + LEAST_SCENARIOS or perf_counter() - began < seconds:
        try:
            play(Dice(worlds[scenario % len(worlds)], Random(scenario)), covered)
        except BaseException as error:
            error.add_note(f"begin here with FORERUN_FUZZ_SEED={scenario}")
            raise
        scenario += 1
    print(f"{scenario - first} scenarios: {dict(covered)}")


def play(dice: Dice, covered: Counter[str]) -> None:
    """One scenario: engines that begin and step in any order, then the same requests one by one."""
    clock = Clock()
    players = [Player(dice, clock) for _ in range(dice.rng.choice((1, 1, 2, 3)))]
    while waiting := [player for player in players if player.has_work]:
        dice.rng.choice(waiting).step()
    for player in players:
        player.compare(dice.world.plain, covered)


class Player:
    """An engine and the requests that come to it."""

    def __init__(self, dice: Dice, clock: Clock) -> None:
        self._dice = dice
        self._clock = clock
        self._llm: LLM | None = None
        self._num_steps = 0
        self._coming = [dice.request() for _ in range(dice.rng.randint(1, 6))]
        self._groups: list[tuple[Asked, RequestGroup]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._coming) or (self._llm is not None and self._llm.engine.has_work)

    def step(self) -> None:
        """Begin if nothing has begun; take what comes, drop what is given up, and step."""
        llm = self._llm = self._llm or self._new_engine()
        for asked in self._coming:
            if asked.arrives <= self._num_steps or not llm.engine.has_work:
                self._start(llm, asked)
        self._coming = [asked for asked in self._coming if all(asked is not started for started, _ in self._groups)]
        for asked, group in self._groups:
            if asked.aborted is not None and asked.aborted <= self._num_steps:
                llm.abort(group.request_id)
        for place, (asked, group) in enumerate(self._groups):
            if asked.moves is not None and asked.moves <= self._num_steps and not group.finished:
                self._groups[place] = replace(asked, moves=None), self._moved(asked, group)
        if llm.engine.has_work:
            llm.step()
        llm.engine.scheduler.check_integrity()
        self._num_steps += 1
        self._clock.now += 1

    def _moved(self, asked: Asked, group: RequestGroup) -> RequestGroup:
        """The same request, as if its engine had been lost: begun anew behind the tokens it had."""
        llm = self._llm
        assert llm is not None
        ended = [sample for sample in group.samples if sample.request.finish_reason is not None]
        going = {s.request.sample_index: s.request.output_token_ids for s in group.samples if s not in ended}
        deadline = group.samples[0].request.deadline_s
        llm.abort(group.request_id)
        again = llm.prepare(asked.prompt, asked.sampling(), written=going, **asked.options, deadline_s=deadline)
        llm.start(again)
        samples = sorted([*ended, *again.samples], key=lambda sample: sample.request.sample_index)
        return RequestGroup(again.request_id, None, samples)

    def _new_engine(self) -> LLM:
        llm = self._dice.engine()
        llm.engine.scheduler.clock = self._clock
        return llm

    def _start(self, llm: LLM, asked: Asked) -> None:
        deadline = None if asked.patience_s is None else self._clock.now + asked.patience_s
        group = llm.prepare(asked.prompt, asked.sampling(), **asked.options, deadline_s=deadline)
        self._groups.append((asked, group))
        llm.start(group)

    def compare(self, plain: LLM, covered: Counter[str]) -> None:
        """Every answer with that of the same request alone, undrafted; nothing is left behind."""
        assert self._llm is not None and not self._llm.engine.groups and not self._llm.engine.records
        assert self._llm.engine.scheduler.pool.num_used == 0
        for asked, group in self._groups:
            [alone], output = plain.generate([asked.prompt], asked.sampling()), group.output()
            what = f"{self._llm.config} {asked}"
            for sample, found, expected in zip(group.samples, output.outputs, alone.outputs, strict=True):
                if sample.num_elsewhere:  # what came before has been told
                    logprobs = expected.logprobs and expected.logprobs[sample.num_elsewhere :]
                    expected = replace(expected, logprobs=logprobs, cumulative_logprob=found.cumulative_logprob)
                assert not found.stats.failed_drafters, what
                if found.finish_reason == "abort":
                    assert expected.token_ids[: len(found.token_ids)] == found.token_ids, what
                else:
                    assert told(found) == told(expected), what
                covered += Counter({**kinds(asked, found), "moved": sample.num_elsewhere > 0})
            if output.outputs[0].finish_reason != "abort":
                assert output.prompt_logprobs == alone.prompt_logprobs, what


def told(output: CompletionOutput) -> tuple[Any, ...]:
    """What users see of an answer, figures apart."""
    ended = (output.finish_reason, output.stop_reason, type(output.error))
    return (output.token_ids, output.text, *ended, output.logprobs, output.cumulative_logprob)


def kinds(asked: Asked, output: CompletionOutput) -> dict[str, int]:
    """What a sample has been through."""
    stats = output.stats
    return {
        "samples": 1,
        "aborted": output.finish_reason == "abort" and not isinstance(output.error, DeadlineError),
        "overdue": isinstance(output.error, DeadlineError),
        "preempted": stats.num_preemptions > 0,
        "prefix hits": stats.num_cached_tokens > 0,
        "drafted": stats.trees.drafted > 0,
        "accepted": stats.trees.accepted > 0,
        "stopped": output.finish_reason == "stop",
        "grammar": asked.make_grammar is not None,
    }
