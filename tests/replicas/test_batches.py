"""/v1/files and /v1/batches in front of replicas: the bytes of `forerun batch`, by whichever of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun.errors import ResourceError
from forerun.replicas import fleet as fleets
from forerun.server import batch_jobs, folder_thread
from forerun.server.batch_files import AnswerFile
from forerun.server.stored_files import FileStore
from tests.replicas.conftest import InProcess, fleet_client
from tests.server.conftest import wait_until
from tests.server.test_batch_api import data_of, ended, start, until, upload
from tests.server.test_batch_hangs import Hang, check_a_hang
from tests.server.test_batches import CHAT, batch, chat_row, rows, write

__all__ = ["batch"]  # a fixture


@pytest.fixture(autouse=True)
def quick(replicas: InProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fleets, "RETRY_S", 0.001)
    monkeypatch.setattr(batch_jobs, "LOOK_S", 0.02)
    replicas.orders.clear()
    yield
    replicas.lost = lambda order, said: False


def lines(client: TestClient, file_id: str) -> list[bytes]:
    return sorted(client.get(f"/v1/files/{file_id}/content").content.splitlines())


def many(num_rows: int, **fields: Any) -> list[Any]:
    return [chat_row(f"c{i}", f"Tell me about {i}.", **{"max_tokens": 16, **fields}) for i in range(num_rows)]


def by_command(batch: Callable[..., Any], folder: Path, given: list[Any]) -> list[bytes]:
    """What `forerun batch` writes."""
    batch(write(folder / "in.jsonl", given), folder / "out.jsonl")
    return sorted((folder / "out.jsonl").read_bytes().splitlines())


def test_answers_are_those_of_the_command_though_replicas_are_lost(
    replicas: InProcess, batch: Callable[..., Any], tmp_path: Path
) -> None:
    given = [row for row in rows() if row["url"] == CHAT]
    replicas.lost = lambda order, said: order % 3 == 0 and said == 2
    with fleet_client(replicas, batch_dir=tmp_path / "kept") as client:
        over = until(client, start(client, given)["id"], ended)
        assert over["request_counts"] == {"total": len(given), "completed": len(given), "failed": 0}
        assert lines(client, over["output_file_id"]) == by_command(batch, tmp_path, given)
    assert len(replicas.orders) > len(given)


def test_rows_take_half_of_the_seats_of_all_replicas(replicas: InProcess, tmp_path: Path) -> None:
    with fleet_client(replicas, batch_dir=tmp_path) as client:
        service: Any = client.app.state.service  # type: ignore[attr-defined]
        assert service.num_seats == 16 * 2
        most = 0
        made = start(client, many(24, max_tokens=60, ignore_eos=True))
        while client.get(f"/v1/batches/{made['id']}").json()["request_counts"]["completed"] < 8:
            most = max(most, service._num_open)
            time.sleep(0.001)
        client.post(f"/v1/batches/{made['id']}/cancel")
        until(client, made["id"], ended)
    assert 8 < most <= 16


def test_one_of_several_processes_answers_and_another_one_after_it(
    replicas: InProcess, batch: Callable[..., Any], tmp_path: Path
) -> None:
    given = many(24)
    with ExitStack() as first, ExitStack() as second:
        one = first.enter_context(fleet_client(replicas, batch_dir=tmp_path / "kept"))
        one_begins = start(one, given)
        other = second.enter_context(fleet_client(replicas, batch_dir=tmp_path / "kept"))
        assert other.get(f"/v1/files/{one_begins['input_file_id']}").json()["bytes"] == len(data_of(given))
        until(other, one_begins["id"], lambda job: job["request_counts"]["completed"] > 0)
        first.close()  # in the middle
        over = until(other, one_begins["id"], ended)
        assert over["status"] == "completed" and over["request_counts"]["completed"] == 24
        assert lines(other, over["output_file_id"]) == by_command(batch, tmp_path, given)
        third = second.enter_context(fleet_client(replicas, batch_dir=tmp_path / "kept"))
        made = start(third, given)  # by one that does not answer
        over = until(third, made["id"], ended)
        assert lines(third, over["output_file_id"]) == lines(other, over["output_file_id"])
        assert [each["id"] for each in third.get("/v1/batches").json()["data"]] == [made["id"], one_begins["id"]]
    assert len(replicas.orders) < 2 * 24 + 16  # no row is answered by two, but those that the first one left


CHILD = """
import asyncio, json, sys
from pathlib import Path
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batches import BatchServer
from forerun.server.stored_files import FileStore

num_answered = 0

async def app(scope, receive, send):  # answers three rows, then none
    global num_answered
    num_answered += 1
    if num_answered > 3:
        await asyncio.sleep(600)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"by": "the first owner"}'})

async def main(folder):
    files = FileStore(folder / "files", 1 << 20)
    server = BatchServer(app, lambda: True)
    jobs = BatchJobs(folder / "batches", files, server, lambda: 2, 1 << 20, 1.0, "tests")
    with open(sys.argv[2], "rb") as rows:
        *_, kept = files.add(rows, 0, "in.jsonl", "batch", "")
    print(jobs.create("/v1/chat/completions", kept.id, None).id, flush=True)
    await jobs.run()

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_another_process_goes_on_after_an_owner_that_was_killed(replicas: InProcess, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", many(8))
    command = [sys.executable, "-c", CHILD, str(tmp_path / "kept"), str(given)]
    with ExitStack() as stack:
        owner = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(owner.kill)
        assert owner.stdout is not None
        batch_id = owner.stdout.readline().strip()
        state = json.loads((tmp_path / "kept" / "batches" / f"{batch_id}.json").read_text())
        written = tmp_path / "kept" / "files" / f"{state['output_id']}.jsonl"
        assert wait_until(lambda: written.exists() and written.read_bytes().count(b"\n") == 3, 30)
        other = stack.enter_context(fleet_client(replicas, batch_dir=tmp_path / "kept"))
        time.sleep(10 * batch_jobs.LOOK_S)
        assert not ended(other.get(f"/v1/batches/{batch_id}").json()) and replicas.orders == []
        owner.kill()
        over = until(other, batch_id, ended)
        assert over["request_counts"] == {"total": 8, "completed": 8, "failed": 0}
        answers = [json.loads(line) for line in lines(other, over["output_file_id"])]
    assert sorted(line["custom_id"] for line in answers) == [f"c{i}" for i in range(8)]
    assert sum("by" in line["response"]["body"] for line in answers) == 3 and len(replicas.orders) == 5


def test_rows_wait_for_a_process_that_knows_the_new_replicas(
    replicas: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicas are of another model or release already, the owner is not."""
    with fleet_client(replicas, batch_dir=tmp_path) as before:
        for each in replicas.replicas.values():
            monkeypatch.setattr(each, "_kind", "another")
        made = start(before, many(6))
        owner = before.app.state.service  # type: ignore[attr-defined]
        assert wait_until(lambda: owner.moved._value.get() > 0 and owner._num_open == 0, 20)
        waiting = before.get(f"/v1/batches/{made['id']}").json()
        assert not ended(waiting) and waiting["request_counts"]["failed"] == 0
        with fleet_client(replicas, batch_dir=tmp_path) as after:
            over = until(before, made["id"], ended)
            assert over["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
            assert len(lines(after, over["output_file_id"])) == 6


def test_another_process_goes_on_where_the_owner_cannot_write(
    replicas: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "TRY_AGAIN_S", 600.0)  # the owner itself would take too long
    writes, write_line = count(), AnswerFile.write

    def full_once(self: AnswerFile, answer: dict[str, Any]) -> None:
        if next(writes) == 1:
            raise ResourceError("no space left")
        write_line(self, answer)

    monkeypatch.setattr(AnswerFile, "write", full_once)
    with fleet_client(replicas, batch_dir=tmp_path) as one, fleet_client(replicas, batch_dir=tmp_path):
        over = until(one, start(one, many(6))["id"], ended)
        assert over["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert len(lines(one, over["output_file_id"])) == 6


def test_an_owner_that_has_lost_the_lock_stops(
    replicas: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one to get the lock, here itself, goes on, and no row is answered twice."""
    monkeypatch.setattr(batch_jobs, "TRY_AGAIN_S", 0.05)
    monkeypatch.setattr(batch_jobs, "SAVE_S", 0.0)
    with fleet_client(replicas, batch_dir=tmp_path) as client:
        made = start(client, many(24, max_tokens=60, ignore_eos=True))
        until(client, made["id"], lambda job: job["request_counts"]["completed"] > 0)
        (tmp_path / "owner").write_text("somebody else")
        over = until(client, made["id"], ended)
        names = [json.loads(line)["custom_id"] for line in lines(client, over["output_file_id"])]
        assert over["request_counts"]["completed"] == 24 and sorted(names) == sorted(f"c{i}" for i in range(24))
    [said] = [record for record in caplog.records if record.message == "a batch waits"]
    assert "this one had lost the lock" in said.why  # type: ignore[attr-defined]


def test_a_folder_that_hangs_stops_no_stream_of_an_ingress(
    replicas: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.1)
    hang = Hang(monkeypatch, AnswerFile, "write")
    with fleet_client(replicas, batch_dir=tmp_path) as client:
        check_a_hang(client, hang)


def test_keys_see_their_own_batches_through_every_process(replicas: InProcess, tmp_path: Path) -> None:
    options = {"batch_dir": tmp_path, "api_keys": ("ours", "theirs")}
    ours, theirs = ({"Authorization": f"Bearer {key}"} for key in options["api_keys"])
    with fleet_client(replicas, **options) as one, fleet_client(replicas, **options) as other:
        one.headers.update(ours)
        other.headers.update(theirs)
        own, foreign = start(one, many(3)), start(other, many(2))
        for client, made, hidden in ((one, own, foreign), (other, foreign, own)):
            over = until(client, made["id"], ended)
            assert over["request_counts"]["completed"] == over["request_counts"]["total"] > 0
            assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [made["id"]]
            assert client.get(f"/v1/batches/{hidden['id']}").status_code == 404
            assert client.post(f"/v1/batches/{hidden['id']}/cancel").status_code == 404
            assert client.get(f"/v1/files/{hidden['input_file_id']}").status_code == 404
            assert len(client.get(f"/v1/files/{over['output_file_id']}/content").content.splitlines()) > 0
        assert other.get(f"/v1/batches/{own['id']}", headers=ours).json()["status"] == "completed"
        assert one.get(f"/v1/batches/{foreign['id']}", headers=theirs).json()["status"] == "completed"


def test_what_is_over_is_not_read_again(replicas: InProcess, tmp_path: Path) -> None:
    with fleet_client(replicas, batch_dir=tmp_path) as one, fleet_client(replicas, batch_dir=tmp_path) as other:
        made = start(one, many(2))
        for client in (one, other):
            until(client, made["id"], ended)
        (tmp_path / "batches" / f"{made['id']}.json").write_text("{")
        for client in (one, other):
            assert client.get("/v1/batches").json()["data"][0]["status"] == "completed"
            assert client.get(f"/v1/batches/{made['id']}").json()["status"] == "completed"


def test_a_batch_is_cancelled_and_a_file_deleted_by_whichever_process(replicas: InProcess, tmp_path: Path) -> None:
    with (
        fleet_client(replicas, batch_dir=tmp_path) as owner,
        fleet_client(replicas, batch_dir=tmp_path) as other,
    ):
        given = many(64, max_tokens=200, ignore_eos=True)
        made, waiting = start(owner, given), start(owner, given)
        until(other, made["id"], lambda job: job["request_counts"]["completed"] > 0)
        in_use = other.delete(f"/v1/files/{made['input_file_id']}")
        assert in_use.status_code == 409 and made["id"] in in_use.json()["error"]["message"]
        for each in (waiting, made):
            assert other.post(f"/v1/batches/{each['id']}/cancel").json()["status"] == "cancelling"
        over = until(owner, made["id"], ended)
        assert over["status"] == "cancelled" and over["cancelled_at"] >= over["cancelling_at"]
        assert len(lines(other, over["output_file_id"])) == over["request_counts"]["completed"] < 64
        assert until(other, waiting["id"], ended)["output_file_id"] is None
        assert other.post(f"/v1/batches/{made['id']}/cancel").status_code == 400
        assert owner.delete(f"/v1/files/{made['input_file_id']}").json()["deleted"] is True
        assert other.get(f"/v1/files/{made['input_file_id']}").status_code == 404
        assert not list((tmp_path / "batches").glob("*.cancel"))


def test_uploads_of_all_processes_count_and_none_is_taken_for_a_leftover(replicas: InProcess, tmp_path: Path) -> None:
    coming, left = (tmp_path / "files" / f"file-{name}.jsonl" for name in ("coming", "left"))
    coming.parent.mkdir()
    for path in (coming, left):
        path.write_text("x")
    os.utime(left, (time.time() - 2 * batch_jobs.LEFT_S,) * 2)
    options = {"batch_dir": tmp_path, "max_batch_bytes": 2000}
    with fleet_client(replicas, **options) as one, fleet_client(replicas, **options) as other:
        upload(one, ["x" * 1500])
        answer = other.post("/v1/files", files={"file": b"x" * 600}, data={"purpose": "batch"})
        assert answer.status_code == 413 and "there is room for 499" in answer.json()["error"]["message"]
        assert wait_until(lambda: not left.exists(), 20) and coming.exists()
        assert [file.bytes for file in FileStore(tmp_path / "files", 2000).all("")] == [1501]
