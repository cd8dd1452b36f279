"""The target's states on disk: written once within a budget, mapped into memory while training.

Knows the folder's files: `states.bin` (bfloat16, token after token, each with its layers side by side) and
`states.json`; while they are written, `states.part` and `states.part.json`, from which an interrupted capture is
resumed. Knows nothing of heads.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from forerun.errors import DataError, ResourceError, TrainingError
from forerun.progress import TimeLeft
from forerun.training.heads.feed import Batch, with_final
from forerun.training.heads.rows import Rows
from forerun.training.heads.target import TrainingTarget

Report = Callable[[str], None]
ITEM_BYTES = 2
ROWS_AT_ONCE = 8
REPORT_EVERY = 25  # passes of the target


class CapturedFeed:
    """Reads states from a file; see `feed.Feed`."""

    def __init__(self, rows: Rows, target: TrainingTarget, layers: Sequence[int], path: Path) -> None:
        self.rows, self.target, self.layers = rows, target, tuple(layers)
        self.width = len(layers) * target.shape.hidden_size
        self.states = np.memmap(path, dtype=np.uint16, mode="r").reshape(-1, self.width)  # [tokens, width]
        self.places = np.cumsum(rows.lens) - rows.lens  # of each sequence's first token

    def batch(self, numbers: Sequence[int], seq_len: int) -> Batch:
        """See `Feed`."""
        ids, answer = self.rows.batch(numbers, seq_len)
        states = torch.zeros(len(numbers), seq_len, self.width, dtype=torch.bfloat16)
        for place, number in enumerate(numbers):
            first, length = int(self.places[number]), min(seq_len, int(self.rows.lens[number]))
            states[place, :length] = torch.from_numpy(self.states[first : first + length].copy()).view(torch.bfloat16)
        device = self.target.head.device
        parts = states.to(device).float().chunk(len(self.layers), dim=-1)
        table = dict(zip(self.layers, parts, strict=True))
        return Batch(ids.to(device), answer.to(device), table, with_final(table, self.target))


def rows_within(rows: Rows, width: int, budget: int, report: Report) -> Rows:
    """The first sequences whose states fit into `budget` bytes. Raises DataError if none does."""
    needed = np.cumsum(rows.lens) * width * ITEM_BYTES
    num_fitting = int((needed <= budget).sum())
    if num_fitting == 0:
        raise DataError(f"--capture-bytes {budget} holds no sequence; the first needs {int(needed[0])} bytes")
    if num_fitting < len(rows):
        report(f"states of {num_fitting} of {len(rows)} sequences fit into {budget} bytes; all need {int(needed[-1])}")
    return rows.take(np.arange(num_fitting))


def capture(
    rows: Rows, target: TrainingTarget, layers: Sequence[int], folder: Path, about: dict[str, Any], report: Report
) -> CapturedFeed:
    """Writes the states of all sequences into `folder`: resumes an interrupted run, keeps a complete one.

    about: what the states depend on. Raises TrainingError if the folder holds others and ResourceError if the disk is
    full; the unfinished file is removed then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done, part = folder / "states.bin", folder / "states.part"
    about = {**about, "layers": list(layers), "sequences": len(rows), "tokens": rows.num_tokens}
    if not done.is_file():
        row_bytes = len(layers) * target.shape.hidden_size * ITEM_BYTES
        try:
            write_states(rows, target, layers, part, about, row_bytes, report)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            part.unlink(missing_ok=True)
            progress_of(part).unlink(missing_ok=True)
            raise ResourceError(disk_full(folder, rows.num_tokens * row_bytes)) from error
        progress_of(part).replace(progress_of(done))
        part.replace(done)
    check_about(progress_of(done), about)
    return CapturedFeed(rows, target, layers, done)


def disk_full(folder: Path, needed: int) -> str:
    """The message for a full disk."""
    free = shutil.disk_usage(folder).free
    return (
        f"the disk is full: the target's states need {needed} bytes in {folder}, {free} are free without them; lower "
        "--capture-bytes, use another --out, or --capture-bytes 0, which computes them while training"
    )


def progress_of(path: Path) -> Path:
    """The file that describes a file of states."""
    return path.with_name(f"{path.name}.json")


def check_about(path: Path, about: dict[str, Any]) -> int:
    """How many sequences a file of states has; raises TrainingError if they depend on something else."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["about"] != about:
        raise TrainingError(
            f"{path} was captured for {found['about']}, now it is {about}; use another --out, or --fresh"
        )
    return int(found["done"])


def write_states(
    rows: Rows, target: TrainingTarget, layers: Sequence[int], path: Path, about: dict[str, Any], row_bytes: int,
    report: Report,
) -> None:  # fmt: skip
    """Appends the sequences that are missing; after every pass the progress file records how many are complete."""
    first = check_about(progress_of(path), about) if path.is_file() and progress_of(path).is_file() else 0
    left = TimeLeft(len(rows), first)
    with path.open("r+b" if first else "wb") as out:
        out.truncate(int(rows.lens[:first].sum()) * row_bytes)
        out.seek(0, 2)
        for number, start in enumerate(range(first, len(rows), ROWS_AT_ONCE)):
            numbers = list(range(start, min(start + ROWS_AT_ONCE, len(rows))))
            write_pass(rows, target, layers, numbers, out)
            out.flush()
            table = {"about": about, "done": numbers[-1] + 1}
            progress_of(path).write_text(json.dumps(table) + "\n", encoding="utf-8")
            if number % REPORT_EVERY == REPORT_EVERY - 1:
                report(f"sequences whose states were captured: {left(numbers[-1] + 1)}")


def write_pass(
    rows: Rows, target: TrainingTarget, layers: Sequence[int], numbers: Sequence[int], out: BinaryIO
) -> None:
    """Computes and writes the states of some sequences."""
    ids, _ = rows.batch(numbers, int(rows.lens[list(numbers)].max()))
    found = target.states(ids.to(target.head.device), layers)
    side_by_side: Tensor = torch.cat([found[layer] for layer in layers], dim=-1)  # [batch, T, width]
    for states, number in zip(side_by_side.to("cpu", torch.bfloat16), numbers, strict=True):
        out.write(states[: int(rows.lens[number])].contiguous().view(torch.uint16).numpy().tobytes())
