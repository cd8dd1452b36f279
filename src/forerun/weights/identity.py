"""What tells the weights of one model from those of every other: a hash of all bytes of its files.

Knows: which files of a folder decide what a model computes, and that a file of the same size, time and inode was hashed
already. Does not know: what is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, Final

from forerun.config import cache_folder

SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".npz")
KEPT_FROM: Final = 1 << 20  # bytes of files whose hashes are kept; smaller ones are read again
_PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # of a model in several files
_THREADS: Final = 4  # hashing does not hold Python's lock

Stamp = tuple[str, int, int, int]  # name, bytes, time of the last change in ns, inode


def stamps_of(path: Path) -> tuple[Stamp, ...]:
    """What a model's or adapter's files look like from outside; equal while nobody has changed or replaced one."""
    found = []
    for file in _files(path):
        found.append((_name(file, path), *_state(file)))
    return tuple(found)


def digest_of(path: Path) -> str:
    """A hash over names and bytes of a model's files, or of one file. Reads them all, once for each state they are in.

    Raises OSError for files that cannot be read.
    """
    files = list(_files(path))
    known = _read_known()
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = list(pool.map(lambda file: _hash_of(file, known), files))
    _keep(known, files, hashes)
    whole = [(_name(file, path), each) for file, each in zip(files, hashes, strict=True)]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def code_digest(package: Path) -> str:
    """A hash over the modules and extensions of an installed package: other code may compute other bits."""
    whole = hashlib.sha256()
    for file in sorted(each for suffix in ("*.py", "*.so", "*.pyd") for each in package.rglob(suffix)):
        whole.update(f"{file.relative_to(package).as_posix()}\n{hash_of_file(file)}\n".encode())
    return whole.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        part = _PART.fullmatch(path.name)
        yield from [path] if part is None else sorted(path.parent.glob(f"{escape(part[1])}-?????-of-{part[2]}.gguf"))
        return
    yield from sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())


def _name(file: Path, path: Path) -> str:
    return "" if file == path else file.name


def _hash_of(file: Path, known: dict[str, Any]) -> str:
    """The file's hash, from `known` if it was hashed in this state."""
    kept = known.get(str(file.resolve()))
    if isinstance(kept, list) and kept[:-1] == [*_state(file)] and isinstance(kept[-1], str):
        return kept[-1]
    return hash_of_file(file)


def hash_of_file(file: Path) -> str:
    """SHA-256 of all its bytes. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _read_known() -> dict[str, Any]:
    with suppress(OSError, ValueError):
        known = json.loads((cache_folder() / "digests.json").read_text("utf-8"))
        return known if isinstance(known, dict) else {}
    return {}


def _keep(known: dict[str, Any], files: list[Path], hashes: list[str]) -> None:
    """Write down the hashes of large files; where that cannot be done they are read again next time."""
    large = [(file, each) for file, each in zip(files, hashes, strict=True) if file.stat().st_size >= KEPT_FROM]
    new = {str(file.resolve()): [*_state(file), each] for file, each in large}
    if all(known.get(name) == entry for name, entry in new.items()):
        return
    alive = {name: entry for name, entry in known.items() if os.path.exists(name)}
    with suppress(OSError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".new")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump({**alive, **new}, file)
        os.replace(name, folder / "digests.json")
