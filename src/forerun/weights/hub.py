"""Models of a Hugging Face hub: which files of a repository a name selects, and what this machine's cache holds.

Knows: huggingface_hub's cache, how GGUF files are named. Does not know: downloading (`weights.hub_download`), what is
in a file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import ModelNotFoundError, suggestion

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
WEIGHTS = ("*.safetensors", "*.bin", "medusa_lm_head.pt")  # a repository's model is of the first kind it has
COPIES = ("original/*", "consolidated*", "onnx/*", "training_args.bin")  # other layouts of the same weights
TOKENIZERS = ("tokenizer", "vocab", "spiece")  # how the names of their files begin
USUAL_QUANT = "Q4_K_M"
_NAME = re.compile(r"((?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?)(?::([\w./-]+))?", re.ASCII)
_LONGEST = 96  # letters of a repository
_QUANT = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:(?:IQ|TQ|Q)\d\w*|MXFP4\w*|BF16|FP?16|FP?32))(?![A-Z0-9_])", re.IGNORECASE
)
_DYNAMIC = "ud-"  # before the quantization of Unsloth's files; may be left out where no other file has that one
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # GGUF files in model repositories that are not models


class HubName(NamedTuple):
    """ORGANISATION/NAME, with :QUANT or :FILE where it picks one of several GGUF models."""

    repository: str
    file: str | None = None

    @staticmethod
    def parse(text: str) -> HubName | None:
        """Read a text as a hub name; None if it cannot be one."""
        match = _NAME.fullmatch(text)
        if match is None or len(match[1]) > _LONGEST or "--" in match[1] or ".." in match[1]:
            return None
        return HubName(match[1], match[2])

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


class CachedModel(NamedTuple):
    """A model in the cache: a repository, or one of its GGUF models."""

    name: str
    kind: str  # "safetensors", "pytorch", "gguf", or "incomplete"
    num_bytes: int
    last_used: float  # seconds since 1970


def choose_files(name: HubName, files: Iterable[str]) -> list[str]:
    """Which of a repository's files make up the model; for a GGUF model, its parts in order.

    Raises ModelNotFoundError, which lists what there is.
    """
    listed = sorted(files)
    folder, models = _folder_files(listed), gguf_models(listed)
    if folder and name.file is None:
        return folder
    if not models:
        what = "GGUF files" if name.file else "weights"
        raise ModelNotFoundError(f"{name.repository} holds no {what}, only {', '.join(listed[:8]) or 'nothing'}")
    wanted = (name.file or USUAL_QUANT).lower()
    found = [label for label, parts in models.items() if wanted in (label.lower(), parts[0].lower())]
    found = found or [label for label in models if wanted == label.lower().removeprefix(_DYNAMIC)]
    if not found and name.file is None and len(models) == 1:
        found = list(models)
    if not found:
        has = f"has no {name.file}" if name.file else "holds several models"
        like = suggestion(name.file, models) if name.file else f": write {name.repository}:{next(iter(models))}, say"
        raise ModelNotFoundError(f"{name.repository} {has}, it has {', '.join(models)}{like}")
    return models[found[0]]


def gguf_models(files: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among a repository's files: the label after the colon of a hub name -> the parts in order.

    The label is the quantization, such as Q4_K_M, or the file's name if it names none or two files name the same.
    """
    parts: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not PurePosixPath(file).name.lower().startswith(_NO_MODELS):
            parts.setdefault(_PART.sub("", file), []).append(file)
    quants = {file: [found.upper() for found in _QUANT.findall(PurePosixPath(file).stem)][-1:] for file in parts}
    return {
        quant[0] if quant and list(quants.values()).count(quant) == 1 else file: parts[file]
        for file, quant in quants.items()
    }


def _folder_files(files: Sequence[str]) -> list[str]:
    """The files of a model in Hugging Face layout, [] if there are no such weights."""
    own = [file for file in files if _is_own(file)]
    for kind in WEIGHTS:
        if any(fnmatch(file, kind) for file in own):
            return [file for file in own if any(fnmatch(file, pattern) for pattern in (*SMALL_FILES, kind))]
    return []


def _is_own(file: str) -> bool:
    """Whether a file may be part of a model, which lies at the top: weights in folders are checkpoints and copies."""
    name = PurePosixPath(file).name
    is_weight = any(fnmatch(name, kind) for kind in WEIGHTS) or name.endswith(".index.json")
    is_inside = "/" in file and is_weight and not name.startswith("adapter_")
    return not is_inside and not any(fnmatch(file, pattern) for pattern in COPIES)


def find_cached(name: HubName, complete: bool = True) -> Path | None:
    """A model's folder or GGUF file in the cache, None if it is not there.

    complete: a tokenizer must be there, too; else configuration and weights are enough, as for a draft head.
    """
    folder = _snapshot(name.repository)
    if folder is None:
        return None
    try:
        files = choose_files(name, (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()))
    except ModelNotFoundError:
        return None
    if files[0].lower().endswith(".gguf"):
        return folder / files[0] if _has_all_parts(files) else None
    has_tokenizer = any(PurePosixPath(file).name.startswith(TOKENIZERS) for file in files)
    return folder if _has_all_shards(folder, files) and (has_tokenizer or not complete) else None


def _storage(repository: str) -> Path:
    """Where the cache keeps a repository, without importing the library's download code and its dependencies."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / "--".join(("models", *repository.split("/")))


def _snapshot(repository: str) -> Path | None:
    """The folder of a repository's latest downloaded revision."""
    storage = _storage(repository)
    try:
        folder = storage / "snapshots" / (storage / "refs" / "main").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return folder if folder.is_dir() else None


def _has_all_parts(files: Sequence[str]) -> bool:
    count = re.search(r"-of-(\d{5})\.gguf$", files[0], re.IGNORECASE)
    return count is None or len(files) == int(count[1])


def _has_all_shards(folder: Path, files: Sequence[str]) -> bool:
    """Whether all files named in a weight index are there, or the file of a model that is in one."""
    indices = [file for file in files if file.endswith((".safetensors.index.json", ".bin.index.json"))]
    suffixes = {PurePosixPath(file).suffix for file in files}
    try:
        for index in indices:
            named = {
                PurePosixPath(shard) for shard in json.loads((folder / index).read_text("utf-8"))["weight_map"].values()
            }
            has_all = all((folder / shard).is_file() for shard in named if shard.suffix in suffixes)
            if not has_all and index.removesuffix(".index.json") not in files:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def cached_models() -> list[CachedModel]:
    """The models in the cache, sorted by name, incomplete ones included."""
    return sorted(model for repository in _cached_repositories() for model in _models_of(repository))


def remove_cached(name: HubName) -> int:
    """Delete a model from the cache -> bytes freed. Raises ModelNotFoundError if it is not there."""
    repository = next((found for found in _cached_repositories() if found.repo_id == name.repository), None)
    storage = _storage(name.repository)
    if repository is None and not storage.is_dir():
        like = suggestion(str(name), (model.name for model in cached_models()))
        raise ModelNotFoundError(f"{name} is not in the cache; `forerun list` says what is{like}")
    before = _bytes_below(storage)
    if repository is None:  # nothing but the beginning of a download
        shutil.rmtree(storage)
    else:
        _remove(repository, name)
    return before - _bytes_below(storage)


Blobs = Mapping[str, Mapping[Path, int]]  # file of a repository -> path of its contents (all revisions) -> bytes


def _cached_repositories() -> list[CachedRepoInfo]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return [found for found in scan_cache_dir().repos if found.repo_type == "model"]
    except CacheNotFound:
        return []


def _blobs(repository: CachedRepoInfo) -> Blobs:
    result: dict[str, dict[Path, int]] = {}
    for revision in repository.revisions:
        for file in revision.files:
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            result.setdefault(name, {})[file.blob_path] = file.size_on_disk
    return result


def _models_of(repository: CachedRepoInfo) -> Iterator[CachedModel]:
    blobs = _blobs(repository)
    models, own = gguf_models(blobs), _folder_files(sorted(blobs))
    for label, parts in models.items():
        yield _cached(repository, f"{repository.repo_id}:{label}", "gguf", blobs, parts)
    if own or not models:
        kind = "safetensors" if any(file.endswith(".safetensors") for file in own) else "pytorch"
        yield _cached(repository, repository.repo_id, kind, blobs, own or list(blobs))


def _cached(repository: CachedRepoInfo, name: str, kind: str, blobs: Blobs, files: Sequence[str]) -> CachedModel:
    asked = HubName.parse(name)
    is_whole = asked is not None and find_cached(asked, complete=False) is not None
    num_bytes = sum({blob: size for file in files for blob, size in blobs[file].items()}.values())
    return CachedModel(name, kind if is_whole else "incomplete", num_bytes, repository.last_accessed)


def _remove(repository: CachedRepoInfo, name: HubName) -> None:
    """Delete a repository, or only the named one of its GGUF models."""
    from huggingface_hub import scan_cache_dir

    blobs = _blobs(repository)
    gone = list(blobs) if name.file is None else choose_files(name, blobs)
    rest = [file for file in blobs if file not in gone]
    if not gguf_models(rest) and not _folder_files(rest):
        scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in repository.revisions)).execute()
        return
    kept = {blob for file in rest for blob in blobs[file]}
    for revision in repository.revisions:
        for file in gone:
            (revision.snapshot_path / file).unlink(missing_ok=True)
    storage = _storage(name.repository).resolve()
    for blob in {blob for file in gone for blob in blobs[file]} - kept:
        if blob.is_relative_to(storage):  # otherwise it links to one of the user's own files
            blob.unlink(missing_ok=True)


def _bytes_below(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
