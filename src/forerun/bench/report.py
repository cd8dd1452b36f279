"""The report of `forerun bench drafters`: JSON, Markdown and one HTML page that needs no other file.

Knows: figures and how they are shown. Does not know: how they were measured, nor how pictures are drawn
(`bench.report_pictures`).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, Protocol

from forerun.bench.machine import machine_line
from forerun.errors import ConfigError

MAX_DEPTHS: Final = 6  # columns of acceptance by depth
MIN_STEPS: Final = 5  # depths reached less often are not shown
NOISE: Final = (
    "~: within noise. The 95% interval (Student's t over log ratios, over prompts; over repeats of a single one) holds "
    "1.00, there was one measurement only, or steps brought no more than one token. tokens/s: the median over prompts; "
    "speed-up: the geometric mean over prompts of the ratio to plain decoding, so it is not the ratio of two tokens/s"
)

STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; margin: .6rem 0 1.6rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #d8dee4 }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% } code { background: #eef1f4; padding: 0 .25rem } .no { color: #b00020; font-weight: bold }
"""


class ReportPart(Protocol):
    """A piece of a report."""

    def markdown(self) -> str:
        """The piece as Markdown."""

    def html(self) -> str:
        """The piece as HTML."""


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str

    def markdown(self) -> str:
        """As it stands."""
        return self.text

    def html(self) -> str:
        """As a paragraph."""
        return f"<p>{escape(self.text)}</p>"


@dataclass(frozen=True, slots=True)
class Table:
    """A heading and rows of cells, the first column being names."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """A pipe table."""
        lines = [self.header, ["---"] + ["---:"] * (len(self.header) - 1), *self.rows]
        return "\n".join((f"## {self.title}\n", *(f"| {' | '.join(map(_cell, line))} |" for line in lines)))

    def html(self) -> str:
        """A table; a NO stands out."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "\n".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in self.rows)
        return f"<h2>{escape(self.title)}</h2>\n<table><tr>{head}</tr>\n{body}</table>"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _html_cell(text: str) -> str:
    return f'<td class="no">{text}</td>' if text == "NO" else f"<td>{escape(text)}</td>"


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG and the name of its file next to the Markdown."""

    title: str
    file: str
    svg: str

    def markdown(self) -> str:
        """A link to the file."""
        return f"![{self.title}]({self.file})"

    def html(self) -> str:
        """The picture itself, within the page."""
        return (
            f'<img alt="{escape(self.title)}" src="data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}">'
        )


def write(folder: Path, report: Mapping[str, Any], pictures: Sequence[Picture]) -> list[Path]:
    """Write report.json, report.md, report.html and the pictures -> their paths. Raises ConfigError if it cannot."""
    title = f"Drafters of {report['model']}"
    parts = [*_parts(report), *pictures]
    texts = {
        "report.json": json.dumps(report, ensure_ascii=False, indent=1, allow_nan=False) + "\n",
        "report.md": "\n\n".join((f"# {title}", *(part.markdown() for part in parts))) + "\n",
        "report.html": _page(title, parts),
    }
    texts |= {picture.file: picture.svg for picture in pictures}
    try:
        return [_write(folder / name, text) for name, text in texts.items()]
    except OSError as error:
        raise ConfigError(f"cannot write the report into {folder}: {error.strerror or error}; choose --out") from error


def check_folder(folder: Path) -> None:
    """Make the folder, so that a measurement is not lost at its end. Raises ConfigError if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write into --out {folder}: {error.strerror or error}") from error


def _write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def _page(title: str, parts: Sequence[ReportPart]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = "\n".join(part.html() for part in parts)
    return (
        f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def _parts(report: Mapping[str, Any]) -> Iterator[ReportPart]:
    yield Text(summary(report))
    yield Text(NOISE + ".")
    for run in report["runs"]:
        yield drafter_table(run, f"Temperature {run['temperature']:g}, all prompts")
    for run in report["runs"]:
        if len(run["categories"]) > 1:
            yield category_table(run)
    for run in report["runs"]:
        if run["against_fixed"]:
            yield fixed_table(run)
    if report["pass_ms"]:
        yield cost_table(report["pass_ms"])
    if report["left_out"]:
        yield Table("Left out", ("drafter", "why"), list(report["left_out"].items()))


def summary(report: Mapping[str, Any]) -> str:
    """What was run, on what, in one paragraph."""
    machine = report["machine"]
    left = f" ({report['num_too_long']} were longer than the context)" if report["num_too_long"] else ""
    return (
        f"{report['num_prompts']} prompts of {report['suite']}{left}, up to {report['max_tokens']} tokens each, "
        f"{report['repeats']} times, drafters taking turns prompt by prompt. Tokens/s are medians over prompts, "
        f"speed-ups geometric means over prompts of the median over repeats. Verification: "
        f"{report['verification']}. {machine_line(machine)}, forerun {machine['forerun']}, {machine['date']}."
    )


def drafter_table(run: Mapping[str, Any], title: str) -> Table:
    """One row per drafter: speed with prefill, decoding alone, acceptance by depth, cost."""
    depths = min(MAX_DEPTHS, max(len(_shown(detail)) for detail in run["details"].values()))
    header = ("drafter", "tokens/s", "speed-up", "95% interval", "decoding", "tokens a pass",
              *(f"depth {depth}" for depth in range(1, depths + 1)), "wasted", "draft share", "identical")  # fmt: skip
    return Table(title, header, [_drafter_row(row, run["details"][row["drafter"]], depths) for row in run["rows"]])


def marked(row: Mapping[str, Any], detail: Mapping[str, Any]) -> str:
    """A drafter's name, and how often it failed, if it did."""
    return str(row["drafter"]) + (f" ({detail['num_failed']} failed)" if detail["num_failed"] else "")


def _drafter_row(row: Mapping[str, Any], detail: Mapping[str, Any], depths: int) -> list[str]:
    reached = [f"{rate:.0%}" for rate in _shown(detail)[:depths]]
    return [
        marked(row, detail),
        f"{row['tokens_per_s']:.1f}",
        gain(row),
        spread(row),
        decode_gain(detail),
        f"{row['acceptance_length']:.2f}",
        *reached,
        *["-"] * (depths - len(reached)),
        _share(detail["drafted"] - detail["accepted"], detail["drafted"]),
        f"{detail['draft_share']:.0%}",
        {True: "yes", False: "NO", None: "-"}[row["identical"]],
    ]


def gain(row: Mapping[str, Any]) -> str:
    """A row's speed-up, marked where it is within noise."""
    return _times(row["speedup"], row["within_noise"])


def decode_gain(detail: Mapping[str, Any]) -> str:
    """The speed-up of decoding alone, marked if within noise."""
    return _times(detail["decode_speedup"], detail["decode_within_noise"])


def _times(ratio: float, within_noise: bool) -> str:
    return f"{'~' * within_noise}{ratio:.2f}x"


def spread(row: Mapping[str, Any]) -> str:
    """The confidence interval of a row's speed-up."""
    interval = row["speedup_interval"]
    return "-" if interval is None else "{:.2f}-{:.2f}".format(*interval)


def _shown(detail: Mapping[str, Any]) -> list[float]:
    """Acceptance of the depths that were reached often enough."""
    pairs = zip(detail["acceptance_by_depth"], detail["steps_by_depth"], strict=True)
    return [rate for rate, steps in pairs if steps >= MIN_STEPS]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def category_table(run: Mapping[str, Any]) -> Table:
    """One row per drafter, one column per category: speed-up, and decoding's in brackets."""
    names = list(run["categories"])
    rows = []
    for index, row in enumerate(run["rows"]):
        own = [gain(run["categories"][name][index]) for name in names]
        decoding = [decode_gain(run["category_details"][name][row["drafter"]]) for name in names]
        rows.append([row["drafter"], *(f"{a} ({b})" for a, b in zip(own, decoding, strict=True))])
    return Table(
        f"Temperature {run['temperature']:g}, speed-up by category (decoding alone)", ("drafter", *names), rows
    )


def fixed_table(run: Mapping[str, Any]) -> Table:
    """The policy compared with the best fixed number of drafts."""
    rows = [
        [row["category"], row["drafter"], f"{row['speedup']:.2f}x", row["best_fixed"], f"{row['fixed_speedup']:.2f}x",
         "-" if row["ratio"] is None else f"{row['ratio']:.2f}"]
        for row in run["against_fixed"]
    ]  # fmt: skip
    title = f"Temperature {run['temperature']:g}, the policy beside the best fixed number of drafts"
    return Table(title, ("category", "drafter", "speed-up", "best fixed", "its speed-up", "ratio"), rows)


def cost_table(pass_ms: Mapping[int, float]) -> Table:
    """What a pass over several rows costs, and how that compares with one row."""
    one = pass_ms[min(pass_ms)]
    rows = [[str(num), f"{ms:.3f}", f"{ms / one:.2f}x"] for num, ms in pass_ms.items()]
    return Table("A pass of the target by its rows, as measured at start", ("rows", "ms", "over one row"), rows)
