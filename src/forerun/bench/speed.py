"""Speed of drafters against plain decoding on the same prompts.

Knows: how to measure on a noisy machine. Does not know: files, terminals, how an engine works.

The drafters take turns prompt by prompt, in a rotating order, so that a slow minute of the machine hits all of them.
A prompt's time is its requests' time from arrival to the last token (prefill included). A speed-up is taken within a
round of one prompt (plain time over the drafter's time, in seconds a token): the median over a prompt's rounds, then
the geometric mean over prompts, with its confidence interval (`bench.interval`). Of a single prompt, the mean and the
interval are over its rounds, and do not generalise to other prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.bench.conversation import run_cases
from forerun.bench.interval import Interval, geometric_mean, interval_of
from forerun.bench.prompts import PromptCase
from forerun.core import CompletionOutput, DrafterCount, RequestStats, SamplingParams, speedup

if TYPE_CHECKING:
    from forerun.llm import LLM

PLAIN = "none"
WIDENED_FROM = "_widened_from"  # in config.json of a model that lab/widen.py wrote: which model, of which sizes
ONE_A_STEP = 1.005  # tokens a step up to this are printed as 1.00


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One drafter's answers to one case, once."""

    token_ids: tuple[tuple[int, ...], ...]  # one entry per turn
    num_tokens: int
    num_steps: int
    seconds: float
    decode_s: float
    decode_tokens: int
    drafted: int
    accepted: int
    draft_s: float = 0.0
    num_failed: int = 0  # drafters that failed
    trees: DrafterCount = field(default_factory=DrafterCount)

    @staticmethod
    def of(answers: Sequence[CompletionOutput]) -> SpeedRun:
        """The sums over a case's turns."""
        stats = [answer.stats for answer in answers]
        counts = [count for s in stats for count in s.drafters.values()]
        return SpeedRun(
            token_ids=tuple(answer.token_ids for answer in answers),
            num_tokens=sum(s.num_tokens for s in stats),
            num_steps=sum(s.num_steps for s in stats),
            seconds=sum(s.ttft_s + s.decode_s for s in stats),
            decode_s=sum(s.decode_s for s in stats),
            decode_tokens=sum(decode_tokens(s) for s in stats),
            drafted=sum(count.drafted for count in counts),
            accepted=sum(count.accepted for count in counts),
            draft_s=sum(s.draft_s for s in stats),
            num_failed=sum(len(s.failed_drafters) for s in stats),
            trees=total_count(s.trees for s in stats),
        )


def total_count(counts: Iterable[DrafterCount]) -> DrafterCount:
    """Their sum."""
    total = DrafterCount()
    for count in counts:
        total.add(count)
    return total


def decode_tokens(stats: RequestStats) -> int:
    """Tokens emitted after the first step, which belongs to the prefill."""
    return max(0, stats.num_tokens - stats.num_elsewhere - stats.num_first)


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One line of the report.

    speedup_interval: at 95 % confidence; None for plain decoding, and for a single measurement.
    within_noise: the speed-up may be chance.
    identical: None if another sample is expected (rejection rule, T > 0).
    """

    drafter: str
    tokens_per_s: float
    speedup: float
    speedup_interval: Interval | None
    within_noise: bool
    acceptance_length: float
    identical: bool | None


@dataclass(frozen=True, slots=True)
class SpeedDetail:
    """More figures of a row."""

    num_prompts: int
    num_tokens: int
    drafted: int
    accepted: int
    decode_tokens_per_s: float
    decode_speedup: float
    decode_interval: Interval | None
    decode_within_noise: bool
    slowest_speedup: float  # of a single prompt
    fastest_speedup: float
    draft_share: float  # of the time, prefill included
    num_failed: int
    acceptance_by_depth: tuple[float, ...]  # of the steps with drafts that deep, those where one was accepted
    steps_by_depth: tuple[int, ...]


Rounds = list[list[dict[str, SpeedRun]]]  # case -> repeat -> drafter -> run
Step = Callable[[int], None]
Figure = Callable[[dict[str, SpeedRun]], float]


def measure(
    engines: Mapping[str, LLM],
    cases: Sequence[PromptCase],
    params: SamplingParams,
    repeats: int,
    advance: Step = lambda _: None,
) -> Rounds:
    """Run every case `repeats` times with every engine, interleaved; each case has a seed of its own."""
    warm_up(engines.values(), cases[0], params)
    rounds: Rounds = []
    for index, case in enumerate(cases):
        seeded = params.with_seed((params.seed or 0) + index)
        rounds.append([_round(engines, case, seeded, index + repeat) for repeat in range(repeats)])
        advance(1)
    return rounds


def warm_up(engines: Iterable[LLM], case: PromptCase, params: SamplingParams) -> None:
    """Run one case with every engine, uncounted."""
    for llm in engines:
        run_cases(llm, [case], [replace(params, seed=params.seed or 0)])


def _round(engines: Mapping[str, LLM], case: PromptCase, params: SamplingParams, shift: int) -> dict[str, SpeedRun]:
    names = list(engines)
    order = names[shift % len(names) :] + names[: shift % len(names)]
    runs = {name: SpeedRun.of(run_cases(engines[name], [case], [params])[0]) for name in order}
    return {name: runs[name] for name in names}


def rows(rounds: Rounds, compare: bool) -> list[SpeedRow]:
    """One row per drafter, plain first; `compare`: the tokens must be those of the plain run."""
    return [_row(name, rounds, compare) for name in rounds[0][0]]


def _row(name: str, rounds: Rounds, compare: bool) -> SpeedRow:
    same = all(r[name].token_ids == r[PLAIN].token_ids for repeats in rounds for r in repeats)
    gain, interval, within_noise = _gain(name, rounds, _speedup(name))
    return SpeedRow(
        drafter=name,
        tokens_per_s=round(median(_per_case(rounds, lambda r: _rate(r[name].num_tokens, r[name].seconds))), 2),
        speedup=gain,
        speedup_interval=interval,
        within_noise=within_noise,
        acceptance_length=round(_acceptance_length(name, rounds), 3),
        identical=same if compare else None,
    )


def detail(name: str, rounds: Rounds) -> SpeedDetail:
    """The figures behind a drafter's row."""
    runs = [repeats[0][name] for repeats in rounds]
    speedups = _per_case(rounds, _speedup(name))
    # An answer that ends in the first step says nothing of decoding; counted as 1.0 it would hide what others say.
    decoded = [repeats for repeats in rounds if all(_decodes(runs[name]) and _decodes(runs[PLAIN]) for runs in repeats)]
    gain = _gain(name, decoded, _decode_speedup(name)) if decoded else (1.0, None, True)
    decode_speedup, decode_interval, decode_within_noise = gain
    depths = total_count(run.trees for run in runs).depths
    return SpeedDetail(
        num_prompts=len(rounds),
        num_tokens=sum(run.num_tokens for run in runs),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        decode_tokens_per_s=round(
            median(_per_case(decoded, lambda r: _rate(r[name].decode_tokens, r[name].decode_s)) or [0.0]), 2
        ),
        decode_speedup=decode_speedup,
        decode_interval=decode_interval,
        decode_within_noise=decode_within_noise,
        slowest_speedup=round(min(speedups), 3),
        fastest_speedup=round(max(speedups), 3),
        draft_share=round(median(_per_case(rounds, lambda r: _rate(r[name].draft_s, r[name].seconds))), 4),
        num_failed=sum(run.num_failed for run in runs),
        acceptance_by_depth=tuple(round(_rate(depth.accepted, depth.tried), 4) for depth in depths),
        steps_by_depth=tuple(depth.tried for depth in depths),
    )


def _speedup(name: str) -> Figure:
    return lambda runs: speedup(_pace(runs[PLAIN]), _pace(runs[name])) or 1.0


def _decode_speedup(name: str) -> Figure:
    return lambda runs: speedup(_decode_pace(runs[PLAIN]), _decode_pace(runs[name])) or 1.0


def _gain(name: str, rounds: Rounds, ratio: Figure) -> tuple[float, Interval | None, bool]:
    """The mean of a ratio to plain decoding, its interval, and whether it is within noise.

    Checking drafts makes no step faster, so if steps bring one token each, a gain is noise whatever its interval.
    """
    if name == PLAIN:
        return 1.0, None, False
    ratios = _per_case(rounds, ratio) if len(rounds) > 1 else [ratio(runs) for runs in rounds[0]]
    mean, interval = geometric_mean(ratios), interval_of(ratios)
    impossible = mean > 1 and _acceptance_length(name, rounds) < ONE_A_STEP
    if interval is None:
        return round(mean, 3), None, True
    low, high = interval
    holds_none = round(low, 2) <= 1 <= round(high, 2)  # as it is printed
    return round(mean, 3), (round(low, 3), round(high, 3)), impossible or holds_none


def _acceptance_length(name: str, rounds: Rounds) -> float:
    runs = [runs_by_name[name] for repeats in rounds for runs_by_name in repeats]
    return _rate(sum(run.num_tokens for run in runs), sum(run.num_steps for run in runs))


def _per_case(rounds: Rounds, figure: Figure) -> list[float]:
    """A figure of every case: the median over its repeats."""
    return [median(figure(runs) for runs in repeats) for repeats in rounds]


def _pace(run: SpeedRun) -> float:
    return _rate(run.seconds, run.num_tokens)


def _decodes(run: SpeedRun) -> bool:
    """Whether there were steps behind the first, which reads the prompt."""
    return run.decode_tokens > 0 and run.decode_s > 0.0


def _decode_pace(run: SpeedRun) -> float:
    return _rate(run.decode_s, run.decode_tokens)


def _rate(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def report(rounds: Rounds, cases: Sequence[PromptCase], compare: bool, by_category: bool) -> dict[str, Any]:
    """Rows and details as plain values; with `by_category` also those of each category."""
    result: dict[str, Any] = {"rows": _rows(rounds, compare), "details": _details(rounds)}
    if by_category:
        parts = {name: _of_category(rounds, cases, name) for name in dict.fromkeys(case.category for case in cases)}
        result["categories"] = {name: _rows(part, compare) for name, part in parts.items()}
        result["category_details"] = {name: _details(part) for name, part in parts.items()}
    return result


def _rows(rounds: Rounds, compare: bool) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows(rounds, compare)]


def _details(rounds: Rounds) -> dict[str, dict[str, Any]]:
    return {name: asdict(detail(name, rounds)) for name in rounds[0][0]}


def _of_category(rounds: Rounds, cases: Sequence[PromptCase], category: str) -> Rounds:
    return [repeats for repeats, case in zip(rounds, cases, strict=True) if case.category == category]
