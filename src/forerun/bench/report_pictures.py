"""The pictures of a drafter report: speed-up by category, acceptance by depth, what a pass costs.

Knows: which figures are drawn, and how. Does not know: how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.bench.chart import Bar, Chart, Labels, bars, lines, svg
from forerun.bench.report import MIN_STEPS, Picture
from forerun.bench.speed import PLAIN

TIMES_PLAIN = "times plain decoding"


def draw(report: Mapping[str, Any]) -> list[Picture]:
    """All pictures that a report has figures for."""
    pictures = []
    for run in report["runs"]:
        at = f"{run['temperature']:g}"
        names = [row["drafter"] for row in run["rows"] if row["drafter"] not in (PLAIN, *report["fixed"])]
        if names:
            title = f"Speed-up by category, temperature {at}"
            groups = {"all": run["rows"], **run["categories"]}
            pictures.append(_picture(title, f"speedup-t{at}.svg", speedups(title, groups, names)))
            title = f"Acceptance by depth, temperature {at}"
            pictures.append(_picture(title, f"depth-t{at}.svg", _depths(title, run, names)))
    if len(report["pass_ms"]) > 1:
        title = "What a pass over several rows costs"
        pictures.append(_picture(title, "cost.svg", _costs(title, report["pass_ms"])))
    return pictures


def _picture(title: str, file: str, chart: Chart) -> Picture:
    return Picture(title, file, svg(chart))


def speedups(title: str, groups: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]) -> Chart:
    """A group of bars for each category of rows, a bar for each drafter, and a line at plain decoding."""
    labels = Labels(title=title, y=f"{TIMES_PLAIN}, 95% intervals", level=(1.0, ""))
    shown = {group: {row["drafter"]: row for row in rows} for group, rows in groups.items()}
    return bars(labels, {group: {name: _bar(rows[name]) for name in names} for group, rows in shown.items()})


def _bar(row: Mapping[str, Any]) -> Bar:
    return Bar(row["speedup"], *(row["speedup_interval"] or (row["speedup"],) * 2))


def _depths(title: str, run: Mapping[str, Any], names: Sequence[str]) -> Chart:
    """A line for each drafter over the depths that were reached often enough."""
    labels = Labels(title=title, x="depth in the draft tree", whole=True, y="steps with an accepted node")
    return lines(labels, {name: _shown(run["details"][name]) for name in names}, top=1.0)


def _shown(detail: Mapping[str, Any]) -> list[tuple[float, float]]:
    both = zip(detail["acceptance_by_depth"], detail["steps_by_depth"], strict=True)
    return [(depth, rate) for depth, (rate, steps) in enumerate(both, start=1) if steps >= MIN_STEPS]


def _costs(title: str, pass_ms: Mapping[int, float]) -> Chart:
    """Milliseconds over rows, and a line for one row."""
    level = (pass_ms[min(pass_ms)], "one row")
    labels = Labels(title=title, x="rows (root and drafts)", whole=True, y="milliseconds", level=level)
    return lines(labels, {"one pass": list(pass_ms.items())})
