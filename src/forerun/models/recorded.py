"""A model whose forward pass was written down once and is replayed without Python.

Knows: that kernels can record. Does not know: what the model computes. Batches with more rows than were recorded for
(prefill chunks) take the model's own forward, where Python's share does not matter; both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ChainNoise, Chains, Kernels, LayerKV
from forerun.kernels.select import recording
from forerun.models.base import ForwardOutput, KeepsState, Model
from forerun.models.batch import ForwardBatch
from forerun.models.bound import BoundModel
from forerun.models.captured import capture_model

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Inputs, Program

MAX_RECORDED_ROWS = 64


class RecordedModel(BoundModel):
    """A model bound to one pool, its forward recorded. Implements `models.base.Model`."""

    def __init__(
        self,
        model: Model,
        program: Program,
        make_inputs: type[Inputs],
        kvs: Sequence[LayerKV],
        hidden_layers: Sequence[int],
    ) -> None:
        super().__init__(model, kvs, hidden_layers)
        self._program = program
        self._make_inputs = make_inputs

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        """See `models.base.Model`."""
        assert len(kvs) == len(self._kvs) and (not kvs or kvs[0] is self._kvs[0]), "recorded for another pool"
        assert tuple(hidden_layers) == self._hidden_layers, "recorded for other hidden layers"
        if batch.num_rows > self._program.max_rows:
            return self._model.forward(batch, kvs, hidden_layers)
        logits, *hidden = self._program.run(self._inputs(batch))
        return ForwardOutput(logits, dict(zip(self._hidden_layers, hidden, strict=True)))

    @property
    def max_chain_rows(self) -> int:
        """See `BoundModel`."""
        return 0 if self._hidden_layers else self._program.max_rows

    def draft_chains(
        self, batch: ForwardBatch, noise: ChainNoise, keep_logits: bool, judged: bool = False
    ) -> tuple[Chains, Tensor | None]:
        """See `BoundModel`."""
        block_size = self._kvs[0].block_size
        return self._program.run_chains(self._inputs(batch), noise, block_size, keep_logits, judged=judged)

    def _inputs(self, batch: ForwardBatch) -> Inputs:
        return self._make_inputs(batch.token_ids, batch.positions, batch.slots, batch.rows, batch.logit_rows)


def record(model: Model, kernels: Kernels, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> Model:
    """The model for one engine alone, its forward recorded for `kvs` where kernels and model can be recorded."""
    if isinstance(model, KeepsState):
        return model.with_own_state()
    if kernels.device.type == "cuda":
        return capture_model(model, kernels, kvs, hidden_layers)
    with recording(kernels, MAX_RECORDED_ROWS) as recorder, torch.no_grad():
        if recorder is None:
            return model
        try:
            out = model.forward(placeholder_batch(recorder.inputs), kvs, hidden_layers)
            program = recorder.finish([out.logits, *(out.hidden[layer] for layer in hidden_layers)])
        except KernelError:  # an op the recorder cannot write down: the model's own forward stays
            return model
    return RecordedModel(model, program, type(recorder.inputs), kvs, hidden_layers)


def placeholder_batch(inputs: Inputs) -> ForwardBatch:
    """The batch a recording is made of."""
    return ForwardBatch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        slots=inputs.slots,
        rows=inputs.rows,
        logit_rows=inputs.logit_rows,
        sequences=(),
        all_logits=False,
    )
