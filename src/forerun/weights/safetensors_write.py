"""Writing a safetensors file that others may read as far as the umask says.

Knows: that the library writes files only their owner may read. Does not know: what the tensors are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors by name as the file `path`, its rights those of any new file (or of the one it was)."""
    path.touch()
    rights = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(rights)
