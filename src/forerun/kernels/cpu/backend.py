"""CpuKernels: the op contract on the C++ extension.

Knows: which addresses and sizes an op needs, and refuses tensors whose memory is not what C++ would read. Does not
know: arithmetic, models. Kept thin on purpose: a small model's forward is some hundred calls of these methods.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, empty

from forerun.errors import KernelError, ResourceError
from forerun.kernels.coded import CodedMatrix, of_integers
from forerun.kernels.cores import pins, usable_cores
from forerun.kernels.cpu import _native, coded
from forerun.kernels.cpu.addresses import address_of as _address
from forerun.kernels.cpu.addresses import floats_of as _floats
from forerun.kernels.cpu.arena import WeightArena
from forerun.kernels.cpu.grouped import CpuGrouped, pack_matrix
from forerun.kernels.cpu.packed import CpuExperts, CpuHeads, CpuLinear, head_rows, own_experts, own_heads, pack_bank
from forerun.kernels.cpu.recurrent import CpuRecurrentOps
from forerun.kernels.draws import PlainTree
from forerun.kernels.experts import check_routing
from forerun.kernels.gates import inner_size
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import (
    ACTIVATIONS,
    OPS,
    AttentionRows,
    ExpertBiases,
    HeadLayout,
    LatentLayout,
    LayerKV,
    NoiseKeys,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    Routing,
)
from forerun.kernels.reference import ReferenceKernels, check_activation, check_head_width, check_heads, check_weight

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
_POOL_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class CpuKernels(CpuRecurrentOps):
    """The ops in C++, on one thread pool that belongs to this object; those without C++ are the reference's."""

    device = torch.device("cpu")

    def __init__(
        self, threads: int | None = None, isa: str | None = None, pin: bool | None = None, first_core: int = 0
    ) -> None:  # fmt: skip
        """None: a thread a physical core that this process may use, the best `isa` there is, pinned as `cores.pins`.

        Raises KernelError, and ResourceError where the system lets no such number of threads start.
        """
        num_threads = usable_cores() if threads is None else threads
        if num_threads < 1:
            raise KernelError(f"threads must be at least 1, not {threads}")
        if isa is not None and isa not in _native.available_isas():
            own = ", ".join(_native.available_isas())
            raise KernelError(f"instruction set {isa!r} is not available here; choose from {own}, which this CPU has")
        pinned = pins(num_threads, pin, first=first_core)
        try:
            self.engine, self.is_pinned = _native.CpuEngine(num_threads, isa or "", pinned), bool(pinned)
        except RuntimeError as error:  # std::system_error
            raise ResourceError(
                f"this process cannot start {num_threads} threads ({error}): lower threads, or raise the limit "
                "(ulimit -u, a container's limit of processes)"
            ) from error
        self.name = f"cpu-{self.engine.isa}"
        self._arena = WeightArena()
        self._num_rows: int | None = None  # of the matrices that are packed; None: those that are given

    @property
    def num_threads(self) -> int:
        """Threads an op may run on, the caller included."""
        return self.engine.num_threads

    def describe(self) -> dict[str, str]:
        """See `Kernels.describe`: an instruction set, but for the ops of the reference."""
        own = {op for op in OPS if getattr(CpuKernels, op) is not getattr(ReferenceKernels, op)}
        return {op: self.engine.isa if op in own else ReferenceKernels.name for op in OPS}

    def pack_linear(self, weight: Tensor) -> CpuLinear:
        """See `Kernels.pack_linear`."""
        check_weight(weight)
        source = (weight.float() if weight.dtype is torch.float16 else weight).contiguous()
        num_outputs, num_inputs = source.shape
        num_panels = -(-num_outputs // _native.LANES)
        stored_inputs = num_inputs + num_inputs % 2 * (source.dtype.itemsize == 2)  # two-byte weights lie in pairs
        panels = self._arena.take(num_panels * stored_inputs * _native.LANES, source.dtype)
        code = _DTYPE_CODES[source.dtype]
        self.engine.pack(source.data_ptr(), panels.data_ptr(), num_outputs, num_inputs, code)
        whole_outputs = num_outputs if self._num_rows is None else self._num_rows
        return CpuLinear(panels, panels.data_ptr(), num_outputs, num_inputs, whole_outputs, code)

    def part_of(self, num_rows: int | None) -> CpuKernels:
        """See `quant.rows.KnowsWhole`. Experts' matrices are multiplied as any others."""
        if num_rows is None:
            return self
        other = copy.copy(self)
        other._num_rows = num_rows
        return other

    def pack_grouped(self, matrix: GroupedMatrix) -> PackedLinear:
        """See `Kernels.pack_grouped`."""
        if self.float_activations:
            return self.pack_coded(of_integers(matrix))
        return pack_matrix(matrix, self.engine, self._arena)

    def pack_coded(self, matrix: CodedMatrix) -> PackedLinear:
        """See `Kernels.pack_coded`."""
        return coded.pack_matrix(matrix, self._arena)

    def linear(self, x: Tensor, weight: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        if not isinstance(weight, (CpuLinear, CpuGrouped)):
            raise KernelError(f"weights packed by {type(weight).__name__} given to the C++ kernels")
        num_rows, width = x.shape
        num_outputs, num_inputs = weight.shape
        if width != num_inputs:
            raise KernelError(f"linear: x has {width} columns, the weight {num_inputs} inputs")
        out = empty(num_rows, num_outputs)
        shift = 0 if bias is None else _floats(bias)
        if isinstance(weight, CpuGrouped):
            address, order, zero = weight.address, weight.order_address, weight.zero
            self.engine.grouped(
                _floats(x), address, shift, out.data_ptr(), order, num_rows, num_outputs, width, zero, weight.layout
            )
        else:
            kind = weight.whole_outputs, weight.dtype_code, weight.layout
            self.engine.linear(_floats(x), weight.address, shift, out.data_ptr(), num_rows, num_outputs, width, *kind)
        return out

    def embedding(self, token_ids: Tensor, table: Tensor | PackedLinear) -> Tensor:
        """See `Kernels.embedding`."""
        vocab_size, width = table.shape
        out, ids = empty(token_ids.shape[0], width), _address(token_ids, torch.int64)
        if isinstance(table, CpuGrouped):
            address, order, zero = table.address, table.order_address, table.zero
            sizes = (out.shape[0], vocab_size, width)
            self.engine.grouped_rows(ids, address, out.data_ptr(), order, *sizes, zero, table.layout)
            return out
        if packed := isinstance(table, CpuLinear):
            address, code, layout = table.address, table.dtype_code, table.layout
        elif isinstance(table, Tensor):
            address, code, layout = table.data_ptr(), _dtype_code(table), 0
        else:
            raise KernelError(f"an embedding table packed by {type(table).__name__} given to the C++ kernels")
        self.engine.embedding(ids, address, out.data_ptr(), out.shape[0], width, vocab_size, code, packed, layout)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """See `Kernels.rms_norm`."""
        num_rows, width = x.shape
        out = empty(num_rows, width)
        self.engine.rms_norm(_floats(x), 0, _floats(weight), out.data_ptr(), num_rows, width, eps, centered)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centered: bool = False) -> Tensor:
        """See `Kernels.add_rms_norm`."""
        num_rows, width = x.shape
        out, addresses = empty(num_rows, width), (_floats(x), _floats(residual), _floats(weight))
        self.engine.rms_norm(*addresses, out.data_ptr(), num_rows, width, eps, centered)
        return out

    def scaled(self, x: Tensor, factor: float, cap: float = 0.0) -> Tensor:
        """See `Kernels.scaled`."""
        num_rows, width = x.shape
        out = empty(num_rows, width)
        self.engine.scaled(_floats(x), out.data_ptr(), num_rows, width, factor, cap)
        return out

    def gated_act(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.gated_act`."""
        check_activation(activation)
        num_rows, size = gate_up.shape[0], inner_size(gate_up.shape[1], activation)
        out, code = empty(num_rows, size), ACTIVATIONS.index(activation)
        self.engine.gated_act(_floats(gate_up), out.data_ptr(), num_rows, size, code)
        return out

    def rope_and_cache(
        self,
        qkv: Tensor,
        heads: HeadLayout,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """See `Kernels.rope_and_cache`."""
        if heads.interleaved and heads.rotary_dim > _native.MAX_HEAD_DIM:
            super().rope_and_cache(qkv, heads, rope_table, positions, slots, kv, q_norm, k_norm, eps)
            return
        self.engine.rope_and_cache(
            _floats(qkv),
            heads.num_q,
            heads.num_kv,
            heads.head_dim,
            heads.rotary_dim,
            heads.interleaved,
            _floats(rope_table),
            rope_table.shape[0],
            _address(positions, torch.int32),
            _address(slots, torch.int32),
            *_pool(kv),
            kv.values.shape[0],
            0 if q_norm is None else _floats(q_norm),
            0 if k_norm is None else _floats(k_norm),
            eps,
            qkv.shape[0],
        )

    def attention(
        self, qkv: Tensor, heads: HeadLayout, kv: LayerKV, rows: AttentionRows, scale: float, window: int = 0,
        chunk: int = 0, sinks: Tensor | None = None, cap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """See `Kernels.attention`."""
        num_q, num_kv, head_dim, *_ = heads
        if head_dim > _native.MAX_HEAD_DIM or num_q > num_kv * _native.MAX_HEADS_PER_GROUP:
            return super().attention(qkv, heads, kv, rows, scale, window, chunk, sinks, cap)
        out = empty(qkv.shape[0], num_q * head_dim)
        sizes, many = (num_q, num_kv, head_dim, head_dim, qkv.shape[1]), (qkv.shape[0], rows.max_visible)
        seen = (*_pool(kv), *_seen(rows), scale, window, chunk, 0 if sinks is None else _floats(sinks))
        self.engine.attention(_floats(qkv), out.data_ptr(), *sizes, *seen, *many, cap)
        return out

    def pack_heads(self, weight: Tensor) -> PackedHeads:
        """See `Kernels.pack_heads`."""
        check_heads(weight)
        return CpuHeads(self.pack_linear(head_rows(weight)), weight.shape[0], weight.shape[1])

    def linear_heads(self, x: Tensor, weight: PackedHeads) -> Tensor:
        """See `Kernels.linear_heads`."""
        own = own_heads(weight)
        num_heads, num_outputs, num_inputs = own.shape
        passed = check_head_width(x.shape[1], own.shape)
        out = empty(x.shape[0], num_heads * (num_outputs + passed))
        sizes = (x.shape[0], num_heads, num_outputs, num_inputs, passed)
        self.engine.linear_heads(_floats(x), own.panels.address, out.data_ptr(), *sizes, own.panels.dtype_code)
        return out

    def latent_rope_and_cache(
        self,
        queries: Tensor,
        latents: Tensor,
        layout: LatentLayout,
        rope_table: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: LayerKV,
        norm: Tensor,
        eps: float,
    ) -> None:
        """See `Kernels.latent_rope_and_cache`."""
        _check_latents(layout, kv)
        _, vectors, _, _, block_size, code = _pool(kv)
        self.engine.latent_rope(
            _floats(queries),
            _floats(latents),
            *layout,
            _floats(rope_table),
            rope_table.shape[0],
            _address(positions, torch.int32),
            _address(slots, torch.int32),
            vectors,
            block_size,
            code,
            kv.values.shape[0],
            _floats(norm),
            eps,
            latents.shape[0],
        )

    def latent_attention(
        self, queries: Tensor, layout: LatentLayout, kv: LayerKV, rows: AttentionRows, scale: float
    ) -> Tensor:
        """See `Kernels.latent_attention`."""
        _check_latents(layout, kv)
        out = empty(queries.shape[0], layout.num_heads * layout.rank)
        groups, many = _head_groups(layout.num_heads), (queries.shape[0], rows.max_visible)
        sizes = (layout.num_heads, groups, layout.key_dim, layout.rank, queries.shape[1])
        seen = (*_pool(kv), *_seen(rows), scale, 0, 0, 0)
        self.engine.attention(_floats(queries), out.data_ptr(), *sizes, *seen, *many, 0.0)
        return out

    def route(self, logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
        """See `Kernels.route`."""
        num_rows, num_experts = logits.shape
        check_routing(routing, num_experts)
        out = empty(num_rows, num_experts)
        shift = 0 if correction is None else _floats(correction)
        self.engine.route(_floats(logits), shift, out.data_ptr(), num_rows, *routing)
        return out

    def pack_experts(
        self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: str,
        biases: ExpertBiases | None = None, scales_inputs: bool = False,
    ) -> PackedExperts:  # fmt: skip
        """See `Kernels.pack_experts`."""
        check_activation(activation)
        return pack_bank(gate_up, down, activation, biases, scales_inputs)

    def experts(self, x: Tensor, weights: Tensor, experts: PackedExperts, base: Tensor | None = None) -> Tensor:
        """See `Kernels.experts`."""
        own: CpuExperts = own_experts(experts)
        out = empty(*x.shape)
        added = 0 if base is None else _floats(base)
        self.engine.experts(_floats(x), _floats(weights), added, out.data_ptr(), x.shape[0], own.bank)
        return out

    def move_rows(self, kvs: list[LayerKV], sources: Tensor, targets: Tensor) -> None:
        """See `Kernels.move_rows`."""
        source, target = _address(sources, torch.int32), _address(targets, torch.int32)
        num = sources.shape[0]
        for kv in kvs:
            _, num_kv, _, head_dim = kv.values.shape
            self.engine.move_rows(*_pool(kv), num_kv, head_dim, source, target, num)

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
        """See `Kernels.gumbel_argmax`."""
        ids = empty(logits.shape[0], dtype=torch.int64)
        self._gumbel(logits, temperatures, keys, 1, ids, 0)
        return ids

    def gumbel_topk(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels.gumbel_topk`."""
        ids = empty(logits.shape[0], k, dtype=torch.int64)
        scores = empty(logits.shape[0], k, dtype=torch.float64)
        self._gumbel(logits, temperatures, keys, k, ids, scores.data_ptr())
        return ids, scores

    def walk_trees(self, logits: Tensor, trees: Sequence[PlainTree]) -> list[tuple[tuple[int, ...], int]]:
        """See `Kernels.walk_trees`: a level at a time, since drawing a row of a large vocabulary is slow."""
        return self.engine.walk_trees(_floats(logits), logits.shape[1], trees)

    def _gumbel(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int, ids: Tensor, scores: int) -> None:
        num_rows, vocab_size = logits.shape
        self.engine.gumbel(
            _floats(logits),
            _address(temperatures, torch.float64),
            *(_address(key, torch.int64) for key in keys),
            num_rows,
            vocab_size,
            k,
            ids.data_ptr(),
            scores,
        )


def _pool(kv: LayerKV) -> tuple[int, int, int, int, int, int]:
    """Addresses of keys, values and their scales, the block size, the code of the dtype."""
    code = _POOL_CODES.get(kv.keys.dtype)
    if code is None or not kv.keys.is_contiguous() or not kv.values.is_contiguous():
        raise KernelError(f"a KV pool is contiguous float32, bfloat16 or int8, not {kv.keys.dtype}")
    key_scales = 0 if kv.key_scales is None else _floats(kv.key_scales)
    value_scales = 0 if kv.value_scales is None else _floats(kv.value_scales)
    keys = 0 if kv.is_latent else kv.keys.data_ptr()
    return keys, kv.values.data_ptr(), key_scales, value_scales, kv.values.shape[2], code


def _seen(rows: AttentionRows) -> tuple[int, ...]:
    """Addresses of what says which keys rows see, and the width of the block tables."""
    narrow = rows.seq_ids, rows.prefix_lens, rows.tree_starts, rows.block_tables
    ids, lens, starts, tables = (_address(column, torch.int32) for column in narrow)
    return ids, lens, _address(rows.tree_masks, torch.int64), starts, tables, rows.block_tables.shape[1]


@functools.cache
def _head_groups(num_heads: int) -> int:
    """The fewest groups, of a size that attention in C++ takes, into which heads over one latent can be cut."""
    fewest = -(-num_heads // _native.MAX_HEADS_PER_GROUP)
    return next(groups for groups in range(fewest, num_heads + 1) if num_heads % groups == 0)


def _check_latents(layout: LatentLayout, kv: LayerKV) -> None:
    if not kv.is_latent:
        raise KernelError("an op on latents was given a pool of keys and values")
    if layout.key_dim > _native.MAX_HEAD_DIM:
        raise KernelError(
            f"latents of {layout.rank} + {layout.rope_dim} entries are more than the C++ kernels take "
            f"({_native.MAX_HEAD_DIM}); choose kernels 'reference'"
        )


def _dtype_code(tensor: Tensor) -> int:
    code = _DTYPE_CODES.get(tensor.dtype)
    if code is None or not tensor.is_contiguous():
        raise KernelError(f"tables are contiguous float32 or bfloat16, not {tensor.dtype}")
    return code
