"""From what a user typed to a model folder, or to a GGUF file, which is a model by itself.

Knows: embedded names, local folders and files, hub ids, in this order. Does not know: what is in them.
"""

from __future__ import annotations

import re
from pathlib import Path

import forerun
from forerun.errors import ModelNotFoundError

EMBEDDED = {
    "mini": "mini/target",
    "mini-draft": "mini/draft",
    "mini-mtp": "mini/mtp",
    "mini-eagle": "mini/eagle",
    "mini-medusa": "mini/medusa",
}
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_COPIES = ("original/*", "consolidated*", "onnx/*")  # the same weights in other layouts
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "medusa_lm_head.pt")


def resolve_model(name_or_path: str | Path) -> Path:
    """The folder or GGUF file of a model given by embedded name, path or hub id.

    Raises ModelNotFoundError, which lists what was tried.
    """
    name = str(name_or_path)
    tried: list[str] = []
    if name in EMBEDDED:
        return _embedded(name)
    folder = Path(name).expanduser()
    if name and (folder.is_dir() or (folder.is_file() and folder.suffix.lower() == ".gguf")):
        return folder
    is_other = " (it is a file: give the folder, or a .gguf file)" if folder.is_file() else ""
    tried.append(f"a folder {folder}{is_other}")
    if not folder.is_absolute() and HUB_ID.fullmatch(name):
        found = _download(name, tried)
        if found is not None:
            return found
    raise ModelNotFoundError(
        f"there is no model {name!r}; tried {'; '.join(tried)}; the embedded models are {', '.join(EMBEDDED)}"
    )


def _embedded(name: str) -> Path:
    folder = Path(forerun.__file__).parent / EMBEDDED[name]
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(
            f"the embedded model {name!r} is missing from this installation ({folder}); install forerun again"
        )
    return folder


def _download(name: str, tried: list[str]) -> Path | None:
    """The hub's snapshot, from its cache if the network is away; None (and a note in `tried`) if there is none."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        tried.append("the hub (huggingface_hub is not installed)")
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_COPIES)))
    except Exception as error:  # the hub library raises dozens of kinds, from offline to gated
        tried.append(f"the hub id {name} ({_first_line(error)})")
        return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
