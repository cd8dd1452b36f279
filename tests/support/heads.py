"""Random draft heads in published layouts, and what they compute, written from the formulas in plain float32 torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.models.decoder import Decoder
from forerun.models.loader import load_model
from tests.models import factory
from tests.support import tiny

HIDDEN, HEADS, KV_HEADS, VOCAB = 32, 4, 2, factory.VOCAB_SIZE
DRAFT_VOCAB = 40
EPS, THETA = 1e-5, 500.0
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
}
States = Callable[[Sequence[int]], dict[int, Tensor]]  # tokens -> hidden states [n, H] by index


class Draw:
    """Seeded random tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._generator) * 0.2

    def norm(self, size: int = HIDDEN) -> Tensor:
        return 1.0 + torch.randn(size, generator=self._generator) * 0.2

    def bias(self, size: int = HIDDEN) -> Tensor:
        return torch.randn(size, generator=self._generator) * 0.2

    def block(self, prefix: str, columns: int, head_dim: int = 8, ffn: int = 48) -> dict[str, Tensor]:
        """A Llama layer whose q, k and v have `columns` inputs, with the norm after its attention."""
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return {
            f"{attention}.q_proj.weight": self.matrix(HEADS * head_dim, columns),
            f"{attention}.k_proj.weight": self.matrix(KV_HEADS * head_dim, columns),
            f"{attention}.v_proj.weight": self.matrix(KV_HEADS * head_dim, columns),
            f"{attention}.o_proj.weight": self.matrix(HIDDEN, HEADS * head_dim),
            f"{mlp}.gate_proj.weight": self.matrix(ffn, HIDDEN),
            f"{mlp}.up_proj.weight": self.matrix(ffn, HIDDEN),
            f"{mlp}.down_proj.weight": self.matrix(HIDDEN, ffn),
            f"{prefix}.post_attention_layernorm.weight": self.norm(),
        }


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], as_bin: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if as_bin:
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


# -- the formulas --------------------------------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """x [rows, heads, D] at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)  # [rows, D / 2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(x: Tensor, tensors: Mapping[str, Tensor], prefix: str, theta: float) -> Tensor:
    """Causal attention of rows x [rows, K] -> [rows, H]."""

    def project(name: str, heads: int) -> Tensor:
        flat = x @ tensors[f"{prefix}.{name}_proj.weight"].T + tensors.get(f"{prefix}.{name}_proj.bias", 0.0)
        split = flat.view(len(x), heads, -1)
        norm = tensors.get(f"{prefix}.{name}_norm.weight")
        return split if norm is None else rms(split, norm)

    q, k = rotate(project("q", HEADS), theta), rotate(project("k", KV_HEADS), theta)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, project("v", KV_HEADS)))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return mixed.reshape(len(x), -1) @ tensors[f"{prefix}.o_proj.weight"].T + tensors.get(f"{prefix}.o_proj.bias", 0.0)


def feed_forward(x: Tensor, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate, up = (x @ tensors[f"{prefix}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ tensors[f"{prefix}.down_proj.weight"].T


@dataclass
class Reference:
    """A head by its formulas: `inner` maps embeddings and features of all rows to the stream behind the last layer.

    `outcome` maps that stream to logits over the target's vocabulary and to what is fed back.
    """

    embedding: Tensor  # [V, H]
    layers: Sequence[int]  # of the target
    fuse: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor]
    outcome: Callable[[Tensor], tuple[Tensor, Tensor]]
    mask_start: bool = False
    sees_first: bool = False  # there is a row of the first token before the others, with a state of zeros

    def after(self, known: Sequence[int], drafted: Sequence[int], states: States) -> Tensor:
        """Logits [V] after known and then drafted tokens: row i reads token i + 1 and the state of token i."""
        by_layer = states(known)
        features = self.fuse(torch.cat([by_layer[layer] for layer in self.layers], dim=1)[: len(known) - 1])
        tokens = list(known[1:])
        if self.sees_first:
            tokens, features = list(known), torch.cat([torch.zeros_like(features[:1]), features])
        for step in range(len(drafted) + 1):
            logits, fed = self.rows(tokens, features)
            if step < len(drafted):
                tokens.append(drafted[step])
                features = torch.cat([features, fed[-1:]])
        return logits[-1]

    def rows(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """What every row gives: logits [n, V], and what is fed back [n, H]."""
        embedded = self.embedding[torch.tensor(tokens)].clone()
        if self.mask_start:
            embedded[0] = 0.0
        return self.outcome(self.inner(embedded, features))


@dataclass
class ChainedReference:
    """Modules one behind the other, each over the whole text: row i of one reads token i and what the one before gave
    in row i - 1."""

    modules: Sequence[Reference]

    def after(self, known: Sequence[int], drafted: Sequence[int], states: States) -> Tensor:
        """Logits [V] after known and then drafted tokens: of the module for that depth, beyond the last one of that."""
        first, tokens, last = self.modules[0], [*known, *drafted], len(self.modules) - 1
        by_layer = states(known)
        fed = first.fuse(torch.cat([by_layer[layer] for layer in first.layers], dim=1)[: len(known) - 1])
        for depth, module in enumerate(self.modules[: len(drafted) + 1]):
            num_rows = len(known) + depth
            features = torch.cat([torch.zeros_like(fed[:1]), fed[: num_rows - 1]])
            logits, fed = module.rows(tokens[:num_rows], features)
        for depth in range(last + 1, len(drafted) + 1):
            features = torch.cat([features, fed[-1:]])
            logits, fed = self.modules[last].rows(tokens[: len(known) + depth], features)
        return logits[-1]


def layer_of(x: Tensor, residual: Tensor, tensors: Mapping[str, Tensor], prefix: str, theta: float = THETA) -> Tensor:
    """One layer whose attention reads x -> the stream behind it."""
    stream = residual + attend(x, tensors, f"{prefix}.self_attn", theta)
    normed = rms(stream, tensors[f"{prefix}.post_attention_layernorm.weight"])
    return stream + feed_forward(normed, tensors, f"{prefix}.mlp")


# -- the target ----------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """The target by transformers: its tables and its hidden states."""

    model: Any

    @property
    def embedding(self) -> Tensor:
        return self.model.model.embed_tokens.weight.detach()

    @property
    def lm_head(self) -> Tensor:
        return self.model.lm_head.weight.detach()

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """Index 0 the embeddings, i the output of layer i - 1, the last that of the final norm; each [n, H]."""
        inner, found = self.model.model, {}
        modules = [inner.embed_tokens, *inner.layers, inner.norm]
        hooks = [
            module.register_forward_hook(lambda _, __, out, i=i: found.update({i: _first(out)}))
            for i, module in enumerate(modules)
        ]
        self.model(torch.tensor([list(tokens)]))
        for hook in hooks:
            hook.remove()
        return found


@lru_cache(maxsize=4)
def truth(num_layers: int) -> Truth:
    fields = {"num_hidden_layers": num_layers, "max_position_embeddings": 128}
    return Truth(factory.random_hf_model("llama", fields))


@lru_cache(maxsize=4)
def target(num_layers: int) -> Decoder:
    """The same as forerun's own decoder."""
    with tempfile.TemporaryDirectory() as folder:
        factory.save_checkpoint(truth(num_layers).model, Path(folder))
        model = load_model(folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    return model


def _first(out: Any) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN)
