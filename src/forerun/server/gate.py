"""What every HTTP request passes before its endpoint: an id, a known host, a key, limits, a line in the log, a count.

Knows: ASGI messages. Does not know: endpoints.
"""

from __future__ import annotations

import asyncio
import logging
import re
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server.auth import TENANT, KeyCheck
from forerun.server.batch_api import FILES_PATH
from forerun.server.batches import INSIDE
from forerun.server.errors import ApiError, as_api_error
from forerun.server.metrics import Metrics
from forerun.server.playground import FILES as PLAYGROUND_FILES
from forerun.server.settings import ServerSettings

# Open without a key: load balancers have none, and browsers have none before the page has asked the user for it.
HEALTH = "/health"
OPEN_PATHS = (HEALTH, *PLAYGROUND_FILES)
ID_HEADER = "X-Request-Id"
LEAST_RATE = 1 << 20  # bytes a second: what has arrived of a body gives the rest time
_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}$")

log = logging.getLogger("forerun.server")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: frozenset[str]) -> None:
        """`paths`: the known paths, which metrics may name; {name} in one matches any text, slashes included."""
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = paths
        longest_first = sorted((path for path in paths if "{" in path), key=len, reverse=True)
        self._open_ended = {re.compile(_pattern(path)): path for path in longest_first}
        self._check_key = KeyCheck(settings.api_keys)
        self._num_open = 0  # requests in progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, is_inside = self._known(scope["path"]), INSIDE in scope.get("extensions", ())
        most_bytes = self._settings.max_body_bytes
        if path == FILES_PATH and self._settings.batch_dir is not None and _has_parts(scope):
            most_bytes = self._settings.max_batch_bytes
        passage = _Passage(scope, receive, send, most_bytes, self._settings.body_timeout_s)
        num_places = int(path != HEALTH and not is_inside)  # health checks need none: they must always get through
        self._num_open += num_places
        try:
            if not is_inside:
                self._check(passage, path)
            await self._app(scope, passage.receive, passage.send)
        except Exception as error:
            await self._answer_error(passage, error)
        finally:
            self._num_open -= num_places
            self._metrics.http.labels(path or "other", str(passage.status)).inc()
            log.log(_level(path, passage.status), "request", extra=passage.summary())

    def _check(self, passage: _Passage, path: str | None) -> None:
        """Raise ApiError for a request that must not reach its endpoint; `path`: the known path, if it is one."""
        if path != HEALTH and self._num_open > self._settings.max_connections:
            raise ApiError(
                503, f"{self._settings.max_connections} requests are open, as many as this server takes: try again",
                code="too_many_connections", headers={"Retry-After": "1", "Connection": "close"},
            )  # fmt: skip
        if path != HEALTH:  # load balancers use addresses, and /health reveals nothing private
            self._check_host(passage.headers.get("host", ""))
        if path is None:
            asked = passage.scope["path"][:200]
            hint = (
                f"a client's base_url ends with /v1, so that it asks for /v1{asked}; "
                if self._known(f"/v1{asked}")
                else ""
            )
            raise ApiError(404, f"there is no {asked} here; {hint}see /docs", code="not_found")
        if path not in OPEN_PATHS:
            TENANT.set(self._check_key(passage.headers.get("authorization"), passage.headers.get("x-api-key")))
        passage.check_length()

    def _check_host(self, given: str) -> None:
        """Refuse unknown host names: a page of another site may make its own name resolve to this server."""
        allowed = self._settings.allowed_hosts
        if given and allowed and not any(fnmatchcase(host_name(given), name.lower()) for name in allowed):
            shown = host_name(given)[:100]
            raise ApiError(
                403, f"this server does not go by the name {shown!r}; if it should, start it with --allowed-hosts NAME",
                code="unknown_host",
            )  # fmt: skip

    def _known(self, path: str) -> str | None:
        """The known path that this path equals or matches; None if there is none."""
        if path in self._paths:
            return path
        return next((name for pattern, name in self._open_ended.items() if pattern.fullmatch(path)), None)

    async def _answer_error(self, passage: _Passage, error: Exception) -> None:
        if not isinstance(error, ApiError):
            log.exception("request failed", extra={"request_id": passage.request_id})
        if passage.status == 0:
            await as_api_error(error).response(passage.scope["path"])(passage.scope, passage.receive, passage.send)


def _pattern(path: str) -> str:
    """A path's {parameters} as a regular expression."""
    return ".+".join(re.escape(part) for part in re.split(r"\{[^}]*\}", path))


def _has_parts(scope: Scope) -> bool:
    """Whether a body goes to a file while it is read; others are held in memory."""
    return Headers(scope=scope).get("content-type", "").startswith("multipart/form-data")


def _level(path: str | None, status: int) -> int:
    """The log level of a request: successful health checks are not shown."""
    return logging.DEBUG if path == HEALTH and status == 200 else logging.INFO


def host_name(given: str) -> str:
    """A Host header without its port, an IPv6 address without brackets."""
    name = given.strip().lower()
    bare = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return bare.rstrip(".")


class _Passage:
    """One request on its way through: counts its body's bytes and adds its id to the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int, longest_s: float) -> None:
        """At most so many bytes in a body, which may take so long, and longer the more of it is there."""
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.status = 0  # of the answer, once it has begun
        self._receive = receive
        self._send = send
        self._most_bytes, self._longest_s = most_bytes, longest_s
        self._started = perf_counter()
        self._num_bytes = 0
        self._complete = False
        given = self.headers.get(ID_HEADER, "")
        self.request_id = given if _ID.match(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id

    def check_length(self) -> None:
        """Raise ApiError 413 if Content-Length is too large."""
        length = self.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._most_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        told = f"the body is larger than {self._most_bytes} bytes"
        return ApiError(413, told, code="body_too_large", headers={"Connection": "close"})

    async def receive(self) -> Message:
        """The next message; raises ApiError if the body is too large or too slow."""
        if self._complete:
            return await self._receive()  # the client's disconnect, whenever it comes
        left_s = self._longest_s + self._num_bytes / LEAST_RATE - (perf_counter() - self._started)
        try:
            message = await asyncio.wait_for(self._receive(), max(left_s, 0.001))
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        if self._num_bytes > self._most_bytes:
            raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on, the first with the request's id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[ID_HEADER] = self.request_id
        await self._send(message)

    def summary(self) -> dict[str, Any]:
        """The request's fields in the log."""
        client = self.scope.get("client")
        return {
            "request_id": self.request_id,
            "method": self.scope["method"],
            "path": self.scope["path"][:200],
            "status": self.status,
            "duration_s": round(perf_counter() - self._started, 6),
            "body_bytes": self._num_bytes,
            "client": client[0] if client else None,
        }
