"""Chains and trees whose passes are enqueued at once on Triton's kernels are those of one pass a level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import tiny
from tests.support.drafting import context_of
from tests.support.enqueued import Enqueued

from forerun.cache.kv_cache import KVCache
from forerun.core import Request, SamplingParams
from forerun.drafters import draft_model
from forerun.kernels.triton.graphs import CudaCapture
from forerun.models.base import passes_of
from forerun.models.loader import load_model
from forerun.runtime.bind import bind
from forerun.runtime.eager import EagerRunner
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower

BLOCK_SIZE, BLOCKS_EACH, NUM = 4, 4, 2


def requests() -> list[Request]:
    made = []
    for index in range(NUM):
        params = SamplingParams(temperature=0.8 * index, max_tokens=9)
        request = Request(str(index), (5 + index, 9), params, seed=2**63 + index)
        request.block_ids = list(range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))[::-1]
        made.append(request)
    return made


@pytest.mark.parametrize(("width", "lengths"), [(1, (1, 2)), (2, (2, 3))])
def test_enqueued_drafts_are_the_levels(
    kernels: Any, device: torch.device, tmp_path: Path, width: int, lengths: tuple[int, int]
) -> None:
    folder = tiny.write_llama(tmp_path, tiny.random_layers(1))
    model: Any = load_model(folder, kernels).model
    drafted, pools = [], []
    for enqueues in (True, False):
        kvs = KVCache(kernels, model.kv_specs, BLOCKS_EACH * NUM, BLOCK_SIZE).layers
        grower = TreeGrower(kernels, True)
        drafter: Any = draft_model.build(
            context_of(draft_model.SPEC, model, kernels, grower, BLOCK_SIZE, max_draft_tokens=3, tree_width=width)
        )
        capture: Any = CudaCapture(device) if device.type == "cuda" else Enqueued()
        passes = passes_of(model)
        eager = EagerRunner(passes, kvs, BLOCK_SIZE)
        drafter.runner = bind(passes, kernels, kvs, BLOCK_SIZE, capture) if enqueues else eager
        for request in (known := requests()):
            drafter.begin(request)
        drafts = [Draft(request, length + 1) for request, length in zip(known, lengths, strict=True)]
        drafter.propose(drafts)
        drafted.append([(list(d.tree.tokens), list(d.tree.parents), list(d.survival)) for d in drafts])
        pools.append(kvs[0])
    assert [tree[:2] for tree in drafted[0]] == [tree[:2] for tree in drafted[1]]
    assert [len(tokens) - 1 for tokens, *_ in drafted[0]] == list(lengths)
    for own, other in zip(drafted[0], drafted[1], strict=True):
        assert own[2] == pytest.approx(other[2], abs=1e-5)
    assert torch.equal(pools[0].keys, pools[1].keys) and torch.equal(pools[0].values, pools[1].values)
