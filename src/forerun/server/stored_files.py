"""Files that clients upload and batches write, in one folder: bytes, and beside them what is known of each.

Knows: names, sizes, how a folder is read again after a restart or when other processes use it, too. Does not know: what
is in a file, HTTP.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from uuid import uuid4

from pydantic import TypeAdapter

from forerun.errors import ConfigError
from forerun.server.errors import ApiError

PURPOSES: Final = ("batch",)  # of uploads; what a batch writes has "batch_output"
MAX_NAME: Final = 255  # characters of a file's name that are kept
MAX_PAGE: Final = 10_000  # entries of a list
STEP_BYTES: Final = 4 << 20  # read or written at a time
log = logging.getLogger("forerun.server")
_ID: Final = re.compile(r"file-[0-9a-f]{24}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    tenant: str  # whose it is, as in auth.TENANT

    def said(self) -> dict[str, Any]:
        """The file object of OpenAI's API."""
        told = {name: value for name, value in asdict(self).items() if name != "tenant"}
        return {**told, "object": "file", "status": "processed"}


_ABOUT: Final = TypeAdapter(StoredFile)


class FileStore:
    """Files in a folder, at most `max_bytes` of uploads. Used by one thread at a time.

    Raises ConfigError for a folder it cannot use.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._files: dict[str, StoredFile] = {}
        self._damaged: set[str] = set()  # ids of those of which nothing can be read
        self._coming = 0  # bytes that are being copied
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._refresh()
        except OSError as error:
            raise ConfigError(f"cannot keep files in {folder}: {error}; choose another folder") from error

    def drop_unfinished(self, kept: Collection[str], age_s: float) -> None:
        """Delete what a process that was killed left: bytes of no file, that old, but those with the ids `kept`."""
        self._refresh()
        known, until_s = {*self._files, *self._damaged, *kept}, time.time() - age_s
        for path in (*self._folder.glob("*.jsonl"), *self._folder.glob("*.new")):
            if path.suffix == ".new" or path.stem not in known:
                with suppress(FileNotFoundError):  # another process has finished or deleted it
                    if path.stat().st_mtime <= until_s:
                        path.unlink()

    def _refresh(self) -> None:
        """Learn which files other processes have added and deleted."""
        there = {path.stem for path in self._folder.glob("*.json")}
        for file_id in (*there.difference(self._files), *set(self._files).difference(there)):
            self._look(file_id)

    def _look(self, file_id: str) -> StoredFile | None:
        """What is known of a file now; a damaged one is logged, and counts as missing."""
        about = self._folder / f"{file_id}.json"
        if not _ID.fullmatch(file_id) or not about.exists() or not self.path(file_id).exists():
            self._files.pop(file_id, None)
        elif file_id not in self._files:
            try:
                self._files[file_id] = _ABOUT.validate_json(about.read_bytes())
                self._damaged.discard(file_id)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                if file_id not in self._damaged:
                    log.warning(
                        "what is known of a file cannot be read", extra={"file": str(about), "why": repr(error)}
                    )
                self._damaged.add(file_id)
        return self._files.get(file_id)

    @property
    def num_left(self) -> int:
        """Bytes that may still be uploaded."""
        self._refresh()
        uploaded = sum(file.bytes for file in self._files.values() if file.purpose in PURPOSES)
        return max(0, self._max_bytes - uploaded - self._coming)

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are."""
        return self._folder / f"{file_id}.jsonl"

    def add(
        self, source: BinaryIO, size: int, filename: str, purpose: str, tenant: str
    ) -> Generator[StoredFile | None, None, None]:
        """Steps that keep a copy of what is read, so many bytes; the last gives it. Raises ApiError without room."""
        if size > self.num_left:
            told = f"the file has {size} bytes, there is room for {self.num_left}: delete others"
            raise ApiError(413, f"{told}, or raise the server's --max-batch-bytes", param="file", code="no_room")
        self._coming += size
        file_id = new_id("file-")
        path = self.path(file_id)
        try:
            with path.open("wb") as file:
                while piece := source.read(STEP_BYTES):
                    file.write(piece)
                    file.flush()
                    os.fsync(file.fileno())  # now, so that the last step has no more to do
                    yield None
            kept = self.adopt(file_id, filename, purpose, tenant)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ApiError(500, f"the file cannot be kept: {error.strerror or error}", code="no_room") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            self._coming -= size
        yield kept

    def adopt(self, file_id: str, filename: str, purpose: str, tenant: str) -> StoredFile:
        """Make the bytes that are at a file's path a file that clients see."""
        size, name = self.path(file_id).stat().st_size, filename.encode("utf-8", "replace").decode()
        found = StoredFile(file_id, name[:MAX_NAME], purpose, size, int(time.time()), tenant)
        write_json(self._folder / f"{file_id}.json", asdict(found))
        self._files[file_id] = found
        return found

    def get(self, file_id: str, tenant: str, param: str = "file_id") -> StoredFile:
        """What is known of a tenant's file. Raises ApiError 404."""
        found = self._look(file_id)
        if found is None or found.tenant != tenant:
            raise self._none(file_id, param)
        return found

    @staticmethod
    def _none(file_id: str, param: str) -> ApiError:
        return ApiError(404, f"there is no file {file_id[:100]!r} here", param=param, code="file_not_found")

    def open(self, file_id: str, tenant: str) -> tuple[str, int, BinaryIO]:
        """A tenant's file to be read: its name, bytes, and content. Raises ApiError 404."""
        found = self.get(file_id, tenant)
        try:
            file = self.path(file_id).open("rb")
        except FileNotFoundError as error:  # another process has deleted it since
            raise self._none(file_id, "file_id") from error
        return found.filename, os.fstat(file.fileno()).st_size, file

    def delete(self, file_id: str) -> None:
        """Forget a file that is there."""
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)
        self._files.pop(file_id, None)

    def all(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the last one first."""
        self._refresh()
        found = [file for file in self._files.values() if file.tenant == tenant]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)


def new_id(prefix: str) -> str:
    """A random id."""
    return prefix + uuid4().hex[:24]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file at once: a reader, or a start after a crash, finds the old value or the new one."""
    fresh = path.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def page(entries: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """A page of a list in OpenAI's API: `limit` entries behind the one with the id `after`. Raises ApiError 400."""
    if not 1 <= limit <= MAX_PAGE:
        raise ApiError(400, f"limit must be from 1 to {MAX_PAGE}; got {limit}", param="limit")
    ids = [entry["id"] for entry in entries]
    if after is not None and after not in ids:
        raise ApiError(400, f"after must be the id of an entry of this list; got {after[:100]!r}", param="after")
    first = 0 if after is None else ids.index(after) + 1
    shown = entries[first : first + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": list(shown), **ends, "has_more": len(entries) > first + limit}
