"""`forerun learned`: what the policy has learned in earlier runs.

Knows: options and what is printed. Does not know: what is in the files (`forerun.learned`).
"""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_json, print_note, table


def learned(
    delete: Annotated[bool, typer.Option("--delete", help="Delete all of it: the policy starts from scratch.")] = False,
    json: opt.JsonOption = False,
) -> None:
    """List what the policy has learned about models, drafters and this machine, or delete it."""
    from forerun.config import learned_folder
    from forerun.learned import kept_files

    folder = learned_folder()
    files = kept_files(folder)
    if delete:
        for path, _ in files:
            path.unlink(missing_ok=True)
    if json:
        print_json([{"path": str(path), "deleted": delete, **about} for path, about in files])
        return
    if files and not delete:
        result = table("model", "drafter", "machine", "file")
        for path, about in files:
            result.add_row(*(about.get(name, "damaged") for name in ("model", "drafter", "machine")), path.name)
        out().print(result)
    print_note(f"{len(files)} {'file' if len(files) == 1 else 'files'}{' deleted' if delete else ''} in {folder}")
