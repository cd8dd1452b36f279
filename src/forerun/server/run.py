"""A server's life cycle: what it logs at its start, how it listens, and how it shuts down.

Knows: uvicorn, the limits on connections, what to log. Does not know: routes, requests, options.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from functools import partial
from types import FrameType
from typing import Any, Final

import uvicorn
from fastapi import FastAPI

from forerun.errors import RankLost
from forerun.llm import LLM
from forerun.server.connections import IDLE_S, SPARE, Connection
from forerun.server.settings import ServerSettings

FLUSH_S: Final = 5.0  # for clients to read the last bytes of a server that stops
LOST_DRAIN_S: Final = 2.0  # for clients to get their error where nothing can be computed any more
OTHER_FILES: Final = 128  # open files besides connections

log = logging.getLogger("forerun.server")


class Server(uvicorn.Server):
    """Serves an application of `create_app`; a signal gives the requests that run `drain_s` seconds to end."""

    def __init__(self, app: FastAPI, **options: Any) -> None:
        """`options` are uvicorn's: host, port, ssl_certfile, ssl_keyfile."""
        settings: ServerSettings = app.state.context.settings
        connection: Any = partial(Connection, idle={}, most=settings.max_connections + SPARE)
        self._app = app
        self._drain_s = settings.drain_s
        self._hurried = False
        self.lost: RankLost | None = None  # why the server stopped by itself
        if isinstance(llm := app.state.context.llm, LLM):
            llm.on_rank_lost(self._stop_for)
        config = uvicorn.Config(
            app, loop="asyncio", http=connection, ws="none", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=IDLE_S, **options,
        )  # fmt: skip
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and log what is served and where."""
        await super().startup(sockets)
        if not self.should_exit:
            announce(self._app.state.context.llm, self._app.state.context.settings, self._address())

    def _address(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # bound to any address: show one that works
        scheme = "https" if self.config.is_ssl else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown, another aborts open requests; the engine always finishes its step."""
        if self.should_exit:
            self._hurried = True
        else:
            super().handle_exit(sig, frame)

    def _stop_for(self, error: RankLost) -> None:
        """Another rank of the model is lost: clients are told, then this process ends."""
        log.error("a rank of the model is lost", extra={"error": str(error)})
        self.lost = error
        self._drain_s = min(self._drain_s, LOST_DRAIN_S)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more requests, let the running ones finish, and abort them when the time is over."""
        log.info("stopping", extra={"requests_left": len(self.server_state.tasks), "drain_s": self._drain_s})
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self._drain_s
        while clock() < until and not self._hurried:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._app.state.stop)  # requests that still wait get an error
        await asyncio.sleep(FLUSH_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def affordable(max_connections: int) -> int:
    """`max_connections`, or as many as the limit on open files allows; raises this process's own limit if needed."""
    if sys.platform == "win32":
        return max_connections
    import resource

    wanted = max_connections + SPARE + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(f"--max-connections {max_connections} needs {wanted} open files, the system allows {allowed}")
    return max(1, allowed - SPARE - OTHER_FILES)


def announce(llm: LLM, settings: ServerSettings, address: str) -> None:
    """Tell the log what is served, how, where, and within which limits."""
    config, drafter = llm.config, llm.config.drafter
    log.info("model", extra={
        "names": ", ".join(settings.served_names), "source": config.model, "implementation": llm.loaded.implementation,
        "kernels": f"{llm.kernels.name} ({llm.kernels.reason})", "device": str(llm.engine.kv_cache.device),
        "drafter": "+".join(drafter.names) if drafter.model is None else f"{drafter.name}={drafter.model}",
        "max_draft_tokens": None if drafter.name == "none" else drafter.max_draft_tokens,
    })  # fmt: skip
    if config.num_ranks > 1:
        log.info("ranks", extra={
            "processes": config.num_ranks, "tensor_parallel": config.tensor_parallel,
            "pipeline_parallel": config.pipeline_parallel, "rank_timeout_s": config.rank_timeout_s,
        })  # fmt: skip
    if llm.loaded.sampling:
        log.info("sampling defaults, as generation_config.json says", extra=dict(llm.loaded.sampling))
    log.info("limits", extra={
        "max_model_len": llm.max_model_len, "kv_cache_tokens": llm.engine.kv_cache.num_rows,
        "max_num_seqs": llm.engine.scheduler.limits.max_num_seqs, "max_queue": settings.max_queue,
        "max_connections": settings.max_connections, "max_body_bytes": settings.max_body_bytes,
        "timeout_s": settings.timeout_s, "api_keys": len(settings.api_keys),
        "allowed_hosts": ", ".join(settings.allowed_hosts) or "any",
        "allowed_origins": ", ".join(settings.allowed_origins) or "none",
    })  # fmt: skip
    log.info("listening", extra={"api": f"{address}/v1", "playground": f"{address}/", "docs": f"{address}/docs"})
