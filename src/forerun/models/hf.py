"""Any causal language model through transformers, row by row: exact, at reference speed.

Knows: how transformers' models are called, and their caches. Does not know: files, architectures, the paged pool, over
which `hf_pooled` runs those that can be.

Every row is one call over one token. So a row's bits cannot depend on what else is in the batch, and a tree node,
which runs on a fork of its parent's cache, gives the bits of the same tokens decoded one by one. Caches are forked,
never cropped, so recurrent models (Mamba, RWKV) work like the others. The price is the lost batching.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from forerun.errors import UnsupportedError
from forerun.kernels.device import CPU
from forerun.kernels.ops import LayerKV
from forerun.models.base import CommittedPath, LayerSpec, PassOutput
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.hf_matrices import ALL_ROWS, ROWS, WITHOUT_LOGITS, kernel_bytes, kernel_parameters

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")  # the first from transformers 5.24 on
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "context_length")
MOST_POSITIONS = 1 << 20  # so many are tried of masks; and for models that state no limit (recurrent ones)
# Families whose first position is the one after padding's entry of the table of positions, by RoBERTa's example.
_AFTER_PADDING = (
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


@dataclass(slots=True)
class _SequenceState:
    """What transformers needs to go on with one request."""

    cache: Any = None  # after `tokens`; None before the first
    tokens: list[int] = field(default_factory=list)  # known tokens computed
    nodes: dict[int, _Node] = field(default_factory=dict)  # of the tree since the last commit


class _Node(NamedTuple):
    token_id: int
    cache: Any  # after the node
    depth: int


class _Row(NamedTuple):
    logits: Tensor  # [1, V] float32, [0, V] if nobody wants them and the output layer is the kernels'
    hidden: tuple[Tensor, ...]  # a layer: [H]


class HFModel:
    """A transformers model that keeps its own state by request. Implements `models.base.Model`.

    A draft model must be told what was accepted (`commit`) like a target: its state is not in the pool.
    """

    kv_specs: tuple[LayerSpec, ...] = ()

    def __init__(self, module: Any, device: torch.device = CPU) -> None:
        """`module` is a loaded AutoModelForCausalLM in evaluation mode, on `device`."""
        self._module = module
        self._cache_name = cache_name(module)
        self._ropes = _changing_ropes(module)
        self._one_caller: AbstractContextManager[Any] = Lock() if self._ropes else nullcontext()
        self._states: dict[str, _SequenceState] = {}
        config = module.config.get_text_config()
        self.num_layers: int = getattr(config, "num_hidden_layers", 0)
        self.device = device
        self.vocab_size = vocabulary_of(module)
        self.max_position: int = max_position(config)
        self.weight_bytes, self.num_parameters = size_of(module)

    def limit(self, max_position: int) -> None:
        """Run texts of so many positions at most."""
        self.max_position = max_position

    def with_own_state(self) -> HFModel:
        """See `models.base.KeepsState`."""
        other = copy.copy(self)
        other._states = {}
        return other

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        """See `models.base.Model`. hidden_layers: all but the last layer's output, which transformers normalises."""
        check_hidden_layers(hidden_layers, self.num_layers)
        rows = [row for sequence in batch.sequences for row in self._sequence(sequence, bool(hidden_layers))]
        hidden = {layer: torch.stack([row.hidden[layer] for row in rows]) for layer in hidden_layers}  # [M, H]
        wanted = [rows[index].logits for index in batch.logit_rows.tolist()]
        return PassOutput(torch.cat(wanted) if wanted else torch.empty(0, self.vocab_size, device=self.device), hidden)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        """Go on from the last accepted node of each request."""
        for path in paths:
            state = self._states.get(path.request_id)
            if state is None:
                continue
            if path.nodes:
                accepted = [state.nodes[node] for node in path.nodes]
                state.tokens.extend(node.token_id for node in accepted)
                state.cache = accepted[-1].cache
            state.nodes.clear()

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._states.pop(request_id, None)

    def _sequence(self, rows: SequenceRows, hidden: bool) -> Iterator[_Row]:
        """All rows of one sequence, in the batch's order."""
        state = self._state_at(rows)
        for token_id in rows.span:
            yield self._extend(state, token_id, hidden, rows.span_logits)
        if 0 in rows.tree_rows:
            state.nodes.clear()
        for node, token_id, mask in zip(rows.tree_rows, rows.tree_tokens, rows.tree_masks, strict=True):
            yield self._node(state, node, token_id, mask, hidden)

    def _state_at(self, rows: SequenceRows) -> _SequenceState:
        """The request's state after `start` tokens; recomputed if it has gone further (after a preemption)."""
        state = self._states.setdefault(rows.request_id, _SequenceState())
        start = rows.start if rows.span else rows.tree_start
        assert start <= len(state.tokens), f"{rows.request_id}: row {start} comes, {len(state.tokens)} are committed"
        if start < len(state.tokens):
            known = state.tokens[:start]
            state = self._states[rows.request_id] = _SequenceState()
            for token_id in known:
                self._extend(state, token_id, hidden=False, logits=False)
        return state

    def _extend(self, state: _SequenceState, token_id: int, hidden: bool, logits: bool) -> _Row:
        row, state.cache = self._call(token_id, state.cache, hidden, logits)
        state.tokens.append(token_id)
        return row

    def _node(self, state: _SequenceState, node: int, token_id: int, mask: int, hidden: bool) -> _Row:
        ancestors = [state.nodes[i] for i in range(mask.bit_length()) if mask >> i & 1 and i != node]
        nearest = max(ancestors, key=lambda ancestor: ancestor.depth, default=None)  # rows may lie in any order
        row, cache = self._call(token_id, _fork(state.cache if nearest is None else nearest.cache), hidden, True)
        state.nodes[node] = _Node(token_id, cache, len(ancestors))
        return row

    def _call(self, token_id: int, cache: Any, hidden: bool, logits: bool) -> tuple[_Row, Any]:
        """One token after `cache` (which transformers changes in place)."""
        using = ROWS.set(ALL_ROWS if logits else WITHOUT_LOGITS)
        try:
            with self._one_caller:
                for rope in self._ropes:
                    rope.restore()
                out = self._module(
                    input_ids=torch.tensor([[token_id]], device=self.device),
                    use_cache=True,
                    output_hidden_states=hidden,
                    **{self._cache_name: cache},
                )
        finally:
            ROWS.reset(using)
        states = tuple(layer[0, -1].float() for layer in out.hidden_states) if hidden else ()
        return _Row(out.logits[0].float(), states), getattr(out, self._cache_name)


class _Rope:
    """A rotary embedding that adapts to the longest text seen, so that a row would depend on earlier calls.

    It is restored before every call, so that its frequencies follow from the row's own length alone.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        lengths = [name for name in vars(module) if name.endswith("max_seq_len_cached")]
        self._lengths = {name: getattr(module, name) for name in lengths}
        self._frequencies = {name: buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq")}

    def restore(self) -> None:
        """As it was loaded."""
        for name, value in (*self._lengths.items(), *self._frequencies.items()):
            setattr(self._module, name, value)


def _fork(cache: Any) -> Any:
    """A cache to go on with that leaves the given one as it is.

    Layers that join keys and values to new tensors share the old ones; others are copied.
    """
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return copy.deepcopy(cache)
    forked = copy.copy(cache)
    forked.layers = [copy.copy(layer) for layer in cache.layers]
    return forked


def check_hidden_layers(wanted: Sequence[int], num_layers: int) -> None:
    """Raise UnsupportedError for states that transformers does not give."""
    if any(layer >= num_layers for layer in wanted):
        raise UnsupportedError(
            f"hidden states of layers {list(wanted)} were asked for; through transformers those of layers 0 "
            f"to {num_layers - 1} can be had: choose another drafter"
        )


def vocabulary_of(module: Any) -> int:
    """Entries of its logits."""
    head, stated = module.get_output_embeddings(), int(module.config.get_text_config().vocab_size)
    return int(getattr(head, "out_features", stated))


def size_of(module: Any) -> tuple[int, int]:
    """Bytes and number of a module's weights, of which kernels may hold a part."""
    left = list(module.parameters())
    nbytes, count = sum(part.nbytes for part in left), sum(part.numel() for part in left)
    return nbytes + kernel_bytes(module), count + kernel_parameters(module)


def changes_with_length(module: Any) -> bool:
    """Whether rotations depend on the longest text that the module has seen."""
    return bool(_changing_ropes(module))


def _changing_ropes(module: Any) -> list[_Rope]:
    """Transformers' rotary embeddings of the kinds "dynamic" and "longrope", which change what they hold."""
    kinds = [(part, str(getattr(part, "rope_type", ""))) for part in module.modules()]
    return [_Rope(part) for part, kind in kinds if "dynamic" in kind or "longrope" in kind]


def cache_name(module: Any) -> str:
    """What the module calls its cache, as an argument and in what it returns; UnsupportedError without one."""
    accepted = inspect.signature(module.forward).parameters
    name = next((name for name in CACHE_NAMES if name in accepted), None)
    if name is None:
        raise UnsupportedError(
            f"{type(module).__name__} keeps no cache between tokens that forerun knows ({', '.join(CACHE_NAMES)}); "
            "choose another model"
        )
    return name


def max_position(config: Any) -> int:
    """What config.json says, MOST_POSITIONS at most; for longrope the original context, beyond which keys change."""
    sizes = [getattr(config, name, None) for name in POSITION_FIELDS]
    stated = next((size for size in sizes if isinstance(size, int) and size > 0), MOST_POSITIONS)
    if config.model_type in _AFTER_PADDING:
        stated = max(stated - (config.pad_token_id or 0) - 1, 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        original = getattr(config, "original_max_position_embeddings", None)
        stated = min(stated, original or rope.get("original_max_position_embeddings") or stated)
    return min(stated, MOST_POSITIONS)
