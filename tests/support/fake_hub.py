"""A Hugging Face hub on this machine: the routes huggingface_hub asks, with ranges, gates and cut connections."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager

LFS_BYTES = 1 << 10  # files from this size on are stored as the hub stores large ones


@dataclass
class FakeHub:
    """What it serves, and what it was asked."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    broken: int = 0  # a status to answer everything with
    token: str | None = None  # what opens the gates
    cut_after: int = 0  # bytes of a file after which the connection ends, once
    hold_after: int = 0  # bytes of a file after which nothing comes any more
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    held: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def ranges(self, file: str) -> list[str]:
        """The ranges that were asked of a file, "" for all of it."""
        return [found for method, path, found in self.requests if method == "GET" and path.endswith("/" + file)]

    @contextmanager
    def served(self) -> Iterator[FakeHub]:
        """Listen on a free port of this machine."""
        hub = self

        class Handler(_Handler):
            fake = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


@contextmanager
def pretended(fake: FakeHub, cache: Path) -> Iterator[FakeHub]:
    """Serve it, and let huggingface_hub in this process take it for the hub, with `cache` as its cache."""
    template = "/{repo_id}/resolve/{revision}/{filename}"
    with fake.served(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", fake.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(_cache_manager, "HF_HUB_CACHE", str(cache))
        yield fake


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """As GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        self.fake.requests.append((self.command, path, self.headers.get("Range", "")))
        found = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?|/(.+?)/resolve/[^/]+/(.+)", path)
        name = (found and (found[1] or found[4])) or ""
        if self.fake.broken:
            self._error(self.fake.broken, "")
        elif found is None or name not in self.fake.repositories:
            self._error(404, "RepoNotFound")
        elif found[1]:
            self._send_json(_tree(self.fake.repositories[name]) if found[2] == "tree" else _info(self.fake, name))
        elif name in self.fake.gated and not self._may_pass():
            self._error(403 if self.headers.get("authorization") else 401, "GatedRepo")
        elif found[5] not in self.fake.repositories[name]:
            self._error(404, "EntryNotFound")
        else:
            self._send_file(name, self.fake.repositories[name][found[5]])

    def _may_pass(self) -> bool:
        return self.fake.token is not None and self.headers.get("authorization") == f"Bearer {self.fake.token}"

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, name: str, data: bytes) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", _revision(name))
        if len(data) >= LFS_BYTES:
            self.send_header("X-Linked-Etag", f'"{etag(data)}"')
            self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - begin))
        self.end_headers()
        if self.command == "GET":
            self._write(data[begin:])

    def _write(self, data: bytes) -> None:
        fake = self.fake
        if fake.cut_after and len(data) > fake.cut_after:
            self.wfile.write(data[: fake.cut_after])
            fake.cut_after = 0
            self.close_connection = True
        elif fake.hold_after and len(data) > fake.hold_after:
            self.wfile.write(data[: fake.hold_after])
            self.wfile.flush()
            fake.held.set()
            threading.Event().wait(60)
            self.close_connection = True
        else:
            self.wfile.write(data)


def _revision(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def etag(data: bytes) -> str:
    if len(data) >= LFS_BYTES:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(data: bytes) -> dict[str, Any]:
    is_large = len(data) >= LFS_BYTES
    return {
        "size": len(data),
        **({"lfs": {"oid": etag(data), "size": len(data), "pointerSize": 130}} if is_large else {}),
    }


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": path, "oid": etag(data), **_entry(data)} for path, data in files.items()]


def _info(fake: FakeHub, name: str) -> dict[str, Any]:
    files = fake.repositories[name]
    siblings = [{"rfilename": path, "blobId": etag(data), "size": len(data)} for path, data in files.items()]
    gated = "auto" if name in fake.gated else False
    return {
        "_id": "1",
        "id": name,
        "modelId": name,
        "sha": _revision(name),
        "private": False,
        "gated": gated,
        "siblings": siblings,
    }
