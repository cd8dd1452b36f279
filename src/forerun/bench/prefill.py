"""Prompt tokens per second.

Knows: which prompts, and that the engine computes them in chunks. Does not know: how a pass is computed, terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from forerun.bench.curve import Advance, Measured, ReadSpeed, in_turns
from forerun.bench.passes import TimedPasses
from forerun.errors import ConfigError
from forerun.models.batch import ForwardBatch


def check_prompts(tokens: Sequence[int], chunk: int, max_position: int) -> None:
    """Raise ConfigError for prompts the shape has no positions for."""
    if any(not 1 <= number <= max_position for number in tokens):
        raise ConfigError(
            f"--tokens must be from 1 to {max_position}, the positions of the shape; got {', '.join(map(str, tokens))}"
        )
    if chunk < 1:
        raise ConfigError(f"--chunk must be at least 1 token; got {chunk}")


def measure(
    passes: TimedPasses,
    tokens: Sequence[int],
    chunk: int,
    repeats: int,
    read_speed: ReadSpeed,
    advance: Advance = lambda _: None,
    clock: Callable[[], float] = perf_counter,
) -> Measured[int]:
    """Time every prompt `repeats` times in turns."""

    actions = {number: partial(_run_all, passes, passes.chunks(number, chunk)) for number in tokens}
    return in_turns(actions, repeats, read_speed, advance, clock)


def rows(measured: Measured[int]) -> list[dict[str, Any]]:
    """One row per prompt; medians."""
    typical = {number: median(times) for number, times in measured.seconds.items()}
    return [
        {"tokens": number, "ms": round(seconds * 1e3, 3), "tokens_per_s": round(number / seconds, 2)}
        for number, seconds in typical.items()
    ]


def _run_all(passes: TimedPasses, batches: Sequence[ForwardBatch]) -> None:
    for batch in batches:
        passes.run(batch)
