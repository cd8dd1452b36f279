"""The kernels of products, experts and sampling, each with the arguments of a layer of a published model."""

from __future__ import annotations

from typing import Any

from forerun.kernels.triton.common import EXACT

Entry = tuple[Any, dict[str, Any], dict[str, Any]]
SLOTS = {"sources": "*i32", "owners": "*i32"}


def kernels() -> list[Entry]:
    """See `ahead_of_time`."""
    import triton.language as tl

    return [
        dense(1, tl.bfloat16, "*bf16", listed=False),
        dense(64, tl.bfloat16, "*bf16", listed=True),
        dense(17, tl.float16, "*fp16", listed=False),
        dense(1, tl.float32, "*fp32", listed=False),
        *small(4, 128, num_rows=1, listed=False),
        *small(4, 32, num_rows=64, listed=True),
        *small(6, 16, num_rows=1, listed=False),
        *small(8, 256, num_rows=40, listed=True),
        *moving(),
        *choosing(),
    ]


def dense(num_rows: int, kind: Any, name: str, listed: bool) -> Entry:
    from forerun.kernels.triton import linear

    types = {"x": "*fp32", "weight": "*i64" if listed else name, "bias": "*fp32", "out": "*fp32"}
    types |= {"sources": "*i32", "starts": "*i32", "num_rows": "i32"}
    strides = {"X_ROW": 4096, "X_PART": 0, "OUT_ROW": 4096, "OUT_PART": 0}
    _, sizes = linear.product_sizes((4096, 4096), num_rows, 1 if listed else linear.num_splits(4096, 4096))
    flags = {"KIND": kind, "HAS_BIAS": not listed, "LISTED": listed, "GATHERED": listed}
    return arranged(linear.multiply, types | strides | sizes | flags)


def small(bits: int, group_size: int, num_rows: int, listed: bool) -> list[Entry]:
    import torch

    from forerun.kernels.grouped import GroupedMatrix
    from forerun.kernels.triton import grouped
    from forerun.kernels.triton.grouped_layout import pack_grouped

    codes, scales = torch.full((64, 512), (1 << bits) - 1, dtype=torch.uint8), torch.ones(64, 512 // group_size)
    matrix = GroupedMatrix(codes, scales, bits, 1 << (bits - 1), group_size, scales if listed else None)
    layout = pack_grouped(matrix, torch.device("cpu")).layout
    types = {"quantized": "*i8", "row_scales": "*fp32", "sums": "*i32", "codes": "*u8" if layout.halves else "*i8"}
    types |= {"scales": "*fp16", "offsets": "*fp16"} | (
        dict.fromkeys(("codes", "scales", "offsets"), "*i64") if listed else {}
    )
    types |= {"bias": "*fp32", "out": "*fp32", "starts": "*i32", "num_rows": "i32"}
    _, sizes = grouped.product_sizes(layout._replace(num_outputs=4096), num_rows)
    rows = {"x": "*fp32", "inputs": "*i64" if listed else "*i32", "codes": "*i8", "scales": "*fp32", "sums": "*i32"}
    rows |= SLOTS | {"ends": "*i32", "num_rows": "i32"}
    return [
        arranged(grouped.multiply, types | sizes | {"HAS_BIAS": not listed, "LISTED": listed}),
        arranged(grouped.quantize, rows | grouped.quantize_sizes(layout) | {"LISTED": listed, "GATHERED": listed}),
    ]


def moving() -> list[Entry]:
    from forerun.kernels.triton import experts, linear

    parts = {"parts": "*fp32", "bias": "*fp32", "out": "*fp32", "num_rows": "i32"}
    table = {"token_ids": "*i64", "table": "*bf16", "out": "*fp32", "VOCAB": 128256, "WIDTH": 4096, "BLOCK": 1024}
    both = {"both": "*fp32", "out": "*fp32", "end": "*i32", "SIZE": 768, "SILU": True, "SLOTS": 4, "BLOCK": 1024}
    addends = {"addends": "*fp32", "weights": "*fp32", "slot_of": "*i64", "base": "*fp32", "out": "*fp32"}
    addends |= {"num_rows": "i32"}
    return [
        arranged(linear.add_parts, {**parts, "WIDTH": 4096, "SPLITS": 5, "HAS_BIAS": True, "BLOCK": 1024}),
        arranged(linear.embed, table),
        arranged(experts._activate, both),
        arranged(experts._add_up, {**addends, "HIDDEN": 2048, "NUM_EXPERTS": 128, "HAS_BASE": True, "BLOCK": 1024}),
    ]


def choosing() -> list[Entry]:
    from forerun.kernels.triton import experts, sampling

    part = {"part_ids": "*i64", "part_scores": "*fp64", "broken": "*i32"}
    rows = {"logits": "*fp32", "columns": "*i64", "num_rows": "i32", "VOCAB": 128256, "PART": 2048, "KEPT": 8}
    best = {"ids_out": "*i64", "scores_out": "*fp64", "K": 3, "RANKS": 8, "JUDGES": True, "RIVALS": 8, "SCALE": 0.85}
    best |= {"LANES": 8, "NUM": 504, "BLOCK": 512, "NUM_PARTS": 63, "PARTS": 64}
    logits = {"logits": "*fp32", "correction": "*fp32", "out": "*fp32", "factor": "fp32", "TOP_K": 8, "NORMALIZE": True}
    deepseek = {"NUM_EXPERTS": 256, "NUM_GROUPS": 8, "SIZE": 32, "GROUPS": 8, "MEMBERS": 32, "TOP_GROUPS": 4}
    qwen = {"NUM_EXPERTS": 128, "NUM_GROUPS": 1, "SIZE": 128, "GROUPS": 1, "MEMBERS": 128, "TOP_GROUPS": 1}
    return [
        arranged(sampling._best_of_part, part | rows),
        arranged(sampling._best_of_row, part | best),
        arranged(experts._route, logits | deepseek | {"SIGMOID": True, "CORRECTED": True}),
        arranged(experts._route, logits | qwen | {"SIGMOID": False, "CORRECTED": False}),
    ]


def arranged(kernel: Any, given: dict[str, Any]) -> Entry:
    """The arguments in the kernel's order, the launch options apart."""
    names = kernel.arg_names
    options = {name: value for name, value in given.items() if name not in names}
    return kernel, {name: given[name] for name in names}, {**options, **EXACT}
