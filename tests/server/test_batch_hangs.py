"""A folder of batches that does not answer: streams go on, its clients are told, and the batch goes on after it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.server import batch_api, folder_thread, stored_files
from forerun.server.batch_files import AnswerFile, BatchInput
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batch_owner import BatchOwner
from tests.server.conftest import client_of, events_of, wait_until
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


def streamed(client: TestClient) -> list[Any]:
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
    monkeypatch.setattr(folder_thread, "ANSWER_S", 0.1)


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


def test_an_upload_and_a_download_that_hang_are_given_up(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_server_ends_while_the_folder_hangs(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one goes on with the batch, once the folder belongs to nobody."""
    monkeypatch.setattr(batch_api, "ANSWER_S", 0.2)
    hang = Hang(monkeypatch, AnswerFile, "write")
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
