"""Passes as on a GPU, but for what writes work down: each run again into the tensors of its first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from forerun.kernels.triton.graphs import Capture, Result
from forerun.models.base import PassOutput
from forerun.runtime import bind


class Enqueued:
    """Runs work as it comes, and again into what it made at first, and counts how often it was written down."""

    def __init__(self) -> None:
        self.num_captures = self.num_runs = 0

    def __call__(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        self.num_captures += 1
        self.num_runs += 1
        made: Any = run()

        def replay() -> None:
            self.num_runs += 1
            for old, new in zip(_tensors_of(made), _tensors_of(run()), strict=True):
                old.copy_(new)

        return made, replay


def _tensors_of(made: Any) -> tuple[Tensor, ...]:
    """Of what a pass puts out; chains and trees write where they are read."""
    if isinstance(made, PassOutput):
        return (made.logits, *made.hidden.values(), *(() if made.features is None else (made.features,)))
    return (made,) if isinstance(made, Tensor) else ()


@contextmanager
def as_on_a_gpu(capture: Capture | None = None) -> Iterator[None]:
    """Whatever is bound inside this context is captured, by `capture` if given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bind, "capture_for", lambda _: capture or Enqueued())
        yield
