"""Who owns which block of the KV pool.

Knows: free blocks, reference counts. Does not know: tensors, tokens, requests. Invariant: free + used = total.
"""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks-1, each with a count of its owners."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks somebody owns."""
        return self.num_blocks - len(self._free)

    def allocate(self, num: int) -> list[int] | None:
        """`num` blocks with one owner each, or None (and nothing changed) when fewer are free."""
        if num > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} is free"
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take an owner from each block; a block without owners is free again."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} released twice"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is both free and owned, or neither."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, owners in enumerate(self._owners):
            assert (block in free) == (owners == 0), f"block {block} has {owners} owners but free={block in free}"
