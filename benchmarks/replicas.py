"""What replicas on Ray Serve keep and cost: answers while replicas are killed, the way through the router, routing.

    python benchmarks/replicas.py [--only kills no-failover overhead routing] [--model mini] [--drafter none]
        [--replicas 3] [--nodes 2] [--clients 200] [--seconds 300] [--every 20] [--concurrency 1 16 64]

Two Ray nodes are two raylets of this machine (`ray.cluster_utils.Cluster`). Each measurement deploys anew:

* kills: streaming clients without pause, while a replica is killed with SIGKILL every `--every` seconds; each answer is
  compared, token by token, with that of a server nobody disturbs, and the longest silence within each is kept;
* no-failover: the same, where a request ends with its replica;
* overhead: one replica behind the router, and one `forerun serve`, with the same clients by turns;
* routing: conversations of several turns behind one system message, by prefix and by turns: how many tokens of prompts
  came from caches, the time to the first token, and how evenly the answers were spread.

Writes benchmarks/results/DATE-replicas-NAME.json and prints it. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from serving import machine, server

from forerun.config import use_serve_grpc

RESULTS = Path(__file__).with_name("results")
ENGINE_PROCESS = b"ray::ServeReplica:forerun:Engine"
NUM_BODIES = 24  # different requests of the clients that replicas are killed under


@dataclass
class Answer:
    """What came of one request."""

    ids: list[int] = field(default_factory=list)
    error: str | None = None
    ttft_s: float = 0.0
    silence_s: float = 0.0  # the longest, the time to the first token apart
    took_s: float = 0.0
    cached: int = 0
    prompt: int = 0
    text: str = ""


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """Stream one answer."""
    answer, begun = Answer(), time.perf_counter()
    last = begun
    whole = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=whole) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event, now = json.loads(line[6:]), time.perf_counter()
                if "error" in event:
                    answer.error = event["error"]["message"]
                    return answer
                _take(answer, event, now, begun, last)
                last = now
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__} {error}"
    answer.took_s = time.perf_counter() - begun
    return answer


def _take(answer: Answer, event: dict[str, Any], now: float, begun: float, last: float) -> None:
    if event.get("usage"):
        answer.prompt = event["usage"]["prompt_tokens"]
        answer.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    for choice in event["choices"]:
        answer.text += choice["delta"].get("content") or ""
        if choice.get("token_ids"):
            if answer.ids:
                answer.silence_s = max(answer.silence_s, now - last)
            else:
                answer.ttft_s = now - begun
            answer.ids += choice["token_ids"]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile; None of nothing."""
    listed = sorted(values)
    return round(listed[min(len(listed) - 1, int(share * len(listed)))], 4) if listed else None


# -- cluster and deployment -------------------------------------------------------------------------------------


@contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """Ray nodes as processes of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            made.add_node(num_cpus=8)
        ray.init(address=made.address, log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()


@contextmanager
def deployed(given: argparse.Namespace, **options: Any) -> Iterator[str]:
    """Replicas -> their address."""
    from ray import serve

    from forerun.replicas.deployment import Deployment
    from forerun.replicas.on_ray import build

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    deployment = Deployment(**{
        "model": given.model, "replicas": given.replicas, "drafter": given.drafter, "drain_s": 5,
        "resources": {"num_cpus": 1, "threads": given.threads}, "http": {"port": port, "num_cpus": 0},
        "health": {"period_s": 2}, "engine": engine_options(given), **options,
    })  # fmt: skip
    with cluster(given.nodes):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(deployment), name="forerun")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """The same for replicas and for the server beside them."""
    return {"max_num_seqs": given.max_num_seqs, "prefix_caching": True}


@contextmanager
def alone(given: argparse.Namespace) -> Iterator[str]:
    """One `forerun serve` with the options of a replica."""
    options = ["--max-num-seqs", given.max_num_seqs, "--threads", given.threads, "--drafter", given.drafter]
    with server(given.model, [str(option) for option in options]) as (url, _):
        yield url


def session() -> aiohttp.ClientSession:
    """As many connections as there are clients."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600), read_bufsize=1 << 20
    )


# -- replicas that are killed -----------------------------------------------------------------------------------


def bodies(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Requests of several kinds and lengths, each with a seed."""
    rng = random.Random(1)
    kinds = ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5})
    return [
        {
            "messages": [{"role": "user", "content": f"Tell me story {number} about a " + rng.choice(("fox", "boat"))}],
            "seed": number, "max_tokens": rng.randint(given.max_tokens // 4, given.max_tokens), "ignore_eos": True,
            **kinds[number % len(kinds)],
        }
        for number in range(NUM_BODIES)
    ]  # fmt: skip


async def undisturbed(url: str, asked: Sequence[dict[str, Any]]) -> list[list[int]]:
    """What one server answers."""
    async with session() as own:
        answers = [await ask(own, url, body) for body in asked]
    assert not any(answer.error for answer in answers), answers
    return [answer.ids for answer in answers]


def engines() -> list[int]:
    """Processes of replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(ENGINE_PROCESS):
                found.append(int(path.parent.name))
    return found


async def under_kills(
    url: str, asked: Sequence[dict[str, Any]], given: argparse.Namespace, kills: bool
) -> tuple[list[tuple[int, Answer]], int]:
    """Clients without pause -> what each was answered, and how many replicas were killed."""
    done: list[tuple[int, Answer]] = []
    end = time.perf_counter() + given.seconds

    async def client(number: int, own: aiohttp.ClientSession) -> None:
        rng = random.Random(number)
        while time.perf_counter() < end:
            which = rng.randrange(len(asked))
            done.append((which, await ask(own, url, asked[which])))

    async def killer() -> int:
        num_killed = 0
        while time.perf_counter() + given.every < end:
            await asyncio.sleep(given.every)
            if alive := engines():
                os.kill(random.choice(alive), signal.SIGKILL)
                num_killed += 1
        return num_killed

    async with session() as own:
        killing = asyncio.create_task(killer()) if kills else None
        await asyncio.gather(*(client(number, own) for number in range(given.clients)))
        return done, await killing if killing else 0


def kills(given: argparse.Namespace, failover: bool = True) -> dict[str, Any]:
    """Failed and wrong answers, and how long clients waited, with replicas that are killed and without."""
    asked = bodies(given)
    with alone(given) as url:
        expected = asyncio.run(undisturbed(url, asked))
    found: dict[str, Any] = {}
    with deployed(given, failover=failover) as url:
        for name in ("undisturbed", "killed") if failover else ("killed",):
            answers, num_killed = asyncio.run(under_kills(url, asked, given, name == "killed"))
            found[name] = {"replicas_killed": num_killed, **judged(answers, expected)}
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
        found["moved_requests"] = asyncio.run(metric(url, "forerun_moved_requests_total"))
    return found


def judged(answers: Sequence[tuple[int, Answer]], expected: Sequence[list[int]]) -> dict[str, Any]:
    """Counts and times of answers."""
    good = [answer for which, answer in answers if answer.error is None and answer.ids == expected[which]]
    failed = Counter(str(answer.error)[:80] for _, answer in answers if answer.error is not None)
    return {
        "answers": len(answers),
        "failed": sum(failed.values()),
        "wrong": len(answers) - len(good) - sum(failed.values()),
        "errors": dict(failed.most_common(5)),
        "ttft_p50_s": quantile([answer.ttft_s for answer in good], 0.5),
        "ttft_p99_s": quantile([answer.ttft_s for answer in good], 0.99),
        "longest_silence_p50_s": quantile([answer.silence_s for answer in good], 0.5),
        "longest_silence_p99_s": quantile([answer.silence_s for answer in good], 0.99),
        "longest_silence_max_s": quantile([answer.silence_s for answer in good], 1.0),
    }


async def metric(url: str, name: str) -> float:
    """One figure of /metrics, its labels summed."""
    async with session() as own, own.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}({{| )", line))


# -- the way through the router ---------------------------------------------------------------------------------


async def rounds(url: str, num_clients: int, given: argparse.Namespace) -> dict[str, float | None]:
    """Some answers for each client."""
    asked = bodies(given)
    begun = time.perf_counter()

    async def client(number: int, own: aiohttp.ClientSession) -> list[Answer]:
        same = {**asked[number % len(asked)], "max_tokens": given.max_tokens}
        return [await ask(own, url, {**same, "seed": number * 100 + turn}) for turn in range(given.rounds)]

    async with session() as own:
        answers = [a for each in await asyncio.gather(*map(partial(client, own=own), range(num_clients))) for a in each]
    took_s = time.perf_counter() - begun
    assert not any(answer.error for answer in answers), [answer.error for answer in answers if answer.error][:3]
    return {
        "ttft_p50_ms": 1000 * (quantile([answer.ttft_s for answer in answers], 0.5) or 0.0),
        "ttft_p99_ms": 1000 * (quantile([answer.ttft_s for answer in answers], 0.99) or 0.0),
        "tokens_per_s": round(sum(len(answer.ids) for answer in answers) / took_s, 1),
    }


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    """By number of clients: one replica behind the router, and a server without one."""
    found: dict[str, Any] = {}
    with alone(given) as direct, deployed(given, replicas=1) as routed:
        for url in (direct, routed):
            asyncio.run(rounds(url, 2, given))
        for num_clients in given.concurrency:
            runs: dict[str, list[Any]] = {"direct": [], "routed": []}
            for _ in range(given.repeats):
                for name, url in (("direct", direct), ("routed", routed)):
                    runs[name].append(asyncio.run(rounds(url, num_clients, given)))
            found[str(num_clients)] = {
                name: {key: quantile([run[key] for run in several], 0.5) for key in several[0]}
                for name, several in runs.items()
            }
            row = found[str(num_clients)]
            row["ttft_more_ms"] = round(row["routed"]["ttft_p50_ms"] - row["direct"]["ttft_p50_ms"], 3)
            row["tokens_per_s_less"] = round(1 - row["routed"]["tokens_per_s"] / row["direct"]["tokens_per_s"], 4)
    return found


# -- where requests go ------------------------------------------------------------------------------------------


async def chats(url: str, given: argparse.Namespace) -> list[Answer]:
    """Conversations behind one system message, each turn behind the answers before it."""
    rng = random.Random(2)
    words = [
        "the",
        "little",
        "fox",
        "saw",
        "a",
        "boat",
        "on",
        "the",
        "river",
        "and",
        "then",
        "it",
        "went",
        "home",
        "to",
        "sleep",
    ]
    system = " ".join(rng.choice(words) for _ in range(given.system_words))
    waiting = asyncio.Semaphore(given.chats_at_once)

    async def chat(number: int, own: aiohttp.ClientSession) -> list[Answer]:
        messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        found = []
        for turn in range(given.turns):
            messages.append({"role": "user", "content": f"{number} {turn} " + " ".join(rng.sample(words, 8))})
            async with waiting:
                body = {"messages": messages, "max_tokens": 24, "ignore_eos": True, "seed": number, "temperature": 0.7}
                found.append(await ask(own, url, body))
            messages.append({"role": "assistant", "content": found[-1].text})
        return found

    async with session() as own:
        return [a for each in await asyncio.gather(*map(partial(chat, own=own), range(given.num_chats))) for a in each]


async def by_replica(url: str) -> list[float]:
    """Samples that each replica has ended."""
    async with session() as own, own.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found: Counter[str] = Counter()
    for line in lines:
        if match := re.match(r'forerun_replica_samples_finished_total{.*replica="([^"]+)".*} (\S+)', line):
            found[match[1]] += float(match[2])  # type: ignore[assignment]
    return sorted(found.values())


def routing(given: argparse.Namespace) -> dict[str, Any]:
    """The same conversations, by prefix and by turns."""
    found = {}
    for how in ("prefix", "round_robin"):
        with deployed(given, routing=how) as url:
            answers = asyncio.run(chats(url, given))
            errors = Counter(answer.error for answer in answers if answer.error)
            good = [answer for answer in answers if not answer.error]
            found[how] = {
                "answers": len(good),
                "errors": dict(errors),
                "cached_share": round(sum(a.cached for a in good) / max(1, sum(a.prompt for a in good)), 4),
                "ttft_p50_s": quantile([answer.ttft_s for answer in good], 0.5),
                "ttft_p99_s": quantile([answer.ttft_s for answer in good], 0.99),
                "answers_by_replica": asyncio.run(by_replica(url)),
            }
    return found


MEASUREMENTS = {
    "kills": kills,
    "no-failover": lambda given: kills(given, failover=False),
    "overhead": overhead,
    "routing": routing,
}


def main() -> None:
    """Measure, keep, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafter", default="none")
    for name, usual in (("replicas", 3), ("nodes", 2), ("clients", 200), ("max-tokens", 128), ("max-num-seqs", 32),
                        ("threads", 1), ("rounds", 2), ("repeats", 3), ("num-chats", 24), ("chats-at-once", 8),
                        ("turns", 4), ("system-words", 200)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=Path, help="instead of a dated file under results/")
    given = parser.parse_args()
    use_serve_grpc()  # as `forerun deploy` does, before Serve is imported
    out = given.out or RESULTS / f"{date.today()}-replicas-{Path(given.model).name}.json"
    if out.is_dir():
        parser.error(f"--out {out} is a folder: name a file")
    result: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/replicas.py", *sys.argv[1:]])}
    result["machine"] = machine()
    for name in given.only:
        result[name] = MEASUREMENTS[name](given)
        out.write_text(json.dumps(result, indent=2) + "\n")  # after each: the next may fail
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
