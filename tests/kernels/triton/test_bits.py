"""Bits of tree masks counted and found on the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1, max_size=4))
def test_bits_are_counted_and_found(device: torch.device, masks: list[int]) -> None:
    pytest.importorskip("triton")
    from tests.kernels.triton.bit_kernels import bits_kernel

    masks = [*masks, 0, -1, 1 << 62]
    counts = torch.empty(len(masks), dtype=torch.int32, device=device)
    places = torch.empty(len(masks), 64, dtype=torch.int32, device=device)
    bits_kernel[(len(masks),)](torch.tensor(masks, device=device), counts, places)
    for mask, count, found in zip(masks, counts.tolist(), places.tolist(), strict=True):
        expected = [bit for bit in range(64) if mask >> bit & 1]
        assert count == len(expected)
        assert found[:count] == expected
