"""The server's own options, frozen.

Knows: names, defaults and ranges of what `forerun serve` adds to the engine's options. Does not know: what they do.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_ORIGIN = re.compile(r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s,]+)$")
# A name, *.NAME, or an address without brackets.
_HOST = re.compile(r"^(\*|(\*\.)?[^/\s,*:\[\]]+|[0-9a-f]*(:[0-9a-f.]*){2,})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server treats its clients. Raises ConfigError for values out of range."""

    served_names: tuple[str, ...]  # names of the model; the first is reported
    api_keys: tuple[str, ...] = ()  # (): no key is asked for
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header; *.NAME for those below it; (): any
    allowed_origins: tuple[str, ...] = ()  # of browser pages that may send requests; "*": all
    max_connections: int = 4096  # requests at a time, health checks not counted
    drain_s: float = 8.0  # for requests to end when the server is told to stop
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: what the context holds
    max_queue: int = 256  # samples that may wait in addition to the running ones
    max_samples: int = 64  # n times prompts of one request
    timeout_s: float | None = None  # for requests without a deadline
    body_timeout_s: float = 30.0  # for the whole body to arrive
    grammar_timeout_s: float = 10.0  # for compiling a schema, regex or grammar
    warm_grammars: bool = True  # start the grammar compiler with the server, not with the first request for it
    in_batch: bool = False  # of `forerun batch`: errors advise what that command has
    unknown_fields: str = "refuse"  # or "ignore": drop fields of requests that are not known here
    trust_request_chat_template: bool = False  # run templates sent in requests
    allow_lora_loading: bool = False  # /v1/load_lora_adapter reads folders of this machine that requests name
    max_stored_responses: int = 1000  # of /v1/responses, for previous_response_id; 0: none
    max_stored_bytes: int = 64 << 20  # of those, conversations included
    prefill_only: bool = False  # requests end after a token, and are answered when their blocks are in the tiers
    batch_dir: Path | None = None  # where /v1/files and /v1/batches keep what they have; None: they are not served
    max_batch_bytes: int = 4 << 30  # of uploaded files
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not self.served_names:
            raise ConfigError("a served model needs at least one name")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty: give a text of at least one character, or no key")
        for name in (
            "max_body_bytes",
            "max_batch_bytes",
            "max_samples",
            "max_connections",
            "body_timeout_s",
            "grammar_timeout_s",
        ):
            _positive(name, getattr(self, name))
        for name in ("max_prompt_tokens", "timeout_s"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.unknown_fields not in ("refuse", "ignore"):
            raise ConfigError(f"unknown_fields must be refuse or ignore; got {self.unknown_fields!r}")
        for name in ("max_queue", "drain_s", "max_stored_responses", "max_stored_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        _forms(
            "allowed origin", self.allowed_origins, _ORIGIN, "* or SCHEME://HOST[:PORT], such as https://example.com"
        )
        _forms("allowed host", self.allowed_hosts, _HOST, "*, a name, *.NAME or an address, without scheme and port")

    def check_adapters(self, names: Iterable[str]) -> None:
        """Raise ConfigError for an adapter that has one of the model's names."""
        twice = next((name for name in names if name in self.served_names), None)
        if twice is not None:
            raise ConfigError(f"{twice!r} is the name of an adapter and of the model: give one of them another name")


def model_id(model: str) -> str:
    """The model's name for clients: a GGUF file's name without its folder, any other model as it was given."""
    return Path(model).name if model.lower().endswith(".gguf") else model


def names_of(host: str, given: Sequence[str], has_keys: bool) -> tuple[str, ...]:
    """The names a server on `host` answers to: the given ones; on a loopback address those of the loopback as well.

    A page of another site may make its name resolve to this machine, and then a browser treats a server without keys as
    part of that site: unless names are given, such a server answers only to its own names.
    """
    if not is_loopback(host):
        return tuple(given)
    own = dict.fromkeys((*LOOPBACK_NAMES, host))
    return (*own, *given) if given or not has_keys else ()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value}")


def _forms(what: str, values: tuple[str, ...], form: re.Pattern[str], allowed: str) -> None:
    wrong = next((value for value in values if not form.match(value.lower())), None)
    if wrong is not None:
        raise ConfigError(f"an {what} must be {allowed}; got {wrong!r}")
