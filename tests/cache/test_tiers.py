"""Tiers alone: what they keep, what they notice, what they take."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from filelock import FileLock

from forerun.cache import disk
from forerun.cache.disk import PAGE, DiskTier, check_folder
from forerun.cache.tiers import HostTier, Record, Tier
from forerun.errors import ConfigError

ABOUT = {"weights": "abc"}
ROOMY = 1 << 20


def key_of(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def record(number: int, size: int = 3000, ready: int = 2) -> Record:
    payload = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    return Record((number, 7, 8, 9), (ready,), (size - 8, 8), payload)


def same(a: Record | None, b: Record) -> bool:
    return (
        a is not None
        and (a.tokens, a.ready, a.parts) == (b.tokens, b.ready, b.parts)
        and a.payload.tobytes() == b.payload.tobytes()
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in files(folder))


MAKERS: dict[str, Callable[[Path, int], Tier]] = {
    "disk": lambda folder, num_bytes: DiskTier(folder, num_bytes, ABOUT),
    "host": lambda folder, num_bytes: HostTier(num_bytes, pinned=False),
}


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_what_is_put_comes_back(kind: str, tmp_path: Path) -> None:
    tier = MAKERS[kind](tmp_path, ROOMY)
    wanted = record(1)
    assert tier.get(key_of(1), 0) is None and not tier.has(key_of(1)) and not tier.touch(key_of(1), 0)
    assert tier.put(key_of(1), wanted, 0)
    kept = wanted.payload.tobytes()
    wanted.payload[:] = 0  # the tier has its own copy
    found = tier.get(key_of(1), 0)
    assert found is not None and found.payload.tobytes() == kept and found.tokens == wanted.tokens
    assert tier.has(key_of(1)) and tier.touch(key_of(1), 0) and tier.get(key_of(2), 0) is None
    assert tier.put(key_of(1), record(1, ready=4), 0)
    better = tier.get(key_of(1), 0)
    assert better is not None and better.num_ready == 4
    assert (tier.stats.stored_blocks, tier.stats.loaded_blocks, tier.stats.corrupted_blocks) == (2, 2, 0)


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_the_bound_holds_under_churn(kind: str, tmp_path: Path) -> None:
    """Whatever is put, got and touched in whatever order, and whoever dies meanwhile; what comes back is right."""
    for seed in range(3):
        rng, folder, bound = random.Random(seed), tmp_path / str(seed), 24 * PAGE
        folder.mkdir()
        tier, num_evicted = MAKERS[kind](folder, bound), 0
        for _ in range(250):
            number, act = rng.randrange(60), rng.random()
            wanted = record(number, 100 + 700 * (number % 9))
            if act < 0.6:
                assert tier.put(key_of(number), wanted, number % 5)
            elif act < 0.85:
                found = tier.get(key_of(number), number % 5)
                assert found is None or same(found, wanted)
            elif act < 0.97:
                tier.touch(key_of(number), number % 5)
            elif kind == "disk":
                num_evicted += tier.stats.evicted_blocks
                tier = DiskTier(folder, bound, ABOUT)  # another process, or the next one
            assert tier.stats.used_bytes <= bound
            if kind == "disk":
                assert on_disk(folder) <= bound
        assert num_evicted + tier.stats.evicted_blocks > 0
        assert any(tier.has(key_of(number)) for number in range(60))
        assert not tier.put(key_of(99), record(99, 2 * bound), 0), "it is larger than all there is"
        if kind == "disk":
            assert int((folder / "forerun-kv" / "usage").read_text()) == on_disk(folder)


def test_the_least_recently_used_go_first_and_prefixes_outlive_what_follows(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10 * PAGE, ABOUT)
    for number in range(8):
        tier.put(key_of(number), record(number), number)  # one prefix of eight blocks
    assert tier.touch(key_of(7), 0), "the last one is somebody's first"
    for number in range(20, 23):
        tier.put(key_of(number), record(number), 0)
    kept = [number for number in range(8) if tier.has(key_of(number))]
    assert kept == [*range(len(kept) - 1), 7] and 2 < len(kept) < 8
    assert all(tier.has(key_of(number)) for number in range(20, 23))


def test_the_end_of_a_new_long_prompt_outlives_what_is_old(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10 * PAGE, ABOUT)
    for number in range(8):
        tier.put(key_of(number), record(number), 0)
        [path] = [path for path in files(tmp_path) if path.stem == key_of(number).hex()]
        old = path.stat().st_mtime_ns - 60 * 10**9
        os.utime(path, ns=(old, old))
    for number in range(100, 104):
        tier.put(key_of(number), record(number), 1000 + number)
    assert all(tier.has(key_of(number)) for number in range(100, 104)) and not tier.has(key_of(0))


@pytest.mark.parametrize("kind", ["disk", "host"])
def test_a_worse_record_replaces_no_better_one(kind: str, tmp_path: Path) -> None:
    tier = MAKERS[kind](tmp_path, ROOMY)
    bare, with_states = record(1, 3000, ready=4), record(1, 3000, ready=2)
    bare = Record(bare.tokens, bare.ready, (3000,), bare.payload)
    assert tier.put(key_of(1), with_states, 0)
    for worse in (record(1, ready=1), record(1, ready=0), Record((1, 7, 8, 9), (2,), (3000,), bare.payload)):
        assert tier.put(key_of(1), worse, 0) and same(tier.get(key_of(1), 0), with_states)
    assert tier.stats.stored_blocks == 1
    assert tier.put(key_of(1), bare, 0) and same(tier.get(key_of(1), 0), bare), "it has more rows"
    assert tier.put(key_of(1), with_states, 0) and same(tier.get(key_of(1), 0), with_states), "it has more parts"


def test_a_short_file_is_replaced(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOMY, ABOUT)
    tier.put(key_of(1), record(1), 0)
    [path] = files(tmp_path)
    for num_bytes in (0, 20, 44, 90, 2000):
        path.write_bytes(path.read_bytes()[:num_bytes])
        assert tier.put(key_of(1), record(1), 0) and same(tier.get(key_of(1), 0), record(1))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_read_now_is_kept(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, ROOMY, ABOUT)
    tier.put(key_of(1), record(1), 0)

    def fail(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(np, "fromfile", fail)
        assert tier.get(key_of(1), 0) is None and tier.get(key_of(1), 0) is None
    assert tier.stats.corrupted_blocks == 0 and len(caplog.records) == 1 and os.strerror(number) in caplog.text
    assert same(tier.get(key_of(1), 0), record(1))


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOMY, ABOUT)
    tier.put(key_of(1), record(1), 0)
    shutil.rmtree(tmp_path / "forerun-kv")
    assert tier.get(key_of(1), 0) is None and tier.put(key_of(1), record(1), 0) and tier.is_open
    assert same(tier.get(key_of(1), 0), record(1)) and tier.stats.used_bytes == PAGE
    [path] = files(tmp_path)
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in path.parents[:3])
    assert (path.parents[1] / "about.json").exists()


def test_a_lock_that_others_hold_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "LOCK_S", 0.05)
    now = [1000.0]
    DiskTier(tmp_path, ROOMY, ABOUT).put(key_of(1), record(1), 0)
    with FileLock(tmp_path / "forerun-kv" / "lock"):
        tier = DiskTier(tmp_path, ROOMY, ABOUT, clock=lambda: now[0])
        assert same(tier.get(key_of(1), 0), record(1))
        assert not tier.put(key_of(2), record(2), 0) and tier.stats.failed_writes == 0 and not caplog.records
    now[0] += 0.06
    assert tier.is_open and tier.put(key_of(2), record(2), 0) and tier.stats.used_bytes == 2 * PAGE


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier, wanted = DiskTier(tmp_path, ROOMY, ABOUT), record(1, 600)
    tier.put(key_of(1), wanted, 0)
    [path] = files(tmp_path)
    whole = path.read_bytes()
    places = [0, 7, 8, 39, 40, 43, 44, 80, len(whole) - 600, len(whole) - 300, len(whole) - 1]  # of every part some
    for number, place in enumerate(places):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << number % 8]) + whole[place + 1 :])
        assert tier.get(key_of(1), 0) is None and not path.exists(), place
    for number, damaged in enumerate((b"", whole[:5], whole[:41], whole[:-1], whole + b"\0", b"\0" * len(whole))):
        path.write_bytes(damaged)
        assert tier.get(key_of(1), 0) is None and not path.exists(), number
    assert tier.stats.corrupted_blocks == len(places) + 6 == len(caplog.records)
    assert "computed again" in caplog.text
    assert tier.put(key_of(1), wanted, 0) and same(tier.get(key_of(1), 0), wanted)


def test_a_file_under_another_name_is_not_taken(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOMY, ABOUT)
    tier.put(key_of(1), record(1), 0)
    [path] = files(tmp_path)
    name = key_of(2).hex()
    other = path.parent.parent / name[:2] / f"{name}.kv"
    other.parent.mkdir()
    path.rename(other)
    assert tier.get(key_of(2), 0) is None and tier.stats.corrupted_blocks == 1


def test_other_models_do_not_share_files_but_the_bound(tmp_path: Path) -> None:
    one, other = DiskTier(tmp_path, 8 * PAGE, ABOUT), DiskTier(tmp_path, 8 * PAGE, {"weights": "abd"})
    for number in range(6):
        one.put(key_of(number), record(number), 0)
    assert not any(other.has(key_of(number)) for number in range(6))
    for number in range(6):
        other.put(key_of(number), record(number), 0)
    assert on_disk(tmp_path) <= 8 * PAGE and other.stats.evicted_blocks > 0


def test_two_processes_write_one_folder(tmp_path: Path) -> None:
    """Both find what the other wrote, and together they keep to the bound."""
    bound = 12 * PAGE
    pair = [DiskTier(tmp_path, bound, ABOUT) for _ in range(2)]  # with locks of their own, as two processes have

    def write(number: int) -> None:
        for index in range(10):
            assert pair[number].put(key_of(2 * index + number), record(2 * index + number), 0)

    threads = [Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert PAGE < on_disk(tmp_path) <= bound
    assert int((tmp_path / "forerun-kv" / "usage").read_text()) == on_disk(tmp_path)
    kept = [number for number in range(20) if pair[0].has(key_of(number))]
    assert all(same(tier.get(key_of(number), 0), record(number)) for tier in pair for number in kept)
    assert {number % 2 for number in kept} == {0, 1}
    assert sum(tier.stats.stored_blocks for tier in pair) == 20


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, ROOMY, ABOUT)
    tier.put(key_of(1), record(1), 0)
    [path] = files(tmp_path)
    left = path.with_name("half.kv.new")
    left.write_bytes(b"torn")
    (tmp_path / "forerun-kv" / "usage").write_text("nonsense")
    again = DiskTier(tmp_path, ROOMY, ABOUT)
    assert not left.exists() and again.stats.used_bytes == PAGE
    assert same(again.get(key_of(1), 0), record(1))


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        tier = DiskTier(tmp_path, ROOMY, ABOUT)
        tier.put(key_of(1), record(1), 0)
    finally:
        os.umask(mask)
    for path in (tmp_path / "forerun-kv").rglob("*"):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert stat.S_IMODE((tmp_path / "forerun-kv").stat().st_mode) == 0o700


def test_a_full_disk_rests_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    tier = DiskTier(tmp_path, ROOMY, ABOUT, clock=lambda: now[0])
    tier.put(key_of(1), record(1), 0)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(disk, "_write", full)
        assert not any(tier.put(key_of(number), record(number), 0) for number in range(2, 9))
        assert not tier.is_open
        assert len(caplog.records) == 1 and "No space left" in caplog.text and "requests go on" in caplog.text
        assert same(tier.get(key_of(1), 0), record(1)), "what is there can still be read"
        now[0] += 61
        assert tier.is_open and not tier.put(key_of(2), record(2), 0) and len(caplog.records) == 2
        now[0] += 61
        assert not tier.is_open, "the second rest is longer"
    now[0] += 61
    assert tier.put(key_of(2), record(2), 0) and not list(tmp_path.rglob("*.new"))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="kv_disk"):
        check_folder(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk: cannot write in the folder"):
        check_folder(tmp_path / "file")
