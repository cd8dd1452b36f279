"""The C++ extension, but for its ops: those are methods of CpuEngine, and csrc/ops.h says once what each takes.

Every `int` named like a tensor is its address.
"""

from collections.abc import Callable, Sequence
from typing import Any

LANES: int
MAX_HEAD_DIM: int
MAX_HEADS_PER_GROUP: int
SuffixCorpus: Any  # see `forerun.kernels.suffix`, as for the next two
SuffixStore: Any
SuffixText: Any

def available_isas() -> list[str]: ...
def own_time() -> float: ...
def prefer_huge_pages(address: int, size: int, /) -> None: ...
def spread_over_nodes(address: int, size: int, nodes: Sequence[int], /) -> bool: ...

class CpuEngine:
    isa: str
    num_threads: int
    num_jobs: int
    def __init__(self, num_threads: int, isa: str, pins: Sequence[Sequence[int]], /) -> None: ...
    def owned_panels(self, m: int, n: int, k: int, layout: GroupedLayout, /) -> list[int]: ...
    def walk_trees(
        self, logits: int, vocab: int, trees: Sequence[tuple[Any, ...]], /
    ) -> list[tuple[tuple[int, ...], int]]: ...
    def chain_step(
        self, program: Program, chains: Sequence[tuple[Any, ...]], block_size: int, logits: int, max_rows: int,
        vocab: int, /,
    ) -> tuple[float, list[tuple[int, int]]] | None: ...  # fmt: skip
    def chain_step_with_states(
        self, program: Program, chains: Sequence[tuple[Any, ...]], block_size: int, logits: int, max_rows: int,
        vocab: int, states: Sequence[int], /,
    ) -> tuple[float, list[tuple[int, int]]] | None: ...  # fmt: skip
    def draft_chains(
        self, first: Program, below: Program, sequences: Sequence[tuple[Any, ...]], addresses: Sequence[int],
        chains: tuple[Any, ...], /,
    ) -> list[tuple[list[int], list[float]]]: ...  # fmt: skip
    def __getattr__(self, op: str) -> Callable[..., None]: ...

class Program:
    num_steps: int
    def __init__(self, engine: CpuEngine, /) -> None: ...
    def record(self) -> None: ...
    def stop(self) -> None: ...
    def bind(self, slot: int, recorded: int, first_step: int, /) -> None: ...
    def finish(self, recorded_rows: int, recorded_logit_rows: int, /) -> None: ...
    def run(self, addresses: Sequence[int], rows: int, logit_rows: int, max_blocks: int, visible: int, /) -> None: ...
    def run_batch(self, sequences: Sequence[Any], block_size: int, shift: int, addresses: Sequence[int], /) -> None: ...

class GroupedLayout:
    panel_bytes: int
    def __init__(
        self, k: int, group_size: int, storage: int, scales: int, has_offsets: bool, groups_a_unit: int, table: int,
        unit_scale: float, points: int, run: int, point_bits: int, signs: int, /,
    ) -> None: ...  # fmt: skip

class ExpertBank:
    def __init__(self, h: int, f: int, activation: int, scales_inputs: bool, /) -> None: ...
    def add_linear(self, is_down: bool, bias: int, weight: int, n: int, k: int, dtype: int, layout: int, /) -> None: ...
    def add_grouped(
        self, is_down: bool, bias: int, weight: int, order: int, n: int, k: int, zero: int, layout: GroupedLayout, /
    ) -> None: ...
