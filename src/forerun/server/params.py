"""From a request's fields to sampling parameters and engine options.

Knows: defaults and meanings of OpenAI's and vLLM's sampling fields. Does not know: prompts, answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.errors import SamplingError
from forerun.server.auth import TENANT
from forerun.server.errors import ApiError, unsupported
from forerun.server.schema import SamplingBody, Speculation, check_served

SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
MAX_STRINGS, MAX_STRING = 64, 1024  # stop strings, bad words; characters of one
MAX_STOP_TOKENS = 1024
MAX_SALT = 256
MAX_PRIORITY = 1000
MAX_PROMPT_LOGPROBS = 20


def check_fields(body: SamplingBody) -> None:
    """Raise ApiError 400 for what is known but not served."""
    check_served(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of is not supported: leave it out, and ask for n samples")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if body.prompt_logprobs is not None and not 0 <= body.prompt_logprobs <= MAX_PROMPT_LOGPROBS:
        most = f"from 0 to {MAX_PROMPT_LOGPROBS}, got {body.prompt_logprobs}"
        raise ApiError(400, f"prompt_logprobs must be {most}", param="prompt_logprobs")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed: leave one out", param="prompt_logprobs")
    if body.detokenize is False and body.stop:
        raise ApiError(400, "stop needs texts, and detokenize false asks for none: leave one out", param="detokenize")
    for name in ("stop", "bad_words"):
        _check_strings(name, getattr(body, name))
    if body.stop_token_ids is not None and len(body.stop_token_ids) > MAX_STOP_TOKENS:
        most = f"the most is {MAX_STOP_TOKENS}"
        raise ApiError(400, f"stop_token_ids has {len(body.stop_token_ids)} ids; {most}", param="stop_token_ids")


def _check_strings(name: str, value: str | list[str] | None) -> None:
    """Limit the strings, since each of them is searched for at every token."""
    strings = [value] if isinstance(value, str) else value or []
    if len(strings) > MAX_STRINGS:
        raise ApiError(400, f"{name} has {len(strings)} strings; the most is {MAX_STRINGS}", param=name)
    longest = max(map(len, strings), default=0)
    if longest > MAX_STRING:
        raise ApiError(400, f"{name} has a string of {longest} characters; the most is {MAX_STRING}", param=name)


def sampling_params(body: SamplingBody, defaults: Mapping[str, Any], **others: Any) -> SamplingParams:
    """The parameters of a request; `defaults` are the model's, `others` those that endpoints name differently.

    Raises ApiError 400 naming the field.
    """
    given = {**defaults, **{name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}}
    if body.logit_bias:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if others.get("grammar") is not None and body.ignore_eos:
        raise ApiError(400, "ignore_eos contradicts structured output, which has an end", param="ignore_eos")
    if given.get("seed") == -1:  # llama.cpp and others write -1 for any seed
        del given["seed"]
    given |= others
    try:
        return SamplingParams(**given)
    except SamplingError as error:
        named = next((name for name in given if str(error).startswith(name)), None)
        raise ApiError(400, str(error), param=named, code="invalid_value") from error


def token_limit(given: int | None, default: int | None) -> int | None:
    """`max_tokens` for SamplingParams; -1, as in llama.cpp and others, means as many as fit."""
    return default if given is None else None if given == -1 else given


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(400, f"logit_bias: keys are token ids, got {key[:50]!r}", param="logit_bias")
    return int(key)


def engine_options(body: SamplingBody, drafter: DrafterConfig, timeout_s: float | None) -> dict[str, Any]:
    """How the engine treats the request: fields of `Request`. `timeout_s` is for requests without one.

    Times count from now: call it before anything that takes long.
    """
    options = {**_speculation(body.speculation, drafter), "arrival_s": perf_counter(), "cache_salt": _salt(body)}
    limit_s = body.timeout if body.timeout is not None else timeout_s
    if limit_s is not None:
        options["deadline_s"] = options["arrival_s"] + limit_s
    if body.priority is not None:
        if abs(body.priority) > MAX_PRIORITY:
            raise ApiError(400, f"priority must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param="priority")
        options["priority"] = body.priority
    return options


def _salt(body: SamplingBody) -> str:
    """What keeps this request's cached prefixes and lessons apart from others: the API key, if there are several, and
    the request's own salt."""
    salt, tenant = body.cache_salt, TENANT.get()
    if salt is not None and not 0 < len(salt) <= MAX_SALT:
        most = f"it must have 1 to {MAX_SALT} characters"
        raise ApiError(400, f"cache_salt has {len(salt)} characters; {most}", param="cache_salt")
    return f"{tenant} {salt or ''}" if tenant or salt else ""


def _speculation(asked: Speculation | None, drafter: DrafterConfig) -> dict[str, Any]:
    if asked is None or asked == "auto":
        return {}
    if asked == "off":
        return {"speculate": False}
    options: dict[str, Any] = {} if asked.max_nodes is None else {"max_nodes": asked.max_nodes}
    if asked.drafter is None:
        return options
    if asked.drafter == "none":
        return {"speculate": False}
    if asked.drafter not in drafter.names:
        raise unsupported(
            "speculation", f"drafter {asked.drafter!r} is not running here; there is {', '.join(drafter.names)}"
        )
    return {**options, **({"drafter": asked.drafter} if drafter.members else {})}
