"""A toy language model that lives in the real KV pool, so that engine tests need no weights and hide no mistake.

Its only layer writes each token id into the pool and its logits are a hash of every visible token *as read back from
the pool*, in order. A wrong slot, mask, block table, commit or preemption therefore changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from forerun.kernels.ops import LayerKV
from forerun.models.base import CommittedPath, LayerSpec, PassOutput
from forerun.models.batch import ForwardBatch


class ToyModel:
    """`memory` last visible tokens decide the logits (0: all of them); `spread` is their standard deviation."""

    kv_specs = (LayerSpec(1, 2, torch.float32),)
    weight_bytes = 0
    num_parameters = 0

    def __init__(
        self, vocab_size: int = 24, memory: int = 3, spread: float = 2.0, salt: str = "toy", max_position: int = 256
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position = max_position
        self.num_rows_computed = 0
        self.memory = memory
        self.spread = spread
        self.salt = salt

    def forward(self, batch: ForwardBatch, kvs: Sequence[LayerKV], hidden_layers: Sequence[int] = ()) -> PassOutput:
        [kv] = kvs
        self.num_rows_computed += batch.num_rows
        blocks, offsets = (batch.slots // kv.block_size).long(), (batch.slots % kv.block_size).long()
        written = torch.stack([batch.token_ids, batch.positions], 1).float()  # [M, 2]
        kv.keys[blocks, 0, :, offsets] = written
        kv.values[blocks, 0, offsets] = written
        logits = [self.logits(tokens) for tokens in self._visible(batch, kv)]
        empty = torch.empty(0, self.vocab_size)
        hidden = {layer: batch.token_ids.float()[:, None] for layer in hidden_layers}
        return PassOutput(torch.stack(logits) if logits else empty, hidden)

    def _visible(self, batch: ForwardBatch, kv: LayerKV) -> list[list[int]]:
        """What each row that wants logits sees, in order; as lists, which a few numbers are read from quickest."""
        rows, starts = batch.rows, batch.rows.tree_starts.tolist()
        pool = kv.keys[rows.block_tables.long(), 0].tolist()  # of each sequence its blocks
        wanted = [column[batch.logit_rows].tolist() for column in (rows.seq_ids, rows.prefix_lens, rows.tree_masks)]
        found = []
        for sequence, prefix_len, mask in zip(*wanted, strict=True):
            logical = [*range(prefix_len), *(starts[sequence] + i for i in range(64) if mask >> i & 1)]
            places = [(pool[sequence][row // kv.block_size], row % kv.block_size) for row in logical]
            # a drafter's nodes may lie in any order
            seen = sorted((positions[offset], int(tokens[offset])) for (tokens, positions), offset in places)
            assert [position for position, _ in seen] == [*range(len(seen))], f"a row sees positions {seen}"
            found.append([token for _, token in seen])
        return found

    def logits(self, tokens: list[int]) -> Tensor:
        seen = tokens[-self.memory :] if self.memory else tokens
        return self.spread * hashed_normal(f"{self.salt}{seen}", self.vocab_size)

    def commit(self, paths: Sequence[CommittedPath]) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass


@lru_cache(maxsize=1 << 14)
def hashed_normal(text: str, num: int) -> Tensor:
    """Standard normal numbers that depend on the text alone -> [num]."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.randn(num, generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")))


@lru_cache(maxsize=1 << 14)
def normal_of(tokens: tuple[int, ...], num: int) -> Tensor:
    """Standard normal numbers that depend on the tokens alone -> [num]."""
    return torch.randn(num, generator=torch.Generator().manual_seed(hash(tokens) & 0x7FFFFFFF))


class NoisyToy(ToyModel):
    """A drafter for ToyModel: the same logits, disturbed."""

    def __init__(self, target: ToyModel, noise: float) -> None:
        super().__init__(target.vocab_size, target.memory, target.spread, target.salt, target.max_position)
        self._noise = noise

    def logits(self, tokens: list[int]) -> Tensor:
        return super().logits(tokens) + self._noise * normal_of(tuple(tokens[-2:]), self.vocab_size)


class LetterDetokenizer:
    """Token i is a letter; nothing is held back."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)

    def finish(self) -> str:
        return ""
