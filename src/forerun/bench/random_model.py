"""Sets up a measurement on random weights: reads the shape, refuses what does not fit, builds, describes the machine.

Knows: the order of these steps. Does not know: what is then measured, terminals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.bench.bandwidth import buffer_bytes
from forerun.bench.machine import describe_machine
from forerun.bench.passes import TimedPasses, kv_bytes, kv_specs
from forerun.bench.shapes import Shape
from forerun.bench.synthetic import bytes_needed, random_decoder
from forerun.bench.weight_kinds import WeightKind
from forerun.kernels.cores import usable_cores
from forerun.kernels.ops import Kernels
from forerun.models.memory import check_memory


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A shape, its storage, and passes over it."""

    shape: Shape
    kind: WeightKind
    kernels: Kernels
    passes: TimedPasses

    @property
    def num_threads(self) -> int:
        """Threads the passes compute on."""
        return num_threads(self.kernels)

    def report(self) -> dict[str, Any]:
        """The facts of the measurement besides its figures."""
        return {
            "shape": self.shape.name,
            "weights": self.kind.name,
            "threads": self.num_threads,
            "weight_bytes": self.passes.weight_bytes,
            "recorded": self.passes.recorded,
            "machine": describe_machine(self.kernels),
        }


def random_model(shape: Shape, kind: WeightKind, kernels: Kernels, max_rows: int) -> RandomModel:
    """Build a model for `max_rows` positions; raises ResourceError before anything large is allocated."""
    specs = kv_specs(shape.config, kind.dtype)
    needed = bytes_needed(shape.config, kind, kernels, max_rows) + kv_bytes(specs, max_rows) + buffer_bytes()
    check_memory(needed, f"measuring {shape.name} with {kind.name} weights", kernels.device)
    return RandomModel(
        shape, kind, kernels, TimedPasses(random_decoder(shape, kind, kernels, max_rows), kernels, max_rows)
    )


def num_threads(kernels: Kernels) -> int:
    """The threads of the C++ kernels; every core for the reference, as torch uses."""
    return int(getattr(kernels, "num_threads", usable_cores()))
