"""Compares every drafter's tokens with plain decoding, prompt by prompt and turn by turn.

Knows: what equal means under the coupled rule (the same tokens for the same seed) and how to find the first
difference. Does not know: why there could be one, nor files and terminals.

Plain decoding runs each conversation alone; the drafters run them in batches, so batching is tested, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forerun.bench.conversation import run_cases
from forerun.bench.prompts import PromptCase
from forerun.core import CompletionOutput, SamplingParams
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.llm import LLM

Step = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first differs from the plain one; a token is None if that answer had already ended."""

    prompt: str  # file:line
    turn: int
    position: int
    expected: int | None
    got: int | None


@dataclass(slots=True)
class Check:
    """One drafter at one temperature, over all prompts."""

    drafter: str
    temperature: float
    num_prompts: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0  # tokens that were verified
    num_failed: int = 0  # answers in which a drafter failed, whose drafts were not compared from then on
    failed: list[str] = field(default_factory=list)  # these drafters
    differences: list[Difference] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per target pass."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """The first position at which two token lists differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def check_equality(
    plain: LLM,
    engines: Mapping[str, LLM],
    cases: Sequence[PromptCase],
    params: Sequence[SamplingParams],
    batch_size: int,
    advance: Step = lambda _: None,
) -> list[Check]:
    """Compare each engine with `plain` under each of `params` -> one Check per drafter and params.

    Raises ConfigError if there are too few cases for every adapter and the model alone to have one.
    """
    if plain.adapters and len(cases) <= len(plain.adapters):
        raise ConfigError(
            f"{len(cases)} prompts leave some adapters unchecked: they and the model alone take turns; "
            f"give at least {len(plain.adapters) + 1} prompts, or fewer adapters"
        )
    checks = []
    for given in params:
        expected = _run(plain, cases, given, 1, advance)
        for name, llm in engines.items():
            got = _run(llm, cases, given, batch_size, advance)
            checks.append(_check(name, given.temperature, cases, expected, got))
    return checks


def _run(
    llm: LLM, cases: Sequence[PromptCase], params: SamplingParams, batch_size: int, advance: Step
) -> list[list[CompletionOutput]]:
    """Run all cases, `batch_size` at a time; case i has the seed of `params` plus i, adapters are taken in turn."""
    answers: list[list[CompletionOutput]] = []
    names = (None, *llm.adapters)
    for start in range(0, len(cases), batch_size):
        batch = cases[start : start + batch_size]
        seeded = [params.with_seed((params.seed or 0) + start + i) for i in range(len(batch))]
        loras = [names[(start + i) % len(names)] for i in range(len(batch))]
        answers.extend(run_cases(llm, batch, seeded, loras))
        advance(len(batch))
    return answers


def _check(
    drafter: str,
    temperature: float,
    cases: Sequence[PromptCase],
    expected: Sequence[Sequence[CompletionOutput]],
    got: Sequence[Sequence[CompletionOutput]],
) -> Check:
    check = Check(drafter, temperature, num_prompts=len(cases))
    for case, wanted, answers in zip(cases, expected, got, strict=True):
        check.num_tokens += sum(answer.stats.num_tokens for answer in answers)
        check.num_steps += sum(answer.stats.num_steps for answer in answers)
        check.num_drafted += sum(answer.stats.trees.drafted for answer in answers)
        check.num_failed += sum(bool(answer.stats.failed_drafters) for answer in answers)
        check.failed = sorted({*check.failed, *(name for answer in answers for name in answer.stats.failed_drafters)})
        difference = _difference(case, wanted, answers)
        if difference is not None:
            check.differences.append(difference)
    return check


def _difference(
    case: PromptCase, expected: Sequence[CompletionOutput], got: Sequence[CompletionOutput]
) -> Difference | None:
    """The first difference in a conversation; later turns follow a different text, so they are not compared."""
    for turn in range(max(len(expected), len(got))):
        wanted = expected[turn].token_ids if turn < len(expected) else ()
        found = got[turn].token_ids if turn < len(got) else ()
        position = first_difference(wanted, found)
        if position is not None:
            return Difference(case.place, turn, position, _at(wanted, position), _at(found, position))
    return None


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
