"""The pictures of a drafter report: speed-up by category, acceptance by depth, what a pass costs.

Knows: how figures are drawn. Does not know: how they were measured. Needs matplotlib, from the `bench` extra; without
it there are no pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from forerun.bench.report import MIN_STEPS, Picture
from forerun.bench.speed import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI: Final = 120
BARS_WIDTH: Final = 0.8  # of the room of a category


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any]) -> list[Picture]:
    """All pictures that a report has figures for; none without matplotlib."""
    if not can_draw():
        return []
    pictures = []
    for run in report["runs"]:
        at = f"{run['temperature']:g}"
        names = [row["drafter"] for row in run["rows"] if row["drafter"] not in (PLAIN, *report["fixed"])]
        if names:
            pictures.append(_picture(f"Speed-up by category, temperature {at}", f"speedup-t{at}.png",
                                     _speedups(run, names)))  # fmt: skip
            pictures.append(_picture(f"Acceptance by depth, temperature {at}", f"depth-t{at}.png", _depths(run, names)))
    if len(report["pass_ms"]) > 1:
        pictures.append(_picture("What a pass over several rows costs", "cost.png", _costs(report["pass_ms"])))
    return pictures


def _picture(title: str, file: str, figure: Figure) -> Picture:
    figure.axes[0].set_title(title)
    content = BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return Picture(title, file, content.getvalue())


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _new_over_counts(width: float, height: float) -> tuple[Figure, Axes]:
    """`_new`, with whole numbers on the horizontal axis."""
    from matplotlib.ticker import MaxNLocator  # an optional dependency

    figure, axes = _new(width, height)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure, axes


def _speedups(run: Mapping[str, Any], names: Sequence[str]) -> Figure:
    """One group of bars per category, one bar per drafter, and a line at plain decoding."""
    groups = {"all": run["rows"], **run["categories"]}
    figure, axes = _new(max(7.0, 0.28 * len(groups) * (len(names) + 2)), 4.2)
    width = BARS_WIDTH / len(names)
    for place, name in enumerate(names):
        bars = [next(row for row in rows if row["drafter"] == name) for rows in groups.values()]
        heights = [row["speedup"] for row in bars]
        ends = [row["speedup_interval"] or (row["speedup"],) * 2 for row in bars]
        spreads = [[abs(end[side] - height) for end, height in zip(ends, heights, strict=True)] for side in (0, 1)]
        left = [group - BARS_WIDTH / 2 + (place + 0.5) * width for group in range(len(groups))]
        axes.bar(left, heights, width, label=name, yerr=spreads, error_kw={"linewidth": 0.6})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), list(groups), rotation=20, ha="right")
    axes.set_ylabel("times plain decoding, with 95% intervals")
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def _depths(run: Mapping[str, Any], names: Sequence[str]) -> Figure:
    """One line per drafter over the depths that were reached often enough."""
    figure, axes = _new_over_counts(7.0, 4.2)
    for name in names:
        detail = run["details"][name]
        shown = [
            (depth, rate)
            for depth, (rate, steps) in enumerate(
                zip(detail["acceptance_by_depth"], detail["steps_by_depth"], strict=True), start=1
            )
            if steps >= MIN_STEPS
        ]
        axes.plot([depth for depth, _ in shown], [rate for _, rate in shown], "o-", label=name)
    axes.set(xlabel="depth in the draft tree", ylabel="share of steps with an accepted node", ylim=(0.0, 1.02))
    axes.legend(fontsize="small")
    return figure


def _costs(pass_ms: Mapping[int, float]) -> Figure:
    """Milliseconds over rows, and a line for one row."""
    figure, axes = _new_over_counts(7.0, 4.2)
    rows, one = list(pass_ms), pass_ms[min(pass_ms)]
    axes.plot(rows, list(pass_ms.values()), "o-", label="one pass")
    axes.plot(rows, [one] * len(rows), "--", color="grey", label="one row")
    axes.set(xlabel="rows (root and drafts)", ylabel="milliseconds", ylim=(0.0, None))
    axes.legend(fontsize="small")
    return figure
