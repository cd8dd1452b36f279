"""Compiles the kernels that a run of gpu.py launches, without a GPU: what a GPU would refuse is found here.

    python lab/gpu_compile.py [--shapes a,b] [--processes N] [--json FILE]

Whole models run on tensors without numbers, so that every kernel is specialised as on a GPU; Triton compiles for an
H200, down to machine code, and launches nothing. Prints registers, shared memory and stack of each and names what would
not fit. Compiled kernels stay in Triton's cache: gpu.py begins with this, on all cores, and spends its time measuring.

Knows: Triton's driver, models without weights. Does not know: timing, results of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from forerun.bench.shapes import read_shape
from forerun.bench.synthetic import RandomGroupedFormat, RandomSource
from forerun.bench.weight_kinds import GGUF, GGUF_TYPES, Grouped, read_kind
from forerun.cache.states import RecurrentStates
from forerun.config import MAX_TREE_NODES
from forerun.drafters.eagle import SPEC as EAGLE
from forerun.kernels.ops import LayerKV, NoiseKeys
from forerun.kernels.tree_growth import TreeRoom, new_trees
from forerun.kernels.triton import moves, recurrent
from forerun.kernels.triton.backend import TritonKernels
from forerun.kernels.triton.grouped_layout import TILE_N, GroupedTensors, TritonGrouped, pack_grouped
from forerun.models.base import state_specs_of, with_states
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.build import Builder
from forerun.models.decoder import Decoder
from forerun.models.heads.head import POSITION_SHIFT
from forerun.quant.base import RowPart
from forerun.quant.dense import DenseFormat
from forerun.quant.grouped import GroupedWeight

ARCHITECTURE = 90  # of an H200: CUDA C++ programming guide, table of compute capabilities, 9.0
MOST_SHARED = 227 << 10  # bytes of shared memory a program may have there
MOST_PROGRAMS = ((1 << 31) - 1, 65535, 65535)  # along the three dimensions of a grid
SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
WEIGHTS = ("bf16", "int4")
FORMATS = tuple(f"{GGUF}{name}" for name in GGUF_TYPES)
FORMAT_SHAPE = (2048, 8192)  # outputs and inputs: "down" of the 1B shape
FORMAT_ROWS = (1, 16)
WIDTHS = (EAGLE.tree_width or 1, 16)  # of trees: the usual one, the widest there may be
BLOCK_SIZE = 16  # positions a block of the pool has
META = torch.device("meta")


class PaperDriver:
    """What Triton asks a driver before it launches: a device of one architecture, and there is none."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The usual one."""
        return 0

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self._target


@contextmanager
def compiled(architecture: int = ARCHITECTURE) -> Iterator[list[dict[str, Any]]]:
    """Inside, launches compile and do nothing more; what they compiled, and why if they could not."""
    launch, found = JITFunction.run, dict[str, dict[str, Any]]()

    def run(kernel: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = launch(kernel, *given, grid=grid, warmup=True, **named)
        if made.hash not in found:
            found[made.hash] = {**resources(made), "grid": [0, 0, 0]}
        row = found[made.hash]
        row["grid"] = [max(pair) for pair in zip_longest(row["grid"], grid, fillvalue=1)]
        return made

    rows: list[dict[str, Any]] = []
    driver.set_active(PaperDriver(architecture))
    JITFunction.run = run
    try:
        yield rows
    finally:
        JITFunction.run = launch
        rows += found.values()


def resources(made: Any) -> dict[str, Any]:
    """What a compiled kernel takes: registers and bytes of stack a thread, shared bytes and threads a program."""
    text = _cuobjdump(made.asm["cubin"])
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, text
    return {
        "kernel": made.metadata.name, "registers": int(match[1]), "stack": int(match[2]),
        "shared": made.metadata.shared, "threads": made.metadata.num_warps * 32,
        "tensor_cores": bool(re.search(r"mma", made.asm["ptx"])), "hash": made.hash,
    }  # fmt: skip


def _cuobjdump(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def problems(row: dict[str, Any]) -> list[str]:
    """What a GPU would refuse, or would do slowly."""
    found = [f"error: {row['error']}"] if "error" in row else []
    if row.get("shared", 0) > MOST_SHARED:
        found.append(f"{row['shared']} bytes of shared memory, an H200 has {MOST_SHARED}")
    if row.get("registers", 0) * row.get("threads", 0) > 65536:
        found.append(f"{row['registers']} registers for each of {row['threads']} threads, there are 65536")
    if any(size > most for size, most in zip(row.get("grid", []), MOST_PROGRAMS, strict=False)):
        found.append(f"a grid of {row['grid']}, at most {MOST_PROGRAMS}")
    return found


# -- models without numbers ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One pass of one model."""

    shape: str  # a name or a config.json
    weights: str
    pool: str  # "model": keys and values as the model has them; "int8"
    context: int
    rows: int


class AnyState(RecurrentStates):
    """A slot that every request goes on from."""

    def begin(self, request_id: str, num_tokens: int) -> int:
        """The first."""
        return super().begin(request_id, 0)


class PaperMatrix(NamedTuple):
    """A matrix of small integers nobody made."""

    layout: Grouped
    num_outputs: int
    num_inputs: int


class PaperKernels(TritonKernels):
    """Triton's table of ops on tensors without numbers."""

    def __init__(self) -> None:
        self.device = META
        self._tables, self._walks = moves.PoolTables(), recurrent.LastWalk()

    def pack_grouped(self, matrix: Any) -> TritonGrouped:
        """Laid out as one of 16 outputs with codes of every size, of which the layout is all that counts."""
        found = packed_small(matrix.layout, matrix.num_inputs)
        num_tiles, table = -(-matrix.num_outputs // TILE_N), found.tensors.table.to(META)
        grown = {
            id(tensor): torch.empty(num_tiles, *tensor.shape[1:], dtype=tensor.dtype, device=META)
            for tensor in found.tensors
        }
        tensors = GroupedTensors(*(grown[id(tensor)] for tensor in found.tensors))._replace(table=table)
        layout = found.layout._replace(num_outputs=matrix.num_outputs)
        return TritonGrouped(layout, tensors, found.inputs.to(META), has_order=False)


@cache
def packed_small(layout: Grouped, num_inputs: int) -> TritonGrouped:
    """16 outputs with codes of every size."""
    return pack_grouped(RandomGroupedFormat(layout).matrix(TILE_N, num_inputs), torch.device("cpu"))


class PaperSource(RandomSource):
    """A checkpoint whose tensors are shapes."""

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Of that shape."""
        assert shape is not None
        return torch.empty(*shape, dtype=self._dtype, device=META)


class PaperWeight(GroupedWeight):
    """A matrix of small integers as a shape."""

    def dequantize(self) -> Tensor:
        """What would have been read."""
        return torch.empty(self.shape, device=META)


class PaperFormat(RandomGroupedFormat):
    """Every matrix as small integers of one layout, without numbers."""

    def read(self, source: Any, parts: Sequence[RowPart], columns: int, kernels: Any, dtype: Any) -> PaperWeight:
        """All parts together, packed for the kernels of this module whoever asks."""
        matrix: Any = PaperMatrix(self._layout, sum(part.rows for part in parts), columns)
        return PaperWeight(kernels if isinstance(kernels, PaperKernels) else PaperKernels(), matrix)


def paper_decoder(name: str, weights: str, kernels: PaperKernels) -> Decoder:
    """A decoder of a shape by name or config.json, its rope table of a few positions: sizes of tables do not count."""
    shape, kind = read_shape(name), read_kind(weights)
    form = DenseFormat() if kind.grouped is None else PaperFormat(kind.grouped)
    source = PaperSource(kind.dtype)
    return Builder(shape.config, shape.family, source, kernels, None, 64, lambda *_: form).decoder()


@torch.no_grad()
def run_model(model: Decoder, kernels: PaperKernels, case: Case) -> None:
    """A pass, the choice of tokens, the move of what was accepted."""
    blocks = -(-(case.context + case.rows) // BLOCK_SIZE)
    dtype = None if case.pool == "model" else torch.int8
    kvs = [
        LayerKV.zeros(blocks, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, dtype or spec.dtype, spec.latent, META)
        for spec in model.kv_specs
    ]
    specs = state_specs_of(model)
    passing = with_states(model, AnyState(specs, 1, META)) if specs else model
    logits = passing.forward(chain(case.context, case.rows, blocks), kvs).logits
    choose(kernels, logits, (1, 4))
    kernels.move_rows(kvs, torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int32))


@torch.no_grad()
def run_format(kernels: PaperKernels, weights: str, rows: Sequence[int]) -> None:
    """Products with a matrix in one storage, and its rows read back."""
    layout = read_kind(weights).grouped
    assert layout is not None
    matrix: Any = PaperMatrix(layout, *FORMAT_SHAPE)
    packed = kernels.pack_grouped(matrix)
    for number in rows:
        kernels.linear(torch.empty(number, FORMAT_SHAPE[1], device=META), packed)
    kernels.embedding(torch.empty(1, dtype=torch.int64, device=META), packed)


def chain(context: int, num: int, num_blocks: int) -> ForwardBatch:
    """`num` nodes one below the other, as many as a tree may have, the rest of them known tokens."""
    nodes = min(num, MAX_TREE_NODES)
    start = context + num - nodes
    masks = [(2 << node) - 1 for node in range(nodes)]
    tree = ([0] * nodes, range(nodes), masks, range(nodes))
    rows = SequenceRows("", range(num_blocks), context, [0] * (start - context), start, *tree)
    return ForwardBatch.build([rows], BLOCK_SIZE)


def choose(kernels: PaperKernels, logits: Tensor, numbers: Sequence[int]) -> None:
    """The best tokens of every row."""
    wide = [torch.empty(logits.shape[0], dtype=torch.int64, device=META) for _ in range(3)]
    for k in numbers:
        kernels.gumbel_topk(logits, wide[0].double(), NoiseKeys(*wide), k)
    kernels.gumbel_chances(logits, wide[0].double(), NoiseKeys(*wide), WIDTHS[0])


def grow_trees(kernels: PaperKernels, width: int) -> None:
    """Levels of a tree: below the root, below leaves, the last; as heads (their positions shifted) and models draft."""
    budgets, starts = torch.empty(1, dtype=torch.int64, device=META), torch.empty(1, dtype=torch.int32, device=META)
    for shift in (0, POSITION_SHIFT):
        room, nodes, rows = TreeRoom(starts, starts[:, None], BLOCK_SIZE, shift), new_trees(1, META), None
        for _ in range(3):
            ids = torch.empty(1, nodes.leaves.shape[1], width, dtype=torch.int64, device=META)
            kernels.keep_trees(nodes, budgets, ids, ids.double(), MAX_TREE_NODES - 1)
            nodes, rows = kernels.grow_trees(nodes, budgets, ids, ids.double(), room, rows)


def ahead(
    shapes: Sequence[str], weights: Sequence[str], rows: Sequence[int], trees: Sequence[int],
    formats: Sequence[str], device: torch.device, timeout_s: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of a run of this program for a GPU, on all cores; raises TimeoutExpired and CalledProcessError."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else divmod(ARCHITECTURE, 10)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        lists = {"--shapes": shapes, "--weights": weights, "--rows": rows, "--trees": trees, "--formats": formats}
        command = [sys.executable, __file__, *(f"{name}={','.join(map(str, own))}" for name, own in lists.items())]
        command += [f"--architecture={10 * major + minor}", f"--processes={os.cpu_count() or 1}", f"--json={out}"]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = run_group(command, {**environment, "OMP_NUM_THREADS": "1"}, timeout_s)
        if done not in (0, 1):
            raise subprocess.CalledProcessError(done, command)
        found: list[dict[str, Any]] = json.loads(out.read_text("utf-8"))
    return found


def run_group(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> int:
    """A command with what it starts, all of it stopped when its time is up -> its status."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- the command line ------------------------------------------------------------------------------------------------


def main() -> None:
    """Compile what is asked for, here or in several processes."""
    given = options()
    rows = compile_here(given) if given.share is not None else compile_all(given)
    for row in rows:
        row["problems"] = problems(row)
    if given.json:
        given.json.write_text(json.dumps(rows), "utf-8")
    else:
        print(table(rows))
    raise SystemExit(any(row["problems"] for row in rows))


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compiles forerun's kernels for an NVIDIA GPU, without one.")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names or config.json files: %(default)s")
    parser.add_argument("--weights", default=",".join(WEIGHTS), help="%(default)s")
    parser.add_argument("--rows", default="1,32,64,300", help="of a pass: %(default)s")
    parser.add_argument("--trees", default=",".join(map(str, WIDTHS)), help="children of a node: %(default)s")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of single matrices: %(default)s")
    parser.add_argument("--contexts", default="131008", help="known tokens before it: %(default)s")
    parser.add_argument("--pools", default="model", help="KV as the model has it (model), int8, or both: %(default)s")
    parser.add_argument("--architecture", type=int, default=ARCHITECTURE)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write rows there instead of a table")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # I/N: what one of N processes does
    return parser.parse_args()


def compile_here(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every N-th case; what fails is a row too."""
    index, num = map(int, (given.share or "0/1").split("/"))
    failed = []
    with compiled(given.architecture) as rows:
        kernels = PaperKernels()
        widths = [int(width) for width in given.trees.split(",") if width]
        work = [(partial(grow_trees, kernels, width), f"trees of {width}") for width in widths]
        formats = [name for name in given.formats.split(",") if name]
        work += [(partial(run_format, kernels, name, FORMAT_ROWS), name) for name in formats]
        work += [(partial(run_case, kernels, case), " ".join(map(str, case))) for case in cases(given)]
        for run, name in work[index::num]:
            try:
                run()
            except Exception as error:  # of Triton or ptxas: what a GPU would have met
                failed.append({"kernel": name, "error": f"{type(error).__name__}: {error}"[-900:]})
    return rows + failed


def run_case(kernels: PaperKernels, case: Case) -> None:
    """One pass of one model."""
    run_model(paper_decoder(case.shape, case.weights, kernels), kernels, case)


def cases(given: argparse.Namespace) -> list[Case]:
    """All that are asked for."""
    shapes, weights, pools, contexts, rows = (
        text.split(",") for text in (given.shapes, given.weights, given.pools, given.contexts, given.rows)
    )
    found = product(shapes, weights, pools, map(int, contexts), map(int, rows))
    return [Case(*case) for case in found]


def compile_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """In several processes, which share Triton's cache."""
    if given.processes <= 1:
        return compile_here(given)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.json" for index in range(given.processes)]
        started = [subprocess.Popen(_command(index, file, len(files))) for index, file in enumerate(files)]
        statuses = [process.wait() for process in started]
        found = [row for file in files if file.exists() for row in json.loads(file.read_text("utf-8"))]
    found += [
        {"kernel": f"process {index}", "error": f"ended with status {status}"}
        for index, status in enumerate(statuses)
        if status not in (0, 1)
    ]
    return list({row.get("hash", row["kernel"]): row for row in found}.values())


def _command(index: int, file: Path, num: int) -> list[str]:
    return [sys.executable, __file__, *sys.argv[1:], "--share", f"{index}/{num}", "--json", str(file)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a kernel."""
    names = ("kernel", "registers", "stack", "shared", "threads", "tensor_cores", "grid")
    lines = ["\t".join(names)]
    for row in sorted(rows, key=lambda row: (row["kernel"], row.get("shared", 0))):
        lines.append("\t".join(str(row.get(name, "")) for name in names) + "".join(f" !! {p}" for p in row["problems"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
