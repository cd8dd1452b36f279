"""The one place that decides how passes are executed.

Knows: which kernels can record, which device captures. Does not know: what passes compute, requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.kernels.ops import Kernels, LayerKV
from forerun.kernels.triton.graphs import Capture, CudaCapture
from forerun.models.base import BlockPasses, Passes, RowPasses
from forerun.runtime.blocks import BlockRunner
from forerun.runtime.eager import EagerRunner
from forerun.runtime.graphs import CapturedRows, GraphRunner
from forerun.runtime.head_trees import HeadTrees
from forerun.runtime.recorded import record
from forerun.runtime.rows import RowRunner, record_rows
from forerun.runtime.runner import Runner


def bind(
    passes: Passes, kernels: Kernels, kvs: Sequence[LayerKV], block_size: int, capture: Capture | None = None
) -> Runner:
    """The runner for these passes over the layers `kvs` of a pool; () for a network that keeps its state itself.

    On a GPU passes are captured as graphs (tests pass their own `capture`); on a CPU they are recorded, if kernels and
    passes support it; otherwise they run eagerly, as those do everywhere that advance recurrent states, mix rows, or
    exchange parts with other ranks.
    """
    if passes.advances_states or passes.mixes_rows or passes.exchanges:
        return EagerRunner(passes, kvs, block_size)
    capture = capture or capture_for(kernels)
    if kvs and capture is not None:
        return GraphRunner(passes, kernels, kvs, block_size, capture)
    recorded = record(passes, kernels, kvs, block_size) if kvs else None
    return recorded or EagerRunner(passes, kvs, block_size)


def bind_rows(passes: RowPasses, kernels: Kernels, capture: Capture | None = None) -> RowRunner:
    """The same choice for passes over rows of states.

    A second function because such passes have neither a batch nor KV: of the arguments of `bind` they need only the
    kernels, and what executes them can draw drafts but cannot run a batch.
    """
    if passes.exchanges:
        return RowRunner(passes, passes.run)
    capture = capture or capture_for(kernels)
    if capture is not None:
        return RowRunner(passes, CapturedRows(passes.run, capture), HeadTrees(passes, kernels, capture))
    return RowRunner(passes, record_rows(passes, kernels))


def bind_block(
    passes: BlockPasses, kernels: Kernels, kvs: Sequence[LayerKV], block_size: int, capture: Capture | None = None
) -> Runner:
    """The same choice for a head that drafts a block in one pass. Its reading of known tokens always runs eagerly."""
    return BlockRunner(passes, bind(passes.block, kernels, kvs, block_size, capture), kvs, block_size)


def capture_for(kernels: Kernels) -> Capture | None:
    """How graphs are captured on the device of these kernels; None on a CPU."""
    return CudaCapture(kernels.device) if kernels.device.type == "cuda" else None
