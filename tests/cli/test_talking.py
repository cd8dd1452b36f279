"""`forerun chat` and `forerun demo`, away from a terminal."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.server.call_readers import Prose


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """The conversations that a model is asked to go on with, in order."""
    from forerun.llm import LLM

    render, seen = LLM.render_chat, []

    def watched(self: LLM, messages: Any) -> list[int]:
        seen.append([dict(message) for message in messages])
        return render(self, messages)

    monkeypatch.setattr(LLM, "render_chat", watched)
    return seen


def test_chat_answers_resets_and_exits(run: Any) -> None:
    lines = "Hello, how are you?\nWhy?\n/reset\n/nonsense\n/again\n\n/exit\nnever read\n"
    result = run("chat", "--max-tokens", "8", "--temperature", "0", stdin=lines)
    assert result.stderr.count("/help lists the commands") == 2 and "there is no /nonsense here" in result.stderr
    assert "answers the last message again" not in result.stderr, "a typing error does not print the list"
    assert "the conversation is forgotten" in result.stderr and result.stderr.count("tokens/s") == 2
    assert "no message to answer yet" in result.stderr


def test_chat_says_what_one_may_ask_an_embedded_model(run: Any) -> None:
    from forerun.cli.chat import EXAMPLES
    from forerun.weights.resolve import EMBEDDED

    assert EXAMPLES.keys() <= EMBEDDED.keys()
    said = run("chat", "mini", stdin="").stderr
    assert all(example in said for example in EXAMPLES["mini"])
    assert "Try:" not in run("chat", "mini-draft", stdin="").stderr


def test_chat_explains_its_commands(run: Any) -> None:
    from forerun.cli.chat import COMMANDS

    result = run("chat", "--max-tokens", "4", stdin="/help\n")
    assert all(command in result.stderr and meaning in result.stderr for command, meaning in COMMANDS.items())


def test_a_line_goes_on_behind_a_backslash(run: Any, asked: list[list[dict[str, str]]]) -> None:
    run("chat", "--max-tokens", "4", stdin="One\\\nTwo\nThree\\\n")
    assert [conversation[-1]["content"] for conversation in asked] == ["One\nTwo", "Three"]


def test_an_answer_is_written_again_and_the_system_message_changes(run: Any, asked: list[list[dict[str, str]]]) -> None:
    run("chat", "--max-tokens", "4", stdin="One\n/again\n/system Be brief.\nTwo\n/again\n")
    system = {"role": "system", "content": "Be brief."}
    one, two = {"role": "user", "content": "One"}, {"role": "user", "content": "Two"}
    assert asked == [[one], [one], [system, two], [system, two]]


def test_an_answer_that_ends_in_its_thoughts_is_no_part_of_the_conversation(
    run: Any, asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Templates refuse messages without a text."""
    from forerun.server.thoughts import Thoughts

    monkeypatch.setattr(Thoughts, "feed", lambda self, text: [Prose(text, is_reasoning=True)])
    said = run("chat", "--max-tokens", "4", stdin="One\nTwo\n").stderr
    assert said.count("ended before anything was said") == 2
    assert [[message["content"] for message in conversation] for conversation in asked] == [["One"], ["Two"]]


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_thoughts_are_shown_without_their_marks_and_leave_the_conversation(
    run: Any, asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    from forerun.core import CompletionOutput, RequestOutput
    from forerun.llm import LLM

    def stream(self: LLM, prompt: list[int], params: Any, *_: Any, **__: Any) -> Any:
        ids = self.tokenizer.encode("<think>\nEasy.\n</think>\n\nParis.")
        for num in range(1, len(ids) + 1):
            text, end = self.tokenizer.decode(ids[:num]), "stop" if num == len(ids) else None
            sample = CompletionOutput(0, text, tuple(ids[:num]), end, None, 0, ("",) * num)
            yield RequestOutput("0", None, tuple(prompt), [sample], end is not None)

    watched = LLM.render_chat

    def render(self: LLM, messages: Any) -> list[int]:
        monkeypatch.setattr(self.tokenizer, "chat_template", f"{self.tokenizer.chat_template}{{# </think> #}}")
        return watched(self, messages)

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(LLM, "render_chat", render)
    arguments, lines = (["What?"], None) if command == "generate" else ([], "What?\nWhy?\n")
    result = run(command, *arguments, stdin=lines)
    assert result.stdout.count("Easy.\n\nParis.") == 1 + (command == "chat") and "think>" not in result.stdout
    if command == "chat":
        assert asked[-1][1] == {"role": "assistant", "content": "Paris."}


def test_a_path_is_no_command(run: Any, asked: list[list[dict[str, str]]]) -> None:
    run("chat", "--max-tokens", "4", stdin="/etc/hosts has two names, why?\n")
    assert asked == [[{"role": "user", "content": "/etc/hosts has two names, why?"}]]


def test_commands_with_something_behind_them_do_nothing(run: Any, asked: list[list[dict[str, str]]]) -> None:
    said = run("chat", "--max-tokens", "4", stdin="One\n/again now\n/exit now\n/reset all\nTwo\n/quit\nThree\n").stderr
    assert [conversation[-1]["content"] for conversation in asked] == ["One", "Two"] and len(asked[1]) == 3
    assert all(f"{command} takes nothing behind it: " in said for command in ("/again", "/exit", "/reset"))


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, ForerunError("no room")])
def test_a_turn_that_cannot_be_answered_again_stays(
    run: Any, asked: list[list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch, trouble: Any
) -> None:
    from forerun.llm import LLM

    stream = LLM.stream

    def troubled(self: LLM, *given: Any) -> Any:
        if len(asked) == 2:
            raise trouble
        yield from stream(self, *given)

    monkeypatch.setattr(LLM, "stream", troubled)
    status = 2 if isinstance(trouble, ForerunError) else 0
    run("chat", "--max-tokens", "4", stdin="One\n/again\nTwo\n", status=status)
    first, again, second = asked
    assert first == again == second[:1] and [message["role"] for message in second] == ["user", "assistant", "user"]


def test_drafts_are_coloured_on_demand(run: Any) -> None:
    text = "/drafts\nRepeat: the cat sat on the mat. The cat sat on the mat.\n/drafts\n"
    result = run("chat", "--max-tokens", "24", "--temperature", "0", "--drafter", "ngram", "--no-adaptive", stdin=text)
    assert "[" in result.stdout and "tokens are in [brackets]" in result.stderr and "not marked" in result.stderr


def test_the_corner_leaves_the_screen_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.terminal import Corner

    monkeypatch.setenv("LINES", "24")
    stream = StringIO()
    corner = Corner(stream)
    with pytest.raises(KeyboardInterrupt), corner.reserved():
        corner.show("12 tokens/s")
        corner.show("shown too soon after the first")
        raise KeyboardInterrupt
    written = stream.getvalue()
    assert written.count("tokens/s") == 1 and "too soon" not in written
    assert written.count("\0337") == written.count("\0338") == 3  # the cursor is saved and comes back
    assert (
        written.index(";23r") < written.index("tokens/s") < written.index("\033[r")
    )  # lines that scroll, then all again


def test_ctrl_c_stops_the_answer_and_not_the_chat(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli import chat
    from forerun.llm import LLM

    write, stream, engines = chat.write, LLM.stream, []

    def watched(self: LLM, *given: Any) -> Any:
        engines.append(self.engine)
        return stream(self, *given)

    def interrupted(*given: Any) -> None:
        write(*given)
        if given[0]:  # not what was held back, of which there is none
            raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", watched)
    monkeypatch.setattr(chat, "write", interrupted)
    options = ("--max-tokens", "200", "--temperature", "1", "--drafter", "none")
    result = run("chat", *options, stdin="Tell me a long story about a cat and a dog\n/exit\n")
    assert "1 token in 1 step " in result.stderr and len(engines) == 1 and not engines[0].has_work


def test_chat_ends_with_its_input(run: Any) -> None:
    run("chat", "--max-tokens", "4", stdin="Hello")


def test_chat_takes_the_precision_of_the_cache(run: Any) -> None:
    run("chat", "--max-tokens", "4", "--kv-cache-dtype", "int8", stdin="Hello")
    assert "--kv-cache-dtype must be one of" in run("chat", "--kv-cache-dtype", "int9", stdin="", status=2).stderr


def test_an_answer_sees_the_conversation(run: Any, asked: list[list[dict[str, str]]]) -> None:
    said = run("chat", "--system", "Be brief.", "--max-tokens", "4", stdin="One\nTwo\n/reset\nThree\n").stderr
    assert "the system message stays: Be brief. (/system drops it)" in said
    roles = [[message["role"] for message in conversation] for conversation in asked]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_chat_says_when_the_context_is_full(run: Any) -> None:
    long = f"{'word ' * 200}\nHello\n"
    result = run("chat", "--max-model-len", "64", "--max-tokens", "8", stdin=long, status=2)
    assert "/reset" in result.stderr and "the prompt has" in result.stderr and result.stderr.count("tokens/s") == 1


def test_demo_shows_three_tasks_and_what_to_type_next(run: Any) -> None:
    text = run("demo", "--max-tokens", "24", "--repeats", "1").stdout
    assert text.count("\n> ") == text.count("with speculation") == 3
    assert re.search(r"the same \d+ tokens, \d+\.\d\dx as fast: \d+ and \d+ tokens/s; \d\.\d tokens a pass", text)
    assert text.rstrip().splitlines()[-1].split()[:2] == ["forerun", "verify"]


def test_demo_names_forerun_by_its_path_where_the_shell_does_not_find_it(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ".venv" / "bin" / "forerun"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script), "demo"])
    for found, called in ((tmp_path / "nothing", ".venv/bin/forerun"), (script.parent, "forerun")):
        monkeypatch.setenv("PATH", str(found))
        text = run("demo", "Hi", "--max-tokens", "4", "--repeats", "1").stdout
        assert text.rstrip().splitlines()[-1].split()[:2] == [called, "verify"]


def test_mini_answers_the_tasks_of_the_demo_rightly() -> None:
    from forerun import LLM, SamplingParams
    from forerun.cli.chat import EXAMPLES
    from forerun.cli.demo import TASKS

    llm = LLM("mini", drafter="none")
    asked = [[{"role": "user", "content": task}] for task in (*TASKS, *EXAMPLES["mini"])]
    facts, fields, edited, story, name = (
        output.outputs[0].text for output in llm.chat(asked, SamplingParams(temperature=0, max_tokens=160))
    )
    assert "Its capital is Paris." in facts and facts.endswith(
        "It borders Andorra, Belgium, Germany, Italy, Luxembourg, Monaco, Spain and Switzerland."
    )
    assert json.loads(fields) == {
        "name": "Clara Miller", "town": "Lisbon", "count": 12, "item": "chairs", "phone": "555-0143"
    }  # fmt: skip
    assert edited == TASKS[2].partition("\n\n")[2].replace("Tom", "Ben")
    assert story.count("fox") > 2 and json.loads(name) == {"name": "Clara Miller", "town": "Lisbon"}


def test_demo_does_not_draft_from_its_own_earlier_runs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.demo import Demo

    engines = []
    monkeypatch.setattr(Demo, "run", lambda demo, repeats: engines.extend(demo.engines))
    run("demo", "Hello!", "--drafter", "auto")
    members = engines[1].config.drafter.members
    assert "suffix" in engines[1].config.drafter.names and not any(member.across_requests for member in members)


def test_demo_of_a_prompt_is_one_task_that_ends_with_its_answer(run: Any) -> None:
    text = run("demo", "Hello!", "--repeats", "1", "--max-tokens", "12").stdout
    assert "> Hello!" in text and text.count("with speculation") == 1


def test_demo_says_so_when_the_texts_differ(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.demo import Answers

    monkeypatch.setattr(Answers, "same", False)
    assert "DIFFERENT TOKENS" in run("demo", "Hello!", "--repeats", "1", "--max-tokens", "4").stdout


def test_demo_steps_the_column_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from forerun.cli import demo

    clock, order = [0.0], []

    class Engine:
        def __init__(self, name: str, step_s: float) -> None:
            self.name, self.step_s, self.tokenizer = name, step_s, None

        def stream(self, *_: Any) -> Any:
            for _ in range(3):
                clock[0] += self.step_s
                order.append(self.name)
                yield SimpleNamespace(outputs=[None])

    monkeypatch.setattr(demo, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(demo, "DraftedText", lambda *_: SimpleNamespace(take=lambda _: []))
    race = SimpleNamespace(engines=(Engine("slow", 5.0), Engine("fast", 2.0)), params=None)
    assert len(list(demo.Demo._race(race, [1], ([], [])))) == 6  # type: ignore[arg-type]
    assert order == ["slow", "fast", "fast", "fast", "slow", "slow"]
