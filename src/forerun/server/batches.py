"""Offline batches: rows of OpenAI's batch format, answered by the server's application in this process.

Knows: what rows and their answers look like, which seed and shard a row has, how many rows run at a time. Does not
know: files (`batch_files`), other machines (`batch_cluster`), how requests are answered.

Source of the format: OpenAI's Batch API. An answer depends on its row and the job's seed alone. So what would differ
from run to run is left out or derived from `custom_id`: ids, the time, figures of caching and drafting.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple

from starlette.types import ASGIApp, Message, Scope

from forerun.server.errors import REPLICA_CHANGED

URLS: Final = ("/v1/chat/completions", "/v1/completions")
FIELDS: Final = ("custom_id", "method", "url", "body")
Answered = tuple[bool, dict[str, Any]]  # whether a row succeeded, and its line in the file of answers or of errors
_Running = asyncio.Task[Answered]
INSIDE: Final = "forerun.inside"  # of a scope: the request comes from this process, not from a client
MAX_ID: Final = 512  # characters of a custom_id
MAX_DEPTH: Final = 200  # objects and lists in each other; the server refuses bodies that are nested more deeply, too
# Answers that say nothing of the row: the queue or the grammar compiler is full, the engine or a helper process failed.
BUSY, PASSING = 429, (408, 499, 500, 503)
MAX_TRIES: Final = 4  # of a row that meets the latter
PAUSE_S: Final = 0.1  # before the first next try; twice as long before each further one, up to LONGEST_PAUSE_S
LONGEST_PAUSE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request of a batch; `line` counts from 1."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def answer_id(self) -> str:
        """The id of its answer."""
        return _id("batch_req", self.custom_id)

    @property
    def num_samples(self) -> int:
        """Answers it asks for, if its body is right."""
        n, prompts = self.body.get("n"), self.body.get("prompt")
        num_prompts = len(prompts) if isinstance(prompts, list) and not all(isinstance(p, int) for p in prompts) else 1
        return max(1, num_prompts) * (n if isinstance(n, int) and n > 0 else 1)

    @property
    def prompt_key(self) -> str:
        """Rows whose prompts begin alike are near each other in this order."""
        return json.dumps([self.url, self.body.get("model"), self.body.get("messages", self.body.get("prompt"))])


class BadRow(NamedTuple):
    """A line that is no request."""

    line: int
    custom_id: str | None
    message: str

    @property
    def answer_id(self) -> str:
        """The id of its line in the file of errors: another line may have its custom_id."""
        return _id("batch_req", f"\0{self.line}")

    def answer(self) -> dict[str, Any]:
        """Its line in the file of errors."""
        error = {"code": "invalid_request", "message": self.message, "line": self.line}
        return {"id": self.answer_id, "custom_id": self.custom_id, "response": None, "error": error}


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` (from 1) of `count` of a batch; which rows are in it depends on their custom_id alone."""

    index: int = 1
    count: int = 1

    def has(self, name: str) -> bool:
        """Whether the row of this custom_id is in it."""
        return int.from_bytes(sha256(name.encode()).digest()[8:16]) % self.count == self.index - 1


def read_row(line: bytes, number: int) -> BatchRow | BadRow:
    """The request in a line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return BadRow(number, None, f"line {number} is not JSON: {error}")
    except RecursionError:
        return _too_deep(number)
    if not isinstance(row, dict):
        return BadRow(number, None, f"line {number} must be an object with {', '.join(FIELDS)}")
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and _is_deep(row):
        return _too_deep(number)
    name = row.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID or not _is_unicode(name):
        return BadRow(number, None, f"line {number}: custom_id must be a text of 1 to {MAX_ID} characters")
    wrong = _wrong(row)
    return BatchRow(number, name, row["url"], row["body"]) if wrong is None else BadRow(number, name, wrong)


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _too_deep(number: int) -> BadRow:
    return BadRow(number, None, f"line {number} has more than {MAX_DEPTH} objects and lists in each other")


def _is_deep(value: Any) -> bool:
    """Whether a value is nested so deeply that writing it, or parsing it again, may run out of stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in level if isinstance(part, dict | list)]
    return bool(level)


def _wrong(row: dict[str, Any]) -> str | None:
    unknown = sorted(set(row) - set(FIELDS))
    if unknown:
        return f"a row has the fields {', '.join(FIELDS)}; this one has {unknown[0]!r:.100} too"
    if row.get("method", "POST") != "POST":
        return f"method must be POST, got {row['method']!r:.100}"
    if row.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}; got {row.get('url')!r:.100}"
    if not isinstance(row.get("body"), dict):
        return "body must be an object, the request"
    if row["body"].get("stream"):
        return "body.stream is true, but answers go to a file: leave it out"
    return None


AnswerRow = Callable[[BatchRow], Coroutine[Any, Any, Answered]]
OnThread = Callable[..., Awaitable[Any]]  # awaits a call with these arguments, as asyncio.to_thread does


def seed_of(seed: int, custom_id: str) -> int:
    """The seed of a row that names none: from 0 to 2^53 - 1, which every JSON reader keeps."""
    return int.from_bytes(sha256(f"{seed} {custom_id}".encode()).digest()[:8]) >> 11


# -- answering --------------------------------------------------------------------------------------------------


class UnavailableError(Exception):
    """The engine has failed, stops, or is another one now: no further row will be answered."""


@dataclass(frozen=True, slots=True)
class BatchServer:
    """Who answers rows, and how.

    `healthy`: whether the application's engine works; `model`: the model of all rows, None for what each names;
    `defaults`: fields of rows that do not have them, or have null.
    """

    app: ASGIApp
    healthy: Callable[[], bool]
    seed: int = 0
    model: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


async def answer_row(server: BatchServer, row: BatchRow) -> Answered:
    """A row's answer. Raises UnavailableError.

    What has nothing to do with the row is tried again.
    """
    body = row.body if server.model is None else {**row.body, "model": server.model}
    if body.get("seed") in (None, -1):
        body = {**body, "seed": seed_of(server.seed, row.custom_id)}
    given = {name: value for name, value in body.items() if value is not None or name not in server.defaults}
    sent = json.dumps({**server.defaults, **given}, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    num_tries, pause_s = 1, PAUSE_S
    while True:
        status, text = await _post(server.app, row.url, sent)
        answer = json.loads(text)
        if status in PASSING and (not server.healthy() or answer["error"].get("code") == REPLICA_CHANGED):
            raise UnavailableError(answer["error"]["message"])
        if status != BUSY and (status not in PASSING or num_tries == MAX_TRIES):
            break
        num_tries += status in PASSING
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    said = {"status_code": status, "request_id": _id("req", row.custom_id), "body": _lasting(answer, row.custom_id)}
    return status == 200, {
        "id": row.answer_id,
        "custom_id": row.custom_id,
        "response": said,
        "error": None,
    }


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of what the application answers."""
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 0), "server": ("localhost", 80), "extensions": {INSIDE: {}},
    }  # fmt: skip
    unsent, status, parts = [body], 0, list[bytes]()

    async def receive() -> Message:
        if unsent:
            return {"type": "http.request", "body": unsent.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client stays until it has its answer
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def _lasting(answer: dict[str, Any], custom_id: str) -> dict[str, Any]:
    """An answer without what differs from run to run."""
    answer.pop("forerun", None)
    if "id" in answer:
        answer["id"] = _id(answer["id"].partition("-")[0], custom_id, "-")
        answer["created"] = 0
    usage = answer.get("usage") or {}
    usage.pop("prompt_tokens_details", None)  # what the prefix cache had
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        usage.get("completion_tokens_details", {}).pop(name, None)
    calls = [
        call for choice in answer.get("choices", ()) for call in (choice.get("message") or {}).get("tool_calls", ())
    ]
    for index, call in enumerate(calls):
        if call["id"].startswith("functions."):  # Kimi counts calls, and reads its ids again
            continue
        drawn = re.split("[-_]", call["id"])[-1]  # what is random in it
        made = sha256(f"{custom_id} {index}".encode()).hexdigest()[: len(drawn)]
        call["id"] = call["id"][: len(call["id"]) - len(drawn)] + made
    return answer


def _id(prefix: str, name: str, joint: str = "_") -> str:
    return f"{prefix}{joint}{sha256(name.encode()).hexdigest()[:24]}"


@dataclass(slots=True)
class Stops:
    """What signals ask for: first that no row begins, then that those that run end at once."""

    soon: asyncio.Event
    now: asyncio.Event

    def signal(self) -> None:
        """A signal came."""
        (self.now if self.soon.is_set() else self.soon).set()


async def answer_all(
    answer: AnswerRow, rows: Iterable[BatchRow], num_at_once: Callable[[], int], stops: Stops, drain_s: float,
    write: Callable[[bool, dict[str, Any]], None], on_thread: OnThread = asyncio.to_thread,
) -> None:  # fmt: skip
    """Answer rows, so many samples at a time or one row that asks for more, and `write` each answer when it is there.

    `on_thread` reads rows, a window of a file at a time, and writes; no row begins meanwhile. Once none may begin,
    those that run have `drain_s` seconds. Raises what `answer` does: UnavailableError when the engine has failed.
    """
    running, samples, left_rows = set[_Running](), dict[_Running, int](), iter(rows)
    soon, now = asyncio.create_task(stops.soon.wait()), asyncio.create_task(stops.now.wait())
    writing = partial(on_thread, write)
    try:
        while (row := await on_thread(next, left_rows, None)) is not None:
            while (
                running
                and not soon.done()
                and (sum([samples[each] for each in running]) + row.num_samples > num_at_once())
            ):
                running = await _some(running, soon, writing)
            if soon.done():
                break
            task = asyncio.create_task(answer(row))
            samples = {each: samples[each] for each in running} | {task: row.num_samples}
            running.add(task)
        while running and not soon.done():
            running = await _some(running, soon, writing)
        until = time.monotonic() + drain_s
        while running and not now.done() and time.monotonic() < until:
            running = await _some(running, now, writing, until - time.monotonic())
    finally:
        for left in (soon, now, *running):
            left.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(soon, now, *running, return_exceptions=True)


async def _some(
    running: set[_Running], told: asyncio.Task[Any], write: Callable[[bool, dict[str, Any]], Awaitable[None]],
    longest_s: float | None = None,
) -> set[_Running]:  # fmt: skip
    """Wait for one that ends, or for a signal -> those that still run. What others have answered is written first."""
    await asyncio.wait({*running, told}, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    done = {task for task in running if task.done()}
    for task in done:
        if task.exception() is None:
            await write(*task.result())
    for task in done:
        task.result()
    return running - done
