"""What comes back from a tier has the bits that were computed, and nobody's tokens depend on it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.assemble import assemble
from forerun.cache import tiered
from forerun.cache.prefix_cache import Node, PrefixCache
from forerun.cache.spill import Spill
from forerun.cache.tiered import TieredPrefixes
from forerun.cache.tiers import HostTier, TierStats
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import ConfigError
from tests.drafters.test_mtp import WithModule
from tests.models import factory
from tests.support import harness, mini, tiny
from tests.support.adapters import write_adapter

DRAFT = DrafterConfig(name="draft", model="tiny", max_draft_tokens=3, adaptive=False)
PREFIX = [random.Random(1).randrange(3, factory.VOCAB_SIZE) for _ in range(30)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("tiny"), tiny.random_layers(2))


def engine(checkpoint: Path, disk: Path | None, drafter: DrafterConfig = tiny.PLAIN, **options: Any) -> Engine:
    model, options = tiny.target(2), {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    given = {} if disk is None else {"kv_disk": str(disk)}
    config = EngineConfig(model="tiny", drafter=drafter, **{**given, **options})
    if drafter.model is not None:  # names are for loading; the identity needs files
        return assemble(with_model(config, str(checkpoint)), model, tiny.kernels(), lambda name: model, checkpoint)
    return assemble(config, model, tiny.kernels(), lambda name: model, checkpoint)


def with_model(config: EngineConfig, name: str) -> EngineConfig:
    return replace(config, drafter=replace(config.drafter, model=name))


def asked(num: int = 4, tail: int = 3, seed: int = 0, lengths: Sequence[int] = (30, 30, 27, 14)) -> list[RequestGroup]:
    rng, made = random.Random(seed), []
    for index in range(num):
        prompt = PREFIX[: rng.choice(lengths)] + [rng.randrange(3, 90) for _ in range(rng.randint(0, tail))]
        params = SamplingParams(max_tokens=12 + index, seed=index, ignore_eos=True)
        made.append(harness.request(index, prompt, params, tiny.MAX_LEN))
    return made


def fresh(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    return [harness.fresh(group) for group in groups]


def cached(groups: Sequence[RequestGroup]) -> list[int]:
    return [sample.stats().num_cached_tokens for group in groups for sample in group.samples]


def prefixes(made: Engine) -> PrefixCache:
    assert made.scheduler.prefix_cache is not None
    return made.scheduler.prefix_cache


def tiers(made: Engine) -> TieredPrefixes:
    lower = prefixes(made).lower
    assert isinstance(lower, TieredPrefixes)
    return lower


def stats(made: Engine) -> TierStats:
    return tiers(made).spill.tiers[0].stats


def nodes(made: Engine) -> Iterator[Node]:
    """All blocks of the tree without adapter and salt."""
    todo = list(prefixes(made).top_of(None, "").children.values())
    while todo:
        node = todo.pop()
        yield node
        todo += node.children.values()


def bits(made: Engine, node: Node, num_ready: int) -> list[bytes]:
    """The bytes of a block: of all target rows, of so many of the drafters', and of the states at its end."""
    parts, num_target = [], len(made.model.kv_specs)
    for index, kv in enumerate(made.kv_cache.layers):
        rows = kv.block_size if index < num_target else num_ready
        parts += [kv.values[node.block, :, :rows], kv.keys[node.block, ..., :rows]]
        parts += [scales[node.block, :, :rows] for scales in (kv.key_scales, kv.value_scales) if scales is not None]
    boundary = made.boundaries.of(node.block)
    parts += [] if boundary is None else [boundary]
    return [part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts]


def assert_same_bits(first: Engine, second: Engine, least: int) -> None:
    """Of the blocks that both have, however they got them."""
    one, other = ({node.key: node for node in nodes(made)} for made in (first, second))
    common = one.keys() & other.keys()
    assert len(common) >= least
    for key in common:
        num_ready = min((*one[key].ready, *other[key].ready), default=0)
        assert bits(first, one[key], num_ready) == bits(second, other[key], num_ready), one[key].depth
    spills = tiers(first).spill, tiers(second).spill
    if spills[0].states is not None and spills[1].states is not None:
        pairs = [(spills[0].states.kept(one[key].block), spills[1].states.kept(other[key].block)) for key in common]
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        assert both and all(torch.equal(x, y) for a, b in both for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("drafter", [tiny.PLAIN, DRAFT], ids=["none", "draft"])
def test_another_process_finds_what_this_one_computed(
    drafter: DrafterConfig, kv: str, checkpoint: Path, tmp_path: Path
) -> None:
    wanted = asked()
    truth = harness.run(engine(checkpoint, None, drafter, kv_cache_dtype=kv, prefix_caching=False), fresh(wanted))
    first = engine(checkpoint, tmp_path, drafter, kv_cache_dtype=kv)
    assert harness.run(first, fresh(wanted)) == truth
    tiers(first).spill.flush()
    second, again = engine(checkpoint, tmp_path, drafter, kv_cache_dtype=kv), fresh(wanted)
    assert harness.run(second, again) == truth
    assert all(
        num >= len(g.samples[0].request.prompt_token_ids) - 5 for num, g in zip(cached(again), again, strict=True)
    )
    assert stats(second).loaded_blocks > 6 and stats(second).corrupted_blocks == 0
    assert_same_bits(first, second, 7)
    tiers(second).spill.flush()
    if drafter is tiny.PLAIN:
        assert stats(second).stored_blocks == 0, "what the disk has was written again"


@pytest.mark.parametrize("drafter", ["eagle", "mtp", "portfolio=suffix+mtp"])
def test_heads_draft_at_once_after_a_restart(drafter: str, tmp_path: Path) -> None:
    """Their KV and the target's states at the blocks' ends come back, too."""
    prompts = [" ".join([*mini.PROMPTS, end]) for end in ("was", "said", "was")]
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    truth = [output.outputs[0].token_ids for output in mini.drafting("none").generate(prompts, params)]
    made, drafted = [], []
    for _ in range(2):
        llm = mini.drafting(drafter, adaptive=False, kv_disk=str(tmp_path), kv_disk_gib=0.2)
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == truth
        drafted.append(sum(c.accepted for o in outputs for c in o.outputs[0].stats.drafters.values()))
        tiers(llm.engine).spill.flush()
        made.append(llm.engine)
    assert all(o.outputs[0].stats.num_cached_tokens >= len(o.prompt_token_ids) - 17 for o in outputs)
    assert drafted[1] > 0 and stats(made[1]).loaded_blocks > 2
    assert any(made[1].boundaries.of(node.block) is not None for node in nodes(made[1]))
    assert_same_bits(*made, 3)


@pytest.mark.parametrize("case", ["qwen3-next", "lfm2"])
def test_recurrent_states_come_back(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = WithModule(folder, case).folder if case == "qwen3-next" else factory.make_checkpoint(case, folder)
    options: dict[str, Any] = {"max_num_seqs": 3, "block_size": 4, "threads": 1}
    prompts = [PREFIX[:21], [*PREFIX[:20], 7, 8, 9, 10, 11], PREFIX[:20] + [5]]
    params = SamplingParams(max_tokens=9, seed=3, ignore_eos=True, temperature=1.0)
    plain = LLM(str(path), **options)
    truth = [plain.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    first = plain.with_drafter("none", kv_disk=str(tmp_path / "kv"))
    assert [o.outputs[0].token_ids for o in first.generate(prompts, params)] == truth
    tiers(first.engine).spill.flush()
    second = plain.with_drafter("none", kv_disk=str(tmp_path / "kv"))
    outputs = [second.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    assert [output.token_ids for output in outputs] == truth
    assert [output.stats.num_cached_tokens for output in outputs] == [20, 24, 20]
    assert_same_bits(first.engine, second.engine, 6)
    again = [*prompts[0], *outputs[0].token_ids, 3, 4]  # the next turn goes on from the end of the answer
    third = plain.with_drafter("none", kv_disk=str(tmp_path / "kv"))
    [turn] = third.generate([again], params)
    assert turn.outputs[0].token_ids == plain.generate([again], params)[0].outputs[0].token_ids
    assert turn.outputs[0].stats.num_cached_tokens > 20


def test_a_damaged_block_is_computed_again(checkpoint: Path, tmp_path: Path) -> None:
    [wanted] = asked(1, tail=0, lengths=(30,))
    truth = harness.run(first := engine(checkpoint, tmp_path), [harness.fresh(wanted)])
    tiers(first).spill.flush()
    third = next(node for node in nodes(first) if node.depth == 3)
    path = next(tmp_path.rglob(f"{third.key.hex()}.kv"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    second, again = engine(checkpoint, tmp_path), harness.fresh(wanted)
    assert harness.run(second, [again]) == truth
    assert cached([again]) == [12] and stats(second).corrupted_blocks == 1
    tiers(second).spill.flush()
    warm = harness.fresh(wanted)
    assert harness.run(third_engine := engine(checkpoint, tmp_path), [warm]) == truth
    assert cached([warm]) == [28] and stats(third_engine).corrupted_blocks == 0


def test_without_memory_for_copies_requests_go_on(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA out of memory")

    [wanted] = asked(1, tail=0, lengths=(30,))
    first = engine(checkpoint, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("forerun.cache.spill.enqueue_to_host", full)
        truth = harness.run(first, [harness.fresh(wanted)])
    tiers(first).spill.flush()
    assert "could not be copied" in caplog.text and not list(tmp_path.rglob("*.kv"))
    first.scheduler.check_integrity()
    tiers(first).spill.save(list(nodes(first)))
    tiers(first).spill.flush()
    second = engine(checkpoint, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Spill, "fill", full)
        assert harness.run(second, [again := harness.fresh(wanted)]) == truth
    assert cached([again]) == [0] and "could not be placed" in caplog.text
    second.scheduler.check_integrity()
    assert harness.run(engine(checkpoint, tmp_path), [warm := harness.fresh(wanted)]) == truth
    assert cached([warm]) == [28]


def test_salts_and_other_weights_are_apart(checkpoint: Path, tmp_path: Path) -> None:
    [wanted] = asked(1, lengths=(30,))

    def run(folder: Path, salt: str, **options: Any) -> int:
        made, group = engine(folder, tmp_path / "kv", **options), harness.fresh(wanted)
        group.samples[0].request.cache_salt = salt
        harness.run(made, [group])
        tiers(made).spill.flush()
        return cached([group])[0]

    assert run(checkpoint, "") == 0 and run(checkpoint, "") > 0
    assert run(checkpoint, "a") == 0 and run(checkpoint, "b") == 0 and run(checkpoint, "a") > 0
    other = tiny.write_llama(tmp_path, tiny.random_layers(2))
    assert run(other, "") > 0, "the same bytes elsewhere are the same weights"
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert run(other, "") == 0
    assert run(checkpoint, "", block_size=8) == 0 and run(checkpoint, "", kv_cache_dtype="bfloat16") == 0


def test_adapters_are_told_apart_by_their_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """One name may stand for another adapter after a restart, or be given again before its first block is written."""
    made = [write_adapter(tmp_path / f"a{seed}", checkpoint, ("q_proj", "v_proj"), seed) for seed in range(2)]
    options: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "block_size": 4, "max_model_len": 96, "threads": 1}
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, temperature=1.0)

    def answer(llm: LLM, name: str | None) -> tuple[tuple[int, ...], int]:
        [output] = llm.generate([PREFIX], params, lora=name)
        tiers(llm.engine).spill.flush()
        return output.outputs[0].token_ids, output.outputs[0].stats.num_cached_tokens

    first = LLM(str(checkpoint), lora={"a": str(made[0]), "b": str(made[1])}, **options)
    one, other, bare = (answer(first, name) for name in ("a", "b", None))
    assert [cached for _, cached in (one, other, bare)] == [0, 0, 0] and one[0] != other[0]
    second = LLM(str(checkpoint), lora={"a": str(made[1]), "b": str(made[0])}, **options)
    assert answer(second, "a") == (other[0], 28) and answer(second, "b") == (one[0], 28)
    assert answer(second, None) == (bare[0], 28)
    third = LLM(str(checkpoint), lora={"a": str(made[0])}, **options)
    shutil.rmtree(made[0])
    made[1].rename(made[0])  # other files where those lie that were loaded
    assert answer(third, "a") == (one[0], 0), "nobody knows whose bytes these are"


@pytest.mark.parametrize("seed", range(2))
def test_a_small_pool_over_a_tier_changes_no_token(
    seed: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preemption, eviction here and there, blocks that come while others run; a budget that turns blocks away."""
    wanted = asked(8, tail=6, seed=seed)
    truth = harness.run(engine(checkpoint, None, prefix_caching=False), fresh(wanted))
    options = {"num_kv_blocks": 26, "max_num_batched_tokens": 24, "kv_disk_gib": 0.0001}
    for number in range(3):
        monkeypatch.setattr("forerun.cache.spill.MAX_UNWRITTEN", 6000 if number == 1 else 1 << 20)
        made = engine(checkpoint, tmp_path, **options)
        for _ in range(2):
            again = fresh(wanted)
            random.Random(seed + number).shuffle(again)
            harness.run(made, again)
            tokens = {group.request_id: [s.request.output_token_ids for s in group.samples] for group in again}
            assert [tokens[group.request_id] for group in wanted] == truth
        tiers(made).spill.flush()
        assert prefixes(made).stats.evicted_blocks > 0
    assert stats(made).loaded_blocks > 0
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in tmp_path.rglob("*.kv"))
    assert size <= 0.0001 * 2**30


def test_the_hosts_memory_gives_back_what_the_pool_lost(checkpoint: Path) -> None:
    """As on a GPU, with tensors of the CPU."""
    wanted = asked(6, tail=6)
    made = engine(checkpoint, None, num_kv_blocks=24, max_num_seqs=1)
    host = HostTier(1 << 20, pinned=False)
    cache = prefixes(made)
    cache.names = lambda adapter, salt: salt.encode()
    cache.lower = TieredPrefixes(cache, made.scheduler.pool, Spill([host], made.kv_cache, None, made.boundaries))
    truth = harness.run(engine(checkpoint, None, prefix_caching=False), fresh(wanted))
    assert harness.run(made, fresh(wanted)) == truth
    tiers(made).spill.flush()
    assert cache.stats.evicted_blocks > 0
    for group in fresh(wanted):
        assert harness.run(made, [group]) == [truth[int(group.request_id)]]
        assert cached([group])[0] >= len(group.samples[0].request.prompt_token_ids) - 5
    assert host.stats.loaded_blocks > 0


def test_others_go_on_while_a_prefix_is_read(checkpoint: Path, tmp_path: Path) -> None:
    first, [wanted, other] = engine(checkpoint, tmp_path), asked(2, tail=0, lengths=(30,))
    truth = harness.run(first, [harness.fresh(wanted)])
    tiers(first).spill.flush()
    second, late = engine(checkpoint, tmp_path), harness.fresh(wanted)
    other.samples[0].request.cache_salt = "other"
    release = Event()
    tiers(second).spill._reader.submit(release.wait, 60)
    second.add(other)
    second.step()
    second.add(late)
    for _ in range(3):
        second.step()
    assert late.samples[0].request.num_computed == 0, "it does not wait for what can be read"
    assert other.samples[0].request.num_output == 4, "it waits for somebody else's reading"
    release.set()
    assert harness.run(second, []) == [] and [[s.request.output_token_ids for s in late.samples]] == truth
    assert cached([late])[0] >= 25


def test_what_is_quickly_computed_is_not_read(checkpoint: Path, tmp_path: Path) -> None:
    [wanted] = asked(1, lengths=(30,))
    first = engine(checkpoint, tmp_path)
    truth = harness.run(first, [harness.fresh(wanted)])
    tiers(first).spill.flush()
    second, again = engine(checkpoint, tmp_path), harness.fresh(wanted)
    spill = tiers(second).spill
    spill.computed(1000, 0.001)
    spill._s_per_byte = 1.0
    assert harness.run(second, [again]) == truth and cached([again]) == [0] and stats(second).loaded_blocks == 0
    spill._s_per_byte = 1e-12
    again = harness.fresh(wanted)
    third = engine(checkpoint, tmp_path)
    tiers(third).spill._s_per_byte, tiers(third).spill._s_per_token = 1e-12, 1.0
    assert harness.run(third, [again]) == truth and cached([again])[0] > 0


def test_prompts_with_logprobs_are_computed(checkpoint: Path, tmp_path: Path) -> None:
    first = engine(checkpoint, tmp_path)
    params = SamplingParams(max_tokens=3, seed=1, prompt_logprobs=1)
    groups = [harness.request(i, PREFIX, params, tiny.MAX_LEN) for i in range(2)]
    harness.run(first, groups[:1])
    tiers(first).spill.flush()
    harness.run(second := engine(checkpoint, tmp_path), groups[1:])
    assert groups[0].output().prompt_logprobs == groups[1].output().prompt_logprobs
    assert stats(second).loaded_blocks == 0


KILLED = """
import os, signal, sys
from forerun import LLM, SamplingParams
llm = LLM("mini", kv_disk=sys.argv[1], kv_disk_gib=0.2, max_model_len=512, threads=1, keep_learned=False)
llm.generate([sys.argv[2]], SamplingParams(max_tokens=4, seed=1))
llm.engine.scheduler.prefix_cache.lower.spill.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_its_prefixes(tmp_path: Path) -> None:
    prompt = " ".join(mini.PROMPTS)
    command = [sys.executable, "-c", KILLED, str(tmp_path), prompt]
    assert subprocess.run(command, env=os.environ, check=False).returncode == -signal.SIGKILL
    llm = mini.drafting("none", kv_disk=str(tmp_path), kv_disk_gib=0.2)
    [output] = llm.generate([prompt], SamplingParams(max_tokens=4, seed=1))
    assert output.outputs[0].stats.num_cached_tokens >= len(output.prompt_token_ids) - 17
    [truth] = mini.drafting("none").generate([prompt], SamplingParams(max_tokens=4, seed=1))
    assert output.outputs[0].token_ids == truth.outputs[0].token_ids


def test_refusals(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="prefix_caching is off"):
        EngineConfig(model="m", kv_disk="x", prefix_caching=False)
    for options in ({"kv_disk_gib": 0}, {"kv_disk_gib": True}, {"kv_disk": " "}, {"kv_host_gib": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            EngineConfig(model="m", **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="kv_host_gib .* 2 ranks compute the model, which share tiers of KV in folders alone"
    ):
        EngineConfig(model="m", kv_host_gib=1.0, tensor_parallel=2)
    with pytest.raises(ConfigError, match="kv_events_topic go with kv_events"):
        EngineConfig(model="m", kv_events_topic="x")
    with pytest.raises(ConfigError, match=r"kv_disk_gib leaves .* give at least") as told:
        engine(checkpoint, tmp_path, kv_disk_gib=0.00001)
    engine(checkpoint, tmp_path, kv_disk_gib=float(str(told.value).split()[-1]))  # the advice is enough
    with pytest.raises(ConfigError, match="lies in host memory already"):
        engine(checkpoint, None, kv_host_gib=1.0)
    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="several ranks compute"):
        patched.setattr(tiny.target(2), "exchanges", True)
        engine(checkpoint, tmp_path)
    with pytest.raises(ConfigError, match="cannot write in the folder"):
        LLM("mini", kv_disk=str(checkpoint / "config.json"))


def test_readings_have_a_limit(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = asked(4)
    truth = harness.run(first := engine(checkpoint, tmp_path), fresh(wanted))
    tiers(first).spill.flush()
    monkeypatch.setattr(tiered, "MAX_READINGS", 0)
    again = fresh(wanted)
    assert harness.run(second := engine(checkpoint, tmp_path), again) == truth
    assert stats(second).loaded_blocks == 0
