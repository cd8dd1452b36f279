"""The recorded forward: a model's ops written down once, then executed by one native call.

Knows: how to stand in for the kernels while a forward pass runs once on placeholders, and what differs from run to
run. Does not know: models. A recording asks of a forward pass that it is a straight line of kernel ops, `index_select`
with the batch's logit rows and `clone`; anything else done to an activation raises KernelError, and the caller stays
with the eager ops. A replay calls the same C++ with the same sizes, so its bits are those of the eager ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.cpu import _native
from forerun.kernels.cpu.backend import CpuKernels
from forerun.kernels.cpu.grouped import CpuGrouped
from forerun.kernels.cpu.packed import CpuExperts, CpuHeads, CpuLinear
from forerun.kernels.ops import AttentionRows, ChainNoise, Chains

_PLAIN_ACCESS = frozenset({"__get__", "data_ptr", "is_contiguous", "size", "dim", "stride", "numel"})


_INT32, _INT64 = torch.int32, torch.int64
FORWARD_OPS = (
    "linear",
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "gated_act",
    "rope_and_cache",
    "attention",
    "linear_heads",
    "latent_rope_and_cache",
    "latent_attention",
    "route",
    "experts",
)
_HELD = (Tensor, CpuLinear, CpuGrouped, CpuHeads, CpuExperts)
_INPUT_DTYPES = (_INT64, _INT32, _INT32, _INT64, _INT32, _INT32, _INT64, _INT32, _INT32)


class Inputs:
    """What a forward is told about its batch, as tensors: real ones, or placeholders while recording."""

    __slots__ = ("logit_rows", "positions", "rows", "slots", "token_ids")

    def __init__(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, rows: AttentionRows, logit_rows: Tensor
    ) -> None:
        self.token_ids = token_ids  # [M] int64
        self.positions = positions  # [M] int32
        self.slots = slots  # [M] int32
        self.rows = rows
        self.logit_rows = logit_rows  # [R] int64

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor, in the order of a program's address slots."""
        rows = self.rows
        return (
            self.token_ids,
            self.positions,
            self.slots,
            self.logit_rows,
            rows.seq_ids,
            rows.prefix_lens,
            rows.tree_masks,
            rows.tree_starts,
            rows.block_tables,
        )


class Program:
    """A recorded forward, to be run on batches of up to `max_rows` rows."""

    def __init__(
        self,
        engine: _native.CpuEngine,
        native: _native.Program,
        max_rows: int,
        outputs: Sequence[tuple[bool, int]],
        buffers: Sequence[Tensor],
        keep: Sequence[Any],
    ) -> None:
        """`outputs`: for each whether it has a row per logit row (else per batch row), and its width."""
        self.max_rows = max_rows
        self._engine = engine
        self._native = native
        self._outputs = tuple(outputs)
        self._buffers = tuple(buffers)
        self._keep = tuple(keep)  # weights whose addresses were recorded

    @property
    def num_steps(self) -> int:
        """Ops a run executes."""
        return self._native.num_steps

    @property
    def num_buffers(self) -> int:
        """Pieces of memory its activations share."""
        return len(self._buffers)

    def run(self, inputs: Inputs) -> list[Tensor]:
        """Execute the ops -> the recorded outputs, in fresh tensors."""
        num_rows, num_logit_rows = inputs.token_ids.shape[0], inputs.logit_rows.shape[0]
        if max(num_rows, num_logit_rows) > self.max_rows:
            raise KernelError(
                f"{max(num_rows, num_logit_rows)} rows given to a program recorded for at most {self.max_rows}"
            )
        outputs = [torch.empty(num_logit_rows if per_logit else num_rows, width) for per_logit, width in self._outputs]
        addresses = [tensor.data_ptr() for tensor in (*_checked(inputs), *outputs)]
        rows = inputs.rows
        self._native.run(addresses, num_rows, num_logit_rows, rows.block_tables.shape[1], rows.max_visible)
        return outputs

    def run_chains(self, inputs: Inputs, noise: ChainNoise, block_size: int, keep_logits: bool) -> Chains:
        """Draft chains below the roots of all sequences of the batch: one root a sequence, the only logit rows.

        The forward must return logits alone. Bits are those of `run` and `gumbel_argmax` level by level.
        """
        num_rows, (steps, num_chains) = inputs.token_ids.shape[0], noise.positions.shape
        assert len(self._outputs) == 1 and num_chains == inputs.logit_rows.shape[0] and num_rows <= self.max_rows
        width = self._outputs[0][1]
        logits = torch.empty(steps if keep_logits else 1, num_chains, width)
        ids = torch.empty(steps, num_chains, dtype=_INT64)
        rows = inputs.rows
        self._engine.draft_chains(
            self._native,
            [tensor.data_ptr() for tensor in (*_checked(inputs), logits)],
            num_rows,
            rows.block_tables.shape[1],
            rows.max_visible,
            noise.temperatures.data_ptr(),
            noise.seeds.data_ptr(),
            noise.streams.data_ptr(),
            noise.positions.data_ptr(),
            noise.num_active.data_ptr(),
            steps,
            num_chains,
            width,
            block_size,
            logits.stride(0) if keep_logits else 0,
            ids.data_ptr(),
        )
        return Chains(ids, logits if keep_logits else None)


class Recorder(CpuKernels):
    """Looks like the kernels it was made from; its forward ops are written down instead of computed.

    Use: run the forward once with this object's ops on `inputs`, then `finish` with the tensors it returned.
    """

    def __init__(self, kernels: CpuKernels, max_rows: int) -> None:
        """`max_rows`: rows a batch may have when the program runs. Memory grows with it, speed does not care."""
        self.engine = kernels.engine
        self.name = kernels.name
        self._native_program = _native.Program(kernels.engine)
        self._ops = self._native_program
        self._empty = self._buffer
        self._max_rows = max_rows
        self._max_logit_rows = max_rows + 1  # another number, so that the two row counts can be told apart
        self._free: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._born: dict[int, int] = {}  # address of a live activation -> step that may first write it
        self._keep: list[Any] = []
        self.inputs = self._placeholders()
        for op in FORWARD_OPS:
            setattr(self, op, self._keeping(getattr(self, op)))

    def finish(self, outputs: Sequence[Tensor]) -> Program:
        """Close the recording; a run of the program returns these outputs."""
        native = self._native_program
        for slot, tensor in enumerate(self.inputs.tensors()):
            native.bind(slot, tensor.data_ptr(), 0)
        shapes = []
        for slot, output in enumerate(outputs, len(self.inputs.tensors())):
            if not isinstance(output, _Activation) or output.data_ptr() not in self._born:
                raise KernelError("a recorded forward returned a tensor that no recorded op computed")
            native.bind(slot, output.data_ptr(), self._born[output.data_ptr()])
            shapes.append((output.shape[0] == self._max_logit_rows, int(output.shape[1])))
        if len({output.data_ptr() for output in outputs}) != len(outputs):
            raise KernelError("a recorded forward returned one tensor twice")
        try:
            native.finish(self._max_rows, self._max_logit_rows)
        except ValueError as error:
            raise KernelError(str(error)) from error
        return Program(self.engine, native, self._max_rows, shapes, self._buffers, self._keep)

    def select_rows(self, x: Tensor, row_ids: Tensor | None) -> Tensor:
        """Rows `row_ids` of x, or a copy of all of them."""
        num_rows = x.shape[0] if row_ids is None else row_ids.shape[0]
        out = self._buffer(num_rows, x.shape[1])
        ids = 0 if row_ids is None else row_ids.data_ptr()
        self._native_program.select_rows(x.data_ptr(), ids, out.data_ptr(), num_rows, x.shape[1])
        return out

    def pack_linear(self, weight: Tensor) -> NoReturn:
        """Weights are packed before a recording."""
        raise KernelError("pack_linear cannot be recorded")

    def pack_grouped(self, matrix: object) -> NoReturn:
        """Weights are packed before a recording."""
        raise KernelError("pack_grouped cannot be recorded")

    def pack_heads(self, *_: object) -> NoReturn:
        """Weights are packed before a recording."""
        raise KernelError("pack_heads cannot be recorded")

    def pack_experts(self, *_: object) -> NoReturn:
        """Weights are packed before a recording."""
        raise KernelError("pack_experts cannot be recorded")

    def move_rows(self, *_: object) -> NoReturn:
        """Not part of a forward."""
        raise KernelError("move_rows cannot be recorded")

    def gumbel_argmax(self, *_: object) -> NoReturn:
        """Not part of a forward."""
        raise KernelError("gumbel_argmax cannot be recorded")

    def gumbel_topk(self, *_: object) -> NoReturn:
        """Not part of a forward."""
        raise KernelError("gumbel_topk cannot be recorded")

    def _uncommon_attention(self, *_: object) -> NoReturn:
        raise KernelError("attention with such wide heads or groups cannot be recorded")

    def _keeping(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, after taking hold of every weight whose address it writes down (the cache is the caller's)."""

        def record(*args: Any, **kwargs: Any) -> Any:
            for given in (*args, *kwargs.values()):
                if isinstance(given, _HELD) and not isinstance(given, _Activation):
                    self._keep.append(given)
            return op(*args, **kwargs)

        return record

    def _placeholders(self) -> Inputs:
        num_rows = self._max_rows

        def unknown(dtype: torch.dtype, *shape: int) -> Tensor:
            return _Activation.over(torch.zeros(shape, dtype=dtype), self)

        rows = AttentionRows(
            seq_ids=unknown(_INT32, num_rows),
            prefix_lens=unknown(_INT32, num_rows),
            tree_masks=unknown(_INT64, num_rows),
            tree_starts=unknown(_INT32, 1),
            block_tables=unknown(_INT32, 1, 1),
            max_visible=1,
        )
        return Inputs(
            token_ids=unknown(_INT64, num_rows),
            positions=unknown(_INT32, num_rows),
            slots=unknown(_INT32, num_rows),
            rows=rows,
            logit_rows=unknown(_INT64, self._max_logit_rows),
        )

    def _buffer(self, num_rows: int, width: int) -> Tensor:
        """An activation; its memory goes to a later one when Python drops it, which is exactly its last use."""
        size = num_rows * width
        fitting = [buffer for buffer in self._free if buffer.numel() >= size]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not memory]
        else:
            memory = torch.empty(size)
            self._buffers.append(memory)
        activation = _Activation.over(memory[:size].view(num_rows, width), self)
        self._born[memory.data_ptr()] = self._native_program.num_steps
        weakref.finalize(activation, self._release, memory).atexit = False
        return activation

    def _release(self, memory: Tensor) -> None:
        self._born.pop(memory.data_ptr(), None)
        self._free.append(memory)


class _Activation(Tensor):
    """A tensor whose values exist only when the program runs. Kernel ops take it; torch may not touch it.

    The batch's own tensors are such activations too while recording: whatever torch computed from them once would be
    wrong for the next batch.
    """

    recorder: Recorder

    @classmethod
    def over(cls, memory: Tensor, recorder: Recorder) -> _Activation:
        activation = memory.as_subclass(cls)
        activation.recorder = recorder
        return activation

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.__name__ in _PLAIN_ACCESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise KernelError(f"torch's {func.__name__} on an activation cannot be recorded")

    def index_select(self, dim: Any, index: Any) -> Tensor:
        if dim != 0:
            raise KernelError("only rows can be selected in a recording")
        return self.recorder.select_rows(self, index)

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Any:
        return self.recorder.select_rows(self, None)


def _checked(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors, after making sure that C++ reads what they hold."""
    tensors = inputs.tensors()
    for tensor, placeholder_dtype in zip(tensors, _INPUT_DTYPES, strict=True):
        if tensor.dtype is not placeholder_dtype or not tensor.is_contiguous():
            raise KernelError(f"a recorded forward was given {tensor.dtype}, it needs contiguous {placeholder_dtype}")
    return tensors
