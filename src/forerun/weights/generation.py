"""generation_config.json: the sampling defaults of a model's makers, and the tokens that end a text.

Knows: the file's fields, as transformers writes them. Does not know: requests, which may override the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.weights.checkpoint import read_json, read_optional_json

NAME = "generation_config.json"
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # vLLM reads the same ones


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The content of a generation_config.json."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults for what a request leaves out
    end_ids: tuple[int, ...] | None = None  # None: the file names none
    path: Path | None = None  # None: there is no such file

    @staticmethod
    def named(choice: str) -> GenerationConfig | None:
        """From the option: None for "auto", an empty one for "none", else read from a path; raises ConfigError."""
        if choice == "auto":
            return None
        if choice == "none":
            return GenerationConfig()
        path = Path(choice) / NAME if Path(choice).is_dir() else Path(choice)
        if not path.is_file():
            raise ConfigError(f"generation_config must be auto, none, or a file or folder of one; there is no {path}")
        return _parse(path)

    @staticmethod
    def beside(model: Path) -> GenerationConfig:
        """Read from a model folder; empty if the folder has none. Raises CheckpointError for a damaged file."""
        path = model / NAME
        return _parse(path) if path.is_file() else GenerationConfig()


def _parse(path: Path) -> GenerationConfig:
    values = read_json(path)
    sampling = {name: values[name] for name in SAMPLING if values.get(name) is not None}
    return GenerationConfig(sampling, _ids(values.get("eos_token_id")), path)


def end_ids(folder: Path, generation: GenerationConfig) -> tuple[int, ...]:
    """The tokens that end a text: those `generation` names, else those of the folder's config.json."""
    if generation.end_ids is not None:
        return generation.end_ids
    return _ids(read_optional_json(folder / "config.json").get("eos_token_id")) or ()


def _ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    return tuple(entry for entry in listed if isinstance(entry, int) and not isinstance(entry, bool))
