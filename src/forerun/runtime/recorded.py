"""Passes that were recorded once and are replayed by one native call, without Python; drawing chains is one call.

Knows: that kernels can record, which batches a recording serves, what csrc/chain.cpp is told of chains. Does not know:
what the passes compute, whose drafts they are. Batches with more rows than were recorded for (prefill chunks) are
executed eagerly, and so are those with adapters, and rows at position 0 where the network treats them differently, of
which a request has one; all give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.draws import ChainNoise, PlainChain
from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE, Kernels, LayerKV
from forerun.kernels.select import recording
from forerun.models.base import Pass, Passes, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.eager import EagerRunner
from forerun.runtime.runner import Chosen
from forerun.speculation.drawn import Drawn, DrawnTree
from forerun.speculation.growth import TreeNoise

if TYPE_CHECKING:
    from forerun.kernels.cpu.program import Inputs, Program

MAX_RECORDED_ROWS = 64


class ChainsGiven(NamedTuple):
    """What C++ is told of chains to draft, in the order of ChainsGiven in csrc/bindings.cpp."""

    temperatures: Sequence[float]
    seeds: Sequence[int]
    streams: Sequence[int]
    positions: Sequence[int]
    num_active: Sequence[int]
    vocab_size: int
    block_size: int
    shift: int
    logits_step: int  # floats between two steps' logits; 0: each step overwrites the last
    features_step: int  # floats between two steps' features; 0: there are none
    num_rivals: int
    rivals_scale: float
    least: float
    says_chances: bool


class LogitsRoom:
    """Memory for logits that nobody reads after a call; the system gives it when it is first written."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._logits = torch.empty(max_rows, vocab_size)
        self.given = self._logits.data_ptr(), max_rows, vocab_size  # asking torch takes longer than all else in a call


class RecordedRunner(EagerRunner):
    """Replays recorded programs. Implements `runtime.runner.Runner`; its results belong to the caller."""

    replays = True

    def __init__(self, passes: Passes, kvs: Sequence[LayerKV], block_size: int, first: Program, below: Program) -> None:
        super().__init__(passes, kvs, block_size)
        self._first = first
        self._below = below
        self._scratch = torch.empty(0, first.widths[0])
        plain = below is first and passes.past_start is None and not passes.shift  # as a target's passes are
        call = "chain_step_with_states" if passes.hidden_layers else "chain_step"
        is_known = hasattr(first.engine, call)  # not to an extension that was built before there was this call
        self.chooses = is_known and plain and not passes.fed_size  # it gives logits, and layers' states at most
        self._room: LogitsRoom | None = None  # of `choose`

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> PassOutput:
        """See `Runner`."""
        return self._replay(self._first, batch, features) if self._serves(batch) else super().run(batch, features)

    def choose(self, chains: Sequence[PlainChain]) -> Chosen | None:
        """See `ChainStepper`."""
        first, layers = self._first, self._passes.hidden_layers
        if self._room is None:
            self._room = LogitsRoom(first.max_rows, first.widths[0])
        given = first.native, chains, self._block_size, *self._room.given
        if not layers:
            chosen = first.engine.chain_step(*given)
            return None if chosen is None else Chosen(*chosen, {})
        num_rows = sum([len(chain.tokens) for chain in chains])
        states = [torch.empty(num_rows, width) for width in first.widths[1:]]
        chosen = first.engine.chain_step_with_states(*given, [each.data_ptr() for each in states])
        return None if chosen is None else Chosen(*chosen, dict(zip(layers, states, strict=True)))

    def run_below(self, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        """See `EagerRunner`."""
        return self._replay(self._below, batch, features) if self._serves(batch) else super().run_below(batch, features)

    def draw(self, roots: Sequence[SequenceRows], features: Tensor | None, noise: TreeNoise, width: int) -> Drawn:
        """See `Runner`: chains in one native call if their logits need no shaping but noise."""
        batch, by_depth = self._batch(roots), self._noise_at_once(noise)
        if width > 1 or by_depth is None or not self._serves(batch):
            return self._draw_levels(batch, features, noise, width)
        return self._draw_chains(batch, features, noise, by_depth)

    def _draw_chains(
        self, batch: ForwardBatch, features: Tensor | None, noise: TreeNoise, by_depth: ChainNoise
    ) -> list[DrawnTree]:
        """Every pass and every draw in one native call; the bits are those of the levels.

        C++ gives each chain's tokens and the log chances of its paths, where a token's is the log softmax of its score
        among the NUM_RIVALS best, all over RIVALS_SCALE. All chains end when their summed chances fall below `least`.
        """
        steps, num_chains = len(by_depth.num_active), len(by_depth.seeds)
        keeps_logits = any(noise.records)
        vocab_size, *fed_size = self._first.widths
        logits = torch.empty(steps, num_chains, vocab_size) if keeps_logits else self._scratch_for(num_chains)
        fed = torch.empty(2, num_chains, *fed_size) if fed_size else None  # two levels take turns
        chains = ChainsGiven(
            *by_depth[:5],
            vocab_size=vocab_size,
            block_size=self._block_size,
            shift=self._passes.shift,
            logits_step=num_chains * vocab_size if keeps_logits else 0,
            features_step=0 if fed is None else fed.stride(0),
            num_rivals=NUM_RIVALS,
            rivals_scale=RIVALS_SCALE,
            least=by_depth.least,
            says_chances=not all(noise.records),
        )
        first = self._first
        addresses = first.addresses(batch, [logits] if fed is None else [logits, fed], _contiguous(features))
        drawn = first.engine.draft_chains(first.native, self._below.native, batch.sequences, addresses, chains)
        return noise.chains(drawn, logits if keeps_logits else None)

    def _scratch_for(self, num_chains: int) -> Tensor:
        """Logits [num_chains, V] that nobody reads after a call; the memory of the last call, where it fits."""
        if self._scratch.shape[0] != num_chains:
            self._scratch = torch.empty(num_chains, self._first.widths[0])
        return self._scratch

    def _serves(self, batch: ForwardBatch) -> bool:
        """Whether a batch is of a kind that was recorded."""
        if not batch.sequences or batch.adapters or batch.num_rows > self._first.max_rows:
            return False
        return self._passes.past_start is None or all(rows.start >= 2 for rows in batch.sequences)

    def _replay(self, program: Program, batch: ForwardBatch, features: Tensor | None) -> PassOutput:
        logits, *others = program.run(batch, _contiguous(features))
        if not others:
            return PassOutput(logits)
        hidden = dict(zip(self._passes.hidden_layers, others, strict=False))
        return PassOutput(logits, hidden, others[-1] if self._passes.fed_size else None)


def _contiguous(features: Tensor | None) -> Tensor | None:
    return None if features is None else features.contiguous()


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
    return RecordedRunner(passes, kvs, block_size, first, below)


def _record(passes: Passes, run: Pass, feature_size: int, kernels: Kernels, kvs: Sequence[LayerKV]) -> Program | None:
    """One pass over features of that size; None if the kernels cannot record."""
    with recording(kernels, MAX_RECORDED_ROWS, feature_size=feature_size) as recorder, torch.no_grad():
        if recorder is None:
            return None
        inputs = recorder.inputs
        out = run(_placeholder_batch(inputs), inputs.features, kvs)
        features = [] if out.features is None else [out.features]
        made = [out.logits, *(out.hidden[layer] for layer in passes.hidden_layers), *features]
        return recorder.finish(made)


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
