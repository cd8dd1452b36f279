"""What the engine asks of a model, whatever runs it.

Knows: the forward's inputs and outputs and who keeps the state. Does not know: any architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.kernels.recurrent_ops import LayerState
from forerun.models.batch import ForwardBatch


class LayerSpec(NamedTuple):
    """The KV shape of one attention layer."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the pool: float32, bfloat16 or int8
    latent: bool = False  # one vector a position, which is key and value

    @property
    def bytes_per_position(self) -> int:
        """Bytes of one position's keys and values over all heads, with a scale for each vector in an int8 pool."""
        if self.latent:
            return self.num_kv_heads * self.head_dim * self.dtype.itemsize
        scale = 4 if self.dtype is torch.int8 else 0
        return 2 * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale)


class StateSpec(NamedTuple):
    """The shape of what one recurrent layer keeps of a sequence, in float32."""

    tail: tuple[int, int]  # inputs of the convolution: taps - 1, channels
    memory: tuple[int, int, int]  # heads, key_dim, value_dim

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's state."""
        return 4 * (math.prod(self.tail) + math.prod(self.memory))


class States(Protocol):
    """Slots of recurrent state, one a request that runs."""

    layers: Sequence[LayerState]  # one per entry of the model's state_specs

    def begin(self, request_id: str, num_tokens: int) -> int:
        """The request's slot, which is its own until it is released; the state there will change until `end`.

        It comes after `num_tokens`; after 0, it is new. Raises RuntimeError if the slot's state is another one, or was
        left half changed.
        """

    def end(self, request_id: str, num_tokens: int) -> None:
        """The request's state comes after `num_tokens` now, in every layer."""

    def release(self, request_id: str) -> None:
        """Take the slot back, if the request has one."""


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a forward pass gives back."""

    logits: Tensor  # [R, vocab_size] float32, one row per batch.logit_rows entry; -inf for tokens a head does not know
    hidden: dict[int, Tensor] = field(default_factory=dict)  # layer index -> [M, hidden_size] float32, if asked for
    features: Tensor | None = None  # [R, fed_size] float32: what a head feeds to the rows below


# rows, and their features [M, width] if the pass reads any beside the tokens
Pass = Callable[[ForwardBatch, Tensor | None, Sequence[LayerKV]], PassOutput]


@dataclass(frozen=True, slots=True)
class Passes:
    """What a network computes: the pass over known tokens and roots, and that over a level of drafts below them."""

    first: Pass
    below: Pass  # `first` itself if both read tokens alone
    vocab_size: int
    feature_size: int = 0  # columns that `first` reads beside tokens; 0: none
    fed_size: int = 0  # columns that `below` reads, which are those of `PassOutput.features`
    shift: int = 0  # added to every row's position
    hidden_layers: tuple[int, ...] = ()  # whose states `first` gives
    past_start: Passes | None = None  # the same passes without branches, for batches without rows at position 0
    advances_states: bool = False  # recurrent ones, in slots that the host looks up: such passes run op by op
    mixes_rows: bool = False  # a row reads those above it, so that no batch may be filled up: these run op by op, too
    exchanges: bool = False  # with other ranks, which no recorder can write down: these run op by op, too


class CommittedPath(NamedTuple):
    """Where a sequence stands after a step: `nodes` of its tree were accepted, the others are dropped."""

    request_id: str
    nodes: tuple[int, ...]  # accepted tree nodes from the root on; () if only a span was computed


@dataclass(frozen=True, slots=True)
class RowPasses:
    """Heads beside the output layer (Medusa): one state of the target gives the logits of every draft depth."""

    run: Callable[[Tensor, int], Tensor]  # states [R, feature_size], depths -> [R * depths, V], state by state
    num_depths: int  # at most
    vocab_size: int
    feature_size: int
    exchanges: bool = False  # see `Passes`


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block consists of."""

    num_slots: int  # the root's among them
    mask_token_id: int  # in all others
    first_slot: int  # whose logits are those of the first draft: 0 is the root's
    is_causal: bool  # no slot sees those behind it; else each sees all of its block, in some layer

    @property
    def num_depths(self) -> int:
        """Drafts a block gives at most."""
        return self.num_slots - self.first_slot


class PairScores(Protocol):
    """What a slot's logits lack: how well a token follows the one in the slot before."""

    @property
    def num_candidates(self) -> int:
        """Tokens of a slot that are looked at, those with the best logits."""

    def __call__(self, states: Tensor, above: Tensor, ids: Tensor) -> Tensor:
        """states [n, H] of slots, tokens above [n, a] and ids [n, b] -> what is added to logits of ids, [n, a, b]."""


@dataclass(frozen=True, slots=True)
class GuessedBlocks:
    """What a pass over blocks of equally many slots gave, and where they begin."""

    logits: Tensor  # [R, depths, V]
    states: Tensor  # [R, slots, H]: of all slots, the root's among them
    roots: Tensor  # [R] int64
    before: Tensor | None = None  # [R] int64: the tokens before the roots, for who `reads_before`
    features: Tensor | None = None  # [R, W]: the target's states of these

    @property
    def first_slot(self) -> int:
        """See `BlockShape`."""
        return self.states.shape[1] - self.logits.shape[1]


# blocks [n] whose slot is meant, drafts between root and slot, the tokens above [n], what their slots gave [n, F] (None
# where these tokens are the roots) -> logits [n, V] of the slot, and what it hands to the slots below
SlotLogits = Callable[[Tensor, int, Tensor, Tensor | None], PassOutput]


class SlotOrder(Protocol):
    """How logits of slots follow from the tokens drafted in those before: block by block, then slot by slot."""

    @property
    def reads_before(self) -> bool:
        """Whether it is told the known token before each root, and the target's states of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of tables and matrices."""

    def __call__(self, blocks: GuessedBlocks) -> SlotLogits:
        """The logits of these blocks' slots, which are asked for in order."""


@dataclass(frozen=True, slots=True)
class BlockPasses:
    """A head that guesses a block of tokens in one pass: the root, and slots behind it that hold no token yet."""

    block: Passes  # over roots and slots, with logits of every one
    shape: BlockShape
    # known tokens, the target's states [M, W] -> KV, where that takes no pass; None: `block` reads them like roots
    read: Callable[[ForwardBatch, Tensor, Sequence[LayerKV]], None] | None = None
    blank: Tensor | None = None  # [W]: what `block` reads in slots in place of the target's states, if it reads any
    # both read the one hidden state that `block` gives; neither: slots do not look at what is drafted in others
    pairs: PairScores | None = None
    order: SlotOrder | None = None

    @property
    def rereads_last(self) -> bool:
        """Whether drafting needs the target's states of the known token before each root, read or not."""
        return self.order is not None and self.order.reads_before


class Model(Protocol):
    """A causal language model over the paged pool (or over a state of its own)."""

    vocab_size: int
    device: torch.device  # where logits and hidden states lie; batches may come from the host
    max_position: int  # positions the model was built for
    kv_specs: tuple[LayerSpec, ...]  # () for a model that keeps its own state
    weight_bytes: int
    num_parameters: int

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """Compute every row of `batch`, writing its KV into `kvs` (one LayerKV per entry of kv_specs).

        hidden_layers names the states wanted for all rows: index 0 is the embedding, i the output of layer i-1
        before the final norm, and one more than there are layers the output of the final norm.
        """

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """Called after every step with what became known. A model whose state is all in the pool has nothing to do."""

    def release(self, request_id: str) -> None:
        """The request ended or was preempted: forget its state."""


@runtime_checkable
class KeepsState(Protocol):
    """A model that keeps its state itself instead of in the pool, so that engines must not share it."""

    def with_own_state(self) -> Model:
        """The same weights with an empty state; every engine and every drafter takes its own."""


@runtime_checkable
class KeepsSlots(Protocol):
    """A model with recurrent layers, whose state besides the pool lies in slots that an engine gives it."""

    state_specs: tuple[StateSpec, ...]  # () if it has no recurrent layer after all

    def with_states(self, states: States) -> Model:
        """The same weights over these slots; every engine has its own."""


@runtime_checkable
class SharesPasses(Protocol):
    """A model of which several ranks compute a part each: all of them run the same passes in the same order."""

    exchanges: bool  # False: this one computes all by itself


def exchanges(model: Model) -> bool:
    """Whether other ranks compute a part of the model, so that they must be told what a pass is over."""
    return isinstance(model, SharesPasses) and model.exchanges


@runtime_checkable
class GuessesSeveral(Protocol):
    """A model that may have been trained to guess several tokens in one pass (PARD, arXiv 2504.18583)."""

    mask_token_id: int | None  # read in place of tokens that are not known yet; None: it guesses the next one alone


def mask_token_of(model: Model) -> int | None:
    """What is read in place of tokens that are not known yet; None for a model that guesses the next one alone."""
    return model.mask_token_id if isinstance(model, GuessesSeveral) else None


def state_specs_of(model: Model) -> tuple[StateSpec, ...]:
    """What each recurrent layer keeps of a sequence; () for a model without such layers."""
    return model.state_specs if isinstance(model, KeepsSlots) else ()


def with_states(model: Model, states: States) -> Model:
    """The model over these slots, which it has layers for."""
    assert isinstance(model, KeepsSlots)
    return model.with_states(states)


def passes_of(model: Model, hidden_layers: Sequence[int] = ()) -> Passes:
    """The passes of a model. It reads tokens alone, so the pass is the same for every level of drafts."""

    def run(batch: ForwardBatch, _: Tensor | None, kvs: Sequence[LayerKV]) -> PassOutput:
        return model.forward(batch, kvs, hidden_layers)

    return Passes(
        run,
        run,
        model.vocab_size,
        hidden_layers=tuple(hidden_layers),
        advances_states=bool(state_specs_of(model)),
        exchanges=exchanges(model),
    )


def with_own_state(model: Model) -> Model:
    """The model for use by a single engine or drafter."""
    return model.with_own_state() if isinstance(model, KeepsState) else model
