"""`forerun chat`: a conversation in the terminal.

Knows: reading lines, the conversation so far, and stopping an answer. Does not know: how answers are made.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_error, print_note
from forerun.cli.drafted import DraftedText, has_colour, render
from forerun.cli.engine import note_sampling, open_to_answer, stats_line
from forerun.cli.explain import print_explanation
from forerun.core import CompletionOutput, RequestOutput, SamplingParams
from forerun.errors import ConfigError, ForerunError

if TYPE_CHECKING:
    from forerun.llm import LLM

HELP = "/reset forgets the conversation, /exit ends it (so does Ctrl-D); Ctrl-C stops an answer"
END_COMMANDS = ("/exit", "/quit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How a conversation begins, and what is shown of it."""

    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None
    show_drafts: Annotated[bool, typer.Option("--show-drafts", help="Colour tokens by who drafted them.")] = False
    show_stats: Annotated[bool, typer.Option("--stats/--no-stats", help="A line of figures after an answer.")] = True
    explain: opt.Explain = False


def chat(
    target: opt.Target,
    talk: Talk,
    sampling: opt.Sampling,
    drafting: opt.Drafting,
    loading: opt.Loading,
) -> None:
    """Talk with a model. Commands: /reset, /exit, /help; Ctrl-C stops an answer."""
    sampling.params({})  # checks the options before anything is loaded
    name = target.name
    llm = open_to_answer(name, sampling, drafting, loading, max_num_seqs=1)
    if llm.tokenizer.chat_template is None:
        raise ConfigError(f"{name} has no chat template, so it cannot chat: use `forerun generate {name} PROMPT`")
    note_sampling(llm)
    params = sampling.params(llm.loaded.sampling)
    ChatSession(llm, params, talk.system, talk.show_drafts, talk.show_stats, talk.explain).run()


@dataclass(slots=True)
class ChatSession:
    """The conversation so far, and the loop that continues it."""

    llm: LLM
    params: SamplingParams
    system: str | None
    show_drafts: bool
    show_stats: bool
    explain: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answers: int = 0

    def run(self) -> None:
        """Read lines until the user ends the conversation."""
        _enable_line_editing()
        self._reset()
        print_note(HELP)
        while (line := _read_line()) is not None and line not in END_COMMANDS:
            self._obey(line)

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self._reset()
            print_note("the conversation is forgotten")
        elif line.startswith("/"):
            print_note(HELP)
        elif line:
            self._say(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _say(self, text: str) -> None:
        """Answer one message; it is removed again if it cannot be answered."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except ForerunError as error:
            print_error(f"{error} (or forget the conversation with /reset)")
            answer = None
        if answer is None:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer.text})

    def _stream(self) -> CompletionOutput | None:
        """Write an answer as it comes; Ctrl-C keeps what is there -> the answer, None if nothing was said."""
        prompt = self.llm.render_chat(self.messages)
        text = DraftedText(self.llm.tokenizer, prompt)
        params = self.params.with_seed((self.params.seed or 0) + self.num_answers)
        self.num_answers += 1
        output: RequestOutput | None = None
        steps = self.llm.stream(prompt, params)
        try:
            for output in steps:
                self._write(text, output.outputs[0])
        except KeyboardInterrupt:
            steps.close()  # aborts the request
        out().print()
        return self._finished(prompt, output.outputs[0]) if output is not None else None

    def _write(self, text: DraftedText, answer: CompletionOutput) -> None:
        console, pieces = out(), text.take(answer)
        if self.show_drafts:
            console.print(render(pieces, not has_colour(console)), end="", soft_wrap=True)
        else:
            typer.echo("".join(piece.text for piece in pieces), nl=False)

    def _finished(self, prompt: list[int], answer: CompletionOutput) -> CompletionOutput:
        if answer.error is not None:
            raise answer.error
        if self.show_stats:
            print_note(stats_line(answer.stats))
        if self.explain:
            print_explanation(answer.stats)
        return answer


def _enable_line_editing() -> None:
    """Let `input` edit lines and remember them, where the system can."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def _read_line() -> str | None:
    """The next line; None at the end. Ctrl-C at the prompt begins a new line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print_note("\nCtrl-D or /exit ends the conversation")
