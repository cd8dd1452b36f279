"""A server under mixed load for minutes, with clients that vanish, run out of time and send garbage; what it left.

    python benchmarks/soak.py --model mini --minutes 30 [--clients 16] [--drafter ngram] [--pause-s 0]

Well-behaved clients ask the same questions over and over and must always get the same answer. The others hang up in
the middle of a stream or before it, give themselves too little time, and send bodies that are no JSON, no UTF-8, of
wrong types, too large, or never finished. Meanwhile the server's memory and open files are read from /proc.

At the end the server must be idle: no block owned, no more files open than after the first minute or so, memory not
grown beyond --max-growth-mib since then, no status 500, and `check_integrity()` of the scheduler clean, which the
server's own process runs after its last request. What is bounded fills up in the first half (the prefix cache, what
drafters remember, the allocator's arenas); over the second half memory may rise by --max-slope-mib-per-minute at most.
Then the server is killed with SIGKILL and started again. Exits with 1 if anything failed; writes
benchmarks/results/DATE-soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from serving import RESULTS, machine, server

PROMPTS = ("Tell me a story about a bird.", "What is a river?", "Write a list of five animals.", "Once upon a time")
SHARED = "You are a patient teacher who answers in short sentences. " * 12
SETTLED = 0.2  # of the time: what the server holds by then is what it needs
IDLE_S = 60.0  # for the last requests to be gone
MAX_MORE_FILES = 8
SHOWN = ("counts", "statuses", "after", "slope_mib_per_minute", "ready_again_s", "failures")
GARBAGE: tuple[bytes, ...] = (
    b"{", b"[]", b"\xff\xfe{}", b'{"messages": "no list"}', b'{"messages": [{"role": "user", "content": 7}]}',
    b'{"messages": [], "temperature": NaN}', b'{"messages": [{"role": "king", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', b'{"prompt": "x", "unknown": 1}',
    b'{"messages": [{"role": "user", "content": "x"}], "guided_regex": "(a+)+$("}', b"[" * 20_000,
    json.dumps({"messages": [{"role": "user", "content": "word " * 20_000}]}).encode(),
)  # fmt: skip


def main() -> None:
    """Serve if asked to, else start a server and bear down on it."""
    if sys.argv[1:2] == ["serve"]:
        serve()
        return
    given = options()
    command = (sys.executable, __file__, "serve")
    with server(given.model, ["--drafter", given.drafter], command) as (url, process):
        result = asyncio.run(Soak(url, process.pid, given).run())
        process.terminate()
        result["after"] = json.loads(process.stdout.read() or '{"integrity": "the server said nothing"}')
    result["slope_mib_per_minute"] = slope_mib_per_minute(result["samples"])
    result["ready_again_s"] = ready_again_s(given, command)
    result["failures"] = failures(result, given)
    result |= {"command": " ".join(["python benchmarks/soak.py", *sys.argv[1:]]), "machine": machine()}
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{result['machine']['date']}-soak.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps({name: result[name] for name in SHOWN}, indent=1))
    sys.exit(1 if result["failures"] else 0)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A server under mixed load, and what it left.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pause-s", type=float, default=0.0, help="of a client between requests, on average")
    parser.add_argument("--max-growth-mib", type=float, default=64.0)
    parser.add_argument("--max-slope-mib-per-minute", type=float, default=1.0, help="of memory, over the second half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    return parser.parse_args()


# -- the server's process ---------------------------------------------------------------------------------------


def serve() -> None:
    """`forerun serve` that says on standard output, after its last request, in what state it leaves the engine."""
    import uvicorn

    from forerun import LLM
    from forerun.server.app import create_app
    from forerun.server.memory import bound_arenas
    from forerun.server.settings import ServerSettings

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--drafter")
    given = parser.parse_args(sys.argv[2:])
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when it has shut down
    bound_arenas()  # as `forerun serve` does
    llm = LLM(given.model, drafter=given.drafter)
    app = create_app(llm, ServerSettings(served_names=(given.model,)))
    uvicorn.Server(uvicorn.Config(app, port=given.port, access_log=False, timeout_graceful_shutdown=10)).run()
    print(json.dumps(state_of(llm)), flush=True)


def state_of(llm: Any) -> dict[str, Any]:
    """Whether the blocks add up, and how many still have an owner; the engine's thread has ended."""
    scheduler = llm.engine.scheduler
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        return {"integrity": str(error), "blocks_owned": scheduler.pool.num_used}
    return {"integrity": "clean", "blocks_owned": scheduler.pool.num_used}


def ready_again_s(given: argparse.Namespace, command: tuple[str, ...]) -> float:
    """Kill a server with SIGKILL, start another -> seconds until that one listens."""
    with server(given.model, ["--drafter", given.drafter], command) as (_, process):
        process.kill()
        process.wait()
        started = time.monotonic()
        with server(given.model, ["--drafter", given.drafter], command):
            return round(time.monotonic() - started, 2)


# -- the clients ------------------------------------------------------------------------------------------------


class Soak:
    """Clients of every kind at once, and what came of them."""

    def __init__(self, url: str, pid: int, given: argparse.Namespace) -> None:
        self._url, self._pid, self._given = url, pid, given
        self._random = random.Random(given.seed)
        self._end_s = time.monotonic() + given.minutes * 60
        self._answers: dict[str, str] = {}  # a question's body -> its answer, always the same
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []

    async def run(self) -> dict[str, Any]:
        """All clients until the time is over, then a look at what is left."""
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(self._url, timeout=timeout) as self._session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            for _ in range(self._given.clients):
                tasks.create_task(self._client())
        async with aiohttp.ClientSession(self._url, timeout=timeout) as self._session:
            idle = await self._idle()
        self.samples.append(usage_of(self._pid))
        return {"counts": dict(self.counts), "statuses": dict(self.statuses), "idle": idle, "samples": self.samples}

    async def _client(self) -> None:
        """One behaviour after the other."""
        behaviours: list[Callable[[], Awaitable[None]]] = [self._whole, self._stream, self._vanish, self._too_late,
                                                           self._garbage, self._half]  # fmt: skip
        while time.monotonic() < self._end_s:
            behave = self._random.choices(behaviours, (4, 4, 3, 2, 3, 1))[0]
            self.counts[behave.__name__.strip("_")] += 1
            try:
                await behave()
            except (aiohttp.ClientError, OSError, ValueError) as error:
                well_behaved = behave in (self._whole, self._stream)
                self.counts[f"{'good' if well_behaved else 'bad'} client: {type(error).__name__}"] += 1
            await asyncio.sleep(self._random.random() * 2 * self._given.pause_s)

    async def _watch(self) -> None:
        """Memory and open files, a hundred times."""
        while time.monotonic() < self._end_s:
            self.samples.append(usage_of(self._pid))
            await asyncio.sleep(self._given.minutes * 0.6)

    def _question(self, **fields: Any) -> dict[str, Any]:
        """One of few, so that each is asked often."""
        pick = self._random
        messages = [{"role": "user", "content": pick.choice(PROMPTS)}]
        if pick.random() < 0.5:
            messages.insert(0, {"role": "system", "content": SHARED})
        choices = {"temperature": pick.choice((0.0, 0.8)), "seed": pick.randrange(3), "max_tokens": 32}
        return {"messages": messages, **choices, **fields}

    async def _whole(self) -> None:
        body = self._question(speculation=self._random.choice(("auto", "off")))
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            self._count("good", answer)
            if answer.status == 200:
                self._compare(body, (await answer.json())["choices"][0]["message"]["content"])

    async def _stream(self) -> None:
        body, text = self._question(), ""
        async with self._session.post("/v1/chat/completions", json={**body, "stream": True}) as answer:
            self._count("good", answer)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.counts["wrong: error in a stream"] += "error" in event
                    text += "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
        if answer.status == 200:
            self._compare(body, text)

    def _compare(self, body: dict[str, Any], text: str) -> None:
        """The same question must have the same answer: alone or among others, cold or warm, drafted or not."""
        key = json.dumps({name: value for name, value in body.items() if name != "speculation"}, sort_keys=True)
        self.counts["wrong: another answer"] += self._answers.setdefault(key, text) != text

    async def _vanish(self) -> None:
        body = self._question(stream=True, max_tokens=200, n=self._random.choice((1, 2)))
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            self._count("bad", answer)
            for _ in range(self._random.randrange(6)):
                await answer.content.readline()
            answer.close()

    async def _too_late(self) -> None:
        body = self._question(timeout=self._random.choice((0.001, 0.05, 0.2)), max_tokens=400)
        async with self._session.post("/v1/chat/completions", json=body) as answer:
            self._count("bad", answer)
            await answer.read()

    async def _garbage(self) -> None:
        path = self._random.choice(("/v1/chat/completions", "/v1/completions", "/tokenize", "/nowhere"))
        headers = {"Content-Type": "application/json"}
        async with self._session.post(path, data=self._random.choice(GARBAGE), headers=headers) as answer:
            self._count("bad", answer)
            await answer.read()

    async def _half(self) -> None:
        """Begin a request, or talk no HTTP at all, and hang up."""
        parts = urlsplit(self._url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        writer.write(self._random.choice((head, b"\x16\x03\x01 hello\r\n\r\n", b"")))
        await writer.drain()
        await asyncio.sleep(self._random.random())
        writer.close()

    def _count(self, kind: str, answer: aiohttp.ClientResponse) -> None:
        self.statuses[f"{kind} {answer.status}"] += 1

    async def _idle(self) -> bool:
        """Nothing runs or waits any more, soon after the last client has gone."""
        give_up_s = time.monotonic() + IDLE_S
        while time.monotonic() < give_up_s:
            async with self._session.get("/health") as answer:
                health = await answer.json()
            if health["status"] == "ok" and health["running"] == health["waiting"] == 0:
                return True
            await asyncio.sleep(0.2)
        return False


def usage_of(pid: int) -> dict[str, float]:
    """Memory and open files of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    (resident,) = (int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return {
        "time_s": round(time.monotonic(), 1),
        "rss_mib": round(resident / 1024, 1),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


def slope_mib_per_minute(samples: Sequence[dict[str, float]]) -> float:
    """How fast memory rises over the second half: the median slope between any two samples (Theil and Sen).

    One step early or late in it, such as a longest prompt that came late, does not move that; a leak does.
    """
    pairs = combinations(samples[len(samples) // 2 :], 2)
    slopes = [60 * (b["rss_mib"] - a["rss_mib"]) / (b["time_s"] - a["time_s"])
              for a, b in pairs if b["time_s"] > a["time_s"]]  # fmt: skip
    return round(median(slopes), 3) if slopes else 0.0


def failures(result: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """What a server that leaks nothing and breaks nothing would not have done."""
    found = [f"{name}: {count}" for name, count in result["counts"].items()
             if count and name.startswith(("wrong", "good client"))]  # fmt: skip
    found += [f"status {name}: {count}" for name, count in result["statuses"].items()
              if name.endswith(" 500") or (name.startswith("good") and name != "good 200")]  # fmt: skip
    found += [] if result["idle"] else [f"still busy {IDLE_S:.0f} s after the last client"]
    after, samples = result["after"], result["samples"]
    found += [] if after["integrity"] == "clean" else [f"integrity: {after['integrity']}"]
    found += [f"{after['blocks_owned']} blocks still owned"] if after.get("blocks_owned") else []
    settled, last = samples[int(len(samples) * SETTLED)], samples[-1]
    growth = last["rss_mib"] - settled["rss_mib"]
    found += [f"memory grew by {growth:.0f} MiB"] if growth > given.max_growth_mib else []
    slope, most = result["slope_mib_per_minute"], given.max_slope_mib_per_minute
    found += [f"memory rises by {slope:.2f} MiB a minute"] if slope > most else []
    more = last["files"] - settled["files"]
    return found + ([f"{more:.0f} more files open"] if more > MAX_MORE_FILES else [])


if __name__ == "__main__":
    main()
