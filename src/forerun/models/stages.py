"""Pipeline stages: which layers of a decoder lie on which rank, and the decoder of one stage.

Knows: bytes of layers, where a decoder may be cut, what passes from one stage to the next. Does not know: processes,
how tensors travel. Nothing is added up over stages, so every number has the bits of one process: a stage goes on with
the residual stream and the addend that the one before has for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.ops import PackedLinear
from forerun.models.base import PassOutput
from forerun.models.batch import ForwardBatch
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, DecoderParts, LayerCache, add_norm, keep_state, run_layers
from forerun.models.family import Family
from forerun.models.hybrid import HybridDecoder
from forerun.models.storage import tensors_of
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage of several: layers `first` .. `end` - 1."""

    index: int
    ends: tuple[int, ...]  # of all stages
    share: float = 1.0  # of the model's bytes

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.ends)

    @property
    def num_layers(self) -> int:
        """Layers of all stages."""
        return self.ends[-1]

    @property
    def first(self) -> int:
        """Its first layer."""
        return self.ends[self.index - 1] if self.index else 0

    @property
    def end(self) -> int:
        """The layer after its last one."""
        return self.ends[self.index]

    @property
    def is_first(self) -> bool:
        """It begins with the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It ends with the output layer."""
        return self.index == self.count - 1

    def elsewhere(self, layer: str) -> tuple[str, ...]:
        """What names of tensors of other stages' layers begin with; `layer`: a layer's name with {index} in it."""
        others = (index for index in range(self.num_layers) if not self.first <= index < self.end)
        return tuple(f"{layer.format(index=index)}." for index in others)

    def states_of(self, hidden_layers: Sequence[int]) -> list[list[int]]:
        """Which of these hidden states, numbered as in `Model.forward`, each stage has."""
        found: list[list[int]] = [[] for _ in self.ends]
        for layer in hidden_layers:
            found[next((i for i, end in enumerate(self.ends) if layer < end), self.count - 1)].append(layer)
        return found


class Neighbours(Protocol):
    """The stages before and behind one, for the rank that computes the same shard there."""

    def receive(self, shape: Sequence[int]) -> Tensor:
        """What the stage before hands on, float32."""

    def send(self, tensor: Tensor) -> None:
        """Hand on to the stage behind."""


def divide(config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint, count: int) -> list[PipelineStage]:
    """The stages of a checkpoint, whose largest has as few bytes as possible; reads headers only.

    Raises UnsupportedError for models that cannot be cut, ConfigError for more stages than there are places to cut at.
    """
    if config.per_layer is not None and count > 1:
        raise UnsupportedError(
            f"pipeline_parallel {count} was given, but layers of {config.model_type} models are given a part of each "
            "token, which does not pass from stage to stage: leave it at 1"
        )
    sizes = _layer_bytes(config, family, stored)
    whole = sum(sizes)
    ends = cut(sizes, _cuts(config), [_has_both(config, layer) for layer in range(config.num_layers)], count)
    if ends is None:
        allowed = [n for n in range(1, config.num_layers + 1) if n < count]
        both = [_has_both(config, layer) for layer in range(config.num_layers)]
        possible = [n for n in allowed if cut(sizes, _cuts(config), both, n) is not None]
        raise ConfigError(
            f"pipeline_parallel {count} was given, but {config.num_layers} layers of a {config.model_type} model "
            f"cannot be divided into so many stages that each keep something of a sequence: at most {max(possible)}"
        )
    starts = [0, *ends[:-1]]
    shares = [sum(sizes[first:end]) / max(1, whole) for first, end in zip(starts, ends, strict=True)]
    return [PipelineStage(index, tuple(ends), share) for index, share in enumerate(shares)]


def cut(
    sizes: Sequence[int], cuts: Sequence[bool], keeps: Sequence[tuple[bool, bool]], count: int
) -> list[int] | None:  # fmt: skip
    """Where each of `count` stages ends, so that the largest is smallest; None if there is no way.

    sizes: of each layer. cuts: whether a stage may begin with it. keeps: whether it has keys and values, and whether a
    recurrent state; each stage needs one layer of either kind that the model has.
    """
    num_layers = len(sizes)
    sums = [0, *(sum(sizes[: i + 1]) for i in range(num_layers))]
    needed = tuple(any(kinds) for kinds in zip(*keeps, strict=True))

    def cost(first: int, end: int) -> float:
        found = tuple(any(kinds) for kinds in zip(*keeps[first:end], strict=True))
        return sums[end] - sums[first] if found == needed and (first == 0 or cuts[first]) else math.inf

    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for _ in range(count):
        grown = dict[int, tuple[float, list[int]]]()
        for first, (largest, ends) in best.items():
            for end in range(first + 1, num_layers + 1):
                total = max(largest, cost(first, end))
                if total < grown.get(end, (math.inf, []))[0]:
                    grown[end] = (total, [*ends, end])
        best = grown
    return best[num_layers][1] if num_layers in best else None


def _layer_bytes(config: ModelConfig, family: Family, stored: Checkpoint | GgufCheckpoint) -> list[int]:
    """Stored bytes of each layer; the embedding counts with the first, the output layer with the last."""
    names = family.names
    places = {names.layer.format(index=index): index for index in range(config.num_layers)}
    sizes, last = [0] * config.num_layers, config.num_layers - 1
    for name, _, nbytes in tensors_of(config, family, stored):
        is_table = name.startswith(f"{names.embedding}.")
        layer = next((index for prefix, index in places.items() if name.startswith(f"{prefix}.")), None)
        if layer is not None:
            sizes[layer] += nbytes
        else:
            sizes[0 if is_table else last] += nbytes
            sizes[last] += nbytes if is_table and config.tie_embeddings and last else 0
    return sizes


def _cuts(config: ModelConfig) -> list[bool]:
    """Whether a stage may begin with each layer: what it and those behind it read is not in a layer before it."""
    owners = [config.shape(layer).kv_layer for layer in range(config.num_layers)]
    first_read = [min([o for o in owners[layer:] if o is not None], default=layer) for layer in range(len(owners))]
    has_shortcut = config.experts is not None and config.experts.shortcut
    free = [read >= layer for layer, read in enumerate(first_read)]
    return [ok and not (layer and has_shortcut and config.has_experts(layer - 1)) for layer, ok in enumerate(free)]


def _has_both(config: ModelConfig, layer: int) -> tuple[bool, bool]:
    """Whether a layer has keys and values of its own, and whether it has a recurrent state."""
    attends = config.has_mixer(layer) and not config.is_recurrent(layer) and config.shape(layer).kv_layer is None
    return attends, config.recurrent is not None and layer in config.recurrent.layers


class MatrixElsewhere:
    """A matrix or a table that another stage has. Implements `quant.base.Weight` and `layers.embedding.Embedding`."""

    packed: PackedLinear | None = None
    nbytes = 0
    scale = 1.0

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def with_scale(self, scale: float) -> MatrixElsewhere:
        """See `Embedding`."""
        return self

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Raises RuntimeError."""
        raise self._missing()

    def dequantize(self) -> Tensor:
        """Raises RuntimeError."""
        raise self._missing()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Raises RuntimeError."""
        raise self._missing()

    def _missing(self) -> RuntimeError:
        return RuntimeError(f"the matrix [{self.shape[0]}, {self.shape[1]}] is another pipeline stage's")


class StagedDecoder(Decoder):
    """The layers of one stage; logits come from the last stage alone, hidden states from the stage that has them."""

    stage: PipelineStage  # set by who builds it, as `neighbours` is by who runs it
    neighbours: Neighbours

    def _forward(self, batch: ForwardBatch, caches: Sequence[LayerCache], hidden_layers: Sequence[int]) -> PassOutput:
        stage, parts, hidden = self.stage, self.parts, dict[int, Tensor]()
        shown = any(index >= stage.num_layers for index in hidden_layers)
        wanted = None if shown or batch.all_logits else batch.logit_rows
        if stage.is_first:
            residual = parts.embedding(batch.token_ids)  # [M, H]
            x = parts.layers[0].enter(residual)
        else:
            received = self.neighbours.receive((2, batch.num_rows, self.hidden_size))
            x, residual = (part.clone() for part in received)  # each aligned as a stage's own are
            x = add_norm(parts.layers[0].attention_norm, x, residual)

        def keep(index: int, state: Tensor) -> None:
            keep_state(hidden, hidden_layers, stage.first + index, state)

        run = partial(run_layers, x=x, residual=residual, batch=batch)
        if not stage.is_last:
            x, residual = run(parts.layers, kvs=caches, wanted=None, keep=keep)
            self.neighbours.send(torch.stack([x, residual]))
            return PassOutput(residual.new_empty(0, self.vocab_size), hidden)
        is_silent = wanted is not None and wanted.shape[0] == 0 and not hidden_layers
        layers = parts.layers[: self._num_storing] if is_silent else parts.layers
        x, residual = run(layers, kvs=caches[: len(layers)], wanted=wanted, keep=keep)
        return self._finish(x, residual, batch, hidden, hidden_layers, stage.num_layers)


class StagedHybrid(StagedDecoder, HybridDecoder):
    """A stage some of whose layers are recurrent."""


def decoder_of(
    parts: DecoderParts, config: ModelConfig, stage: PipelineStage | None, max_position: int, kv_dtype: torch.dtype
) -> Decoder:
    """The decoder of these layers; a stage of several hands on to the next."""
    is_staged, is_hybrid = stage is not None and stage.count > 1, any(layer.recurrent for layer in parts.layers)
    kinds = {
        (False, False): Decoder, (False, True): HybridDecoder, (True, False): StagedDecoder, (True, True): StagedHybrid,
    }  # fmt: skip
    decoder = kinds[is_staged, is_hybrid](parts, max_position, kv_dtype)
    decoder.num_layers, decoder.mask_token_id = config.num_layers, config.mask_token_id
    if stage is not None and isinstance(decoder, StagedDecoder):
        decoder.stage = stage
    return decoder
