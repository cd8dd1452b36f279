"""Who has which rows of a model that several ranks compute together, and which models they can.

Knows: heads, and other things that are shared out whole; what does not divide. Does not know: tensors, how ranks
exchange (`kernels.ranks`).

Every matrix is shared by its outputs. Of queries, keys, values and recurrent states a rank has whole heads; of
feed-forward parts inner entries; of output projections, the output layer and the embedding an even share of rows.
What is small, such as norms and routers, every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.kernels.ops import HeadLayout
from forerun.kernels.ranks import Ranks
from forerun.kernels.recurrent_ops import DeltaHeads
from forerun.models.config import ModelConfig
from forerun.models.recurrent_dims import DeltaDims, MambaDims

MAX_RANKS = 64


class Piece(NamedTuple):
    """Rows of a matrix that belong to things of one kind, and those of this rank's things."""

    rows: int
    own: slice


def rows_of(pieces: Sequence[Piece]) -> Tensor:
    """This rank's rows of a matrix that consists of these pieces [R] int64."""
    found, first = list[Tensor](), 0
    for piece in pieces:
        found.append(torch.arange(first + piece.own.start, first + piece.own.stop))
        first += piece.rows
    return torch.cat(found)


def whole(rows: int) -> Piece:
    """Rows that every rank has."""
    return Piece(rows, slice(0, rows))


def even(ranks: Ranks, count: int, size: int = 1) -> Piece:
    """`count` things of `size` rows each, of which each rank has as many."""
    return of_things(ranks.share(count), count, size)


def of_things(own: slice, count: int, size: int) -> Piece:
    """`count` things of `size` rows each, of which this rank has `own`."""
    return Piece(count * size, slice(own.start * size, own.stop * size))


class HeadShare(NamedTuple):
    """The heads of one attention layer that a rank has."""

    heads: HeadLayout  # how many, and their sizes
    queries: slice  # of all query heads
    keys: slice  # of all key heads; where there are fewer of them than ranks, several have the same one


def share_heads(ranks: Ranks, heads: HeadLayout) -> HeadShare:
    """The query heads of this rank, and the key heads that they read."""
    queries, share = ranks.share(heads.num_q), heads.num_q // heads.num_kv
    keys = slice(queries.start // share, -(-queries.stop // share))
    own = heads._replace(num_q=queries.stop - queries.start, num_kv=keys.stop - keys.start)
    return HeadShare(own, queries, keys)


def share_delta_heads(ranks: Ranks, heads: DeltaHeads) -> tuple[DeltaHeads, slice, slice]:
    """The heads of this rank, of recurrent layers: how many; which of the heads of keys, and of those of values.

    Where there are fewer heads of keys than ranks (Mamba's groups), several have the same one.
    """
    values = ranks.share(heads.num_values)
    share = heads.num_values // heads.num_keys
    keys = slice(values.start // share, -(-values.stop // share))
    own = heads._replace(num_keys=keys.stop - keys.start, num_values=values.stop - values.start)
    return own, keys, values


def check_shares(config: ModelConfig, size: int) -> None:
    """Raise ConfigError if so many ranks cannot share the model, saying how many could."""
    if size == 1:
        return
    counts = _counts(config)
    fits = [degree for degree in range(1, MAX_RANKS + 1) if all(_divides(degree, *pair) for pair in counts.values())]
    if size in fits:
        return
    what, (count, group) = next(((what, pair) for what, pair in counts.items() if not _divides(size, *pair)))
    raise ConfigError(
        f"tensor parallel {size} does not divide this {config.model_type} model, which has {count} {what}"
        + (f" for {group} heads of keys" if group > 1 else "")
        + f"; degrees that do: {', '.join(map(str, fits))}"
    )


def _counts(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """What must be shared out evenly: how many there are, and how many heads of keys they read."""
    counts: dict[str, tuple[int, int]] = {}
    for layer, shape in enumerate(config.shapes):
        if config.has_mixer(layer) and not config.is_recurrent(layer):
            heads = shape.heads
            name = "query heads" if config.latents is None else "heads"
            counts.setdefault(f"{name}{f' in layer {layer}' if counts else ''}", (heads.num_q, heads.num_kv))
    dims = config.recurrent
    if isinstance(dims, DeltaDims | MambaDims):
        counts["recurrent heads"] = (dims.heads.num_values, dims.heads.num_keys)
    return counts


def _divides(size: int, count: int, group: int) -> bool:
    """Whether `size` ranks get as many of `count` heads each, which read whole groups or parts of one."""
    return count % size == 0 and (group % size == 0 or size % group == 0)
