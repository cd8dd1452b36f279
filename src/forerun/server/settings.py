"""The server's own options, frozen.

Knows: names, defaults and ranges of what `forerun serve` adds to the engine's options. Does not know: what they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server treats its clients. Raises ConfigError for values out of range."""

    served_names: tuple[str, ...]  # names of the model; the first is reported
    api_keys: tuple[str, ...] = ()  # (): no key is asked for
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None  # None: what the context holds
    max_queue: int = 256  # samples that may wait beside those that run
    max_samples: int = 64  # n times prompts of one request
    timeout_s: float | None = None  # for requests that bring no deadline
    body_timeout_s: float = 30.0  # for the whole body to arrive
    grammar_timeout_s: float = 10.0  # for compiling a schema, regex or grammar
    warm_grammars: bool = True  # start the grammar compiler with the server, not with the first request for it
    unknown_fields: str = "refuse"  # or "ignore": drop fields of requests that are not known here
    trust_request_chat_template: bool = False  # run templates that requests bring
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        if not self.served_names:
            raise ConfigError("a served model needs at least one name")
        if any(not key for key in self.api_keys):
            raise ConfigError("an API key is empty: give a text of at least one character, or no key")
        for name in ("max_body_bytes", "max_samples", "body_timeout_s", "grammar_timeout_s"):
            _positive(name, getattr(self, name))
        for name in ("max_prompt_tokens", "timeout_s"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.unknown_fields not in ("refuse", "ignore"):
            raise ConfigError(f"unknown-fields must be refuse or ignore; got {self.unknown_fields!r}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be 0 or more, got {self.max_queue}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value}")
