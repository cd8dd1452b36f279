"""`forerun deploy` on a Ray cluster of this machine: a replica is killed under streams, another one reads prompts,
batches are answered, the command is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

import httpx
import yaml
from fastapi.testclient import TestClient
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray import serve
from ray.exceptions import ActorUnavailableError

from forerun.replicas.deployment import Deployment
from forerun.replicas.on_ray import ENGINE, PREFILL, EngineDeployment, Ingress, RayReplicas, build
from forerun.replicas.replica import Description, Replica
from forerun.replicas.transport import ReplicaLost
from tests.server.conftest import client_of, events_of, settings, wait_until
from tests.server.test_batch_api import ended, start, until
from tests.server.test_batches import chat_row
from tests.support import mini

LONG = {"temperature": 0.8, "max_tokens": 300, "ignore_eos": True, "return_token_ids": True, "stream": True}
CHAT = "/v1/chat/completions"
NUM_CLIENTS = 4


class Deployed(NamedTuple):
    """The command, and where its clients reach it."""

    process: subprocess.Popen[str]
    address: str
    log: Path


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    options = {
        "model": "mini", "replicas": 2, "resources": {"num_cpus": 0.1, "threads": 1}, "drain_s": 30,
        "engine": {"max_num_seqs": 8, "max_model_len": 512, "kv_disk": str(folder / "kv"), "kv_disk_gib": 0.5},
        "prefill": {"min_tokens": 48}, "server": {"batch_dir": str(folder / "batches")},
        "http": {"port": port, "num_cpus": 0, "ingresses": 2},
    }  # fmt: skip
    (folder / "deploy.yaml").write_text(yaml.safe_dump(options))
    log = folder / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun.cli", "deploy", str(folder / "deploy.yaml")],
            stdout=written, stderr=written, text=True,
        )  # fmt: skip
    try:
        assert wait_until(lambda: process.poll() is not None or "listening on" in log.read_text(), 150)
        assert process.poll() is None, log.read_text()
        yield Deployed(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What a server alone answers."""
    with client_of(mini.plain()) as alone:
        return [ids_in(events_of(alone.post(CHAT, json=asked(number)).text)) for number in range(NUM_CLIENTS)]


def asked(number: int) -> dict[str, Any]:
    return {**LONG, "seed": number, "messages": [{"role": "user", "content": f"Story number {number}"}]}


def ids_in(events: list[str]) -> list[int]:
    pieces = [json.loads(event) for event in events if event != "[DONE]"]
    assert not any("error" in piece for piece in pieces), pieces[-1]
    return [token for piece in pieces for choice in piece["choices"] for token in choice.get("token_ids") or ()]


def streamed(address: str, number: int, begun: set[int]) -> list[int]:
    events = []
    with httpx.stream("POST", address + CHAT, json=asked(number), timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) > 4:
                begun.add(number)
    return ids_in(events)


def engines() -> list[int]:
    """Processes of replicas, which Ray names after what they run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            name = path.read_bytes()
            if name.startswith(b"ray::ServeReplica") and f":{ENGINE}".encode() in name:
                found.append(int(path.parent.name))
    return found


def metric(address: str, name: str) -> float:
    """The largest of the ingresses', which count what they did themselves; several requests at once reach all."""

    def of_one(_: int) -> float:
        lines = httpx.get(f"{address}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return max(pool.map(of_one, range(2 * NUM_CLIENTS)))


def test_streams_go_on_when_a_replica_is_killed(deployed: Deployed, expected: list[list[int]]) -> None:
    begun = set[int]()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = [pool.submit(streamed, deployed.address, number, begun) for number in range(NUM_CLIENTS)]
        assert wait_until(lambda: len(begun) == NUM_CLIENTS, 60)
        pids = engines()
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
    assert wait_until(lambda: metric(deployed.address, "forerun_moved_requests_total") >= 1, 30)


def test_errors_and_status_reach_clients(deployed: Deployed) -> None:
    wrong = httpx.post(deployed.address + CHAT, json={"messages": [], "top_p": 7}, timeout=60)
    assert wrong.status_code == 400
    assert httpx.get(f"{deployed.address}/v1/models").json()["data"][0]["id"] == "mini"
    assert httpx.get(f"{deployed.address}/health").json()["status"] == "ok"
    assert metric(deployed.address, "forerun_replica_samples_finished_total") >= 1


def test_long_prompts_are_read_by_a_replica_of_their_own(deployed: Deployed) -> None:
    given = {"model": "mini", "prompt": " ".join(mini.PROMPTS), "max_tokens": 12, "seed": 5, "temperature": 0.8}
    answer = httpx.post(f"{deployed.address}/v1/completions", json=given, timeout=60).json()
    with client_of(mini.plain()) as alone:
        assert answer["choices"] == alone.post("/v1/completions", json=given).json()["choices"]
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16
    stored = 'forerun_prefilled_prompts_total{outcome="stored"}'
    assert wait_until(lambda: metric(deployed.address, stored) == 1, 30)


def test_batches_are_those_of_one_server(deployed: Deployed, tmp_path: Path) -> None:
    given = [chat_row(f"c{i}", f"Tell me about {i}.", max_tokens=16) for i in range(6)]
    with client_of(mini.plain(), batch_dir=tmp_path) as alone, httpx.Client(base_url=deployed.address) as many:
        outputs = []
        for client in (alone, many):
            over = until(client, start(client, given)["id"], ended)
            outputs.append(client.get(f"/v1/files/{over['output_file_id']}/content").content.splitlines())
        assert len(outputs[1]) == 6 and sorted(outputs[0]) == sorted(outputs[1])
        assert many.get("/v1/batches").json()["data"][0]["status"] == "completed"


def test_the_command_lets_streams_end(deployed: Deployed, expected: list[list[int]]) -> None:
    begun = set[int]()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, deployed.address, 0, begun)
        assert wait_until(lambda: bool(begun), 60)
        deployed.process.terminate()
        assert answer.result() == expected[0]
    assert deployed.process.wait(60) == 0, deployed.log.read_text()
    assert wait_until(lambda: not engines())


class Cancelled:
    """A call that fails, and notes that it is cancelled."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.cancelled = False

    def __aiter__(self) -> Cancelled:
        return self

    async def __anext__(self) -> Any:
        raise self._error

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("error", [
    ActorUnavailableError("somewhere", b"0" * 16), AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata()),
])  # fmt: skip
def test_a_call_that_failed_is_cancelled_where_it_may_run_on(error: Exception) -> None:
    call = Cancelled(error)
    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(run=SimpleNamespace(remote=lambda order: call)))

    async def read() -> None:
        async for _ in RayReplicas(handle, "forerun", ENGINE).run(None):  # type: ignore[arg-type]
            raise AssertionError

    with pytest.raises(ReplicaLost, match=type(error).__name__):
        asyncio.run(read())
    assert call.cancelled


def test_an_engine_describes_itself_to_its_own_deployment_alone() -> None:
    own, other = Deployment(model="mini"), Deployment(model="mini", drain_s=3)
    engine = object.__new__(EngineDeployment)
    engine._deployment, engine._replica = own, SimpleNamespace(describe=lambda: "it", stop=lambda: None)  # type: ignore[assignment]
    assert asyncio.run(engine.describe(Deployment(model="mini"))) == "it"  # type: ignore[comparison-overlap]
    assert asyncio.run(engine.describe(other)) is None


@pytest.mark.parametrize("prefill", [None, {"min_tokens": 9}])
def test_an_ingress_has_prompts_read_and_shares_batches(
    prefill: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Serve makes it, with handles that answer one question."""
    replica = Replica("r", mini.plain(), settings())
    described = replica.describe()
    replica.stop()
    told = list[Deployment]()

    async def describe(deployment: Deployment) -> Description:
        told.append(deployment)
        return described

    handle = SimpleNamespace(options=lambda **_: handle, describe=SimpleNamespace(remote=describe))
    logs = list[tuple[str, str]]()
    monkeypatch.setattr("forerun.server.logs.configure", lambda *how: logs.append(how))
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))
    kept = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 1.0}
    batches = {"batch_dir": str(tmp_path / "batches")}
    deployment = Deployment(model="mini", engine=kept, prefill=prefill, server=batches)  # type: ignore[arg-type]

    async def begin(deployment: Deployment) -> Ingress:
        made = object.__new__(Ingress)
        await made.__init__(deployment, handle, None if prefill is None else handle)  # type: ignore[misc]
        if prefill is not None:
            await made._asked
        return made

    given = [deployment, deployment.model_copy(update={"model": "another"})]  # as when it is changed
    apps = [asyncio.run(begin(each)).__serve_build_asgi_app__() for each in given]
    assert logs == [("text", "warning")] * 2  # else Ray's files have warnings without their fields
    reader = apps[0].state.service.reader
    if prefill is None:
        assert reader is None and len(told) == 2
    else:
        assert reader.replicas._served == ("app", PREFILL) and len(told) == 4
    assert apps[0].state.service.replicas._served == ("app", ENGINE)
    one, other = (TestClient(app, base_url="http://localhost") for app in apps)
    with one, other:
        made = one.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}).json()
        assert [each["id"] for each in other.get("/v1/files").json()["data"]] == [made["id"]]


def test_prefill_replicas_are_a_deployment_of_their_own(tmp_path: Path) -> None:
    kept = {"kv_disk": str(tmp_path), "kv_disk_gib": 1.0}
    apart = Deployment(model="mini", engine=kept, prefill={"replicas": 2, "resources": {"num_cpus": 1.5}})  # type: ignore[arg-type]
    [_, engines, readers] = build(apart)._bound_deployment.init_args
    found = {}
    for each in (engines._bound_deployment, readers._bound_deployment):
        found[each.name] = each.num_replicas, each.ray_actor_options["num_cpus"], each.init_kwargs
        [of] = each.init_args
        assert (of.prefill is not None) and of.engine_config().kv_disk == str(tmp_path)
    assert found == {ENGINE: (1, 1.0, {}), PREFILL: (2, 1.5, {"prefill_only": True})}
    assert build(Deployment(model="mini"))._bound_deployment.init_args[2] is None
