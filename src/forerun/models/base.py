"""What the engine asks of a model, whatever runs it.

Knows: the forward's inputs and outputs and who keeps the state. Does not know: any architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.models.batch import ForwardBatch


class LayerSpec(NamedTuple):
    """The KV shape of one attention layer."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the pool: float32, bfloat16 or int8
    latent: bool = False  # one vector a position, which is key and value

    @property
    def bytes_per_position(self) -> int:
        """Bytes the key and the value of one position take over all heads; a scale each where they are int8."""
        if self.latent:
            return self.num_kv_heads * self.head_dim * self.dtype.itemsize
        scale = 4 if self.dtype is torch.int8 else 0
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a forward pass gives back."""

    logits: Tensor  # [R, vocab_size] float32, one row per batch.logit_rows entry
    hidden: dict[int, Tensor]  # layer index -> [M, hidden_size] float32, for the layers asked for


@dataclass(frozen=True, slots=True)
class CommittedPath:
    """Where a sequence stands after a step: `nodes` of its tree are known now, the rest is forgotten."""

    request_id: str
    nodes: tuple[int, ...]  # accepted tree nodes from the root on; () if only a span was computed


class Model(Protocol):
    """A causal language model over the paged pool (or over a state of its own)."""

    vocab_size: int
    device: torch.device  # where logits and hidden states lie; batches may come from the host
    max_position: int  # positions the model was built for
    kv_specs: tuple[LayerSpec, ...]  # () for a model that keeps its own state
    weight_bytes: int
    num_parameters: int

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        """Compute every row of `batch`, writing its KV into `kvs` (one LayerKV per entry of kv_specs).

        hidden_layers names the states wanted for all rows: index 0 is the embedding, i the output of layer i-1
        before the final norm, and one more than there are layers the output of the final norm.
        """

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """Told after every step what became known. A model whose state is all in the pool has nothing to do."""

    def release(self, request_id: str) -> None:
        """The request ended or was preempted: forget its state."""


@runtime_checkable
class KeepsState(Protocol):
    """What a model has besides whose state is its own instead of in the pool: engines must not share it."""

    def with_own_state(self) -> Model:
        """The same weights, and a state that knows no request yet; every engine and every drafter takes one."""
