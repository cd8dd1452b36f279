"""The folder of a training run: made for a run, and cleared for one that starts anew.

Knows what a training leaves in its folder, so that nothing else is ever deleted. Knows nothing of training.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from forerun.errors import TrainingError
from forerun.training.checkpoint import LAST, STABLE

FOLDERS = ("data", "export")
FILES = (LAST, STABLE, "last.tmp", "stable.tmp", "metrics.json", "loss.png")


def open_run(folder: Path, fresh: bool) -> None:
    """Makes the folder; fresh: deletes an earlier run in it first.

    Raises TrainingError, and deletes nothing, if that would take something along that no training wrote, and for a
    folder that cannot be made.
    """
    try:
        if fresh and folder.exists():
            clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder} cannot be a run folder: {error.strerror}; use another --out") from error


def clear(folder: Path) -> None:
    """Deletes what a run left in a folder; raises TrainingError for one that holds more."""
    strange = sorted(path.name for path in folder.iterdir() if path.name not in (*FOLDERS, *FILES))
    if strange:
        raise TrainingError(
            f"--fresh deletes a run, but {folder} also holds {', '.join(strange[:3])}{', ...' * (len(strange) > 3)}, "
            "which no training wrote; use another --out, or move that away"
        )
    for name in FOLDERS:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
