"""Suffix structures over token texts in plain Python: the specification of csrc/suffix*.

Knows: texts of token ids, how often what followed what. Does not know: requests, trees, models, tensors.

A suffix automaton (Blumer et al., 1985) holds every substring of a text in at most two states a token: a state is a
set of substrings that end at the same places, its link leads to the next shorter such set. SAM decoding (arXiv
2411.10666) drafts from where the longest match ended; SuffixDecoding (arXiv 2411.04975) from how often each
continuation was seen. Here the counts at several match lengths are blended, longest first, as in prediction by
partial matching (Cleary and Witten, 1984): each length keeps a part of the chance and leaves the rest to shorter
ones. A store is a text that was indexed before, as in REST (arXiv 2311.08252): the places of its suffixes in sorted
order (Manber and Myers, 1993), where bisection finds a match without reading the rest. The C++ does the same, operation
by operation in float64, and a test holds the two together.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from forerun.kernels.suffix import Guess

BOUNDARY: Final = -1  # ends each text of a corpus or store; no request holds it
END: Final = -(1 << 31)  # what follows a store's last token
MAX_EDGES: Final = 64  # continuations of a state that are looked at, first seen first
MAX_LEVELS: Final = 6  # match lengths that are blended
FAINT: Final = 0.25  # of the least chance wanted: tokens below that are dropped; shorter matches may add to the others
# Fitted on text and on models' answers, so that guesses of chance c come true about c of the time.
ESCAPE: Final = 2.5
RECENT: Final = 1.0  # extra occurrences that the latest continuation counts for
# A match in a store counts as so many tokens shorter than one in the request or in answers before it: SAM decoding's.
HANDICAP: Final = 5
SAMPLED: Final = 64  # occurrences in a store that are looked at
ROOT: Final = 0


class Match(NamedTuple):
    """The last `length` tokens of a text, found in a state."""

    state: int
    length: int


class Automaton:
    """The suffix automaton of a growing text; occurrences of substrings up to `window` tokens are counted."""

    handicap = 0

    def __init__(self, window: int) -> None:
        self.window = window
        self.size = 0
        self.lens = [0]  # longest substring of each state
        self.links = [-1]
        self.counts = [0]  # occurrences
        self.ends = [0]  # where the last of them ended
        self.earlier = [0]  # and the one before
        self.edges: list[dict[int, int]] = [{}]  # token -> state, first seen first
        self._whole = ROOT  # the state of the whole text
        self._tail = ROOT  # the state of its last `window` tokens

    def append(self, token: int) -> None:
        """Add a token: amortised constant work, and a count for each of the at most `window` states it ends."""
        self._whole = self._insert(token)
        tail = self.shorten(self._tail, min(self.size, self.window))  # what was inserted may have split it
        self.size += 1
        self._tail = self.shorten(self.edges[tail][token], min(self.size, self.window))
        state = self._tail
        while state != ROOT:
            self.counts[state] += 1
            self.earlier[state], self.ends[state] = self.ends[state], self.size
            state = self.links[state]

    def _insert(self, token: int) -> int:
        """The new state of the whole text."""
        new = self._new_state(self.lens[self._whole] + 1)
        state = self._whole
        while state >= 0 and token not in self.edges[state]:
            self.edges[state][token] = new
            state = self.links[state]
        self.links[new] = ROOT if state < 0 else self._split(state, token)
        return new

    def _split(self, state: int, token: int) -> int:
        """The state of `state`'s longest substring with `token` behind it, split off where it was part of another."""
        old = self.edges[state][token]
        if self.lens[old] == self.lens[state] + 1:
            return old
        new = self._new_state(self.lens[state] + 1)
        self.edges[new] = dict(self.edges[old])
        for column in (self.links, self.counts, self.ends, self.earlier):
            column[new] = column[old]
        while state >= 0 and self.edges[state].get(token) == old:
            self.edges[state][token] = new
            state = self.links[state]
        self.links[old] = new
        return new

    def _new_state(self, length: int) -> int:
        self.lens.append(length)
        for column in (self.links, self.counts, self.ends, self.earlier):
            column.append(0)
        self.edges.append({})
        return len(self.lens) - 1

    def shorten(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of a substring in `state`."""
        while self.links[state] >= 0 and self.lens[self.links[state]] >= length:
            state = self.links[state]
        return state

    def follow(self, match: Match, token: int) -> Match:
        """The longest match shorter than the window once `token` comes behind `match`."""
        state, length = match
        while state != ROOT and token not in self.edges[state]:
            state = self.links[state]
            length = self.lens[state]
        if token not in self.edges[state]:
            return Match(ROOT, 0)
        length = min(length + 1, self.window - 1)
        return Match(self.shorten(self.edges[state][token], length), length)

    def shorter(self, match: Match) -> Match:
        """The next shorter end of a match that occurs more often."""
        link = self.links[match.state]
        return Match(link, self.lens[link])

    def evidence(self, match: Match) -> Evidence:
        """What followed the match; its latest continuation counts RECENT times more."""
        num = self.num_continued(match.state)
        return Evidence(num, num + RECENT, self.continuations(match.state) if num > 0 else [])

    def repeated_tail(self, longest: int) -> Match:
        """The longest tail of the text, at most `longest` <= window tokens, that also occurred earlier."""
        length = min(self.size, longest)
        state = self.shorten(self._tail, length)
        if state == ROOT or self.counts[state] > 1:
            return Match(state, length if state != ROOT else 0)
        return Match(self.links[state], self.lens[self.links[state]])

    def num_continued(self, state: int) -> int:
        """Occurrences of a state's substrings that something follows."""
        return self.counts[state] - (self.ends[state] == self.size)

    def continuations(self, state: int) -> list[tuple[int, float]]:
        """Up to MAX_EDGES (token, occurrences), the latest of them counted RECENT times more."""
        edges = list(islice(self.edges[state].items(), MAX_EDGES))
        latest = max((self.ends[to] for _, to in edges), default=0)
        return [(token, self.counts[to] + (RECENT if self.ends[to] == latest else 0.0)) for token, to in edges]


class StoreMatch(NamedTuple):
    """The last `length` tokens of a text: the suffixes in these places of a store's order begin with them."""

    first: int
    last: int
    length: int


class ReferenceStore:
    """See `SuffixStore`."""

    handicap = HANDICAP

    def __init__(self, tokens: Sequence[int], order: Sequence[int]) -> None:
        self._tokens, self._order, self._longest = tokens, order, 0

    def within(self, window: int) -> ReferenceStore:
        """The same for matches shorter than the window."""
        made = ReferenceStore(self._tokens, self._order)
        made._longest = window - 1
        return made

    def longest(self, tail: Sequence[int]) -> StoreMatch:
        """The longest end of `tail` that occurs: what occurs, occurs without its first token, too."""
        best, most = StoreMatch(0, 0, 0), min(len(tail), self._longest)
        while best.length < most:
            length = (best.length + most + 1) // 2
            found = self._range(tail[len(tail) - length :])
            if found.last > found.first:
                best = found
            else:
                most = length - 1
        return best

    def follow(self, match: StoreMatch, token: int) -> StoreMatch:
        """The longest match once `token` comes behind `match`."""
        return self.longest([*self._said(match), token])

    def shorter(self, match: StoreMatch) -> StoreMatch:
        """That of half the length."""
        length = match.length // 2
        return self._range(self._said(match)[match.length - length :]) if length else StoreMatch(0, 0, 0)

    def evidence(self, match: StoreMatch) -> Evidence:
        """What followed the match in SAMPLED of its occurrences, evenly spread over the order."""
        num = match.last - match.first
        sampled = min(num, SAMPLED)
        places = [match.first + index * num // sampled for index in range(sampled)]
        counts = Counter(self._token_at(place, match.length) for place in places)  # in their order
        return Evidence(sampled, sampled, [(token, float(count)) for token, count in counts.items()])

    def _said(self, match: StoreMatch) -> list[int]:
        if match.length == 0:
            return []
        start = int(self._order[match.first])
        return [int(token) for token in self._tokens[start : start + match.length]]

    def _range(self, key: Sequence[int]) -> StoreMatch:
        wanted, places = list(key), range(len(self._order))

        def beginning(place: int) -> list[int]:
            return [self._token_at(place, depth) for depth in range(len(wanted))]

        first = bisect_left(places, wanted, key=beginning)
        return StoreMatch(first, bisect_right(places, wanted, lo=first, key=beginning), len(wanted))

    def _token_at(self, place: int, depth: int) -> int:
        at = int(self._order[place]) % (1 << 32) + depth  # a damaged file leads nowhere
        return int(self._tokens[at]) if at < len(self._tokens) else END


class Evidence(NamedTuple):
    """What followed a match."""

    num: int  # occurrences that something followed
    total: float  # what the counts below add up to
    followers: Sequence[tuple[int, float]]  # token, and how often it came


Place = tuple[Any, Any]  # an Automaton and its Match, or a ReferenceStore and its StoreMatch
Context = list[Place]  # where each index stands: the request's own, answers before it, a store


def predict(context: Context, least: float) -> dict[int, float]:
    """Chances of the next token, from the longest matches first until less than `least` is left for shorter ones."""
    chances: dict[int, float] = {}
    left = 1.0
    for index, match in islice(_shorter_and_shorter(context), MAX_LEVELS):
        if left < least:
            break
        num, total, followers = index.evidence(match)
        if num > 0:
            weight = ESCAPE * math.sqrt(len(followers)) / match.length
            escape = weight / (num + weight)
            share = left * (1.0 - escape) / total
            for token, count in followers:
                if token in chances or share * count >= FAINT * least:
                    chances[token] = chances.get(token, 0.0) + share * count
            left *= escape
    return chances


def _shorter_and_shorter(context: Context) -> Iterator[Place]:
    """All matches but the empty ones, longest first but for handicaps, of equal ones the first index's."""
    places = list(context)
    while left := [place for place, (_, match) in enumerate(places) if match.length > 0]:
        best = max(left, key=lambda place: places[place][1].length - places[place][0].handicap)
        yield places[best]
        index, match = places[best]
        places[best] = index, index.shorter(match)


def grow(context: Context, max_nodes: int, least: float) -> list[Guess]:
    """The most probable guesses of chance `least` or more, at most `max_nodes`, parents first."""
    guesses: list[Guess] = []
    contexts = [context]  # of the root, then of every guess
    waiting: list[tuple[float, int, int, int]] = []  # (-chance, order of arrival, parent, token)
    num_seen, chance = 0, 1.0
    while len(guesses) < max_nodes:
        for token, share in predict(contexts[-1], least / chance).items():
            if token >= 0 and chance * share >= least:
                heapq.heappush(waiting, (-(chance * share), num_seen, len(guesses) - 1, token))
                num_seen += 1
        if not waiting:
            break
        negative, _, parent, token = heapq.heappop(waiting)
        chance = -negative
        guesses.append(Guess(parent, token, chance))
        contexts.append([(index, index.follow(match, token)) for index, match in contexts[parent + 1]])
    return guesses


class ReferenceCorpus:
    """See `SuffixCorpus`. A second automaton starts when the first is half full, and takes over when it is full."""

    def __init__(self, max_tokens: int, window: int) -> None:
        self._max_tokens = max(max_tokens, 2)
        self.automaton = Automaton(window)
        self._next = Automaton(window)

    @property
    def num_tokens(self) -> int:
        """See `SuffixCorpus`."""
        return self.automaton.size

    def add(self, tokens: Sequence[int]) -> None:
        """See `SuffixCorpus`."""
        half = self._max_tokens // 2
        text = [*tokens[max(0, len(tokens) - half + 1) :], BOUNDARY]  # at most half the corpus
        if self.automaton.size + len(text) > self._max_tokens:
            self.automaton, self._next = self._next, Automaton(self.automaton.window)
        filling = [self.automaton, self._next] if self.automaton.size >= half else [self.automaton]
        for automaton in filling:
            for token in text:
                automaton.append(token)

    def match(self, tail: Sequence[int]) -> Match:
        """Where the longest end of `tail` is found."""
        match = Match(ROOT, 0)
        for token in tail[max(0, len(tail) - self.automaton.window + 1) :]:
            match = self.automaton.follow(match, token)
        return match


class ReferenceText:
    """See `SuffixText`."""

    def __init__(self, window: int, corpus: ReferenceCorpus | None, store: ReferenceStore | None = None) -> None:
        self._automaton = Automaton(window)
        self._corpus = corpus
        self._store = None if store is None else store.within(window)
        self._tokens: list[int] = []

    @property
    def size(self) -> int:
        """See `SuffixText`."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `SuffixText`."""
        self._tokens.extend(tokens)
        for token in tokens:
            self._automaton.append(token)

    def copy(self, shortest: int, longest: int, num: int) -> tuple[int, list[int]]:
        """See `SuffixText`."""
        match = self._automaton.repeated_tail(longest)
        if match.length < shortest:
            return 0, []
        start = self._automaton.earlier[match.state]
        period = len(self._tokens) - start
        return match.length, [self._tokens[start + i % period] for i in range(num)]

    def grow(self, max_nodes: int, least: float) -> list[Guess]:
        """See `SuffixText`."""
        context: Context = [(self._automaton, self._automaton.repeated_tail(self._automaton.window - 1))]
        if self._corpus is not None:
            context.append((self._corpus.automaton, self._corpus.match(self._tokens)))
        if self._store is not None:
            context.append((self._store, self._store.longest(self._tokens)))
        return grow(context, max_nodes, least)
