"""Figures of a load: percentiles, throughput, goodput, errors by kind.

Knows: outcomes of requests. Does not know: how they were sent, how figures are shown.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from forerun.bench.serve_client import RequestOutcome

PERCENTILES: Final = (50, 90, 99)
DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits a request must keep to count as good (an SLO); None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def met(self, outcome: RequestOutcome) -> bool:
        """Whether the request was answered in time. An answer of one token has no TPOT to miss."""
        if outcome.error is not None:
            return False
        return _within(outcome.ttft_s, self.ttft_s) and _within(outcome.tpot_s, self.tpot_s)


def _within(value: float | None, most: float | None) -> bool:
    return value is None or most is None or value <= most


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the two nearest ranks, like NumPy's default; `values` must not be empty."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles of the values; None without values."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    figures = {"mean": sum(there) / len(there), **{f"p{p}": percentile(there, p) for p in PERCENTILES}}
    return {name: round(value, DIGITS) for name, value in figures.items()}


def summary(outcomes: Sequence[RequestOutcome], objective: Objective) -> dict[str, Any]:
    """All figures, as plain values; times in seconds.

    Times and tokens are those of requests that were answered in full; rates are over the time from the first arrival to
    the last end, failed requests included.
    """
    answered = [outcome for outcome in outcomes if outcome.error is None]
    start_s, end_s = min(o.arrived_s for o in outcomes), max(o.ended_s for o in outcomes)
    duration_s = max(end_s - start_s, 1e-9)
    return {
        "duration_s": round(duration_s, DIGITS),
        "num_requests": len(outcomes),
        "num_answered": len(answered),
        "errors": errors(outcomes),
        "requests_per_s": round(len(answered) / duration_s, DIGITS),
        **_tokens(answered, duration_s),
        "ttft_s": spread(o.ttft_s for o in answered),
        "tpot_s": spread(o.tpot_s for o in answered),
        "gap_s": spread(gap for o in answered for gap in gaps(o)),
        "latency_s": spread(o.latency_s for o in answered),
        "sent_late_s": spread(o.sent_s - o.arrived_s for o in answered),
        "max_in_flight": max_in_flight(outcomes),
        "goodput": _goodput(outcomes, objective, duration_s) if objective else None,
        "text_sha256": text_digest(outcomes),
    }


def errors(outcomes: Sequence[RequestOutcome]) -> dict[str, dict[str, Any]]:
    """By kind of error, its count and the first message."""
    found: dict[str, dict[str, Any]] = {}
    for error in (outcome.error for outcome in outcomes if outcome.error is not None):
        found.setdefault(error.kind, {"count": 0, "first": error.message})["count"] += 1
    return found


def gaps(outcome: RequestOutcome) -> list[float]:
    """Seconds between pieces of text; with speculation a piece holds several tokens."""
    return [later - earlier for earlier, later in pairwise(outcome.piece_s)]


def _tokens(answered: Sequence[RequestOutcome], duration_s: float) -> dict[str, Any]:
    written = sum(o.num_tokens for o in answered)
    prompts = _sum(o.num_prompt_tokens for o in answered)
    steps = _sum(o.num_steps for o in answered)
    counted = sum(o.usage is not None for o in answered)
    return {
        "output_tokens_per_s": round(written / duration_s, DIGITS),
        "prompt_tokens_per_s": None if prompts is None else round(prompts / duration_s, DIGITS),
        "output_tokens": written,
        "prompt_tokens": prompts,
        "cached_prompt_tokens": _sum(o.num_cached_tokens for o in answered),
        "tokens_counted_by": {"usage": counted, "pieces": len(answered) - counted},
        "acceptance_length": round(written / steps, 4) if steps else None,
    }


def _sum(values: Iterable[int | None]) -> int | None:
    """None if a value is unknown, or all are missing."""
    there = list(values)
    known = [value for value in there if value is not None]
    return sum(known) if known and len(known) == len(there) else None


def _goodput(outcomes: Sequence[RequestOutcome], objective: Objective, duration_s: float) -> dict[str, Any]:
    good = sum(objective.met(outcome) for outcome in outcomes)
    return {
        "slo_ttft_s": objective.ttft_s,
        "slo_tpot_s": objective.tpot_s,
        "requests_per_s": round(good / duration_s, DIGITS),
        "share": round(good / len(outcomes), DIGITS),
    }


def flights(outcomes: Sequence[RequestOutcome]) -> list[tuple[float, int]]:
    """The number of requests in flight over time: (time, number) after each change, in order."""
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    result, number = list[tuple[float, int]](), 0
    for time_s, change in changes:
        number += change
        result.append((time_s, number))
    return result


def max_in_flight(outcomes: Sequence[RequestOutcome]) -> int:
    """The most requests in flight at one time."""
    return max((number for _, number in flights(outcomes)), default=0)


def text_digest(outcomes: Sequence[RequestOutcome]) -> str | None:
    """A hash of all answers in order, to compare runs with; None if one is missing."""
    if any(outcome.error is not None for outcome in outcomes):
        return None
    digest = hashlib.sha256()
    for outcome in outcomes:
        digest.update(outcome.text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
