"""attention: against plain softmax in float64, and the same bits wherever the keys lie and whoever else is there."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.kernels.cases import (
    ISAS,
    KV_DTYPES,
    AttentionCase,
    attention_case,
    attention_truth,
    cpu_kernels,
    kernels_named,
    laid_out_plainly,
    rms_error,
    spoil,
)
from torch import Tensor

from forerun.kernels.ops import HeadLayout

TILES = "avx512amx"  # adds in an order of its own where a pool of two- or one-byte entries is made of whole tiles
BACKENDS = ("reference", TILES, *ISAS)
HEADS = (
    HeadLayout(1, 1, 64, 64),
    HeadLayout(2, 1, 128, 64),
    HeadLayout(8, 8, 8, 8),
    HeadLayout(14, 2, 64, 64),
    HeadLayout(3, 1, 40, 40),
    HeadLayout(9, 1, 96, 96),
    HeadLayout(8, 1, 512, 512),
)


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("heads", HEADS)
def test_error_is_at_most_twice_torchs(isa: str, heads: HeadLayout) -> None:
    case = attention_case([1, 30, 300], num_nodes=4, heads=heads)
    exact, torchs = attention_truth(case)
    assert rms_error(case.run(kernels_named(isa)), exact) <= 2 * rms_error(torchs, exact) + 1e-8


@cache  # one for all backends
def with_truth(block_size: int, dtype: torch.dtype, window: int) -> tuple[AttentionCase, Tensor, Tensor]:
    """A case, and what it gives in float64 and in torch's float32."""
    heads = HeadLayout(4, 2, 32, 32)
    case = attention_case([3, 250, 530], num_nodes=3, heads=heads, block_size=block_size, dtype=dtype)
    return case, *attention_truth(case, window=window)


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize(
    ("block_size", "window"),
    ((4, 0), (4, 300), (8, 1), (8, -30), (12, 20), (12, -1), (16, 0), (16, -1), (32, 20), (32, 300)),
)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_block_sizes_windows_and_dtypes(isa: str, block_size: int, dtype: torch.dtype, window: int) -> None:
    case, exact, torchs = with_truth(block_size, dtype, window)
    assert rms_error(case.run(kernels_named(isa), window=window), exact) <= 2 * rms_error(torchs, exact) + 1e-8


@pytest.mark.parametrize("isa", ("reference", "avx512amx", "avx512", "avx2"))
@pytest.mark.parametrize(
    ("dtype", "window"),
    ((torch.float32, 0), (torch.float32, 40), (torch.float32, -1), (torch.int8, 0), (torch.bfloat16, 40)),
)
def test_a_row_has_the_same_bits_in_every_batch(isa: str, dtype: torch.dtype, window: int) -> None:
    kernels = kernels_named(isa)
    case = attention_case([5, 17, 120, 255, 600], num_nodes=8, dtype=dtype)
    alone = torch.cat([case.row(row).run(kernels, window=window) for row in range(40)])
    for num_rows in range(1, 41) if isa != "reference" else (1, 2, 7, 40):
        order = torch.randperm(40)[:num_rows]
        assert torch.equal(case.pick(torch.arange(num_rows)).run(kernels, window=window), alone[:num_rows])
        assert torch.equal(case.pick(order).run(kernels, window=window), alone[order])


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_capped_scores(isa: str, dtype: torch.dtype) -> None:
    case = replace(attention_case([3, 300], num_nodes=5, heads=HEADS[3], dtype=dtype), cap=0.7)
    exact, torchs = attention_truth(case, window=40)
    found = case.run(kernels_named(isa), window=40)
    assert rms_error(found, exact) <= 2 * rms_error(torchs, exact) + 1e-8
    assert rms_error(found, attention_truth(replace(case, cap=0.0), window=40)[0]) > 1e-3
    for row in (0, 7):
        assert torch.equal(case.row(row).run(kernels_named(isa), window=40)[0], found[row])
        assert torch.equal(laid_out_plainly(case, row, 8).run(kernels_named(isa), window=40)[0], found[row])
    if isa in ISAS:
        assert torch.equal(found, case.run(cpu_kernels("portable", 1), window=40))


@cache  # one for all backends
def with_paths(block_size: int, dtype: torch.dtype) -> tuple[AttentionCase, dict[int, AttentionCase]]:
    """Trees, and every seventh row of them as the end of a plain sequence in blocks of 8 or 16."""
    heads = HeadLayout(3, 1, 48, 48)
    case = attention_case([1, 13, 250, 505], num_nodes=20, heads=heads, block_size=block_size, dtype=dtype)
    return case, {row: laid_out_plainly(case, row, (8, 16)[row % 2]) for row in range(0, 80, 7)}


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize(
    ("block_size", "dtype"),
    (
        (4, torch.float32),
        (16, torch.float32),
        (16, torch.bfloat16),
        (32, torch.bfloat16),
        (4, torch.int8),
        (32, torch.int8),
    ),
)
def test_a_tree_path_has_the_bits_of_the_same_tokens_in_a_row(isa: str, block_size: int, dtype: torch.dtype) -> None:
    kernels, (case, paths) = kernels_named(isa), with_paths(block_size, dtype)
    for window in (0, 33, -1):
        out = case.run(kernels, window=window)
        for row, plain in paths.items():
            assert torch.equal(plain.run(kernels, window=window)[0], out[row])


@pytest.mark.parametrize("isa", BACKENDS)
def test_a_tree_of_64_nodes_uses_the_sign_bit(isa: str) -> None:
    case = attention_case([10], num_nodes=64, heads=HeadLayout(2, 2, 16, 16))
    masks = case.rows.tree_masks.clone()
    masks[63] = -1  # a chain of 64
    case = replace(case, rows=replace(case.rows, tree_masks=masks))
    exact, torchs = attention_truth(case)
    assert rms_error(case.run(kernels_named(isa)), exact) <= 2 * rms_error(torchs, exact) + 1e-8


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_and_thread_counts_agree_bit_by_bit(isa: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.int8, torch.int8, torch.bfloat16)
    for heads, dtype in zip((HEADS[0], HEADS[3], HEADS[4], HEADS[3], HEADS[4], HEADS[6]), dtypes, strict=True):
        case = attention_case([2, 700], num_nodes=4, heads=heads, dtype=dtype)
        expected = case.run(cpu_kernels("portable", 1))
        for threads in (1, 2, 5):
            assert torch.equal(case.run(cpu_kernels(isa, threads)), expected)
            assert torch.equal(case.row(7).run(cpu_kernels(isa, threads)), expected[7:])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int8))
@pytest.mark.parametrize("sizes", ((1, 1, 32), (14, 2, 64), (48, 2, 96), (3, 1, 128), (2, 1, 256)))
def test_tiles_agree_with_themselves_and_the_truth(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """Up to 63 query vectors in a unit, sizes of one to eight products, on any number of threads."""
    heads = HeadLayout(*sizes, sizes[2])
    case = attention_case([2, 300, 700], num_nodes=4, heads=heads, dtype=dtype)
    expected = case.run(cpu_kernels(TILES, 1))
    exact, torchs = attention_truth(case)
    assert rms_error(expected, exact) <= 2 * rms_error(torchs, exact) + 1e-8
    assert torch.equal(case.run(cpu_kernels(TILES, 3)), expected)
    for row in (0, 5, 11):
        assert torch.equal(case.row(row).run(cpu_kernels(TILES, 2))[0], expected[row])


@pytest.mark.parametrize(
    ("heads", "dtype"),
    (
        (HEADS[3], torch.float32),
        (HEADS[4], torch.bfloat16),
        (HEADS[2], torch.int8),
        (HeadLayout(2, 1, 48, 48), torch.bfloat16),
    ),
)
def test_pools_that_are_not_made_of_tiles_keep_the_common_bits(heads: HeadLayout, dtype: torch.dtype) -> None:
    case = attention_case([2, 700], num_nodes=4, heads=heads, dtype=dtype)
    assert torch.equal(case.run(cpu_kernels(TILES)), case.run(cpu_kernels("portable")))


def test_a_value_that_is_not_finite_is_for_those_who_count_it() -> None:
    """Outside a window, or behind a row, in splits that rows share: the bits of a pool without it."""
    case = attention_case([300], num_nodes=8, dtype=torch.bfloat16)
    lengths = torch.tensor([40, 258, 260, 290, 291, 292, 299, 300], dtype=torch.int32)
    case = replace(case, rows=replace(case.rows, prefix_lens=lengths, tree_masks=torch.zeros(8).long()))
    kernels = cpu_kernels(TILES)
    clean = case.run(kernels, window=35)  # row 3 counts [255, 290), row 7 [265, 300)
    for logical, bad in ((257, float("inf")), (291, float("nan")), (264, -float("inf"))):
        block, offset = divmod(logical, 16)
        spoilt = replace(case, kv=replace(case.kv, values=case.kv.values.clone()))
        spoilt.kv.values[int(case.rows.block_tables[0, block]), :, offset] = bad
        dirty = spoilt.run(kernels, window=35)
        counted = (lengths > logical) & (lengths - 35 <= logical)
        assert 0 < int(counted.sum()) < 8
        assert not dirty[counted].isfinite().all(dim=1).any()
        assert torch.equal(dirty[~counted], clean[~counted])


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_garbage_in_unseen_slots_does_not_matter(isa: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(isa)
    case = attention_case([21, 270], num_nodes=3, dtype=dtype)
    clean = case.run(kernels)
    seen = torch.zeros(case.kv.values.shape[0], 16, dtype=torch.bool)
    for sequence, prefix in enumerate((21, 270)):
        for logical in range(prefix + 3):
            seen[int(case.rows.block_tables[sequence, logical // 16]), logical % 16] = True
    spoil(case.kv, ~seen)
    assert torch.equal(case.run(kernels), clean)


@pytest.mark.parametrize("isa", BACKENDS)
def test_nan_stays_in_its_row(isa: str) -> None:
    kernels = kernels_named(isa)
    case = attention_case([40], num_nodes=4)
    clean = case.run(kernels)
    case.qkv[2] = torch.nan
    dirty = case.run(kernels)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("isa", (TILES, *ISAS))
def test_extreme_scores(isa: str) -> None:
    case = attention_case([600], num_nodes=2)
    case.qkv.mul_(100)
    exact, torchs = attention_truth(case)
    assert rms_error(case.run(cpu_kernels(isa)), exact) <= 2 * rms_error(torchs, exact) + 1e-7


def test_heads_too_wide_for_the_extension_fall_back() -> None:
    case = attention_case([20], num_nodes=2, heads=HeadLayout(1, 1, 592, 592))
    assert torch.equal(case.run(cpu_kernels()), case.run(kernels_named("reference")))


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_spoilt_key_reaches_the_rows_that_see_it_and_no_other(isa: str, dtype: torch.dtype) -> None:
    kernels = kernels_named(isa)
    case = attention_case([300, 40], num_nodes=4, dtype=dtype)
    chain = torch.tensor([1, 3, 7, 15, 1, 3, 7, 15])
    case = replace(case, rows=replace(case.rows, tree_masks=chain))
    clean = case.run(kernels)
    block, offset = divmod(302, 16)  # node 2 of the first sequence
    where = torch.zeros(case.kv.values.shape[0], 16, dtype=torch.bool)
    where[int(case.rows.block_tables[0, block]), offset] = True
    spoil(case.kv, where)
    dirty = case.run(kernels)
    assert dirty[2:4].isnan().all()
    assert torch.equal(dirty[[0, 1, 4, 5, 6, 7]], clean[[0, 1, 4, 5, 6, 7]])


@pytest.mark.parametrize("isa", BACKENDS)
def test_an_int8_cache_is_near_the_float32_cache(isa: str) -> None:
    """Codes are off by half a step at most: scores by |q| |e|, so weights by a known factor, and values by half a step.

    |out8 - out| <= (e^(2 s) - 1) max|v| + step / 2, s the largest error of a score: scale |q|_1 (key step / 2).
    """
    exact, coded = (attention_case([3, 290], num_nodes=4, dtype=dtype) for dtype in (torch.float32, torch.int8))
    assert coded.kv.key_scales is not None and coded.kv.value_scales is not None
    heads, scale = exact.heads, 0.02
    queries = exact.qkv[:, : heads.num_q * heads.head_dim].view(-1, heads.num_q, heads.head_dim)
    score_error = scale * queries.abs().sum(-1, keepdim=True) * float(coded.kv.key_scales.max()) / 2  # [M, Q, 1]
    bound = score_error.mul(2).expm1() * exact.kv.values.abs().max() + coded.kv.value_scales.max() / 2 + 1e-5
    difference = (coded.run(kernels_named(isa), scale) - exact.run(kernels_named(isa), scale)).view_as(queries)
    assert float(difference.abs().max()) > 0
    assert bool((difference.abs() <= bound).all())
    assert float(difference.square().mean().sqrt()) < 0.01 * float(exact.run(kernels_named(isa), scale).std())


@pytest.mark.parametrize("isa", (TILES, *ISAS))
@pytest.mark.parametrize("window", (0, 1, 3, 20, 250, -1))
def test_a_span_has_the_bits_of_its_rows_alone(isa: str, window: int) -> None:
    """Neighbouring rows that share no counted key at all, some, or all but the last ones, across a split's end."""
    kinds = ((7, 1, 24, torch.float32), (2, 2, 80, torch.int8), (5, 1, 64, torch.bfloat16), (2, 2, 32, torch.int8))
    for num_q, num_kv, size, dtype in kinds:
        heads = HeadLayout(num_q, num_kv, size, size)
        case = attention_case([300], num_nodes=40, heads=heads, dtype=dtype)
        lengths = torch.arange(241, 281, dtype=torch.int32)
        case = replace(case, rows=replace(case.rows, prefix_lens=lengths, tree_masks=torch.zeros(40).long()))
        together = case.run(cpu_kernels(isa), window=window)
        alone = torch.cat([case.row(row).run(cpu_kernels(isa), window=window) for row in range(40)])
        assert torch.equal(together, alone)
        exact, torchs = attention_truth(case, window=window)
        assert rms_error(together, exact) <= 2 * rms_error(torchs, exact) + 1e-8


SINKS = torch.tensor([-3.0, 0.0, 1.5, 4.0, -60.0, 90.0])  # beside scores of about 1
CHUNKED = [(0, SINKS), (40, SINKS), (64, None), (300, SINKS)]  # of which the second is no divisor of a split


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize(("chunk", "sinks"), CHUNKED)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_sinks_and_chunks(isa: str, chunk: int, sinks: Tensor | None, dtype: torch.dtype) -> None:
    """Against softmax with one more score; each row alone, and on a plain sequence, has the same bits."""
    kernels = kernels_named(isa)
    case = replace(attention_case([3, 38, 255, 599], num_nodes=6, dtype=dtype), chunk=chunk, sinks=sinks)
    out = case.run(kernels)
    exact, torchs = attention_truth(case)
    assert rms_error(out, exact) <= 2 * rms_error(torchs, exact) + 1e-8
    for row in (0, 5, 9, 14, 21):
        assert torch.equal(case.row(row).run(kernels)[0], out[row])
        assert torch.equal(laid_out_plainly(case, row, 8).run(kernels)[0], out[row])


@pytest.mark.parametrize("isa", BACKENDS)
def test_a_window_with_sinks(isa: str) -> None:
    case = replace(attention_case([3, 300], num_nodes=6), sinks=SINKS)
    exact, torchs = attention_truth(case, window=50)
    assert rms_error(case.run(kernels_named(isa), window=50), exact) <= 2 * rms_error(torchs, exact) + 1e-8


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("chunk", "sinks"), CHUNKED)
def test_sinks_have_the_same_bits_everywhere(isa: str, chunk: int, sinks: Tensor | None) -> None:
    case = replace(attention_case([2, 700], num_nodes=4), chunk=chunk, sinks=sinks)
    expected = case.run(cpu_kernels("portable", 1))
    for threads in (1, 2, 5):
        assert torch.equal(case.run(cpu_kernels(isa, threads)), expected)
        assert torch.equal(case.row(7).run(cpu_kernels(isa, threads)), expected[7:])


@pytest.mark.parametrize("isa", BACKENDS)
def test_a_sink_above_all_scores_leaves_nothing(isa: str) -> None:
    case = attention_case([30], num_nodes=2)
    small = replace(case, sinks=torch.full((6,), -1e4))
    assert torch.equal(small.run(kernels_named(isa)), case.run(kernels_named(isa)))
    assert not replace(case, sinks=torch.full((6,), 1e4)).run(kernels_named(isa)).any()
