"""From what a user typed to a model folder, or to a GGUF file, which is a model by itself.

Knows: embedded names, local folders and files, hub names, in this order. Does not know: what is in them, nor how to
download (`weights.hub_download`).
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path

import forerun
from forerun.errors import ModelNotFoundError, suggestion
from forerun.weights.hub import HubName, cached_models, find_cached
from forerun.weights.hub_download import NoRepositoryError, Progress, download

EMBEDDED = {
    "mini": "mini/target",
    "mini-draft": "mini/draft",
    "mini-mtp": "mini/mtp",
    "mini-eagle": "mini/eagle",
    "mini-medusa": "mini/medusa",
}
PATH = re.compile(r"(\.{0,2}|~)/\S*|\S+\.gguf", re.IGNORECASE)  # certainly meant as a path
CONFIGS = ("config.json", "medusa_lm_head.pt")  # one of them is in every folder of a model or of heads


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The folder or GGUF file of a model given by embedded name, path or hub name; downloaded where it has to be.

    Raises ModelNotFoundError, which lists what was tried.
    """
    name = str(name_or_path)
    found = find_local(name)
    if found is not None:
        return found
    folder = Path(os.path.expanduser(name))
    if os.path.islink(folder) and not os.path.exists(folder):
        raise ModelNotFoundError(
            f"{folder} is a link to {os.readlink(folder)}, where nothing is: set the link again, or name another model"
        )
    is_other = os.path.isfile(folder)
    tried = [f"a folder {folder}{f' ({_what_file(folder)})' if is_other else ''}"]
    asked = None if is_other else HubName.parse(name)
    if asked is not None:
        try:
            return download(asked, progress)
        except NoRepositoryError as error:
            tried.append(str(error))
    like = suggestion(name, _known(folder)) or suggestion(folder.name, EMBEDDED)
    raise ModelNotFoundError(
        f"there is no model {name!r}; tried {'; '.join(tried)}; the embedded models are {', '.join(EMBEDDED)}{like}"
    )


def _what_file(path: Path) -> str:
    """What to do about a file that was given as a model."""
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return f"it is a GGUF file without that ending: rename it to {path.name}.gguf"
    return "it is a file: give the folder, or a .gguf file"


def find_local(name: str) -> Path | None:
    """A model's path on this machine; None if it is not here, or incomplete. Raises ModelNotFoundError."""
    if name in EMBEDDED:
        return _embedded(name)
    path = Path(os.path.expanduser(name))
    if name and (os.path.isdir(path) or (path.suffix.lower() == ".gguf" and os.path.isfile(path))):
        return path
    asked = HubName.parse(name)
    return None if asked is None else find_cached(asked)


def is_model(text: str) -> bool:
    """Whether a text names a model: an embedded one, a path, a folder or file of one, or a hub model in the cache.

    Raises ModelNotFoundError for ORGANISATION/NAME that is not in the cache: it may be a model or a text.
    """
    if text in EMBEDDED or PATH.fullmatch(text) or any(os.path.isfile(os.path.join(text, name)) for name in CONFIGS):
        return True
    asked = HubName.parse(text)
    if asked is None:
        return False
    if find_cached(asked, complete=False) is not None:
        return True
    if "/" in asked.repository:
        raise ModelNotFoundError(
            f"{text} is a text, or a model of the hub that was not downloaded yet: get the model with `forerun pull "
            f"{text}`, or give the text after a model's name, such as `forerun generate mini {text}`"
        )
    return False


def _known(folder: Path) -> Iterator[str]:
    """Names that may have been meant: embedded and cached models, and models beside the folder."""
    yield from EMBEDDED
    yield from (model.name for model in cached_models())
    for beside in folder.parent.glob("*") if os.path.isdir(folder.parent) else ():
        if beside.suffix.lower() == ".gguf" or any((beside / name).is_file() for name in CONFIGS):
            yield str(beside)


def _embedded(name: str) -> Path:
    folder = Path(forerun.__file__).parent / EMBEDDED[name]
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(
            f"the embedded model {name!r} is missing from this installation ({folder}); install forerun again"
        )
    return folder
