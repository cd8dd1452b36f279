"""Transformers' modules over forerun's pool: spans, trees and batches in one pass, exactly.

Knows: how attention of a module is handed to forerun's kernels (transformers calls such a function an attention
interface). Does not know: whether a module may be run so (`hf_fitting`), files.

All rows of a pass are one row of tokens to the module. Attention, products with matrices and embeddings are forerun's
kernels', and what is left (norms, activations, rotations, sums) treats each token alone, on one thread of torch: more
would divide tensors anywhere, and torch computes the ends of a part otherwise than its middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from forerun.errors import KernelError
from forerun.kernels.ops import AttentionRows, HeadLayout, Kernels, LayerKV
from forerun.kernels.threads import single_torch_thread
from forerun.models.base import CommittedPath, LayerSpec, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.models.hf import check_hidden_layers, max_position, size_of, vocabulary_of
from forerun.models.hf_matrices import ROWS, RowsInUse

ATTENTION = "forerun"  # what transformers calls the function below
SITE = "forerun_site"  # attribute of attention modules


class AttentionSite(NamedTuple):
    """What one attention layer asks of the pool."""

    layer: int  # among the layers that attend
    heads: HeadLayout  # nothing is rotated: the module has done that
    scale: float
    window: int  # 0: none
    cap: float  # 0: none


@dataclass(frozen=True, slots=True)
class _PooledPass:
    """What attention needs to know of the pass that runs."""

    kernels: Kernels
    kvs: Sequence[LayerKV]
    positions: Tensor  # [M] int32
    slots: Tensor  # [M] int32
    rows: AttentionRows
    unrotated: Tensor  # [max_position, 0]: a table for heads without rotations
    num_padded: int


_PASS: ContextVar[_PooledPass] = ContextVar("pooled pass")


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Query [1, Q, M, D], key and value [1, G, M, D] of new rows -> [1, M, Q, D]; sees what the batch says."""
    site: AttentionSite = getattr(module, SITE)
    run, heads = _PASS.get(), site.heads
    num_rows, kv = run.slots.shape[0], run.kvs[site.layer]
    parts = [part[0, :, :num_rows].transpose(0, 1) for part in (query, key, value)]
    qkv = torch.cat(parts, dim=1).view(num_rows, heads.row_size)
    run.kernels.rope_and_cache(qkv, heads, run.unrotated, run.positions, run.slots, kv)
    sinks = None if s_aux is None else s_aux.float().contiguous()
    out = run.kernels.attention(qkv, heads, kv, run.rows, site.scale, site.window, sinks=sinks, cap=site.cap)
    if run.num_padded > num_rows:
        out = torch.cat([out, out.new_zeros(run.num_padded - num_rows, out.shape[1])])
    return out.view(1, run.num_padded, heads.num_q, heads.head_dim), None


AttentionInterface.register(ATTENTION, _attend)


class PooledHFModel:
    """A transformers model whose keys and values lie in the pool. Implements `models.base.Model`."""

    device = torch.device("cpu")

    def __init__(
        self, module: Any, kernels: Kernels, sites: Sequence[AttentionSite], dtype: torch.dtype, multiple: int
    ) -> None:
        """`module` has stand-ins for its matrices, and sites at its attention; `dtype` of keys and values.

        multiple: the number of rows a pass is filled up to a multiple of, so that no tensor ends within a vector.
        """
        self._module = module
        self._kernels = kernels
        self.multiple = multiple
        config = module.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size = vocabulary_of(module)
        self.kv_specs = specs_of(sites, dtype)
        self.weight_bytes, self.num_parameters = size_of(module)
        self.limit(max_position(config))

    def limit(self, max_position: int) -> None:
        """Run texts of so many positions at most."""
        self.max_position, self._unrotated = max_position, torch.empty(max_position, 0)

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`. hidden_layers: all but the last layer's output, which transformers normalises.

        Raises KernelError while a pass is recorded, which torch's own operations cannot be.
        """
        if not batch.sequences:
            raise KernelError("a pass through transformers cannot be recorded")
        check_hidden_layers(hidden_layers, self.num_layers)
        num_rows, num_logits = batch.token_ids.shape[0], batch.logit_rows.shape[0]
        num_padded = self._padded(num_rows)
        run = _PooledPass(self._kernels, kvs, batch.positions, batch.slots, batch.rows, self._unrotated, num_padded)
        wanted = (
            None if batch.all_logits and num_padded == num_rows else _filled(batch.logit_rows, self._padded(num_logits))
        )
        used = RowsInUse(num_rows, num_padded, wanted)
        out = self._call(run, used, batch, bool(hidden_layers))
        hidden = {layer: out.hidden_states[layer][0, :num_rows].float() for layer in hidden_layers}  # [M, H]
        return PassOutput(out.logits[0, :num_logits].float().contiguous(), hidden)

    @torch.no_grad()
    def _call(self, run: _PooledPass, used: RowsInUse, batch: ForwardBatch, hidden: bool) -> Any:
        running, using = _PASS.set(run), ROWS.set(used)
        try:
            with single_torch_thread():
                return self._module(
                    input_ids=_filled(batch.token_ids, used.num_padded)[None],
                    position_ids=_filled(batch.positions, used.num_padded)[None].long(),
                    use_cache=False,
                    output_hidden_states=hidden,
                )
        finally:
            ROWS.reset(using)
            _PASS.reset(running)

    def _padded(self, num_rows: int) -> int:
        return -(-num_rows // self.multiple) * self.multiple

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """All state is in the pool: nothing to do."""

    def release(self, request_id: str) -> None:
        """All state is in the pool: nothing to do."""


def specs_of(sites: Sequence[AttentionSite], dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    """What these layers keep in the pool."""
    return tuple(LayerSpec(site.heads.num_kv, site.heads.head_dim, dtype) for site in sites)


def _filled(column: Tensor, length: int) -> Tensor:
    """The column, its last entry repeated up to `length`."""
    missing = length - column.shape[0]
    return column if missing == 0 else torch.cat([column, column[-1:].expand(missing)])
