"""Requests that wait for a tier hold up nobody, and keys of tiers stand for what was really read."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import wait
from pathlib import Path
from threading import Event
from time import perf_counter, sleep
from typing import Any

import pytest

from forerun import LLM, SamplingParams, block_identity
from forerun.assemble import assemble
from forerun.cache import spill as spilled
from forerun.cache.disk import DiskTier
from forerun.cache.lower import state_key
from forerun.cache.spill import RecordName
from forerun.cache.tiers import HostTier
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from tests.exactness.test_tiers import PREFIX, asked, cached, engine, nodes, tiers
from tests.models import factory
from tests.support import harness, tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("tiny"), tiny.random_layers(2))


def test_others_begin_while_nobody_runs(checkpoint: Path, tmp_path: Path) -> None:
    """A request that is alone and reads holds up nobody who comes later."""
    first, [wanted, other] = engine(checkpoint, tmp_path), asked(2, tail=0, lengths=(30,))
    truth = harness.run(first, [harness.fresh(wanted)])
    tiers(first).spill.flush()
    second, late = engine(checkpoint, tmp_path), harness.fresh(wanted)
    other.samples[0].request.cache_salt = "other"
    release = Event()
    tiers(second).spill._reader.submit(release.wait, 60)
    second.add(late)
    began = perf_counter()
    for _ in range(3):
        second.step()
    second.add(other)
    for _ in range(3):
        second.step()
    assert perf_counter() - began < 8, "it waited for the reading"
    assert late.samples[0].request.num_computed == 0 and other.samples[0].request.num_output == 3
    release.set()
    assert harness.run(second, []) == [] and [[s.request.output_token_ids for s in late.samples]] == truth
    assert cached([late])[0] >= 25


def test_what_was_read_is_placed_before_anybody_begins(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overwrites free blocks, and one of these may be what a request that has begun in the same step copies from."""
    first, [wanted, other] = engine(checkpoint, tmp_path), asked(2, tail=0, lengths=(30,))
    truth = harness.run(first, [harness.fresh(wanted)])
    tiers(first).spill.flush()
    made, late, release, events = engine(checkpoint, tmp_path), harness.fresh(wanted), Event(), list[str]()
    lower, scheduler = tiers(made), made.scheduler
    lower.spill._reader.submit(release.wait, 60)
    made.add(late)
    made.step()
    start, fill, schedule = scheduler._start, lower.spill.fill, scheduler.schedule

    def starts(*given: Any) -> bool:
        begun = start(*given)
        events.append("start")
        release.set()
        wait([reading.loaded for reading in lower._readings.values()])
        return begun

    monkeypatch.setattr(scheduler, "_start", starts)
    monkeypatch.setattr(scheduler, "schedule", lambda *given: (events.append("step"), schedule(*given))[1])
    monkeypatch.setattr(lower.spill, "fill", lambda *given: (events.append("fill"), fill(*given))[1])
    other.samples[0].request.cache_salt, other.samples[0].request.priority = "other", -1
    made.add(other)
    harness.run(made, [])
    assert events[:5] == ["step", "start", "step", "fill", "start"], "read while another began, placed a step later"
    assert [[s.request.output_token_ids for s in late.samples]] == truth and cached([late])[0] >= 25


def test_a_waiting_request_looks_for_files_now_and_then(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, looks = engine(checkpoint, tmp_path), list[bytes]()
    [group] = asked(1, lengths=(30,))
    request, lower = group.samples[0].request, tiers(made)

    def has(key: bytes) -> bool:
        looks.append(key)
        return False

    monkeypatch.setattr(lower.spill, "has", has)
    monkeypatch.setattr("forerun.cache.tiered.ASK_AGAIN_S", 1e9)
    request.turn = (0.0, 7)
    assert not any(lower.is_reading(request) for _ in range(50)) and len(looks) == 1
    lower._asked[request.turn].again_s = 0.0
    assert not lower.is_reading(request) and len(looks) == 2
    pool = made.scheduler.pool
    assert pool.allocate(pool.num_available) is not None
    other = harness.fresh(group).samples[0].request
    other.turn = (0.0, 8)
    assert not lower.is_reading(other) and len(looks) == 2, "there is no room for what it would find"


def test_a_folder_that_does_not_answer_has_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [wanted] = asked(1, lengths=(30,))
    truth = harness.run(first := engine(checkpoint, tmp_path), [harness.fresh(wanted)])
    tiers(first).spill.flush()
    release, made, begun = Event(), engine(checkpoint, tmp_path), perf_counter()
    spill, name = tiers(made).spill, RecordName(next(nodes(first)).key, 0, ())
    with monkeypatch.context() as patched:
        patched.setattr("forerun.cache.spill.ASK_LIMIT_S", 0.05)
        patched.setattr(spill, "has", lambda key: release.wait(60))
        assert harness.run(made, [again := harness.fresh(wanted)]) == truth and cached([again]) == [0]
        assert spill.leading([name]) == [] and spill.first([name]) is None
        assert perf_counter() - begun < 30, "somebody waited until it answered"
        release.set()
        assert spill._asking is not None and spill._asking.result(20) is None
    assert spill.leading([name]) == [name]
    with monkeypatch.context() as patched:
        patched.setattr("forerun.cache.spill.ASK_LIMIT_S", 0.2)
        patched.setattr(spill, "has", lambda key: not sleep(0.01))
        assert 1 <= len(spill.leading([name] * 10_000)) <= 100, "what was found in time counts"
        spill._asking.result(1)  # nobody looks for more


def test_who_has_ended_is_asked_for_together(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is while all run: on several ranks each question goes to all of them."""
    groups = asked(2, lengths=(30, 14))
    running = [harness.fresh(group).samples[0].request for group in groups]
    harness.run(made := engine(checkpoint, tmp_path), groups)
    lower, requests = tiers(made), [group.samples[0].request for group in groups]
    wanted = list[set[Any]]()

    def lacking(keys: set[Any]) -> list[Any]:
        wanted.append(keys)
        return sorted(keys)[:1]

    monkeypatch.setattr(lower.spill, "lacking", lacking)
    lower.hand_over(running)
    assert not wanted
    lower.hand_over(requests)
    assert wanted == [{key for each in requests for key in lower._keys(each)}] * 2, "once more, since that did not help"
    assert any(request.error is not None for request in requests)


def test_reading_is_doubted_once_a_request(checkpoint: Path, tmp_path: Path) -> None:
    [wanted] = asked(1, lengths=(30,))
    harness.run(first := engine(checkpoint, tmp_path), [harness.fresh(wanted)])
    tiers(first).spill.flush()
    lower, request = tiers(engine(checkpoint, tmp_path)), harness.fresh(wanted).samples[0].request
    lower.spill._s_per_byte, lower.spill._s_per_token = 1.0, 1e-6
    for _ in range(5):
        assert not lower.is_reading(request)
        lower._asked[request.turn].again_s = 0.0
    assert 0.97 < lower.spill._s_per_byte < 1.0


@pytest.mark.parametrize("kind", ["target", "draft model"])
def test_weights_that_change_while_they_are_read_are_refused(
    kind: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    changing = Path(shutil.copytree(checkpoint, tmp_path / "draft")) if kind == "draft model" else folder
    drafting = {"drafter": "draft", "draft_model": str(changing)} if kind == "draft model" else {}
    options: dict[str, Any] = {"max_model_len": 96, "threads": 1, "adaptive": False, **drafting}
    LLM(str(folder), kv_disk=str(tmp_path / "kv"), **options)

    def change(*args: Any) -> Engine:
        made = assemble(*args)
        os.utime(changing / "model.safetensors", ns=(1, 1))  # somebody writes there
        return made

    monkeypatch.setattr("forerun.llm.assemble", change)
    with pytest.raises(ConfigError, match="have changed since its weights were read"):
        LLM(str(folder), kv_disk=str(tmp_path / "kv"), **options)
    shutil.copystat(checkpoint / "model.safetensors", changing / "model.safetensors")
    LLM(str(folder), **options)


def test_what_torch_computes_on_a_cpu_is_named_by_all_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, model = factory.make_kernels("reference"), tiny.target(2)
    names = {block_identity.rounding_of(reference, model)}
    places: dict[str, object] = {
        "torch.get_num_threads": lambda: 99,
        "torch.backends.cpu.get_cpu_capability": lambda: "OTHER",
        "forerun.block_identity._processor": lambda: "other",
    }
    for place, other in places.items():
        with monkeypatch.context() as patched:
            patched.setattr(place, other)
            names.add(block_identity.rounding_of(reference, model))
    assert len(names) == 4 and block_identity._processor()


def test_a_state_that_the_disk_lost_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = factory.make_checkpoint("lfm2", folder)
    llm = LLM(str(path), max_num_seqs=3, block_size=4, threads=1, kv_disk=str(tmp_path / "kv"))

    def ask() -> None:
        for node in nodes(llm.engine):
            node.touched_s = -1e9
        llm.generate([PREFIX[:21]], SamplingParams(max_tokens=1, ignore_eos=True))
        tiers(llm.engine).spill.flush()

    ask()
    [key] = [state_key(node.key) for node in nodes(llm.engine) if node.has_saved_state]
    [file] = (tmp_path / "kv").rglob(f"{key.hex()}.kv")
    os.utime(file, ns=(1, 1))
    ask()
    assert file.stat().st_mtime_ns > 10**9, "it was used"
    file.unlink()
    ask()  # it notices
    ask()
    assert file.exists()


def test_what_could_not_wait_or_was_lost_is_handed_over_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks and the state after them, as many at a time as may wait to be written."""
    (folder := tmp_path / "model").mkdir()
    path = factory.make_checkpoint("lfm2", folder)
    llm = LLM(str(path), max_num_seqs=3, block_size=4, threads=1, kv_disk=str(tmp_path / "kv"))
    lower = tiers(llm.engine)
    monkeypatch.setattr(spilled, "MAX_UNWRITTEN", 2 * lower.spill.block_bytes + lower.spill.state_bytes)
    group, release = harness.request(0, PREFIX[:21], SamplingParams(max_tokens=1, ignore_eos=True), 64), Event()
    lower.spill._writer.submit(release.wait, 60)  # else it may write what could wait before the rest comes
    harness.run(llm.engine, [group])
    request = group.samples[0].request
    wanted = lower._keys(request)
    release.set()
    assert len(wanted) == 5 and lower.spill.lacking(wanted)
    lower.hand_over([request])
    assert request.error is None and not lower.spill.lacking(wanted)
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    lower.hand_over([request])
    assert request.error is None and not lower.spill.lacking(wanted)
    pool = llm.engine.scheduler.pool
    assert pool.allocate(pool.num_available) is not None, "evicts all"
    for file in (tmp_path / "kv").rglob("*.kv"):
        file.unlink()
    lower.hand_over([request])
    assert "have only 0 of its 5 blocks" in str(request.error)


def test_memory_in_front_of_the_disk_does_not_stand_for_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the disk did not take is given to it again, for others at once, else when it is used after a while."""
    [group, *_] = asked(1, lengths=(30,))
    lower, put = tiers(made := engine(checkpoint, tmp_path)), DiskTier.put
    lower.spill.tiers = [HostTier(1 << 20, pinned=False), disk := lower.spill.tiers[0]]
    monkeypatch.setattr(DiskTier, "put", lambda *given: False)
    harness.run(made, [group])
    request = group.samples[0].request
    wanted = lower._keys(request)
    lower.hand_over([request])
    assert "have only 0 of its" in str(request.error)
    assert all(lower.spill.has(key) and not disk.has(key) for key, _ in wanted)
    monkeypatch.setattr(DiskTier, "put", put)
    monkeypatch.setattr(spilled, "TOUCH_S", 0.0)
    for _ in range(2):  # the first one notices
        harness.run(made, [harness.fresh(group)])
        lower.spill.flush()
    assert all(disk.has(key) for key, _ in wanted)
