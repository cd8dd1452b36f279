"""Training recipes: TOML files read into frozen dataclasses, every field checked.

Knows which options a training run has and which are wrong. Knows nothing of how they are carried out.
"""

from __future__ import annotations

import os.path
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import torch

from forerun.errors import ConfigError
from forerun.training.net import NetConfig
from forerun.training.sources import SOURCES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
FOLDERS = ("dir", "generated_dir", "bench_dir", "start_from", "teacher", "tokenizer_from")  # fields that name one


def check_at_least_one(options: Any, *names: str) -> None:
    """Refuses fields below one."""
    for name in names:
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} must be at least 1; got {getattr(options, name)}")


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from; folders are relative to the working directory."""

    dir: str = "../shared/data/train"
    generated_dir: str = "runs/world"  # what `lab/world/make.py` wrote
    bench_dir: str = ""  # documents that share a word 13-gram with a file under it are dropped; "" drops none


@dataclass(frozen=True)
class TokenizerConfig:
    """How the tokenizer is trained; a distilled model takes its teacher's instead."""

    sample_chars: int = 20_000_000


@dataclass(frozen=True)
class ScheduleConfig:
    """Steps and batch sizes. The learning rate warms up, stays, and falls to zero over the last `decay_steps`."""

    steps: int
    warmup_steps: int
    decay_steps: int
    seq_len: int
    decay_seq_len: int
    tokens_per_step: int
    micro_tokens: int

    def __post_init__(self) -> None:
        check_at_least_one(self, "seq_len", "decay_seq_len", "tokens_per_step", "micro_tokens")
        for name in ("seq_len", "decay_seq_len"):
            if self.micro_tokens % getattr(self, name):
                raise ConfigError(f"schedule.micro_tokens {self.micro_tokens} is not a multiple of schedule.{name}")
        if self.tokens_per_step % self.micro_tokens:
            raise ConfigError("schedule.tokens_per_step is not a multiple of schedule.micro_tokens")
        if self.warmup_steps < 1 or self.decay_steps < 1:
            raise ConfigError("schedule.warmup_steps and schedule.decay_steps must be at least 1")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ConfigError("schedule.warmup_steps + schedule.decay_steps exceed schedule.steps")

    @property
    def decay_start(self) -> int:
        """The first step of the decay phase."""
        return self.steps - self.decay_steps

    def learning_rate_scale(self, step: int) -> float:
        """Scales the learning rates of `step`, counted from zero."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 1.0 if step < self.decay_start else (self.steps - step) / self.decay_steps

    def seq_len_at(self, step: int) -> int:
        """Tells the window length of `step`."""
        return self.seq_len if step < self.decay_start else self.decay_seq_len


@dataclass(frozen=True)
class OptimizerConfig:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.05
    adamw_lr: float = 0.003
    clip_norm: float = 1.0


PRECISIONS = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class RunConfig:
    """How often a run reports and saves; `*_every` count steps."""

    log_every: int = 10
    checkpoint_every: int = 100
    heldout_every: int = 200
    heldout_windows: int = 16  # of each domain
    compile: bool = False
    device: str = "cpu"
    precision: str = "float32"  # of the matrix products; weights, sums and the optimizer's state stay float32

    def __post_init__(self) -> None:
        check_at_least_one(self, "log_every", "checkpoint_every", "heldout_every")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"run.precision = {self.precision!r} is unknown; allowed are {', '.join(PRECISIONS)}")
        if self.device not in DEVICES:
            raise ConfigError(f"run.device = {self.device!r} is unknown; allowed are {', '.join(DEVICES)}")
        if self.heldout_every % self.log_every:
            raise ConfigError("run.heldout_every is not a multiple of run.log_every")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrix products."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


@dataclass(frozen=True)
class DistillConfig:
    """A teacher to imitate and how much of its own text to learn from."""

    teacher: str
    sample_tokens: int
    sample_share: float  # of all training windows
    sample_batch: int = 64
    prompt_tokens: int = 64
    continuation_tokens: int = 192
    greedy_share: float = 0.25  # of the teacher's text, written at T = 0; the rest at T = 1

    def __post_init__(self) -> None:
        check_at_least_one(self, "sample_tokens", "sample_batch", "prompt_tokens", "continuation_tokens")
        if not 0 < self.sample_share < 1 or not 0 <= self.greedy_share <= 1:
            raise ConfigError(
                "distill.sample_share must lie between 0 and 1, distill.greedy_share from 0 to 1; got "
                f"{self.sample_share} and {self.greedy_share}"
            )


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    name: str
    seed: int
    model: NetConfig
    schedule: ScheduleConfig
    mix: dict[str, float]
    prompt_weight: float = 1.0  # of a token that is not the assistant's, in the loss of a chat
    start_from: str = ""  # an exported model whose weights and tokenizer the run begins with; "" begins at random
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    distill: DistillConfig | None = None

    @property
    def tokenizer_from(self) -> str:
        """The exported model whose tokenizer is taken; "" means that one is trained."""
        return self.distill.teacher if self.distill else self.start_from

    def __post_init__(self) -> None:
        for name, weight in self.mix.items():
            if name not in SOURCES:
                raise ConfigError(f"unknown source mix.{name}; allowed are {', '.join(SOURCES)}")
            if weight <= 0:
                raise ConfigError(f"mix.{name} = {weight} must be positive; leave the source out instead")
        if not 0.0 <= self.prompt_weight <= 1.0:
            raise ConfigError(f"prompt_weight = {self.prompt_weight} must lie between 0 and 1")
        if self.distill is not None and self.prompt_weight != 1.0:
            raise ConfigError("prompt_weight is for training on text; leave it out beside [distill]")
        if not self.mix:
            raise ConfigError("mix names no source; give at least one with its weight")
        for name in ("seq_len", "decay_seq_len"):
            if (found := getattr(self.schedule, name)) > self.model.max_positions:
                raise ConfigError(
                    f"schedule.{name} {found} exceeds model.max_positions {self.model.max_positions}; lower the one or "
                    "raise the other"
                )


def load_recipe(path: Path) -> Recipe:
    """Reads a recipe; raises ConfigError naming the field that is wrong."""
    return build(Recipe, read_toml(path), "")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file, which may begin with a byte order mark; raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe {path} is not valid TOML in UTF-8: {error}") from error


def build(kind: type[T], table: Mapping[str, Any], prefix: str) -> T:
    """Builds a dataclass from a TOML table; unknown, missing and mistyped fields are refused by name."""
    hints = get_type_hints(kind)
    for name in table:
        if name not in hints:
            raise ConfigError(f"unknown recipe field {prefix}{name}; allowed are {', '.join(hints)}")
    for item in fields(kind):
        if item.name not in table and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"recipe field {prefix}{item.name} is missing")
    return kind(**{name: convert(hints[name], value, f"{prefix}{name}") for name, value in table.items()})


def convert(hint: Any, value: Any, where: str) -> Any:
    """Checks one value against its annotation."""
    if isinstance(hint, UnionType):
        hint = next(choice for choice in get_args(hint) if choice is not type(None))
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return build(hint, value, f"{where}.")
    if get_origin(hint) is dict and isinstance(value, dict):
        return {name: convert(get_args(hint)[1], item, f"{where}.{name}") for name, item in value.items()}
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(convert(get_args(hint)[0], item, where) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if not isinstance(hint, type) or type(value) is not hint:
        raise ConfigError(f"recipe field {where} = {value!r} should be of type {getattr(hint, '__name__', hint)}")
    return value


def changes(was: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Tells which fields of a recipe are not as they were; one that `was` lacks, being older, does not count.

    A folder is the same however it is spelled.
    """
    listed: list[str] = []
    for name, value in now.items():
        found = was.get(name, value)
        if name != "mix" and isinstance(found, dict) and isinstance(value, dict):
            listed += changes(found, value, f"{where}{name}.")
        elif name in FOLDERS and found and value and os.path.abspath(found) == os.path.abspath(value):
            continue
        elif found != value:  # a mix as a whole: what it lacks was left out
            listed.append(f"{where}{name} was {found!r}, is {value!r}")
    return listed


def with_data_dir(recipe: Recipe, data_dir: Path | None) -> Recipe:
    """Replaces the folder of the training text, if one is given."""
    return recipe if data_dir is None else replace(recipe, data=replace(recipe.data, dir=str(data_dir)))
