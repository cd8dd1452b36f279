"""`forerun chat` and `forerun demo`, away from a terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest


def test_chat_answers_resets_and_exits(run: Any) -> None:
    lines = "Hello, how are you?\nWhy?\n/reset\n/nonsense\n\n/exit\nnever read\n"
    result = run("chat", "--max-tokens", "8", "--temperature", "0", stdin=lines)
    assert "the conversation is forgotten" in result.stderr and result.stderr.count("tokens/s") == 2
    assert result.stderr.count("/reset forgets") == 2


def test_ctrl_c_stops_the_answer_and_not_the_chat(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.chat import ChatSession

    write, engines = ChatSession._write, []

    def interrupted(self: ChatSession, *given: Any) -> None:
        engines.append(self.llm.engine)
        write(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatSession, "_write", interrupted)
    options = ("--max-tokens", "200", "--temperature", "1", "--drafter", "none")
    result = run("chat", *options, stdin="Tell me a long story about a cat and a dog\n/exit\n")
    assert "1 tokens in 1 steps" in result.stderr and len(engines) == 1 and not engines[0].has_work


def test_chat_ends_with_its_input(run: Any) -> None:
    run("chat", "--max-tokens", "4", stdin="Hello")


def test_chat_takes_the_precision_of_the_cache(run: Any) -> None:
    run("chat", "--max-tokens", "4", "--kv-cache-dtype", "int8", stdin="Hello")
    assert "kv_cache_dtype must be one of" in run("chat", "--kv-cache-dtype", "int9", stdin="", status=2).stderr


def test_an_answer_sees_the_conversation(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.chat import ChatSession

    stream, seen = ChatSession._stream, []

    def watched(self: ChatSession) -> Any:
        seen.append([message["role"] for message in self.messages])
        return stream(self)

    monkeypatch.setattr(ChatSession, "_stream", watched)
    run("chat", "--system", "Be brief.", "--max-tokens", "4", stdin="One\nTwo\n/reset\nThree\n")
    assert seen == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]


def test_chat_says_when_the_context_is_full(run: Any) -> None:
    result = run("chat", "--max-model-len", "64", "--max-tokens", "8", stdin=f"{'word ' * 200}\nHello\n")
    assert "/reset" in result.stderr and "the prompt has" in result.stderr and result.stderr.count("tokens/s") == 1


def test_demo_ends_in_one_screen(run: Any) -> None:
    text = run("demo", "--max-tokens", "24", "--repeats", "1").stdout
    assert re.search(r"identical: \d+ tokens", text) and "tokens/s" in text and "acceptance length" in text
    assert "plain" in text and "with speculation" in text
    assert len(text.splitlines()) <= 24
