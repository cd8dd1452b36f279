"""A target of any family forerun implements, read through the engine's own forward.

Knows how to lay out a window for `Model.forward`, that recurrent layers need a slot of state, and where a decoder
keeps its embedding and output layer. Knows nothing of training. Computes on the CPU, with the kernels the engine
serves with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.cache.states import RecurrentStates
from forerun.errors import UnsupportedError
from forerun.models.base import Model, state_specs_of, with_states
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.loader import LoadedModel
from forerun.quantize.pool import BLOCK_SIZE, block_table, empty_kv
from forerun.training.heads.target import Norm
from forerun.training.net import NetConfig

REQUEST = "capture"


class DecoderNorm:
    """The decoder's final norm over batches."""

    def __init__(self, decoder: Decoder) -> None:
        self.norm = decoder.parts.final_norm
        self.weight: Any = self.norm.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes `x` [..., hidden]."""
        return self.norm(x.flatten(0, -2).contiguous()).view(x.shape)


class EngineTarget:
    """See `target.Target`."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Raises UnsupportedError for a model that runs through transformers."""
        model, config = loaded.model, loaded.config
        if not isinstance(model, Decoder) or config is None:
            raise UnsupportedError(
                f"{loaded.folder} runs through transformers, which gives no hidden states; draft heads are trained "
                "for models of the families forerun implements"
            )
        specs = state_specs_of(model)
        self.model: Model = with_states(model, RecurrentStates(specs, 1, model.device)) if specs else model
        self.shape = head_shape(config, model.max_position)
        self.embedding = model.parts.embedding(torch.arange(model.vocab_size)).float()  # [vocab, hidden]
        self.logit_scale, self.logit_cap = config.scales.logits, config.scales.logits_cap
        self.head = model.parts.lm_head.weight.dequantize().float() * self.logit_scale  # [vocab, hidden]
        self.final_norm: Norm = DecoderNorm(model)
        self.eos_token_id = config.eos_token_ids[0] if config.eos_token_ids else None

    @torch.no_grad()
    def states(self, ids: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """See `target.Target`. One sequence after the other, each in a cache of its own."""
        found = [self.sequence_states(row, layers) for row in ids.tolist()]
        return {layer: torch.stack([states[layer] for states in found]) for layer in layers}

    def sequence_states(self, ids: list[int], layers: Sequence[int]) -> dict[int, Tensor]:
        """The states of one sequence, each [T, hidden]."""
        table = block_table(len(ids))
        kvs = [empty_kv(spec, len(table)) for spec in self.model.kv_specs]
        rows = SequenceRows(REQUEST, table, 0, ids, len(ids))
        hidden = self.model.forward(ForwardBatch.build([rows], BLOCK_SIZE), kvs, layers).hidden
        self.model.release(REQUEST)
        return hidden


def head_shape(config: ModelConfig, max_positions: int) -> NetConfig:
    """The shape a head inherits from its target: sizes, plain rotary positions, no biases."""
    return NetConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.heads.num_q,
        num_kv_heads=config.heads.num_kv,
        head_dim=config.heads.head_dim,
        ffn_size=config.ffn_size,
        max_positions=max_positions,
        rope_theta=config.rope.theta,
        norm_eps=config.norm_eps,
    )
