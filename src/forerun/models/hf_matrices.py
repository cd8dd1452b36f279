"""The matrices and tables of transformers' modules, multiplied and read by forerun's kernels.

Knows: which submodules are linear layers and embeddings, and how to stand in for them. Does not know: attention,
batches, files.

A row that the kernels compute has the same bits whatever other rows are computed with it, which torch's products do not
promise. Activations are float32, matrices keep the checkpoint's precision, as in the families forerun runs itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.embedding import TableEmbedding
from forerun.layers.linear import Linear
from forerun.quant.dense import DenseWeight

_MAX_LEFT = 0.25  # share of the parameters that may stay with torch, where they would be widened to float32
_TRIED_ROWS = 3
# Of the logits' standard deviation: what stands in computes in float32, the module in the precision of its weights.
_TOLERANCE, _TOLERANCE_16_BITS = 0.01, 0.1


@dataclass(frozen=True, slots=True)
class RowsInUse:
    """Which rows of the pass that runs are worth computing; all tensors of modules have `num_padded`."""

    num_rows: int  # of the batch; those behind them only fill up
    num_padded: int
    logit_rows: Tensor | None  # [R], for the output layer; None: all
    computes: bool = True  # False: what stands in gives zeros, to see what a module does between


ALL_ROWS = RowsInUse(0, 0, None)  # outside of passes over the pool
ONLY_SHAPES = RowsInUse(0, 0, None, computes=False)
WITHOUT_LOGITS = RowsInUse(0, 0, torch.empty(0, dtype=torch.int64))
ROWS: ContextVar[RowsInUse] = ContextVar("rows", default=ALL_ROWS)


class KernelLinear(nn.Module):
    """Stands in for a linear layer of a module."""

    def __init__(self, out_features: int, linear: Linear | None, is_head: bool = False) -> None:
        """`linear` None: its matrix is not there, and it gives zeros.

        is_head: it is the output layer, which computes the rows that logits are wanted of.
        """
        super().__init__()
        self.out_features = out_features
        self.linear = linear
        self.is_head = is_head

    @property
    def nbytes(self) -> int:
        """Bytes of matrix and bias."""
        return 0 if self.linear is None else self.linear.nbytes

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        used = ROWS.get()
        if self.linear is None or not used.computes:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, x.shape[-1])
        if self.is_head and used.logit_rows is not None:
            wanted = rows.index_select(0, used.logit_rows)  # [R, K]
            return (self.linear(wanted) if len(wanted) else x.new_empty(0, self.out_features))[None]
        if used.num_padded == used.num_rows:
            return self.linear(rows.contiguous()).view(*x.shape[:-1], self.out_features)
        made = x.new_zeros(rows.shape[0], self.out_features)
        made[: used.num_rows] = self.linear(rows[: used.num_rows].contiguous())
        return made.view(*x.shape[:-1], self.out_features)


class KernelEmbedding(nn.Module):
    """Stands in for an embedding of a module."""

    def __init__(self, table: TableEmbedding | None, width: int) -> None:
        """`table` None: it is not there, and rows are zeros."""
        super().__init__()
        self.table = table
        self.width = width

    @property
    def nbytes(self) -> int:
        """Bytes of the table, 0 if it is the output layer's."""
        return 0 if self.table is None else self.table.nbytes

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., H] float32."""
        if self.table is None or not ROWS.get().computes:
            return torch.zeros(*ids.shape, self.width, device=ids.device)
        return self.table(ids.reshape(-1).long().contiguous()).view(*ids.shape, self.width)


def stand_in(module: Any, kernels: Kernels | None) -> None:
    """Replace linear layers and embeddings inside a transformers model; `kernels` None: by such that give zeros.

    What stays is converted to float32. Raises UnsupportedError with the module as it was if `why_not` says so, and with
    the module taken apart if its logits change.
    """
    reason = why_not(module)
    if reason is not None:
        raise UnsupportedError(reason)
    before = None if kernels is None else _some_logits(module)
    tolerance = _TOLERANCE_16_BITS if _has_16_bits(module) else _TOLERANCE
    _replace(module, kernels)
    if before is None:
        return
    off = (_some_logits(module) - before).square().mean(dim=1).sqrt().median()  # a row may be routed to other experts
    if not off <= tolerance * before.std():
        raise UnsupportedError(f"the kernels' logits differ from the module's by {float(off):.2g}")


def why_not(module: Any) -> str | None:
    """Why a model must keep the matrices of transformers; None if kernels can stand in for them."""
    if getattr(module.config, "quantization_config", None) is not None:
        return "its weights are quantized in a way that transformers reads"
    total = sum(parameter.numel() for parameter in module.parameters())
    replaced = {id(part.weight): part.weight.numel() for part in (*_linears(module), *_tables(module))}
    if total - sum(replaced.values()) > _MAX_LEFT * total and module.dtype != torch.float32:
        return "most of its weights lie in no linear layer"
    return None


def _replace(module: Any, kernels: Kernels | None) -> None:
    head = module.get_output_embeddings()
    names: dict[int, list[str]] = {}  # a module may have several
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(name)
    linears = {id(part): part for part in _linears(module)}
    tables = _tables(module)
    shared = None if id(head) not in linears else head.weight
    made: dict[int, KernelLinear] = {}
    for key, part in linears.items():
        made[key] = _linear(part, kernels, part is head)
        if part is head or part.weight is not shared:
            _drop(part)
    for part in tables:
        is_shared = shared is not None and part.weight is shared
        _put(module, names[id(part)], _embedding(part, kernels, made[id(head)] if is_shared else None))
    for key, stand in made.items():
        _put(module, names[key], stand)
    module.float()


@torch.no_grad()
def _some_logits(module: Any) -> Tensor:
    """Logits of a short text [T, V], float32."""
    config = module.config.get_text_config()
    drawn = torch.randint(config.vocab_size, (1, _TRIED_ROWS), generator=torch.Generator().manual_seed(0))
    logits: Tensor = module(input_ids=drawn).logits[0]
    return logits.float()


def _has_16_bits(module: Any) -> bool:
    return any(parameter.dtype.itemsize == 2 for parameter in module.parameters())


def kernel_bytes(module: Any) -> int:
    """Bytes of what stands in for linear layers and embeddings."""
    return sum(part.nbytes for part in _stand_ins(module))


def kernel_parameters(module: Any) -> int:
    """Entries of what stands in for linear layers and embeddings; those of a shared matrix count once."""
    linears = [part.linear for part in _stand_ins(module) if isinstance(part, KernelLinear)]
    tables = [part.table for part in _stand_ins(module) if isinstance(part, KernelEmbedding)]
    of_tables = sum(table.shape[0] * table.shape[1] for table in tables if table is not None and table.nbytes)
    return of_tables + sum(linear.num_parameters for linear in linears if linear is not None)


def _stand_ins(module: Any) -> Iterator[KernelLinear | KernelEmbedding]:
    return (part for part in module.modules() if isinstance(part, (KernelLinear, KernelEmbedding)))


def _linears(module: Any) -> list[Any]:
    """The parts that compute x W^T + b, or x W + b as GPT-2 stores it, and nothing else."""
    from transformers.models.falcon.modeling_falcon import FalconLinear

    known = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)
    return [
        part
        for part in module.modules()
        if isinstance(part, (nn.Linear, Conv1D)) and type(part).forward in known and _is_plain(part)
    ]


def _tables(module: Any) -> list[Any]:
    return [
        part for part in module.modules() if type(part) is nn.Embedding and part.max_norm is None and _is_plain(part)
    ]


def _is_plain(part: Any) -> bool:
    """Whether nothing but its class's `forward` runs, on a matrix of plain numbers."""
    weight = part._parameters.get("weight")  # what is computed (parametrizations, weight_norm) is none
    return (
        "forward" not in vars(part)
        and type(part).__call__ is nn.Module.__call__
        and not part._forward_hooks
        and not part._forward_pre_hooks
        and type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.is_floating_point()
        and weight.dtype.itemsize >= 2
    )


def _linear(part: Any, kernels: Kernels | None, is_head: bool) -> KernelLinear:
    weight: Tensor = part.weight.data.T if isinstance(part, Conv1D) else part.weight.data
    if kernels is None:
        return KernelLinear(weight.shape[0], None, is_head)
    bias = None if part.bias is None else part.bias.data.float().contiguous()
    return KernelLinear(weight.shape[0], Linear(DenseWeight(kernels, weight.contiguous()), bias), is_head)


def _embedding(part: Any, kernels: Kernels | None, head: KernelLinear | None) -> KernelEmbedding:
    """`head`: the output layer, whose matrix the table is."""
    table: Tensor = part.weight.data
    width = int(table.shape[1])
    if kernels is None:
        return KernelEmbedding(None, width)
    if head is not None and head.linear is not None and isinstance(head.linear.weight, DenseWeight):
        return KernelEmbedding(TableEmbedding(kernels, head.linear.weight.packed, shared=True), width)
    kept = table.float() if table.dtype == torch.float16 else table
    return KernelEmbedding(TableEmbedding(kernels, kept.contiguous()), width)


def _drop(part: Any) -> None:
    """Free a matrix that was packed."""
    part.weight = nn.Parameter(part.weight.data.new_empty(0), requires_grad=False)


def _put(module: Any, names: Sequence[str], part: nn.Module) -> None:
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, part)
