"""One streamed request to an OpenAI-compatible server, and the times of its events.

Knows: HTTP through aiohttp, which failures there are. Does not know: what is asked, how many requests there are.
Times are those of the running event loop's clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from forerun.bench.serve_events import DONE, AnswerError, EventParser, StreamPiece, error_message, read_piece
from forerun.bench.serve_workload import Ask
from forerun.errors import ConfigError

MAX_ERROR_BYTES: Final = 64 << 10
KEEP_ALIVE_S: Final = 2.0  # shorter than servers', which else may close a connection just as it is reused


@dataclass(slots=True)
class RequestOutcome:
    """The result of one request; `error` is None if it was answered in full."""

    arrived_s: float  # when it was due
    sent_s: float
    ended_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)  # when text came
    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    num_steps: int | None = None
    error: AnswerError | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: the server's count, else the pieces."""
        count = (self.usage or {}).get("completion_tokens")
        return count if isinstance(count, int) else len(self.piece_s)

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt, where the server says."""
        return (self.usage or {}).get("prompt_tokens")

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that the server had in its prefix cache, where it says."""
        details = (self.usage or {}).get("prompt_tokens_details")
        return details.get("cached_tokens") if isinstance(details, dict) else None

    @property
    def ttft_s(self) -> float | None:
        """Time from when it was due to its first text."""
        return self.piece_s[0] - self.arrived_s if self.piece_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens after the first; None for fewer than two."""
        if self.num_tokens < 2 or not self.piece_s:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.num_tokens - 1)

    @property
    def latency_s(self) -> float:
        """Time from when it was due to its end."""
        return self.ended_s - self.arrived_s

    def add(self, piece: StreamPiece, now_s: float) -> None:
        """Add the content of an event."""
        if piece.text:
            self.piece_s.append(now_s)
            self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage
        self.num_steps = self.num_steps if piece.num_steps is None else piece.num_steps


def api_root(url: str) -> str:
    """The address below which the API's paths are: `url`, with /v1 unless it ends in a version.

    Raises ConfigError for anything but an http address.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is no number
        is_one = False
    if not is_one or parts.query or parts.fragment:
        raise ConfigError(f"an address such as http://127.0.0.1:8000 is needed, got {url!r}")
    bare = url.rstrip("/")
    last = bare.rpartition("/")[2]
    return bare if last[:1] == "v" and last[1:].isdigit() else f"{bare}/v1"


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, root: str, timeout_s: float) -> None:
        """`timeout_s`: for one request, from sending it to its end."""
        self._session = session
        self._root = root
        self._timeout_s = timeout_s

    async def first_model(self) -> str:
        """The first model that the server lists. Raises ConfigError if it lists none."""
        try:
            async with asyncio.timeout(self._timeout_s), self._session.get(f"{self._root}/models") as answer:
                await _check_status(answer)
                return str((await answer.json(content_type=None))["data"][0]["id"])
        except (AnswerError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ConfigError(f"{self._root}/models names no model ({why}): is a server there? give --model") from error

    async def __call__(self, ask: Ask, arrived_s: float) -> RequestOutcome:
        """Send a request and follow its stream to the end; errors are recorded in the outcome."""
        clock = asyncio.get_running_loop().time
        outcome = RequestOutcome(arrived_s, clock())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(ask, outcome)
        except (AnswerError, aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = as_answer_error(error)
        outcome.ended_s = clock()
        return outcome

    async def _follow(self, ask: Ask, outcome: RequestOutcome) -> None:
        clock, parser, done = asyncio.get_running_loop().time, EventParser(), False
        async with self._session.post(self._root + ask.path, json=ask.body, allow_redirects=False) as answer:
            await _check_status(answer)
            if answer.content_type != "text/event-stream":
                raise AnswerError("not a stream", f"an answer of type {answer.content_type}")
            async for received in answer.content.iter_any():
                for data in parser.feed(received):
                    done = done or data == DONE
                    if not done:
                        outcome.add(read_piece(data), clock())
        if not done and outcome.finish_reason is None:
            raise AnswerError("cut off", "the stream ended before the answer did")


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    """Raise AnswerError unless the status is 200."""
    if answer.status == 200:
        return
    raw = await answer.content.read(MAX_ERROR_BYTES)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = raw.decode("utf-8", "replace")
    message = error_message(body if isinstance(body, dict) else {"error": body})
    raise AnswerError(f"HTTP {answer.status}", message)


def as_answer_error(error: Exception) -> AnswerError:
    """The error that a failed request is counted as."""
    match error:
        case AnswerError():
            return error
        case TimeoutError():
            return AnswerError("timeout", "not answered in the time given by --timeout")
        case aiohttp.ClientConnectorError():
            return AnswerError("no connection", str(error))
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError() | OSError():
            return AnswerError("disconnected", str(error) or type(error).__name__)
    return AnswerError("bad answer", f"{type(error).__name__}: {error}")


@asynccontextmanager
async def open_client(
    root: str, api_key: str | None, timeout_s: float, keep_alive: bool = True
) -> AsyncIterator[Client]:
    """A client of the server at `root` (`api_root`) that opens as many connections as there are requests.

    `keep_alive`: reuse connections; some servers close them without notice (llama-server).
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    kept = {"keepalive_timeout": KEEP_ALIVE_S} if keep_alive else {"force_close": True}
    connector = aiohttp.TCPConnector(limit=0, **kept)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        yield Client(session, root, timeout_s)
