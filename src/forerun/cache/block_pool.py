"""Who owns which block of the KV pool.

Knows: free blocks, reference counts, which blocks are worth keeping when their last owner leaves. Does not know:
tensors, tokens, requests, why a block is kept. Invariant: free + cached + used = total.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1, each with a count of its owners.

    A block marked by `keep` does not become free with its last owner: it is *cached*, and reused only when
    no block is free, the least recently released first. `on_evict` is told before that happens.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] | None = None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks
        self._kept = bytearray(num_blocks)  # 1: the contents outlive the last owner
        self._cached: OrderedDict[int, None] = OrderedDict()  # kept, without owner; least recently released first

    @property
    def num_free(self) -> int:
        """Blocks without owner whose contents are not cached."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without owner whose contents are cached for later requests."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that requests own."""
        return self.num_blocks - self.num_available

    def is_cached(self, block: int) -> bool:
        """Whether the block is kept and has no owner."""
        return block in self._cached

    def num_owners(self, block: int) -> int:
        """The block's number of owners."""
        return self._owners[block]

    def allocate(self, num: int) -> list[int] | None:
        """`num` blocks with one owner each, or None (and nothing changed) when fewer are available."""
        if num > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block, which is owned or cached."""
        for block in blocks:
            if self._owners[block] == 0:
                assert block in self._cached, f"block {block} is free"
                del self._cached[block]
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove an owner from each block, last block first; a block without owners is cached if kept, else free."""
        for block in reversed(blocks):
            assert self._owners[block] > 0, f"block {block} released twice"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if self._kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """From now on the contents of this owned block outlive its owners."""
        assert self._owners[block] > 0, f"block {block} has no owner"
        assert not self._kept[block], f"block {block} is kept already"
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """The contents of this cached block are not wanted any more: it is free."""
        del self._cached[block]
        self._kept[block] = 0
        self._free.append(block)

    def is_kept(self, block: int) -> bool:
        """Whether the contents of the block outlive its owners."""
        return bool(self._kept[block])

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is not exactly one of free, cached and owned."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._cached.keys(), "a block is both free and cached"
        for block, owners in enumerate(self._owners):
            unowned = block in free or block in self._cached
            assert unowned == (owners == 0), f"block {block} has {owners} owners but unowned={unowned}"
            assert not (block in free and self._kept[block]), f"block {block} is free but kept"
            assert self._kept[block] or block not in self._cached, f"block {block} is cached but not kept"
        assert self.num_free + self.num_cached + self.num_used == self.num_blocks
