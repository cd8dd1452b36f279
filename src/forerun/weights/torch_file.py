"""Files of torch.save: pytorch_model.bin and heads' .pt with tensors by name, lists of numbers.

Knows: how such a file is opened without running code that is in it, and how it can be damaged. Does not know: what
the tensors are for.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError

_CODE = re.compile(r"GLOBAL ([\w.]+)")  # how torch's message names an import that tensors do not need
_INNER = re.compile(r"WeightsUnpickler error: (.*)")
_REMEDY = "copy it again, or save the model as safetensors"


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """Tensors by name, mapped from the file where its format allows it; raises CheckpointError naming the file.

    Only tensors are unpickled. A file that asks for anything else, which could be code, is refused.
    """
    found = load_torch(path)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds no table of tensors by name (a {type(found).__name__}); {_REMEDY}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path} holds {str(name)[:80]!r}, which is no plain tensor ({type(value).__name__}); save the model's "
                "state_dict() instead"
            )
        if value.is_quantized or value.device.type != "cpu":
            raise CheckpointError(f"{path}: tensor {name[:80]!r} has no plain data ({value.dtype}); {_REMEDY}")
    return dict(found)


def load_torch(path: Path) -> Any:
    """What a file holds, of tensors, numbers, texts and lists alone; raises CheckpointError naming the file."""
    load = partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warning about its own storage classes in old files
            return load(mmap=True) if zipfile.is_zipfile(path) else load()  # torch before 1.6 wrote no archives
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the unpickler raises whatever a damaged file leads it to
        raise CheckpointError(f"cannot read {path}: {_reason(error)}; {_REMEDY}") from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    code = _CODE.search(text)
    if code is not None:
        return f"it asks for {code[1][:100]}, which could run code; forerun reads nothing but tensors from such files"
    inner = _INNER.search(text)
    text = f"{type(error).__name__}: {inner[1] if inner is not None else text}"
    return re.split(r"\.? Check |\. ", text)[0][:200].removesuffix(": ")
