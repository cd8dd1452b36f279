"""Small integers in 32-bit words, one after the other, the lowest bits first.

Knows: the bit stream GPTQ, AWQ and compressed-tensors files share. A word boundary may cut an integer (3 bits: 32 in
three words). Does not know: which tensors are packed so, nor along which dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """Words that `count` integers of `bits` bits fill."""
    return -(-count * bits // WORD_BITS)


def as_bytes(words: Tensor) -> Tensor:
    """A copy of words [R, W] int32 (in any strides) as [R, 4 * W] uint8, the lowest byte of a word first."""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` integers of every row: words [R, W] int32 -> [R, count] uint8."""
    stream = as_bytes(words)  # [R, 4 * W]
    if 8 % bits == 0:
        chunks = stream
    else:  # eight integers fill `bits` bytes
        whole = torch.nn.functional.pad(stream, (0, -stream.shape[1] % bits))
        chunks = _joined_fields(whole.to(torch.int32 if bits < 4 else torch.int64), bits, 8)
    per_chunk, mask = 8 // bits if 8 % bits == 0 else 8, (1 << bits) - 1
    fields = torch.empty(*chunks.shape, per_chunk, dtype=torch.uint8)  # [R, chunks, per_chunk]
    for index in range(per_chunk):
        fields[..., index] = (chunks >> (index * bits)) & mask
    return fields.flatten(1)[:, :count].contiguous()


def pack(codes: Tensor, bits: int) -> Tensor:
    """The inverse: codes [R, C] of values below 2 ** bits -> [R, words_for(C)] int32, the last word filled with 0."""
    rows, count = codes.shape
    whole = torch.nn.functional.pad(codes.to(torch.uint8).contiguous(), (0, -count % WORD_BITS))
    if 8 % bits == 0:
        stream = _joined_fields(whole, 8 // bits, bits)
    else:  # eight integers fill `bits` bytes
        chunks = _joined_fields(whole.to(torch.int32 if bits < 4 else torch.int64), 8, bits)  # [R, chunks]
        stream = ((chunks[..., None] >> torch.arange(0, 8 * bits, 8)) & 255).to(torch.uint8)  # [R, chunks, bits]
    words = stream.reshape(rows, -1).view(torch.int32)  # [R, W]
    return words[:, : words_for(count, bits)].contiguous()


def _joined_fields(fields: Tensor, count: int, bits: int) -> Tensor:
    """Every `count` neighbours of [R, C] as one integer of the same type, `bits` bits each -> [R, C / count]."""
    parts = fields.view(len(fields), -1, count)
    joined = parts[..., 0].clone()
    for index in range(1, count):
        joined |= parts[..., index] << (bits * index)
    return joined
