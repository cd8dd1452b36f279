"""Reading `quantization_config` of config.json strictly.

Knows: JSON values and how to complain about them. Does not know: which settings a format has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError
from forerun.quant.auto_round import restated

SECTION = "quantization_config"
CACHE_SCHEMES = ("kv_cache_scheme", "kv_cache_quant_algo")  # of compressed-tensors and ModelOpt
REMEDY = "take another checkpoint of the model"


def asks_small_cache(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that keys and values are to be kept in 8 bits."""
    section = config.get(SECTION)
    return isinstance(section, Mapping) and any(section.get(name) for name in CACHE_SCHEMES)


class Settings:
    """The entries of one JSON object, with its path for messages."""

    def __init__(self, values: object, place: str = SECTION) -> None:
        """Raises CheckpointError if `values` is no object."""
        if not isinstance(values, Mapping):
            raise CheckpointError(f"config.json: {place} must be an object, got {_short(values)}; copy the file again")
        self._values: Mapping[str, Any] = values
        self._place = place

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """The quantization settings of a config.json, empty if there are none; AutoRound's as those of their layout."""
        return Settings(restated(config.get(SECTION) or {}))

    def get(self, name: str) -> Any:
        """An unchecked value, None if absent."""
        return self._values.get(name)

    def section(self, name: str) -> Settings:
        """An object inside this one; absent or null means an empty one."""
        return Settings(self._values.get(name) or {}, f"{self._place}.{name}")

    def names(self) -> list[str]:
        """The names of all entries."""
        return list(self._values)

    @property
    def method(self) -> str | None:
        """`quant_method`."""
        found = self.get("quant_method")
        return found if isinstance(found, str) else None

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; raises CheckpointError if it is something else, or absent without default."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(
                f"config.json: {self._place}.{name} must be a whole number, got {_short(value)}; copy the file again"
            )
        return value

    def sizes(self, name: str) -> tuple[int, int] | None:
        """Two whole numbers above 0, None if absent; raises UnsupportedError if it is something else."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(one) is int and one > 0 for one in value):
            raise UnsupportedError(
                f"config.json: {self._place}.{name} is {_short(value)}; supported are two whole numbers; {REMEDY}"
            )
        return value[0], value[1]

    def texts(self, name: str) -> list[str]:
        """A list of strings, empty if absent; raises CheckpointError if it is something else."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(
                f"config.json: {self._place}.{name} must be a list of strings, got {_short(value)}; copy the file again"
            )
        return value

    def require(self, name: str, allowed: Sequence[Any], default: Any) -> Any:
        """One of the values forerun implements; raises UnsupportedError for any other."""
        value = self.get(name)
        value = default if value is None else value
        if value not in allowed:
            choices = ", ".join(str(choice) for choice in allowed)
            raise UnsupportedError(
                f"config.json: {self._place}.{name} is {_short(value)}; supported: {choices}; {REMEDY}"
            )
        return value

    def refuse(self, *names: str) -> None:
        """Raise UnsupportedError if one of these is set to something."""
        for name in names:
            if self.get(name):
                raise UnsupportedError(
                    f"config.json: {self._place}.{name} is {_short(self.get(name))}, which forerun does not "
                    f"implement; {REMEDY}"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
