"""Suffix structures: the reference against brute force over substrings, the C++ against the reference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kernels import suffix_reference
from forerun.kernels.suffix import Guess, SuffixKit, reference_suffix, select_suffix
from forerun.kernels.suffix_reference import BOUNDARY, ESCAPE, HANDICAP, RECENT, ROOT, SAMPLED, Automaton
from forerun.weights.corpus import suffix_order

KITS = [reference_suffix()]
if select_suffix().name != "reference":
    KITS.append(select_suffix())

texts = st.sampled_from([1, 2, 4, 12]).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=40))
windows = st.integers(2, 9)


@pytest.fixture(params=KITS, ids=lambda kit: kit.name)
def kit(request: pytest.FixtureRequest) -> SuffixKit:
    return request.param  # type: ignore[no-any-return]


def automaton_of(text: Sequence[int], window: int) -> Automaton:
    made = Automaton(window)
    for token in text:
        made.append(token)
    return made


def ends_of(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` ends in `text`."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if list(text[i : i + len(part)]) == list(part)]


@settings(max_examples=40)
@given(texts, windows)
def test_every_short_substring_is_counted(text: list[int], window: int) -> None:
    automaton = automaton_of(text, window)
    for start in range(len(text)):
        state = ROOT
        for end in range(start, min(start + window, len(text))):
            state = automaton.edges[state][text[end]]
            ends = ends_of(text, text[start : end + 1])
            assert automaton.counts[state] == len(ends)
            assert automaton.ends[state] == ends[-1]
            assert automaton.earlier[state] == (ends[-2] if len(ends) > 1 else 0)
            assert automaton.num_continued(state) == sum(1 for e in ends if e < len(text))


@settings(max_examples=40)
@given(texts, windows)
def test_states_are_few_and_links_lead_to_shorter_ends(text: list[int], window: int) -> None:
    automaton = automaton_of(text, window)
    assert len(automaton.lens) <= max(2, 2 * len(text))
    assert sum(map(len, automaton.edges)) <= 3 * max(1, len(text))
    assert all(automaton.lens[automaton.links[s]] < automaton.lens[s] for s in range(1, len(automaton.lens)))


@settings(max_examples=40)
@given(texts, windows, texts)
def test_follow_keeps_the_longest_match(text: list[int], window: int, tail: list[int]) -> None:
    automaton, match = automaton_of(text, window), suffix_reference.Match(ROOT, 0)
    for end, token in enumerate(tail, start=1):
        match = automaton.follow(match, token)
        sizes = range(min(end, window - 1) + 1)
        assert match.length == max(size for size in sizes if ends_of(text, tail[end - size : end]))


@settings(max_examples=40)
@given(texts, st.integers(1, 4), st.integers(0, 4))
def test_copies_come_from_the_latest_longest_match(text: list[int], shortest: int, more: int) -> None:
    longest = shortest + more
    for kit in KITS:
        made = kit.text(longest, None)
        made.extend(text)
        length, tokens = made.copy(shortest, longest, 7)
        sizes = [n for n in range(shortest, min(longest, len(text)) + 1) if len(ends_of(text, text[-n:])) > 1]
        assert length == max(sizes, default=0)
        if length:
            copied, start = list(text), ends_of(text, text[-length:])[-2]
            for i in range(7):
                copied.append(copied[start + i])
            assert tokens == copied[len(text) :]


def test_chances_of_a_text_worked_out_by_hand(kit: SuffixKit) -> None:
    """After "ab" came c, then d; after "b" alone c twice, then d."""
    made = kit.text(5, None)
    a, b, c, d = range(4)
    made.extend([b, c, a, b, c, a, b, d, a, b])
    chances = {(parent, token): chance for parent, token, chance in made.grow(9, 0.01)}
    left, expected = 1.0, {c: 0.0, d: 0.0}
    for length, num_c in ((2, 1), (1, 2)):
        num = num_c + 1
        escape = ESCAPE * math.sqrt(2) / length
        escape /= num + escape
        for token, count in ((c, num_c), (d, 1 + RECENT)):
            expected[token] += left * (1.0 - escape) * count / (num + RECENT)
        left *= escape
    assert chances[-1, c] == pytest.approx(expected[c])
    assert chances[-1, d] == pytest.approx(expected[d])


@settings(max_examples=40)
@given(texts, st.lists(texts, max_size=3))
def test_guesses_are_a_tree_of_chances(text: list[int], past: list[list[int]]) -> None:
    for kit in KITS:
        corpus = kit.corpus(60, 6)
        for each in past:
            corpus.add(each)
        made = kit.text(6, corpus)
        made.extend(text)
        guesses = [Guess(*guess) for guess in made.grow(20, 0.02)]
        assert all(guess.parent < index for index, guess in enumerate(guesses))
        assert all(first.chance >= second.chance >= 0.02 for first, second in pairwise(guesses))
        assert len({(guess.parent, guess.token) for guess in guesses}) == len(guesses)
        for index in range(-1, len(guesses)):
            total = sum(guess.chance for guess in guesses if guess.parent == index)
            assert total <= (guesses[index].chance if index >= 0 else 1.0) + 1e-9
        known = {token for one in (text, *past) for token in one}
        assert all(guess.token in known for guess in guesses), "the end mark is no token"
        assert [Guess(*guess) for guess in made.grow(7, 0.02)] == guesses[:7], "a smaller budget takes the best"


steps = st.lists(st.tuples(st.sampled_from(["text", "corpus"]), texts), max_size=8)


@settings(max_examples=40)
@given(steps, windows, st.integers(2, 90), st.booleans())
def test_both_implementations_guess_the_same(
    todo: list[tuple[str, list[int]]], window: int, max_tokens: int, shared: bool
) -> None:
    if len(KITS) < 2:
        pytest.skip("the C++ extension is not installed")
    corpora = [kit.corpus(max_tokens, window) if shared else None for kit in KITS]
    made = [kit.text(window, corpus) for kit, corpus in zip(KITS, corpora, strict=True)]
    for what, tokens in todo:
        for text, corpus in zip(made, corpora, strict=True):
            if what == "text":
                text.extend(tokens)
            elif corpus is not None:
                corpus.add(tokens)
        first, second = ([Guess(*guess) for guess in text.grow(24, 0.01)] for text in made)
        assert first == second  # chances too, to the last bit
        assert made[0].copy(1, window, 5) == made[1].copy(1, window, 5)
        assert made[0].size == made[1].size


def test_both_implementations_agree_on_a_long_text() -> None:
    """Long enough for states of many continuations and for the C++ tables to grow."""
    if len(KITS) < 2:
        pytest.skip("the C++ extension is not installed")
    rng = random.Random(0)
    words = [[rng.randrange(400) for _ in range(rng.randint(1, 6))] for _ in range(150)]
    text = [token for _ in range(700) for token in words[min(int(rng.expovariate(0.03)), 149)]]
    corpora = [kit.corpus(1500, 9) for kit in KITS]
    made = [kit.text(9, corpus) for kit, corpus in zip(KITS, corpora, strict=True)]
    num_guesses = 0
    for start in range(0, len(text), 97):
        for each, corpus in zip(made, corpora, strict=True):
            each.extend(text[start : start + 97])
            if start % 3 == 0:
                corpus.add(text[start + 50 : start + 250])
        first, second = ([Guess(*guess) for guess in each.grow(63, 0.001)] for each in made)
        assert first == second
        assert made[0].copy(1, 9, 5) == made[1].copy(1, 9, 5)
        num_guesses += len(first)
    assert num_guesses > 500


@settings(max_examples=40)
@given(texts, st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_guesses_do_not_depend_on_how_a_text_arrived(text: list[int], sizes: list[int]) -> None:
    for kit in KITS:
        at_once, bit_by_bit = kit.text(5, None), kit.text(5, None)
        at_once.extend(text)
        while bit_by_bit.size < len(text):
            size = sizes[bit_by_bit.size % len(sizes)]
            bit_by_bit.extend(text[bit_by_bit.size :][:size])
            bit_by_bit.grow(4, 0.1)
        assert bit_by_bit.grow(9, 0.01) == at_once.grow(9, 0.01)


@settings(max_examples=25)
@given(st.lists(texts, max_size=30), st.integers(2, 60))
def test_a_corpus_keeps_the_newest_and_stays_small(past: list[list[int]], max_tokens: int) -> None:
    for kit in KITS:
        corpus = kit.corpus(max_tokens, 5)
        for each in past:
            corpus.add(each)
            assert 0 < corpus.num_tokens <= max_tokens
        newest = kit.corpus(max_tokens, 5)
        mark = [100, 101, 102][: max(0, max_tokens // 2 - 1)]
        corpus.add(mark)
        newest.add(mark)
        if len(mark) == 3:
            made = kit.text(5, corpus)
            made.extend(mark[:2])
            assert made.grow(1, 0.01)[0][:2] == (-1, 102)


def test_a_corpus_forgets_what_is_old(kit: SuffixKit) -> None:
    corpus = kit.corpus(40, 5)
    corpus.add([1, 2, 3])
    for start in range(10, 100, 4):
        corpus.add(range(start, start + 4))
    made = kit.text(5, corpus)
    made.extend([1, 2])
    assert made.grow(4, 0.01) == []
    made.extend([94, 95])
    assert [token for _, token, _ in made.grow(2, 0.01)] == [96, 97]


def test_a_match_does_not_run_into_the_next_text(kit: SuffixKit) -> None:
    corpus = kit.corpus(40, 5)
    corpus.add([1, 2])
    corpus.add([3, 4])
    made = kit.text(5, corpus)
    made.extend([1, 2])
    assert made.grow(4, 0.001) == []


def test_a_loop_is_guessed_on_and_on(kit: SuffixKit) -> None:
    """The match runs past the end of the text by falling back to the shorter one, a period earlier."""
    made = kit.text(9, None)
    made.extend([5, 6, 7] * 20)
    guesses = made.grow(12, 0.01)
    assert [token for _, token, _ in guesses] == [5, 6, 7] * 4
    assert guesses[-1][2] > 0.3


def test_boundaries_are_below_every_token() -> None:
    assert BOUNDARY < 0


def stored(past: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Texts as a corpus file holds them, and the order of their suffixes."""
    tokens = np.array([token for text in past for token in (*text, BOUNDARY)], np.int32)
    return tokens, suffix_order(tokens).astype(np.int32)


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=4))
def test_suffixes_are_sorted(past: list[list[int]]) -> None:
    tokens, order = stored(past)
    assert order.tolist() == sorted(range(len(tokens)), key=lambda start: tokens[start : start + 64].tolist())


def test_long_repetitions_are_sorted_as_far_as_matches_reach() -> None:
    tokens, order = stored([[1] * 500, [1, 2] * 300])
    beginnings = [tokens[start : start + 64].tolist() for start in order]
    assert beginnings == sorted(beginnings) and sorted(order) == list(range(len(tokens)))


@settings(max_examples=40)
@given(st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(0, 11), max_size=8, unique=True), windows)
def test_a_store_alone_guesses_what_brute_force_finds(past: list[list[int]], tail: list[int], window: int) -> None:
    """Of the longest end of the tail, half of it, and so on, whatever followed, by how often."""
    whole = stored(past)[0].tolist()
    length = max((n for n in range(min(len(tail), window - 1) + 1) if not n or ends_of(whole, tail[-n:])), default=0)
    expected, left = dict[int, float](), 1.0
    while length > 0:
        following = [whole[end] for end in ends_of(whole, tail[len(tail) - length :])]
        escape = ESCAPE * math.sqrt(len(set(following))) / length
        escape /= len(following) + escape
        for token in following:
            expected[token] = expected.get(token, 0.0) + left * (1.0 - escape) / len(following)
        left, length = left * escape, length // 2
    assert len(whole) < SAMPLED * 4
    for kit in KITS:
        made = kit.text(window, None, kit.store(*stored(past)))
        made.extend(tail)  # in which nothing is repeated
        guesses = made.grow(60, 1e-9)
        found = {token: chance for parent, token, chance in guesses if parent == -1}
        known = {token: chance for token, chance in expected.items() if token != BOUNDARY}
        if all(len(ends_of(whole, tail[-n:])) <= SAMPLED for n in range(1, len(tail) + 1)):
            assert found == pytest.approx({token: known[token] for token in found})
            assert set(found) == set(known) or len(guesses) == 60


def test_a_store_comes_after_the_request_s_own_text(kit: SuffixKit) -> None:
    """It is asked first only where its match is longer by more than the handicap."""
    pattern = list(range(10, 30))
    store = kit.store(*stored([[*pattern, 7]]))
    for own_length in (1, 3, len(pattern) - HANDICAP, len(pattern)):
        made = kit.text(33, None, store)
        made.extend([*pattern[-own_length:], 8, 99, *pattern])
        first = made.grow(1, 0.01)[0][1]
        assert first == (7 if len(pattern) - HANDICAP > own_length else 8), own_length
    silent = kit.text(33, None, store)
    silent.extend(pattern[:3])
    assert [token for _, token, _ in silent.grow(30, 0.01)] == [*pattern[3:], 7], "up to the end of its text"


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=5), steps, windows)
def test_both_implementations_guess_the_same_from_a_store(
    past: list[list[int]], todo: list[tuple[str, list[int]]], window: int
) -> None:
    if len(KITS) < 2:
        pytest.skip("the C++ extension is not installed")
    corpora = [kit.corpus(60, window) for kit in KITS]
    made = [kit.text(window, c, kit.store(*stored(past))) for kit, c in zip(KITS, corpora, strict=True)]
    for what, tokens in todo:
        for text, corpus in zip(made, corpora, strict=True):
            text.extend(tokens) if what == "text" else corpus.add(tokens)
        first, second = ([Guess(*guess) for guess in text.grow(24, 0.01)] for text in made)
        assert first == second  # chances too, to the last bit


def test_a_store_with_a_damaged_order_is_read_within_its_bounds(kit: SuffixKit) -> None:
    tokens, order = stored([[1, 2, 3, 1, 2, 4]])
    for wrong in (-1, -(1 << 31), (1 << 31) - 1, len(tokens)):
        made = kit.text(5, None, kit.store(tokens, np.full_like(order, wrong)))
        made.extend([1, 2])
        assert made.grow(8, 0.01) == []
