"""Whose a folder of batches is, and which of several processes answers them.

Knows: locks, and two small files in the folder. Does not know: batches.

`used-by` names the one server or deployment whose folder it is. Of a deployment's processes one is the owner: it holds
a lock, which the system takes back when it ends. The system of a network may also take it from a process that lives, if
that one cannot be reached for a while; so the owner writes its name into `owner`, and looks there before it writes a
state.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from filelock import FileLock, SoftFileLock, Timeout

from forerun.errors import ConfigError

CLAIM_S: Final = 10.0  # for another process that looks whose the folder is


class BatchOwner:
    """One process among those that use a folder."""

    def __init__(self, folder: Path, deployment: str | None) -> None:
        """`deployment`: whose processes use the folder; None: this process does, alone.

        Raises ConfigError for a folder of others, or one where processes cannot lock each other out; OSError.
        """
        self._folder, self._name, self._file = folder, uuid4().hex, folder / "owner"
        self.is_shared, self.holds = deployment is not None, False  # the latter: from `take` until `let_go`
        self._lock = FileLock(folder / "in-use.lock", thread_local=False)
        folder.mkdir(parents=True, exist_ok=True)
        self._claim("forerun serve" if deployment is None else f"forerun deploy, {deployment}")

    def _claim(self, user: str) -> None:
        lock, mark = FileLock(self._folder / "used-by.lock", timeout=CLAIM_S), self._folder / "used-by"
        try:
            with lock:
                if isinstance(lock, SoftFileLock) and self.is_shared:  # what filelock falls back to
                    raise OSError("its file system has no locks that end with a process")
                found = mark.read_text("utf-8", "replace") if mark.exists() else ""
                if not found:  # or a process ended while it wrote
                    mark.write_text(user, "utf-8")
        except (Timeout, NotImplementedError) as error:
            raise OSError(f"its file system cannot lock files: {error}") from error
        if found not in ("", user):
            raise ConfigError(
                f"the folder of batches {self._folder} is that of {found}, but this is {user}: give each a batch_dir "
                f"of its own; if the former is no more, delete {mark}"
            )

    def take(self) -> bool:
        """Become the owner; False if another process is. Raises OSError if nothing can be written there."""
        try:
            self._lock.release(force=True)  # where `let_go` could not: what it left is no lock that the system knows
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        try:
            if self.is_shared:
                self._file.write_text(self._name, "utf-8")
        except OSError:
            self.let_go()
            raise
        self.holds = True
        return True

    def is_still(self) -> bool:
        """Whether this process is the owner, and no other has become it meanwhile."""
        return self.holds and (not self.is_shared or self._file.read_bytes() == self._name.encode())

    def let_go(self) -> None:
        """Be the owner no more."""
        self.holds = False
        with suppress(OSError):  # of a file system that is gone, and the lock with it
            self._lock.release(force=True)
