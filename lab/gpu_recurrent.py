"""The part of gpu.py about recurrent layers: convolution, gated delta rule and Mamba-2 over known rows and drafts.

Knows: heads of published layers, how rows follow each other, bytes of a state. Does not know: models, results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from forerun.kernels.ops import Kernels
from forerun.kernels.recurrent_ops import DeltaHeads, Walk
from forerun.kernels.reference import ReferenceKernels
from gpu_kernels import MOST_COPIES, compared, reading
from gpu_setting import Bench, Due, in_time
from gpu_watch import Noted

TAPS = 4
LAYERS = {  # heads as the published config.json has them, Falcon-H1's of its 0.5B model
    "Qwen3.5-4B": DeltaHeads(16, 32, 128, 128),
    "Falcon-H1-0.5B": DeltaHeads(1, 24, 128, 64),
}
TINY = DeltaHeads(1, 2, 16, 8)  # of the rehearsal
KINDS = ("known", "chain", "tree")  # rows: all known; a root and drafts, one below the other or three below each
CHECKED_ROWS = 16  # up to here rows are compared with the reference on the host


def recurrent(bench: Bench, due: Due, noted: Noted) -> None:
    """Every layer by kinds and numbers of rows."""
    cases = list(product(LAYERS, KINDS, bench.sizes.recurrent_rows))
    cases = [case for case in cases if case[1] == "known" or 1 < case[2] <= 64]
    in_time(cases, due, noted, lambda case: " ".join(map(str, case)), partial(recurrent_rows, bench))


def recurrent_rows(bench: Bench, case: tuple[str, str, int]) -> Iterator[dict[str, Any]]:
    """One layer: time of its recurrence, bits of the last row's path alone, the reference's numbers."""
    name, kind, number = case
    heads, device = TINY if bench.rehearses else LAYERS[name], bench.device
    parents = parents_of(kind, number)
    walk = Walk.build([0], [number if kind == "known" else 1], [parents])
    layer, there = RecurrentCase.random(heads, number, name.startswith("Falcon")), walk.on(device)
    state_bytes = 4 * heads.num_values * heads.key_dim * heads.value_dim
    copies = min(MOST_COPIES, -(-bench.sizes.cold_bytes // state_bytes))
    layers = [layer.on(device) for _ in range(copies)]
    seconds = bench.seconds([partial(own.run, bench.kernels, there) for own in layers], bench.sizes.repeats)
    of_conv = bench.seconds([partial(own.conv, bench.kernels, there) for own in layers], bench.sizes.repeats)
    fresh = layer.on(device)
    out = fresh.run(bench.kernels, there)
    row = {"layer": name, "rows": kind, "tokens": number, "conv_us": round(of_conv * 1e6, 3)}
    row |= reading(seconds, state_bytes * (2 if kind == "known" else 3), bench.bandwidth)
    row["row_has_its_bits"] = torch.equal(out[-1:], alone(layer.on(device), bench.kernels, parents))
    if number <= CHECKED_ROWS:
        row |= compared(out, layer.on(torch.device("cpu")).run(ReferenceKernels(), walk))
    yield row


def parents_of(kind: str, number: int) -> list[int]:
    """The row before each, -1 for the first."""
    return [(row - 1) // 3 if kind == "tree" and row else row - 1 for row in range(number)]


def alone(layer: RecurrentCase, kernels: Kernels, parents: list[int]) -> Tensor:
    """The last row, after those above it one by one as known tokens."""
    path = [len(parents) - 1]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    out = layer.x
    for row in reversed(path):
        out = layer.of_row(row).run(kernels, Walk.build([0], [1], [[-1]]).on(layer.x.device))
    return out


@dataclass(frozen=True, slots=True)
class RecurrentCase:
    """Inputs, weights and the state of one sequence, which running it advances."""

    heads: DeltaHeads
    x: Tensor  # [M, row_size]
    gates: Tensor  # [M, 2 * num_values], of Mamba-2 [M, num_values]
    taps: Tensor  # [TAPS, row_size]
    vectors: Tensor  # [3, num_values]: decay, bias, skip
    tails: Tensor  # [1, TAPS - 1, row_size]
    memory: Tensor  # [1, num_values, key_dim, value_dim]

    @staticmethod
    def random(heads: DeltaHeads, number: int, is_mamba: bool) -> RecurrentCase:
        """On the host, the same every time."""
        made, gates = torch.Generator().manual_seed(0), heads.num_values * (1 if is_mamba else 2)
        memory = (1, heads.num_values, heads.key_dim, heads.value_dim)
        shapes = ((number, heads.row_size), (number, gates), (TAPS, heads.row_size), (3, heads.num_values),
                  (1, TAPS - 1, heads.row_size), memory)  # fmt: skip
        x, gates_, taps, vectors, tails, state = (torch.randn(*shape, generator=made) for shape in shapes)
        vectors[0].exp_().neg_()
        return RecurrentCase(heads, x, gates_, taps, vectors, tails, state)

    def on(self, device: torch.device) -> RecurrentCase:
        """A copy."""
        tensors = (self.x, self.gates, self.taps, self.vectors, self.tails, self.memory)
        return RecurrentCase(self.heads, *(tensor.to(device, copy=True) for tensor in tensors))

    def of_row(self, row: int) -> RecurrentCase:
        """One row over the same state."""
        x, gates = self.x[row, None].clone(), self.gates[row, None].clone()
        return RecurrentCase(self.heads, x, gates, self.taps, self.vectors, self.tails, self.memory)

    def conv(self, kernels: Kernels, walk: Walk) -> Tensor:
        """The convolution -> [M, row_size]."""
        return kernels.causal_conv(self.x, self.taps, self.tails, walk, silu=True)

    def run(self, kernels: Kernels, walk: Walk) -> Tensor:
        """Convolution and recurrence -> [M, num_values * value_dim]."""
        rows, (decay, bias, skip) = self.conv(kernels, walk), self.vectors.clone()
        if self.gates.shape[1] == self.heads.num_values:
            return kernels.mamba2(rows, self.gates, self.heads, decay, bias, skip, self.memory, walk)
        return kernels.gated_delta(rows, self.gates, self.heads, decay, bias, self.memory, walk)
