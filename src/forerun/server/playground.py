"""The pages: a playground to chat with the model, the API's document; a stream of what each step drafted.

Knows: the pages' files, and how steps are written for the playground. Does not know: how steps are computed, nor how
the page shows them. The model's output is sent as JSON text; the page inserts it as text, and its policy allows no
other scripts.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from importlib.resources import files
from time import perf_counter
from typing import Annotated, Any, Final

from fastapi import APIRouter, Response
from pydantic import Field

from forerun.engine.outputs import StepTrace
from forerun.server.answers import token_text
from forerun.server.bodies import CheckedRequest
from forerun.server.chat import ChatJob
from forerun.server.context import ServerContext
from forerun.server.generation import EventStream, Generation
from forerun.server.schema import MAX_MESSAGES, Body, ChatBody, Fraction, Message, Speculation
from forerun.server.streams import Service

STREAM_PATH: Final = "/playground/stream"
SCRIPTS: Final = ("chats", "docs", "dom", "figures", "markdown", "marked", "playground", "run", "stream", "trees")
_PAGE: Final = ("index.html", "text/html; charset=utf-8")
FILES: Final = {  # path -> file of the package, its type
    "/": _PAGE,
    "/playground": _PAGE,
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/playground/playground.css": ("playground.css", "text/css; charset=utf-8"),
    **{f"/playground/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
}
USUAL_TEMPERATURE: Final = 0.7  # of models that have none of their own
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PlaygroundBody(Body):
    """POST /playground/stream: a conversation, and how to go on with it."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: int | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: int | None = None
    min_p: Fraction | None = None
    repetition_penalty: Fraction | None = None
    seed: int | None = None
    speculation: Speculation | None = None


def add_playground(router: APIRouter, service: Service, context: ServerContext) -> None:
    """Routes of the page and of its stream; they are not part of the API's document."""
    for path, (name, media_type) in FILES.items():
        _add_file(router, path, name, media_type)

    @router.post(STREAM_PATH, include_in_schema=False)
    async def stream(body: PlaygroundBody, request: CheckedRequest) -> Response:
        """Answer a conversation step by step."""
        service.check_room(1)
        job = await request.prepare(lambda: TracedChat(context, body))
        generation = Generation(service, job.chat.groups, job.chat.constrained)
        return EventStream(generation, job.chunks(generation))


def _add_file(router: APIRouter, path: str, name: str, media_type: str) -> None:
    content = files("forerun.server").joinpath("playground", name).read_bytes()

    @router.head(path, include_in_schema=False)
    @router.get(path, include_in_schema=False)
    async def static() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)


class TracedChat:
    """A chat of one sample as events: `start`, `step` for every pass of the target, `delta` for new text, `end`.

    A `delta` is that of the chat endpoint's stream, its thinking apart. The texts in a step are those of its tokens.
    """

    def __init__(self, context: ServerContext, body: PlaygroundBody) -> None:
        """Raises what ChatJob raises. Takes a while: not for event loops."""
        given = {name: getattr(body, name) for name in body.model_fields_set}
        if body.temperature is None:
            given["temperature"] = context.llm.sampling_defaults.get("temperature", USUAL_TEMPERATURE)
        chat = ChatBody(**given)
        self.chat, self._name = ChatJob(context, chat), context.name_of(chat)
        self._context = context
        self._sample = self.chat.groups[0].samples[0]
        self._sample.trace = []
        # A character made of several tokens comes with the last of them.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = perf_counter()

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The events; raises ApiError if the request fails."""
        yield {"start": self._start()}
        async for event in generation.events():
            choice, parts, _ = self.chat.take(event)
            for step in event.delta.steps:
                yield {"step": self._step(step), "speedup": event.delta.speedup}
            for part in parts:
                yield {"delta": part}
            if event.delta.finish_reason is not None:
                yield {"end": {"finish_reason": choice.finish_reason, **self.chat.ends()}}

    def _start(self) -> dict[str, Any]:
        request, params = self._sample.request, self._sample.request.params
        return {
            "model": self._name,
            "drafter": " + ".join(self._context.drafter.names),
            "prompt_tokens": len(request.prompt_token_ids),
            "seed": str(request.seed),  # JavaScript's integers are exact up to 2**53
            "same_tokens": params.greedy or self._context.llm.config.verification == "coupled",
        }

    def _step(self, step: StepTrace) -> dict[str, Any]:
        names = [*(step.sources[node] for node in step.accepted), ""]
        return {
            "nodes": self._nodes(step.tokens, step.parents, step.sources),
            "accepted": list(step.accepted),
            "tokens": [
                {"id": token, "text": self._decoder.decode(self._context.tokenizer.token_bytes(token)),
                 "name": token_text(self._context.tokenizer, token), "source": name}
                for token, name in zip(step.emitted, names, strict=False)
            ],
            "time_s": round(step.time_s - self._started, 6),
        }  # fmt: skip

    def _nodes(self, tokens: Sequence[int], parents: Sequence[int], sources: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"id": token, "text": token_text(self._context.tokenizer, token), "parent": parent, "source": source}
            for token, parent, source in zip(tokens, parents, sources, strict=True)
        ]
