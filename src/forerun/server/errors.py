"""Errors as OpenAI's clients expect them: a status, and a body that says what is wrong with which field.

Knows: statuses, error bodies, which status each exception of forerun deserves. Does not know: requests or engines.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from forerun.errors import (
    ConfigError,
    DeadlineError,
    ForerunError,
    GrammarError,
    LogitsError,
    ModelError,
    QueueFullError,
    RequestError,
    UnknownAdapterError,
)

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable_error",
         504: "timeout_error"}  # fmt: skip
ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
                   413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                   504: "timeout_error"}  # fmt: skip
REPLICA_CHANGED = "replica_changed"  # code: the process that asks belongs to another model or release than the replicas
TOO_MANY = "too_many_samples"  # code: more than the server that was asked ever takes at a time
MAX_SHOWN = 200  # characters of a value shown in a message
MAX_ERRORS = 100  # of a body; pydantic collects all before it gives the first


class ApiError(HTTPException):
    """One request ends with this status; `param` names the field at fault, `code` is for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message, dict(headers or {}))
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error object of OpenAI's API."""
        kind = TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str) -> JSONResponse:
        """The answer to send to a request for `path`."""
        body = anthropic_body(self) if path.startswith("/v1/messages") else self.body()
        return JSONResponse(body, self.status_code, headers=dict(self.headers or {}))

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """This error in another API's terms; `names`: field names here -> there."""
        message = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], self.message)
        param = names.get(self.param, self.param) if self.param else None
        return ApiError(self.status_code, message, param=param, code=self.code, headers=self.headers)


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error object of Anthropic's API."""
    kind = ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def unsupported(param: str, message: str) -> ApiError:
    """A field that is known but not served here."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def never_fits(num_samples: int, most: int) -> ApiError:
    """More samples than a server takes at a time: to wait for room would be of no use."""
    return ApiError(400, f"{num_samples} samples in one request; this server holds {most} at a time "
                         "(--max-num-seqs and --max-queue): ask for fewer", param="n", code=TOO_MANY)  # fmt: skip


def as_api_error(error: Exception, constrained: bool = False) -> ApiError:
    """The error that a client sees for `error`; `constrained`: the request itself limits which tokens may come."""
    match error:
        case ApiError():
            return error
        case GrammarError():
            return ApiError(400, str(error), code="invalid_grammar")
        case LogitsError() if constrained:
            return ApiError(400, str(error), code="no_token_possible")
        case LogitsError():
            return ApiError(500, str(error), code="bad_logits")
        case DeadlineError():
            return ApiError(504, str(error), code="deadline_exceeded")
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case RequestError():
            return ApiError(400, str(error), code="invalid_prompt")
        case UnknownAdapterError():  # it was unloaded after the name was checked
            return ApiError(404, str(error), param="model", code="model_not_found")
        case ConfigError() | ModelError():  # the model of an adapter that a request loads
            return ApiError(400, str(error), code="invalid_value")
        case ForerunError():
            return ApiError(500, str(error))
    return ApiError(500, "the server failed while working on this request; its log says why", code="internal_error")


def validation_error(error: RequestValidationError | ValidationError) -> ApiError:
    """What is wrong with the first wrong field of a body, and where."""
    if isinstance(error, ValidationError) and error.error_count() > MAX_ERRORS:  # pydantic cannot give only the first
        return ApiError(400, f"{error.error_count()} fields of the body are wrong", code="invalid_type")
    found = [([str(part) for part in one["loc"] if part != "body"], one) for one in error.errors()]
    of_field = [(path, one) for path, one in found if path[:1] == found[0][0][:1]]
    parts, first = max(of_field, key=lambda each: len(each[0]))  # of several forms the one that was meant fits furthest
    path, field = ".".join(part for part in parts if not _FORM.match(part)), parts[0] if parts else None
    if not path:  # do not echo the body: it was not read as JSON, or is not an object
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json",
                        code="invalid_type")  # fmt: skip
    return ApiError(400, f"{path}: {first['msg']}; got {shown(first.get('input'))}", param=field, code="invalid_type")


# What pydantic calls one of several forms of a field: SpeculationChoice, literal['auto','off'].
_FORM = re.compile(r"[A-Z]\w*$|\w+\[")


def shown(value: Any) -> str:
    """A value for a message: no longer than a line, however large it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = MAX_SHOWN
    text = short.repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
