"""A folder of batches that does not answer: streams go on, its clients are told, and the batch goes on after it."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event, current_thread
from typing import Any, BinaryIO

import httpx
import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.server import batch_api, batch_jobs, folder_thread, stored_files
from forerun.server.app import create_app
from forerun.server.batch_files import AnswerFile, BatchInput
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batch_owner import BatchOwner
from forerun.server.batches import BatchRow
from forerun.server.stored_files import FileStore
from tests.server import test_batch_owner
from tests.server.conftest import client_of, events_of, running, settings, wait_until
from tests.server.test_batch_api import data_of, ended, start, until, upload
from tests.server.test_batch_owner import ROW_S, jobs, over, started
from tests.server.test_batches import CHAT, chat_row

GIVEN = [chat_row(f"c{i}", f"Tell me about {i}.", max_tokens=8) for i in range(12)]


class Hang:
    """A function of ours that waits, from its second call on, until the folder answers again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.begun, self.over = Event(), Event()
        inner, calls = getattr(owner, name), list[int]()

        def hang(*given: Any) -> Any:
            calls.append(0)
            if len(calls) > 1:
                self.begun.set()
                assert self.over.wait(60), "nobody ended the hang: its test waits for the folder itself"
            return inner(*given)

        monkeypatch.setattr(owner, name, hang)


def streamed(client: httpx.Client) -> list[Any]:
    """What a stream says."""
    body = {"prompt": "Once", "max_tokens": 24, "seed": 3, "stream": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    return [json.loads(event)["choices"][0]["text"] for event in events_of(answer.text)[:-1]]


def check_a_hang(client: TestClient, hang: Hang) -> None:
    """A batch whose folder hangs while it is answered, beside streams."""
    alone = "".join(streamed(client))
    made = start(client, GIVEN)
    assert hang.begun.wait(30)
    since = time.monotonic()
    assert "".join(streamed(client)) == alone and alone
    assert client.get("/health").json()["status"] == "ok"
    ask = {"input_file_id": made["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    file, batch = f"/v1/files/{made['input_file_id']}", f"/v1/batches/{made['id']}"
    for method, path, options in (
        ("POST", "/v1/batches", {"json": ask}),
        ("GET", "/v1/batches", {}),
        ("GET", batch, {}),
        ("POST", f"{batch}/cancel", {}),
        ("POST", "/v1/files", {"files": {"file": b"x"}, "data": {"purpose": "batch"}}),
        ("GET", "/v1/files", {}),
        ("GET", file, {}),
        ("GET", f"{file}/content", {}),
        ("DELETE", file, {}),
    ):
        answer = client.request(method, path, **options)  # type: ignore[arg-type]
        assert answer.status_code == 503 and answer.headers["Retry-After"], (method, path, answer.text)
        assert answer.json()["error"]["code"] == "folder_hangs" and "hangs" in answer.json()["error"]["message"]
    assert time.monotonic() - since < 30
    hang.over.set()
    over = until(client, made["id"], ended)
    assert over["status"] == "completed" and over["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    lines = [json.loads(line) for line in client.get(f"/v1/files/{over['output_file_id']}/content").text.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(row["custom_id"] for row in GIVEN)
    assert [each["id"] for each in client.get("/v1/batches").json()["data"]] == [made["id"]]  # 503: not done
    kept = {each["id"] for each in client.get("/v1/files").json()["data"]}
    assert kept == {made["input_file_id"], over["output_file_id"]}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.5)


def test_a_folder_that_hangs_stops_no_stream(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = Hang(monkeypatch, AnswerFile, "write")
    with client_of(llm, batch_dir=tmp_path) as client:
        check_a_hang(client, hang)


def test_neither_does_one_that_hangs_while_rows_are_read(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch waits, and its clients need not: only rows are read there."""
    hang = Hang(monkeypatch, BatchInput, "scan")
    with client_of(llm, batch_dir=tmp_path) as client:
        until(client, start(client, GIVEN[:1])["id"], ended)
        made = start(client, GIVEN)
        assert hang.begun.wait(30) and streamed(client)
        assert client.get(f"/v1/batches/{made['id']}").json()["status"] == "validating"
        hang.over.set()
        assert until(client, made["id"], ended)["request_counts"]["completed"] == 12


def test_an_upload_that_hangs_is_given_up(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of an upload is deleted, and its bytes count no more, once the folder answers."""
    monkeypatch.setattr(stored_files, "STEP_BYTES", 1000)
    monkeypatch.setattr(batch_api, "PIECE_BYTES", 1000)
    rows = data_of(GIVEN)
    with client_of(llm, batch_dir=tmp_path, max_batch_bytes=2 * len(rows)) as client:
        kept = upload(client, GIVEN)
        hang = Hang(monkeypatch, stored_files.os, "fsync")
        answer = client.post("/v1/files", files={"file": rows}, data={"purpose": "batch"})
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "folder_hangs"
        assert streamed(client)
        hang.over.set()
        left = [path.name for path in (tmp_path / "files").glob("*.jsonl")]
        assert wait_until(lambda: [path.name for path in (tmp_path / "files").glob("*.jsonl")] == [f"{kept}.jsonl"], 20)
        assert len(left) <= 2
        again = upload(client, GIVEN)
        assert client.get(f"/v1/files/{again}/content").content == rows
        name = client.get(f"/v1/files/{again}/content").headers["content-disposition"]
        assert name == 'attachment; filename="rows.jsonl"'


class Download:
    """A file as a download reads it."""

    def __init__(self, file: BinaryIO, closed_by: list[str]) -> None:
        self._file, self._closed_by = file, closed_by

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._closed_by.append(current_thread().name)
        self._file.close()


def test_a_download_that_hangs_midway_is_cut_off_and_others_go_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client can tell: fewer bytes come than were announced."""
    monkeypatch.setattr(folder_thread, "ANSWER_S", 10.0)
    monkeypatch.setattr(batch_api, "PIECE_BYTES", 1000)
    open_file, closed_by = FileStore.open, list[str]()

    def opened(*given: Any) -> Any:
        name, size, file = open_file(*given)
        return name, size, Download(file, closed_by)

    monkeypatch.setattr(FileStore, "open", opened)
    hang = Hang(monkeypatch, Download, "read")
    with (
        running(create_app(llm, settings(batch_dir=tmp_path))) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        path, alone = f"/v1/files/{upload(client, GIVEN)}/content", streamed(client)
        monkeypatch.setattr(folder_thread, "ANSWER_S", 1.5)
        with client.stream("GET", path) as answer:
            pieces = answer.iter_raw()
            begun = next(pieces)
            assert hang.begun.wait(30)
            assert streamed(client) == alone and alone
            assert client.get("/health").json()["status"] == "ok"
            with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
                next(pieces)
        monkeypatch.setattr(folder_thread, "ANSWER_S", 0.5)
        assert begun == data_of(GIVEN)[:1000] and answer.headers["content-length"] == str(len(data_of(GIVEN)))
        assert client.get("/v1/files").json()["error"]["code"] == "folder_hangs"
        assert streamed(client) == alone and closed_by == []
        hang.over.set()
        assert wait_until(lambda: closed_by == ["forerun-batches"], 20)
        monkeypatch.setattr(folder_thread, "ANSWER_S", 10.0)
        assert client.get(path).content == data_of(GIVEN)


@pytest.mark.parametrize("call", ["write", "resume"])
def test_a_server_ends_while_the_folder_hangs(
    call: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one goes on with the batch, once nothing of this one can change a file: neither of the two threads."""
    monkeypatch.setattr(batch_api, "ANSWER_S", 0.2)
    hang = Hang(monkeypatch, AnswerFile, call)
    with client_of(llm, batch_dir=tmp_path) as client:
        made = start(client, GIVEN)
        assert hang.begun.wait(30)
        since = time.monotonic()
    assert time.monotonic() - since < 20 and not hang.over.is_set()
    another = BatchOwner(tmp_path, None)
    assert not another.take()
    hang.over.set()
    assert wait_until(another.take, 20)
    another.let_go()
    with client_of(llm, batch_dir=tmp_path) as client:
        over = until(client, made["id"], ended)
        lines = client.get(f"/v1/files/{over['output_file_id']}/content").text.splitlines()
    assert over["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
    assert len({json.loads(line)["custom_id"] for line in lines}) == len(lines) == 12


@pytest.mark.parametrize("last", [5, 40])
def test_files_that_a_stop_leaves_open_are_closed_by_the_folders_thread(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it hangs in the middle, and before a batch of which all is answered is finished."""
    owner, numbers, hangs, goes_on = jobs(tmp_path, None), count(1), Event(), Event()
    opened, closed_by = list[Any](), list[str]()
    open_file, write, rows = AnswerFile.open, AnswerFile.write, BatchInput.rows

    def open_kept(file: AnswerFile) -> None:
        open_file(file)
        opened.append(file._file)

    def write_then_hang(file: AnswerFile, answer: dict[str, Any]) -> None:
        write(file, answer)
        if next(numbers) == last:
            owner.thread.submit(lambda: (hangs.set(), goes_on.wait(60)))

    def told(given: BatchInput) -> Iterator[BatchRow]:
        try:
            yield from rows(given)
        finally:
            closed_by.append(current_thread().name)

    monkeypatch.setattr(AnswerFile, "open", open_kept)
    monkeypatch.setattr(AnswerFile, "write", write_then_hang)
    monkeypatch.setattr(BatchInput, "rows", told)

    async def stop() -> None:
        await started(owner, 40)
        answering = asyncio.create_task(owner.run())
        await test_batch_owner.until(lambda: hangs.is_set() and len(owner.thread._waiting) > 0)
        answering.cancel()
        with suppress(asyncio.CancelledError):
            await answering
        gc.collect()
        assert opened and not any(file.closed for file in opened)
        assert closed_by == (["forerun-batches"] if last == 40 else [])  # the rows are at their end
        goes_on.set()
        await owner.thread.do(bool)
        assert all(file.closed for file in opened) and closed_by == ["forerun-batches"]

    asyncio.run(stop())


def test_bad_rows_hold_up_no_other_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are written some at a time. A stop in between leaves the others for the next start."""
    monkeypatch.setattr(batch_jobs, "BAD_AT_ONCE", 10)
    write, written, between = AnswerFile.write, list[str](), list[int]()
    others: list[Callable[[], None]] = []

    def told(file: AnswerFile, answer: dict[str, Any]) -> None:
        if others:
            owner.thread.submit(others.pop())
        write(file, answer)
        written.append(answer["id"])

    monkeypatch.setattr(AnswerFile, "write", told)
    owner = jobs(tmp_path, None)

    async def answer() -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            between.append(len(written))
            loop.call_soon_threadsafe(owner.close)

        others.append(stop)
        made = await started(owner, 2, num_bad=100)
        await owner.run()
        await owner.thread.do(bool)
        assert between == [10] and len(written) in (10, 20)
        assert (tmp_path / "files" / f"{made.errors_id}.jsonl").read_bytes().count(b"\n") == len(written)
        another = jobs(tmp_path, None)
        answering = asyncio.create_task(another.run())
        said = await over(another, made.id)
        assert (said.completed, said.failed, said.total) == (2, 100, 102) and len(set(written)) == len(written) == 102
        another.close()
        await answering

    asyncio.run(answer())


def test_answers_do_not_pile_up_while_the_folder_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row begins that would have to wait with its answer."""
    hang = Hang(monkeypatch, AnswerFile, "write")

    async def answer() -> None:
        owner: BatchJobs = jobs(tmp_path, None)
        made = await started(owner, 40)
        running = asyncio.create_task(owner.run())
        await asyncio.to_thread(hang.begun.wait, 30)
        await asyncio.sleep(20 * ROW_S)
        sent: Callable[[], int] = lambda: len(owner.sent)  # type: ignore[attr-defined] # noqa: E731
        assert sent() <= 8  # what the first answer left a place for, and 4 at a time
        hang.over.set()
        assert (await over(owner, made.id)).completed == 40 and sent() == 40
        owner.close()
        await running

    asyncio.run(answer())
