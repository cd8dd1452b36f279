"""Paged attention in Triton: against softmax in float64, and the same bits in every batch, tree and layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.cases import (
    KV_DTYPES,
    AttentionCase,
    attention_case,
    attention_truth,
    laid_out_plainly,
    rms_error,
    spoil,
)
from tests.kernels.triton.support import ONE_KV_HEAD, SMALL, rows_of_one_sequence, run
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import ATTENTION_SPLIT, HeadLayout, LayerKV

FLOAT, BRAIN, INT8 = KV_DTYPES
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter


def check_error(case: AttentionCase, found: Tensor, window: int = 0) -> None:
    exact, torchs = attention_truth(case, window=window)
    assert rms_error(found, exact) <= 2 * rms_error(torchs, exact) + 1e-8


@pytest.mark.parametrize(
    ("heads", "block_size", "dtype", "window", "cap"),
    [
        (HeadLayout(3, 1, 40, 40), 8, FLOAT, 300, 0.7),  # padded heads, a window wider than what there is
        (HeadLayout(2, 2, 8, 8), 4, INT8, 20, 0.5),
        (HeadLayout(8, 1, 128, 64), 32, BRAIN, 100, 0.0),
        (HeadLayout(14, 2, 16, 16), 12, FLOAT, -1, 0.0),
        (HeadLayout(20, 1, 16, 16), 16, INT8, -30, 0.0),  # more heads than a tile has lanes
        (HeadLayout(1, 1, 256, 64), 16, BRAIN, 1, 0.0),
    ],
)
def test_error_is_at_most_twice_torchs(
    kernels: Any, heads: HeadLayout, block_size: int, dtype: torch.dtype, window: int, cap: float
) -> None:
    case = attention_case([30, 258], num_nodes=2, heads=heads, block_size=block_size, dtype=dtype)
    case = replace(case.pick(torch.tensor([1, 3])), cap=cap)
    check_error(case, run(case, kernels, window), window)


@pytest.mark.parametrize(("dtype", "window"), [(FLOAT, 0), (BRAIN, 40), (INT8, -2)])
def test_a_row_has_the_same_bits_in_every_batch(kernels: Any, dtype: torch.dtype, window: int) -> None:
    case = attention_case([5, 255], num_nodes=3, heads=ONE_KV_HEAD, dtype=dtype)
    whole = run(case, kernels, window)
    assert torch.equal(run(case.row(5), kernels, window), whole[[5]])
    order = torch.tensor([4, 1, 5])
    assert torch.equal(run(case.pick(order), kernels, window), whole[order])


@pytest.mark.parametrize(("dtype", "window"), [(FLOAT, 0), (BRAIN, 33), (INT8, -1)])
def test_a_tree_path_has_the_bits_of_the_same_tokens_in_a_row(kernels: Any, dtype: torch.dtype, window: int) -> None:
    heads = HeadLayout(3, 1, 24, 24)
    case = attention_case([13, 250], num_nodes=12, heads=heads, block_size=8, dtype=dtype)
    chosen = torch.tensor([11, 23])
    out = run(case.pick(chosen), kernels, window)
    for index, row in enumerate(chosen.tolist()):
        plain = laid_out_plainly(case, row, (16, 4)[index % 2])
        assert torch.equal(run(plain, kernels, window)[0], out[index])


@pytest.mark.parametrize("window", [0, 2, -1])
def test_a_span_has_the_bits_of_its_rows_alone(
    kernels: Any, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Neighbouring rows that share no counted key, some, or all, across a split's end; in turns and in windows."""
    from forerun.kernels.triton import attention_plan

    case = attention_case([300], num_nodes=1, heads=ONE_KV_HEAD, dtype=BRAIN)
    case = rows_of_one_sequence(case, list(range(254, 259)))
    together = run(case, kernels, window)
    check_error(case, together, window)
    assert torch.equal(run(case.row(3), kernels, window), together[[3]])
    monkeypatch.setattr(attention_plan, "FEW_ROWS", 3)  # a program looks at a window of rows
    monkeypatch.setattr(attention_plan, "WANTED_PROGRAMS", 1)  # a program takes both splits
    monkeypatch.setattr(attention_plan, "WORK_BYTES", 5000)  # so little that a turn has 4 rows
    assert torch.equal(run(case, kernels, window), together)


def test_the_work_space_is_bounded() -> None:
    pytest.importorskip("triton")
    from forerun.kernels.triton.attention_plan import WORK_BYTES, Tiling, rows_of_turn

    tiling = Tiling.of(group=4, num_kv=8)
    assert tiling == (4, 4, 8)
    assert Tiling.of(group=71, num_kv=1) == (1, 16, 5)
    row_bytes = 32 * 512 * 130 * 4  # 128k keys
    assert rows_of_turn(2048, row_bytes, tiling) * row_bytes <= WORK_BYTES
    assert rows_of_turn(2048, row_bytes, tiling) % tiling.rows == 0
    assert rows_of_turn(3, row_bytes, tiling) == 3
    assert rows_of_turn(2048, 10 * WORK_BYTES, tiling) == tiling.rows


def test_every_row_and_split_has_its_program() -> None:
    pytest.importorskip("triton")
    from forerun.kernels.triton.attention_plan import MAX_SPLITS, Tiling, grid_of, slice_of

    tiling = Tiling.of(group=4, num_kv=8)
    long = slice_of(0, 1, 128, tiling)  # one row of 32k keys: a program a split
    assert (long.stride, long.splits, grid_of(long, tiling)) == (1, 1, (1, 8, 128))
    wide = slice_of(100, 2147, 128, tiling)
    assert (wide.stride, wide.splits) == (4, MAX_SPLITS) and grid_of(wide, tiling) == (512, 8, 16)
    for num_rows, num_splits in ((65, 7), (64, 300), (513, 33)):
        part = slice_of(0, num_rows, num_splits, tiling)
        grid = grid_of(part, tiling)
        assert grid[0] * part.stride >= num_rows and grid[2] * part.splits >= num_splits


def test_the_last_of_64_nodes_uses_the_sign_bit(kernels: Any) -> None:
    case = attention_case([10], num_nodes=64, heads=SMALL)
    masks = case.rows.tree_masks.clone()
    masks[63] = -1  # a chain of 64
    masks[40] = -(1 << 63) | 5
    case = replace(case, rows=replace(case.rows, tree_masks=masks)).pick(torch.tensor([0, 40, 63]))
    check_error(case, run(case, kernels))


@pytest.mark.parametrize("dtype", [FLOAT, INT8])
def test_garbage_in_unseen_slots_does_not_matter(kernels: Any, dtype: torch.dtype) -> None:
    case = attention_case([21, 258], num_nodes=1, heads=ONE_KV_HEAD, dtype=dtype)
    clean = run(case, kernels)
    seen = torch.zeros(case.kv.values.shape[0], 16, dtype=torch.bool)
    for sequence, prefix in enumerate((21, 258)):
        for logical in range(prefix + 1):
            seen[int(case.rows.block_tables[sequence, logical // 16]), logical % 16] = True
    spoil(case.kv, ~seen)
    assert torch.equal(run(case, kernels), clean)


@pytest.mark.parametrize("dtype", [BRAIN, INT8])
def test_a_spoilt_key_reaches_the_rows_that_see_it_and_no_other(kernels: Any, dtype: torch.dtype) -> None:
    case = attention_case([70, 9], num_nodes=4, heads=ONE_KV_HEAD, dtype=dtype)
    chain = torch.tensor([1, 3, 7, 15, 1, 3, 7, 15])
    case = replace(case, rows=replace(case.rows, tree_masks=chain))
    clean = run(case, kernels)
    block, offset = divmod(72, 16)  # node 2 of the first sequence
    where = torch.zeros(case.kv.values.shape[0], 16, dtype=torch.bool)
    where[int(case.rows.block_tables[0, block]), offset] = True
    spoil(case.kv, where)
    dirty = run(case, kernels)
    assert dirty[2:4].isnan().all()
    assert torch.equal(dirty[[0, 1, 4, 5, 6, 7]], clean[[0, 1, 4, 5, 6, 7]])


def test_nan_stays_in_its_row(kernels: Any) -> None:
    case = attention_case([70], num_nodes=4, heads=SMALL)
    clean = run(case, kernels)
    case.qkv[2] = torch.nan
    dirty = run(case, kernels)
    assert dirty[2].isnan().all()
    assert torch.equal(dirty[[0, 1, 3]], clean[[0, 1, 3]])


def test_extreme_scores(kernels: Any) -> None:
    case = attention_case([300], num_nodes=2, heads=SMALL)
    case.qkv.mul_(100)
    exact, torchs = attention_truth(case)
    assert rms_error(run(case, kernels), exact) <= 2 * rms_error(torchs, exact) + 1e-7


def test_what_cannot_be_read_is_refused(kernels: Any) -> None:
    case = attention_case([5], num_nodes=1, heads=SMALL)
    with pytest.raises(KernelError, match="float32, bfloat16 or int8"):
        run(replace(case, kv=LayerKV(case.kv.keys.half(), case.kv.values.half())), kernels)
    with pytest.raises(KernelError, match="pool of latents"):
        run(replace(case, kv=LayerKV.zeros(4, 1, 16, 16, FLOAT, latent=True)), kernels)


def test_the_split_is_the_contracts() -> None:
    pytest.importorskip("triton")
    from forerun.kernels.triton.attention_plan import TILE_LANES
    from forerun.kernels.triton.attention_tiles import LANES, SPLIT

    assert SPLIT.value == ATTENTION_SPLIT and LANES.value == TILE_LANES


@pytest.mark.parametrize(("dtype", "window"), [(FLOAT, 0), (BRAIN, 40)])
def test_sinks_are_one_more_score(kernels: Any, dtype: torch.dtype, window: int) -> None:
    case = attention_case([5, 300], num_nodes=4, heads=ONE_KV_HEAD, dtype=dtype)
    case = replace(case, sinks=torch.tensor([-2.0, 0.0, 3.0, 80.0]))
    whole = run(case, kernels, window)
    check_error(case, whole, window)
    for row in (1, 7):
        assert torch.equal(run(case.row(row), kernels, window), whole[[row]])


def test_chunks_are_refused(kernels: Any) -> None:
    with pytest.raises(KernelError, match="attention in chunks"):
        run(replace(attention_case([5], num_nodes=1, heads=ONE_KV_HEAD), chunk=4), kernels)
