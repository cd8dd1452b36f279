"""What a pass over M tokens costs: the curve that decides whether drafting pays off.

Knows: how to measure passes in turns and summarise them. Does not know: how a pass is computed, terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from forerun.bench.passes import MAX_CHAIN
from forerun.errors import ConfigError

Case = tuple[int, int]  # context, tokens
ReadSpeed = Callable[[], float]  # bytes a second, measured now
Advance = Callable[[int], None]
_Batch = TypeVar("_Batch")
_Name = TypeVar("_Name")


class ChainPasses(Protocol[_Batch]):
    """What the curve is measured on; `bench.passes.Passes` is one."""

    def chain(self, context: int, tokens: int) -> _Batch:
        """A draft chain of `tokens` nodes after `context` known tokens."""

    def run(self, batch: _Batch) -> None:
        """Compute it."""

    def bytes_read(self, context: int, tokens: int) -> int:
        """Bytes such a pass must read."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[_Name]):
    """Seconds of every pass by name, and readings of the bandwidth taken among them."""

    seconds: dict[_Name, list[float]]
    read_speeds: list[float]


def check_cases(tokens: Sequence[int], contexts: Sequence[int], max_position: int) -> None:
    """Raise ConfigError for numbers no pass can have."""
    if any(not 1 <= number <= MAX_CHAIN for number in tokens):
        raise ConfigError(
            f"--tokens must be from 1 to {MAX_CHAIN}, the nodes of a draft tree; got {_listed(tokens)}; for longer "
            "spans use `forerun bench prefill`"
        )
    longest = max_position - max(tokens)
    if any(not 0 <= context <= longest for context in contexts):
        raise ConfigError(
            f"--context must be from 0 to {longest}, so that {max(tokens)} more tokens fit into the {max_position} "
            f"positions of the shape; got {_listed(contexts)}"
        )


def measure(
    passes: ChainPasses[Any],
    tokens: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    read_speed: ReadSpeed,
    advance: Advance = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Measured[Case]:
    """Time every pass `repeats` times in turns, after a warm-up. A pass over one token is always included."""
    cases = [(context, number) for context in contexts for number in sorted({1, *tokens})]
    actions = {case: partial(passes.run, passes.chain(*case)) for case in cases}
    return in_turns(actions, repeats, read_speed, advance, clock)


def in_turns(
    actions: Mapping[_Name, Callable[[], None]],
    repeats: int,
    read_speed: ReadSpeed,
    advance: Advance = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Measured[_Name]:
    """Do all actions once to warm up, then `repeats` times one after the other, every second time backwards."""
    for action in actions.values():
        action()
    seconds: dict[_Name, list[float]] = {name: [] for name in actions}
    read_speeds = []
    for turn in range(repeats):
        read_speeds.append(read_speed())
        for name in _order(actions, turn):
            start = clock()
            actions[name]()
            seconds[name].append(clock() - start)
        advance(1)
    return Measured(seconds, read_speeds)


def rows(measured: Measured[Case], passes: ChainPasses[Any], tokens: Iterable[int]) -> list[dict[str, Any]]:
    """One row per context and number of tokens; medians."""
    typical = {case: median(times) for case, times in measured.seconds.items()}
    wanted = set(tokens)
    return [
        {
            "tokens": number,
            "context": context,
            "ms": round(seconds * 1e3, 4),
            "ratio": round(seconds / typical[context, 1], 4),
            "gb_per_s": round(passes.bytes_read(context, number) / seconds / 1e9, 3),
        }
        for (context, number), seconds in typical.items()
        if number in wanted
    ]


def read_gb_per_s(measured: Measured[Any]) -> float:
    """The median bandwidth; other work on the machine slows it as it slows the passes."""
    return round(median(measured.read_speeds) / 1e9, 3)


def _order(actions: Iterable[_Name], turn: int) -> list[_Name]:
    names = list(actions)
    return names[::-1] if turn % 2 else names


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
