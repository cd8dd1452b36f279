"""Whether a transformers model may run over forerun's pool, found out by running it.

Knows: what a module does to its rows. Does not know: files, the engine.

Three things are asked, and a model that fails one runs row by row (`hf`):

* *What does attention ask for?* The module runs once. Its masks are read by evaluating them, since they alone say what
  transformers computes.
* *Does every operation treat a token alone?* The module runs once more, and its operations are compared with a list.
  Where a function such as tanh is computed on a tensor, passes are filled up so that it ends with a vector: torch's
  loops compute the last entries of a tensor one by one, with other roundings than those before.
* *Are the logits right, and do they have the same bits in other passes?* With the model's own weights: a text in one
  pass beside transformers' attention, at the first and at the last positions of the context; then in parts, beside
  another text, as a tree, and one row alone.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface

from forerun.errors import UnsupportedError
from forerun.kernels.ops import HeadLayout, Kernels, LayerKV
from forerun.kernels.threads import single_torch_thread
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.hf import changes_with_length, max_position
from forerun.models.hf_matrices import ONLY_SHAPES, ROWS, KernelLinear
from forerun.models.hf_pooled import ATTENTION, SITE, AttentionSite, PooledHFModel

# What transformers calls functions that look at attention and at masks, and attention without masks as in real passes.
_ASKING, _WATCHED = "forerun_asking", "forerun_watched"
_VECTORS_BYTES = 128  # torch's loops take two vectors of 64 bytes at a time, on the widest instruction set
_NUM_TOKENS = 13  # of the text that is tried: a prime, so that shapes show whether they have a token in every row
_TOLERANCE = 0.01  # of the logits' standard deviation; a wrong mask, scale or rotation changes them by more than 0.1
_KEYWORDS = ("dropout", "scaling", "sliding_window", "softcap", "s_aux", "position_ids", "output_attentions")

# Operations of torch (aten) that only move entries, or whose entries are one exactly rounded operation each.
_EXACT = """
    view _unsafe_view reshape unsqueeze squeeze transpose permute t expand slice select split split_with_sizes
    unbind cat stack clone copy_ _to_copy alias detach lift_fresh empty empty_like new_empty zeros zeros_like
    new_zeros ones ones_like new_ones full full_like fill_ arange scalar_tensor embedding index index_select gather
    repeat as_strided constant_pad_nd add add_ sub sub_ rsub mul mul_ div div_ neg abs sqrt rsqrt reciprocal relu
    clamp clamp_min clamp_max hardtanh maximum minimum where masked_fill eq ne lt gt ge le logical_and logical_or
    logical_not bitwise_and bitwise_or bitwise_not floor trunc is_same_size
"""
# Those that look at all rows at once: allowed on what follows from shapes and positions alone.
_LOOKS = "all any _local_scalar_dense"
# Functions that torch's vectors and its loops over single entries may round differently.
_ROUNDED = """
    pow exp exp2 log log1p tanh tanh_ sigmoid silu silu_ gelu erf sin cos softplus elu mish leaky_relu hardsigmoid
    hardswish addcmul log_sigmoid_forward square
"""
_REDUCTIONS = "mean sum var amax amin _softmax linalg_vector_norm"
_NORMS = "native_layer_norm _fused_rms_norm"


class _UnfitError(UnsupportedError):
    """The model runs row by row; the message is the end of a sentence that says why."""


def fit(module: Any, kernels: Kernels, dtype: torch.dtype) -> PooledHFModel:
    """The module over the pool, whose keys and values are of `dtype`; it has stand-ins for its matrices.

    Raises UnsupportedError if it cannot run so, with the module as it was.
    """
    try:
        sites, multiple = probe(module)
        with single_torch_thread(), torch.no_grad():
            tokens = _tokens(module.config.get_text_config().vocab_size)
            text, last = torch.tensor([tokens]), torch.arange(_last_start(module), _last_start(module) + _NUM_TOKENS)
            expected = module(input_ids=text, use_cache=False).logits[0]  # [T, V]
            at_end = module(input_ids=text, position_ids=last[None], use_cache=False).logits[0]  # [T, V]
            _implement(module, ATTENTION)
            model = PooledHFModel(module, kernels, sites, dtype, multiple)
            _check(model, tokens, expected, at_end)
        return model
    except Exception:
        _implement(module, "eager")
        raise


def probe(module: Any) -> tuple[list[AttentionSite], int]:
    """What attention asks for, layer by layer, and what the number of rows must be a multiple of.

    The module's attention is left as it was. Raises UnsupportedError if the module cannot run over the pool.
    """
    accepted = inspect.signature(module.forward).parameters
    if "position_ids" not in accepted or "use_cache" not in accepted:
        raise _UnfitError("positions cannot be given to it")
    if changes_with_length(module):
        raise _UnfitError("its rotations depend on the longest text")
    heads = [part for part in module.modules() if isinstance(part, KernelLinear) and part.is_head]
    if len(heads) != 1:
        raise _UnfitError("its output layer is no linear layer, of which the wanted rows could be computed")
    sites, ops = _Sites(module), _Operations()
    with sites.collected():
        _run_without_matrices(module, _ASKING)
    with ops:
        _run_without_matrices(module, _WATCHED)
    if not sites.found:
        raise _UnfitError("its attention is not handed to others")
    if ops.unknown:
        raise _UnfitError(f"it computes {', '.join(sorted(ops.unknown)[:4])}, which may mix or round rows together")
    return sites.found, ops.multiple


@torch.no_grad()
def _run_without_matrices(module: Any, attention: str) -> None:
    """One pass whose attention is computed by what transformers calls so, and leaves the module as it was."""
    before = module.config._attn_implementation
    _implement(module, attention)
    using = ROWS.set(ONLY_SHAPES)
    try:
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        positions = torch.arange(_NUM_TOKENS)[None]
        module(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        ROWS.reset(using)
        _implement(module, before)


def _implement(module: Any, name: str) -> None:
    """Have the module's attention computed by what transformers calls `name`."""
    if module.config._attn_implementation == name:
        return
    module.set_attn_implementation(name)
    if module.config._attn_implementation != name:
        raise _UnfitError("its attention is not handed to others")


class _Sites:
    """Collects what attention asks for while a module runs."""

    def __init__(self, module: Any) -> None:
        self.found: list[AttentionSite] = []
        self._positions = max_position(module.config.get_text_config())

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A block in which attention modules get their sites."""
        token = _COLLECTING.set(self)
        try:
            yield
        finally:
            _COLLECTING.reset(token)

    def add(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any) -> None:
        """One call of attention; the first keyword that asks for something unknown raises UnsupportedError."""
        if mask is None or query.shape[0] != 1:
            raise _UnfitError("its attention asks for more than causal masks and windows")
        unknown = [name for name, asked in options.items() if not _is_understood(name, asked)]
        if unknown:
            raise _UnfitError(f"its attention asks for {', '.join(unknown[:4])}")
        if key.shape != value.shape or query.shape[2:] != key.shape[2:] or query.shape[1] % key.shape[1]:
            raise _UnfitError("its keys and values have different sizes")
        scale, cap = options.get("scaling"), options.get("softcap")
        heads = HeadLayout(query.shape[1], key.shape[1], query.shape[3], rotary_dim=0)
        site = AttentionSite(
            len(self.found), heads, heads.head_dim**-0.5 if scale is None else float(scale), int(mask), float(cap or 0)
        )
        if getattr(module, SITE, None) in self.found:
            raise _UnfitError("a layer attends twice")
        setattr(module, SITE, site)
        self.found.append(site)

    def window(self, sees: Callable[..., Tensor]) -> int:
        """The window of a mask [.., query, key] -> whether it sees it; 0 for none. Raises UnsupportedError."""
        last = self._positions - 1
        zero, keys = torch.tensor(0), torch.arange(last + 1)
        counts = {}
        for query in (last, last // 2, last // 3, min(last, _NUM_TOKENS)):
            seen = torch.as_tensor(sees(zero, zero, torch.tensor(query), keys)).expand(last + 1)
            counts[query] = int(seen.sum())
            if not bool(seen[query + 1 - counts[query] : query + 1].all()):
                raise _UnfitError("its masks are not causal ones with a window")
        window = counts[last]
        if any(count != min(query + 1, window) for query, count in counts.items()):
            raise _UnfitError("its masks are not causal ones with a window")
        return 0 if window == last + 1 else window


def _is_understood(keyword: str, asked: Any) -> bool:
    """Whether attention that ignores the keyword, or follows it, is what was asked for."""
    if keyword == "is_causal":
        return asked is None or asked is True
    return keyword in _KEYWORDS or asked is None or (isinstance(asked, (bool, int, float)) and not asked)


_COLLECTING: ContextVar[_Sites] = ContextVar("collecting sites")


def _look_at_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    _COLLECTING.get().add(module, query, key, value, attention_mask, options)
    return _no_attention(module, query)


def _no_attention(_module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3]), None


def _look_at_mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> Tensor:
    """The mask's window, in a tensor of as many dimensions as masks have."""
    return torch.full((1, 1, 1, 1), _COLLECTING.get().window(mask_function), dtype=torch.int64)


AttentionInterface.register(_ASKING, _look_at_attention)
AttentionMaskInterface.register(_ASKING, _look_at_mask)
AttentionInterface.register(_WATCHED, _no_attention)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations of torch are not known to treat rows alone, and how passes must be filled up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unknown: set[str] = set()
        self.multiple = 1
        self._from_floats: dict[int, Tensor] = {}  # by id; kept, so that no other tensor gets the id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if name in _ROUNDED.split() or (name in ("add", "add_", "sub", "sub_") and (kwargs or {}).get("alpha", 1) != 1):
            self._fill_up(out)
        elif name in _LOOKS.split():
            if self._is_from_floats(args[0]):
                self.unknown.add(name)
        elif not (name in _EXACT.split() or _is_of_rows(name, args) or _is_outer_product(name, args)):
            self.unknown.add(name)
        given, made = tree_leaves((args, kwargs)), tree_leaves(out)
        if any(isinstance(part, Tensor) and self._is_from_floats(part) for part in given):
            self._from_floats.update({id(part): part for part in made if isinstance(part, Tensor)})
        return out

    def _is_from_floats(self, part: Tensor) -> bool:
        return part.is_floating_point() or id(part) in self._from_floats

    def _fill_up(self, made: Tensor) -> None:
        width, rest = divmod(made.numel(), _NUM_TOKENS)
        if rest == 0:
            vector = _VECTORS_BYTES // made.dtype.itemsize
            self.multiple = math.lcm(self.multiple, vector // math.gcd(vector, width))


def _is_of_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation reduces the last dimension, which no row but its own has a part in."""
    if not args or not isinstance(args[0], Tensor) or args[0].shape[-1:] == (_NUM_TOKENS,):
        return False
    if name in _NORMS.split():
        return len(args[1]) == 1
    where = 2 if name == "linalg_vector_norm" else 1  # behind the norm's order
    if name not in _REDUCTIONS.split() or len(args) <= where:
        return False
    dims = args[where] if isinstance(args[where], (list, tuple)) else [args[where]]
    return list(dims) in ([-1], [args[0].dim() - 1])


def _is_outer_product(name: str, args: Sequence[Any]) -> bool:
    """Whether a matrix product adds nothing up, as those that make rotations' angles."""
    return name in ("mm", "bmm") and args[0].shape[-1] == 1


def _tokens(vocab_size: int) -> list[int]:
    """The text that is tried."""
    drawn = torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    return [int(token) for token in drawn]


def _last_start(module: Any) -> int:
    """Where a text of the length that is tried begins that ends with the context; 0 if the context is shorter."""
    return max(max_position(module.config.get_text_config()) - _NUM_TOKENS, 0)


def _check(model: PooledHFModel, tokens: list[int], expected: Tensor, at_end: Tensor) -> None:
    """Raise UnsupportedError unless the model gives these logits [T, V], and the same bits in other passes.

    `expected`: of the text at the first positions; `at_end`: at the last ones, where it sees nothing but itself.
    """
    specs = [spec._replace(dtype=torch.float32) for spec in model.kv_specs]
    copies = -(-(3 * model.multiple + 1) // _NUM_TOKENS)  # of the text, for a pass of more than three times `multiple`
    kvs = [LayerKV.zeros(8 + copies, spec.num_kv_heads, spec.head_dim, 16, torch.float32) for spec in specs]

    def run(*rows: SequenceRows, shift: int = 0) -> Tensor:
        return model.forward(ForwardBatch.build(rows, 16, shift), kvs).logits

    def span(name: str, table: list[int], start: int, stop: int, of: list[int]) -> SequenceRows:
        return SequenceRows(name, table, start, of[start:stop], stop, span_logits=True)

    whole = run(span("whole", [0, 1], 0, _NUM_TOKENS, tokens))  # [T, V]
    late = run(span("late", [8], 0, _NUM_TOKENS, tokens), shift=max(model.max_position - _NUM_TOKENS, 0))  # [T, V]
    for found, wanted, where in ((whole, expected, ""), (late, at_end, " at the last positions")):
        worst = float((found - wanted).abs().max())
        if not worst <= _TOLERANCE * float(wanted.std()):
            raise _UnfitError(f"its logits would differ from transformers' by {worst:.2g}{where}")
    other, beside, apart = tokens[5:] + tokens[:5], [7, 3], [5, 2]
    parts = run(span("other", beside, 0, 7, other), span("parts", apart, 0, 4, tokens))[7:]
    nodes = (tokens[4], other[0], tokens[5], other[1], tokens[6])
    tree = SequenceRows("parts", apart, 4, (), 4, nodes, range(5), (1, 3, 5, 11, 21), (0, 1, 1, 2, 2))
    walked = run(tree, span("other", beside, 7, 8, other))[[0, 2, 4]]
    rest = run(span("parts", apart, 4, _NUM_TOKENS - 1, tokens))
    alone = run(span("parts", apart, _NUM_TOKENS - 1, _NUM_TOKENS, tokens))
    many = run(*(span(str(copy), [8 + copy], 0, _NUM_TOKENS, tokens) for copy in range(copies)))
    last = _NUM_TOKENS - 1
    short = run(SequenceRows("short", [4, 6], 0, tokens[:last], last, tokens[last:], (0,), (1,), (0,)))  # [1, V]
    if short.shape != alone.shape or not torch.equal(short, alone):
        raise _UnfitError("the logits of one row are not those asked for")
    made = torch.cat([parts, rest, alone, many, walked])
    if not torch.equal(made, torch.cat([*[whole] * (1 + copies), whole[4:7]])):
        raise _UnfitError("a row's logits depend on the other rows of its pass")
