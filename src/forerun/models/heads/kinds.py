"""Which kind of head a folder holds, for those who took it for a model.

Knows: a tensor name or two of each layout. Does not know: whether the head is whole, or fits any target.
"""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ModelError
from forerun.models.heads.mtp import MIMO
from forerun.models.heads.source import open_head
from forerun.models.medusa_files import OWN_FILES
from forerun.weights.resolve import resolve_model

_NAMES = {
    "blocks.0.layers.0.weight": "medusa",
    "0.0.linear.weight": "medusa",
    f"{MIMO}.0.input_proj.weight": "mtp",
    "fc.weight": "eagle",
}


def drafter_of(name_or_folder: str | Path) -> str | None:
    """The drafter that drafts with what lies there: medusa, mtp or eagle; None for anything else, and for nothing."""
    try:
        folder = resolve_model(name_or_folder)
        if any((folder / name).is_file() for name in OWN_FILES):
            return "medusa"
        source = open_head(folder)
    except ModelError:
        return None
    if any(name.endswith(".eh_proj.weight") for name in source):
        return "mtp"
    return next((drafter for name, drafter in _NAMES.items() if source.has(name)), None)
