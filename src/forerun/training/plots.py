"""The loss curve picture of a run.

Knows how a history is drawn. Needs matplotlib, from the `train` extra; without it there is no picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forerun.training.train import StepReport

NO_PICTURE: Final = 'no loss.png: matplotlib is not installed (pip install ".[train]" in the checkout of forerun)'


def draw_history(history: Sequence[StepReport], path: Path) -> bool:
    """Draws training loss and held-out bits per byte over tokens as a PNG; returns False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([line.tokens for line in history], [line.loss for line in history])
    left.set(xlabel="tokens", ylabel="nats per token", title="training loss")
    measured = [line for line in history if line.heldout]
    for domain in measured[-1].heldout if measured else ():
        right.plot([line.tokens for line in measured], [line.heldout[domain] for line in measured], "o-", label=domain)
    right.set(xlabel="tokens", ylabel="bits per byte", title="held-out text")
    if measured:
        right.legend()
    figure.savefig(path, dpi=120)
    return True
