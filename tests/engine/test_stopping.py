"""Stop strings against their plain definition, and how much work they are."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from forerun.core import SamplingParams
from forerun.engine.stopping import OutputText
from tests.support import harness

texts = st.text("ab", min_size=1, max_size=6)


class Spelled:
    """Token n is the n-th piece."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token] for token in token_ids)

    def finish(self) -> str:
        return ""


def output(pieces: Sequence[str], stops: Sequence[str], min_tokens: int = 0) -> OutputText:
    params = SamplingParams(max_tokens=len(pieces) + 1, stop=tuple(stops), min_tokens=min_tokens)
    request = harness.request(0, [1], params).samples[0].request
    request.stop_token_ids, request.max_len = frozenset(), len(pieces) + 9
    return OutputText(request, Spelled(pieces))


def first_stop(text: str, stops: Sequence[str], before: int) -> tuple[int, str] | None:
    """The stop string that starts first of those that end behind `before`."""
    hits = [(start, stop) for stop in stops for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before]  # fmt: skip
    return min(hits, default=None)


@given(st.lists(texts, min_size=1, max_size=8), st.lists(texts, min_size=1, max_size=4), st.integers(0, 4))
def test_stop_strings_end_a_text_where_the_first_of_them_starts(
    pieces: list[str], stops: list[str], min_tokens: int
) -> None:
    made, text = output(pieces, stops, min(min_tokens, len(pieces))), ""
    for token, piece in enumerate(pieces):
        made.take([token])
        found = first_stop(text + piece, stops, len(text))
        text += piece
        if found is not None and token + 1 >= made.request.params.min_tokens:
            start, stop = found
            assert (made.text, made.request.stop_reason, made.request.finish_reason) == (text[:start], stop, "stop")
            return
        held = max(n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]))
        assert made.visible() == text[: len(text) - held] and made.request.finish_reason is None


def test_long_stop_strings_are_linear_work() -> None:
    """64 of them, and a text that could begin each of them or none; it took minutes."""
    pieces = ["ab" * 10] * 500
    made = output(pieces, ["ab" * 20_000 + str(n) for n in range(32)] + ["b" * 40_000 + str(n) for n in range(32)])
    started = time.perf_counter()
    for token in range(len(pieces)):
        made.take([token])
        assert made.visible() == ""
    assert time.perf_counter() - started < 20
