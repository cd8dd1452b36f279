"""The recorded forward: a model's ops written down once, then executed by one native call.

Knows: how to stand in for the kernels while a forward pass runs once on placeholders, and what differs from run to
run. Does not know: models. A forward pass can be recorded if it is a straight line of kernel ops and of the torch ops
that `activation` lists; anything else done to an activation raises KernelError, and the caller keeps running the eager
ops. A replay calls the same C++ with the same sizes, so its bits are those of the eager ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.errors import KernelError
from forerun.kernels.cpu import _native
from forerun.kernels.cpu.activation import Activation
from forerun.kernels.ops import AttentionRows

_INT32, _INT64 = torch.int32, torch.int64
NUM_INPUTS = 9  # of a forward, beside features


class LaidOut(Protocol):
    """Rows of sequences, as csrc/batch_rows.h lays them out."""

    sequences: tuple[Any, ...]
    block_size: int
    shift: int

    @property
    def num_rows(self) -> int:
        """Of the sequences together."""

    @property
    def num_logit_rows(self) -> int:
        """Of them, that want logits."""


class Inputs:
    """What a forward is told about its batch, as placeholders for tensors while it is recorded."""

    __slots__ = ("features", "logit_rows", "positions", "rows", "slots", "token_ids")

    def __init__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: AttentionRows,
        logit_rows: Tensor,
        features: Tensor | None = None,
    ) -> None:
        self.token_ids = token_ids  # [M] int64
        self.positions = positions  # [M] int32
        self.slots = slots  # [M] int32
        self.rows = rows
        self.logit_rows = logit_rows  # [R] int64
        self.features = features  # [M, width] float32 of a forward that reads states beside tokens

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor but the features, in the order of a program's address slots."""
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
        keep: Sequence[Tensor],
        feature_size: int = 0,
    ) -> None:
        """`outputs`: for each whether it has a row per logit row (else per batch row), and its width."""
        self.max_rows = max_rows
        self.engine = engine
        self.native = native
        self.widths = tuple(width for _, width in outputs)
        self._outputs = tuple(outputs)
        self._keep = tuple(keep)  # what recorded addresses point to
        self._feature_size = feature_size

    @property
    def num_steps(self) -> int:
        """Ops a run executes."""
        return self.native.num_steps

    def run(self, batch: LaidOut, features: Tensor | None = None) -> list[Tensor]:
        """Execute the ops on a batch's rows -> the recorded outputs, in fresh tensors."""
        outputs = self._outputs_for(batch.num_rows, batch.num_logit_rows)
        addresses = self.addresses(batch, outputs, features)
        self.native.run_batch(batch.sequences, batch.block_size, batch.shift, addresses)
        return outputs

    def run_on(self, features: Tensor, num_logit_rows: int) -> list[Tensor]:
        """As `run`, for a forward that reads features [M, width] and nothing else of its batch."""
        outputs = self._outputs_for(features.shape[0], num_logit_rows)
        unread = [0] * NUM_INPUTS
        addresses = [*unread, *(output.data_ptr() for output in outputs), self._features_address(features)]
        self.native.run(addresses, features.shape[0], num_logit_rows, 1, 1)
        return outputs

    def addresses(self, batch: LaidOut, outputs: Sequence[Tensor], features: Tensor | None) -> list[int]:
        """Where a run puts its outputs and finds features, in the order of the program's last address slots."""
        addresses = [output.data_ptr() for output in outputs]
        if self._feature_size:
            assert features is not None and features.shape[0] == batch.num_rows
            addresses.append(self._features_address(features))
        return addresses

    def _outputs_for(self, num_rows: int, num_logit_rows: int) -> list[Tensor]:
        if num_rows > self.max_rows:
            raise KernelError(f"{num_rows} rows given to a program recorded for at most {self.max_rows}")
        return [torch.empty(num_logit_rows if per_logit else num_rows, width) for per_logit, width in self._outputs]

    def _features_address(self, features: Tensor) -> int:
        is_plain = features.dtype is torch.float32 and features.is_contiguous()
        if not is_plain or features.shape[1] != self._feature_size:
            raise KernelError(
                f"a recorded forward was given features {features.dtype} {list(features.shape)}, it needs contiguous "
                f"float32 of {self._feature_size} columns"
            )
        return features.data_ptr()


class Recorder(TorchFunctionMode):
    """Inside its `with` block the ops that this thread calls are written down instead of computed.

    Use: run the forward once on `inputs`, then `finish` with the tensors it returned. Tensors it reads are kept with
    the program; packed weights are the caller's to keep, like the pool.
    """

    def __init__(self, engine: _native.CpuEngine, max_rows: int, feature_size: int = 0, logits_a_row: int = 0) -> None:
        """`max_rows`: rows a batch may have when the program runs. Memory grows with it, speed does not depend on it.

        `feature_size`: columns of the features a row brings beside its token. `logits_a_row`: how many rows of logits a
        forward without a choice of logit rows makes of each row; 0 for one that has the choice.
        """
        super().__init__()
        self.engine = engine
        self._native = _native.Program(engine)
        self._max_rows = max_rows
        self._max_logit_rows = max_rows * logits_a_row or max_rows + 1  # another number, to tell the two counts apart
        self._feature_size = feature_size
        self._free: list[Tensor] = []
        self._born: dict[int, int] = {}  # address of a live activation -> step that may first write it
        self._kept: list[Tensor] = []
        self.inputs = self._placeholders()

    def __enter__(self) -> Self:
        self._native.record()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._native.stop()

    @property
    def num_steps(self) -> int:
        """Ops written down so far."""
        return self._native.num_steps

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lend memory for the rows an op makes, keep what it reads; the rest is torch's, or `Activation`'s."""
        if func is torch.empty and len(args) == 2 and not kwargs:
            return self.buffer(*args)
        if func is Tensor.data_ptr and not isinstance(args[0], Activation):
            self.keep(args[0])
        return func(*args, **(kwargs or {}))

    def finish(self, outputs: Sequence[Tensor]) -> Program:
        """Close the recording; a run of the program returns these outputs."""
        native = self._native
        for slot, tensor in enumerate(self.inputs.tensors()):
            native.bind(slot, tensor.data_ptr(), 0)
        shapes = []
        num_inputs = len(self.inputs.tensors())
        if self.inputs.features is not None:
            native.bind(num_inputs + len(outputs), self.inputs.features.data_ptr(), 0)
        for slot, output in enumerate(outputs, num_inputs):
            if not isinstance(output, Activation) or output.data_ptr() not in self._born:
                raise KernelError("a recorded forward returned a tensor that no recorded op computed")
            native.bind(slot, output.data_ptr(), self._born[output.data_ptr()])
            shapes.append((output.shape[0] == self._max_logit_rows, int(output.shape[1])))
        if len({output.data_ptr() for output in outputs}) != len(outputs):
            raise KernelError("a recorded forward returned one tensor twice")
        native.finish(self._max_rows, self._max_logit_rows)
        return Program(self.engine, native, self._max_rows, shapes, self._kept, self._feature_size)

    def keep(self, held: Tensor) -> None:
        """Hold on to something whose address was written down."""
        self._kept.append(held)

    def _placeholders(self) -> Inputs:
        num_rows = self._max_rows

        def unknown(dtype: torch.dtype, *shape: int) -> Tensor:
            return Activation.over(torch.zeros(shape, dtype=dtype), self)

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
            features=unknown(torch.float32, num_rows, self._feature_size) if self._feature_size else None,
        )

    def buffer(self, num_rows: int, width: int) -> Activation:
        """An activation; its memory goes to a later one when Python drops it, which is exactly its last use."""
        size = num_rows * width
        fitting = [buffer for buffer in self._free if buffer.numel() >= size]
        if fitting:
            memory = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not memory]
        else:
            memory = torch.empty(size)
            self.keep(memory)
        activation = Activation.over(memory[:size].view(num_rows, width), self)
        self._born[memory.data_ptr()] = self._native.num_steps
        weakref.finalize(activation, self._release, memory).atexit = False
        return activation

    def _release(self, memory: Tensor) -> None:
        self._born.pop(memory.data_ptr(), None)
        self._free.append(memory)
