"""Recipes of draft heads: TOML files or defaults, read into frozen dataclasses, every field checked.

Knows which options training a head has and which are wrong. Knows nothing of how they are carried out. Which target
and which data are not part of a recipe: they are named on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.training.net import NetConfig
from forerun.training.recipe import PRECISIONS, build, check_at_least_one, read_toml

LABELS = ("target", "text")
FREE = ("name", "run")  # fields of a recipe that may change when a training is resumed


@dataclass(frozen=True)
class Guessing:
    """Options of every kind of head: the weight of step j is `decay`^j, divided by the sum of all weights.

    labels: "target" learns the target's distribution after the true tokens, "text" the tokens of the text.
    """

    labels: str = "target"
    decay: float = 0.8

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ConfigError(f"head.labels = {self.labels!r} is unknown; allowed are {', '.join(LABELS)}")
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"head.decay = {self.decay} must be from 0 to 1")


@dataclass(frozen=True)
class MedusaConfig(Guessing):
    """Medusa-1; vocab_size: tokens the heads can guess, the most frequent of the data (0: all)."""

    labels: str = "text"
    num_heads: int = 4
    num_layers: int = 1
    shared_head: bool = False  # all heads use the target's own output layer
    vocab_size: int = 0

    def __post_init__(self) -> None:
        Guessing.__post_init__(self)
        check_at_least_one(self, "num_heads", "num_layers")


@dataclass(frozen=True)
class Eagle3Config(Guessing):
    """EAGLE-3; sizes of 0 mean the target's. aux_layers: the three states it reads; () means the published choice."""

    aux_layers: tuple[int, ...] = ()
    num_steps: int = 7
    vocab_size: int = 32000
    ffn_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        Guessing.__post_init__(self)
        check_at_least_one(self, "num_steps")
        if self.aux_layers and (len(self.aux_layers) != 3 or list(self.aux_layers) != sorted(set(self.aux_layers))):
            raise ConfigError(f"head.aux_layers = {list(self.aux_layers)} must be three layers, each above the last")

    def shape_in(self, target: NetConfig) -> NetConfig:
        """The shape of the layer."""
        sizes = {name: getattr(self, name) for name in ("ffn_size", "num_heads", "num_kv_heads") if getattr(self, name)}
        return replace(target, num_layers=1, **sizes)


@dataclass(frozen=True)
class MtpConfig(Guessing):
    """One MTP module, taught to draft `num_steps` tokens from its own outputs."""

    labels: str = "text"
    decay: float = 0.6
    num_steps: int = 3

    def __post_init__(self) -> None:
        Guessing.__post_init__(self)
        check_at_least_one(self, "num_steps")


@dataclass(frozen=True)
class DFlashConfig(Guessing):
    """DFlash; sizes of 0 mean the target's. aux_layers: the states it reads; () means the published choice.

    num_blocks: of a window, that a step learns from. mask_token_id: stands in empty slots; -1 is the last token.
    """

    aux_layers: tuple[int, ...] = ()
    block_size: int = 16
    num_layers: int = 5
    num_blocks: int = 64
    mask_token_id: int = -1
    ffn_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0

    def __post_init__(self) -> None:
        Guessing.__post_init__(self)
        check_at_least_one(self, "num_layers", "num_blocks")
        if self.block_size < 2:
            raise ConfigError(f"head.block_size = {self.block_size} must be at least 2: a root and a slot")
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ConfigError(f"head.aux_layers = {list(self.aux_layers)} must be layers, each above the last")

    def shape_in(self, target: NetConfig) -> NetConfig:
        """The shape of the layers."""
        names = ("ffn_size", "num_heads", "num_kv_heads", "head_dim")
        sizes = {name: getattr(self, name) for name in names if getattr(self, name)}
        return replace(target, num_layers=self.num_layers, **sizes)


@dataclass(frozen=True)
class DraftConfig(Guessing):
    """A small Llama; `num_steps` is for measuring only, the loss is that of the next token."""

    decay: float = 0.0
    num_steps: int = 5
    hidden_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    ffn_size: int = 768

    def __post_init__(self) -> None:
        Guessing.__post_init__(self)
        check_at_least_one(self, "num_steps", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size")

    def shape_in(self, target: NetConfig) -> NetConfig:
        """The draft's shape: its own sizes, the target's vocabulary and positions."""
        names = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size")
        return replace(target, **{name: getattr(self, name) for name in names})


HeadConfig = MedusaConfig | Eagle3Config | DFlashConfig | MtpConfig | DraftConfig
KINDS: Mapping[str, type[HeadConfig]] = {
    "medusa": MedusaConfig,
    "eagle3": Eagle3Config,
    "dflash": DFlashConfig,
    "mtp": MtpConfig,
    "draft": DraftConfig,
}


@dataclass(frozen=True)
class HeadSchedule:
    """Steps and batch sizes. The learning rate warms up, stays, and falls to zero over the last `decay_steps`."""

    steps: int = 2000
    warmup_steps: int = 40
    decay_steps: int = 1000
    seq_len: int = 512
    tokens_per_step: int = 4096
    micro_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.micro_tokens < 1 or self.micro_tokens % self.seq_len:
            raise ConfigError(
                f"schedule.micro_tokens {self.micro_tokens} is not a multiple of schedule.seq_len {self.seq_len}"
            )
        if self.tokens_per_step < 1 or self.tokens_per_step % self.micro_tokens:
            raise ConfigError(
                f"schedule.tokens_per_step {self.tokens_per_step} is not a multiple of schedule.micro_tokens "
                f"{self.micro_tokens}"
            )
        if self.warmup_steps < 1 or self.decay_steps < 1 or self.warmup_steps + self.decay_steps > self.steps:
            raise ConfigError(
                f"schedule.warmup_steps {self.warmup_steps} + schedule.decay_steps {self.decay_steps} exceed "
                f"schedule.steps {self.steps}, or one is below 1"
            )

    def learning_rate_scale(self, step: int) -> float:
        """Scales the learning rates of `step`, counted from zero."""
        warm = (step + 1) / self.warmup_steps
        return min(1.0, warm, (self.steps - step) / self.decay_steps)

    def with_steps(self, steps: int) -> HeadSchedule:
        """The same shape of schedule over another number of steps."""
        if steps < 2:
            raise ConfigError(f"--steps must be at least 2; got {steps}")
        share = steps / self.steps
        warmup = max(1, min(self.warmup_steps, round(self.warmup_steps * share)))
        return replace(self, steps=steps, warmup_steps=warmup, decay_steps=max(1, int(self.decay_steps * share)))

    def with_tokens(self, tokens_per_step: int) -> HeadSchedule:
        """The same schedule with another batch; a micro-batch is never larger than it."""
        return replace(self, tokens_per_step=tokens_per_step, micro_tokens=min(self.micro_tokens, tokens_per_step))


OPTIMIZERS = ("muon", "adamw")


@dataclass(frozen=True)
class HeadOptimizer:
    """name "muon": Muon for the matrices inside the head, AdamW for output layers, norms and biases; "adamw": all."""

    name: str = "adamw"
    adamw_lr: float = 1e-3
    adamw_weight_decay: float = 0.0
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_weight_decay: float = 0.01
    clip_norm: float = 0.5

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optimizer.name = {self.name!r} is unknown; allowed are {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True)
class HeadData:
    """How sequences are made. greedy_share of the answers is written at T = 0, the rest at T = 1."""

    max_tokens: int = 0  # of all prompts with their answers, or of each .answers or .bin file; 0: all
    prompt_tokens: int = 256  # longer prompts lose their beginning
    answer_tokens: int = 256
    greedy_share: float = 0.5
    heldout_prompts: int = 32  # never trained on; the acceptance length is simulated on the greedy answers to them
    heldout_tokens: int = 128  # of each such answer
    capture_bytes: int = 0  # budget on disk for the target's states; 0 computes them while training

    def __post_init__(self) -> None:
        check_at_least_one(self, "prompt_tokens", "answer_tokens", "heldout_prompts", "heldout_tokens")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"data.greedy_share = {self.greedy_share} must be from 0 to 1")
        if self.max_tokens < 0 or self.capture_bytes < 0:
            raise ConfigError("data.max_tokens and data.capture_bytes must not be negative; 0 sets no limit")


@dataclass(frozen=True)
class HeadRun:
    """How often a run reports and saves; `*_every` count steps."""

    log_every: int = 10
    checkpoint_every: int = 100
    heldout_every: int = 200
    compile: bool = False
    precision: str = "bfloat16"  # of the matrix products; weights, sums and the optimizer's state stay float32

    def __post_init__(self) -> None:
        check_at_least_one(self, "log_every", "checkpoint_every", "heldout_every")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"run.precision = {self.precision!r} is unknown; allowed are {', '.join(PRECISIONS)}")
        if self.heldout_every % self.log_every:
            raise ConfigError("run.heldout_every is not a multiple of run.log_every")


@dataclass(frozen=True)
class HeadRecipe:
    """One training of a head."""

    name: str
    kind: str
    seed: int = 1
    start_from: str = ""  # an exported head of the same shape to start from; "": random weights
    schedule: HeadSchedule = field(default_factory=HeadSchedule)
    optimizer: HeadOptimizer = field(default_factory=HeadOptimizer)
    data: HeadData = field(default_factory=HeadData)
    run: HeadRun = field(default_factory=HeadRun)
    head: HeadConfig = field(default_factory=Eagle3Config)

    def with_sizes(
        self, steps: int | None, tokens_per_step: int | None, max_tokens: int | None, capture_bytes: int | None
    ) -> HeadRecipe:
        """The recipe with values of the command line; None leaves a field as it is."""
        schedule = self.schedule if steps is None else self.schedule.with_steps(steps)
        schedule = schedule if tokens_per_step is None else schedule.with_tokens(tokens_per_step)
        given = {"max_tokens": max_tokens, "capture_bytes": capture_bytes}
        data = replace(self.data, **{name: value for name, value in given.items() if value is not None})
        return replace(self, schedule=schedule, data=data)


@dataclass(frozen=True)
class HeadJob:
    """What the command line gives besides the recipe: the target, files of prompts or tokens, the run folder."""

    target: str
    data: tuple[Path, ...]
    folder: Path
    fresh: bool = False
    device: str = "cpu"


def load_head_recipe(kind: str, path: Path | None) -> HeadRecipe:
    """Reads a recipe for a head of `kind`, or makes the default one; raises ConfigError naming the field."""
    table: dict[str, Any] = {"name": kind, "kind": kind} if path is None else read_toml(path)
    if table.get("kind", kind) != kind:
        raise ConfigError(f"recipe {path} is for kind = {table['kind']!r}, the command trains {kind}")
    head = build(KINDS[kind], table.pop("head", {}), "head.")
    return replace(build(HeadRecipe, {**table, "kind": kind}, ""), head=head)
