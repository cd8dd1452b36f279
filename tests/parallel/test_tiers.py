"""Blocks that several ranks stored come back on all of them or on none, with the bits of one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.cache import tiered
from forerun.cache.disk import DiskTier
from forerun.cache.prefix_cache import PrefixCache
from forerun.cache.tiered import TieredPrefixes
from forerun.errors import ConfigError
from forerun.runtime.parallel.crew import FLUSH_LIMIT_S
from forerun.runtime.parallel.spilling import RankedSpill, open_tier
from tests.models import factory
from tests.parallel.test_ranks import WORKER, folder, open_llm
from tests.support import harness
from tests.support.processes import own_processes

__all__ = ["folder"]

PREFIX = random.Random(7).sample(range(3, factory.VOCAB_SIZE), 30)
PROMPTS = ([*PREFIX, 3, 4, 5], [*PREFIX[:17], 6, 7], PREFIX[:26])


@pytest.fixture(scope="module")
def kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all layouts."""
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def truth(folder: Path, kv: Path) -> list[tuple[int, ...]]:
    """What one process says, which has stored its blocks in the same folder."""
    llm = open_llm(folder, kv_disk=str(kv))
    found = [tokens for tokens, _ in ask(llm)]
    lower_of(llm).spill.flush()
    return found


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel"])
def ranked(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing(open_llm(folder, rank_timeout_s=60, rank_start_s=600, **{request.param: 2})) as llm:
        yield llm
    assert not own_processes(WORKER)


def again(llm: LLM, kv: Path, drafter: str = "none", **options: Any) -> LLM:
    """An engine with an empty pool, on the same ranks."""
    return llm.with_drafter(drafter, kv_disk=str(kv), kv_disk_gib=0.1, **options)


def lower_of(llm: LLM) -> TieredPrefixes:
    cache = llm.engine.scheduler.prefix_cache
    assert isinstance(cache, PrefixCache) and isinstance(cache.lower, TieredPrefixes)
    return cache.lower


def ask(llm: LLM) -> list[tuple[tuple[int, ...], int]]:
    """One after the other -> tokens, and how many of the prompt were not computed."""
    params = [SamplingParams(temperature=i % 2, max_tokens=12, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    outputs = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    return [(output.token_ids, output.stats.num_cached_tokens) for output in outputs]


def check(llm: LLM, truth: list[tuple[int, ...]]) -> list[int]:
    """Tokens are those of one process -> how many of each prompt were not computed."""
    found = ask(llm)
    assert [tokens for tokens, _ in found] == truth
    lower_of(llm).spill.flush()
    return [cached for _, cached in found]


def file_of(kv: Path, rank: int, tokens: list[int]) -> Path:
    """Where a rank has the block of these tokens."""
    folders = [path.parent for path in kv.rglob("about.json") if json.loads(path.read_text())["rank"][0] == str(rank)]
    [found] = [path for each in folders for path in each.rglob("*.kv") if f'"tokens":{tokens}' in header_of(path)]
    return found


def header_of(path: Path) -> str:
    content = path.read_bytes()
    return content[44 : 44 + int.from_bytes(content[40:44], "little")].decode().replace(",", ", ")


@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_another_start_finds_what_all_ranks_stored(
    ranked: LLM, folder: Path, kv: Path, truth: list[tuple[int, ...]], drafter: str
) -> None:
    """And nothing that one process stored, or ranks of another layout."""
    named = f"draft={folder}" if drafter == "draft" else drafter
    first = again(ranked, kv, named)
    cold = check(first, truth)
    assert cold[0] == 0, "blocks of another layout were read"
    second = again(ranked, kv, named)
    assert isinstance(lower_of(second).spill, RankedSpill)
    assert check(second, truth) == [32, 17, 25]
    assert lower_of(second).num_hits >= 1 and lower_of(second).counts()["disk"]["loaded_blocks"] >= 8
    if drafter == "none":
        assert lower_of(second).counts()["disk"]["stored_blocks"] == 0, "what the disk has was written again"
    small = again(ranked, kv, named, num_kv_blocks=16, max_model_len=48, max_num_batched_tokens=9)
    assert check(small, truth)[0] == 32 and check(small, truth)


def test_a_block_that_one_rank_lost_is_missing_on_all(
    ranked: LLM, tmp_path: Path, truth: list[tuple[int, ...]]
) -> None:
    """And stored again on the rank that lost it."""
    check(again(ranked, tmp_path), truth)
    victim, other = (file_of(tmp_path, rank, PREFIX[12:16]) for rank in (1, 0))
    content = victim.read_bytes()
    for damaged in (None, content[:-5] + bytes([content[-5] ^ 4]) + content[-4:], other.read_bytes()):
        if damaged is None:
            victim.unlink()
        else:
            victim.write_bytes(damaged)
        llm = again(ranked, tmp_path)
        assert check(llm, truth)[0] == 12 and victim.read_bytes() == content
        assert lower_of(llm).counts()["disk"]["corrupted_blocks"] == 0, "rank 0 has lost nothing"
    assert check(again(ranked, tmp_path), truth)[0] == 32


def test_a_rank_whose_folder_hangs_holds_up_nobody_for_long(
    ranked: LLM, tmp_path: Path, truth: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(again(ranked, tmp_path), truth)
    monkeypatch.setattr(tiered, "LONGEST_WAIT_S", 0.3)
    hanging = file_of(tmp_path, 1, PREFIX[12:16])
    hanging.unlink()
    os.mkfifo(hanging)  # who opens it waits
    llm = again(ranked, tmp_path)
    found = ask(llm)
    assert [tokens for tokens, _ in found] == truth and found[0][1] == 0
    assert len(lower_of(llm)._readings) == 1, "the rank has not answered"
    until = perf_counter() + 30
    while stat.S_ISFIFO(hanging.stat().st_mode) and perf_counter() < until:
        with suppress(OSError):  # nobody has opened it
            os.close(os.open(hanging, os.O_WRONLY | os.O_NONBLOCK))
    lower_of(llm).spill.flush()
    check(llm, truth)
    assert not lower_of(llm)._readings
    assert check(again(ranked, tmp_path), truth)[0] == 32


def test_a_prompt_is_handed_over_when_all_ranks_have_it(ranked: LLM, tmp_path: Path) -> None:
    """What one lacks is stored again on that one; if it takes nothing, the request fails."""
    llm = again(ranked, tmp_path)
    lower = lower_of(llm)
    group = harness.request(0, PREFIX, SamplingParams(max_tokens=1, ignore_eos=True), 64)
    harness.run(llm.engine, [group])
    request = group.samples[0].request
    wanted = lower._keys(request)
    assert len(wanted) == 7
    lower.hand_over([request])
    assert request.error is None and not lower.spill.lacking(wanted)
    for rank in (1, 0):
        victim = file_of(tmp_path, rank, PREFIX[4:8])
        content = victim.read_bytes()
        victim.unlink()
        assert lower.spill.lacking(wanted) == [wanted[1]]
        lower.hand_over([request])
        assert request.error is None and not lower.spill.lacking(wanted) and victim.read_bytes() == content
    files = file_of(tmp_path, 1, PREFIX[4:8]).parent
    num_left = 7 - len(list(files.glob("*.kv")))
    shutil.rmtree(files)
    files.write_text("")  # nothing can be written there
    lower.hand_over([request])
    assert num_left < 7 and f"have only {num_left} of its 7 blocks" in str(request.error)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is made of /dev/full")
def test_a_rank_whose_disk_is_full_fails_a_prompt_that_is_read_for_others(
    ranked: LLM, tmp_path: Path, truth: list[tuple[int, ...]]
) -> None:
    """Not its answer: that loads what all have and computes the rest. With room again the prompt is handed over."""
    pytest.importorskip("fastapi", reason="the extra 'server' is not installed")
    from tests.server.conftest import client_of

    asked = {"model": "mini", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12, "ignore_eos": True,
             "return_token_ids": True}  # fmt: skip

    def post(llm: LLM, prefill_only: bool = True) -> Any:
        begun = perf_counter()
        with client_of(llm, prefill_only=prefill_only) as client:
            found = client.post("/v1/completions", json=asked)
        assert perf_counter() - begun < FLUSH_LIMIT_S, "it waited for a time limit"
        return found

    def cached(answer: Any) -> int:
        assert answer.status_code == 200, answer.text
        num: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num

    assert cached(post(again(ranked, tmp_path))) == 0
    victim, reading = file_of(tmp_path, 1, PREFIX[12:16]), again(ranked, tmp_path)
    victim.unlink()
    victim.with_name(victim.name + ".new").symlink_to("/dev/full")  # what is written goes there first
    refused = post(reading)
    assert refused.status_code == 500 and "have only 7 of its 8 blocks" in refused.text
    answer = post(again(ranked, tmp_path), prefill_only=False)
    assert cached(answer) == 12 and tuple(answer.json()["choices"][0]["token_ids"]) == truth[0]
    assert victim.exists() and cached(post(again(ranked, tmp_path))) == 32


def test_a_rank_that_cannot_store_is_named(ranked: LLM, tmp_path: Path, truth: list[tuple[int, ...]]) -> None:
    llm = again(ranked, tmp_path / "kv")
    spill, tier = lower_of(llm).spill, DiskTier(tmp_path / "kv", 1 << 20, {})
    assert isinstance(spill, RankedSpill)
    tier.folder = tmp_path / "file"
    tier.folder.write_text("")
    with pytest.raises(ConfigError, match="rank 1 on .* cannot keep its part of blocks: kv_disk: cannot write in"):
        open_tier(spill._crew, spill._engine, tier, b"")
    assert check(llm, truth)


def test_a_gpus_tier_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_host_gib .* in folders alone"):
        open_llm(folder, tensor_parallel=2, kv_host_gib=1.0)
