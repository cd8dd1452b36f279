"""Where requests go: by what was sent before and by what is to do, never by one alone."""

from __future__ import annotations

from collections import Counter

import pytest

from forerun.replicas import routing
from forerun.replicas.routing import KEY_TOKENS, PrefixRouting, prefix_keys

NAMES = ("a", "b", "c")
IDLE = dict.fromkeys(NAMES, 0.0)


def keys_of(*words: int, salt: str = "") -> tuple[int, ...]:
    """Of a prompt in which each word stands for a whole key's tokens."""
    return prefix_keys([word for word in words for _ in range(KEY_TOKENS)], salt)


def test_keys_name_beginnings() -> None:
    assert keys_of(1, 2, 3)[:2] == keys_of(1, 2, 4)[:2]
    assert keys_of(1, 2)[1] != keys_of(3, 2)[1]  # the whole beginning counts, not its last part
    assert len({keys_of(1)[0], keys_of(1, salt="x")[0], keys_of(1, salt="y")[0]}) == 3
    assert len(prefix_keys(range(KEY_TOKENS * 2 - 1), "")) == 1
    assert len(prefix_keys(range(KEY_TOKENS * 2 * routing.MAX_KEYS), "")) == routing.MAX_KEYS


def test_a_conversation_stays_where_it_is_while_loads_are_alike() -> None:
    ranks = PrefixRouting()
    for number in range(20):
        turn, after = keys_of(1, 100 + number), keys_of(1, 100 + number, 200 + number)
        chosen = ranks.rank(turn, IDLE)[0]
        ranks.sent(turn, chosen)
        assert ranks.rank(after, IDLE)[0] == chosen
        assert ranks.rank(after, {**IDLE, chosen: 3.0})[0] == chosen
        assert ranks.rank(after, {**IDLE, chosen: 30.0})[0] != chosen


def test_a_hot_beginning_does_not_heap() -> None:
    """Everybody begins alike; no request ends."""
    ranks, loads = PrefixRouting(), dict(IDLE)
    for number in range(120):
        keys = keys_of(1, 2, 3, 4, 1000 + number)
        chosen = ranks.rank(keys, loads)[0]
        ranks.sent(keys, chosen)
        loads[chosen] += 1
    assert sum(loads.values()) == 120 and max(loads.values()) <= 1.25 * 40, loads


def test_new_prompts_spread_without_any_load() -> None:
    ranks = PrefixRouting()
    first = Counter(ranks.rank(keys_of(number), IDLE)[0] for number in range(300))
    assert min(first[name] for name in NAMES) > 60, first


def test_replicas_that_failed_come_last_and_those_that_ended_are_forgotten() -> None:
    ranks, keys = PrefixRouting(), keys_of(1, 2, 3)
    ranks.sent(keys, "b")
    assert ranks.rank(keys, IDLE)[0] == "b"
    assert ranks.rank(keys, {**IDLE, "a": 50.0, "c": 50.0}, avoid=("b",))[-1] == "b"
    assert ranks.matched(keys, "b") == 1.0
    ranks.gone("b")
    assert ranks.matched(keys, "b") == 0.0


def test_replicas_that_are_no_longer_there_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, keys = PrefixRouting(), keys_of(1, 2, 3)
    for name in NAMES:
        ranks.sent(keys, name)
    ranks.keep(("a", "c", "new"))
    assert [ranks.matched(keys, name) for name in NAMES] == [1.0, 0.0, 1.0]
    ranks.gone("a")
    monkeypatch.setattr(ranks, "_known", None)  # nothing is looked through for a name a second time
    ranks.gone("a")
    ranks.keep(NAMES)


def test_what_is_not_used_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_KNOWN", 4)
    ranks = PrefixRouting()
    ranks.sent(keys_of(1, 2), "a")
    ranks.sent(keys_of(3, 4), "b")
    ranks.sent(keys_of(1, 2), "a")
    ranks.sent(keys_of(5, 6), "c")
    assert [ranks.matched(keys_of(*words), name) for words, name in (((1, 2), "a"), ((3, 4), "b"))] == [1.0, 0.0]
