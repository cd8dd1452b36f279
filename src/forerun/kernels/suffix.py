"""Suffix structures over token texts: the contract, and which implementation is used.

Knows: what is asked of them. Does not know: how they are built (suffix_reference.py, csrc/suffix*), nor requests,
trees, models, tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Guess(NamedTuple):
    """A node to draft: its parent's index among the guesses (-1: the root), its token, the chance of its path."""

    parent: int
    token: int
    chance: float


class SuffixCorpus(Protocol):
    """The newest of finished texts: at most `max_tokens` (2 or more) tokens; the older half is dropped at once."""

    @property
    def num_tokens(self) -> int:
        """Tokens held, an end mark a text included."""

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text, or as much of its end as half the corpus holds."""


class SuffixStore(Protocol):
    """A fixed text and the sorted order of its suffixes, which may lie in a mapped file: little of it is read."""


class SuffixText(Protocol):
    """A growing text in which the tail's earlier occurrences are found at once, whatever its length.

    Substrings are looked up as long as they are shorter than the `window` it was made with.
    """

    @property
    def size(self) -> int:
        """Tokens so far."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (ids from 0 to 2^31 - 1)."""

    def copy(self, shortest: int, longest: int, num: int) -> tuple[int, list[int]]:
        """The longest repeated tail's length, and `num` tokens that followed its latest earlier occurrence.

        Tails of `shortest` .. `longest` <= window tokens count; (0, []) if none occurred earlier. A copy that runs
        into the tail goes on with its own beginning.
        """

    def grow(self, max_nodes: int, least: float) -> Sequence[tuple[int, int, float]]:
        """Up to `max_nodes` most probable `Guess`es of chance `least` or more, parents first.

        Chances come from what followed the tail's occurrences in this text, in its corpus and in its store.
        """


@dataclass(frozen=True, slots=True)
class SuffixKit:
    """One implementation: how to make texts (window, corpus or None, store if there is one), corpora (max_tokens,
    window) and stores (tokens with an end mark behind each text, and the order of suffixes; both int32)."""

    name: str
    text: Callable[..., SuffixText]
    corpus: Callable[[int, int], SuffixCorpus]
    store: Callable[[Any, Any], SuffixStore]


def select_suffix() -> SuffixKit:
    """The C++ one where it is installed, else the reference; both guess the same."""
    try:
        from forerun.kernels.cpu import _native
    except ImportError:
        return reference_suffix()

    def store(tokens: Any, order: Any) -> SuffixStore:
        made: SuffixStore = _native.SuffixStore(tokens.ctypes.data, order.ctypes.data, len(order), (tokens, order))
        return made

    return SuffixKit("cpu", _native.SuffixText, _native.SuffixCorpus, store)


def reference_suffix() -> SuffixKit:
    """Plain Python."""
    from forerun.kernels.suffix_reference import ReferenceCorpus, ReferenceStore, ReferenceText

    return SuffixKit("reference", ReferenceText, ReferenceCorpus, ReferenceStore)
