"""MTP: one module in MiMo's layout that drafts several tokens from its own outputs (FastMTP, arXiv 2509.18362).

Knows the module, its parameter names (`model.mtp_layers.0.*`) and its config.json. The state comes first in the
concatenation; the target's states are those before its final norm; the block's output before `final_layernorm` is
fed back. Embedding and output layer are the target's, with the cap of its logits. Knows nothing of losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
from forerun.training.heads.config import MtpConfig
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.unrolled import Tables, UnrolledAttention, UnrolledKV, make_norm
from forerun.training.heads.vocabulary import whole_vocabulary
from forerun.training.net import Mlp, rotary_tables

PREFIX = "model.mtp_layers.0."


class MtpHead(Head):
    """The module; its state dict has the published names without their prefix."""

    kind = "mtp"

    def __init__(self, target: TrainingTarget, config: MtpConfig) -> None:
        super().__init__()
        shape = self.shape = target.shape
        self.vocabulary = whole_vocabulary(shape.vocab_size)
        self.num_steps, self.layers = config.num_steps, (shape.num_layers,)
        self.token_layernorm, self.hidden_layernorm = make_norm(shape), make_norm(shape)
        self.input_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = make_norm(shape), make_norm(shape)
        self.self_attn = UnrolledAttention(shape, shape.hidden_size)
        self.mlp = Mlp(shape)
        self.final_layernorm = make_norm(shape)
        init_linears(self)
        pass_through(self.input_proj, 0)  # the state
        self.final_layernorm.weight = copied(target.final_norm.weight)
        self.embedding, self.output, self.logit_cap = Frozen(target.embedding), Frozen(target.head), target.logit_cap
        self.tables = Tables(*rotary_tables(shape))

    def step(self, embedded: Tensor, state: Tensor, past: UnrolledKV) -> Tensor:
        """Runs the block on the rows of one step: embeddings and states, each [batch, rows, hidden]."""
        both = torch.cat((self.hidden_layernorm(state), self.token_layernorm(embedded)), dim=-1)
        x = self.input_proj(both)  # [batch, rows, hidden]
        x = x + self.self_attn(self.input_layernorm(x), self.tables.cos, self.tables.sin, past)
        return torch.as_tensor(x + self.mlp(self.post_attention_layernorm(x)))

    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """See `Head`."""
        state, past, found = states[self.layers[0]], UnrolledKV(), []
        embedded = F.embedding(ids, self.embedding.table)  # [batch, T, hidden]
        for step in range(self.num_steps):
            rows = ids.shape[1] - 2 - step
            state = self.step(rows_of_step(embedded, step, 1 + step), state[:, :rows], past)
            found.append(Features(self.final_layernorm(state), self.output.table, cap=self.logit_cap))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See `Head`."""
        return {f"{PREFIX}{name}": weight for name, weight in self.state_dict().items()}

    def config(self) -> dict[str, Any]:
        """See `Head`."""
        return {
            "architectures": ["MiMoMTPModel"],
            "model_type": "mimo_mtp",
            **self.shape.published(),
            "num_nextn_predict_layers": 1,
            "rope_scaling": None,
            "tie_word_embeddings": False,
        }
