"""The tier on disk: a file a record, named by its key, in a folder that several processes may share.

Knows: files, checksums, the bound on all of them, what to do when the disk is full. Does not know: what is in a record.

A file is written under another name, then renamed: whatever kills a process, a file is whole or not there. One that is
not all the same (a power cut, a bad disk) fails its checksum, is removed and counts as missing. Nothing is kept in
memory about which files there are, so that a process finds what others wrote. A file's time says when it was last used,
less 10 ms for each block in front of it: of blocks written or read at one go the last are removed first. All changes
are made under one lock file, which also guards `usage`, the bytes that all files take. Only the user may read it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
from filelock import FileLock, Timeout

from forerun.cache.tiers import Bytes, Record, TierStats
from forerun.errors import ConfigError

MAGIC: Final = b"frkv0001"
PAGE: Final = 4096  # files take whole pages
LOCK_S: Final = 10.0  # how long a writer waits for another process, and then does without
REST_S: Final = 60.0  # how long nothing is written after an error, the first time
LONGEST_REST_S: Final = 3600.0
ROOM: Final = 0.1  # share of the bound that is freed at a time, since that takes a look at every file
_DEPTH_NS: Final = 10_000_000  # more than writing a block takes, and little beside the age of what goes
_SUFFIX, _NEW = ".kv", ".new"
_SUM = 32

log = logging.getLogger("forerun.cache")


def check_folder(folder: str | Path) -> Path:
    """The folder of all tiers' files inside the one that is given, made if need be. Raises ConfigError."""
    own = Path(folder).expanduser() / "forerun-kv"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        own.chmod(0o700)
        probe = own / f"probe-{os.getpid()}{_NEW}"
        with open(os.open(probe, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(MAGIC)
        probe.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"kv_disk: cannot write in the folder {folder}: {error}; choose another") from error
    return own


class DiskTier:
    """Records in files below `folder`, of at most `max_bytes` together with those of other models and processes."""

    name = "disk"

    def __init__(
        self, folder: Path, max_bytes: int, about: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`about`: what the keys hold for, for people to read. Raises ConfigError for a folder that cannot be used."""
        self.folder, self.max_bytes = folder, max_bytes
        self.stats = TierStats()
        self._top, self._clock = check_folder(folder), clock
        name = hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()[:16]
        self._own = self._top / name
        self._lock = FileLock(self._top / "lock", timeout=LOCK_S, mode=0o600)
        self._about = json.dumps(dict(about), indent=1).encode()
        self._rests_until, self._rest_s = 0.0, REST_S
        self._has_told = False  # that files cannot be read
        try:
            self._make_folders()
            with suppress(Timeout), self._lock:  # while others write, files are counted when there is one to write
                self._describe()
                self._free(self.max_bytes)
        except OSError as error:
            raise ConfigError(f"kv_disk: cannot use the folder {folder}: {error}; choose another") from error

    def _make_folders(self) -> None:
        """As in the beginning, if somebody has removed them since."""
        for folder in (self._top, self._own):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _describe(self) -> None:
        """Under the lock."""
        if not (self._own / "about.json").exists():
            _write(self._own / "about.json", self._about)

    @property
    def is_open(self) -> bool:
        """Whether it takes records now: not for a while after an error."""
        return self._clock() >= self._rests_until

    def has(self, key: bytes) -> bool:
        """See `Tier`."""
        return os.path.exists(self._path(key))

    def put(self, key: bytes, record: Record, depth: int) -> bool:
        """See `Tier`."""
        if not self.is_open:
            return False
        path = self._path(key)
        if _is_as_good(path, key, record) and self.touch(key, depth):
            return True
        header = record.header(key)
        body = b"".join((len(header).to_bytes(4, "little"), header, record.payload.data))
        try:
            self._make_folders()
            with self._lock:
                self._describe()
                kept = self._put(path, hashlib.sha256(body).digest(), body, depth)
        except Timeout:  # no error of the disk; but to wait for each of many records would take hours
            self._rests_until = self._clock() + LOCK_S
            return False
        except OSError as error:
            self._rest(error)
            return False
        self._rest_s = REST_S
        if kept:
            self.stats.stored_blocks += 1
            self.stats.stored_bytes += len(body)
        return kept

    def _put(self, path: Path, checksum: bytes, body: bytes, depth: int) -> bool:
        """Under the lock."""
        size = _on_disk(len(MAGIC) + len(checksum) + len(body))
        old = _size_of(path)
        used = self._used() - old
        if used + size > self.max_bytes:
            used = self._free(max(self.max_bytes - size - int(ROOM * self.max_bytes), 0), beside=path) - _size_of(path)
            if used + size > self.max_bytes:
                return False
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write(path, MAGIC, checksum, body)
        _set_time(path, depth)
        self._set_used(used + size)
        return True

    def get(self, key: bytes, depth: int) -> Record | None:
        """See `Tier`."""
        path = self._path(key)
        try:
            content = np.fromfile(path, dtype=np.uint8)
            record = _read(content, key)
        except FileNotFoundError:
            return None
        except OSError as error:  # the file may be whole: there may be too many open ones
            self._tell(path, error)
            return None
        except (ValueError, KeyError, TypeError) as error:
            self._drop(path, error)
            return None
        with suppress(OSError):
            _set_time(path, depth)
        self.stats.loaded_blocks += 1
        self.stats.loaded_bytes += len(content)
        return record

    def touch(self, key: bytes, depth: int) -> bool:
        """See `Tier`."""
        try:
            _set_time(self._path(key), depth)
        except OSError:
            return False
        return True

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / (name + _SUFFIX)

    # -- what goes wrong ----------------------------------------------------------------------------------------

    def _tell(self, path: Path, error: OSError) -> None:
        if not self._has_told:
            log.warning("a block of KV in %s cannot be read (%s): what cannot be read is computed again", path, error)
        self._has_told = True

    def _drop(self, path: Path, error: Exception) -> None:
        """A damaged file: it is removed, and what it held is computed again."""
        self.stats.corrupted_blocks += 1
        log.warning("a block of KV in %s is damaged (%s): it is dropped, and computed again", path, error)
        with suppress(OSError, Timeout), self._lock:
            size = _size_of(path)
            path.unlink(missing_ok=True)
            self._set_used(max(self._used() - size, 0))

    def _rest(self, error: Exception) -> None:
        """Nothing is written for a while; requests go on, and what is there is still read."""
        self.stats.failed_writes += 1
        self._rests_until = self._clock() + self._rest_s
        log.warning(
            "the KV tier in %s cannot be written (%s): no block is stored for %.0f s; requests go on",
            self._top, error, self._rest_s,
        )  # fmt: skip
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    # -- the bound, under the lock ------------------------------------------------------------------------------

    def _used(self) -> int:
        try:
            return int((self._top / "usage").read_text("ascii"))
        except (OSError, ValueError):
            return self._free(self.max_bytes)

    def _set_used(self, num_bytes: int) -> None:
        _write(self._top / "usage", str(num_bytes).encode())
        self.stats.used_bytes = num_bytes

    def _free(self, max_bytes: int, beside: Path | None = None) -> int:
        """Look at every file and remove the least recently used until the rest takes at most `max_bytes` -> the rest.

        `beside`: a file that is not removed and does not count.
        """
        found = sorted(self._files())
        used = sum(size for _, size, path in found if path != str(beside))
        for _, size, path in found:
            if used <= max_bytes:
                break
            if path != str(beside):
                os.unlink(path)
                used -= size
                self.stats.evicted_blocks += 1
        used += 0 if beside is None else _size_of(beside)
        self._set_used(used)
        return used

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Time of use, bytes and path of every file of every model; files that nobody finished are removed."""
        for folder, _, names in os.walk(self._top):
            for name in names:
                path = os.path.join(folder, name)
                with suppress(FileNotFoundError):
                    if name.endswith(_NEW):  # its writer died: living ones hold the lock
                        os.unlink(path)
                    elif name.endswith(_SUFFIX):
                        stat = os.stat(path)
                        yield stat.st_mtime_ns, _on_disk(stat.st_size), path


def _read(content: Bytes, key: bytes) -> Record:
    """A file's record. Raises ValueError, KeyError or TypeError for one that is not as it was written."""
    start = len(MAGIC) + _SUM
    if content[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError("not a file of this format")
    if hashlib.sha256(content[start:].data).digest() != content[len(MAGIC) : start].tobytes():
        raise ValueError("its checksum is wrong")
    size = int.from_bytes(content[start : start + 4].tobytes(), "little")
    header, payload = content[start + 4 : start + 4 + size], content[start + 4 + size :]
    return Record.read(header.tobytes(), payload, key)


def _is_as_good(path: Path, key: bytes, record: Record) -> bool:
    """Whether the file has a record of this key, by its header, that is not worse."""
    start = len(MAGIC) + _SUM
    try:
        with path.open("rb") as file:
            head = file.read(start + 4)
            header = file.read(int.from_bytes(head[start:], "little"))
            size = os.fstat(file.fileno()).st_size - len(head) - len(header)
        return head.startswith(MAGIC) and not record.is_better_than(Record.read(header, np.empty(size, np.uint8), key))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(path: Path, *parts: bytes) -> None:
    """Replace a file whole."""
    new = path.with_name(path.name + _NEW)
    try:
        with open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise


def _set_time(path: Path, depth: int) -> None:
    used_ns = time.time_ns() - depth * _DEPTH_NS
    os.utime(path, ns=(used_ns, used_ns))


def _size_of(path: Path) -> int:
    try:
        return _on_disk(path.stat().st_size)
    except FileNotFoundError:
        return 0


def _on_disk(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
