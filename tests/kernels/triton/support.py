"""What the tests of Triton's kernels share: problems made on the CPU, moved to where the kernels run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from tests.kernels.cases import AttentionCase
from torch import Tensor

from forerun.kernels.ops import HeadLayout


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a dataclass of tensors and dataclasses, as a copy on `device`; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def run(case: AttentionCase, kernels: Any, window: int = 0) -> Tensor:
    """The op on the kernels' device, its result on the CPU."""
    return moved(case, kernels.device).run(kernels, window=window).cpu()


def rows_of_one_sequence(case: AttentionCase, lengths: list[int]) -> AttentionCase:
    """A span: rows of the first sequence that see the first `lengths` positions of it, no tree."""
    num = len(lengths)
    rows = replace(
        case.rows,
        seq_ids=torch.zeros(num, dtype=torch.int32),
        prefix_lens=torch.tensor(lengths, dtype=torch.int32),
        tree_masks=torch.zeros(num, dtype=torch.int64),
    )
    qkv = torch.randn(num, case.heads.row_size, generator=torch.Generator().manual_seed(num))
    return replace(case, rows=rows, qkv=qkv)


SMALL = HeadLayout(4, 2, 16, 16)
ONE_KV_HEAD = HeadLayout(4, 1, 16, 16)  # half the programs
