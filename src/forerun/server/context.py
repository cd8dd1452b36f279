"""What all endpoints of one server share: the model, its names and limits, its styles of reasoning and calling tools.

Knows: how these are found. Does not know: requests in flight, HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.errors import ConfigError
from forerun.frontend import CHARACTERS, Frontend
from forerun.server.errors import ApiError, unsupported
from forerun.server.grammar_compiler import GrammarCompiler
from forerun.server.harmony import MESSAGE
from forerun.server.reasoning import reasoning_style
from forerun.server.schema import Body, Prediction, unknown_fields
from forerun.server.settings import ServerSettings
from forerun.server.streams import Delta
from forerun.server.tools import HARMONY, tool_style
from forerun.weights.detokenizer import IncrementalDetokenizer
from forerun.weights.tokenizer import Tokenizer

MAX_DROPPED = 20  # unknown fields of a request that are listed
log = logging.getLogger("forerun.server")


class ServerContext:
    """One served model. Raises ConfigError for an unknown parser."""

    def __init__(self, llm: Frontend, settings: ServerSettings) -> None:
        settings.check_adapters(llm.adapters)
        self.llm = llm
        self.settings = settings
        self.tool_style = tool_style(settings.tool_parser, llm.tokenizer.tool_template)
        self.reasoning_marks = reasoning_style(settings.reasoning_parser, llm.tokenizer.chat_template)
        self.grammars = GrammarCompiler(llm.tokenizer, llm.vocab_size, settings.grammar_timeout_s)

    @property
    def thinks(self) -> bool:
        """Whether answers may hold reasoning."""
        return self.tool_style == HARMONY or self.reasoning_marks is not None

    @property
    def end_of_reasoning(self) -> str | None:
        """The token behind the reasoning, if answers may hold any."""
        if self.tool_style == HARMONY:
            return MESSAGE
        return None if self.reasoning_marks is None else self.reasoning_marks.end

    def expected(self, prediction: Prediction | None) -> dict[str, tuple[int, ...]]:
        """A request's prediction as the engine takes it. Raises ApiError 400 where nothing would read it."""
        if prediction is None:
            return {}
        content = prediction.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        try:
            return {"prediction": self.llm.predicted(text)}
        except ConfigError as error:
            raise unsupported("prediction", str(error)) from error

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm.tokenizer

    @property
    def drafter(self) -> DrafterConfig:
        """The configured drafter."""
        return self.llm.config.drafter

    @property
    def model_name(self) -> str:
        """The name of the model itself."""
        return self.settings.served_names[0]

    def name_of(self, body: Body) -> str:
        """The name that the answer to a request carries: the adapter's, or the model's."""
        adapter = self.adapter_of(body)
        return self.model_name if adapter is None else adapter

    def adapter_of(self, body: Body) -> str | None:
        """The adapter that a request names as its model; None for the model itself."""
        named: str | None = getattr(body, "model", None)
        return None if named in self.settings.served_names else named

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt, leaving room for one token."""
        most = self.llm.max_model_len - 1
        return min(most, self.settings.max_prompt_tokens or most)

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name as their model: the model's names, then the adapters'."""
        return (*self.settings.served_names, *self.llm.adapters)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model or adapter that is not served here."""
        if name is not None and name not in self.names:
            raise self.no_model(name)

    def no_model(self, name: str) -> ApiError:
        """The error for a model or adapter that is not served here."""
        listed = ", ".join(self.names)
        how = " (--any-model or --served-model-name lets rows name another)" if self.settings.in_batch else ""
        return ApiError(404, f"there is no model {name[:100]!r} here; there is {listed}{how}", param="model",
                        code="model_not_found")  # fmt: skip

    def check_body(self, body: Body) -> None:
        """The checks that every request passes first. Raises ApiError for unknown models, fields and templates."""
        self.check_model(getattr(body, "model", None))
        if getattr(body, "chat_template", None) is not None and not self.settings.trust_request_chat_template:
            raise unsupported(
                "chat_template",
                "chat_template: templates of requests run only with --trust-request-chat-template: leave it out",
            )
        self.check_unknown(dropped_fields(body))

    def check_unknown(self, names: Sequence[str], kind: str = "field") -> None:
        """Raise ApiError 400 if a request has fields that nobody knows, unless the server is to drop them."""
        if names and self.settings.unknown_fields == "refuse":
            hint = "leave it out"
            if not self.settings.in_batch:
                hint += ", or let the server drop such fields (--unknown-fields ignore)"
            raise ApiError(400, f"unknown {kind} {names[0]!r}: {hint}", param=names[0], code="unknown_parameter")
        if names:
            log.warning("unknown fields of a request were dropped: %r", names)

    def texts_after(self, prompt: Sequence[int], skip_special_tokens: bool) -> IncrementalDetokenizer:
        """The detokenizer for an answer to this prompt."""
        texts = self.tokenizer if skip_special_tokens else self.tokenizer.with_special_tokens()
        return IncrementalDetokenizer(texts, prompt)

    def encode(self, text: str, add_special_tokens: bool = True, *, whole: bool = True) -> list[int]:
        """Token ids of a prompt; one that cannot fit is refused before all of it is tokenized.

        `whole`: the prompt is not to be truncated. Raises PromptError and ApiError 400. Takes a while: not for event
        loops.
        """
        limit = self.max_prompt_tokens if whole else self.llm.max_model_len
        size, most = len(text.encode()), limit * self.tokenizer.max_token_bytes
        if size > most:
            raise _too_long(f"{size} bytes; {limit} tokens, which is the most, hold {most}")
        if whole and len(text) > CHARACTERS * limit:
            num_tokens = len(self.tokenizer.encode(text[: CHARACTERS * limit]))
            if num_tokens > 2 * limit:
                raise _too_long(f"more than {num_tokens} tokens; the most is {limit}")
        return self.tokenizer.encode(text, add_special_tokens)

    def truncated(self, token_ids: list[int], limit: int | None, max_tokens: int | None) -> list[int]:
        """The end of a prompt, as long as `truncate_prompt_tokens` says; -1: as much as fits beside the answer."""
        if limit == 0:
            raise ApiError(400, "truncate_prompt_tokens 0 leaves no prompt: give at least 1, or -1",
                           param="truncate_prompt_tokens")  # fmt: skip
        if limit == -1:
            limit = min(self.max_prompt_tokens, max(1, self.llm.max_model_len - (max_tokens or 1)))
        return token_ids if limit is None else token_ids[-limit:]

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise ApiError 400 for a prompt that is too long."""
        if len(token_ids) > self.max_prompt_tokens:
            raise _too_long(
                f"{len(token_ids)} tokens; the most is {self.max_prompt_tokens} (the context holds "
                f"{self.llm.max_model_len} with the answer)"
            )

    def check_samples(self, num_samples: int) -> None:
        """Raise ApiError 400 for more samples than one request may ask for."""
        if num_samples > self.settings.max_samples:
            raise ApiError(
                400, f"{num_samples} samples in one request; the most is {self.settings.max_samples}", param="n"
            )

    def stop_reason(self, delta: Delta) -> int | str | None:
        """Which of the request's own stops ended a sample; None for the model's own end."""
        return None if delta.stop_reason in self.tokenizer.eos_token_ids else delta.stop_reason

    def is_constrained(self, params: SamplingParams) -> bool:
        """Whether the request's own constraints may leave no token to choose."""
        return bool(params.grammar or params.allowed_token_ids or params.bad_words or params.min_tokens)


def dropped_fields(body: Body) -> list[str]:
    """The first MAX_DROPPED unknown fields of a request that was accepted."""
    return [name[:100] for name in islice(unknown_fields(body), MAX_DROPPED)]


def _too_long(found: str) -> ApiError:
    return ApiError(400, f"the prompt has {found}: shorten it", code="context_length_exceeded")
