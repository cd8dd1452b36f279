"""/v1/files and /v1/batches: the answers of `forerun batch`, across restarts; the official client; bad requests."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.errors import ConfigError, ResourceError
from forerun.server import batch_job, batch_jobs
from forerun.server.app import create_app
from forerun.server.batch_files import AnswerFile, BatchInput
from tests.server.conftest import client_of, running, settings
from tests.server.test_batches import CHAT, TEXT, batch, chat_row, rows, write

__all__ = ["batch"]  # a fixture


def data_of(given: list[Any]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given).encode()


def upload(client: httpx.Client, given: list[Any]) -> str:
    answer = client.post("/v1/files", files={"file": ("rows.jsonl", data_of(given))}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def start(client: httpx.Client, given: list[Any], endpoint: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"input_file_id": upload(client, given), "endpoint": endpoint, "completion_window": "24h", **fields}
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def until(client: httpx.Client, batch_id: str, over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(600):
        answer = client.get(f"/v1/batches/{batch_id}")
        batch: dict[str, Any] = answer.json()
        if answer.status_code != 503 and over(batch):  # 503: the folder is busy
            return batch
        time.sleep(0.05)
    raise AssertionError(batch)


def ended(batch: dict[str, Any]) -> bool:
    return batch["status"] not in batch_job.OPEN


def lines_of(client: TestClient, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.get(f"/v1/files/{file_id}/content").text.splitlines()]


@pytest.fixture(scope="module")
def client(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with client_of(llm, batch_dir=tmp_path_factory.mktemp("kept")) as made:
        yield made


def test_answers_are_those_of_the_command(client: TestClient, batch: Callable[..., Any], tmp_path: Path) -> None:
    """To the byte; the other endpoint's rows and bad lines go to the file of errors."""
    given = [*rows(), "no JSON", chat_row("c0", "again")]
    made = start(client, given, metadata={"who": "me"})
    assert made["status"] == "validating" and made["output_file_id"] is None and made["metadata"] == {"who": "me"}
    over = until(client, made["id"], ended)
    assert over["status"] == "completed" and over["request_counts"] == {"total": 11, "completed": 6, "failed": 5}
    out = tmp_path / "out.jsonl"
    batch(write(tmp_path / "in.jsonl", [row for row in rows() if row["url"] == CHAT]), out)
    found = client.get(f"/v1/files/{over['output_file_id']}/content")
    assert sorted(found.content.splitlines()) == sorted(out.read_bytes().splitlines())
    errors = [line["error"]["message"] for line in lines_of(client, over["error_file_id"])]
    assert sum(TEXT in message for message in errors) == 3
    assert sum("not JSON" in message or "same custom_id" in message for message in errors) == 2
    assert over["in_progress_at"] >= over["created_at"] and over["completed_at"] and over["errors"] is None


def test_a_restart_goes_on_with_what_is_left(llm: LLM, tmp_path: Path) -> None:
    given = [chat_row(f"c{i}", f"Tell me about {i}.", max_tokens=24) for i in range(12)]
    with client_of(llm, batch_dir=tmp_path) as client:
        made = start(client, given)
        until(client, made["id"], lambda batch: batch["request_counts"]["completed"] > 0)
    kept = json.loads((tmp_path / "batches" / f"{made['id']}.json").read_text())
    assert kept["status"] == "in_progress"
    torn = tmp_path / "files" / f"{kept['output_id']}.jsonl"
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-9])  # as if the machine had stopped while it wrote
    with client_of(llm, batch_dir=tmp_path) as client:
        over = until(client, made["id"], ended)
        assert over["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        names = [line["custom_id"] for line in lines_of(client, over["output_file_id"])]
        assert sorted(names) == sorted(row["custom_id"] for row in given)
        fresh = until(client, start(client, given)["id"], ended)
        ours, others = (client.get(f"/v1/files/{b['output_file_id']}/content").content for b in (over, fresh))
        assert sorted(ours.splitlines()) == sorted(others.splitlines())
        listed = client.get("/v1/batches", params={"limit": 1}).json()
        assert listed["has_more"] and listed["data"][0]["object"] == "batch"
        rest = client.get("/v1/batches", params={"after": listed["last_id"]}).json()
        assert [b["id"] for b in (*listed["data"], *rest["data"])] == [
            b["id"] for b in client.get("/v1/batches").json()["data"]
        ]


def test_a_batch_that_is_cancelled_keeps_what_was_answered(client: TestClient) -> None:
    given = [chat_row(f"c{i}", f"Tell me about {i}.", max_tokens=200, ignore_eos=True) for i in range(64)]
    made = start(client, given)
    waiting = start(client, given)
    assert client.delete(f"/v1/files/{made['input_file_id']}").status_code == 409
    until(client, made["id"], lambda batch: batch["request_counts"]["completed"] > 0)
    assert client.post(f"/v1/batches/{waiting['id']}/cancel").json()["status"] == "cancelled"
    assert client.post(f"/v1/batches/{made['id']}/cancel").json()["status"] == "cancelling"
    over = until(client, made["id"], ended)
    assert over["status"] == "cancelled" and over["cancelled_at"] >= over["cancelling_at"]
    assert len(lines_of(client, over["output_file_id"])) == over["request_counts"]["completed"] < 64
    assert until(client, waiting["id"], ended)["output_file_id"] is None
    again = client.post(f"/v1/batches/{made['id']}/cancel")
    assert again.status_code == 400 and "is cancelled" in again.json()["error"]["message"]
    assert client.delete(f"/v1/files/{made['input_file_id']}").json()["deleted"] is True
    assert client.get(f"/v1/files/{made['input_file_id']}").status_code == 404


def test_the_official_client(llm: LLM, tmp_path: Path) -> None:
    """With a key, and a host name that rows need not have."""
    openai = pytest.importorskip("openai", reason="openai is not installed")
    options = {"api_keys": ("secret",), "allowed_hosts": ("127.0.0.1",), "batch_dir": tmp_path}
    with running(create_app(llm, settings(**options))) as address:
        api = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).batches.list()
        kept = api.files.create(file=("rows.jsonl", io.BytesIO(data_of(rows()[6:]))), purpose="batch")
        assert api.files.retrieve(kept.id).filename == "rows.jsonl" and [f.id for f in api.files.list()] == [kept.id]
        made = api.batches.create(input_file_id=kept.id, endpoint=TEXT, completion_window="24h")
        for _ in range(600):
            made = api.batches.retrieve(made.id)
            if made.status == "completed":
                break
            time.sleep(0.05)
        assert made.request_counts.completed == 3 and [b.id for b in api.batches.list()] == [made.id]
        answers = [json.loads(line) for line in api.files.content(made.output_file_id).text.splitlines()]
        assert [a["response"]["status_code"] for a in answers] == [200] * 3
        assert api.files.delete(kept.id).deleted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be one of"),
        ({"completion_window": "1h"}, "completion_window must be 24h"),
        ({"metadata": {"k": "v" * 600}}, "metadata may have 16"),
        ({"colour": 1}, "colour"),
        ({"input_file_id": "file-none"}, "there is no file"),
        ({"input_file_id": "../../etc/passwd"}, "there is no file"),
    ],
)
def test_bad_batches_are_refused(client: TestClient, change: dict[str, Any], said: str) -> None:
    body = {"input_file_id": upload(client, rows()), "endpoint": CHAT, "completion_window": "24h", **change}
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code in (400, 404) and said in answer.json()["error"]["message"]


def test_uploads_have_limits(llm: LLM, tmp_path: Path) -> None:
    with client_of(llm, batch_dir=tmp_path, max_batch_bytes=4000, max_body_bytes=1000) as client:
        kept = upload(client, ["x" * 2500])  # larger than other bodies may be
        for size, said in ((1600, "there is room for 1499"), (5000, "larger than 4000 bytes")):
            answer = client.post("/v1/files", files={"file": b"x" * size}, data={"purpose": "batch"})
            assert answer.status_code == 413 and said in answer.json()["error"]["message"]
        client.delete(f"/v1/files/{kept}")
        upload(client, ["x" * 2500])
        answer = client.post("/v1/files", files={"file": b"x"}, data={"purpose": "fine-tune"})
        assert answer.status_code == 400 and "purpose must be batch" in answer.json()["error"]["message"]
        answer = client.post(
            "/v1/files", files={"file": b"x"}, data={"purpose": "batch", "expires_after[seconds]": "9"}
        )
        assert answer.status_code == 400 and "unknown field 'expires_after" in answer.json()["error"]["message"]
        assert client.post("/v1/files", data={"purpose": "batch"}).json()["error"]["param"] == "file"
    assert len(list((tmp_path / "files").glob("*.jsonl"))) == 1


def test_each_key_sees_its_own(llm: LLM, tmp_path: Path) -> None:
    with client_of(llm, batch_dir=tmp_path, api_keys=("mine", "theirs")) as client:
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        client.headers.update(mine)
        made = start(client, rows())
        over = until(client, made["id"], ended)
        for path in (
            f"files/{over['output_file_id']}",
            f"files/{made['input_file_id']}/content",
            f"batches/{made['id']}",
        ):
            assert client.get(f"/v1/{path}").status_code == 200
            assert client.get(f"/v1/{path}", headers=theirs).status_code == 404
        for path in ("files", "batches"):
            assert client.get(f"/v1/{path}").json()["data"]
            assert client.get(f"/v1/{path}", headers=theirs).json()["data"] == []
        assert client.delete(f"/v1/files/{over['output_file_id']}", headers=theirs).status_code == 404
        body = {"input_file_id": made["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert client.post("/v1/batches", json=body, headers=theirs).status_code == 404


def test_without_a_folder_it_is_said_how_to_have_one(llm: LLM, tmp_path: Path) -> None:
    with client_of(llm) as client:
        for path in ("/v1/batches", "/v1/files"):
            answer = client.get(path)
            assert answer.status_code == 404 and "--batch-dir FOLDER" in answer.json()["error"]["message"]
    (tmp_path / "batches").write_text("no folder")
    with pytest.raises(ConfigError, match="cannot keep batches in"):
        create_app(llm, settings(batch_dir=tmp_path))


def test_a_row_that_can_never_fit_is_an_error_and_not_waited_for(llm: LLM, tmp_path: Path) -> None:
    with client_of(llm, batch_dir=tmp_path, max_queue=0) as client:
        given = [chat_row("fits", "Tell me."), chat_row("never", "Tell me.", n=llm.config.max_num_seqs + 1)]
        over = until(client, start(client, given)["id"], ended)
        assert over["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        [line] = lines_of(client, over["error_file_id"])
        assert line["custom_id"] == "never" and line["response"]["status_code"] == 400


def test_files_are_listed_in_either_order(client: TestClient) -> None:
    names = [upload(client, rows()[:1]) for _ in range(3)]

    def listed(**query: Any) -> list[str]:
        found = [file["id"] for file in client.get("/v1/files", params=query).json()["data"]]
        return [name for name in found if name in names]

    assert sorted(listed()) == sorted(names) and listed(order="asc") == listed()[::-1] == listed(order="desc")[::-1]


@pytest.mark.parametrize("path", ["/v1/files?colour=red", "/v1/batches?order=asc", "/v1/batches/b?colour=red"])
def test_query_parameters_are_known_or_refused(client: TestClient, path: str, llm: LLM, tmp_path: Path) -> None:
    name = path.partition("?")[2].partition("=")[0]
    error = client.get(path).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter") and name in error["message"]
    with client_of(llm, batch_dir=tmp_path, unknown_fields="ignore") as tolerant:
        assert tolerant.get(path).status_code in (200, 404)


def test_a_damaged_file_stops_no_other_batch(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its batch is left alone, with all that it had written."""
    with client_of(llm, batch_dir=tmp_path) as client:
        over, kept = (until(client, start(client, rows()[:6])["id"], ended) for _ in range(2))
    state = tmp_path / "batches" / f"{over['id']}.json"
    about, left = (tmp_path / "files" / f"{over['output_file_id']}{end}" for end in (".json", ".jsonl"))
    copy, strange, unfinished = (state.with_name(f"batch_{i * 24}.json") for i in "abc")
    copy.write_bytes(state.read_bytes())
    strange.write_text(state.read_text().replace('"created_s": ', '"created_s": "x", "was": '))
    unfinished.write_text(json.dumps({"id": unfinished.stem, "status": "in_progress"}))
    state.write_text("{")
    about.write_bytes(b"\xff")
    with client_of(llm, batch_dir=tmp_path) as client:
        made = start(client, rows()[:6])
        assert until(client, made["id"], ended)["request_counts"]["completed"] == 6
        assert [b["id"] for b in client.get("/v1/batches").json()["data"]] == [made["id"], kept["id"]]
        for path in (state, copy, strange, unfinished):
            answer = client.get(f"/v1/batches/{path.stem}")
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "damaged"
        assert client.get(f"/v1/files/{left.stem}").status_code == 404 and left.exists()
    assert [r.message for r in caplog.records].count("a batch's state cannot be read or written") == 4


def test_what_is_no_rows_fault_fails_none(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for a while; a time limit for people; bytes that a killed server left; a second server."""
    monkeypatch.setattr(batch_jobs, "TRY_AGAIN_S", 0.05)
    writes, write_line = iter(range(100)), AnswerFile.write

    def full(self: AnswerFile, answer: dict[str, Any]) -> None:
        if next(writes) in (1, 2):
            raise ResourceError("no space left")
        write_line(self, answer)

    monkeypatch.setattr(AnswerFile, "write", full)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "file-of-nobody.jsonl").write_text("x")
    with client_of(llm, batch_dir=tmp_path, timeout_s=0.001) as client:
        assert not (tmp_path / "files" / "file-of-nobody.jsonl").exists()
        with pytest.raises(ConfigError, match="another server uses"):
            create_app(llm, settings(batch_dir=tmp_path))
        over = until(client, start(client, rows()[:6])["id"], ended)
        assert over["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert len({line["custom_id"] for line in lines_of(client, over["output_file_id"])}) == 6


def test_a_batch_that_cannot_be_kept_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"input_file_id": upload(client, rows()), "endpoint": CHAT, "completion_window": "24h"}
    before = client.get("/v1/batches").json()["data"]

    def full(*_: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(batch_jobs, "write_json", full)
    answer = client.post("/v1/batches", json=body)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "no_room"
    assert "cannot be kept: No space left" in answer.json()["error"]["message"]
    assert client.get("/v1/batches").json()["data"] == before


def test_a_server_that_ends_while_rows_are_read_answers_none(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, scan = Event(), BatchInput.scan

    def slow(*given: Any) -> BatchInput:
        begun.set()
        while not given[-1]():
            time.sleep(0.01)
        return scan(*given[:-1])

    monkeypatch.setattr(BatchInput, "scan", slow)
    with client_of(llm, batch_dir=tmp_path) as client:
        made = start(client, rows())
        assert begun.wait(20)
    kept = json.loads((tmp_path / "batches" / f"{made['id']}.json").read_text())
    assert kept["status"] == "validating" and kept["completed"] == 0


def test_batches_have_limits(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_jobs, "MAX_ROWS", 5)
    over = until(client, start(client, ["x"] * 6)["id"], ended)
    assert over["status"] == "failed" and "more than 5 rows: divide it" in over["errors"]["data"][0]["message"]
