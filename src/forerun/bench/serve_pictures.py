"""The picture of a load: how times are distributed, and how busy the server was.

Knows: how it is drawn. Does not know: how anything was measured. Needs matplotlib, from the `bench` extra.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forerun.bench.serve_client import RequestOutcome
from forerun.bench.serve_report import Objective, flights, gaps
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".png", ".svg", ".pdf")
DPI: Final = 120
BINS: Final = 40  # of tokens over time


def check_picture(path: Path) -> None:
    """Raise ConfigError if a picture could not be drawn there, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--picture must end in {', '.join(FORMATS)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.absolute().parent} for the picture")
    if find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib: pip install 'forerun[bench]'")


def draw(outcomes: Sequence[RequestOutcome], objective: Objective, title: str, path: Path) -> None:
    """Write the picture of all requests."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    answered = [outcome for outcome in outcomes if outcome.error is None]
    _shares(first, {"first text": [o.ttft_s for o in answered], "whole answer": [o.latency_s for o in answered]}, 1.0)
    _limit(first, objective.ttft_s, 1.0)
    pieces = [gap for o in answered for gap in gaps(o)]
    _shares(second, {"per token (TPOT)": [o.tpot_s for o in answered], "between pieces": pieces}, 1e3)
    _limit(second, objective.tpot_s, 1e3)
    first.set(title="Time to first text, and to the end", xlabel="seconds")
    second.set(title="Time per token", xlabel="milliseconds")
    _busy(third, outcomes)
    _pace(fourth, answered, min(o.arrived_s for o in outcomes))
    figure.suptitle(title)
    figure.savefig(path, dpi=DPI)


def _shares(axes: Axes, series: dict[str, Iterable[float | None]] | dict[str, Any], unit: float) -> None:
    """For every time, the share of requests that took no longer."""
    for name, values in series.items():
        ordered = sorted(value * unit for value in values if value is not None)
        if ordered:
            axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    axes.set(ylabel="share", ylim=(0.0, 1.02))
    axes.set_xlim(left=0.0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _limit(axes: Axes, value: float | None, unit: float) -> None:
    if value is not None:
        axes.axvline(value * unit, color="black", linestyle="--", linewidth=0.8)


def _busy(axes: Axes, outcomes: Sequence[RequestOutcome]) -> None:
    start_s = min(outcome.arrived_s for outcome in outcomes)
    changes = flights(outcomes)
    axes.step([time_s - start_s for time_s, _ in changes], [number for _, number in changes], where="post")
    failed = [outcome.ended_s - start_s for outcome in outcomes if outcome.error is not None]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color="tab:red", label="failed")
        axes.legend(fontsize="small")
    axes.set(title="Requests under way", xlabel="seconds", ylim=(0.0, None))


def _pace(axes: Axes, answered: Sequence[RequestOutcome], start_s: float) -> None:
    """Tokens a second over time; the tokens of an answer are spread evenly over its pieces."""
    times = [time_s - start_s for o in answered for time_s in o.piece_s]
    weights = [o.num_tokens / len(o.piece_s) for o in answered for _ in o.piece_s]
    width = max(times, default=0.0) / BINS
    if width > 0:
        axes.hist(times, bins=BINS, range=(0.0, width * BINS), weights=[w / width for w in weights])
    axes.set(title="Tokens per second", xlabel="seconds")
