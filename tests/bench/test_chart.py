"""Charts: well-formed SVG that loads nothing, with every value where it belongs."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forerun.bench.chart import Bar, Chart, Labels, bars, check_chart, lines, svg, ticks
from forerun.errors import ConfigError

NAME = "{http://www.w3.org/2000/svg}"


def parsed(*charts: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(svg(*charts))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{NAME}text")]


def points(root: ElementTree.Element, width: str) -> list[list[tuple[float, float]]]:
    """Of each line of this width, its corners."""
    found = [line for line in root.iter(f"{NAME}polyline") if line.get("stroke-width") == width]
    return [[tuple(map(float, point.split(","))) for point in line.get("points", "").split()] for line in found]  # type: ignore[misc]


@pytest.mark.parametrize("highest", [0.004, 0.9, 1.0, 3.2, 17.0, 4096.0, 81234.5])
def test_ticks_are_round_and_reach_the_end(highest: float) -> None:
    found = ticks(highest)
    assert 3 <= len(found) <= 9 and found[0] == 0 and found[-1] <= highest < found[-1] + found[1]
    assert re.fullmatch(r"[125]", f"{found[1]:e}"[0])


def test_ticks_of_counts_are_whole() -> None:
    assert ticks(2.0, least=1.0) == [0, 1, 2]


def test_lines_keep_proportions() -> None:
    chart = lines(Labels(title="T", x="rows", y="ms"), {"a": [(1, 10), (2, 20), (4, 40)], "b": [(1, 10)]})
    root = parsed(chart)
    (first, second, third), other = points(root, "2")
    assert first == other[0] and second[1] - third[1] == pytest.approx(2 * (first[1] - second[1]), abs=0.3)
    assert third[0] - second[0] == pytest.approx(2 * (second[0] - first[0]), abs=0.3)
    assert {"T", "rows", "ms", "a", "b"} <= set(texts(root))


def test_steps_keep_a_value_up_to_the_next() -> None:
    [corners] = points(parsed(lines(Labels(title="T"), {"a": [(0, 1), (2, 3)]}, stepped=True)), "2")
    assert len(corners) == 4 and corners[0][1] == corners[1][1] and corners[1][0] == corners[2][0]


def test_bars_and_their_intervals() -> None:
    groups = {"all": {"x": Bar(2, 1.5, 2.5), "y": Bar(1, 1, 1)}, "code": {"x": Bar(4, 3, 5), "y": Bar(3, 3, 3)}}
    root = parsed(bars(Labels(title="T", level=(1.0, "plain")), groups))
    heights = [float(rect.get("height", "0")) for rect in root.iter(f"{NAME}rect") if rect.get("rx") is None]
    assert [height / heights[1] for height in heights] == pytest.approx([2, 1, 4, 3], rel=0.01)
    assert len(list(root.iter(f"{NAME}path"))) == 4 and {"all", "code", "x", "y", "plain"} <= set(texts(root))


def test_charts_below_one_another_and_names_with_markup() -> None:
    one = lines(Labels(title="<script>&"), {"<b>": [(1, 1)], "c": []})
    root = parsed(one, one)
    assert root.get("viewBox", "").split()[3] == f"{2 * one.height:.0f}" and texts(root).count("<script>&") == 2


def test_nothing_to_draw() -> None:
    parsed(lines(Labels(title="T", limit=3.0), {"a": [], "b": []}, stepped=True))


def test_places_for_charts_are_checked_first(tmp_path: Path) -> None:
    check_chart(None)
    check_chart(tmp_path / "a.svg")
    for path, says in ((tmp_path / "a.png", r"\.svg"), (tmp_path / "none" / "a.svg", "folder")):
        with pytest.raises(ConfigError, match=says):
            check_chart(path)
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match=r"--chart .*folder\.svg is a folder: give the name of a file"):
        check_chart(tmp_path / "folder.svg")


def test_places_that_may_not_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.svg").touch()
    asked: list[Path] = []
    monkeypatch.setattr("os.access", lambda path, _: bool(asked.append(path)))  # root may write everywhere
    for name in ("old.svg", "new.svg"):
        with pytest.raises(ConfigError, match=rf"--chart .*{name} cannot be written: choose another path"):
            check_chart(tmp_path / name)
    assert asked == [tmp_path / "old.svg", tmp_path]
