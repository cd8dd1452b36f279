"""`forerun batch`: the same answers however a batch is divided or interrupted, bad rows, files that go on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

import forerun.opening
from forerun.cli.app import app as cli
from forerun.errors import ConfigError, DataError, ResourceError
from forerun.models.loader import load_model
from forerun.server.batch_files import AnswerFile, BatchInput, errors_path, made_with_path, open_answers
from forerun.server.batches import (
    MAX_DEPTH,
    BadRow,
    BatchRow,
    BatchServer,
    Shard,
    Stops,
    UnavailableError,
    answer_all,
    answer_row,
    read_row,
    seed_of,
)
from forerun.server.errors import REPLICA_CHANGED, ApiError
from tests.server.conftest import Post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat_row(name: str, content: str = "Hello", **fields: Any) -> dict[str, Any]:
    body = {"model": "mini", "max_tokens": 6, **fields, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def a_row(name: str, **fields: Any) -> BatchRow:
    row = read_row(json.dumps(chat_row(name, **fields)).encode(), 1)
    assert isinstance(row, BatchRow)
    return row


def rows() -> list[dict[str, Any]]:
    texts = [
        {"custom_id": f"t{i}", "url": TEXT, "body": {"model": "mini", "prompt": f"Number {i}", "max_tokens": 5, "n": 2}}
        for i in range(3)
    ]
    return [*(chat_row(f"c{i}", f"Tell me a story about {i % 3}.") for i in range(6)), *texts]


def write(path: Path, given: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given), "utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def sorted_lines(*paths: Path) -> list[str]:
    return sorted(line for path in paths for line in path.read_text("utf-8").splitlines())


_load_once = cache(load_model)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command in this process; the weights are loaded once."""
    monkeypatch.setattr(forerun.opening, "load_model", _load_once)

    def invoke(*arguments: object, status: int = 0) -> Any:
        options = ("--drafter", "none", "--max-model-len", "256")
        result = CliRunner().invoke(cli, ["batch", *map(str, arguments), *options], catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return invoke


def test_answers_are_the_servers_and_do_not_depend_on_how_the_batch_is_run(
    batch: Callable[..., Any], post: Post, tmp_path: Path
) -> None:
    given = write(tmp_path / "in.jsonl", rows())
    batch(given, tmp_path / "whole.jsonl")
    whole = sorted_lines(tmp_path / "whole.jsonl")
    assert len(whole) == 9 and not errors_path(tmp_path / "whole.jsonl").exists()

    by_id = {answer["custom_id"]: answer for answer in map(json.loads, whole)}
    asked = rows()[1]
    answer = by_id["c1"]["response"]
    served = post(CHAT, **asked["body"], seed=seed_of(0, "c1"))
    assert answer["status_code"] == 200 and answer["body"]["choices"] == served["choices"]
    assert by_id["c0"]["response"]["body"]["choices"] != by_id["c3"]["response"]["body"]["choices"]  # other seeds

    shuffled = rows()
    random.Random(1).shuffle(shuffled)
    parts = [tmp_path / f"part{i}.jsonl" for i in (1, 2)]
    for index, part in enumerate(parts, 1):
        batch(write(tmp_path / "other.jsonl", shuffled), part, "--shard", f"{index}/2", "--max-num-seqs", index)
    assert sorted_lines(*parts) == whole and all(len(lines(part)) > 1 for part in parts)


def test_a_torn_file_goes_on_where_it_ends(batch: Callable[..., Any], tmp_path: Path) -> None:
    given, path = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    batch(given, path)
    whole = path.read_bytes()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (10, ends[2] + 50, ends[-1]):
        path.write_bytes(whole[:cut])
        said = batch(given, path, "--resume").stdout
        assert sorted_lines(path) == sorted(whole.decode().splitlines()), cut
    assert "1 rows answered" in said and "8 were done before" in said
    assert batch(given, path, "--resume").stdout.startswith("0 rows answered")


def test_bad_rows_are_named_and_the_others_answered(batch: Callable[..., Any], tmp_path: Path) -> None:
    bad = [
        chat_row("good"), "{not json", '"text"', {"url": CHAT, "body": {}}, chat_row("good", "twice"),
        {"custom_id": "url", "url": "/v1/embeddings", "body": {}}, chat_row("x" * 600),
        {**chat_row("method"), "method": "GET"}, {**chat_row("extra"), "colour": 1}, chat_row("stream", stream=True),
        {"custom_id": "body", "url": CHAT, "body": []}, chat_row("model", model="gpt-4"), chat_row("field", colour=1),
        chat_row("long", "a" * 9000), "", chat_row("also good"), chat_row("\ud800"), '{"a":' * 100_000,
    ]  # fmt: skip
    given, path = write(tmp_path / "in.jsonl", bad), tmp_path / "out.jsonl"
    said = batch(given, path, "--max-row-bytes", 8000).stdout
    assert "2 rows answered" in said and "15 failed" in said
    assert {answer["custom_id"] for answer in lines(path)} == {"good", "also good"}
    errors = lines(errors_path(path))
    told = [(e["error"] or e["response"]["body"]["error"])["message"] for e in errors]
    for words in ("line 2 is not JSON", "line 3 must be an object", "line 4: custom_id", "line 1 has the same",
                  "url must be one of", "1 to 512 characters", "method must be POST", "'colour' too", "body.stream",
                  "body must be an object", "gpt-4", "more than 8000 bytes"):  # fmt: skip
        assert sum(words in message for message in told) == (
            3 if words == "1 to 512 characters" else 2 if "8000" in words else 1
        ), words
    by_id = dict(zip((e["custom_id"] for e in errors), told, strict=True))
    assert "--any-model or --served-model-name" in by_id["model"] and "--unknown-fields" not in by_id["field"]
    assert "0 rows answered" in batch(given, path, "--resume", "--max-row-bytes", 8000).stdout
    assert len(lines(errors_path(path))) == 15
    write(given, [chat_row("good"), chat_row("model"), chat_row("also good")])
    assert "0 rows answered" in batch(given, path, "--resume").stdout
    assert "1 rows answered" in batch(given, path, "--resume", "--retry-errors").stdout
    assert not errors_path(path).exists()


def test_a_file_goes_on_only_with_the_seed_and_model_it_was_begun_with(
    batch: Callable[..., Any], tmp_path: Path
) -> None:
    given, path = write(tmp_path / "in.jsonl", [chat_row("a"), chat_row("b")]), tmp_path / "out.jsonl"
    batch(given, path, "--seed", 4)
    whole = path.read_bytes()
    path.write_bytes(lines_of(path)[0])
    for options, words in {
        ("--seed", 5): "with --seed 4, this run has 5",
        ("--model", "other"): "--model mini",
    }.items():
        said = " ".join(batch(given, path, "--resume", "--seed", 4, *options, status=2).output.split())
        assert words in said and "choose another path" in said
    batch(given, path, "--resume", "--seed", 4)
    assert path.read_bytes() == whole
    made_with_path(path).unlink()
    path.write_bytes(lines_of(path)[0])
    batch(given, path, "--resume", "--seed", 5)  # nothing says what it was begun with
    assert len(lines(path)) == 2 and not made_with_path(path).exists()


def test_a_file_without_rows_has_a_file_of_answers(batch: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    batch(write(tmp_path / "in.jsonl", []), path)
    assert path.read_bytes() == b"" and not Path(f"{path}.lock").exists()


def test_rows_may_name_any_model_if_that_is_wanted(batch: Callable[..., Any], tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [chat_row("a", model="gpt-4o"), chat_row("b")])
    batch(given, tmp_path / "one.jsonl", "--any-model")
    batch(given, tmp_path / "two.jsonl", "--served-model-name", "gpt-4o", "--served-model-name", "mini")
    models = [
        {line["response"]["body"]["model"] for line in lines(tmp_path / f"{name}.jsonl")} for name in ("one", "two")
    ]
    assert models == [{"mini"}, {"gpt-4o"}]


def test_workers_of_a_cluster_are_sent_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def record(*given: Any) -> Any:
        sent.extend(given)
        raise ResourceError("recorded")

    monkeypatch.setattr("forerun.server.batch_cluster.cluster_answering", record)
    monkeypatch.chdir(tmp_path)
    for name in ("x", "small", "sql"):
        (tmp_path / "models" / name).mkdir(parents=True)
    given = write(tmp_path / "in.jsonl", [chat_row("a")])
    options = ("--drafter", "draft=models/small", "--lora", "sql=models/sql", "--ray", "auto", "--model", "models/x")
    result = CliRunner().invoke(cli, ["batch", str(given), "out.jsonl", *options])
    assert "recorded" in result.output
    _, _, model, engine, rows_options = sent
    folders = [str(tmp_path / "models" / name) for name in ("x", "small", "sql")]
    assert [model, engine["drafter"].partition("=")[2], engine["lora"]["sql"]] == folders
    assert rows_options.names == ("models/x",) and "model" not in engine, "clients call it as they did"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shard", "3/2"), "--shard must be I/N"),
        (("--shard", "x"), "--shard must be I/N"),
        (("--retry-errors",), "goes together with --resume"),
        ((), "is there: --resume goes on with it"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    batch: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = write(tmp_path / "in.jsonl", rows())
    path = write(tmp_path / "out.jsonl", [])
    result = batch(given, path, *arguments, "--model", tmp_path / "nothing", status=2)
    assert message in " ".join(result.output.split())


def test_files_that_cannot_be_used(batch: Callable[..., Any], tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", rows())
    assert "cannot read" in batch(tmp_path / "no.jsonl", tmp_path / "out.jsonl", status=2).output
    assert "there is no folder" in batch(given, tmp_path / "no" / "out.jsonl", status=2).output
    with pytest.raises(DataError, match="line 1 of .* is no answer"):
        open_answers(given, True, False)
    with pytest.raises(ConfigError, match="is there"):
        open_answers(given, False, False)


def test_any_cut_of_a_file_of_answers_can_be_resumed(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "out.jsonl")
    for i in range(4):
        answers.write({"id": f"batch_req_é{i}", "custom_id": str(i), "response": {"a\n": 1}, "error": None})
    answers.close()
    whole = answers.path.read_bytes()
    for cut in range(len(whole) + 1):
        answers.path.write_bytes(whole[:cut])
        again = AnswerFile(answers.path)
        again.resume()
        num = whole[:cut].count(b"\n")
        assert len(again.ids) == num and answers.path.read_bytes().count(b"\n") == num
        assert answers.path.read_bytes() in (b"", *[whole[: i + 1] for i, b in enumerate(whole) if b == 10])


def test_every_row_is_in_one_shard_and_seeds_differ() -> None:
    for count in (1, 2, 5):
        places = [[Shard(i, count).has(f"row {n}") for i in range(1, count + 1)] for n in range(300)]
        assert all(sum(place) == 1 for place in places)
        assert all(sum(column) > 300 / count / 2 for column in zip(*places, strict=True))
    assert len({seed_of(s, f"row {n}") for s in (0, 1) for n in range(300)}) == 600


def test_rows_that_begin_alike_follow_each_other(tmp_path: Path) -> None:
    contents = [f"{'AB'[i % 2]} {i}" for i in range(10)]
    given = write(tmp_path / "in.jsonl", [chat_row(f"r{i}", text) for i, text in enumerate(contents)])
    found = list(BatchInput.scan(given, 1000, Shard(), set()).rows())
    first = [row.body["messages"][0]["content"][0] for row in found]
    assert first == sorted(first) and len(found) == 10


def test_a_row_of_any_kind_is_read_or_named() -> None:
    rng = random.Random(3)
    good = json.dumps(chat_row("a")).encode()
    for _ in range(400):
        line = bytearray(good)
        for _ in range(rng.randrange(3)):
            line[rng.randrange(len(line))] = rng.randrange(256)
        assert isinstance(read_row(bytes(line), 1), BatchRow | BadRow)


def test_a_signal_ends_it_and_leaves_what_can_be_resumed(app: FastAPI, client: object) -> None:
    """No row begins after the signal; those that run may end."""
    given = [a_row(f"r{i}", max_tokens=20, ignore_eos=True) for i in range(50)]
    written: list[str] = []

    async def stopped() -> None:
        stops = Stops(asyncio.Event(), asyncio.Event())

        def note(succeeded: bool, answer: dict[str, Any]) -> None:
            assert succeeded
            written.append(answer["custom_id"])
            if len(written) == 5:
                stops.signal()

        await answer_all(partial(answer_row, BatchServer(app, lambda: True)), given, lambda: 3, stops, 30.0, note)

    assert client is not None  # the application runs
    asyncio.run(stopped())
    assert 5 <= len(written) <= 9 and len(set(written)) == len(written)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_process_loses_no_whole_answer(tmp_path: Path) -> None:
    many = [chat_row(f"r{i}", f"Say {i}", max_tokens=30, ignore_eos=True) for i in range(60)]
    given, path = write(tmp_path / "in.jsonl", many), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "forerun.cli", "batch", str(given), str(path), "--drafter", "none", "--json"]
    environment = {**os.environ, "FORERUN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while len(lines_of(path)) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    before = [line for line in lines_of(path) if line.endswith(b"\n")]
    assert 3 <= len(before) < 60
    done = subprocess.run([*command, "--resume"], env=environment, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    assert figures["done_before"] == len(before) and figures["answered"] == 60 - len(before) and figures["left"] == 0
    assert lines_of(path)[: len(before)] == before
    assert {line["custom_id"] for line in lines(path)} == {f"r{i}" for i in range(60)}


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def test_an_official_client_reads_the_answers(batch: Callable[..., Any], tmp_path: Path) -> None:
    from openai.types.chat import ChatCompletion

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    given = write(tmp_path / "in.jsonl", [chat_row("a"), chat_row("b", tools=tools, tool_choice="required")])
    batch(given, tmp_path / "out.jsonl")
    answers = {
        line["custom_id"]: ChatCompletion.model_validate(line["response"]["body"])
        for line in lines(tmp_path / "out.jsonl")
    }
    assert answers["a"].choices[0].message.content is not None


def test_what_differs_from_run_to_run_is_left_out() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert json.loads((await receive())["body"])["seed"] == seed_of(7, "a")
        call = {"id": f"call_{os.urandom(12).hex()}", "type": "function"}
        usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": os.urandom(1)[0]},
                 "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 3}}  # fmt: skip
        message = {"role": "assistant", "content": None, "tool_calls": [dict(call)]}
        body = {"id": f"chatcmpl-{os.urandom(8).hex()}", "created": int(time.time_ns()), "usage": usage, "forerun": {},
                "choices": [{"index": 0, "message": message}]}  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    row = a_row("a")
    answers = [asyncio.run(answer_row(BatchServer(app, lambda: True, 7), row)) for _ in range(2)]
    assert answers[0] == answers[1] and answers[0][0]
    body = answers[0][1]["response"]["body"]
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["id"].startswith("call_") and len(call["id"]) == 5 + 24 and body["id"].startswith("chatcmpl-")
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens_details": {"reasoning_tokens": 0}}


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_lines_of_any_length_are_told_apart(tmp_path: Path, ending: str) -> None:
    """Around the longest, with and without an end of the last line."""
    path, row = tmp_path / "in.jsonl", json.dumps(chat_row("a"))
    most = len(row)
    for extra in range(-2, 4):
        path.write_bytes("\n".join(["", row.replace("Hello", "Hello" + "!" * (extra + 2)), row[:-1] + " }"]).encode())
        path.write_bytes(path.read_bytes() + ending.encode())
        found = BatchInput.scan(path, most + 2, Shard(), set())
        lengths = [len(line) for line in path.read_bytes().split(b"\n")]
        too_long = [number for number, length in enumerate(lengths, 1) if length > most + 2]
        assert [bad.line for bad in found.bad if "more than" in bad.message] == too_long
        assert len(found.places) + len(found.bad) == 2


def test_a_line_that_is_nested_too_deeply_is_bad(batch: Callable[..., Any], post: Post, tmp_path: Path) -> None:
    """However deep, it is a row's error; up to the most, the server has its say."""
    assert isinstance(read_row(b'{"a":' * 100_000, 1), BadRow)

    def nested(name: str, depth: int) -> str:
        return json.dumps(chat_row(name, metadata={"deep": 0})).replace(
            '"deep": 0', '"deep": ' + "[" * depth + "]" * depth
        )

    most = MAX_DEPTH - 3  # the row, its body and its metadata are three
    given = [nested("r", depth).encode() for depth in (most, most + 1, 600, 900, 980)]
    assert [isinstance(read_row(line, 1), BadRow) for line in given] == [False, True, True, True, True]
    path = tmp_path / "out.jsonl"
    batch(write(tmp_path / "in.jsonl", [chat_row("good"), *(nested(f"r{d}", d) for d in (most, 600, 980))]), path)
    assert sorted(line["custom_id"] for line in lines(path)) == ["good", f"r{most}"]  # nobody reads metadata
    told = [error["error"]["message"] for error in lines(errors_path(path))]
    assert len(told) == 2 and all("in each other" in message for message in told)


def test_rows_are_read_beside_the_event_loop() -> None:
    """Reading a window takes up to a second, in which other requests go on."""
    beats = 0

    def slowly() -> Iterator[BatchRow]:
        for name in ("a", "b"):
            time.sleep(0.2)
            yield a_row(name)

    async def beating() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    async def answered() -> None:
        app, _ = answering(200)
        other, stops = asyncio.create_task(beating()), Stops(asyncio.Event(), asyncio.Event())
        server = BatchServer(app, lambda: True)
        await answer_all(partial(answer_row, server), slowly(), lambda: 4, stops, 1.0, lambda *_: None)
        other.cancel()

    asyncio.run(answered())
    assert beats >= 8  # of 40 where nothing else runs


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_a_full_disk_leaves_whole_lines(batch: Callable[..., Any], tmp_path: Path) -> None:
    """What fits is kept, the error says what to do, and with room the rest is done."""
    given, path = write(tmp_path / "in.jsonl", rows()), tmp_path / "out.jsonl"
    batch(given, tmp_path / "whole.jsonl")
    whole = sorted_lines(tmp_path / "whole.jsonl")
    with longest_file(4 * len(whole[0])):
        said = " ".join(batch(given, path, status=2).output.split())
    assert "cannot write" in said and "make room, then go on with --resume" in said
    assert not Path(f"{path}.lock").exists()
    before = lines_of(path)
    assert 0 < len(before) < 9 and all(line.endswith(b"\n") for line in before)
    batch(given, path, "--resume")
    assert sorted_lines(path) == whole and lines_of(path)[: len(before)] == before


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_a_line_that_did_not_fit_can_be_written_again(tmp_path: Path) -> None:
    answers = AnswerFile(tmp_path / "out.jsonl")
    line = {"id": "batch_req_1", "custom_id": "1", "response": None, "error": None}
    answers.write(line)
    size = answers.path.stat().st_size
    with longest_file(size + 10), pytest.raises(ResourceError, match=r"cannot write .*out.jsonl: .*; make room"):
        answers.write(line)
    assert answers.path.stat().st_size == size and answers.num_new == 1
    answers.write(line)
    answers.close()
    assert lines(answers.path) == [line, line]


@contextmanager
def longest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process may be so long: a write beyond is cut off, and the next one fails, as on a full disk."""
    import resource

    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def test_a_line_of_ten_megabytes_is_bad_unless_it_is_allowed(batch: Callable[..., Any], tmp_path: Path) -> None:
    """By default the longest row has 8 MiB; a longer one is answered by what the server thinks of its text."""
    given = write(tmp_path / "in.jsonl", [chat_row("long", "Hello " * ((10 << 20) // 6)), chat_row("good")])
    batch(given, tmp_path / "out.jsonl")
    [error] = lines(errors_path(tmp_path / "out.jsonl"))
    assert error["error"]["message"] == f"line 1 has more than {8 << 20} bytes" and error["custom_id"] is None
    batch(given, tmp_path / "allowed.jsonl", "--max-row-bytes", 64 << 20)
    [error] = lines(errors_path(tmp_path / "allowed.jsonl"))
    assert error["custom_id"] == "long" and error["response"]["status_code"] == 400
    assert [line["custom_id"] for line in lines(tmp_path / "allowed.jsonl")] == ["good"]


def answering(*statuses: int) -> tuple[Any, list[dict[str, Any]]]:
    """An application that answers with these statuses in turn, the last one again and again; what it was sent."""
    bodies: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append(json.loads((await receive())["body"]))
        status = statuses[min(len(bodies), len(statuses)) - 1]
        body = {"choices": []} if status == 200 else {"error": {"message": "trouble"}}
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    return app, bodies


@pytest.mark.parametrize(
    ("statuses", "num_sent", "status"),
    [((429,) * 6 + (200,), 7, 200), ((503, 500, 200), 3, 200), ((500,), 4, 500), ((400,), 1, 400), ((504,), 1, 504)],
)
def test_only_what_the_row_is_to_blame_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], num_sent: int, status: int
) -> None:
    monkeypatch.setattr("forerun.server.batches.PAUSE_S", 0.0)
    app, sent = answering(*statuses)
    row = a_row("a", seed=-1)
    succeeded, answer = asyncio.run(answer_row(BatchServer(app, lambda: True), row))
    assert answer["response"]["status_code"] == status and succeeded == (status == 200) and len(sent) == num_sent
    assert all(body["seed"] == seed_of(0, "a") for body in sent)  # -1 means any


def test_null_in_a_row_is_the_batchs_default() -> None:
    app, sent = answering(200)
    server = BatchServer(app, lambda: True, defaults={"priority": 5, "timeout": 60.0})
    asyncio.run(answer_row(server, a_row("a", timeout=None, priority=None, stop=None)))
    asyncio.run(answer_row(server, a_row("b", timeout=3.0, priority=0)))
    asked = [(body["priority"], body["timeout"]) for body in sent]
    assert asked == [(5, 60.0), (0, 3.0)] and sent[0]["stop"] is None


def test_a_row_that_no_replica_may_answer_is_left_for_others() -> None:
    """While a deployment changes: it is no error of the row, however healthy the new replicas are."""
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append((await receive())["body"])
        body = ApiError(503, "another model now", code=REPLICA_CHANGED).body()
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    with pytest.raises(UnavailableError, match="another model now"):
        asyncio.run(answer_row(BatchServer(app, lambda: True), a_row("a")))
    assert len(sent) == 1


def test_a_failed_engine_ends_the_job_and_keeps_what_was_answered() -> None:
    app, _ = answering(200, 200, 500)
    given = [a_row(f"r{i}") for i in range(20)]
    written: list[str] = []

    async def failing() -> None:
        stops = Stops(asyncio.Event(), asyncio.Event())
        server = partial(answer_row, BatchServer(app, lambda: False))
        await answer_all(server, given, lambda: 4, stops, 1.0, lambda _, answer: written.append(answer["custom_id"]))

    with pytest.raises(UnavailableError, match="trouble"):
        asyncio.run(failing())
    assert written == ["r0", "r1"] or sorted(written) == ["r0", "r1"]


def test_a_second_signal_ends_what_runs() -> None:
    async def hanging(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    given = [a_row(f"r{i}") for i in range(5)]

    async def stopped() -> None:
        stops = Stops(asyncio.Event(), asyncio.Event())
        asyncio.get_running_loop().call_later(0.05, stops.signal)
        asyncio.get_running_loop().call_later(0.1, stops.signal)
        await answer_all(
            partial(answer_row, BatchServer(hanging, lambda: True)), given, lambda: 2, stops, 50.0, lambda *_: None
        )

    started = time.monotonic()
    asyncio.run(stopped())
    assert time.monotonic() - started < 20


def test_samples_count_and_not_rows() -> None:
    """A row that asks for more than there is room for runs alone."""
    open_now, most, seen = 0, 0, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal open_now, most
        asked = json.loads((await receive())["body"]).get("n", 1)
        open_now += asked
        most = max(most, open_now if asked < 9 else 0)
        seen.append((asked, open_now))
        await asyncio.sleep(0.01)
        open_now -= asked
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def answered() -> None:
        wanted = [a_row(f"r{i}", n=n) for i, n in enumerate((1, 2, 2, 3, 9, 1, 1, 1, 1, 1))]
        stops = Stops(asyncio.Event(), asyncio.Event())
        await answer_all(
            partial(answer_row, BatchServer(app, lambda: True)), wanted, lambda: 4, stops, 1.0, lambda *answer: None
        )

    asyncio.run(answered())
    assert most == 4 and (9, 9) in seen and len(seen) == 10


def test_calls_that_a_model_counts_keep_their_ids() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls = [{"id": "functions.look_up:0"}, {"id": "call_abc123"}]
        body = {"id": "chatcmpl-1", "choices": [{"message": {"tool_calls": calls}}]}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    _, answer = asyncio.run(answer_row(BatchServer(app, lambda: True), a_row("r")))
    first, second = (call["id"] for call in answer["response"]["body"]["choices"][0]["message"]["tool_calls"])
    assert first == "functions.look_up:0" and second != "call_abc123"


def test_files_that_are_no_answers_are_left_alone(batch: Callable[..., Any], tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", rows())
    notes = tmp_path / "notes.json"
    for content in ('{"precious": [1, 2, 3]}', '{"precious": 1}\n', "x"):
        notes.write_text(content, "utf-8")
        with pytest.raises(DataError, match="is no answer"):
            open_answers(notes, True, False)
        assert notes.read_text("utf-8") == content
    whole = given.read_bytes()
    assert "has the rows" in batch(given, given, "--resume", status=2).output and given.read_bytes() == whole
    assert "file of errors" in batch(given, tmp_path / "a.errors.jsonl", status=2).output
    assert "use coupled" in " ".join(
        batch(given, tmp_path / "o.jsonl", "--verification", "rejection", status=2).output.split()
    )
