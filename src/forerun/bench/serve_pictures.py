"""The chart of a load: how times are distributed, and how busy the server was.

Knows: what is drawn. Does not know: how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from forerun.bench.chart import Chart, Labels, Point, lines, svg
from forerun.bench.serve_client import RequestOutcome
from forerun.bench.serve_report import Objective, flights, gaps

Series = Mapping[str, Iterable[float | None]]
BINS: Final = 40  # of tokens over time


def draw(outcomes: Sequence[RequestOutcome], objective: Objective, title: str) -> str:
    """The SVG of all requests; what the objective allows is a dashed line."""
    answered = [outcome for outcome in outcomes if outcome.error is None]
    start_s = min(outcome.arrived_s for outcome in outcomes)
    ends: Series = {"first text": [o.ttft_s for o in answered], "whole answer": [o.latency_s for o in answered]}
    pieces = [gap for o in answered for gap in gaps(o)]
    tokens: Series = {"per token (TPOT)": [o.tpot_s for o in answered], "between pieces": pieces}
    tpot_ms = None if objective.tpot_s is None else objective.tpot_s * 1e3
    until = Labels(title=f"{title}: time to first text, and to the end", x="seconds", y="share", limit=objective.ttft_s)
    return svg(
        _shares(until, ends, 1.0),
        _shares(Labels(title="Time per token", x="milliseconds", y="share", limit=tpot_ms), tokens, 1e3),
        _busy(outcomes, start_s),
        lines(Labels(title="Tokens per second", x="seconds"), {"": _pace(answered, start_s)}, stepped=True),
    )


def _shares(labels: Labels, series: Series, unit: float) -> Chart:
    """For every time, the share of requests that took no longer."""
    return lines(labels, {name: _ordered(values, unit) for name, values in series.items()}, stepped=True, top=1.0)


def _ordered(values: Iterable[float | None], unit: float) -> list[Point]:
    known = sorted(value * unit for value in values if value is not None)
    return [(value, (index + 1) / len(known)) for index, value in enumerate(known)]


def _busy(outcomes: Sequence[RequestOutcome], start_s: float) -> Chart:
    """Requests under way, and how many had failed."""
    failed = sorted(outcome.ended_s - start_s for outcome in outcomes if outcome.error is not None)
    series: dict[str, Sequence[Point]] = {
        "under way": [(at_s - start_s, float(num)) for at_s, num in flights(outcomes)]
    }
    if failed:
        series["failed so far"] = [(at_s, index + 1.0) for index, at_s in enumerate(failed)]
    return lines(Labels(title="Requests", x="seconds"), series, stepped=True)


def _pace(answered: Sequence[RequestOutcome], start_s: float) -> list[Point]:
    """Tokens a second over time; the tokens of an answer are spread evenly over its pieces."""
    pieces = [(at_s - start_s, o.num_tokens / len(o.piece_s)) for o in answered for at_s in o.piece_s]
    width = max((at_s for at_s, _ in pieces), default=0.0) / BINS
    if not width:
        return []
    sums = [0.0] * BINS
    for at_s, num in pieces:
        sums[min(BINS - 1, int(at_s / width))] += num / width
    return [(index * width, rate) for index, rate in enumerate([*sums, sums[-1]])]
