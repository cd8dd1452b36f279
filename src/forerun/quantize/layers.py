"""One decoder layer being quantized: its matrices by the inputs they share, and the tensors that replace its own.

Knows: which modules share inputs, and which tensors may absorb a scale of those inputs. Does not know: rounding, files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.layers.attention import Attention
from forerun.layers.linear import Linear
from forerun.layers.norm import RMSNorm
from forerun.models.decoder import Decoder
from forerun.models.family import Family
from forerun.quantize.grid import QuantizedMatrix
from forerun.quantize.stream import PlainWeight
from forerun.weights.checkpoint import Checkpoint

QKV, OUT, GATE_UP, DOWN = range(4)


@dataclass(slots=True)
class Stage:
    """The modules of a layer that read the same inputs, their rows one after the other."""

    linear: Linear
    modules: tuple[str, ...]  # full names
    rows: tuple[int, ...]
    matrix: Tensor  # [N, K] float32
    quantized: QuantizedMatrix | None = None

    def part(self, index: int) -> slice:
        """The rows of one module."""
        start = sum(self.rows[:index])
        return slice(start, start + self.rows[index])

    def replace(self, quantized: QuantizedMatrix) -> None:
        """Compute with the quantized values from now on."""
        self.quantized = quantized
        self.linear.weight = PlainWeight(quantized.dequantize())


class LayerWork:
    """A layer of a decoder and its tensors in the checkpoint."""

    def __init__(self, decoder: Decoder, checkpoint: Checkpoint, family: Family, index: int) -> None:
        """Reads the layer's matrices. Raises UnsupportedError if they are quantized already."""
        self.layer = decoder.parts.layers[index]
        self._checkpoint = checkpoint
        self.prefix = family.names.layer.format(index=index) + "."
        names, attention = family.names, self.layer.attention
        mlp = () if self.layer.mlp is None else self.layer.mlp.linears
        if len(mlp) != 2 or not isinstance(attention, Attention):
            raise UnsupportedError(
                f"{self.prefix}mlp has {len(mlp)} matrices; quantizing is implemented for gated feed-forward layers "
                "behind attention with keys and values"
            )
        assert isinstance(attention.qkv, Linear)  # other families were refused
        groups = (names.qkv, (names.out,), names.gate_up, (names.down,))
        linears = (attention.qkv, attention.out, *mlp)
        self.stages = [self._stage(linear, group) for linear, group in zip(linears, groups, strict=True)]
        self.norms = {QKV: names.attention_norm, GATE_UP: names.mlp_norm}
        self._changed: dict[str, Tensor] = {}

    def _stage(self, linear: Linear, group: Sequence[str]) -> Stage:
        modules = tuple(self.prefix + name for name in group)
        missing = [module for module in modules if not self._checkpoint.has(f"{module}.weight")]
        if missing:
            raise UnsupportedError(
                f"{missing[0]} has no floating weight: {self._checkpoint.folder} is quantized already; start from the "
                "unquantized checkpoint"
            )
        parts = [self._checkpoint.tensor(f"{module}.weight").float() for module in modules]
        return Stage(linear, modules, tuple(part.shape[0] for part in parts), torch.cat(parts))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the layer's matrices in the checkpoint."""
        return self._checkpoint.dtype(f"{self.stages[0].modules[0]}.weight")

    def fold_into_norm(self, stage: int, scales: Tensor) -> Tensor:
        """Divide a stage's inputs by about `scales` [K], in the norm before it -> the scales really used.

        The norm's weights are rounded to the checkpoint's precision; the returned scales account for that.
        """
        norm = self.layer.attention_norm if stage == QKV else self.layer.mlp_norm
        assert norm is not None
        name = f"{self.prefix}{self.norms[stage]}.weight"
        smaller = (norm.weight / scales).to(self._checkpoint.dtype(name))
        usable = (smaller != 0) & (norm.weight != 0)
        smaller = torch.where(usable, smaller, norm.weight.to(smaller.dtype))
        real = torch.where(usable, norm.weight / smaller.float(), torch.ones_like(scales))
        self._set_norm(norm, name, smaller)
        return real

    def _set_norm(self, norm: RMSNorm, name: str, weight: Tensor) -> None:
        norm.weight = weight.float()
        self._changed[name] = weight

    def divide_last_rows(self, stage: int, scales: Tensor) -> None:
        """Divide the last outputs of a stage by `scales` [rows]: its rows and its bias."""
        work = self.stages[stage]
        last = slice(-len(scales), None)
        work.matrix[last] /= scales[:, None]
        bias = work.linear.bias
        if bias is not None:
            name = f"{work.modules[-1]}.bias"
            bias[last] = (bias[last] / scales).to(self._checkpoint.dtype(name)).float()
            self._changed[name] = bias[-work.rows[-1] :].to(self._checkpoint.dtype(name))

    def dense_tensors(self) -> dict[str, Tensor]:
        """The layer's tensors apart from the quantized matrices, changed ones as they are now."""
        replaced = {f"{module}.weight" for stage in self.stages for module in stage.modules}
        names = [name for name in self._checkpoint if name.startswith(self.prefix) and name not in replaced]
        return {name: self._changed[name] if name in self._changed else self._checkpoint.tensor(name) for name in names}

    def release(self) -> None:
        """Free the matrices' memory; the layer cannot compute any more."""
        for stage in self.stages:
            stage.linear.weight = PlainWeight(torch.empty(stage.matrix.shape, device="meta"))
