"""Draft heads for a widened model that draft what they drafted for the model it was made from.

Knows: the tensors of Medusa heads (vLLM's layout), EAGLE-3 heads (SafeAILab's), MTP modules (MiMo's) and DFlash heads
(z-lab's). Does not know: files, and how a model is widened.

Why the function stays the same: all states of a widened model are those of the small one with zeros behind them, also
after its final norm, and added layers pass them on. A head gets matrices that write zeros into the new coordinates,
norms with weights over sqrt(new / old) and eps times old / new, and heads and feed-forward units that are multiplied
by zero columns, like the model itself (`widening.tensors`). Its own layers grow as the target's layers did, and stay as
many as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forerun.bench.speed import WIDENED_FROM
from forerun.errors import ConfigError, UnsupportedError
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.fields import Fields
from forerun.weights.checkpoint import SINGLE_FILE, Checkpoint
from widening.model import open_source, write_folder
from widening.sizes import Axis, Sizes, appended, head_axes, joined
from widening.tensors import Spread, TensorPiece

MTP = "model.mtp_layers.0"
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
KEPT = ("token_map", "d2t", "t2d")  # maps between vocabularies, which do not grow


@dataclass(frozen=True, slots=True)
class WidenedTarget:
    """A model that was widened, and what it was before."""

    checkpoint: Checkpoint
    config: ModelConfig
    family: Family
    before: Sizes
    now: Sizes

    @staticmethod
    def open(folder: Path) -> WidenedTarget:
        """Raises ConfigError for a model that was not widened."""
        checkpoint, config, family = open_source(folder)
        mark = checkpoint.config.get(WIDENED_FROM)
        if not isinstance(mark, Mapping):
            raise ConfigError(
                f"{folder} is no widened model: its config.json does not say {WIDENED_FROM}; write one with "
                "lab/widen.py, then widen the heads of the model it was made from"
            )
        before = Sizes(**{name: mark[name] for name in asdict(Sizes.of(config))})
        return WidenedTarget(checkpoint, config, family, before, Sizes.of(config))

    def output_rows(self) -> Tensor:
        """The output layer's matrix [V, H]."""
        names = self.family.names
        module = names.embedding if self.config.tie_embeddings else names.lm_head
        return self.checkpoint.tensor(f"{module}.weight", (self.config.vocab_size, self.config.hidden_size))


def widen_head(target: WidenedTarget, folder: Path, out: Path) -> dict[str, Any]:
    """Write heads in `folder`, made for the model `target` was widened from, for `target` to `out` -> a report.

    Raises ConfigError for heads of another size or a taken `out`, UnsupportedError for layouts that cannot be widened.
    """
    checkpoint = Checkpoint.open(folder)
    if not (folder / SINGLE_FILE).exists():
        raise UnsupportedError(f"{folder} holds its tensors in several files; save the head as one {SINGLE_FILE}")
    for layout in (_Medusa, _WideEagle3, _Mtp, _WideDFlash):
        if checkpoint.has(layout.sign):
            return _write(layout(checkpoint, target), out)
    raise UnsupportedError(
        f"{folder} holds no head that can be widened: there is none of {_Medusa.sign} (Medusa, vLLM's layout), "
        f"{_WideEagle3.sign} (EAGLE-3), {_Mtp.sign} (MTP, MiMo's layout) and {_WideDFlash.sign} (DFlash)"
    )


def _write(widening: _HeadWidening, out: Path) -> dict[str, Any]:
    pieces = list(widening.pieces())
    known = {piece.name for piece in pieces}
    others = [name for name in widening.checkpoint if name not in known]
    if others:
        raise UnsupportedError(
            f"{widening.checkpoint.folder} has {len(others)} tensors that cannot be widened, e.g. "
            f"{', '.join(others[:3])}; take a head without them"
        )
    total = write_folder(out, pieces, widening.config(), widening.checkpoint.folder)
    return {"head": widening.kind, "weight_bytes": total, "hidden_size": widening.target.now.hidden_size}


class _HeadWidening(Spread):
    """One head and the sizes it grows to."""

    kind: str
    sign: str  # a tensor that tells the layout

    def __init__(self, checkpoint: Checkpoint, target: WidenedTarget) -> None:
        self.checkpoint, self.target = checkpoint, target
        super().__init__(checkpoint, target.before.hidden_size, target.now.hidden_size, self.sign)
        if checkpoint.config.get("hidden_size") != target.before.hidden_size:
            raise ConfigError(
                f"the head in {checkpoint.folder} has hidden_size {checkpoint.config.get('hidden_size')}, the model "
                f"{target.checkpoint.folder} was made from had {target.before.hidden_size}; give a head of that size"
            )

    def pieces(self) -> Iterator[TensorPiece]:
        """Every tensor."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """config.json of the widened head."""
        mark = {"head": str(self.checkpoint.folder), "hidden_size": self.target.before.hidden_size}
        return {**self.checkpoint.config, "hidden_size": self.target.now.hidden_size, WIDENED_FROM: mark}

    def _matrix(self, name: str, columns: Axis, free: bool, rows: Axis | None = None) -> Iterator[TensorPiece]:
        """A matrix, and its bias if there is one; `rows` other than the hidden size's stay as many as they are."""
        weight = f"{name}.weight"
        rows = rows or _same(self.checkpoint.shape(weight)[0])
        yield self._piece(weight, (rows, columns), free)
        if self.checkpoint.has(f"{name}.bias"):
            yield self._piece(f"{name}.bias", (rows,), free)

    def _kept(self) -> Iterator[TensorPiece]:
        for name in KEPT:
            if self.checkpoint.has(name):
                tensor = self._integers(name)
                yield TensorPiece(name, tuple(tensor.shape), tensor.dtype, tensor.clone)

    def _integers(self, name: str) -> Tensor:
        """A map as it is stored, which may be in single bits."""
        with safe_open(self.checkpoint.folder / SINGLE_FILE, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found


def _same(size: int) -> Axis:
    return appended(size, size)


class _Medusa(_HeadWidening):
    """Residual blocks whose new coordinates stay zero: SiLU(0) = 0."""

    kind, sign = "medusa", "blocks.0.layers.0.weight"

    def pieces(self) -> Iterator[TensorPiece]:
        """See `_HeadWidening`."""
        for name in self.checkpoint:
            module = name.removesuffix(".weight")
            if name.startswith("blocks.") and name.endswith(".weight"):
                yield from self._matrix(module, self._hidden, free=False, rows=self._hidden)
            elif name.startswith("lm_heads."):
                yield from self._matrix(module, self._hidden, free=True)
        if self.checkpoint.has("lm_head.weight"):
            yield self._shared_output()
        yield from self._kept()

    def _shared_output(self) -> TensorPiece:
        """The new columns are the target's, so that an output layer that was the target's own still is."""
        rows = self.checkpoint.shape("lm_head.weight")[0]
        dtype, shape = self.checkpoint.dtype("lm_head.weight"), (rows, self.target.now.hidden_size)
        return TensorPiece("lm_head.weight", shape, dtype, partial(self._output_rows, rows, dtype))

    def _output_rows(self, rows: int, dtype: torch.dtype) -> Tensor:
        whole = self.target.output_rows().to(dtype)  # [V, H]
        found = whole if rows == len(whole) else whole[self._integers("token_map").long()]
        old = self.target.before.hidden_size
        found[:, :old] = self.checkpoint.tensor("lm_head.weight", (rows, old))
        return found


class _WithLayer(_HeadWidening):
    """A head with decoder layers, which grow as the target's layers did."""

    def __init__(self, checkpoint: Checkpoint, target: WidenedTarget) -> None:
        super().__init__(checkpoint, target)
        before, now, fields = target.before, target.now, Fields(checkpoint.config, {})
        num_q = fields.integer("num_attention_heads")
        old = Sizes(
            hidden_size=before.hidden_size,
            num_layers=1,
            ffn_size=fields.integer("intermediate_size"),
            num_q=num_q,
            num_kv=fields.integer("num_key_value_heads", default=num_q),
        )
        num_kv = _grown(old.num_kv, before.num_kv, now.num_kv)
        num_q = -(-_grown(num_q, before.num_q, now.num_q) // num_kv) * num_kv
        ffn_size = _grown(old.ffn_size, before.ffn_size, now.ffn_size)
        self._sizes = Sizes(hidden_size=now.hidden_size, num_layers=1, ffn_size=ffn_size, num_q=num_q, num_kv=num_kv)
        self._head_dim = fields.integer("head_dim", default=old.hidden_size // old.num_q)
        self._query, self._key = head_axes(old, self._sizes, self._head_dim)
        self._ffn = appended(old.ffn_size, ffn_size)

    def _layer(self, prefix: str, columns: Axis) -> Iterator[TensorPiece]:
        """Attention that reads `columns`, and the feed-forward layer; without norms."""
        for name, rows in (("q_proj", self._query), ("k_proj", self._key), ("v_proj", self._key)):
            yield from self._matrix(f"{prefix}.self_attn.{name}", columns, free=True, rows=rows)
        yield from self._matrix(f"{prefix}.self_attn.o_proj", self._query, free=False, rows=self._hidden)
        for name in ("gate_proj", "up_proj"):
            yield from self._matrix(f"{prefix}.mlp.{name}", self._hidden, free=True, rows=self._ffn)
        yield from self._matrix(f"{prefix}.mlp.down_proj", self._ffn, free=False, rows=self._hidden)

    def _norms(self, prefix: str, names: str) -> Iterator[TensorPiece]:
        for name in names.split():
            yield self._norm(f"{prefix}.{name}.weight", self._hidden)

    def config(self) -> dict[str, Any]:
        """See `_HeadWidening`."""
        raw, sizes = self.checkpoint.config, self._sizes
        changed: dict[str, Any] = {
            "intermediate_size": sizes.ffn_size,
            "num_attention_heads": sizes.num_q,
            "num_key_value_heads": sizes.num_kv,
            "head_dim": self._head_dim,
            "rms_norm_eps": raw.get("rms_norm_eps", 1e-6) * self.target.before.hidden_size / sizes.hidden_size,
        }
        if "target_hidden_size" in raw:
            changed["target_hidden_size"] = sizes.hidden_size
        return {**super().config(), **changed}


def _grown(size: int, before: int, now: int) -> int:
    return max(size, math.ceil(size * now / before))


class _WideEagle3(_WithLayer):
    """fc over three states, a layer that reads embedding and state, an output layer over the draft vocabulary."""

    kind, sign = "eagle3", "midlayer.hidden_norm.weight"

    def pieces(self) -> Iterator[TensorPiece]:
        """See `_HeadWidening`."""
        hidden = self._hidden
        yield from self._matrix("fc", joined((hidden,) * 3), free=False, rows=hidden)
        yield from self._layer("midlayer", joined((hidden, hidden)))
        yield from self._norms("midlayer", "input_layernorm hidden_norm post_attention_layernorm")
        yield self._norm("norm.weight", hidden)
        for name in (f"fc_norm.{index}.weight" for index in range(3)):
            if self.checkpoint.has(name):
                yield self._norm(name, hidden)
        if self.checkpoint.has("input_norm.weight"):
            yield self._norm("input_norm.weight", joined((hidden,) * 3))
        for module, free in (("lm_head", True), ("embed_tokens", False)):
            if self.checkpoint.has(f"{module}.weight"):
                yield from self._matrix(module, hidden, free)
        yield from self._kept()

    def config(self) -> dict[str, Any]:
        """See `_HeadWidening`. The states it reads are named, since their usual choice goes by the number of layers."""
        made, num_layers = super().config(), self.target.before.num_layers
        if AUX_IDS not in made and not (made.get("eagle_config") or {}).get(AUX_IDS):
            made[AUX_IDS] = [2, num_layers // 2, num_layers - 3]
        return made


class _Mtp(_WithLayer):
    """A projection of state and embedding, and a layer; embedding and output layer are the target's."""

    kind, sign = "mtp", f"{MTP}.input_proj.weight"

    def pieces(self) -> Iterator[TensorPiece]:
        """See `_HeadWidening`."""
        hidden = self._hidden
        yield from self._matrix(f"{MTP}.input_proj", joined((hidden, hidden)), free=False, rows=hidden)
        yield from self._layer(MTP, hidden)
        norms = "token_layernorm hidden_layernorm input_layernorm post_attention_layernorm final_layernorm"
        yield from self._norms(MTP, norms)

    def config(self) -> dict[str, Any]:
        """See `_HeadWidening`."""
        made = super().config()
        if made.get("num_hidden_layers") == self.target.before.num_layers:
            made["num_hidden_layers"] = self.target.now.num_layers
        return made


class _WideDFlash(_WithLayer):
    """fc over several states, whose rows stand for known tokens; embedding and output layer are mostly the target's."""

    kind, sign = "dflash", "hidden_norm.weight"

    def pieces(self) -> Iterator[TensorPiece]:
        """See `_HeadWidening`."""
        hidden, columns = self._hidden, self.checkpoint.shape("fc.weight")[1]
        num_states, rest = divmod(columns, self.target.before.hidden_size)
        if rest:
            raise ConfigError(
                f"{self.checkpoint.folder}: fc.weight has {columns} columns, which are not whole states of "
                f"{self.target.before.hidden_size} entries; give a head of the model that was widened"
            )
        yield from self._matrix("fc", joined((hidden,) * num_states), free=False, rows=hidden)
        yield self._norm("hidden_norm.weight", hidden)
        for index in range(Fields(self.checkpoint.config, {}).integer("num_hidden_layers")):
            prefix = f"layers.{index}"
            yield from self._layer(prefix, hidden)
            yield from self._norms(prefix, "input_layernorm post_attention_layernorm")
            yield from self._head_norms(f"{prefix}.self_attn")
        yield self._norm("norm.weight", hidden)
        for module, free in (("lm_head", True), ("embed_tokens", False)):
            if self.checkpoint.has(f"{module}.weight"):
                yield from self._matrix(module, hidden, free)
        yield from self._kept()

    def _head_norms(self, prefix: str) -> Iterator[TensorPiece]:
        """Norms over single heads, whose size does not change."""
        for name in (f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"):
            if self.checkpoint.has(name):
                shape = (self._head_dim,)
                make = partial(self.checkpoint.tensor, name, shape)
                yield TensorPiece(name, shape, self.checkpoint.dtype(name), make)

    def config(self) -> dict[str, Any]:
        """See `_HeadWidening`."""
        made = super().config()
        if "num_target_layers" in made:
            made["num_target_layers"] = self.target.now.num_layers
        return made
