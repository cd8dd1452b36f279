"""Keyed Gumbel sampling on the device: argmax, the k best of log p + G and their chances, without asking the host.

Knows: the definition of the noise (`forerun.kernels.philox`), ties, rows without an answer. Does not know: who draws.

The words of Philox are integers and the same everywhere; so are divisions and sums, which float64 rounds one way. Only
the two logarithms may differ in their last bit from the host's library (one unit of 2^-53 relative): a token is then
chosen otherwise only where two scores lie closer than that, about once in 10^14 draws. On one machine nothing differs.

A row is searched in parts, each by a program that keeps its k best, and a second program a row takes the best of these.
A chosen place is struck out by its id, so ties go to the lower id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE, NoiseKeys
from forerun.kernels.triton.common import EXACT, power_of_two

PART = 2048  # tokens a program looks at
LEAST_PART = 16
FAR = tl.constexpr(1 << 62)  # behind every token id


def gumbel_argmax(logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
    """See `Kernels.gumbel_argmax`."""
    return gumbel_topk(logits, temperatures, keys, 1)[0][:, 0]


def gumbel_topk(logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int) -> tuple[Tensor, Tensor]:
    """See `Kernels.gumbel_topk`; temperatures and keys may lie on the host, then they go over in one copy."""
    return _best(logits, temperatures, keys, k, k, judges=False)


def gumbel_chances(logits: Tensor, temperatures: Tensor, keys: NoiseKeys, width: int) -> tuple[Tensor, Tensor]:
    """See `Kernels.gumbel_chances`; temperatures and keys as in `gumbel_topk`."""
    return _best(logits, temperatures, keys, width, max(width, NUM_RIVALS), judges=True)


def _best(
    logits: Tensor, temperatures: Tensor, keys: NoiseKeys, k: int, num_ranks: int, judges: bool
) -> tuple[Tensor, Tensor]:
    """The k best of so many that are looked for, with their scores or log chances."""
    (num_rows, vocab_size), device = logits.shape, logits.device
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    scores = torch.empty(num_rows, k, dtype=torch.float64, device=device)
    if not num_rows:
        return ids, scores
    part = min(PART, power_of_two(vocab_size, LEAST_PART))
    num_parts, kept = triton.cdiv(vocab_size, part), min(num_ranks, part)
    part_ids = torch.empty(num_rows, num_parts * kept, dtype=torch.int64, device=device)
    part_scores = torch.empty(num_rows, num_parts * kept, dtype=torch.float64, device=device)
    broken = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    _best_of_part[(num_rows, num_parts)](
        logits.contiguous(), _on_device(temperatures, keys, device), part_ids, part_scores, broken, num_rows,
        VOCAB=vocab_size, PART=part, KEPT=kept, **EXACT,
    )  # fmt: skip
    _best_of_row[(num_rows,)](
        part_ids, part_scores, broken, ids, scores,
        K=k, RANKS=num_ranks, JUDGES=judges, RIVALS=NUM_RIVALS, SCALE=RIVALS_SCALE,
        LANES=power_of_two(num_ranks), NUM=num_parts * kept, BLOCK=power_of_two(num_parts * kept),
        NUM_PARTS=num_parts, PARTS=power_of_two(num_parts), **EXACT,
    )  # fmt: skip
    return ids, scores


def _on_device(temperatures: Tensor, keys: NoiseKeys, device: torch.device) -> Tensor:
    """Temperatures, by their bits, and keys -> [4, R] int64."""
    columns = torch.stack([temperatures.contiguous().view(torch.int64), *keys])
    if columns.device == device:
        return columns
    return (columns.pin_memory() if device.type == "cuda" else columns).to(device, non_blocking=True)


@triton.jit
def gumbel_noise(seed, position, stream, first, NUM: tl.constexpr):
    """The noise of tokens first .. first + NUM - 1, `first` a multiple of 4 -> [NUM] float64."""
    counters = (first // 4 + tl.arange(0, NUM // 4)).to(tl.uint32)
    zeros = tl.zeros_like(counters)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = tl.philox(seed, counters, zeros + low, zeros + high, zeros + (stream & 0xFFFFFFFF).to(tl.uint32))
    words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))  # [NUM], in the order of the tokens
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(1.0 - uniform))  # 1 - v is exact, so this is log1p(-v)


@triton.jit(do_not_specialize=["num_rows"])
def _best_of_part(
    logits, columns, part_ids, part_scores, broken, num_rows,
    VOCAB: tl.constexpr, PART: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)  # [PART]
    values = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
    fine = values < float("inf")  # neither NaN nor infinite
    tl.store(broken + row * tl.num_programs(1) + part, tl.max((fine == 0).to(tl.int32), axis=0))
    scores = tl.where(fine, values, float("-inf")).to(tl.float64)
    temperature = tl.load(columns + row).to(tl.float64, bitcast=True)
    if temperature > 0.0:
        seed, position = tl.load(columns + num_rows + row), tl.load(columns + 2 * num_rows + row)
        noise = gumbel_noise(seed, position, tl.load(columns + 3 * num_rows + row), part * PART, PART)
        scores = scores / temperature + noise
    ids = ids.to(tl.int64)
    place = (row * tl.num_programs(1) + part) * KEPT
    for rank in range(KEPT):
        best = tl.max(scores, axis=0)
        chosen = tl.min(tl.where(scores == best, ids, FAR), axis=0)
        tl.store(part_ids + place + rank, chosen)
        tl.store(part_scores + place + rank, best)
        scores = tl.where(ids == chosen, float("-inf"), scores)


@triton.jit
def _best_of_row(
    part_ids, part_scores, broken, ids_out, scores_out,
    K: tl.constexpr, RANKS: tl.constexpr, JUDGES: tl.constexpr, RIVALS: tl.constexpr, SCALE: tl.constexpr,
    LANES: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts, places, ranks = tl.arange(0, PARTS), tl.arange(0, BLOCK), tl.arange(0, LANES)
    bad = tl.max(tl.load(broken + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=0), axis=0) != 0
    scores = tl.load(part_scores + row * NUM + places, mask=places < NUM, other=float("-inf"))
    ids = tl.load(part_ids + row * NUM + places, mask=places < NUM, other=-1)
    scores = tl.where(bad, float("-inf"), scores)
    best_ids = tl.full([LANES], -1, tl.int64)
    best_scores = tl.full([LANES], float("-inf"), tl.float64)
    for rank in range(RANKS):
        best = tl.max(scores, axis=0)
        chosen = tl.min(tl.where(scores == best, ids, FAR), axis=0)
        best_ids = tl.where(ranks == rank, tl.where(best > float("-inf"), chosen, -1), best_ids)
        best_scores = tl.where(ranks == rank, best, best_scores)
        scores = tl.where(ids == chosen, float("-inf"), scores)
    if JUDGES:
        best_scores = _log_chances(best_scores, ranks, RIVALS, SCALE)
    tl.store(ids_out + row * K + ranks, best_ids, mask=ranks < K)
    tl.store(scores_out + row * K + ranks, best_scores, mask=ranks < K)


@triton.jit
def _log_chances(scores, ranks, RIVALS: tl.constexpr, SCALE: tl.constexpr):
    """How far scores, best first, lead the rivals' among them; -inf where a score is."""
    scaled = scores / SCALE
    most = tl.max(scaled, axis=0)
    most = tl.where(most > float("-inf"), most, 0.0)
    total = tl.sum(tl.where(ranks < RIVALS, tl.exp(scaled - most), 0.0), axis=0)
    return scaled - (most + tl.log(tl.where(total > 0.0, total, 1.0)))
