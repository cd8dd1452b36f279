"""Charts as SVG: bars with intervals, lines, several below one another. They load nothing and read well on dark pages.

Knows: axes, ticks, colours. Does not know: what is shown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from forerun.errors import ConfigError

WIDTH: Final = 760.0  # pixels, as everything here
HEIGHT: Final = 250.0  # of the plot
LEFT, RIGHT, TOP, BOTTOM = 62.0, 18.0, 64.0, 52.0  # around it
LETTER: Final = 7.2  # width, about
BAR: Final = 22.0  # the narrowest group's share for one bar
NUM_TICKS: Final = 6
COLOURS: Final = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#7f7f7f",
    "#b2a100",
)  # tell apart for the colour-blind
GREY: Final = "#546e7a"
DASHED: Final = 'stroke-dasharray="5 4"'

Point = tuple[float, float]


class Bar(NamedTuple):
    """A value and where its interval ends."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing without its frame."""

    parts: Sequence[str]
    width: float = WIDTH
    height: float = TOP + HEIGHT + BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What is written around a chart, and lines to compare with."""

    title: str
    x: str = ""
    y: str = ""
    level: tuple[float, str] | None = None  # a dashed line at this height, with its name
    limit: float | None = None  # a dashed line up from this x
    whole: bool = False  # x counts things: its ticks are whole numbers


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plot's area; values from 0 to `x` and `y`."""

    x: float
    y: float
    width: float = WIDTH
    parts: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> Point:
        return LEFT + x / self.x * (self.width - LEFT - RIGHT), TOP + (1 - y / self.y) * HEIGHT

    def line(self, points: Sequence[Point], colour: str, more: str = "") -> None:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" {more}/>')

    def text(self, x: float, y: float, text: str, more: str = "") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>')

    def tick(self, value: float) -> None:
        """A level line with its number."""
        (x, y), (end, _) = self.at(0, value), self.at(self.x, value)
        self.line([(x, y), (end, y)], "#e3e7ea")
        self.text(x - 8, y + 4, f"{value:g}", 'text-anchor="end"')

    def begin(self, labels: Labels, names: Sequence[str]) -> None:
        """Title, vertical axis, level, and which colour is who."""
        self.text(LEFT, 22, labels.title, 'class="title"')
        self.text(
            14, TOP + HEIGHT / 2, labels.y, f'text-anchor="middle" transform="rotate(-90 14 {TOP + HEIGHT / 2:.1f})"'
        )
        self.text(LEFT + (self.width - LEFT - RIGHT) / 2, TOP + HEIGHT + 42, labels.x, 'text-anchor="middle"')
        for value in ticks(self.y):
            self.tick(value)
        x = LEFT
        for name, colour in zip(names, _colours(names), strict=True):
            self.parts.append(f'<rect x="{x:.1f}" y="36" width="12" height="12" rx="2" fill="{colour}"/>')
            self.text(x + 17, 46, name)
            x += 17 + len(name) * LETTER + 16
        if labels.level is not None:
            value, name = labels.level
            self.line([self.at(0, value), self.at(self.x, value)], "#000000", DASHED)
            self.text(self.width - RIGHT, self.at(0, value)[1] - 5, name, 'text-anchor="end"')
        if labels.limit is not None:
            self.line([self.at(labels.limit, 0), self.at(labels.limit, self.y)], "#000000", DASHED)


def lines(labels: Labels, series: Mapping[str, Sequence[Point]], *, stepped: bool = False, top: float = 0.0) -> Chart:
    """A line for each series, from (0, 0); `stepped` keeps a value up to the next. `top`: at least so high."""
    points = [point for each in series.values() for point in each]
    level = labels.level[0] if labels.level else 0.0
    frame = _Frame(
        max([labels.limit or 0.0, *(x for x, _ in points)]) or 1.0, _above([top, level, *(y for _, y in points)])
    )
    frame.begin(labels, list(series) if len(series) > 1 else [])
    for value in ticks(frame.x, least=1.0 if labels.whole else 0.0):
        x, y = frame.at(value, 0)
        frame.text(x, y + 18, f"{value:g}", 'text-anchor="middle"')
    for each, colour in zip(series.values(), _colours(series), strict=True):
        drawn = [frame.at(*point) for point in (_steps(each) if stepped else each)]
        frame.line(drawn, colour, 'stroke-width="2"')
        if not stepped:
            circles = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in drawn]
            frame.parts.extend(circles)
    return Chart(parts=frame.parts)


def bars(labels: Labels, groups: Mapping[str, Mapping[str, Bar]]) -> Chart:
    """A group of bars for each key, a bar for each of its names, the same in every group."""
    names = list(next(iter(groups.values())))
    level = labels.level[0] if labels.level else 0.0
    highest = _above([level, *(bar.high for group in groups.values() for bar in group.values())])
    frame = _Frame(float(len(groups)), highest, max(WIDTH, LEFT + RIGHT + BAR * len(groups) * (len(names) + 1)))
    frame.begin(labels, names)
    share = 0.8 / len(names)
    for place, (group, own) in enumerate(groups.items()):
        x, y = frame.at(place + 0.5, 0)
        frame.text(x, y + 18, group, 'text-anchor="middle"')
        for index, (bar, colour) in enumerate(zip(own.values(), _colours(names), strict=True)):
            left = place + 0.1 + index * share
            frame.parts.append(_bar(frame, left, share * 0.9, bar, colour))
    return Chart(parts=frame.parts, width=frame.width)


def svg(*charts: Chart) -> str:
    """The charts below one another, as a file."""
    width, height = max(chart.width for chart in charts), sum(chart.height for chart in charts)
    drawn, y = [], 0.0
    for chart in charts:
        drawn.append(f'<g transform="translate(0 {y:.0f})">{"".join(chart.parts)}</g>')
        y += chart.height
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        f"<style>text{{font:13px system-ui,'DejaVu Sans',sans-serif;fill:{GREY}}}"
        ".title{font-size:15px;font-weight:600;fill:#1c2733}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
        *drawn, "</svg>", "",
    ])  # fmt: skip


def check_chart(path: Path | None) -> None:
    """Raise ConfigError if a chart could not be written there, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--chart must end in .svg; got {path}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.absolute().parent} for the chart: make it, or choose another")
    if path.is_dir():
        raise ConfigError(f"--chart {path} is a folder: give the name of a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"--chart {path} cannot be written: choose another path, or check its permissions")


def ticks(highest: float, least: float = 0.0) -> list[float]:
    """Round numbers from 0 on: steps of 1, 2 or 5 times a power of ten, and of at least so much."""
    rough = max(highest / NUM_TICKS, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(step * index, 12) for index in range(int(highest / step + 1e-9) + 1)]


def _above(values: Iterable[float]) -> float:
    """The end of an axis: a little more than the highest value."""
    return max(values) * 1.06 or 1.0


def _colours(names: Iterable[str]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index, _ in enumerate(names)]


def _steps(points: Sequence[Point]) -> list[Point]:
    corners = [(x, y) for (x, _), (_, y) in zip(points[1:], points, strict=False)]
    return [point for pair in zip(points, [*corners, points[-1]], strict=True) for point in pair] if points else []


def _bar(frame: _Frame, left: float, width: float, bar: Bar, colour: str) -> str:
    (x, y), (end, floor) = frame.at(left, bar.value), frame.at(left + width, 0)
    middle = (x + end) / 2
    (_, high), (_, low) = frame.at(left, bar.high), frame.at(left, bar.low)
    body = f'<rect x="{x:.1f}" y="{y:.1f}" width="{end - x:.1f}" height="{floor - y:.1f}" fill="{colour}"/>'
    return body + f'<path d="M{middle:.1f} {low:.1f}V{high:.1f}" stroke="#1c2733" stroke-width="1.2"/>'
