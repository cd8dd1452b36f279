"""A model in two processes says what it says in one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.config import EngineConfig, LaunchedRank, exchange_settings, launched_rank
from forerun.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError
from forerun.models.loader import load_adapter
from forerun.runtime.parallel import crew
from forerun.runtime.parallel.follower import RankFollower
from forerun.runtime.parallel.messages import Kind, RankMessage
from forerun.runtime.parallel.start import _find_store, compare, options_as_json, options_from, release, weights_stamp
from forerun.speculation.draft import Draft
from forerun.speculation.verifier import CoupledVerifier
from forerun.weights.identity import digest_of
from tests.drafters.test_eagle import make as make_head
from tests.models import factory
from tests.support import tiny
from tests.support.adapters import write_adapter
from tests.support.processes import listening, own_processes

WORKER = "forerun.runtime.parallel"
ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "embed_tokens", "lm_head")
PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43)), [5, 6, 7, 8, 5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny.write_llama(tmp_path_factory.mktemp("ranks"), tiny.random_layers(4))
    factory.write_tokenizer(path)
    (path / "eagle").mkdir()
    make_head("eagle1", path / "eagle")  # it reads the target's output layer, which the other process has
    write_adapter(path / "a", path, ADAPTED)
    write_adapter(path / "b", path, ADAPTED[:2], seed=1, rank=2)
    return path


def open_llm(folder: Path, **options: object) -> LLM:
    given: dict[str, object] = {"threads": 1, "block_size": 4, "rank_timeout_s": 4, "adaptive": False, **options}
    return LLM(str(folder), keep_learned=False, max_num_seqs=3, **given)


@pytest.fixture(scope="module", params=["pipeline_parallel", "tensor_parallel"])
def ranked(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with closing(open_llm(folder, **{request.param: 2}, lora={"a": str(folder / "a")})) as llm:
        yield llm
    assert not own_processes(WORKER)


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return open_llm(folder, lora={"a": str(folder / "a")})


def tokens(llm: LLM, lora: Sequence[str | None] | None = None) -> list[tuple[int, ...]]:
    """At both temperatures, each with its adapter."""
    params = [SamplingParams(temperature=i % 2, max_tokens=24, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    return [output.outputs[0].token_ids for output in llm.generate(list(PROMPTS), params, lora=lora)]


@pytest.mark.parametrize("drafter", ["none", "suffix", "draft", "eagle"])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 24, "max_model_len": 64, "max_num_batched_tokens": 9}])
def test_two_ranks_say_what_one_process_says(
    alone: LLM, ranked: LLM, folder: Path, drafter: str, options: dict[str, int]
) -> None:
    """Also where requests are preempted and prompts are read in chunks; prefixes are found again in a second run."""
    models = {"draft": folder, "eagle": folder / "eagle"}
    named = f"{drafter}={models[drafter]}" if drafter in models else drafter
    expected, llm = tokens(alone), ranked.with_drafter(named, adaptive=False, **options)
    assert tokens(llm) == expected
    assert tokens(llm) == expected


def test_adapters_add_what_they_add_in_one_process(
    alone: LLM, ranked: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the start and of run time, in one batch; what a rank cannot load is refused, and all go on."""
    for llm in (alone, ranked):
        llm.load_adapter("b", str(folder / "b"))
    expected = tokens(alone, ["a", None, "b", "a"])
    assert tokens(ranked, ["a", None, "b", "a"]) == expected
    assert len({*expected, *tokens(alone)}) == 7, "an adapter changes nothing"
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="rank 1 on .* other files than on rank"):
        patch.setattr(crew, "digest_of", lambda path: "another")
        ranked.load_adapter("c", str(folder / "b"))
    ranked.unload_adapter("b")
    alone.unload_adapter("b")
    assert tokens(ranked, ["a", None, None, None]) == tokens(alone, ["a", None, None, None])


def test_a_follower_forgets_adapters_that_it_cannot_read_or_need_not_keep(alone: LLM, folder: Path) -> None:
    answers = list[RankMessage]()
    inbox: Any = SimpleNamespace(tell=answers.append)
    exchange: Any = None
    follower = RankFollower(alone.loaded, alone.kernels, exchange, inbox)
    path = folder / "a"
    for each, digest in ((path, digest_of(path)), (path, "another"), (folder / "none", "")):
        follower._do(RankMessage(Kind.ADAPTER, [len(answers)], [str(each), digest]))
    assert [len(answer.texts) for answer in answers] == [0, 1, 1]
    assert "other files" in answers[1].texts[0] and "there is no adapter folder" in answers[2].texts[0]
    assert list(follower._adapters) == [0]
    follower._do(RankMessage(Kind.FORGET, [0]))
    assert not follower._adapters


def test_an_adapter_that_changes_while_it_is_read_is_refused(alone: LLM, folder: Path, tmp_path: Path) -> None:
    """Other ranks would read other matrices than this one has."""
    path = tmp_path / "changing"
    shutil.copytree(folder / "a", path)
    adapter = load_adapter("c", str(path), alone.loaded, alone.kernels)
    assert crew.digest_of_adapter(adapter) == digest_of(path)
    os.utime(path / "adapter_model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        crew.digest_of_adapter(adapter)
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"cannot read .*changing"):
        crew.digest_of_adapter(adapter)


def test_a_follower_whose_messages_nobody_reads_ends_with_its_leader() -> None:
    """Its standard error is a pipe that was closed with the leader."""
    code = (
        "import signal, socket, sys, time\n"
        "from forerun.runtime.parallel.follower import Inbox\n"
        "from forerun.runtime.parallel.links import Link\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "inbox = Inbox(Link(socket.socket(fileno=int(sys.argv[1]))), 1, 60.0)\n"
        "print('ready', flush=True)\n"
        "inbox.next()\n"
    )
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", code, str(theirs.fileno())]
    with subprocess.Popen(
        command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        theirs.close()
        assert process.stdout.readline() == b"ready\n"
        process.stderr.close()
        ours.close()
        try:
            assert process.wait(20) == crew.EXIT_LOST
        finally:
            process.kill()


def test_stopping_a_group_of_processes_is_left_to_the_leader(ranked: LLM) -> None:
    workers = own_processes(WORKER)
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
        os.kill(worker, signal.SIGINT)
    tokens(ranked)
    assert own_processes(WORKER) == workers != []


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_ranks_of_one_machine_listen_to_it_alone(ranked: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = _find_store(LaunchedRank(0, 2, "localhost", str(port)), 5)
    found = [each for process in (os.getpid(), *own_processes(WORKER)) for each in listening(process)]
    assert f"0100007F:{port:04X}" in found and len(found) >= 4
    assert all(each.startswith("0100007F:") for each in found)
    del store
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with exchange_settings(is_local=True):
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user has chosen"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with exchange_settings(is_local=False):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_what_several_ranks_do_not_do_is_refused_before_they_start(folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="the drafter layer_skip runs the target's own layers"):
        open_llm(folder, pipeline_parallel=2, drafter="layer_skip")
    with pytest.raises(ModelNotFoundError, match="there is no adapter folder"):
        open_llm(folder, pipeline_parallel=2, lora={"a": "nowhere"})
    with pytest.raises(UnsupportedError, match="implementation 'transformers' is not for models in several"):
        open_llm(folder, pipeline_parallel=2, implementation="transformers")
    with pytest.raises(ConfigError, match="kv_host_gib .* share tiers of KV in folders alone: .* give kv_disk"):
        open_llm(folder, pipeline_parallel=2, device="cuda", kv_host_gib=1.0)
    with pytest.raises(ConfigError, match="at most 4"):
        open_llm(folder, pipeline_parallel=5)
    with pytest.raises(ConfigError, match="tensor parallel 3 does not divide"):
        open_llm(folder, tensor_parallel=3)
    with pytest.raises(ConfigError, match="tensor_parallel must be"):
        open_llm(folder, tensor_parallel=0)


def test_launched_ranks_must_be_as_many_as_the_options_say(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT as well"):
        launched_rank()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 3, but tensor_parallel 1 times pipeline_parallel 2 is 2"):
        open_llm(folder, pipeline_parallel=2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert launched_rank() == LaunchedRank(0, 3, "127.0.0.1", "1", 2)
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK must be a number"):
        launched_rank()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK below WORLD_SIZE"):
        launched_rank()


def test_files_with_other_weights_have_another_stamp(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copy"))
    stamp = weights_stamp(EngineConfig(model=str(folder)))
    assert weights_stamp(EngineConfig(model=str(copied))) == stamp
    weights = bytearray((copied / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copied / "model.safetensors").write_bytes(weights)
    assert weights_stamp(EngineConfig(model=str(copied))) != stamp


def test_ranks_of_another_release_or_with_other_options_are_refused() -> None:
    own = EngineConfig(model="mini", pipeline_parallel=2)
    compare(1, "box", release(), [""], own)
    other = replace(own, threads=1, pin_threads=False)
    compare(1, "box", release(), [options_as_json(other)], own)  # each may have its own
    assert options_from(options_as_json(own), other) == other
    assert options_from(options_as_json(other), own) == own
    assert options_from(options_as_json(other), None) == other
    with pytest.raises(ConfigError, match="rank 1 on box has forerun 0, rank 0 has forerun "):
        compare(1, "box", "forerun 0", [""], own)
    with pytest.raises(ConfigError, match="rank 1 on box was started with dtype 'float32', rank 0 with 'auto'"):
        compare(1, "box", release(), [options_as_json(replace(own, dtype="float32"))], own)


def test_drafts_are_read_before_the_pass_since_other_ranks_are_told_them(
    alone: LLM, ranked: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU one process leaves them there until the target's choices are read, too."""
    found = list[bool]()

    def noted(*given: Any) -> Draft:
        found.append(given[2])
        return Draft(*given)

    monkeypatch.setattr("forerun.engine.engine.Draft", noted)
    for llm, may_wait in ((alone, True), (ranked, False)):
        found.clear()
        other = llm.with_drafter("suffix", adaptive=False)
        other.engine.verifier, other.engine.steady = CoupledVerifier(llm.kernels, at_once=True), None  # as on a GPU
        tokens(other)
        assert set(found) == {may_wait}
