"""The parts of gpu.py about kernels: compiling, their tests, the GPU's own speed, products and attention against it.

Knows: shapes of layers, bytes an op must read. Does not know: models, results, pictures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.bench.shapes import read_shape
from forerun.bench.synthetic import RandomGroupedFormat, RandomSource
from forerun.bench.weight_kinds import WeightKind, read_kind
from forerun.kernels.ops import AttentionRows, HeadLayout, LayerKV
from forerun.kernels.reference import ReferenceKernels
from forerun.kernels.triton import attention_plan
from forerun.models.config import ModelConfig
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseFormat
from forerun.weights.resolve import resolve_model
from gpu_compile import ahead
from gpu_setting import Bench, BenchSizes, Due, Seconds, in_time
from gpu_watch import Noted

ROOT = Path(__file__).resolve().parents[1]
VERDICT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)")
BLOCK_SIZE = 16
CHECKED_OUTPUTS = 64  # of a product, against the reference on the host
CHECKED_ROWS = 2
CHECKED_CONTEXT = 8192  # contexts up to here are compared with the reference on the host
MOST_COPIES = 64
MOST_WORKERS = 14  # each has a context of its own on the GPU
NEAR = 2e-5  # largest difference over the root mean square: float32 sums in another order


def check(bench: Bench, due: Due, noted: Noted) -> None:
    """The tests of the Triton kernels where this runs: every op against the reference, row invariance included."""
    missing = [name for name in ("pytest", "hypothesis", "pytest_timeout", "xdist") if not find_spec(name)]
    if missing or not (ROOT / "tests").is_dir():
        why = f"{', '.join(missing)} not installed" if missing else "no tests beside this file"
        noted.left_out(f"the kernels' tests: {why}")
        return
    workers = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) - 2))  # compiling takes most of the time
    spread = ["-n", "0"] if bench.rehearses else ["-n", str(workers), "--dist", "worksteal"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        *spread,
        *bench.sizes.tests,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, due.left_s))
        output, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, status = (late.stdout or b"").decode(), None
    counts, late, error = verdicts(output, status)
    noted.rows(counts)
    if late:
        noted.left_out("tests that were not reached in time")
    if error:
        noted.error("pytest", error)


def verdicts(output: str, status: int | None) -> tuple[dict[str, int], bool, str]:
    """What pytest said -> tests by verdict, whether it was stopped for being late (status None), what failed."""
    lines = [line for line in output.splitlines() if "::" in line and VERDICT.search(line)]
    found = [match[1] for line in lines if (match := VERDICT.search(line))]
    counts = {name: found.count(name) for name in dict.fromkeys(found)}
    failed = status not in (0, None) or counts.get("FAILED", 0) > 0
    return counts, status is None, output[-6000:] if failed else ""


def compiling(bench: Bench, due: Due, noted: Noted) -> None:
    """The models' kernels, on all cores, so that later parts only measure; what a GPU would refuse is named."""
    models = [str(resolve_model(name)) for name in dict.fromkeys((bench.small, bench.draft))]
    models += [str(bench.widening.shape)] if bench.widening.shape.exists() else []
    shapes = list(dict.fromkeys((*bench.sizes.shapes, *bench.sizes.hybrids, *models)))
    sizes, left_s = bench.sizes, max(1.0, due.left_s)
    kinds = (sizes.weights, sizes.compiled_rows, sizes.tree_widths, sizes.formats)
    rows = ahead(shapes, *kinds, bench.device, left_s)
    spilling = sum(row.get("stack", 0) > 0 for row in rows)
    noted.rows({"kernels": len(rows), "spilling": spilling, "registers": max(row.get("registers", 0) for row in rows),
                "shared": max(row.get("shared", 0) for row in rows)})  # fmt: skip
    for row in rows:
        if row["problems"]:
            noted.error(row["kernel"], "; ".join(row["problems"]))


def bandwidth(device: torch.device, sizes: BenchSizes, seconds: Seconds) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)], sizes.repeats)


def roofline(bench: Bench, due: Due, noted: Noted) -> None:
    """What the GPU can do without us: copying, and multiplying bfloat16 matrices by cuBLAS."""
    size = bench.sizes.matmul_size
    a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    seconds = bench.seconds([lambda: a @ b], bench.sizes.repeats)
    row = {
        "copy_gb_per_s": round(bench.bandwidth / 1e9, 3),
        "matmul_tflop_per_s": round(2 * size**3 / seconds / 1e12, 4),
    }
    noted.rows(row)


def products(bench: Bench, due: Due, noted: Noted) -> None:
    """Every matrix of a layer and the output layer, by rows; then one matrix in every storage there is."""
    cases = [
        (shape, weights, name)
        for shape, weights in product(reversed(bench.sizes.shapes), bench.sizes.weights)
        for name in matrices(read_shape(shape).config)
    ]
    cases += [(bench.sizes.shapes[0], weights, "down") for weights in bench.sizes.formats]
    in_time(cases, due, noted, lambda case: " ".join(case), partial(product_rows, bench))


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs by what a matrix is for."""
    heads, hidden = config.heads, config.hidden_size
    return {
        "qkv": (heads.row_size, hidden),
        "attention out": (hidden, heads.num_q * heads.head_dim),
        "gate and up": (2 * config.ffn_size, hidden),
        "down": (hidden, config.ffn_size),
        "output layer": (config.vocab_size, hidden),
    }


def product_rows(bench: Bench, case: tuple[str, str, str]) -> Iterator[dict[str, Any]]:
    """One matrix by numbers of rows: time, bytes a second, bits of a row alone, the reference's numbers."""
    shape, weights, name = case
    num_outputs, num_inputs = matrices(read_shape(shape).config)[name]
    kind, sizes = read_kind(weights), bench.sizes
    packed: Any = random_weight(kind, num_outputs, num_inputs, bench.kernels).packed
    copies = [packed, *(deepcopy(packed) for _ in range(min(MOST_COPIES, -(-sizes.cold_bytes // packed.nbytes)) - 1))]
    rows = sizes.format_rows if weights in sizes.formats else sizes.rows
    x = torch.randn(max(rows), num_inputs, generator=torch.Generator().manual_seed(0)).to(bench.device)
    alone = bench.kernels.linear(x[:1].clone(), packed)
    base = {"shape": shape, "weights": weights, "matrix": name, "outputs": num_outputs, "inputs": num_inputs}
    base["bits_per_weight"] = round(8 * packed.nbytes / (num_outputs * num_inputs), 3)
    expected = random_weight(kind, min(CHECKED_OUTPUTS, num_outputs), num_inputs, ReferenceKernels())
    base |= compared(
        bench.kernels.linear(x[:CHECKED_ROWS].clone(), packed), expected.matmul(x[:CHECKED_ROWS].cpu(), None)
    )
    of_one = None
    for number in rows:
        given = x[:number].clone()
        seconds = bench.seconds([partial(bench.kernels.linear, given, copy) for copy in copies], sizes.repeats)
        same = torch.equal(bench.kernels.linear(given, packed)[:1], alone)
        of_one = seconds if of_one is None else of_one
        yield {
            **base,
            "tokens": number,
            "row_has_its_bits": same,
            **reading(seconds, packed.nbytes, bench.bandwidth),
            "ratio": round(seconds / of_one, 4),
        }


def random_weight(kind: WeightKind, num_outputs: int, num_inputs: int, kernels: Any) -> Any:
    """A matrix in that storage; one of fewer outputs has the first rows of one with more."""
    form = DenseFormat() if kind.grouped is None else RandomGroupedFormat(kind.grouped)
    return form.read(RandomSource(kind.dtype), [RowPart("random", num_outputs)], num_inputs, kernels, kind.dtype)


def compared(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """How far the first outputs are from the reference's."""
    own = found[:, : expected.shape[1]].cpu()
    gap = float((own - expected).abs().max() / expected.square().mean().sqrt())
    return {"gap": gap, "as_reference": gap <= NEAR}


def reading(seconds: float, num_bytes: int, bandwidth: float) -> dict[str, Any]:
    """A time, and what it means for reading so many bytes."""
    return {
        "us": round(seconds * 1e6, 3),
        "gb_per_s": round(num_bytes / seconds / 1e9, 3),
        "share": round(num_bytes / seconds / bandwidth, 4),
    }


def attention(bench: Bench, due: Due, noted: Noted) -> None:
    """Attention of one sequence by context, with its splits side by side and one after the other."""
    cases = list(product(bench.sizes.contexts, reversed(bench.sizes.shapes), (1, 16)))
    in_time(cases, due, noted, lambda case: " ".join(map(str, case)), partial(attention_rows, bench))


def attention_rows(bench: Bench, case: tuple[int, str, int]) -> list[dict[str, Any]]:
    """One context, shape and number of rows."""
    context, shape, number = case
    heads = read_shape(shape).config.heads
    kv, rows = random_pool(heads, context + number, bench.device), chain(context, number, bench.device)
    num_bytes = 2 * (context + number) * heads.num_kv * heads.head_dim * kv.values.element_size()
    pools = [kv, *(deepcopy(kv) for _ in range(min(MOST_COPIES, -(-bench.sizes.cold_bytes // num_bytes)) - 1))]
    qkv = torch.randn(number, heads.row_size, device=bench.device)
    calls = [partial(bench.kernels.attention, qkv, heads, pool, rows, heads.head_dim**-0.5) for pool in pools]
    split, out = bench.seconds(calls, bench.sizes.repeats), calls[0]()
    with unsplit():
        whole, unsplit_out = bench.seconds(calls[:4], bench.sizes.repeats), calls[0]()
    row = {"context": context, "shape": shape, "tokens": number, **reading(split, num_bytes, bench.bandwidth)}
    row |= {"unsplit_us": round(whole * 1e6, 3), "times_unsplit": round(whole / split, 3)}
    row["unsplit_has_the_bits"] = torch.equal(out, unsplit_out)
    row["row_has_its_bits"] = torch.equal(out[-1:], alone(bench, qkv, heads, kv, rows))
    if context <= CHECKED_CONTEXT:
        on_host = chain(context, number, torch.device("cpu"))
        pool = LayerKV(kv.keys.cpu(), kv.values.cpu())
        row |= compared(out, ReferenceKernels().attention(qkv.cpu(), heads, pool, on_host, heads.head_dim**-0.5))
    return [row]


def alone(bench: Bench, qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows) -> Tensor:
    """The last row by itself."""
    own = {name: getattr(rows, name)[-1:].clone() for name in ("seq_ids", "prefix_lens", "tree_masks")}
    return bench.kernels.attention(qkv[-1:].clone(), heads, kv, replace(rows, **own), heads.head_dim**-0.5)


def random_pool(heads: HeadLayout, num_positions: int, device: torch.device) -> LayerKV:
    """Blocks for so many positions in bfloat16."""
    num_blocks = -(-num_positions // BLOCK_SIZE)
    kv = LayerKV.zeros(num_blocks, heads.num_kv, heads.head_dim, BLOCK_SIZE, torch.bfloat16, device=device)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


def chain(context: int, number: int, device: torch.device) -> AttentionRows:
    """Draft nodes one behind the other after `context` known tokens."""
    blocks = -(-(context + number) // BLOCK_SIZE)
    return AttentionRows(
        seq_ids=torch.zeros(number, dtype=torch.int32, device=device),
        prefix_lens=torch.full((number,), context, dtype=torch.int32, device=device),
        tree_masks=torch.tensor([(1 << (node + 1)) - 1 for node in range(number)], device=device),
        tree_starts=torch.tensor([context], dtype=torch.int32, device=device),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],  # [1, blocks]
        max_visible=context + number,
    )


@contextmanager
def unsplit() -> Iterator[None]:
    """Inside, one program takes all splits of a row, one after the other: the same kernel without flash-decoding."""
    usual = attention_plan.WANTED_PROGRAMS, attention_plan.MAX_SPLITS
    try:
        attention_plan.WANTED_PROGRAMS, attention_plan.MAX_SPLITS = 1, 1 << 30
        yield
    finally:
        attention_plan.WANTED_PROGRAMS, attention_plan.MAX_SPLITS = usual
