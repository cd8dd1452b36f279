"""EAGLE-3: one layer over three fused states of the target and the next token's embedding (arXiv 2503.01840).

Knows the module with the parameter names of the published checkpoints, how it is fed its own outputs, and its
config.json. `fc_norm` and `norm_output` are the switches of EAGLE-3.1. Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.errors import ConfigError, UnsupportedError
from forerun.training.heads.base import (
    Features,
    Frozen,
    Head,
    States,
    copied,
    init_linears,
    pass_through,
    rows_of_step,
)
from forerun.training.heads.config import Eagle3Config
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.unrolled import Tables, UnrolledAttention, UnrolledKV, make_norm
from forerun.training.heads.vocabulary import LearnedVocabulary
from forerun.training.net import Mlp, NetConfig, rotary_tables

SHALLOW = 6  # with fewer layers the published choice of three states is impossible


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high states of a target: after layers 2, n/2 and n-3 as published, or spread if it is shallow."""
    if num_layers < 2:
        raise UnsupportedError(
            f"EAGLE-3 reads three states of a target of at least 2 layers; this one has {num_layers}"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers >= SHALLOW else (0, num_layers // 2, num_layers)


def chosen_layers(wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers of a recipe, or the published ones if it names none; raises ConfigError for one the target lacks."""
    layers = wanted or aux_layers(num_layers)
    if not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise ConfigError(
            f"head.aux_layers = {list(layers)}: the target has the states 0 (embedding) to {num_layers} (last layer)"
        )
    return layers


class MidLayer(nn.Module):
    """The decoder layer: attention reads the normed embedding beside the normed state, the state is the residual."""

    def __init__(self, shape: NetConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = make_norm(shape), make_norm(shape)
        self.self_attn = UnrolledAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = make_norm(shape)
        self.mlp = Mlp(shape)

    def forward(self, embedded: Tensor, state: Tensor, tables: Tables, past: UnrolledKV) -> Tensor:
        """Maps rows of one step: embeddings and states, each [batch, rows, hidden]."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), dim=-1)  # [batch, rows, 2 hidden]
        state = state + self.self_attn(both, tables.cos, tables.sin, past)
        return state + torch.as_tensor(self.mlp(self.post_attention_layernorm(state)))


class Eagle3Head(Head):
    """The draft module; its state dict has the published names, without the vocabulary maps."""

    kind = "eagle3"

    def __init__(self, target: TrainingTarget, config: Eagle3Config, vocabulary: LearnedVocabulary) -> None:
        super().__init__()
        self.target_shape, self.settings, self.vocabulary = target.shape, config, vocabulary
        self.shape = config.shape_in(target.shape)
        self.num_steps = config.num_steps
        self.layers = chosen_layers(config.aux_layers, target.shape.num_layers)
        hidden = self.shape.hidden_size
        self.fc = nn.Linear(3 * target.shape.hidden_size, hidden, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(make_norm(target.shape) for _ in self.layers)
        self.midlayer = MidLayer(self.shape)
        self.norm = make_norm(self.shape)
        self.lm_head = nn.Linear(hidden, vocabulary.size, bias=False)
        init_linears(self)
        pass_through(self.fc, 2 * hidden)  # the highest of the three states
        # The output layer begins as the target's own rows.
        self.lm_head.weight = copied(target.head[vocabulary.token_ids.to(target.head.device)])
        self.norm.weight = copied(target.final_norm.weight)
        self.embedding = Frozen(target.embedding)
        self.tables = Tables(*rotary_tables(self.shape))

    def fuse(self, states: States) -> Tensor:
        """The state fed to step 0, [batch, T, hidden]."""
        parts = [states[layer] for layer in self.layers]
        if self.settings.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return torch.as_tensor(self.fc(torch.cat(parts, dim=-1)))

    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """See `Head`."""
        state, past = self.fuse(states), UnrolledKV()
        embedded = F.embedding(ids, self.embedding.table)  # [batch, T, hidden]
        found = []
        for step in range(self.num_steps):
            rows = ids.shape[1] - 2 - step
            state = self.midlayer(rows_of_step(embedded, step, 1 + step), state[:, :rows], self.tables, past)
            normed = self.norm(state)
            found.append(Features(normed, self.lm_head.weight))
            state = normed if self.settings.norm_output else state
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See `Head`. The embedding is left out: it is the target's."""
        maps = {"d2t": self.vocabulary.offsets(), "t2d": self.vocabulary.member()}
        return {**self.state_dict(), **maps}

    def config(self) -> dict[str, Any]:
        """See `Head`. `eagle_aux_hidden_state_layer_ids` counts the embedding as 0."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **self.shape.published(),
            "target_hidden_size": self.target_shape.hidden_size,
            "num_hidden_layers": 1,
            "rope_scaling": None,
            "vocab_size": self.vocabulary.target_size,
            "draft_vocab_size": self.vocabulary.size,
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "norm_before_residual": False,
            "fc_norm": self.settings.fc_norm,
            "norm_output": self.settings.norm_output,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }
