"""Chains of drafts whose passes are enqueued at once on Triton's kernels are those of one pass a level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.models.test_device_chains import Enqueued
from tests.support import tiny

from forerun.cache.kv_cache import KVCache
from forerun.core import Request, SamplingParams
from forerun.drafters.draft_model import DraftModelDrafter
from forerun.kernels.triton.graphs import CudaCapture
from forerun.models.captured import CapturedModel
from forerun.models.loader import load_model
from forerun.speculation.growth import Draft, TreeGrower

BLOCK_SIZE, BLOCKS_EACH, LENGTHS = 4, 4, (1, 2)


def requests() -> list[Request]:
    made = []
    for index in range(len(LENGTHS)):
        params = SamplingParams(temperature=0.8 * index, max_tokens=9)
        request = Request(str(index), (5 + index, 9), params, seed=2**63 + index)
        request.block_ids = list(range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))[::-1]
        made.append(request)
    return made


def test_enqueued_chains_are_the_levels(kernels: Any, device: torch.device, tmp_path: Path) -> None:
    folder = tiny.write_llama(tmp_path, tiny.random_layers(1))
    model: Any = load_model(folder, kernels).model
    drafted, pools = [], []
    for enqueues in (True, False):
        kvs = KVCache(kernels, model.kv_specs, BLOCKS_EACH * len(LENGTHS), BLOCK_SIZE).layers
        drafter = DraftModelDrafter(model, TreeGrower(kernels, True), kernels, BLOCK_SIZE, 4, 1, 64)
        capture: Any = CudaCapture(device) if device.type == "cuda" else Enqueued()
        drafter._kvs, drafter._model = kvs, CapturedModel(model, kernels, capture, kvs) if enqueues else model
        for request in (known := requests()):
            drafter.begin(request)
        drafts = [Draft(request, length + 1) for request, length in zip(known, LENGTHS, strict=True)]
        drafter.propose(drafts)
        drafted.append([list(draft.tree.tokens) for draft in drafts])
        pools.append(kvs[0])
    assert drafted[0] == drafted[1] and [len(tokens) for tokens in drafted[0]] == [2, 3]
    assert torch.equal(pools[0].keys, pools[1].keys) and torch.equal(pools[0].values, pools[1].values)
