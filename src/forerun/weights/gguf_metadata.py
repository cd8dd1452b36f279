"""Typed access to GGUF metadata, with errors that name file and key.

Knows: kinds of values and how to complain. Does not know: which keys there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import CheckpointError, UnsupportedError


class GGUFMetadata:
    """The key-value pairs of one file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def __iter__(self) -> Any:
        return iter(self._values)

    def get(self, key: str) -> Any:
        """The value as stored, or None."""
        return self._values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._need(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 or more."""
        value = self._need(key, default)
        if isinstance(value, np.ndarray):
            raise UnsupportedError(
                f"{self.path}: {key} differs from layer to layer; supported is one number for all; load the model "
                "from its safetensors through transformers"
            )
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise self.wrong(key, "a whole number from 0 to 2147483647")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number. A float32 is read as the shortest decimal that rounds to it: 1e-6 comes back as 1e-6."""
        value = self._need(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not abs(value) < float(np.finfo(np.float32).max):  # false for NaN
            raise self.wrong(key, "a finite number")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._need(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._need(key, None)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(key, "a list of texts")
        return value

    def numbers(self, key: str, length: int, default: float | None = None) -> list[Any]:
        """A list of `length` numbers; if absent, `length` times the default if there is one."""
        value = self.get(key)
        if value is None and default is not None:
            return [default] * length
        if not isinstance(value, np.ndarray) or value.shape != (length,):
            raise self.wrong(key, f"a list of {length} numbers")
        return list(value.tolist())

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        """What to raise for a value that is not `wanted`."""
        value = self._values.get(key)
        found = f"{len(value)} values" if isinstance(value, list | np.ndarray) else repr(value)[:60]
        return CheckpointError(f"{self.path}: {key} must be {wanted}, got {found}; convert the model again")

    def _need(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the key {key}; convert the model again with a current llama.cpp")
        return value


def share(part: int, whole: int) -> float:
    """part / whole, rounded so that int(whole * share) gives part again."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, 2.0)
