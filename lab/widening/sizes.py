"""Which sizes a widened model gets, and where the entries of the small one lie in it.

Knows: sizes, head groups, indices. Does not know: tensors, names, files.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from forerun.bench.shapes import Shape
from forerun.errors import ConfigError
from forerun.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that widening changes."""

    hidden_size: int
    num_layers: int
    ffn_size: int
    num_q: int
    num_kv: int

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.num_q // self.num_kv

    @staticmethod
    def of(config: ModelConfig) -> Sizes:
        """A model's own."""
        heads = config.heads
        return Sizes(
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            ffn_size=config.ffn_size,
            num_q=heads.num_q,
            num_kv=heads.num_kv,
        )


OPTIONS = {
    "hidden_size": "--hidden-size",
    "num_layers": "--layers",
    "ffn_size": "--ffn-size",
    "num_q": "--heads",
    "num_kv": "--kv-heads",
}


def choose_sizes(config: ModelConfig, shape: Shape | None, given: dict[str, int | None]) -> Sizes:
    """Sizes given one by one, else the shape's, else the model's own; raises ConfigError for what cannot be."""
    own = Sizes.of(config)
    base = own if shape is None else _shape_sizes(config, shape)
    chosen = {field.name: given.get(field.name) or getattr(base, field.name) for field in fields(Sizes)}
    if given.get("num_q") and not given.get("num_kv"):
        chosen["num_kv"] = max(1, chosen["num_q"] * base.num_kv // base.num_q)
    sizes = Sizes(**chosen)
    for name, option in OPTIONS.items():
        if getattr(sizes, name) < getattr(own, name):
            raise ConfigError(
                f"{option} {getattr(sizes, name)} is less than the model's {getattr(own, name)}; a model can only be "
                "widened"
            )
    if sizes.num_q % sizes.num_kv:
        raise ConfigError(f"--heads {sizes.num_q} is not a multiple of --kv-heads {sizes.num_kv}; give ones that fit")
    return sizes


def _shape_sizes(config: ModelConfig, shape: Shape) -> Sizes:
    if shape.config.heads.head_dim != config.heads.head_dim:
        raise ConfigError(
            f"{shape.name} has heads of {shape.config.heads.head_dim} entries, the model of {config.heads.head_dim}, "
            "which cannot change; give --hidden-size, --layers, --ffn-size, --heads and --kv-heads instead"
        )
    return Sizes.of(shape.config)


def is_exact(old_hidden: int, new_hidden: int) -> bool:
    """Whether the factor of the norms, sqrt(new / old), is a power of two: then every number stays what it was."""
    times, rest = divmod(new_hidden, old_hidden)
    return rest == 0 and times & (times - 1) == 0 and times.bit_length() % 2 == 1


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a tensor: where each of its entries comes from, -1 for new ones."""

    origin: Tensor  # [size] int64
    old_size: int

    @property
    def size(self) -> int:
        """Entries after widening."""
        return len(self.origin)

    @property
    def kept(self) -> Tensor:
        """Where the old entries are now, ascending -> [num kept] int64."""
        return (self.origin >= 0).nonzero().flatten()

    def all_new(self) -> Axis:
        """The same size with nothing old in it."""
        return Axis(torch.full_like(self.origin, -1), 0)


def appended(old_size: int, new_size: int) -> Axis:
    """The old entries first, new ones behind."""
    origin = torch.full((new_size,), -1)
    origin[:old_size] = torch.arange(old_size)
    return Axis(origin, old_size)


def joined(axes: tuple[Axis, ...]) -> Axis:
    """Several axes one behind the other, before as after."""
    origins, first = [], 0
    for axis in axes:
        origins.append(torch.where(axis.origin >= 0, axis.origin + first, -1))
        first += axis.old_size
    return Axis(torch.cat(origins), first)


def head_axes(old: Sizes, new: Sizes, head_dim: int) -> tuple[Axis, Axis]:
    """Query and key-value heads in their new order, entry by entry.

    A key-value head keeps its query heads. If the new groups are smaller than the old, it is repeated for them.
    """
    old_group, new_group = old.group, new.group
    copies = -(-old_group // new_group)
    if old.num_kv * copies > new.num_kv:
        raise ConfigError(
            f"{old.num_kv} key-value heads with {old_group} query heads each do not fit into --kv-heads {new.num_kv} "
            f"with {new_group} each: at least {old.num_kv * copies} are needed"
        )
    query, key = [-1] * new.num_q, [-1] * new.num_kv
    for head in range(old.num_q):
        group, member = divmod(head, old_group)
        place = group * copies + member // new_group
        query[place * new_group + member % new_group] = head
        key[place] = group
    return _by_entry(query, old.num_q, head_dim), _by_entry(key, old.num_kv, head_dim)


def _by_entry(heads: list[int], num_old: int, head_dim: int) -> Axis:
    first = torch.tensor(heads)[:, None] * head_dim  # [heads, 1]; negative for new ones
    entries = first + torch.arange(head_dim)  # [heads, D]
    return Axis(torch.where(first >= 0, entries, -1).flatten(), num_old * head_dim)
