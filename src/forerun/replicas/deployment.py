"""What `forerun deploy` reads: a file in YAML that says which model, how many replicas, on what, and how they answer.

Knows: names, types and ranges, and which options are the engine's and the server's. Does not know: Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from forerun.config import EngineConfig
from forerun.drafters.named import default_drafter, engine_config, whole_paths
from forerun.errors import ConfigError, suggestion
from forerun.llm import LLM
from forerun.server.settings import ServerSettings, model_id, names_of

# Of ServerSettings: what has a field of its own here, and what needs one process that answers everything.
NOT_SERVER = frozenset(
    {"served_names", "api_keys", "allowed_hosts", "drain_s", "prefill_only", "allow_lora_loading", "in_batch"}
)
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


class Prefill(_Strict):
    """Replicas that read long prompts for the others, which load them from a folder that all share."""

    replicas: Count = 1
    resources: Resources | None = None  # of each; None: as the others have them
    min_tokens: Count = 512  # of a prompt, not counting a beginning that some replica has read
    wait_s: Seconds = 30.0  # for a prompt; then the replica that answers reads what is left


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
    prefill: Prefill | None = None
    drafter: str | None = None  # None: as `forerun serve` has it
    draft_model: str | None = None
    engine: dict[str, Any] = {}  # fields of EngineConfig and DrafterConfig
    server: dict[str, Any] = {}  # fields of ServerSettings
    api_keys: tuple[str, ...] = Field((), repr=False)
    http: Http = Http()
    health: Health = Health()
    drain_s: Annotated[float, Field(ge=0)] = 30.0  # for requests to end when a replica is stopped
    routing: Literal["prefix", "round_robin"] = "prefix"
    failover: bool = True  # False: a request ends with the replica it is on

    @model_validator(mode="after")
    def _fits_together(self) -> Deployment:
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling both say how many: give one of them")
        if self.prefill is not None:
            self._check_shared()
        return self

    def _check_shared(self) -> None:
        """Prefill replicas hand over what they read in a folder."""
        needed = {
            "kv_disk": "a folder that all nodes reach, where they write prompts and the others load them",
            "kv_disk_gib": "how much that folder may take",
        }
        missing = next((name for name in needed if self.engine.get(name) is None), None)
        if missing is not None:
            raise ValueError(f"prefill needs engine.{missing}, {needed[missing]}: name it, or leave prefill out")
        if (self.prefill_resources.num_gpus > 0) != (self.resources.num_gpus > 0):
            raise ValueError(
                "prefill.resources and resources must both have GPUs, or neither: what one kind of device computes is "
                "not loaded by another"
            )

    @property
    def prefill_resources(self) -> Resources:
        """What a prefill replica is given."""
        own = None if self.prefill is None else self.prefill.resources
        return own or self.resources

    def engine_config(self) -> EngineConfig:
        """The engine's options, checked. Raises ConfigError."""
        own = next((name for name in ("model", "drafter", "draft_model") if name in self.engine), None)
        if own is not None:
            raise ConfigError(f"engine.{own}: {own} stands beside engine, as a field of its own, not among its options")
        is_alone = self.replicas == 1 and self.autoscaling is None and self.prefill is None
        if self.engine.get("pin_threads") and not is_alone:
            raise ConfigError(
                "engine.pin_threads: replicas of one machine would all stay on its first cores, as none knows of the "
                "others: leave it out"
            )
        return engine_config(self.model, self._options())

    def _options(self) -> dict[str, Any]:
        threads = self.resources.threads or max(1, int(self.resources.num_cpus))
        drafter = self.drafter or default_drafter(self.model, self.draft_model)
        return {"threads": threads, **self.engine, "drafter": drafter, "draft_model": self.draft_model}

    def settings(self) -> ServerSettings:
        """How clients are treated, checked. Raises ConfigError."""
        known = [field.name for field in fields(ServerSettings) if field.name not in NOT_SERVER]
        _refuse_unknown("server", self.server, known)
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.server.items()
        }
        if isinstance(given.get("batch_dir"), str):
            given["batch_dir"] = Path(given["batch_dir"])
        types = get_type_hints(ServerSettings)
        for name, value in given.items():
            try:
                TypeAdapter(types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ConfigError(f"server.{name}: {error.errors()[0]['msg']}; got {value!r:.80}") from None
        hosts = names_of(self.http.host, self.http.allowed_hosts, bool(self.api_keys))
        return ServerSettings(
            served_names=(self.served_name,), api_keys=self.api_keys, allowed_hosts=hosts, drain_s=self.drain_s,
            **given,
        )  # fmt: skip

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.name or model_id(self.model)

    def needed(self) -> dict[str, float]:
        """CPUs and GPUs that a cluster must have for all processes to start, as Ray names them."""
        scaling, each, reading = self.autoscaling, self.resources, self.prefill_resources
        many = self.replicas if scaling is None else scaling.initial_replicas or scaling.min_replicas
        num_reading = 0 if self.prefill is None else self.prefill.replicas
        num_cpus = many * each.num_cpus + num_reading * reading.num_cpus + self.http.ingresses * self.http.num_cpus
        return {"CPU": num_cpus, "GPU": many * each.num_gpus + num_reading * reading.num_gpus}

    def reading(self) -> Deployment:
        """What a prefill replica runs: the same engine with resources of its own."""
        return self.model_copy(update={"resources": self.prefill_resources})

    def anywhere(self) -> Deployment:
        """The same with folders and files of this machine by their whole paths: replicas start elsewhere."""
        drafting = {name: getattr(self, name) for name in ("model", "drafter", "draft_model")}
        engine, server = whole_paths(self.engine), dict(self.server)
        if isinstance(server.get("batch_dir"), str):  # it is made when it is not there
            server["batch_dir"] = str(Path(server["batch_dir"]).expanduser().resolve())
        changed = {"name": self.served_name, **whole_paths(drafting), "engine": engine, "server": server}
        return self.model_copy(update=changed)

    def open(self) -> LLM:
        """The engine of a replica. Raises ConfigError, as `engine_config` does, before the model is downloaded."""
        self.engine_config()
        return LLM(self.model, **self._options())  # who drafts may depend on what the downloaded model holds


def read_deployment(path: str | Path) -> Deployment:
    """Read a file; everything in it is checked. Raises ConfigError that names the file and the field."""
    try:
        given = yaml.safe_load(Path(path).read_text("utf-8"))
    except yaml.MarkedYAMLError as error:  # its text quotes the file, which may hold keys
        mark = error.problem_mark
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(f"cannot read {path}: it is not YAML{where}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds no options: write them as NAME: VALUE, at least model")
    try:
        deployment = Deployment(**{str(name): value for name, value in given.items()}).anywhere()
        config = deployment.engine_config()
        deployment.reading().engine_config()
        deployment.settings()
    except ValidationError as error:
        raise ConfigError(f"{path}: {_told(error)}") from None  # its own text has the values
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
            part = part if isinstance(part, type) else get_args(part)[0]  # where the other is None
        return _unknown(".".join([*above, name]), name, part.model_fields)
    where = ".".join([*above, name])
    secret = "api_keys" in first["loc"]
    value = "" if secret or first["type"] in ("missing", "value_error") else f"; got {first.get('input')!r:.80}"
    return f"{where}: {first['msg']}{value}" if where else first["msg"].removeprefix("Value error, ")


def _refuse_unknown(part: str, given: Mapping[str, Any], known: list[str]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise ConfigError(_unknown(f"{part}.{unknown}", unknown, known))


def _unknown(where: str, name: str, known: Any) -> str:
    return f"there is no field {where}; there are {', '.join(known)}{suggestion(name, known)}"
