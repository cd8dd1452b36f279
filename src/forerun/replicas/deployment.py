"""What `forerun deploy` reads: a file in YAML that says which model, how many replicas, on what, and how they answer.

Knows: names, types and ranges, and which options are the engine's and the server's. Does not know: Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forerun.config import EngineConfig
from forerun.drafters.named import default_drafter, engine_config
from forerun.errors import ConfigError, suggestion
from forerun.llm import LLM
from forerun.server.settings import ServerSettings, names_of

# Of ServerSettings: what has a field of its own here, and what needs one process that answers everything.
NOT_SERVER = frozenset({"served_names", "api_keys", "allowed_hosts", "drain_s", "batch_dir", "max_batch_bytes",
                        "allow_lora_loading"})  # fmt: skip
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Autoscaling(_Strict):
    """How many replicas, by the requests they work on; Ray Serve's names."""

    min_replicas: Count = 1
    max_replicas: Count
    initial_replicas: Count | None = None
    target_ongoing_requests: Seconds = 16.0
    upscale_delay_s: float | None = None
    downscale_delay_s: float | None = None


class Resources(_Strict):
    """What a replica is given."""

    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    threads: Count | None = None  # None: as many as CPUs


class Http(_Strict):
    """Where clients reach the deployment."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    allowed_hosts: tuple[str, ...] = ()
    ingresses: Count = 1  # processes that read requests and write answers
    num_cpus: Annotated[float, Field(ge=0)] = 0.1  # of each


class Health(_Strict):
    """When a replica counts as failed, and another is started in its place."""

    period_s: Seconds = 5.0
    timeout_s: Seconds = 10.0
    stuck_s: Seconds = 60.0  # that a step of its engine may take


class Deployment(_Strict):
    """Replicas of one model behind one address."""

    model: str
    name: str | None = None  # for clients; None: the model's
    replicas: Count = 1
    autoscaling: Autoscaling | None = None
    resources: Resources = Resources()
    drafter: str | None = None  # None: as `forerun serve` has it
    draft_model: str | None = None
    engine: dict[str, Any] = {}  # fields of EngineConfig and DrafterConfig
    server: dict[str, Any] = {}  # fields of ServerSettings
    api_keys: tuple[str, ...] = ()
    http: Http = Http()
    health: Health = Health()
    drain_s: Annotated[float, Field(ge=0)] = 30.0  # for requests to end when a replica is stopped
    routing: Literal["prefix", "round_robin"] = "prefix"
    failover: bool = True  # False: a request ends with the replica it is on

    @model_validator(mode="after")
    def _one_way_to_count(self) -> Deployment:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling both say how many: give one of them")
        return self

    def engine_config(self) -> EngineConfig:
        """The engine's options, checked. Raises ConfigError."""
        threads = self.resources.threads or max(1, int(self.resources.num_cpus))
        model, draft_model = _path(self.model), self.draft_model and _path(self.draft_model)
        drafter = self.drafter or default_drafter(model, draft_model)
        return engine_config(model, {"threads": threads, **self.engine, "drafter": drafter, "draft_model": draft_model})

    def settings(self) -> ServerSettings:
        """How clients are treated, checked. Raises ConfigError."""
        known = [field.name for field in fields(ServerSettings) if field.name not in NOT_SERVER]
        _refuse_unknown("server", self.server, known)
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.server.items()
        }
        name = self.name or (Path(self.model).name if self.model.endswith(".gguf") else self.model)
        hosts = names_of(self.http.host, self.http.allowed_hosts, bool(self.api_keys))
        return ServerSettings(
            served_names=(name,), api_keys=self.api_keys, allowed_hosts=hosts, drain_s=self.drain_s,
            **given,
        )  # fmt: skip

    def open(self) -> LLM:
        """The engine of a replica."""
        config = self.engine_config()
        options = {f.name: getattr(config, f.name) for f in fields(EngineConfig) if f.name != "model"}
        return LLM(config.model, **options)


def read_deployment(path: str | Path) -> Deployment:
    """Read a file; everything in it is checked. Raises ConfigError that names the file and the field."""
    try:
        given = yaml.safe_load(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds no options: write them as NAME: VALUE, at least model")
    try:
        deployment = Deployment(**{str(name): value for name, value in given.items()})
        config = deployment.engine_config()
        deployment.settings()
    except ValidationError as error:
        raise ConfigError(f"{path}: {_told(error)}") from error
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if config.verification != "coupled":
        raise ConfigError(f"{path}: verification must be coupled: with another, no replica could go on with an answer")
    return deployment


def _told(error: ValidationError) -> str:
    first = error.errors()[0]
    *above, name = (str(part) for part in first["loc"]) if first["loc"] else ("",)
    if first["type"] == "extra_forbidden":
        part: Any = Deployment
        for each in above:
            part = part.model_fields[each].annotation
            part = part if isinstance(part, type) else Autoscaling
        return _unknown(".".join([*above, name]), name, part.model_fields)
    where = ".".join([*above, name])
    value = "" if first["type"] in ("missing", "value_error") else f"; got {first.get('input')!r:.80}"
    return f"{where}: {first['msg']}{value}" if where else first["msg"].removeprefix("Value error, ")


def _refuse_unknown(part: str, given: Mapping[str, Any], known: list[str]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ConfigError(_unknown(f"{part}.{unknown}", unknown, known))


def _unknown(where: str, name: str, known: Any) -> str:
    return f"there is no field {where}; there are {', '.join(known)}{suggestion(name, known)}"


def _path(model: str) -> str:
    """A folder or file by its whole path: replicas start elsewhere."""
    return str(Path(model).resolve()) if Path(model).exists() else model
