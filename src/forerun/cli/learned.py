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
    delete: Annotated[bool, typer.Option("--delete", help="Delete all of it: the policy starts from scratch.")] = False,
    json: opt.JsonOption = False,
) -> None:
    """List what the policy has learned about models, drafters and this machine, or delete it."""
    from forerun.config import learned_folder, profiles_folder
    from forerun.learned import kept_files

    folder = learned_folder()
    files = kept_files(folder)
    if delete:
        for kept in files:
            kept.path.unlink(missing_ok=True)
        profiles = profiles_folder()
        left = (*folder.glob("*.new"), *profiles.glob("*.new"))  # by processes that were killed while they wrote
        for path in (*folder.glob("*.npz"), *profiles.glob("*.json"), *left):
            path.unlink(missing_ok=True)
    if json:
        print_json([{**asdict(kept), "path": str(kept.path), "deleted": delete} for kept in files])
        return
    if not delete:
        for kept in files:
            out().print("\n".join(_lines(kept)), markup=False, soft_wrap=True)
    print_note(f"{len(files)} {'file' if len(files) == 1 else 'files'}{' deleted' if delete else ''} in {folder}")


def _lines(kept: KeptFile) -> Iterator[str]:
    if not kept.about:
        yield f"{kept.path.name}: damaged, counts as none"
        return
    model, drafter = (kept.about.get(name, "").partition(" (")[0] for name in ("model", "drafter"))
    yield f"{Path(model).name} with {drafter}: {_age(time() - kept.written_s)} old, {kept.size_bytes / 1e3:.1f} kB"
    yield f"  on {kept.about.get('machine')}"
    if kept.plain_step_s is not None:
        yield f"  a plain step takes {kept.plain_step_s * 1e3:.2f} ms"
    for name, shares in kept.acceptance_by_rank.items():
        yield f"  {name}: acceptance by rank {' '.join(f'{share:.0%}' for share in shares)}"


def _age(seconds: float) -> str:
    """In the largest unit of which there are at least two."""
    unit, size = next((each for each in _UNITS if seconds >= 2 * each[1]), _UNITS[-1])
    return f"{max(seconds, 0) // size:.0f} {unit}"
