"""`forerun chat`: a conversation in the terminal.

Knows: commands, the conversation so far, and stopping an answer. Does not know: how answers are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_error, print_note
from forerun.cli.drafted import DraftedText, has_colour, shown_params, write
from forerun.cli.engine import adapter_of, note_sampling, open_to_answer, stats_line
from forerun.cli.explain import print_explanation
from forerun.cli.terminal import Corner, enable_line_editing, read_line
from forerun.config import cache_folder
from forerun.core import CompletionOutput, RequestOutput, SamplingParams
from forerun.errors import ConfigError, DataError, ForerunError

if TYPE_CHECKING:
    from forerun.llm import LLM

PROMPT = "> "
COMMANDS = {  # what a user may type instead of a message -> what it does
    "/again": "answers the last message again, with another seed",
    "/drafts": "marks tokens by who drafted them, or no longer",
    "/exit": "ends the conversation, as /quit and Ctrl-D do",
    "/help": "lists these",
    "/reset": "forgets the conversation, but for the system message",
    "/system": "and a text: begins a new conversation with this system message; without a text, with none",
}
ENDS = ("/exit", "/quit")
EXAMPLES = {  # what one may say first to an embedded model, which answers few things
    "mini": ("Tell me a story about a fox.", "Extract name and town as JSON: I am Clara Miller from Lisbon."),
}
KEYS = "Ctrl-C stops an answer. A line that ends in \\ goes on in the next."


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
    loading: opt.AdaptedLoading,
) -> None:
    """Talk with a model. /help lists the commands; Ctrl-C stops an answer."""
    sampling.params({})  # checks the options before anything is loaded
    name = target.name
    llm = open_to_answer(name, sampling, drafting, loading, max_num_seqs=1)
    if llm.tokenizer.chat_template is None:
        raise ConfigError(f"{name} has no chat template, so it cannot chat: use `forerun generate {name} PROMPT`")
    note_sampling(llm, sampling.given())
    drafters = " + ".join(llm.config.drafter.names)
    print_note(f"{name}, drafter {drafters}. /help lists the commands, Ctrl-D ends the conversation.")
    if name in EXAMPLES:
        print_note(f"Try: {' Or: '.join(EXAMPLES[name])}")
    params = shown_params(llm.tokenizer, sampling.params(llm.loaded.sampling))
    session = ChatSession(llm, params, talk, talk.system, talk.show_drafts)
    session.run()
    if session.num_failed and not sys.stdin.isatty():  # somebody at a terminal has seen it
        raise typer.Exit(2)


@dataclass(slots=True)
class ChatSession:
    """The conversation so far, and the loop that continues it."""

    llm: LLM
    params: SamplingParams
    talk: Talk
    system: str | None
    show_drafts: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    num_answers: int = 0
    num_failed: int = 0  # messages that could not be answered

    def run(self) -> None:
        """Read lines until the user ends the conversation."""
        enable_line_editing(cache_folder() / "chat_history", list(COMMANDS))
        self._reset()
        while (line := _next_line()) is not None and line not in ENDS:
            self._obey(line)

    def _obey(self, line: str) -> None:
        command, rest = [*line.split(maxsplit=1), "", ""][:2]
        if rest and command != "/system" and command in (*COMMANDS, *ENDS):
            print_note(f"{command} takes nothing behind it: type it alone, or begin the message with another word")
            return
        match command:
            case "/reset":
                self._reset()
                kept = f"; the system message stays: {self.system} (/system drops it)" if self.system else ""
                print_note(f"the conversation is forgotten{kept}")
            case "/system":
                self.system = rest or None
                self._reset()
                print_note("a new conversation begins with that" if self.system else "there is no system message now")
            case "/again":
                self._again()
            case "/drafts":
                self.show_drafts = not self.show_drafts
                print_note(_meaning() if self.show_drafts else "drafted tokens are not marked")
            case _ if command.startswith("/") and "/" not in command[1:]:  # else it is a path
                _help(command)
            case _ if line:
                self._say(line)

    def _again(self) -> None:
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            print_note("there is no message to answer yet")
            return
        turn = self.messages[asked[-1] :]
        del self.messages[asked[-1] :]
        if not self._say(turn[0]["content"]):
            self.messages += turn

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _say(self, text: str) -> bool:
        """Answer one message -> whether that was possible; if not, the message is removed again."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except ForerunError as error:
            self.num_failed += 1
            dropped = " and the system message with /system" if self.system else ""
            print_error(f"{error} (or forget the conversation with /reset{dropped})")
            answer = None
        if answer is None:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer})
        return answer is not None

    def _stream(self) -> str | None:
        """Write an answer as it comes; Ctrl-C keeps what is there -> what was said, without thoughts; None: nothing."""
        prompt = self.llm.render_chat(self.messages)
        text = DraftedText(self.llm.tokenizer, prompt, of_chat=True)
        params = self.params.with_seed((self.params.seed or 0) + self.num_answers)
        self.num_answers += 1
        output: RequestOutput | None = None
        steps = self.llm.stream(prompt, params, adapter_of(self.llm))
        try:
            with self._corner() as show:
                for output in steps:
                    write(text.take(output.outputs[0]), out(), self.show_drafts)
                    show(stats_line(output.outputs[0].stats))
        except KeyboardInterrupt:
            steps.close()  # aborts the request
            write(text.rest(), out(), self.show_drafts)
        out().print()
        if output is None:
            return None
        self._finished(output.outputs[0])
        if not text.said:
            print_note("the answer ended before anything was said: it and its message are no part of the conversation")
        return text.said or None

    @contextmanager
    def _corner(self) -> Iterator[Callable[[str], None]]:
        """What shows figures beside an answer; nothing away from terminals."""
        console = out()
        if not self.talk.show_stats or not console.is_terminal or console.is_dumb_terminal:
            yield lambda text: None
            return
        corner = Corner(sys.stdout)
        with corner.reserved():
            yield corner.show

    def _finished(self, answer: CompletionOutput) -> None:
        if answer.error is not None:
            raise answer.error
        if self.talk.show_stats:
            print_note(stats_line(answer.stats))
        if self.talk.explain:
            print_explanation(answer.stats)


def _meaning() -> str:
    if has_colour(out()):
        return "tokens are coloured by who drafted them"
    return "drafted and accepted tokens are in [brackets]"


def _help(command: str) -> None:
    if command != "/help":
        print_note(f"there is no {command} here: /help lists the commands")
        return
    for name, meaning in COMMANDS.items():
        print_note(f"{name:8} {meaning}")
    print_note(KEYS)


def _next_line() -> str | None:
    """The next line; None at the end. Ctrl-C at the prompt begins a new line."""
    while True:
        try:
            line = read_line(PROMPT)
            if line is not None:
                line.encode("utf-8")  # fails where bytes were kept that are no text
            return line
        except UnicodeError as error:
            raise DataError("the message is not UTF-8 text") from error
        except KeyboardInterrupt:
            print_note("\nCtrl-D or /exit ends the conversation")
