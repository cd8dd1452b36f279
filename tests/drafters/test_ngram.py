"""Prompt lookup: the table, the reference automaton and the C++ automaton all copy from the latest longest match."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core import Request, SamplingParams
from forerun.drafters.ngram import GramTable, NewIndex, NgramDrafter, automaton_index, select_index
from forerun.kernels.suffix import reference_suffix, select_suffix
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

INDEXES: list[NewIndex] = [GramTable, automaton_index(reference_suffix()), select_index()]


def latest_longest(text: Sequence[int], shortest: int, longest: int, num: int) -> tuple[int, list[int]]:
    """By looking everywhere."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if list(text[end - size : end]) == list(text[-size:]):
                copied = list(text)
                for i in range(num):
                    copied.append(copied[end + i])
                return size, copied[len(text) :]
    return 0, []


@settings(max_examples=60)
@given(
    st.integers(1, 4).flatmap(lambda v: st.lists(st.lists(st.integers(0, v - 1), max_size=6), max_size=12)),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_every_index_finds_the_latest_longest_match(parts: list[list[int]], shortest: int, more: int) -> None:
    indexes = [new_index(shortest, shortest + more) for new_index in INDEXES]
    text: list[int] = []
    for part in parts:
        text += part
        expected = latest_longest(text, shortest, shortest + more, 6)
        for index in indexes:
            length, tokens = index.continuation(text, 6)
            assert (length, list(tokens)) == expected


def draft_of(drafter: NgramDrafter, tokens: Sequence[int], max_nodes: int = 5) -> Draft:
    draft = Draft(Request("a", tuple(tokens), SamplingParams(), seed=0), max_nodes)
    drafter.propose([draft])
    return draft


@pytest.mark.parametrize("new_index", INDEXES, ids=["table", "reference", "installed"])
def test_a_chain_below_the_root(new_index: NewIndex) -> None:
    drafter = NgramDrafter(8, 2, 3, new_index)
    draft = draft_of(drafter, [5, 6, 7, 8, 9, 5, 6])
    assert list(draft.tree.tokens) == [6, 7, 8, 9, 5]
    assert draft.tree.is_chain
    drafter.end("a")
    assert len(draft_of(drafter, [1, 2, 3]).tree) == 1


def test_longer_matches_are_trusted_more() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 9, 8]
    survivals = []
    for size in (1, 2, 4):
        drafter = NgramDrafter(8, 1, 6, select_index())
        survivals.append(draft_of(drafter, [*text, *text[:size]]).survival[1])
        drafter.end("a")
    assert survivals == sorted(survivals) and survivals[0] < survivals[-1] < 0.0


def test_survival_falls_along_the_chain() -> None:
    draft = draft_of(NgramDrafter(8, 1, 4, select_index()), [1, 2, 3, 4, 5, 1])
    assert all(draft.survival[node] < draft.survival[draft.tree.parents[node]] for node in range(1, len(draft.tree)))
    assert draft.survival[ROOT] == 0.0


def test_the_fast_index_is_used_where_it_is_installed() -> None:
    assert (select_index() is GramTable) == (select_suffix().name == "reference")
