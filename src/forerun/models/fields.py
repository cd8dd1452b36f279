"""Reading config.json strictly: typed access with errors that name the field.

Knows: JSON values and what is said when one is wrong. Does not know: which fields a model has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from forerun.errors import CheckpointError, UnsupportedError

MAX_NUMBER = 1e12
THROUGH_TRANSFORMERS = 'load the model through transformers, in Python: LLM(MODEL, implementation="transformers")'
MAX_SIZE = 2**31 - 1  # sizes and positions are 32-bit in the kernels


def words(text: str) -> frozenset[str]:
    """The words of a text; for tables of field names."""
    return frozenset(text.split())


def by_one_name(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """A config.json whose fields have the names on the right of `aliases` where it has those on the left.

    Raises CheckpointError if two names of one field say different things.
    """
    found = {name: value for name, value in raw.items() if name not in aliases}
    for name, used in aliases.items():
        value = raw.get(name)
        if value is not None and found.get(used) is None:
            found[used] = value
        if value is not None and found[used] != value:
            raise CheckpointError(
                f"config.json: {name} is {_short(value)} and {used}, another name of it, {_short(found[used])}; keep "
                "the right one"
            )
    return found


def what_is_wrong(kinds: Sequence[str], allowed: Collection[str], num_layers: int) -> str | None:
    """What a list of each layer's kind has that it must not have, by the layer; None if nothing."""
    wrong = next((f"{kind!r:.80} for layer {layer}" for layer, kind in enumerate(kinds) if kind not in allowed), None)
    return wrong or (f"{len(kinds)} entries" if len(kinds) != num_layers else None)


class Fields:
    """A JSON object with a family's defaults for absent fields; `null` is a value of its own, as in transformers."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._defaults = defaults
        self._where = where

    def given(self, name: str) -> bool:
        """Whether the file itself has a value other than null for the field."""
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value, the family's default if the file has no such field, None if there is neither; unchecked."""
        return self._values.get(name, self._defaults.get(name))

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A whole number from `minimum` to `maximum`."""
        value = self._need(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._wrong(name, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(
        self, name: str, default: float | None = None, minimum: float = 0.0, maximum: float = MAX_NUMBER
    ) -> float:
        """A number from `minimum` to `maximum`."""
        value = self._need(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not minimum <= value <= maximum:  # false for NaN
            raise self._wrong(name, value, f"a number from {minimum:g} to {maximum:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self._need(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._need(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, None if absent."""
        value = self.get(name)
        if value is not None and not _is_list_of(value, str):
            raise self._wrong(name, value, "a list of strings")
        return None if value is None else tuple(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers."""
        value = self._need(name, None)
        if not _is_list_of(value, int | float) or len(value) != length:
            raise self._wrong(name, value, f"a list of {length} numbers")
        return tuple(float(entry) for entry in value)

    def section(self, name: str, known: frozenset[str]) -> Fields:
        """The object in a field, an empty one if absent; raises UnsupportedError for fields in it beyond `known`."""
        value = self.get(name)
        if not isinstance(value, Mapping | None):
            raise self._wrong(name, value, "an object")
        unknown = sorted(inner for inner, given in (value or {}).items() if inner not in known and given is not None)
        if unknown:
            raise UnsupportedError(
                f"{self._where}: {name} has fields forerun does not know: {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}; {THROUGH_TRANSFORMERS}"
            )
        return Fields(value or {}, {}, where=f"{self._where}'s {name}")

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers from 0 on; () if absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not _is_list_of(value, int) or any(not 0 <= entry <= MAX_SIZE for entry in value):
            raise self._wrong(name, value, f"a list of whole numbers from 0 to {MAX_SIZE}")
        return tuple(value)

    def expect(self, name: str, value: object) -> None:
        """Refuse any other value than the one that is computed, if the file has the field."""
        if self.given(name) and self.get(name) != value:
            raise UnsupportedError(
                f"{self._where}: {name} is {_short(self.get(name))}; forerun computes models of this family with "
                f"{value!r} only; {THROUGH_TRANSFORMERS}"
            )

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; () if absent."""
        value = self.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not _is_list_of(ids, int):
            raise self._wrong(name, value, "a token id or a list of token ids")
        return tuple(ids)

    def _need(self, name: str, default: Any) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._where} lacks {name!r}; copy the file again from where the model came from")
        return value

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {name} must be {wanted}, got {_short(value)}; correct the file")


def _is_list_of(value: Any, kind: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
