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
        small("int4", 1),
        small("gguf:q5_k", 64, listed=True),
        small("gguf:q6_k", 1, architecture=80),
        small("int8:256", 40, listed=True),
        small("gguf:iq4_xs", 1),
        small("gguf:iq2_xxs", 1),
        quantizing("gguf:q4_k", listed=True),
        quantizing("gguf:q6_k", listed=False),
        rows_read_back("gguf:q2_k"),
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


def small(weights: str, num_rows: int, listed: bool = False, architecture: int = 90) -> Entry:
    """Products of a matrix in one storage."""
    from forerun.kernels.triton import grouped

    packed = packed_small(weights)
    types = {"quantized": "*i8", "row_scales": "*fp32", "sums": "*i32", "bias": "*fp32", "out": "*fp32"}
    types |= {"starts": "*i32", "num_rows": "i32"} | held(packed, listed)
    _, sizes = grouped.product_sizes(packed.layout._replace(num_outputs=4096), num_rows)
    sizes |= {"HAS_BIAS": not listed, "LISTED": listed, "architecture": architecture}
    return arranged(grouped.multiply, types | sizes)


def quantizing(weights: str, listed: bool) -> Entry:
    """Activations on their way to integers."""
    from forerun.kernels.triton import grouped

    rows = {"x": "*fp32", "inputs": "*i64" if listed else "*i32", "codes": "*i8", "scales": "*fp32", "sums": "*i32"}
    sizes = grouped.quantize_sizes(packed_small(weights).layout)
    flags = {"LISTED": listed, "GATHERED": listed}
    return arranged(grouped.quantize, rows | SLOTS | {"ends": "*i32", "num_rows": "i32"} | sizes | flags)


def rows_read_back(weights: str) -> Entry:
    """Rows of an embedding table in one storage."""
    from forerun.kernels.triton import grouped

    packed = packed_small(weights)
    types = {"token_ids": "*i64", "inputs": "*i32", "out": "*fp32", "num_rows": "i32"} | held(packed, listed=False)
    sizes = grouped.stored_sizes(packed.layout) | {"NUM_INPUTS": 512, "ROWS": 16, "num_warps": 2}
    return arranged(grouped.embed, types | sizes)


def packed_small(weights: str) -> Any:
    """64 outputs and 512 inputs in one storage."""
    import torch

    from forerun.bench.synthetic import RandomGroupedFormat
    from forerun.bench.weight_kinds import read_kind
    from forerun.kernels.triton.grouped_layout import pack_grouped

    layout = read_kind(weights).grouped
    assert layout is not None
    return pack_grouped(RandomGroupedFormat(layout).matrix(64, 512), torch.device("cpu"))


def held(packed: Any, listed: bool) -> dict[str, str]:
    """Types of a packed matrix's tensors, or of lists of their addresses."""
    import torch

    names = {torch.uint8: "*u8", torch.int8: "*i8", torch.float16: "*fp16", torch.float32: "*fp32"}
    return {name: "*i64" if listed else names[tensor.dtype] for name, tensor in packed.tensors._asdict().items()}


def moving() -> list[Entry]:
    from forerun.kernels.triton import experts, linear

    parts = {"parts": "*fp32", "bias": "*fp32", "out": "*fp32", "num_rows": "i32"}
    table = {"token_ids": "*i64", "table": "*bf16", "out": "*fp32", "VOCAB": 128256, "WIDTH": 4096, "BLOCK": 1024}
    both = {"both": "*fp32", "biases": None, "owners": "*i32", "out": "*fp32", "end": "*i32"}
    both |= {"SIZE": 768, "ACTIVATION": 0, "SLOTS": 4, "BLOCK": 1024}
    addends = {
        "addends": "*fp32",
        "biases": None,
        "weights": "*fp32",
        "slot_of": "*i64",
        "base": "*fp32",
        "out": "*fp32",
    }
    addends |= {"num_rows": "i32", "HIDDEN": 2048, "NUM_EXPERTS": 128, "HAS_BASE": True, "BLOCK": 1024}
    biased = {"biases": "*fp32"}
    return [
        arranged(linear.add_parts, {**parts, "WIDTH": 4096, "SPLITS": 5, "HAS_BIAS": True, "BLOCK": 1024}),
        arranged(linear.embed, table),
        arranged(experts._activate, both),
        arranged(experts._activate, {**both, **biased, "ACTIVATION": 2}),
        arranged(experts._add_up, addends),
        arranged(experts._add_up, addends | biased),
    ]


def choosing() -> list[Entry]:
    from forerun.kernels.triton import experts, sampling

    part = {"part_ids": "*i64", "part_scores": "*fp64", "broken": "*i32"}
    rows = {"logits": "*fp32", "columns": "*i64", "num_rows": "i32", "VOCAB": 128256, "PART": 2048, "KEPT": 8}
    best = {"ids_out": "*i64", "scores_out": "*fp64", "K": 3, "RANKS": 8, "JUDGES": True, "RIVALS": 8, "SCALE": 0.85}
    best |= {"LANES": 8, "NUM": 504, "BLOCK": 512, "NUM_PARTS": 63, "PARTS": 64}
    logits = {
        "logits": "*fp32",
        "correction": "*fp32",
        "out": "*fp32",
        "factor": "fp32",
        "smallest": "fp32",
        "TOP_K": 8,
        "NORMALIZE": True,
    }
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
