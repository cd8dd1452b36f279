"""DFlash: a few layers that guess a whole block of tokens in one pass over fused states of the target (2602.06036).

Knows the module with the parameter names of z-lab's checkpoints, which blocks of a window are learned from, and its
config.json. Embedding and output layer are the target's. Knows nothing of losses.

Entry t is the block whose root is x_{t+1}: its slots see the states up to position t and each other; slot j + 1 gives
step j. While gradients are taken, only some blocks of a window are computed, the same ones for the same tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forerun.errors import ConfigError
from forerun.training.heads.base import Features, Frozen, Head, States, copied, init_linears, pass_through
from forerun.training.heads.config import DFlashConfig
from forerun.training.heads.target import TrainingTarget
from forerun.training.heads.unrolled import Tables, make_norm
from forerun.training.heads.vocabulary import whole_vocabulary
from forerun.training.net import Mlp, NetConfig, RMSNormModule, rotary_tables, rotate

NUM_STATES = 5  # of the target, as published
BLOCKS_AT_ONCE = 64  # that are computed together while measuring: their scores must fit into memory


def fused_layers(wanted: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The states a head reads: a recipe's, or the published choice from the second layer's to the last but two's.

    Raises ConfigError for states that are not the output of a layer of the target.
    """
    span = max(num_layers - 4, 0)
    published = {min(2 + round(i * span / (NUM_STATES - 1)), num_layers) for i in range(NUM_STATES)}
    layers = wanted or tuple(sorted(published))
    if not 1 <= layers[0] <= layers[-1] <= num_layers:
        raise ConfigError(
            f"head.aux_layers = {list(layers)}: the target has the states 1 (first layer) to {num_layers} (last layer)"
        )
    return layers


class BlockAttention(nn.Module):
    """Grouped-query attention of blocks over known tokens and their own slots, with norms of queries and keys."""

    def __init__(self, shape: NetConfig) -> None:
        super().__init__()
        self.head_dim, self.groups = shape.head_dim, shape.num_kv_heads
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNormModule(shape.head_dim, shape.norm_eps)
        self.k_norm = RMSNormModule(shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, context: Tensor, entries: Tensor, tables: Tables) -> Tensor:
        """x [batch, blocks, slots, hidden] of the blocks `entries` [blocks], context [batch, T, hidden] -> as x."""
        positions = positions_of(entries, x.shape[2], len(tables.cos))  # [blocks, slots]
        cos, sin, num_known = tables.cos, tables.sin, context.shape[1]
        query = rotate(self.q_norm(self.split(self.q_proj(x))), cos[positions], sin[positions])
        own = rotate(self.k_norm(self.split(self.k_proj(x))), cos[positions], sin[positions])
        known = rotate(self.k_norm(self.split(self.k_proj(context))), cos[:num_known], sin[:num_known])
        # queries [batch, groups, blocks, slots of each of the group's heads, head_dim]
        query = query.view(len(x), self.groups, -1, *query.shape[2:]).transpose(2, 3).flatten(3, 4)
        scores = torch.cat((query @ known[:, :, None].mT, query @ own.mT), dim=-1).float() * self.head_dim**-0.5
        later = torch.arange(num_known, device=x.device) > entries[:, None]  # [blocks, T]
        later = F.pad(later, (0, x.shape[2]))[:, None]  # no slot is hidden
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        values = self.split(self.v_proj(context)), self.split(self.v_proj(x))
        weights = weights.to(values[0].dtype)
        mixed = weights[..., :num_known] @ values[0][:, :, None] + weights[..., num_known:] @ values[1]
        heads = mixed.view(
            *mixed.shape[:3], -1, x.shape[2], self.head_dim
        )  # [batch, groups, blocks, heads of a group, slots, head_dim]
        return torch.as_tensor(self.o_proj(heads.permute(0, 2, 4, 1, 3, 5).flatten(3)))

    def split(self, x: Tensor) -> Tensor:
        """[batch, .., heads * head_dim] -> [batch, heads, .., head_dim]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).movedim(-2, 1)


class BlockLayer(nn.Module):
    """A layer of Qwen3's kind."""

    def __init__(self, shape: NetConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = make_norm(shape), make_norm(shape)
        self.self_attn, self.mlp = BlockAttention(shape), Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, entries: Tensor, tables: Tables) -> Tensor:
        """See `BlockAttention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, entries, tables)
        return x + torch.as_tensor(self.mlp(self.post_attention_layernorm(x)))


class DFlashNet(nn.Module):
    """What is trained; its state dict has the published names."""

    def __init__(self, shape: NetConfig, num_states: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_states * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm, self.norm = make_norm(shape), make_norm(shape)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_layers))

    def forward(self, x: Tensor, context: Tensor, entries: Tensor, tables: Tables) -> Tensor:
        """See `BlockAttention`; the rows before the output layer."""
        for layer in self.layers:
            x = layer(x, context, entries, tables)
        return torch.as_tensor(self.norm(x))


class DFlashHead(Head):
    """The draft module."""

    kind = "dflash"

    def __init__(self, target: TrainingTarget, config: DFlashConfig) -> None:
        super().__init__()
        self.target_shape, self.settings, self.logit_scale = target.shape, config, target.logit_scale
        self.shape = config.shape_in(target.shape)
        self.vocabulary, self.num_steps = whole_vocabulary(target.shape.vocab_size), config.block_size - 1
        self.layers = fused_layers(config.aux_layers, target.shape.num_layers)
        self.mask_token_id = mask_token(config.mask_token_id, target.shape.vocab_size)
        self.net = DFlashNet(self.shape, len(self.layers))
        init_linears(self)
        pass_through(self.net.fc, (len(self.layers) - 1) * self.shape.hidden_size)  # the highest state
        self.net.norm.weight = copied(target.final_norm.weight)
        self.embedding, self.output = Frozen(target.embedding), Frozen(target.head)
        self.tables = Tables(*rotary_tables(self.shape))
        # It reads a number from the tokens, for which compiled code would stop with a warning.
        self._chosen = torch.compiler.disable(self.entries)  # type: ignore[no-untyped-call]

    def features(self, states: States, ids: Tensor, answer: Tensor | None = None) -> list[Features]:
        """See `Head`."""
        context = self.net.hidden_norm(self.net.fc(torch.cat([states[layer] for layer in self.layers], dim=-1)))
        num_entries = ids.shape[1] - 2
        entries = self._chosen(ids, answer) if torch.is_grad_enabled() else torch.arange(num_entries, device=ids.device)
        starts = range(0, len(entries), BLOCKS_AT_ONCE)
        parts = (entries[first : first + BLOCKS_AT_ONCE] for first in starts)
        found = torch.cat([self.blocks(context, ids, part) for part in parts], dim=1)  # [batch, blocks, slots, hidden]
        if len(entries) == num_entries:
            steps = range(self.num_steps)
            return [Features(found[:, : max(num_entries - step, 0), step + 1], self.output.table) for step in steps]
        learned = torch.zeros(num_entries, dtype=torch.bool, device=ids.device)
        learned[entries] = True
        blank = found.new_zeros(len(ids), num_entries, found.shape[-1])
        of_steps = (blank.index_copy(1, entries, found[:, :, step + 1]) for step in range(self.num_steps))
        sizes = range(num_entries, num_entries - self.num_steps, -1)
        return [
            Features(rows[:, :size], self.output.table, learned[:size])
            for rows, size in zip(of_steps, sizes, strict=True)
        ]

    def entries(self, ids: Tensor, answer: Tensor | None) -> Tensor:
        """The blocks to learn from, all of whose slots lie in the window, ascending; all if they are few.

        First come those whose first guess is part of some window's answer: only guesses of answers count.
        """
        most = max(ids.shape[1] - 1 - self.num_steps, 0)  # the last of them has its last slot at the window's end
        if most <= self.settings.num_blocks:
            return torch.arange(ids.shape[1] - 2, device=ids.device)
        chosen = torch.randperm(most, generator=torch.Generator().manual_seed(seed_of(ids)))
        if answer is not None:
            counts = answer[:, 2 : 2 + most].any(0).cpu()  # [most]
            chosen = torch.cat([chosen[counts[chosen]], chosen[~counts[chosen]]])
        return chosen[: self.settings.num_blocks].sort().values.to(ids.device)

    def blocks(self, context: Tensor, ids: Tensor, entries: Tensor) -> Tensor:
        """Rows before the output layer [batch, blocks, slots, hidden] of some entries [blocks]."""
        filled = ids.new_full((len(ids), len(entries), self.settings.block_size), self.mask_token_id)
        filled[:, :, 0] = ids[:, entries + 1]
        return torch.as_tensor(self.net(F.embedding(filled, self.embedding.table), context, entries, self.tables))

    def tensors(self) -> dict[str, Tensor]:
        """See `Head`."""
        return dict(self.net.state_dict())

    def config(self) -> dict[str, Any]:
        """See `Head`. `target_layer_ids` counts the first layer as 0; the target's output layer is read as stored."""
        scaled = {"output_multiplier": self.logit_scale} if self.logit_scale != 1.0 else {}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **self.shape.published(),
            "block_size": self.settings.block_size,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in self.layers],
                **scaled,
            },
            "num_target_layers": self.target_shape.num_layers,
            "rope_scaling": None,
            "layer_types": ["full_attention"] * self.shape.num_layers,
            "tie_word_embeddings": False,
        }


def positions_of(entries: Tensor, num_slots: int, num_positions: int) -> Tensor:
    """The positions of the slots of blocks [blocks, slots]; those behind the last position, which nobody reads, share
    it."""
    slots = torch.arange(1, num_slots + 1, device=entries.device)
    return (entries[:, None] + slots).clamp(max=num_positions - 1)


def mask_token(wanted: int, vocab_size: int) -> int:
    """The token that stands in empty slots: a recipe's, or the vocabulary's last. Raises ConfigError."""
    if wanted >= vocab_size:
        raise ConfigError(f"head.mask_token_id = {wanted}: the target has the tokens 0 to {vocab_size - 1}")
    return wanted if wanted >= 0 else vocab_size - 1


def seed_of(ids: Tensor) -> int:
    """A number that follows from the tokens of a batch, so that a resumed training chooses what the first one did."""
    return int(ids.sum())
