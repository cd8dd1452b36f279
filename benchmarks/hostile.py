"""What hostile clients do to everyone else: the worst latency of small requests and of /health beside each attack.

    python benchmarks/hostile.py [URL | --model mini] [--only regex long_texts ...] [--seconds 8] [--max-latency-s 1]

Without a URL every attack meets a `forerun serve` of its own with room for 50 requests at a time. An attack comes from
another process, --clients requests at a time, for --seconds, and is watched until its last request is answered, for a
minute at most. Meanwhile /health and a completion of 4 tokens are asked for over and over, each through a new
connection. Fails if one of them took longer than --max-latency-s or was not answered with 200, or if requests still run
when all clients have left. What the attackers are told does not matter. Writes benchmarks/results/DATE-hostile.json and
prints Markdown.

Other servers may not know some fields: look at the statuses, an attack that was refused at once is none.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from serving import RESULTS, machine, server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALL = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
MAX_REQUESTS = 400  # of one attack
PATIENCE_S = 60.0  # for one answer, and for an attack to end
IDLE_S = 2.0  # in which requests nobody waits for must be gone
PAUSE_S = 0.02  # between two looks
NUM_SOCKETS = 200
Body = dict[str, Any]


class Ask(NamedTuple):
    """A request, and how much of its answer is read."""

    path: str
    body: bytes
    hangs_up: bool = False


class Attack(NamedTuple):
    """What it is, and its requests; none: connections that say nothing."""

    about: str
    asks: Callable[[str], list[Ask]]


def main() -> None:
    """Attack if told to by the process that watches; else watch."""
    if sys.argv[1:2] == ["attack"]:
        attack(*sys.argv[2:4], float(sys.argv[4]), int(sys.argv[5]))
        return
    given = options()
    rows = [measured(name, given) for name in given.only]
    bad = [f"{row['attack']}: {why}" for row in rows for why in failures(row, given.max_latency_s)]
    command = shlex.join(["python", "benchmarks/hostile.py", *sys.argv[1:]])
    result = {"command": command, "rows": rows, "failures": bad, "machine": machine()}
    given.out.mkdir(exist_ok=True)
    path = given.out / f"{result['machine']['date']}-hostile.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(markdown(rows), *(f"FAILED {line}" for line in bad), sep="\n")
    sys.exit(1 if bad else 0)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What hostile clients do to everyone else.")
    parser.add_argument("url", nargs="?", help="of a server that runs; one is started unless given")
    parser.add_argument("--model", default="mini", help="for the server that is started")
    parser.add_argument("--only", nargs="+", default=list(ATTACKS), choices=ATTACKS, metavar="ATTACK")
    parser.add_argument("--seconds", type=float, default=8.0, help="of new requests, for each attack")
    parser.add_argument("--clients", type=int, default=4, help="requests of an attack at the same time")
    parser.add_argument("--max-latency-s", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    return parser.parse_args()


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One attack, and what others saw of it."""
    with target(given) as url:
        row = asyncio.run(watched(url, asyncio.run(model_of(url)), name, given))
    print(json.dumps(row), file=sys.stderr)
    return row


@contextmanager
def target(given: argparse.Namespace) -> Iterator[str]:
    """The address of the server under attack."""
    if given.url:
        yield given.url.rstrip("/")
        return
    # One that hangs is killed in the end, and the attack's row says enough.
    with suppress(subprocess.TimeoutExpired), server(given.model, ["--max-connections", "50"]) as (url, _):
        yield url


# -- the attacks ------------------------------------------------------------------------------------------------


def _asks(path: str, **fields: Any) -> list[Ask]:
    return [Ask(path, json.dumps(fields).encode())]


def regex(url: str) -> list[Ask]:
    """A key that a regular expression takes twice as long to refuse with each character."""
    schema = {
        "type": "object",
        "patternProperties": {"^(a+)+$": {}},
        "properties": {"a" * 40 + "!": {"type": "string"}},
    }
    prompt = {"prompt": "a", "max_tokens": 4}
    return [*_asks(COMPLETIONS, **prompt, guided_json=schema),
            *_asks(COMPLETIONS, **prompt, guided_regex="(a+)+" * 20 + "$")]  # fmt: skip


def errors(url: str) -> list[Ask]:
    """Bodies in which everything is wrong, and bodies of many small parts."""
    user = {"role": "user", "content": ""}
    return [
        *_asks(COMPLETIONS, prompt=[0] * 400_000 + ["a"]),
        *_asks(COMPLETIONS, prompt=[0] * 2_000_000 + ["a"]),
        *_asks(COMPLETIONS, prompt=[[]] * 1_500_000),
        *_asks(COMPLETIONS, prompt="a", **{f"field{n}": n for n in range(60_000)}),
        *_asks(COMPLETIONS, prompt="a", logit_bias={str(n): "x" for n in range(60_000)}),
        *_asks(CHAT, messages=[{}] * 1_000_000),
        *_asks(CHAT, messages=[user] * 20_000),
        Ask(CHAT, b'{"messages": ' + b"[" * 4_000_000),
    ]


def long_texts(url: str) -> list[Ask]:
    """Prompts far beyond any context, of words, of one word, and of blanks."""
    texts = ["word of the day " * 480_000, "a" * 7_500_000, " " * 7_500_000, "Zq7#é" * 300_000]
    made: list[Ask] = []
    for text in texts:
        made += _asks(COMPLETIONS, prompt=text) + _asks("/tokenize", prompt=text)
        made += _asks(CHAT, messages=[{"role": "user", "content": text}])
    return made


def slow_grammar(url: str) -> list[Ask]:
    """A grammar that is quick until an "x" is chosen, which is made likely."""
    rules = [f's{i} ::= s{(7 * i + 1) % 20} s{(3 * i + 2) % 20} | s{(i + 5) % 20} s0 | "a"' for i in range(20)]
    grammar = "\n".join(['root ::= [^x]* | "x" s0', *rules])
    fields = {"prompt": "a", "max_tokens": 64, "guided_grammar": grammar, "logit_bias": {str(token(url, "x")): 100}}
    return [*_asks(COMPLETIONS, **fields), *_asks(COMPLETIONS, **fields, n=2, temperature=1.0)]


def work_per_token(url: str) -> list[Ask]:
    """Lists that every token is compared with, as long as they may be."""
    long = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
    stops, shorter = ["b" * 40_000 + str(n) for n in range(64)], ["b" * 1000 + str(n) for n in range(64)]
    ids = list(range(2000))
    return [
        *_asks(COMPLETIONS, **long, allowed_token_ids=[5, 6] * 1_000_000),
        *_asks(COMPLETIONS, **long, stop=stops),
        *_asks(COMPLETIONS, **long, stop=shorter, bad_words=shorter, n=4),
        *_asks(COMPLETIONS, **long, logit_bias={str(n): 1 for n in ids}, allowed_token_ids=ids, n=4),
        *_asks(COMPLETIONS, **long, stop_token_ids=[2] * 1_000_000, min_tokens=100),
    ]  # fmt: skip


def vanishing(url: str) -> list[Ask]:
    """Clients that hang up at the first byte of a long answer."""
    long = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
    asks = [*_asks(COMPLETIONS, prompt="Once", echo=True, **long), *_asks(COMPLETIONS, prompt="Once", **long),
            *_asks(CHAT, messages=[{"role": "user", "content": "Hello"}], **long)]  # fmt: skip
    return [ask._replace(hangs_up=True) for ask in asks]


ATTACKS = {
    "nothing": Attack("no attack", lambda url: []),
    "regex": Attack("expressions that backtrack", regex),
    "errors": Attack("bodies of wrong or many parts", errors),
    "long_texts": Attack("prompts and /tokenize of 8 MB", long_texts),
    "slow_grammar": Attack("a grammar that is slow in a branch", slow_grammar),
    "work_per_token": Attack("long lists of stops, ids, biases", work_per_token),
    "vanishing": Attack("clients that hang up at the first byte", vanishing),
    "connections": Attack("silent sockets and half headers", lambda url: []),
}


def token(url: str, text: str) -> int:
    """The id of a one-token text where the server says it, else some id."""
    asked = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(url + "/tokenize", asked, {"Content-Type": "application/json"})
    with suppress(OSError, ValueError, LookupError), urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return int(json.load(answer)["tokens"][-1])
    return 5


def attack(name: str, url: str, seconds: float, num_clients: int) -> None:
    """Make the requests, wait for a line, send them again and again, and print how often which status came."""
    asks = ATTACKS[name].asks(url)
    print("ready", flush=True)
    sys.stdin.readline()
    until, statuses = time.monotonic() + seconds, Counter[str]()
    if name == "connections":
        statuses["opened"] = hold(url, seconds)
    elif name == "nothing":
        time.sleep(seconds)
    else:
        with ThreadPoolExecutor(num_clients) as pool:
            for number in range(num_clients):
                pool.submit(insist, url, asks[number % len(asks) :] + asks[: number % len(asks)], until, statuses)
    print(json.dumps(statuses), flush=True)


def insist(url: str, asks: list[Ask], until: float, statuses: Counter[str]) -> None:
    """One client: each request in turn, until the time is over or the server had enough of them."""
    while time.monotonic() < until and sum(statuses.values()) < MAX_REQUESTS:
        for ask in asks:
            statuses[status_of(url, ask)] += 1
            if time.monotonic() > until:
                break


def status_of(url: str, ask: Ask) -> str:
    """Send a request -> the status, or what came instead."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
    try:
        connection.request("POST", ask.path, ask.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(1 if ask.hangs_up else None)
        return str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()


def hold(url: str, seconds: float) -> int:
    """Open connections that never finish a request -> how many."""
    parts, held = urlsplit(url), []
    for number in range(NUM_SOCKETS):
        with suppress(OSError):
            held.append(socket.create_connection((parts.hostname, parts.port), timeout=1.0))
            if number % 2:
                held[-1].send(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-")
    time.sleep(seconds)
    for connection in held:
        connection.close()
    return len(held)


# -- everyone else ----------------------------------------------------------------------------------------------


async def model_of(url: str) -> str:
    """The served model; its first answers are made here, before anything is measured."""
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models") as answer:
            model = str((await answer.json())["data"][0]["id"])
        for _ in range(3):
            async with session.post(COMPLETIONS, json={"model": model, **SMALL}) as answer:
                answer.raise_for_status()
    return model


async def watched(url: str, model: str, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One attack, and what others saw of it."""
    command = [sys.executable, __file__, "attack", name, url, str(given.seconds), str(given.clients)]
    attacker = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert attacker.stdin is not None and attacker.stdout is not None
    await attacker.stdout.readline()
    looks: dict[str, list[float]] = {"health": [], "small": []}
    statuses: Counter[str] = Counter()
    timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_S), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        asked = (("health", "GET", "/health", None), ("small", "POST", COMPLETIONS, {"model": model, **SMALL}))
        watching = [asyncio.create_task(look(session, *how, looks[kind], statuses)) for kind, *how in asked]
        attacker.stdin.write(b"go\n")
        try:
            told = json.loads(await asyncio.wait_for(attacker.stdout.readline(), given.seconds + PATIENCE_S) or b"{}")
        except TimeoutError:
            told = {"still waiting": 1}
            attacker.kill()
        await attacker.wait()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        left = await still_running(session)
    worst = {f"{kind}_worst_s": round(max(seconds, default=PATIENCE_S), 3) for kind, seconds in looks.items()}
    usual = {f"{kind}_median_s": round(median(seconds or [PATIENCE_S]), 4) for kind, seconds in looks.items()}
    return {"attack": name, "about": ATTACKS[name].about, "told": told, **worst, **usual, "looks": dict(statuses),
            "still_running": left}  # fmt: skip


async def look(
    session: aiohttp.ClientSession, method: str, path: str, body: Body | None, seconds: list[float],
    statuses: Counter[str],
) -> None:  # fmt: skip
    """Ask over and over, and note how long each answer took; one that is still missing at the end counts too."""
    while True:
        started, status = time.perf_counter(), "no answer"
        try:
            async with session.request(method, path, json=body) as answer:
                await answer.read()
                status = str(answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            status = type(error).__name__
        finally:
            seconds.append(time.perf_counter() - started)
            statuses[status] += status != "no answer"
        await asyncio.sleep(PAUSE_S)


async def still_running(session: aiohttp.ClientSession) -> int:
    """Requests of clients that have left, after a moment; 0 where /health does not say, 1 where it is silent."""
    give_up_s, running = time.monotonic() + IDLE_S, 1
    while running and time.monotonic() < give_up_s:
        await asyncio.sleep(PAUSE_S)
        try:
            async with session.get("/health") as answer:
                health = await answer.json()
                running = int(health["running"]) + int(health["waiting"])
        except TimeoutError:
            return 1
        except (aiohttp.ClientError, ValueError, LookupError, TypeError):
            return 0
    return running


def failures(row: dict[str, Any], most_s: float) -> Iterator[str]:
    """What others should not have seen."""
    for kind in ("health", "small"):
        if row[f"{kind}_worst_s"] > most_s:
            yield f"{kind} took {row[f'{kind}_worst_s']} s"
    for status, count in row["looks"].items():
        if count and status != "200":
            yield f"{count} times {status}"
    if row["still_running"]:
        yield f"{row['still_running']} requests still run for nobody"


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row an attack."""
    lines = ["| attack | answers to it | /health: median, worst | 4 tokens: median, worst |", "|---|---|---|---|"]
    for row in rows:
        told = ", ".join(f"{count} x {status}" for status, count in sorted(row["told"].items()))
        times = [f"{1000 * row[f'{kind}_median_s']:.0f} ms, {1000 * row[f'{kind}_worst_s']:.0f} ms"
                 for kind in ("health", "small")]  # fmt: skip
        lines.append(f"| {row['about']} | {told} | {' | '.join(times)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
