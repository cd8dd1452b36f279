"""The application: which path does what.

Knows: routes, and how errors become answers. Does not know: how answers are made, nor the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Event, Thread
from time import time
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from forerun import __version__
from forerun.engine.outputs import RequestGroup
from forerun.errors import ForerunError, ModelNotFoundError
from forerun.frontend import Frontend
from forerun.llm import LLM
from forerun.server import metrics
from forerun.server.batch_api import BatchFolder, add_batches, batch_folder
from forerun.server.bodies import CheckedRequest, CheckedRoute, LargeBodies
from forerun.server.chat import ChatJob
from forerun.server.completions import CompletionJob
from forerun.server.context import ServerContext
from forerun.server.conversation import render
from forerun.server.errors import ApiError, as_api_error, unsupported, validation_error
from forerun.server.gate import ID_HEADER, Gate
from forerun.server.generation import EventStream, Generation, unless_gone
from forerun.server.grammar_compiler import MAX_WAITING, GrammarCompiler
from forerun.server.memory import bound_arenas
from forerun.server.messages import MessageJob, count_tokens
from forerun.server.messages_schema import CountTokensBody, MessagesBody
from forerun.server.playground import FILES, STREAM_PATH, add_playground
from forerun.server.responses import ResponseJob
from forerun.server.responses_schema import ResponsesBody
from forerun.server.responses_store import ResponseStore, not_found
from forerun.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadAdapterBody,
    TokenizeBody,
    UnloadAdapterBody,
)
from forerun.server.service import EngineService
from forerun.server.settings import ServerSettings
from forerun.server.streams import Service

NUM_THREADS = MAX_WAITING + 32  # read requests; MAX_WAITING of them may wait for the grammar compiler
log = logging.getLogger("forerun.server")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in {
        400: "The request is wrong; the error names the field.",
        401: "An API key is needed.",
        403: "The name in the Host header is not one of the server's, or adapters may not be loaded by requests.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        409: "The file is part of a batch that is not over.",
        413: "The body is too large.",
        422: "Not used; wrong fields are 400.",
        429: "The queue is full; Retry-After says when to try again.",
        503: "The engine has failed, the server stops, too many requests are open, or the folder of batches hangs.",
        504: "The request took longer than its timeout.",
    }.items()
}


class Job(Protocol):
    """A checked request that knows how to answer."""

    groups: list[RequestGroup]
    constrained: bool
    grammar_s: float | None  # seconds until its grammar was compiled; None: it has none

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """The answer in one piece."""

    def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in pieces."""


def create_app(llm: LLM, settings: ServerSettings) -> FastAPI:
    """The application that serves `llm`; its lifespan starts and stops the engine's thread."""
    return application(EngineService(llm, settings), llm, settings)


def application(service: Service, llm: Frontend, settings: ServerSettings, deployment: str | None = None) -> FastAPI:
    """The application that answers with `service`, which its lifespan starts and stops; `llm` prepares the requests.

    `deployment`: whose processes use the folder of batches together, and answer with the same model; None: of nobody.
    """
    bound_arenas()
    context = ServerContext(llm, settings)
    large, stopping = LargeBodies(), Event()
    about: dict[str, Any] = {"title": "forerun", "version": __version__, "separate_input_output_schemas": False}
    app = FastAPI(**about, docs_url=None, redoc_url=None)  # FastAPI's own pages load their scripts from the internet
    folder = batch_folder(app, service, settings, llm.config, stopping.is_set, deployment)

    def stop() -> None:
        """End all requests with an error, and the processes that serve them; may be called again."""
        stopping.set()
        service.stop()
        context.grammars.close()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, "forerun-request"))
        folder.start()
        if settings.warm_grammars:
            Thread(target=_warm, args=(context.grammars, stopping), name="forerun-grammars", daemon=True).start()
        try:
            yield
        finally:
            try:
                await folder.stop()
            finally:
                await asyncio.to_thread(stop)
                large.close()

    app.router.lifespan_context = lifespan
    app.state.service, app.state.context, app.state.large_bodies = service, context, large
    app.state.check_body = context.check_body
    app.state.stop = stop
    app.include_router(_router(service, context, folder))
    for kind in (ForerunError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    paths = frozenset((*app.openapi()["paths"], "/openapi.json", *FILES, STREAM_PATH))
    app.add_middleware(Gate, settings=settings, metrics=service.metrics, paths=paths)
    if settings.allowed_origins:  # outermost, so that pages may read errors; preflights carry no key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",), allow_private_network=True, expose_headers=(ID_HEADER, "Retry-After"),
        )  # fmt: skip
    return app


def _warm(grammars: GrammarCompiler, stopping: Event) -> None:
    """Runs beside the server, which may end first: so it must not hold a reference to the engine."""
    try:
        grammars.start()
    except ApiError as error:
        if not stopping.is_set():
            log.warning("no structured output: %s", error.message)


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case RequestValidationError():
            told = validation_error(error)
        case HTTPException() if not isinstance(error, ApiError):
            told = ApiError(error.status_code, str(error.detail), headers=error.headers)
        case _:
            told = as_api_error(error)
    return told.response(request.url.path)


def _router(service: Service, context: ServerContext, folder: BatchFolder) -> APIRouter:
    async def check_query(request: Request) -> None:
        known = {field.alias for field in request.scope["route"].dependant.query_params}
        context.check_unknown([name[:100] for name in request.query_params if name not in known], "query parameter")

    router = APIRouter(route_class=CheckedRoute, responses=_ERRORS)
    with_query = APIRouter(route_class=CheckedRoute, responses=_ERRORS, dependencies=[Depends(check_query)])
    answer = _Answering(service)
    _add_generating(router, answer, context)
    _add_responses(with_query, answer, context)
    _add_texts(router, context)
    _add_adapters(router, service, context)
    add_batches(with_query, folder)
    router.include_router(with_query)
    _add_status(router, service, context)
    add_playground(router, service, context)
    return router


class _Answering:
    """Answers generating requests, whatever their API."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(
        self, request: CheckedRequest, make: Callable[[], Job], stream: bool | None, named: bool = False
    ) -> Response:
        """The answer of the job that `make` builds from a checked request; `named`: events of its stream have names."""
        self._service.check_room(1)
        job = await request.prepare(make)
        if job.grammar_s is not None:
            self._service.metrics.grammar.observe(job.grammar_s)
        generation = Generation(self._service, job.groups, job.constrained)
        if stream:
            return EventStream(generation, job.chunks(generation), named)
        return JSONResponse(await unless_gone(request, generation, job.whole(generation)))


def _add_generating(router: APIRouter, answer: _Answering, context: ServerContext) -> None:
    @router.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat_completions(body: ChatBody, request: CheckedRequest) -> Response:
        """Answer a conversation."""
        return await answer(request, lambda: ChatJob(context, body), body.stream)

    @router.post("/v1/completions", response_class=JSONResponse)
    async def completions(body: CompletionBody, request: CheckedRequest) -> Response:
        """Complete texts."""
        return await answer(request, lambda: CompletionJob(context, body), body.stream)

    @router.post("/v1/messages", response_class=JSONResponse)
    async def messages(body: MessagesBody, request: CheckedRequest) -> Response:
        """Answer a conversation in Anthropic's format."""
        return await answer(request, lambda: MessageJob(context, body), body.stream, named=True)

    @router.post("/v1/messages/count_tokens", response_class=JSONResponse)
    async def count_message_tokens(body: CountTokensBody, request: CheckedRequest) -> dict[str, Any]:
        """Count the prompt tokens of a conversation."""
        return await request.prepare(lambda: count_tokens(context, body))

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Not served."""
        raise ApiError(
            404,
            "embeddings are not served: forerun runs models that write text, and its drafting has no use for models "
            "that embed it; run an embedding model with a server made for those",
            code="not_served",
        )


def _add_responses(router: APIRouter, answer: _Answering, context: ServerContext) -> None:
    store = ResponseStore(context.settings.max_stored_responses, context.settings.max_stored_bytes)

    @router.post("/v1/responses", response_class=JSONResponse)
    async def responses(body: ResponsesBody, request: CheckedRequest) -> Response:
        """Answer a conversation in the format of OpenAI's Responses API."""
        return await answer(request, lambda: ResponseJob(context, store, body), body.stream, named=True)

    @router.get("/v1/responses/{response_id}")
    async def stored_response(response_id: str, stream: bool = False) -> Response:
        """A stored response."""
        if stream:
            raise unsupported("stream", "stored responses are not streamed: leave stream out")
        found = store.response(response_id)
        if found is None:
            raise not_found(response_id)
        return Response(found, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", response_class=JSONResponse)
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        if not store.delete(response_id):
            raise not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def _add_texts(router: APIRouter, context: ServerContext) -> None:
    @router.post("/tokenize", response_class=JSONResponse)
    async def tokenize(body: TokenizeBody, request: CheckedRequest) -> Response:
        """Token ids of a text or of a conversation."""
        return await request.prepare(lambda: JSONResponse(_tokenized(context, body)))

    @router.post("/detokenize", response_class=JSONResponse)
    async def detokenize(body: DetokenizeBody, request: CheckedRequest) -> Response:
        """The text of token ids."""
        return await request.prepare(lambda: JSONResponse({"prompt": _text(context, body.tokens)}))

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """The tokenizer's special tokens by their roles, and its chat template, as tokenizer_config.json has them."""
        return {**context.tokenizer.special_tokens, "chat_template": context.tokenizer.chat_template}


def _add_adapters(router: APIRouter, service: Service, context: ServerContext) -> None:
    """The routes that vLLM has for this; requests name an adapter as their model."""

    def check_allowed() -> None:
        if not context.settings.allow_lora_loading:
            raise ApiError(403, "adapters come and go by requests only with --allow-lora-loading: restart the server "
                                "with it, or load adapters at its start (--lora NAME=PATH)")  # fmt: skip

    @router.post("/v1/load_lora_adapter", response_class=JSONResponse)
    async def load_lora_adapter(body: LoadAdapterBody) -> dict[str, Any]:
        """Load a LoRA adapter from a folder of the server's machine."""
        check_allowed()
        names = context.settings.served_names if body.load_inplace else context.names
        if body.lora_name in names:
            raise ApiError(400, f"{body.lora_name[:100]!r} is the name of a model or adapter here: unload it, load in "
                                "its place (load_inplace), or give another one", param="lora_name")  # fmt: skip
        try:
            await service.load_adapter(body.lora_name, body.lora_path, body.load_inplace)
        except ModelNotFoundError as error:
            raise ApiError(404, str(error), param="lora_path") from error
        return {"id": body.lora_name, "object": "model", "parent": context.model_name}

    @router.post("/v1/unload_lora_adapter", response_class=JSONResponse)
    async def unload_lora_adapter(body: UnloadAdapterBody) -> dict[str, Any]:
        """Forget a LoRA adapter; requests that run with it keep it to their end."""
        check_allowed()
        if body.lora_name not in context.llm.adapters:
            loaded = ", ".join(context.llm.adapters) or "none"
            raise ApiError(404, f"there is no adapter {body.lora_name[:100]!r} here; loaded are {loaded}",
                           param="lora_name")  # fmt: skip
        await service.unload_adapter(body.lora_name)
        return {"id": body.lora_name, "object": "model", "deleted": True}


def _tokenized(context: ServerContext, body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = context.encode(body.prompt, body.add_special_tokens is not False)
    else:
        given = body.model_dump(exclude={"prompt", "add_special_tokens", "return_token_strs"}, exclude_unset=True)
        text = render(context.tokenizer, ChatBody(**given), body.tools or [])
        tokens = context.encode(text, body.add_special_tokens or False)
    names = {"token_strs": [context.tokenizer.token_text(t) for t in tokens]} if body.return_token_strs else {}
    return {"count": len(tokens), "max_model_len": context.llm.max_model_len, "tokens": tokens, **names}


def _text(context: ServerContext, token_ids: list[int]) -> str:
    most, vocab_size = context.llm.max_model_len, context.llm.vocab_size
    if len(token_ids) > most:
        raise ApiError(400, f"{len(token_ids)} tokens; the most is {most}, the context", param="tokens")
    strange = next((t for t in token_ids if not 0 <= t < vocab_size), None)
    if strange is not None:
        raise ApiError(400, f"there is no token {strange}; the model knows 0 to {vocab_size - 1}", param="tokens")
    return context.tokenizer.decode(token_ids, skip_special_tokens=False)


def _add_status(router: APIRouter, service: Service, context: ServerContext) -> None:
    same: dict[str, Any] = {
        "object": "model",
        "created": int(time()),
        "owned_by": "forerun",
        "max_model_len": context.llm.max_model_len,
    }

    def entries() -> dict[str, dict[str, Any]]:
        base = {"root": context.llm.config.model, "parent": None}
        return {name: {"id": name, **same, **base} for name in context.settings.served_names} | {
            name: {"id": name, **same, "root": adapter.path, "parent": context.model_name}
            for name, adapter in context.llm.adapters.items()
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, by all its names, and its adapters."""
        return {"object": "list", "data": list(entries().values())}

    @router.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        """The served model, by one of its names, or an adapter."""
        found = entries().get(model_id)
        if found is None:
            raise context.no_model(model_id)
        return found

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of forerun."""
        return {"version": __version__}

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """Whether requests can be answered."""
        load = service.load()
        drafters = {name: {"errors": n, "rest_s": round(rest_s, 1)} for name, (n, rest_s) in load.drafters.items()}
        status = "ok" if load.healthy else "failed"
        body = {"status": status, "running": load.num_running, "waiting": load.num_waiting, "drafters": drafters}
        return JSONResponse(body, 200 if load.healthy else 503)

    @router.get("/metrics")
    async def prometheus() -> Response:
        """Figures for Prometheus."""
        return Response(await service.metrics_text(), media_type=metrics.CONTENT_TYPE)
