"""`forerun demo`: the same text without and with speculation, side by side.

Knows: the screen. Does not know: how text is made. On a terminal both texts are written live; the figures come from
further runs without display, plain and drafted in turns, so that drawing costs are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli import options as opt
from forerun.cli.console import out
from forerun.cli.drafted import DraftedPiece, DraftedText, has_colour, legend, render
from forerun.cli.engine import open_llm, other_engine
from forerun.cli.generate import as_prompt
from forerun.cli.groups import values
from forerun.core import CompletionOutput, SamplingParams, speedup

if TYPE_CHECKING:
    from forerun.llm import LLM

QUESTION = "Give me three tips for a good night's sleep."
PLAIN = "none"
MIN_PANEL_LINES = 8
PANEL_BORDER = 4  # columns
FRAMES_PER_S = 12


def demo(
    machine: opt.Machine,
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    model: opt.ModelOption = None,
    drafter: opt.DrafterName = None,
    draft_model: opt.DraftModel = None,
    max_tokens: opt.MaxTokens = 160,
    temperature: opt.Temperature = 0.3,
    seed: opt.Seed = 0,
    repeats: Annotated[int, typer.Option(help="Timed runs of each.", min=1)] = 5,
) -> None:
    """Write one text twice, without and with speculation; show that it is the same, and how much faster."""
    name = opt.chosen_model(None, model)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=True)
    chosen = drafter or opt.default_drafter(name, draft_model)
    plain = open_llm(name, PLAIN, max_num_seqs=1, **values(machine))
    drafted = other_engine(plain, chosen, draft_model)
    token_ids = as_prompt(plain, prompt, chat=None)
    Demo(name, prompt, token_ids, (plain, drafted), params).run(repeats)


class Demo:
    """Two columns that fill, then a line of figures."""

    def __init__(
        self, model: str, prompt: str, token_ids: list[int], engines: tuple[LLM, LLM], params: SamplingParams
    ) -> None:
        drafter = engines[1].config.drafter.name
        self.title = f"forerun demo: {model}, drafter {drafter}, temperature {params.temperature:g}"
        self.prompt = prompt
        self.token_ids = token_ids
        self.engines = engines
        self.params = params
        self.pieces: tuple[list[DraftedPiece], list[DraftedPiece]] = ([], [])
        self.console = out()
        self.coloured = has_colour(self.console)

    def run(self, repeats: int) -> None:
        """Warm up, write both texts (live on a terminal), measure, show the screen."""
        for llm in self.engines:
            self._generate(llm)
        if self.console.is_terminal:
            self._write_live()
        runs = [[self._generate(llm) for llm in self.engines] for _ in range(repeats)]
        plain, drafted = runs[0]
        self._fill(plain, drafted)
        self.console.print(self._screen(self._verdict(runs)))

    def _generate(self, llm: LLM) -> CompletionOutput:
        output = llm.generate([self.token_ids], self.params)[0].outputs[0]
        if output.error is not None:
            raise output.error
        return output

    def _fill(self, *outputs: CompletionOutput) -> None:
        for column, llm, output in zip(self.pieces, self.engines, outputs, strict=True):
            column[:] = DraftedText(llm.tokenizer, self.token_ids).take(output)

    def _write_live(self) -> None:
        """Show both texts as they come, one after the other; the display is cleared afterwards."""
        empty = Text("")
        with Live(self._screen(empty), console=self.console, transient=True, auto_refresh=False) as live:
            for frame, _ in enumerate(self._steps()):
                if frame % 2 == 0:
                    live.update(self._screen(empty), refresh=True)

    def _steps(self) -> Iterator[None]:
        for column, llm in zip(self.pieces, self.engines, strict=True):
            text = DraftedText(llm.tokenizer, self.token_ids)
            for output in llm.stream(self.token_ids, self.params):
                column.extend(text.take(output.outputs[0]))
                yield

    def _screen(self, below: RenderableType) -> Group:
        """Title, prompt, the two texts, and `below`."""
        columns = Table.grid(padding=(0, 1))
        columns.add_row(self._panel("plain", self.pieces[0]), self._panel("with speculation", self.pieces[1]))
        question = Text("prompt: ", style="dim").append(self.prompt, style="default")
        return Group(Text(self.title, style="bold"), question, columns, below)

    def _panel(self, title: str, pieces: list[DraftedPiece]) -> Panel:
        """As much of the end of a text as fits half a screen."""
        text = render(pieces, marked=False)
        width, height = (self.console.width - 1) // 2, max(MIN_PANEL_LINES, self.console.height - 9)
        lines = text.wrap(Console(width=width), width - PANEL_BORDER)
        shown = Text("\n").join(lines[-height:]) if self.console.is_terminal else text
        return Panel(shown, title=title, title_align="left", width=width)

    def _verdict(self, runs: list[list[CompletionOutput]]) -> Group:
        """Identical or not, the two speeds, the speed-up, the acceptance length."""
        same = all(plain.token_ids == drafted.token_ids for plain, drafted in runs)
        speeds = [median(run[i].stats.tokens_per_s for run in runs) for i in (0, 1)]
        gain = median(speedup(_seconds(plain), _seconds(drafted)) or 1.0 for plain, drafted in runs)
        stats = runs[0][1].stats
        first = Text.assemble(
            ("identical", "bold green") if same else ("DIFFERENT", "bold red"),
            f": {stats.num_tokens} tokens, acceptance length {stats.acceptance_length:.2f}",
        )
        if self.coloured:
            sources = [piece.source for piece in self.pieces[1]]
            first = first.append("; ").append_text(legend(sources, marked=False))
        second = Text.assemble(
            f"plain {speeds[0]:.0f} tokens/s, with speculation {speeds[1]:.0f} tokens/s: ",
            (f"{gain:.2f}x", "bold"),
            f" (median of {len(runs)} runs)",
        )
        return Group(first, second)


def _seconds(answer: CompletionOutput) -> float:
    return answer.stats.ttft_s + answer.stats.decode_s
