"""Writing safetensors files with the permissions that the umask allows.

Knows: that the library by itself writes files only their owner may read. Does not know: what the tensors are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ResourceError


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors by name to `path`, with the permissions of a new file (or of the file it replaces).

    Raises ResourceError for a full disk, and leaves no file then.
    """
    path.touch()
    rights = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # of whatever keeps it from being written
        path.unlink(missing_ok=True)
        raise ResourceError(f"cannot write {path}: {error}; make room, or choose another path") from error
    path.chmod(rights)
