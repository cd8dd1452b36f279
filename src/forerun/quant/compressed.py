"""compressed-tensors checkpoints: each module's scheme, and integers: W4A16 and W8A16 packed, W8A8 as bytes.

Knows: the formats "pack-quantized" (`weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx`) and
"int-quantized" (`weight` int8, `weight_scale`, `weight_zero_point`), their schemes, and each module's scheme. Does not
know: how floats are stored (`compressed_floats`); sparsity, which it refuses; quantized caches, which it ignores.

Only the weights are taken from the file. Activations are quantized to 8-bit integers by row and group, as for every
quantized matrix here; W8A8's dynamic scale per token and W4AFP8's FP8 are coarser. Static activation scales are
refused.
A weight is scale * (value - zero point) with signed values; they are kept as value + 2 ** (bits - 1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.kernels.coded import CodedMatrix
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import Kernels
from forerun.quant import compressed_floats
from forerun.quant.auto_round import SEARCHED
from forerun.quant.base import RowPart, TensorSource, Weight
from forerun.quant.compressed_floats import check_float_tensors, check_floats, float_matrix
from forerun.quant.floats import FLOAT8
from forerun.quant.gptq import input_order
from forerun.quant.joined import affine_matrix, check_group_size, join_rows
from forerun.quant.packing import unpack, words_for
from forerun.quant.settings import REMEDY, Settings

METHOD = "compressed-tensors"
PACKED, BYTES = "pack-quantized", "int-quantized"
FORMATS = (PACKED, BYTES, "naive-quantized", "mixed-precision", *compressed_floats.FORMATS)
STRATEGIES = ("tensor", "channel", "group")
MATCHED = "re:"  # before a pattern that fits a name from its beginning
ALL_MODULES = "Linear"  # the class every matrix of a decoder has


class CompressedFormat:
    """`PREFIX.weight_packed`, or `PREFIX.weight` with `PREFIX.weight_scale`."""

    name = "compressed-tensors"

    def matches(self, source: TensorSource, prefix: str) -> bool:
        """Whether the module is quantized and config.json says how."""
        if Settings.of(source.config).method != METHOD:
            return False
        weight = f"{prefix}.weight"
        stored = source.has(f"{prefix}.weight_packed") or source.has(f"{prefix}.weight_scale")
        return stored or (source.has(weight) and source.stored_as(weight) == FLOAT8)

    def check(self, source: TensorSource, prefix: str) -> None:
        """See `CheckedFormat`."""
        weights = _scheme_of(source, prefix).section("weights")
        if weights.get("type") == "float":
            check_float_tensors(source, prefix, weights)

    def read(
        self, source: TensorSource, parts: Sequence[RowPart], columns: int, kernels: Kernels, dtype: torch.dtype | None
    ) -> Weight:
        """See `WeightFormat`; dtype does not apply."""
        return join_rows(kernels, [_matrix(source, part, columns) for part in parts])


def check_compressed(settings: Settings) -> None:
    """Raise UnsupportedError for formats, schemes and extras that are not implemented."""
    settings.require("format", FORMATS, PACKED)
    # Models written through transformers are called frozen; matrices not compressed yet are refused when read.
    settings.require("quantization_status", ("compressed", "frozen"), "compressed")
    if settings.section("transform_config").section("config_groups").names():
        settings.refuse("transform_config")
    settings.section("sparsity_config").require("format", ("dense",), "dense")
    groups = settings.section("config_groups")
    for name in groups.names():
        _check_scheme(groups.section(name))


def _check_scheme(scheme: Settings) -> None:
    weights = scheme.section("weights")
    for target in scheme.texts("targets"):
        _check_pattern(target)
    scheme.require("format", FORMATS, PACKED)
    scheme.refuse("output_activations")
    if weights.require("type", ("int", "float"), "int") == "float":
        return check_floats(weights)
    weights.require("num_bits", tuple(range(2, 9)), 8)
    weights.require("strategy", STRATEGIES, "tensor")
    activations = scheme.section("input_activations")
    if activations.names():
        activations.require("dynamic", (True,), False)
        activations.require("type", ("int", "float"), "int")
        activations.require("num_bits", (8,), 8)


def _matrix(source: TensorSource, part: RowPart, columns: int) -> GroupedMatrix | CodedMatrix:
    weights = _scheme_of(source, part.prefix).section("weights")
    if weights.get("type") == "float":
        return float_matrix(source, part.prefix, weights, (part.rows, columns))
    return _Module(source, part, columns).matrix()


class _Module:
    """One module of integers, and the scheme it was quantized by."""

    def __init__(self, source: TensorSource, part: RowPart, columns: int) -> None:
        self.source = source
        self.part = part
        self.columns = columns
        self.scheme = _scheme_of(source, part.prefix).section("weights")
        self.bits = self.scheme.whole("num_bits", 8)
        self.group_size = self._group_size()
        self.groups = -(-columns // self.group_size)

    def matrix(self) -> GroupedMatrix:
        """The module's integers, scales and zero points."""
        codes = self._codes()  # [N, K]
        order = self._order()
        if order is not None:
            codes = codes[:, order]
        shape = (self.part.rows, self.groups)
        scales = self._spread(self.source.tensor(self._name("weight_scale")), "weight_scale").expand(shape)
        zeros = self._zeros().expand(shape) + (1 << (self.bits - 1))
        return affine_matrix(codes, scales, zeros, self.bits, self.group_size, order)

    def _name(self, tensor: str) -> str:
        return f"{self.part.prefix}.{tensor}"

    def _group_size(self) -> int:
        if self.scheme.get("strategy") != "group":
            return self.columns
        size = self.scheme.whole("group_size")
        if not 0 < size <= self.columns or self.columns % size:
            raise CheckpointError(
                f"{self.part.prefix} has {self.columns} inputs, which group_size {size} of quantization_config does "
                "not divide; weights and config.json do not belong together"
            )
        check_group_size(size, self.columns, self.part.prefix)
        return size

    def _codes(self) -> Tensor:
        """[N, K] uint8: the signed values plus 2 ** (bits - 1)."""
        rows, columns = self.part.rows, self.columns
        if not self.source.has(self._name("weight_packed")):
            return self._bytes()
        if self.source.has(self._name("weight_shape")):
            stored = self.source.integers(self._name("weight_shape"), (2,)).tolist()
            if stored != [rows, columns]:
                raise CheckpointError(
                    f"tensor {self._name('weight_shape')} says {stored}, config.json asks for {[rows, columns]}; "
                    "weights and config.json do not belong together"
                )
        # Older versions left bits unused where `bits` does not divide 32; their tensors are wider.
        packed = self.source.integers(self._name("weight_packed"), (rows, words_for(columns, self.bits)))
        return unpack(packed, self.bits, columns)

    def _bytes(self) -> Tensor:
        values = self.source.integers(self._name("weight"), (self.part.rows, self.columns)).short()  # [N, K]
        codes = values + (1 << (self.bits - 1))
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << self.bits:
            raise CheckpointError(
                f"tensor {self._name('weight')} holds values from {int(values.min())} to {int(values.max())}, more "
                f"than {self.bits} bits of quantization_config; weights and config.json do not belong together"
            )
        return codes.to(torch.uint8)

    def _order(self) -> Tensor | None:
        name = self._name("weight_g_idx")
        if not self.source.has(name):
            return None
        ids = self.source.integers(name, (self.columns,))
        return None if bool((ids < 0).all()) else input_order(ids, self.group_size, name)

    def _zeros(self) -> Tensor:
        """Signed zero points that expand to [N, groups]."""
        name = self._name("weight_zero_point")
        if not self.source.has(name):
            if self.scheme.get("symmetric") is False:
                raise CheckpointError(
                    f"the checkpoint has no tensor {name}, which symmetric = false of quantization_config asks for; "
                    "copy the checkpoint again"
                )
            return torch.zeros(1, 1, dtype=torch.long)
        stored = self.source.integers(name)
        words = (words_for(self.part.rows, self.bits), self.groups)
        if stored.dtype is torch.int32 and stored.shape == words:  # packed along the outputs
            return unpack(stored.T, self.bits, self.part.rows).T.long() - (1 << (self.bits - 1))
        return self._spread(stored, "weight_zero_point").long()

    def _spread(self, tensor: Tensor, name: str) -> Tensor:
        """A scalar, or one value per row, or one per row and group, as [1 or N, 1 or groups]."""
        allowed = ((1, 1), (self.part.rows, 1), (self.part.rows, self.groups))
        shaped = tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor
        if tuple(shaped.shape) not in allowed or (self.groups > 1 and tuple(shaped.shape) != allowed[2]):
            raise CheckpointError(
                f"tensor {self._name(name)} has shape {list(tensor.shape)}, quantization_config asks for "
                f"{[self.part.rows, self.groups]}; weights and config.json do not belong together"
            )
        return shaped


def _scheme_of(source: TensorSource, prefix: str) -> Settings:
    """The first scheme that targets the module: by name, by pattern, by what AutoRound searches for, else by class."""
    groups = Settings.of(source.config).section("config_groups")
    schemes = [groups.section(name) for name in groups.names()]
    for hits in (_is_named, _is_matched, partial(_is_found, source), _is_linear):
        for scheme in schemes:
            if any(hits(prefix, target) for target in scheme.texts("targets")):
                return scheme
    raise UnsupportedError(
        f"no config_group of quantization_config targets {prefix}, whose weights are quantized; {REMEDY}"
    )


def _is_named(prefix: str, target: str) -> bool:
    return prefix == target or prefix.endswith("." + target)


def _is_matched(prefix: str, target: str) -> bool:
    return target.startswith(MATCHED) and re.match(target.removeprefix(MATCHED), prefix) is not None


def _is_found(source: TensorSource, prefix: str, target: str) -> bool:
    """Whether AutoRound takes a name for a pattern, which it does not where a module has it, and finds it in `prefix`.

    As in AutoRound 0.16, `_expand_regex_config`.
    """
    name = target.removeprefix(SEARCHED)
    if name == target or any(source.has(f"{name}.{tensor}") for tensor in ("weight", "weight_packed")):
        return False
    return re.search(name, prefix) is not None


def _is_linear(prefix: str, target: str) -> bool:
    return target == ALL_MODULES


def _check_pattern(target: str) -> None:
    """Raise CheckpointError for a pattern that is none."""
    for mark in (MATCHED, SEARCHED):
        try:
            re.compile(target.removeprefix(mark) if target.startswith(mark) else "")
        except re.error as error:
            raise CheckpointError(
                f"config.json: quantization_config has the pattern {target.removeprefix(mark)!r} for names of modules, "
                f"which is no regular expression ({error}); copy the file again"
            ) from error
