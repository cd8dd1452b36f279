"""The pictures of README.md and docs/how-it-works.md, as SVG that loads nothing from elsewhere.

    python lab/pictures.py [--out docs/images]

`demo.svg` is a run of `forerun demo`, `tree.svg` a step that mini took with its draft model, `step.svg` an example.
Knows: how they are drawn. Does not know: how text and trees are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple
from unittest.mock import patch

import typer
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from command import run
from forerun import LLM, SamplingParams
from forerun.cli.app import app
from forerun.engine.outputs import StepTrace

DEMO_WIDTH = 100  # columns
QUESTION = "Tell me a story about a little bird."
LETTER, ROW = 8.4, 36  # pixels: a letter of the font below, and from row to row
GREY = "#546e7a"
STYLES = {  # what a token is: fill, stroke, letters
    "known": ("#eceff1", "#90a4ae", "#263238"),
    "drafted": ("#fff8e1", "#f9a825", "#263238"),
    "accepted": ("#c8e6c9", "#2e7d32", "#1b5e20"),
    "rejected": ("#ffffff", "#cfd8dc", "#90a4ae"),
    "own": ("#bbdefb", "#1565c0", "#0d47a1"),
}


class Chip(NamedTuple):
    """A token: its text, what it is (a key of STYLES), and where its middle is."""

    text: str
    style: str
    x: float
    y: float

    @property
    def half(self) -> float:
        """Half its width."""
        return len(self.text) * LETTER / 2 + 9

    def svg(self) -> str:
        """A box with the text."""
        fill, stroke, letters = STYLES[self.style]
        box = f'x="{self.x - self.half:.0f}" y="{self.y - 13:.0f}" width="{2 * self.half:.0f}" height="26" rx="7"'
        return (
            f'<rect {box} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
            f'<text x="{self.x:.0f}" y="{self.y + 4.5:.0f}" fill="{letters}" text-anchor="middle">'
            f"{escape(self.text)}</text>"
        )


def words(text: str, x: float, y: float) -> str:
    """An explanation beside the chips of a row."""
    return f'<text x="{x:.0f}" y="{y + 4.5:.0f}" fill="{GREY}" class="words">{escape(text)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, colour: str = GREY) -> str:
    """A curve that begins and ends level."""
    middle = (x0 + x1) / 2
    path = f"M{x0:.0f} {y0:.0f} C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def picture(width: float, height: float, parts: Sequence[str]) -> str:
    """A whole SVG on white, so that it can be read on dark pages."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
        "<style>text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".words{font-family:system-ui,'DejaVu Sans',sans-serif}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
        *parts, "</svg>", "",
    ])  # fmt: skip


def step_picture() -> str:
    """A chain of four guesses, of which three are right."""
    rows = [  # what happens, tokens from column 0 or 1 on, what it means
        ("draft", ["fox:known", "ran:drafted", "over:drafted", "the:drafted", "wall:drafted"],
         "four guesses of a drafter"),
        ("verify", ["ran:own", "over:own", "the:own", "hill:own", "and:own"],
         "one pass: what the target chooses after each"),
        ("accept", ["", "ran:accepted", "over:accepted", "the:accepted", "hill:own"],
         "three right guesses, then the target's own choice"),
        ("commit", ["fox:known", "ran:known", "over:known", "the:known", "hill:known"],
         "four tokens more for one pass"),
    ]  # fmt: skip
    columns, parts = [130 + 95 * index for index in range(5)], []
    for number, (verb, cells, meaning) in enumerate(rows):
        y = 40 + 58 * number
        parts += [words(f"{number + 1}. {verb}", 20, y), words(meaning, 580, y)]
        parts += [Chip(*cell.split(":"), x, y).svg() for cell, x in zip(cells, columns, strict=True) if cell]
    parts += [line(x, 53, x, 85) for x in columns]
    parts += [line(x + 20, 111, next_x - 20, 143) for x, next_x in pairwise(columns)]
    return picture(930, 254, parts)


def tree_picture() -> str:
    """The most telling step of an answer of mini."""
    llm = LLM("mini", drafter="draft", tree_width=3, max_draft_tokens=12, adaptive=False, keep_learned=False)
    params = SamplingParams(temperature=0.7, max_tokens=96, seed=1)
    group = llm.prepare(llm.render_chat([{"role": "user", "content": QUESTION}]), params)
    sample = group.samples[0]
    sample.trace = []
    llm.start(group)
    while not group.finished:
        llm.step()
    step = max(sample.take_trace(), key=interest)
    return drawn_tree(step, {token: shown(llm.tokenizer.token_bytes(token)) for token in (*step.tokens, *step.emitted)})


def interest(step: StepTrace) -> tuple[bool, int]:
    """How much a step shows: that a guess was right which was not its parent's first, then how many were right."""
    others = [node for node in step.accepted if step.parents[node] in step.parents[1:node]]
    return bool(others), len(step.accepted)


def shown(token: bytes) -> str:
    """A token's text without the space around it."""
    text = token.decode("utf-8", "replace")
    return text.strip() or text.replace("\n", "\\n").replace(" ", "space")


def drawn_tree(step: StepTrace, texts: Mapping[int, str]) -> str:
    """A step's tree from left to right, with the token that the target added behind the last accepted node."""
    end = step.accepted[-1] if step.accepted else 0
    tokens, parents = (*step.tokens, step.emitted[-1]), (*step.parents, end)
    right = {*step.accepted, len(tokens) - 1}
    styles = ["known", *("accepted" if n in right else "rejected" for n in range(1, len(tokens) - 1)), "own"]
    wide = max(len(texts[token]) for token in tokens) * LETTER + 60
    spots = places(parents)
    chips = [
        Chip(texts[token], styles[n], wide * (spots[n][0] + 0.5), 30 + ROW * spots[n][1])
        for n, token in enumerate(tokens)
    ]
    parts = []
    for parent, chip in zip(parents[1:], chips[1:], strict=True):
        start, colour = chips[parent], STYLES[chip.style][1]
        parts.append(line(start.x + start.half, start.y, chip.x - chip.half, chip.y, colour))
    width, height = max(chip.x for chip in chips) + wide / 2, max(chip.y for chip in chips) + 30
    return picture(width, height, [*parts, *(chip.svg() for chip in chips)])


def places(parents: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Depth and row of every node: leaves one below the other, the others in the middle of their children."""
    children = [[child for child, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    found: dict[int, tuple[int, float]] = {}

    def place(node: int, depth: int) -> float:
        below = [place(child, depth + 1) for child in children[node]]
        num_leaves = sum(not children[other] for other in found)
        found[node] = depth, sum(below) / len(below) if below else num_leaves
        return found[node][1]

    place(0, 0)
    return found


def demo_picture() -> str:
    """The screen that `forerun demo` ends with."""
    console = Console(
        record=True, file=StringIO(), width=DEMO_WIDTH, color_system="truecolor", force_terminal=False, highlight=False
    )
    with patch("forerun.cli.demo.out", lambda: console):
        app(["demo"], standalone_mode=False)
    local = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # no fonts of the web
    return console.export_svg(title="forerun demo", theme=MONOKAI, code_format=local, unique_id="demo") + "\n"


def pictures(
    out: Annotated[Path, typer.Option(help="Where the pictures are written.")] = Path("docs/images"),
) -> None:
    """Write all three pictures."""
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in {"step": step_picture, "tree": tree_picture, "demo": demo_picture}.items():
        (out / f"{name}.svg").write_text(draw(), "utf-8")
        typer.echo(out / f"{name}.svg")


if __name__ == "__main__":
    run(pictures)
