"""Passes that were recorded once and are replayed by one native call, without Python; drawing chains is one call.

Knows: that kernels can record, which batches a recording serves, what csrc/chain.cpp is told of chains. Does not know:
what the passes compute, whose drafts they are. Batches with more rows than were recorded for (prefill chunks) are
executed eagerly, and so are rows at position 0 where the network treats them differently, of which a request has one;
both give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE, ChainNoise, Chains, Kernels, LayerKV
from forerun.kernels.select import recording
from forerun.models.base import Pass, Passes, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.eager import EagerRunner
from forerun.speculation.drawn import Drawn, DrawnTree
from forerun.speculation.growth import TreeNoise

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Inputs, Program

MAX_RECORDED_ROWS = 64


class ChainArgs(NamedTuple):
    """What C++ is told of chains to draft, in the order of ChainArgs in csrc/chain.h."""

    temperatures: int  # address, as are the next four
    seeds: int
    streams: int
    positions: int
    num_active: int
    num_steps: int
    num_chains: int
    vocab_size: int
    block_size: int
    logits_step: int  # floats between two steps' logits; 0: each step overwrites the last
    ids: int  # address
    log_chances: int  # address, 0 if they are not wanted
    shift: int
    features_step: int  # floats between two steps' features; 0: there are none
    num_rivals: int
    rivals_scale: float
    least: float


class RecordedRunner(EagerRunner):
    """Replays recorded programs. Implements `runtime.runner.Runner`; its results belong to the caller."""

    replays = True

    def __init__(
        self, passes: Passes, kvs: Sequence[LayerKV], block_size: int, first: Program, below: Program,
        make_inputs: type[Inputs],
    ) -> None:  # fmt: skip
        super().__init__(passes, kvs, block_size)
        self._first = first
        self._below = below
        self._make_inputs = make_inputs

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._replay(self._first, batch, features) if self._serves(batch) else super().run(batch, features)

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """See `EagerRunner`."""
        return self._replay(self._below, batch, features) if self._serves(batch) else super().run_below(batch, features)

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`: chains in one native call if their logits need no shaping but noise."""
        batch = self._batch(roots)
        if width > 1 or noise.by_depth is None or self._passes.hidden_layers or not self._serves(batch):
            return self._draw_levels(batch, features, noise, width)
        return self._draw_chains(batch, features, noise, noise.by_depth())

    def _draw_chains(
        self, batch: ForwardBatch, features: Tensor | None, noise: TreeNoise, by_depth: ChainNoise
    ) -> list[DrawnTree]:
        """Every pass and every draw in one native call; the bits are those of the levels.

        C++ gives the log chance of each token, the log softmax of its score among the NUM_RIVALS best, all over
        RIVALS_SCALE; entries after a chain's end are unset. All chains end when their summed chances fall below
        `least`.
        """
        steps, num_chains = by_depth.positions.shape
        keeps_logits, says_chances = any(noise.records), not all(noise.records)
        vocab_size, *fed_size = self._first.widths
        logits = torch.empty(steps if keeps_logits else 1, num_chains, vocab_size)
        fed = torch.empty(2, num_chains, *fed_size) if fed_size else None  # two levels take turns
        ids = torch.empty(steps, num_chains, dtype=torch.int64)
        log_chances = torch.empty(steps, num_chains, dtype=torch.float64) if says_chances else None
        chains = ChainArgs(
            temperatures=by_depth.temperatures.data_ptr(),
            seeds=by_depth.seeds.data_ptr(),
            streams=by_depth.streams.data_ptr(),
            positions=by_depth.positions.data_ptr(),
            num_active=by_depth.num_active.data_ptr(),
            num_steps=steps,
            num_chains=num_chains,
            vocab_size=vocab_size,
            block_size=self._block_size,
            logits_step=logits.stride(0) if keeps_logits else 0,
            ids=ids.data_ptr(),
            log_chances=0 if log_chances is None else log_chances.data_ptr(),
            shift=self._passes.shift,
            features_step=0 if fed is None else fed.stride(0),
            num_rivals=NUM_RIVALS,
            rivals_scale=RIVALS_SCALE,
            least=by_depth.least,
        )
        first, rows = self._first, batch.rows
        addresses = first.addresses(self._inputs(batch, features), [logits] if fed is None else [logits, fed])
        sizes = batch.num_rows, rows.block_tables.shape[1], rows.max_visible
        first.engine.draft_chains(first.native, self._below.native, addresses, *sizes, chains)
        return noise.chains(Chains(ids, logits if keeps_logits else None), log_chances)

    def _serves(self, batch: ForwardBatch) -> bool:
        """Whether a batch is of a kind that was recorded."""
        has_start = self._passes.past_start is not None and any(rows.start < 2 for rows in batch.sequences)
        return batch.num_rows <= self._first.max_rows and not has_start

    def _replay(self, program: Program, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        logits, *others = program.run(self._inputs(batch, features))
        hidden = dict(zip(self._passes.hidden_layers, others, strict=False))
        return PassOutput(logits, hidden, others[-1] if self._passes.fed_size else None)

    def _inputs(self, batch: ForwardBatch, features: Tensor | None) -> Inputs:
        held = None if features is None else features.contiguous()
        return self._make_inputs(batch.token_ids, batch.positions, batch.slots, batch.rows, batch.logit_rows, held)


def record(passes: Passes, kernels: Kernels, kvs: Sequence[LayerKV], block_size: int) -> RecordedRunner | None:
    """The passes recorded for `kvs`; None where kernels or passes cannot be."""
    plain = passes.past_start or passes
    try:
        first = _record(plain, plain.first, plain.feature_size, kernels, kvs)
        below = first if plain.below is plain.first else _record(plain, plain.below, plain.fed_size, kernels, kvs)
    except KernelError:  # an op that cannot be recorded
        return None
    if first is None or below is None:
        return None
    return RecordedRunner(passes, kvs, block_size, first[0], below[0], first[1])


def _record(
    passes: Passes, run: Pass, feature_size: int, kernels: Kernels, kvs: Sequence[LayerKV]
) -> tuple[Program, type[Inputs]] | None:
    """One pass over features of that size; None if the kernels cannot record."""
    with recording(kernels, MAX_RECORDED_ROWS, feature_size=feature_size) as recorder, torch.no_grad():
        if recorder is None:
            return None
        inputs = recorder.inputs
        out = run(_placeholder_batch(inputs), inputs.features, kvs)
        features = [] if out.features is None else [out.features]
        made = [out.logits, *(out.hidden[layer] for layer in passes.hidden_layers), *features]
        return recorder.finish(made), type(inputs)


def _placeholder_batch(inputs: Inputs) -> ForwardBatch:
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
