"""Batches that are killed, divided and spread over a cluster: the same answers, and rows a second beside a server.

    python benchmarks/batch.py --folder runs/batch                      # every part but ray, one after the other
    python benchmarks/batch.py --folder runs/batch --parts killed       # one part; what is in the folder is compared
    python benchmarks/batch.py --folder runs/batch --parts ray --ray HOST:6379

alone: one run. killed: SIGKILL after each of `--kills` equal parts of the rows, then --resume. shards: three runs of a
third. ray: `--ray`. server: the same requests to `forerun serve`, one (the first `--loop-rows`) and 32 at a time.
Exits with 1 if any answer differs from `alone`, compared byte for byte after sorting; the server's by their choices.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Annotated, Any

import typer
from serving import server

from forerun.server.batches import seed_of

PARTS = "alone,killed,shards,server"
CHAT = "/v1/chat/completions"
AT_ONCE = 32
SUBJECTS = ("a fox", "the sea", "an old clock", "two friends", "the rain", "a small boat", "bread", "the moon")


def main(
    folder: Annotated[Path, typer.Option(help="Where rows, answers and figures are; kept between calls.")],
    rows: int = 2000,
    kills: int = 5,
    max_tokens: int = 12,
    model: str = "mini",
    parts: str = PARTS,
    ray: str | None = None,
    loop_rows: int = 200,
) -> None:
    """Run the parts named, and print what the folder knows of all."""
    folder.mkdir(parents=True, exist_ok=True)
    given, figures_file = folder / "in.jsonl", folder / "figures.json"
    given.write_text("".join(json.dumps(row) + "\n" for row in made(rows, max_tokens, model)), "utf-8")
    figures: dict[str, Any] = json.loads(figures_file.read_text()) if figures_file.exists() else {}
    for part in parts.split(","):
        runner = Runner(folder, part, model, rows)
        if part == "killed":
            figures[part] = runner.killed(kills)
        elif part == "shards":
            figures[part] = runner.shards(3)
        elif part == "server":
            figures[part] = runner.served(loop_rows)
        else:
            figures[part] = runner.run(runner.path, *(("--ray", str(ray)) if part == "ray" else ()))
        if part not in ("alone", "server"):
            figures[part]["same_bytes_as_alone"] = runner.answers() == Runner(folder, "alone", model, rows).answers()
        figures_file.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    print(json.dumps(figures, indent=2))
    if any(not value for figure in figures.values() for name, value in figure.items() if name.startswith("same")):
        raise typer.Exit(1)


def made(num: int, max_tokens: int, model: str) -> Iterator[dict[str, Any]]:
    """Short questions, at temperatures from 0 to 1, a third with a common beginning."""
    rng = random.Random(1)
    for i in range(num):
        messages = [{"role": "user", "content": f"Tell me something about {rng.choice(SUBJECTS)}, number {i}."}]
        if i % 3 == 0:
            messages.insert(0, {"role": "system", "content": "You are a friendly helper who answers in one sentence."})
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": round(rng.random(), 2)}
        yield {"custom_id": f"row-{i}", "method": "POST", "url": CHAT, "body": body}


class Runner:
    """Runs one part in processes of its own."""

    def __init__(self, folder: Path, part: str, model: str, num_rows: int) -> None:
        self.folder, self.part, self.model, self.num_rows = folder, part, model, num_rows
        self.path = folder / f"{part}.jsonl"
        self.own = [self.path, *(folder / f"{part}-{i}.jsonl" for i in (1, 2, 3))]

    def answers(self) -> list[bytes]:
        """The lines written, sorted."""
        return sorted(line for path in self.own if path.exists() for line in path.read_bytes().splitlines())

    def _start(self, path: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "forerun.cli", "batch", str(self.folder / "in.jsonl"), str(path), "--json"]
        return subprocess.Popen([*command, "--model", self.model, *options], stdout=subprocess.PIPE)

    def run(self, path: Path, *options: str) -> dict[str, Any]:
        """One run from the start -> its figures."""
        path.unlink(missing_ok=True)
        started = time.perf_counter()
        process = self._start(path, *options)
        while process.poll() is None and not num_lines(path):
            time.sleep(0.01)
        first = time.perf_counter()
        said = json.loads(process.communicate()[0])
        ended = time.perf_counter()
        if process.returncode:
            raise SystemExit(f"{self.part} ended with {process.returncode}")
        rate = (num_lines(path) - 1) / (ended - first)
        return {"answered": said["answered"], "failed": said["failed"], "start_s": round(first - started, 2),
                "seconds": round(ended - started, 2), "rows_per_s_after_start": round(rate, 2)}  # fmt: skip

    def killed(self, num_kills: int) -> dict[str, Any]:
        """Killed at equal parts of the rows, resumed each time."""
        self.path.unlink(missing_ok=True)
        found, torn = list[int](), 0
        started = time.perf_counter()
        for i in range(1, num_kills + 1):
            process = self._start(self.path, *(() if i == 1 else ("--resume",)))
            while process.poll() is None and num_lines(self.path) < i * self.num_rows // (num_kills + 1):
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            found.append(num_lines(self.path))
            torn += not self.path.read_bytes().endswith(b"\n")
        process = self._start(self.path, "--resume")
        said = json.loads(process.communicate()[0])
        return {"rows_at_each_kill": found, "torn_lines": torn, "last_run": said["answered"],
                "done_before": said["done_before"], "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip

    def shards(self, count: int) -> dict[str, Any]:
        """A third at a time, with another number of rows computed at once."""
        numbers = range(1, count + 1)
        each = [self.run(self.own[i], "--shard", f"{i}/{count}", "--max-num-seqs", str(16 * i)) for i in numbers]
        return {"answered": [run["answered"] for run in each], "seconds": [run["seconds"] for run in each]}

    def served(self, loop_rows: int) -> dict[str, Any]:
        """The same requests to a server, one and 32 at a time."""
        rows = [json.loads(line) for line in (self.folder / "in.jsonl").read_bytes().splitlines()]
        alone = {line["custom_id"]: line for line in map(json.loads, (self.folder / "alone.jsonl").open("rb"))}
        figures: dict[str, Any] = {}
        loads = (("one_at_a_time", loop_rows, 1), (f"{AT_ONCE}_at_a_time", self.num_rows, AT_ONCE))
        with server(self.model) as (url, _):
            port = int(url.rpartition(":")[2])
            ask(port, rows[0])
            for name, num, threads in loads:
                started = time.perf_counter()
                with ThreadPoolExecutor(threads) as pool:
                    answers = list(pool.map(lambda row: ask(port, row), rows[:num]))
                seconds = time.perf_counter() - started
                theirs = [alone[row["custom_id"]]["response"]["body"]["choices"] for row in rows[:num]]
                figures[f"{name}_rows_per_s"] = round(num / seconds, 2)
                figures[f"same_choices_{name}"] = [answer["choices"] for answer in answers] == theirs
        return figures


def num_lines(path: Path) -> int:
    """Whole lines of a file that may not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ask(port: int, row: dict[str, Any]) -> dict[str, Any]:
    """One request on a connection of its own, with the seed that the batch gives the row."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        body = json.dumps({**row["body"], "seed": seed_of(0, row["custom_id"])})
        connection.request("POST", CHAT, body, {"content-type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


if __name__ == "__main__":
    typer.run(main)
