"""`forerun demo`: the same texts without and with speculation, side by side.

Knows: the screen. Does not know: how text is made. On a terminal both columns fill as they are written, each at its
own speed; the figures come from further runs without display, plain and drafted in turns, so that drawing costs are
left out.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli import options as opt
from forerun.cli.console import out
from forerun.cli.drafted import DraftedPiece, DraftedText, has_colour, legend, render
from forerun.cli.engine import open_llm, other_engine, prepare
from forerun.cli.generate import as_prompt
from forerun.cli.groups import values
from forerun.core import CompletionOutput, SamplingParams, speedup

if TYPE_CHECKING:
    from forerun.llm import LLM

TASKS = (  # what is asked without a prompt: facts, fields of a message as JSON, an edit; mini gets all of them right
    "What can you tell me about France?",
    "Hello, my name is Clara Miller from Lisbon. I would like to order 12 chairs. Please call me at 555-0143.\n\n"
    "Extract name, town, count, item and phone as JSON.",
    "Replace Tom with Ben in this text.\n\n"
    "The baker lives at 14 Market Street in Ashford. On Friday, Clara will meet Tom in Ashford. "
    "The kite of Tom is under the bed.",
)
NEXT = (
    ("forerun chat", "talk with it"),
    ("forerun run MODEL", "the same with a model of yours or of the hub"),
    ("forerun verify mini", "see that the texts are equal on more prompts"),
)
PLAIN = "none"
MIN_PANEL_LINES = 8
PANEL_BORDER = 4  # columns
FRAME_S = 1 / 12


def demo(
    machine: opt.Machine,
    prompt: Annotated[str | None, typer.Argument(help="What to ask; three short tasks unless given.")] = None,
    model: opt.ModelOption = None,
    drafter: opt.DrafterName = None,
    draft_model: opt.DraftModel = None,
    max_tokens: opt.MaxTokens = 160,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    repeats: Annotated[int, typer.Option(help="Timed runs of each.", min=1)] = 5,
) -> None:
    """Write each answer twice, without and with speculation; show that it is the same, and how much faster."""
    name = opt.chosen_model(None, model)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    chosen = opt.Drafting(drafter=drafter, draft_model=draft_model).of(name)["drafter"]
    prepare(name, chosen, draft_model)
    # Every text is written several times: what was said before must not draft it.
    plain = open_llm(name, PLAIN, max_num_seqs=1, across_requests=False, **values(machine))
    drafted = other_engine(plain, chosen, draft_model)
    Demo(name, TASKS if prompt is None else (prompt,), (plain, drafted), params).run(repeats)


class Answers(NamedTuple):
    """Both answers to every task, from one run."""

    plain: list[CompletionOutput]
    drafted: list[CompletionOutput]

    @property
    def same(self) -> bool:
        """Whether they have the same tokens."""
        return all(a.token_ids == b.token_ids for a, b in zip(self.plain, self.drafted, strict=True))

    @property
    def seconds(self) -> tuple[float, float]:
        """What the plain answers took, and the drafted ones."""
        plain, drafted = (sum(one.stats.ttft_s + one.stats.decode_s for one in answers) for answers in self)
        return plain, drafted


class Demo:
    """Two columns that fill for each task, then a line of figures."""

    def __init__(self, model: str, prompts: Sequence[str], engines: tuple[LLM, LLM], params: SamplingParams) -> None:
        drafter = " + ".join(engines[1].config.drafter.names)
        self.title = f"forerun demo: {model}, drafter {drafter}, temperature {params.temperature:g}"
        self.tasks = [(prompt, as_prompt(engines[0], prompt, chat=None)) for prompt in prompts]
        self.engines = engines
        self.params = params
        self.sources: list[str] = []  # who guessed each piece
        self.console = out()
        self.coloured = has_colour(self.console)

    def run(self, repeats: int) -> None:
        """Warm up, write the texts (live on a terminal), measure, show the figures."""
        warm = self._answers()
        self.console.print(Text(self.title, style="bold"))
        for index, (prompt, token_ids) in enumerate(self.tasks):
            if self.console.is_terminal:
                self._write_live(prompt, token_ids)
            columns = [
                DraftedText(llm.tokenizer, token_ids).take(outputs[index])
                for llm, outputs in zip(self.engines, warm, strict=True)
            ]
            self.sources += [piece.source for piece in columns[1]]
            self.console.print(self._screen(prompt, columns, whole=True))
        waiting = self.console.status("timing both") if self.console.is_terminal else nullcontext()
        with waiting:
            runs = [self._answers() for _ in range(repeats)]
        self.console.print(self._verdict(runs))

    def _answers(self) -> Answers:
        """Every task, plain and drafted in turns."""
        answers = Answers([], [])
        for _, token_ids in self.tasks:
            for llm, outputs in zip(self.engines, answers, strict=True):
                output = llm.generate([token_ids], self.params)[0].outputs[0]
                if output.error is not None:
                    raise output.error
                outputs.append(output)
        return answers

    def _write_live(self, prompt: str, token_ids: list[int]) -> None:
        """Show both texts as they come; the display is cleared afterwards."""
        columns: tuple[list[DraftedPiece], list[DraftedPiece]] = ([], [])
        shown_s = 0.0
        with Live(self._screen(prompt, columns), console=self.console, transient=True, auto_refresh=False) as live:
            for _ in self._race(token_ids, columns):
                if perf_counter() - shown_s >= FRAME_S:
                    live.update(self._screen(prompt, columns), refresh=True)
                    shown_s = perf_counter()

    def _race(self, token_ids: list[int], columns: Sequence[list[DraftedPiece]]) -> Iterator[None]:
        """Fill both columns: the engine that has computed for less time so far takes the next step."""
        streams = [llm.stream(token_ids, self.params) for llm in self.engines]
        texts = [DraftedText(llm.tokenizer, token_ids) for llm in self.engines]
        spent = {0: 0.0, 1: 0.0}  # seconds, of those that have not ended
        while spent:
            behind = min(spent, key=lambda index: spent[index])
            started = perf_counter()
            output = next(streams[behind], None)
            if output is None:
                del spent[behind]
                continue
            spent[behind] += perf_counter() - started
            columns[behind].extend(texts[behind].take(output.outputs[0]))
            yield

    def _screen(self, prompt: str, columns: Sequence[list[DraftedPiece]], *, whole: bool = False) -> RenderableType:
        """A task and its two texts: `whole`, or what fits the screen."""
        grid = Table.grid(padding=(0, 1))
        titles = ("plain", "with speculation")
        grid.add_row(*(self._panel(title, pieces, whole) for title, pieces in zip(titles, columns, strict=True)))
        return Group(Text(""), Text("> ", style="dim").append(prompt, style="default"), grid)

    def _panel(self, title: str, pieces: list[DraftedPiece], whole: bool) -> Panel:
        """A text, or as much of its end as fits half a screen."""
        text = render(pieces, marked=False)
        width, height = (self.console.width - 1) // 2, max(MIN_PANEL_LINES, self.console.height - 12)
        lines = text.wrap(Console(width=width), width - PANEL_BORDER)
        return Panel(text if whole else Text("\n").join(lines[-height:]), title=title, title_align="left", width=width)

    def _verdict(self, runs: list[Answers]) -> RenderableType:
        """Whether the texts are the same, how much faster, tokens a pass, and what to type next."""
        middle = sorted(runs, key=lambda run: speedup(*run.seconds) or 1.0)[(len(runs) - 1) // 2]
        num_tokens = sum(len(output.token_ids) for output in middle.drafted)
        num_passes = sum(output.stats.num_steps for output in middle.drafted)
        gain, speeds = speedup(*middle.seconds) or 1.0, [num_tokens / seconds for seconds in middle.seconds]
        same = all(run.same for run in runs)
        first = Text.assemble(
            (f"the same {num_tokens} tokens", "bold green") if same else ("DIFFERENT TOKENS", "bold red"),
            ", ",
            (f"{gain:.2f}x as fast", "bold"),
            f": {speeds[0]:.0f} and {speeds[1]:.0f} tokens/s; {num_tokens / max(num_passes, 1):.1f} tokens a pass",
        )
        measured = Text(f"the middle of {len(runs)} runs", style="dim")
        if self.coloured:
            measured.append("; ").append_text(legend(self.sources, marked=False))
        lines: list[RenderableType] = [Text(""), first, measured]
        lines += [Text(""), Text("Next:", style="dim")]
        commands = [(command.replace("forerun", _called(), 1), what) for command, what in NEXT]
        width = max(len(command) for command, _ in commands)
        lines += [Text.assemble("  ", (f"{command:{width}}", "bold"), f"  {what}") for command, what in commands]
        return Group(*lines)


def _called() -> str:
    """What to type for forerun: its path where the shell finds none or another one, as after `make demo`."""
    started, found = Path(sys.argv[0]).absolute(), shutil.which("forerun")
    if started.name != "forerun" or not started.is_file() or (found is not None and started.samefile(found)):
        return "forerun"
    return shlex.quote(str(started.relative_to(Path.cwd()) if started.is_relative_to(Path.cwd()) else started))
