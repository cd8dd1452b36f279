"""Writing safetensors files with the permissions that the umask allows.

Knows: that the library by itself writes files only their owner may read. Does not know: what the tensors are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors by name to `path`, with the permissions of a new file (or of the file it replaces)."""
    path.touch()
    rights = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(rights)
