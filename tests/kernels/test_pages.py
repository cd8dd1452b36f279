"""Memory for KV pools: empty, of any shape, in huge pages and on all memory nodes where there are such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.kernels import pages

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SIZE = 16 << 20


def facts_of(address: int, path: Path) -> dict[str, str]:
    """What smaps says of the mapping at this address."""
    inside, facts = False, {}
    for line in path.read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            begin, end = (int(number, 16) for number in head.split("-"))
            inside = begin <= address < end
        elif inside:
            facts[head] = rest[0]
    return facts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", [(3, 2, 8, 16), (3, 1, 0, 16), (1,)])
def test_zeros_of_any_shape_that_can_be_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = pages.zeros(shape, dtype)
    assert made.dtype is dtype and made.shape == shape and made.is_contiguous() and not bool(made.any())
    assert bool(made.fill_(1).all())


@pytest.mark.skipif(not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages")
def test_large_memory_lies_in_huge_pages() -> None:
    made = pages.zeros((SIZE,), torch.uint8)
    facts = facts_of(made.data_ptr() + SIZE // 2, Path("/proc/self/smaps"))
    assert int(facts["Rss:"]) >= SIZE // 1024, "touched at once"
    if int(facts["AnonHugePages:"]) == 0:
        pytest.skip("no huge page was free")
    assert int(facts["AnonHugePages:"]) >= SIZE // 1024 // 2


def test_memory_is_spread_over_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    take_hint = pytest.importorskip("forerun.kernels.cpu._native").spread_over_nodes
    maps = Path("/proc/self/numa_maps")
    hinted: list[tuple[int, list[int]]] = []

    def spread(address: int, size: int, nodes: list[int]) -> None:
        hinted.append((address, nodes))
        if not maps.exists() or not take_hint(address, size, [0]):
            pytest.skip("this system has no memory nodes")

    monkeypatch.setattr(pages, "_nodes", lambda: [0, 1])
    monkeypatch.setattr("forerun.kernels.cpu._native.spread_over_nodes", spread)
    made = pages.zeros((SIZE,), torch.uint8)
    assert hinted == [(made.data_ptr(), [0, 1])]
    mapped = {int(line.split()[0], 16): line.split()[1] for line in maps.read_text().splitlines()}
    assert mapped[max(begin for begin in mapped if begin <= made.data_ptr())].startswith("interleave")
