"""What gpu.py shows of its figures: lines of what it must reach, pictures, the files kept.

Knows: the rows the parts give. Does not know: how they were measured. A line without its figures says "not measured".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.chart import Chart, Labels, svg
from forerun.bench.chart import lines as lines_chart

LARGE, CONTEXT = "llama-3.1-8b", 1024
BY_ROWS = ("products", "attention", "recurrent")  # parts that look at single rows
Parts = Mapping[str, Mapping[str, Any]]
Row = Mapping[str, Any]


def lines(parts: Parts) -> list[dict[str, Any]]:
    """Every line a GPU is to show: what, what is wanted, what was found (None: not measured), whether it holds."""
    goals: list[tuple[str, str, float, Callable[[], float | None]]] = [
        ("bf16, 8B shape, M = 1: share of copy bandwidth", ">=", 0.80, lambda: curve(parts, "bf16", 1, "share")),
        ("4-bit, 8B shape, M = 1: share of copy bandwidth", ">=", 0.65, lambda: curve(parts, "int4", 1, "share")),
        ("bf16, 8B shape: M = 16 over M = 1", "<=", 1.15, lambda: curve(parts, "bf16", 16, "ratio")),
        ("4-bit, 8B shape: M = 16 over M = 1", "<=", 1.3, lambda: curve(parts, "int4", 16, "ratio")),
        ("4-bit, 8B shape: M = 64 over M = 1", "<=", 1.6, lambda: curve(parts, "int4", 64, "ratio")),
        ("attention, 32k, batch 1: share of bandwidth", ">=", 0.75, lambda: attention(parts, "share")),
        ("attention, 32k, batch 1: times the unsplit kernel", ">=", 5, lambda: attention(parts, "times_unsplit")),
        ("host overhead of a step, widened to 8B", "<=", 0.05, lambda: widened(parts, "none", 1, "host_share")),
        ("EAGLE-3, widened to 8B, batch 1: times plain", ">=", 2.8, lambda: widened(parts, "eagle", 1, "speedup")),
        ("EAGLE-3, widened to 8B, batch 32: times plain", ">=", 1.0, lambda: widened(parts, "eagle", 32, "speedup")),
        ("answers that are not plain decoding's", "<=", 0, lambda: count(parts, "speed", "identical")),
        ("rows with other bits in a batch", "<=", 0, lambda: _sum(other_bits(parts))),
        ("cases with other numbers than the reference", "<=", 0, lambda: _sum(other_numbers(parts))),
        ("tests of the kernels that failed", "<=", 0, lambda: failed_tests(parts)),
    ]
    return [_line(what, sign, wanted, figure()) for what, sign, wanted, figure in goals]


def _line(what: str, sign: str, wanted: float, found: float | None) -> dict[str, Any]:
    holds = None if found is None else (found >= wanted if sign == ">=" else found <= wanted)
    return {"what": what, "wanted": f"{sign} {wanted:g}", "found": found, "holds": holds}


def rows_of(parts: Parts, part: str) -> Sequence[Row]:
    """A part's rows, none where it was not run."""
    rows: Sequence[Row] = parts.get(part, {}).get("rows", [])
    return rows


def first(rows: Sequence[Row], name: str, **wanted: Any) -> float | None:
    """A figure of the first row with these values."""
    return next((row[name] for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def curve(parts: Parts, weights: str, tokens: int, name: str) -> float | None:
    """A figure of a pass at the 8B shape."""
    return first(rows_of(parts, "curve"), name, shape=LARGE, weights=weights, tokens=tokens, context=CONTEXT)


def attention(parts: Parts, name: str) -> float | None:
    """A figure of one row's attention at 32k."""
    return first(rows_of(parts, "attention"), name, shape=LARGE, tokens=1, context=32768)


def widened(parts: Parts, drafter: str, batch: int, name: str) -> float | None:
    """A greedy figure on mini widened to the 8B shape; None if only a smaller one had room."""
    rows = [row for row in rows_of(parts, "speed") if row["drafter"].partition("=")[0] == drafter]
    return first(rows, name, model="widened", widened_to=LARGE, batch=batch, temperature=0.0, is_long=False)


def count(parts: Parts, part: str, name: str) -> float | None:
    """Rows of a part for which something that must hold does not; None without such rows."""
    told = [row[name] for row in rows_of(parts, part) if name in row]
    return told.count(False) if told else None


def other_bits(parts: Parts) -> list[float | None]:
    """Cases with other bits in a batch: products, attention, recurrent layers."""
    return [count(parts, part, "row_has_its_bits") for part in BY_ROWS]


def other_numbers(parts: Parts) -> list[float | None]:
    """Cases the reference gives other numbers for: likewise."""
    return [count(parts, part, "as_reference") for part in BY_ROWS]


def failed_tests(parts: Parts) -> float | None:
    """None where none was run."""
    told = rows_of(parts, "check")
    return sum(row.get("FAILED", 0) + row.get("ERROR", 0) for row in told) if any(told) else None


def _sum(numbers: Sequence[float | None]) -> float | None:
    return None if None in numbers else sum(number for number in numbers if number is not None)


def wrong(parts: Parts) -> list[str]:
    """What no GPU may give: other bits, other numbers than the reference, other tokens than plain, failed cases."""
    musts = {"row_has_its_bits", "unsplit_has_the_bits", "as_reference", "identical"}
    found = [f"{part}: {name} of {row}" for part in parts for row in rows_of(parts, part) for name in musts
             if row.get(name) is False]  # fmt: skip
    return found + [
        f"{part}: {case}: {why}" for part, result in parts.items() for case, why in result["errors"].items()
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The lines, and what was left out."""
    rows = ["| | wanted | found | |", "|---|---|---|---|"]
    for line in result["lines"]:
        found = "not measured" if line["found"] is None else f"{line['found']:g}"
        rows.append(
            f"| {line['what']} | {line['wanted']} | {found} | {({True: 'yes', False: 'NO', None: ''})[line['holds']]} |"
        )
    left = [f"* left out of {part}: {', '.join(map(str, found['left_out']))}"
            for part, found in result["parts"].items() if found["left_out"]]  # fmt: skip
    machine = result["machine"]
    place = f"{result['gpu']}, torch {machine['torch']}, commit {machine['commit']}, {machine['date']}"
    place += f", kernels of the host: {machine['host_kernels']}"
    return "\n\n".join(filter(None, ["\n".join(rows), "\n".join(left), f"{place}:", f"```\n{result['command']}\n```"]))


def keep(result: Mapping[str, Any], path: Path) -> None:
    """JSON at `path`, Markdown beside it; a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path, json.dumps(result, indent=1)), (path.with_suffix(".md"), markdown(result))):
        part = file.with_name(file.name + ".part")
        part.write_text(text + "\n", "utf-8")
        part.replace(file)


def draw(parts: Parts, path: Path) -> None:
    """A picture for passes, one for attention, one for drafters, as far as there are figures."""
    pictures = {"curve": _curve_chart, "attention": _attention_chart, "speed": _speed_chart}
    for part in (part for part in pictures if rows_of(parts, part)):
        path.with_name(f"{path.stem}-{part}.svg").write_text(svg(pictures[part](rows_of(parts, part))), "utf-8")


def _curve_chart(rows: Sequence[Row]) -> Chart:
    shortest = min(row["context"] for row in rows)
    shown = [row for row in rows if row["context"] == shortest]
    labels = Labels(title=f"A pass after {shortest} tokens", x="tokens of a pass", y="ms", whole=True)
    return lines_chart(labels, _series(shown, ("shape", "weights"), "tokens", "ms"))


def _attention_chart(rows: Sequence[Row]) -> Chart:
    labels = Labels(title="Attention of one sequence", x="context", y="share of copy bandwidth", whole=True)
    return lines_chart(labels, _series(rows, ("shape", "tokens"), "context", "share"))


def _speed_chart(rows: Sequence[Row]) -> Chart:
    shown = [row for row in rows if row["temperature"] == 0 and not row["is_long"]]
    named = [{**row, "drafter": row["drafter"].partition("=")[0]} for row in shown]
    labels = Labels(title="Drafters over plain decoding, greedy", x="requests", y="times plain", whole=True)
    return lines_chart(labels, _series(named, ("model", "drafter"), "batch", "speedup"))


def _series(rows: Sequence[Row], names: tuple[str, ...], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """A line for every value of `names`."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row[x]):
        series.setdefault(", ".join(str(row[name]) for name in names), []).append((row[x], row[y]))
    return series
