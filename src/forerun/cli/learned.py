"""`forerun learned`: what the policy has learned in earlier runs.

Knows: options and what is printed. Does not know: what is in the files (`forerun.learned`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_json, print_note

if TYPE_CHECKING:
    from forerun.learned import KeptFile

_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def learned(
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="Delete all of it, answers kept for suffix and results of bench drafters included."
        ),
    ] = False,
    json: opt.JsonOption = False,
) -> None:
    """List what the policy has learned about models, drafters and this machine, or delete it."""
    from forerun.config import learned_folder, profiles_folder
    from forerun.learned import kept_files

    folder, profiles = learned_folder(), profiles_folder()
    files, paths = kept_files(folder), [*folder.glob("*.json"), *folder.glob("*.npz")]
    if delete:
        left = (*folder.glob("*.new"), *profiles.glob("*.new"))  # by processes that were killed while they wrote
        paths += (*profiles.glob("*.json"), *left)
        for path in paths:
            path.unlink(missing_ok=True)
    if json:
        print_json([{**asdict(kept), "path": str(kept.path), "deleted": delete} for kept in files])
        return
    if not delete:
        for kept in files:
            out().print("\n".join(_lines(kept)), soft_wrap=True)
    counted = f"{len(paths)} {'file' if len(paths) == 1 else 'files'}"
    print_note(f"{counted} deleted in {folder} and {profiles}" if delete else f"{counted} in {folder}")


def _lines(kept: KeptFile) -> Iterator[str]:
    age, lessons = f"{_age(time() - kept.written_s)} old", f"{kept.lessons_bytes / 1e3:.1f} kB of answers"
    if not kept.about:
        are_alone = kept.path.suffix == ".npz"
        yield f"{kept.path.name}: {f'{age}, {lessons}' if are_alone else 'damaged, counts as none'}"
        return
    model, drafter = (kept.about.get(name, "").partition(" (")[0] for name in ("model", "drafter"))
    size = f"{kept.size_bytes / 1e3:.1f} kB" + (f" and {lessons}" if kept.lessons_bytes else "")
    yield f"{Path(model).name} with {kept.shown or drafter}: {age}, {size}"
    yield f"  on {kept.about.get('machine')}"
    if kept.plain_step_s is not None:
        yield f"  a plain step takes {kept.plain_step_s * 1e3:.2f} ms"
    for name, shares in kept.acceptance_by_rank.items():
        yield f"  {name}: acceptance by rank {' '.join(f'{share:.0%}' for share in shares)}"


def _age(seconds: float) -> str:
    """In the largest unit of which there are at least two."""
    unit, size = next((each for each in _UNITS if seconds >= 2 * each[1]), _UNITS[-1])
    return f"{max(seconds, 0) // size:.0f} {unit}"
