"""The folder of a training run: made for a run, and cleared when the run is restarted from the beginning.

Knows what a training leaves in its folder, so that nothing else is ever deleted. Knows nothing of training. The folder
is cleared only after the data has been read, so that a mistyped path does not cost an earlier run.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from forerun.errors import TrainingError
from forerun.training.checkpoint import LAST, STABLE

FOLDERS = ("data", "export")
FILES = (LAST, STABLE, "last.tmp", "stable.tmp", "metrics.json", "loss.png")


def open_run(folder: Path, fresh: bool, sources: Sequence[Path] = ()) -> None:
    """Makes the folder; deletes nothing. fresh: an earlier run in it will be cleared; sources: paths read before that.

    Raises TrainingError for a folder that cannot be made, and if `clear` would delete a source or files that no
    training wrote.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be a run folder: {error.strerror}; use another --out") from error
    if fresh:
        check_clear(folder, sources)


def check_clear(folder: Path, sources: Sequence[Path]) -> None:
    """Raises TrainingError if deleting a run would delete other files, too."""
    strange = sorted(path.name for path in folder.iterdir() if path.name not in (*FOLDERS, *FILES))
    if strange:
        raise TrainingError(
            f"--fresh deletes a run, but {folder} also holds {', '.join(strange[:3])}{', ...' * (len(strange) > 3)}, "
            "which no training wrote; use another --out, or move that away"
        )
    inside = [path for path in sources if path.resolve().is_relative_to(folder.resolve())]
    if inside:
        raise TrainingError(f"--fresh deletes {folder}, but {inside[0]} in it is to be read; use another --out")


def clear(folder: Path) -> None:
    """Deletes what a run left in a folder that `open_run` found to hold nothing else."""
    for name in FOLDERS:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def announced(is_resumed: bool, num_steps: int, tokens_per_step: int) -> str:
    """What is said when a training begins."""
    begun = "going on from a checkpoint" if is_resumed else "starting anew"
    return f"{begun}: {num_steps} steps of {tokens_per_step} tokens, the first is slow"
