"""`forerun serve`: an OpenAI-compatible server.

Knows: options, and how they reach the engine, the server and uvicorn. Does not know: how requests are answered.
"""

from __future__ import annotations

import logging
import signal
import socket
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options as opt
from forerun.cli.console import print_note
from forerun.cli.engine import needing, open_llm
from forerun.cli.groups import values
from forerun.config import api_key_from_environment, follows
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.server.settings import ServerSettings

SERVER, SAFETY = "Server", "Limits and safety"
LARGEST_PORT = 65535


def _server(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=SERVER, **limits)


def _safety(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=SAFETY, **limits)


def _engine(help_text: str, panel: str = opt.ENGINE) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The server's address, who may use it, and what it logs."""

    host: Annotated[str, _server("Address to listen on; the default is this machine alone.")] = "127.0.0.1"
    port: Annotated[int, _server("Port to listen on; 0 takes a free one.")] = 8000
    served_model_name: Annotated[list[str] | None, _server("Name of the model for clients; repeatable.")] = None
    log_format: Annotated[str, _server("text or json.")] = "text"
    log_level: Annotated[str, _server("debug (with health checks), info, warning or error.")] = "info"
    api_key: Annotated[list[str] | None, _safety("Key clients must send; repeatable. Else FORERUN_API_KEY.")] = None
    api_key_file: Annotated[Path | None, _safety("A file of keys, one a line.")] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _safety("Names clients may call this server by; *.NAME for all below, * for any; repeatable."),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _safety("Origins of web pages that may use the server, as SCHEME://HOST[:PORT], or *; repeatable."),
    ] = None
    ssl_certfile: Annotated[Path | None, _safety("TLS certificate (PEM).")] = None
    ssl_keyfile: Annotated[Path | None, _safety("TLS key (PEM).")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How requests are treated; fields of ServerSettings."""

    tool_parser: Annotated[
        str,
        _server(
            "auto (by chat template), hermes, qwen3_coder, glm45, longcat, longcat_keyed, minimax_m2, deepseek_v32, "
            "gemma4, kimi_k2, command, llama3_json, mistral, openai (gpt-oss) or none.",
            "--tool-parser",
            "--tool-call-parser",
        ),
    ] = "auto"
    reasoning_parser: Annotated[str, _server("auto (by chat template), think, longcat, gemma4, mistral or none.")] = (
        "auto"
    )
    unknown_fields: Annotated[
        str, _server("Fields of requests not known here: refuse, or ignore (answers name them).")
    ] = "refuse"
    drain_s: Annotated[
        float, _server("Time for requests to end when the server is told to stop.", "--drain-seconds", min=0)
    ] = 8.0
    trust_request_chat_template: Annotated[
        bool, _safety("Run chat templates sent in requests.", "--trust-request-chat-template")
    ] = False
    allow_lora_loading: Annotated[
        bool, _safety("Let requests load adapters from folders of this machine.", "--allow-lora-loading")
    ] = False
    max_queue: Annotated[
        int,
        _safety("Samples (a request with n=8 is 8) that may wait besides the running ones; more get 429.", min=0),
    ] = 256
    max_body_bytes: Annotated[int, _safety("Largest request body.", min=1)] = 8 << 20
    max_prompt_tokens: Annotated[int | None, _safety("Longest prompt; what the context holds unless given.")] = None
    max_samples: Annotated[int, _safety("Most samples (n times prompts) of one request.", min=1)] = 64
    max_stored_responses: Annotated[
        int, _safety("Answers of /v1/responses kept for later requests; 0 keeps none.", min=0)
    ] = 1000
    max_stored_bytes: Annotated[int, _safety("Bytes of those answers and their conversations.", min=0)] = 64 << 20
    prefill_only: Annotated[
        bool,
        _server("Read prompts for servers that share --kv-disk: end each answer after a token.", "--prefill-only"),
    ] = False
    batch_dir: Annotated[
        Path | None, _server("Folder of /v1/files and /v1/batches, which are not served without it.")
    ] = None
    max_batch_bytes: Annotated[int, _safety("Bytes of files uploaded for batches.", min=1)] = 4 << 30
    max_connections: Annotated[int, _safety("Requests open at a time; more get 503.", min=1)] = 4096
    timeout_s: Annotated[float | None, _safety("Seconds for requests without a timeout of their own.", "--timeout")] = (
        None
    )
    grammar_timeout_s: Annotated[
        float, _safety("Seconds for compiling a schema, regex or grammar.", "--grammar-timeout")
    ] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngine(opt.RankedLoading):
    """Fields of EngineConfig."""

    max_num_seqs: Annotated[int, _engine("Samples computed at the same time.")] = 32
    max_num_batched_tokens: Annotated[int, _engine("Rows a step may compute.")] = 512
    prefix_caching: Annotated[bool, _engine("Reuse computed prompts for later requests with the same beginning.")] = (
        True
    )
    kv_disk: Annotated[str | None, _engine("Folder in which computed prompts outlive the process.")] = None
    kv_disk_gib: Annotated[float, _engine("GiB that folder may take, all models together.")] = 10.0
    kv_host_gib: Annotated[
        float | None, _engine("GiB of host memory for computed prompts that a GPU has no room for.")
    ] = None
    kv_events: Annotated[
        str | None, _engine("ZeroMQ address that tells routers which prompts are cached, such as tcp://*:5557.")
    ] = None
    kv_events_replay: Annotated[str | None, _engine("Address where they ask for what they missed.")] = None
    kv_events_topic: Annotated[str, _engine("Topic of these messages; for llm-d kv@POD@MODEL.")] = ""
    seed: Annotated[int, _engine("Seeds of requests without one are derived from this.")] = 0
    generation_config: opt.GenerationConfig = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafting(opt.Drafting):
    """Which drafter, by our options or vLLM's."""

    speculative_config: Annotated[
        str | None, _engine("vLLM's JSON, instead of --drafter and --draft-model.", opt.DRAFTING)
    ] = None

    def of(self, model: str) -> dict[str, Any]:
        """See `Drafting`; --speculative-config replaces --drafter and --draft-model. Raises ConfigError for both."""
        from forerun.server.speculative import parse_speculative_config

        if self.speculative_config is not None and (self.drafter or self.draft_model):
            raise ConfigError("--speculative-config and --drafter or --draft-model were given: give one of them")
        options = opt.Drafting.of(self, model)
        if options.pop("speculative_config") is None:
            return options
        return {**options, **parse_speculative_config(self.speculative_config or "")}


def serve(
    target: opt.Target, listening: Listening, serving: Serving, engine: ServedEngine, drafting: ServedDrafting
) -> None:
    """Serve a model to any client of OpenAI's API."""
    name = target.name
    _log_to(listening.log_format, listening.log_level)
    settings = _settings(name, listening, serving)
    listen = {"host": listening.host, "port": listening.port, **_tls(listening.ssl_certfile, listening.ssl_keyfile)}
    if serving.prefill_only and engine.kv_disk is None:
        raise ConfigError("--prefill-only reads prompts for servers that share --kv-disk: give the folder, too")
    settings.check_adapters(opt.adapters(engine.lora))
    if not follows(engine.tensor_parallel * engine.pipeline_parallel):
        check_address(listening.host, listening.port)
    options = {**drafting.of(name), **values(engine)}  # may download a draft model
    _note_open(listening.host, settings)
    _bound_memory()
    _run(open_llm(name, note=logging.getLogger("forerun.server").warning, **options), settings, listen)


def _log_to(style: str, level: str) -> None:
    with needing("server", "serve"):
        from forerun.server import logs
    for option, value, allowed in (("log-format", style, ("text", "json")), ("log-level", level, logs.LEVELS)):
        if value not in allowed:
            raise ConfigError(f"--{option} must be one of {', '.join(allowed)}; got {value!r}")
    logs.configure(style, level)


def _settings(name: str, listening: Listening, serving: Serving) -> ServerSettings:
    with needing("server", "serve"):
        from forerun.server.run import affordable
        from forerun.server.settings import ServerSettings, model_id, names_of

    keys = _keys(listening.api_key, listening.api_key_file)
    given = {**values(serving), "max_connections": affordable(serving.max_connections)}
    return ServerSettings(
        served_names=tuple(listening.served_model_name or (model_id(name),)),
        api_keys=keys,
        allowed_hosts=names_of(listening.host, listening.allowed_hosts or (), bool(keys)),
        allowed_origins=tuple(listening.allowed_origins or ()),
        **given,
    )


def _keys(given: list[str] | None, path: Path | None) -> tuple[str, ...]:
    """The keys of the command line, else the environment's."""
    named = (*(given or ()), *(_read_keys(path) if path else ()))
    from_environment = None if named else api_key_from_environment()
    return (from_environment,) if from_environment else named


def _read_keys(path: Path) -> list[str]:
    try:
        keys = [line.strip() for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read API keys from {path}: {error}") from error
    if not keys:
        raise ConfigError(f"{path} holds no API key: write one a line")
    return keys


def check_address(host: str, port: int, advice: str = "choose another --port or --host") -> None:
    """Raises ConfigError for a port that is invalid or taken, and for an address this machine does not have."""
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigError(f"--port must be from 0 (takes a free one) to {LARGEST_PORT}; got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself will
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; {advice}") from error


def _tls(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    if (certificate is None) != (key is None):
        raise ConfigError("TLS needs both --ssl-certfile and --ssl-keyfile")
    missing = next((path for path in (certificate, key) if path is not None and not path.is_file()), None)
    if missing is not None:
        raise ConfigError(f"there is no file {missing}")
    if certificate is None or key is None:
        return {}
    import ssl

    try:  # the server itself would after the model is loaded
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        raise ConfigError(
            f"--ssl-certfile {certificate} and --ssl-keyfile {key} are no certificate and its key ({error}): give both "
            "as PEM, the key without a password"
        ) from error
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def _bound_memory() -> None:
    """Limit glibc's arenas before the engine starts threads; the application's own call would come too late."""
    from forerun.server.memory import bound_arenas

    bound_arenas()


def _note_open(host: str, settings: ServerSettings) -> None:
    from forerun.server.settings import is_loopback

    if not is_loopback(host) and not settings.api_keys:
        print_note(f"anyone who reaches {host} may use this server: consider --api-key-file")


def _run(llm: LLM, settings: ServerSettings, listen: dict[str, Any]) -> None:
    from forerun.runtime.parallel.crew import FLUSH_LIMIT_S
    from forerun.runtime.parallel.start import leave
    from forerun.server.app import create_app
    from forerun.server.run import Server

    server = Server(create_app(llm, settings), **listen)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    # The inner one is the signal that the server has handled, raised by uvicorn again; the outer a second one.
    with suppress(KeyboardInterrupt), closing(llm), suppress(KeyboardInterrupt):
        server.run()
    signal.signal(signal.SIGTERM, before)
    if server.lost is not None:
        raise server.lost
    leave(FLUSH_LIMIT_S)
