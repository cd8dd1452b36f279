"""/v1/files and /v1/batches: OpenAI's Batch API over a folder of the server's machine.

Knows: routes and their bodies, which requests rows become. Does not know: how files are kept (`stored_files`), how
batches are answered (`batch_jobs`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, BinaryIO, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse, StreamingResponse

from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.auth import TENANT
from forerun.server.batch_job import WINDOW
from forerun.server.batch_jobs import BatchJobs
from forerun.server.batches import URLS, BatchServer
from forerun.server.errors import ApiError
from forerun.server.folder_thread import ANSWER_S, FolderThread
from forerun.server.params import MAX_PRIORITY
from forerun.server.schema import Body
from forerun.server.settings import ServerSettings
from forerun.server.stored_files import PURPOSES, FileStore, page
from forerun.server.streams import Service

NOT_SERVED = (
    "files and batches are kept in a folder: start the server with --batch-dir FOLDER; for forerun deploy, write "
    "batch_dir: FOLDER below server"
)
LONGEST_ROW_S: Final = 7 * 86400.0  # a row of a batch waits behind other requests
FILES_PATH = "/v1/files"
PIECE_BYTES: Final = 1 << 18  # of a download: what a client that stops reading holds
MAX_METADATA = 16  # entries, each name of at most 64 characters and value of at most 512: OpenAI's limits
DEFAULT_PAGE = 20  # batches; of files, all
log = logging.getLogger("forerun.server")


class CreateBatchBody(Body):
    """A batch over an uploaded file."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchFolder:
    """The files and the batches of a server, for its event loop; None of either where it keeps none."""

    def __init__(self, files: FileStore | None = None, jobs: BatchJobs | None = None) -> None:
        self._files, self._jobs = files, jobs
        self._answering: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Answer batches until `stop`."""
        if self._jobs is not None:
            self._answering = asyncio.create_task(self._jobs.run())

    async def stop(self) -> None:
        """End the rows that run. Takes a few seconds at most: a folder that hangs is left as it is."""
        if self._jobs is None or self._answering is None:
            return
        self._jobs.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._answering
                await self._jobs.thread.do(bool)  # after all that was left to do
                return
        log.warning("the folder of batches hangs: its batches go on after the next start")

    @property
    def files(self) -> FileStore:
        """The files, for the folder's thread. Raises ApiError 404 where none are kept."""
        if self._files is None:
            raise ApiError(404, NOT_SERVED, code="not_served")
        return self._files

    @property
    def jobs(self) -> BatchJobs:
        """The batches, for the folder's thread. Raises ApiError 404 where none are kept."""
        if self._jobs is None:
            raise ApiError(404, NOT_SERVED, code="not_served")
        return self._jobs

    @property
    def thread(self) -> FolderThread:
        """The thread that uses the folder. Raises ApiError 404 where there is none."""
        return self.jobs.thread


def batch_folder(
    app: FastAPI, service: Service, settings: ServerSettings, config: EngineConfig, stopping: Callable[[], bool],
    deployment: str | None,
) -> BatchFolder:  # fmt: skip
    """The server's files and batches. Rows wait behind other requests, however long, and take half of the seats."""
    if settings.batch_dir is None:
        return BatchFolder()
    if config.verification != "coupled":
        raise ConfigError(
            f"with --verification {config.verification} answers of batches would depend on drafts: --batch-dir needs "
            "coupled"
        )
    files = FileStore(settings.batch_dir / "files", settings.max_batch_bytes)
    server = BatchServer(
        app, lambda: bool(service.healthy) and not stopping(), config.seed,
        defaults={"priority": MAX_PRIORITY, "timeout": LONGEST_ROW_S},
    )  # fmt: skip
    path, row_bytes = settings.batch_dir / "batches", settings.max_body_bytes
    jobs = BatchJobs(
        path, files, server, lambda: max(1, service.num_seats // 2), row_bytes, settings.drain_s, deployment
    )
    return BatchFolder(files, jobs)


def add_batches(router: APIRouter, folder: BatchFolder) -> None:
    """The routes; without a folder they say how to get one."""
    _add_files(router, folder)

    @router.post("/v1/batches", response_class=JSONResponse)
    async def create_batch(body: CreateBatchBody) -> dict[str, Any]:
        """Answer the rows of an uploaded file."""
        jobs = folder.jobs
        _check(body)
        create = partial(jobs.create, body.endpoint, body.input_file_id, body.metadata)
        return await folder.thread.answer(lambda: create().said())

    @router.get("/v1/batches")
    async def batches(after: str | None = None, limit: int = DEFAULT_PAGE) -> dict[str, Any]:
        """The batches, the last one first."""
        return await folder.thread.answer(lambda: page([job.said() for job in folder.jobs.all()], after, limit))

    @router.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> dict[str, Any]:
        """One batch."""
        return await folder.thread.answer(lambda: folder.jobs.get(batch_id).said())

    @router.post("/v1/batches/{batch_id}/cancel", response_class=JSONResponse)
    async def cancel_batch(batch_id: str) -> dict[str, Any]:
        """Begin no further row; what was answered is kept."""
        return await folder.thread.answer(lambda: folder.jobs.cancel(batch_id).said())


def _add_files(router: APIRouter, folder: BatchFolder) -> None:
    @router.post(FILES_PATH, response_class=JSONResponse)
    async def upload_file(file: UploadFile, purpose: Annotated[str, Form()], request: Request) -> dict[str, Any]:
        """Keep a file of rows."""
        files = folder.files
        strange = next((name for name in await request.form() if name not in ("file", "purpose")), None)
        if strange is not None:
            raise ApiError(400, f"unknown field {strange[:100]!r}; files have file and purpose", param=strange[:100])
        if purpose not in PURPOSES:
            raise ApiError(400, f"purpose must be {', '.join(PURPOSES)}; got {purpose[:100]!r}", param="purpose")
        steps = files.add(file.file, file.size or 0, file.filename or "rows.jsonl", purpose, TENANT.get())
        return (await folder.thread.answer_by_steps(steps)).said()

    @router.get(FILES_PATH)
    async def stored_files(
        purpose: str | None = None,
        after: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """The files, the last one first, or in the order in which they came."""

        def listed() -> dict[str, Any]:
            found = folder.files.all(TENANT.get())[:: 1 if order == "desc" else -1]
            return page([file.said() for file in found if purpose in (None, file.purpose)], after, limit)

        return await folder.thread.answer(listed)

    @router.get(FILES_PATH + "/{file_id}")
    async def stored_file(file_id: str) -> dict[str, Any]:
        """What is known of a file."""
        return await folder.thread.answer(lambda: folder.files.get(file_id, TENANT.get()).said())

    @router.get(FILES_PATH + "/{file_id}/content", response_class=Response)
    async def file_content(file_id: str) -> Response:
        """A file's bytes."""
        name, size, file = await folder.thread.answer(lambda: folder.files.open(file_id, TENANT.get()))
        named = f'filename="{name}"' if name == quote(name) else f"filename*=utf-8''{quote(name, safe='')}"
        headers = {"content-length": str(size), "content-disposition": f"attachment; {named}"}
        return StreamingResponse(_pieces(folder.thread, file, size), 200, headers, "application/octet-stream")

    @router.delete(FILES_PATH + "/{file_id}", response_class=JSONResponse)
    async def delete_file(file_id: str) -> dict[str, Any]:
        """Forget a file."""

        def delete() -> None:
            files, user = folder.files, folder.jobs.uses(file_id)
            files.get(file_id, TENANT.get())
            if user is not None:
                raise ApiError(409, f"{user.id} is not over and needs {file_id}: cancel it first", code="file_in_use")
            files.delete(file_id)

        await folder.thread.answer(delete)
        return {"id": file_id, "object": "file", "deleted": True}


async def _pieces(thread: FolderThread, file: BinaryIO, left: int) -> AsyncIterator[bytes]:
    """The first so many bytes of a file, which is closed then."""
    try:
        while left > 0 and (piece := await thread.answer(partial(file.read, min(left, PIECE_BYTES)), True)):
            left -= len(piece)
            yield piece
    finally:
        thread.submit(file.close)


def _check(body: CreateBatchBody) -> None:
    """Raise ApiError 400 for what is not served."""
    if body.endpoint not in URLS:
        raise ApiError(400, f"endpoint must be one of {', '.join(URLS)}; got {body.endpoint[:100]!r}", param="endpoint")
    if body.completion_window != WINDOW:
        raise ApiError(400, f"completion_window must be {WINDOW} (nothing expires here); got "
                            f"{body.completion_window[:100]!r}", param="completion_window")  # fmt: skip
    entries = body.metadata or {}
    if len(entries) > MAX_METADATA or any(len(name) > 64 or len(value) > 512 for name, value in entries.items()):
        raise ApiError(400, f"metadata may have {MAX_METADATA} entries, names of 64 characters and values of 512",
                       param="metadata")  # fmt: skip
