"""The picture of a head's training.

Knows how a history is drawn. Needs matplotlib, from the `train` extra; without it there is no picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from forerun.training.heads.train import HeadReport


def draw_head_history(history: Sequence[HeadReport], path: Path) -> bool:
    """Draws loss, simulated acceptance length and acceptance by depth as a PNG; returns False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # an optional dependency
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(14, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot([line.tokens for line in history], [line.loss for line in history])
    left.set(xlabel="tokens", ylabel="nats per guess", title="training loss")
    measured = [line for line in history if line.acceptance_length is not None]
    middle.plot([line.tokens for line in measured], [line.acceptance_length for line in measured], "o-")
    middle.set(xlabel="tokens", ylabel="tokens a pass", title="simulated acceptance length, held-out prompts, T = 0")
    for line in measured[-1:]:
        depths = range(1, len(line.acceptance_by_depth) + 1)
        right.bar(list(depths), line.acceptance_by_depth)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(xlabel="depth", ylabel="rate", ylim=(0, 1), title="right, if all earlier guesses are right")
    figure.savefig(path, dpi=120)
    return True
