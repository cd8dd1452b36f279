"""Who drafted what: pieces by drafter, whatever the engine holds back."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.cli.drafted import DraftedPiece, DraftedText, legend, render
from forerun.cli.options import adapters, biases, chosen_model, names, numbers
from forerun.core import CompletionOutput
from forerun.errors import ConfigError


class Letters:
    """One letter a token; token 0 is special and has no text."""

    strips_leading_space = False
    has_token_bytes = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id else b""

    def decode_window(self, token_ids: Any) -> str:
        raise AssertionError("not needed")


def answer(text: str, token_ids: bytes, sources: str, finished: bool = False) -> CompletionOutput:
    named = tuple({"n": "ngram", "d": "draft", "-": ""}[letter] for letter in sources)
    return CompletionOutput(0, text, tuple(token_ids), "stop" if finished else None, None, 0, named)


def test_pieces_follow_the_visible_text() -> None:
    text = DraftedText(Letters(), [])
    assert text.take(answer("ab", b"ab", "n-")) == [DraftedPiece("a", "ngram"), DraftedPiece("b", "")]
    assert text.take(answer("ab", b"abST", "n-dd")) == []  # held back: it may be a stop string
    assert text.take(answer("abST", b"abST\0", "n-dd-", True)) == [
        DraftedPiece("S", "draft"),
        DraftedPiece("T", "draft"),
    ]


def test_a_stop_string_is_never_shown() -> None:
    text = DraftedText(Letters(), [])
    assert text.take(answer("a", b"aSTOP", "-dddd", True)) == [DraftedPiece("a", "")]


def test_text_beyond_the_pieces_is_shown_at_the_end() -> None:
    assert DraftedText(Letters(), []).take(answer("a<end>", b"a\0", "--", True)) == [
        DraftedPiece("a", ""),
        DraftedPiece("<end>", ""),
    ]


def test_runs_are_marked_or_coloured() -> None:
    pieces = [DraftedPiece("a", "ngram"), DraftedPiece("b", "ngram"), DraftedPiece("c", ""), DraftedPiece("d", "draft")]
    assert render(pieces, marked=True).plain == "[ab]c[d]"
    coloured = render(pieces, marked=False)
    assert coloured.plain == "abcd" and [span.style for span in coloured.spans] == ["green", "cyan"]
    assert legend(["", "draft", "draft"], marked=False).plain == "drafted by draft"


def test_lists_on_the_command_line() -> None:
    assert names("a, b,a,") == ["a", "b"] and numbers("0,0.7", "x") == [0.0, 0.7]
    assert biases(["3=-1.5", "4=2"]) == {3: -1.5, 4: 2.0}
    assert adapters(["sql=a/b=c", "chat=d"]) == {"sql": "a/b=c", "chat": "d"}
    assert chosen_model(None, None) == "mini" and chosen_model("a", None) == chosen_model(None, "a") == "a"
    for wrong in (
        lambda: names(" ,"),
        lambda: numbers("a", "x"),
        lambda: biases(["x=1"]),
        lambda: adapters(["sql"]),
        lambda: adapters(["=a"]),
        lambda: adapters(["sql=a", "sql=b"]),
        lambda: chosen_model("a", "b"),
        lambda: chosen_model("", None),
        lambda: chosen_model(None, ""),
    ):
        with pytest.raises(ConfigError):
            wrong()
