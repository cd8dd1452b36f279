"""Whose a folder of batches is: one server or deployment, and of its processes one at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from errno import ENOLCK, ENOSYS
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.errors import ConfigError
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batch_owner import BatchOwner
from forerun.server.batches import BatchServer
from forerun.server.stored_files import FileStore
from tests.server.test_batches import answering


def jobs(folder: Path, deployment: str | None) -> BatchJobs:
    app, _ = answering(200)
    server = BatchServer(app, lambda: True)
    return BatchJobs(folder / "batches", FileStore(folder / "files", 1000), server, lambda: 1, 1000, 1.0, deployment)


def test_one_process_of_a_deployment_is_the_owner(tmp_path: Path) -> None:
    one, other = (BatchOwner(tmp_path, "chat") for _ in range(2))
    assert one.take() and one.is_still() and not other.take() and not other.is_still()
    one.let_go()
    assert not one.is_still() and other.take() and other.is_still() and not one.take()


def test_an_owner_whose_lock_another_one_got_knows_it(tmp_path: Path) -> None:
    """As where the server of a network file system takes it back from a process that it cannot reach."""
    one, other = (BatchOwner(tmp_path, "chat") for _ in range(2))
    assert one.take()
    (tmp_path / "in-use.lock").unlink()
    assert other.take() and other.is_still() and not one.is_still()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (None, "application a, model m"),
        ("application a, model m", None),
        ("application a, model m", "application b, model m"),
        ("application a, model m", "application a, model n"),
    ],
)
def test_a_folder_has_one_user(first: str | None, second: str | None, tmp_path: Path) -> None:
    """Also while the other one is there, which may hold the lock or not."""
    kept = jobs(tmp_path, first)
    with pytest.raises(ConfigError, match=r"the folder of batches .* is that of forerun .* delete .*used-by"):
        jobs(tmp_path, second)
    (tmp_path / "used-by").write_text("")  # by a process that was killed
    kept._owner.let_go()
    jobs(tmp_path, second)._owner.let_go()


def failing(number: int) -> Callable[..., None]:
    def lock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return lock


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("number", [ENOLCK, ENOSYS])
def test_a_folder_that_cannot_be_locked_is_refused_at_the_start(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of a deployment would not know of the others."""
    monkeypatch.setattr(fcntl, "flock", failing(number))
    with pytest.raises(ConfigError, match="cannot keep batches in .*choose another folder"):
        jobs(tmp_path, "application a, model m")
