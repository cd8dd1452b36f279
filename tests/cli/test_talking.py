"""`forerun chat` and `forerun demo`, away from a terminal."""

from __future__ import annotations

from typing import Any


def test_chat_answers_resets_and_exits(run: Any) -> None:
    lines = "Hello, how are you?\nWhy?\n/reset\n/nonsense\n\n/exit\nnever read\n"
    result = run("chat", "--max-tokens", "8", "--temperature", "0", stdin=lines)
    answers = [line for line in result.stdout.splitlines() if line.strip()]
    assert len(answers) >= 2
    assert "the conversation is forgotten" in result.stderr and result.stderr.count("tokens/s") == 2
    assert result.stderr.count("/reset forgets") == 2


def test_chat_ends_with_its_input(run: Any) -> None:
    run("chat", "--max-tokens", "4", stdin="Hello")


def test_the_answer_depends_on_the_conversation(run: Any) -> None:
    options = ("--max-tokens", "16", "--temperature", "0", "--no-stats")
    question = "What did I just ask you?"
    alone = run("chat", *options, stdin=f"{question}\n").stdout
    after = run("chat", *options, stdin=f"Where is the pizza?\n{question}\n").stdout
    assert not after.endswith(f"\n{alone}")


def test_chat_says_when_the_context_is_full(run: Any) -> None:
    result = run("chat", "--max-model-len", "64", "--max-tokens", "8", stdin=f"{'word ' * 200}\nHello\n")
    assert "/reset" in result.stderr and "the prompt has" in result.stderr and result.stderr.count("tokens/s") == 1


def test_demo_ends_in_one_screen(run: Any) -> None:
    text = run("demo", "--max-tokens", "24", "--repeats", "1").stdout
    assert "identical: 24 tokens" in text and "tokens/s" in text and "acceptance length" in text
    assert "plain" in text and "with speculation" in text
    assert len(text.splitlines()) <= 24
