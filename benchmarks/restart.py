"""Time to the first text of a long prompt after `kill -9`, with a tier on disk and without one; or a tier under churn.

    python benchmarks/restart.py [--model mini] [--tokens 1500] [--repeats 3] [--threads N]
    python benchmarks/restart.py --churn-minutes 30 [--gib 0.06] [--prompts 80] [--a-second 3]

Each measurement is a process of its own: it loads the model, gets the prompt and tells how long the first token took;
then it is killed with SIGKILL. "cold" has an empty folder; "restarted" has what a killed process left. The files may
still be in the operating system's memory, as after any restart of a process alone. Texts are compared.
Nothing else should run on the machine meanwhile.

Churn: a server whose folder holds a part of the prompts that clients ask for. Every `KILL_S` seconds the server is
killed with SIGKILL and started again, every `FLIP_S` one bit of a file is flipped. Each answer is compared with that
of an engine without a tier, and the folder's size is read twice a second. Exits with 1 if an answer is wrong, a file
that was damaged went unnoticed in one, or the folder was larger than its bound.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event, Thread
from urllib.request import urlopen

from serving import server

from forerun import LLM, SamplingParams

KILL_S, FLIP_S = 60.0, 5.0
WORDS = "the old boat went out to sea and came back with the morning tide "

CHILD = """
import json, sys, time
from forerun import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(given["model"], kv_disk=given["folder"], keep_learned=False, **given["options"])
words = "the old boat went out to sea and came back with the morning tide ".split()
text = " ".join(words[(i * i + given["number"]) % len(words)] for i in range(4 * given["tokens"]))
prompt = llm.tokenizer.encode(text)[: given["tokens"]]
began = time.perf_counter()
for output in llm.stream(prompt, SamplingParams(max_tokens=8, seed=1, temperature=0.0)):
    if output.outputs[0].token_ids:
        first_s = time.perf_counter() - began
        break
[whole] = llm.generate([prompt], SamplingParams(max_tokens=8, seed=1, temperature=0.0))
llm.engine.scheduler.prefix_cache.lower.spill.flush()
stats = output.outputs[0].stats
found = {"first_s": first_s, "cached": stats.num_cached_tokens, "tokens": whole.outputs[0].token_ids}
print(json.dumps(found), flush=True)
time.sleep(600)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--churn-minutes", type=float)
    parser.add_argument("--gib", type=float, default=0.06, help="the folder's bound")
    parser.add_argument("--prompts", type=int, default=80, help="different ones")
    parser.add_argument("--a-second", type=float, default=3.0, help="requests, at most")
    given = parser.parse_args()
    if given.churn_minutes is not None:
        sys.exit(Churn(given).run())
    cold, warm = [], []
    for number in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (measured(given, folder, number) for _ in range(2))
            assert first["tokens"] == second["tokens"], "the texts differ"
            assert first["cached"] == 0 and second["cached"] > 0
            cold.append(first["first_s"])
            warm.append(second["first_s"])
            num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.kv"))
    print(f"{given.model}, {given.tokens} tokens, {given.repeats} times, {num_bytes / 1e6:.1f} MB on disk")
    for name, seconds in (("cold", cold), ("restarted", warm)):
        shown = ", ".join(f"{1000 * each:.0f}" for each in seconds)
        print(f"{name}: median {1000 * median(seconds):.0f} ms ({shown})")
    print(f"tokens of the prompt that came from disk: {second['cached']}")


def measured(given: argparse.Namespace, folder: str, number: int) -> dict[str, object]:
    """One process from its start to its end by SIGKILL."""
    options = {"max_model_len": given.tokens + 64, "threads": given.threads}
    sent = {"model": given.model, "folder": folder, "tokens": given.tokens, "number": number, "options": options}
    with subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(sent)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    return json.loads(line)  # type: ignore[no-any-return]


class Churn:
    """A server that is killed, whose files are damaged, and whose folder is too small for what is asked."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._plain = LLM(given.model, threads=1, keep_learned=False, max_model_len=given.tokens + 64)
        self._expected: dict[int, str] = {}
        self._counted: Counter[str] = Counter()
        self._largest = 0
        self._over = Event()

    def run(self) -> int:
        """Ask, kill, damage, compare, print -> the exit status."""
        chance, ends = random.Random(5), time.monotonic() + 60 * self._given.churn_minutes
        with tempfile.TemporaryDirectory() as folder:
            watch = Thread(target=self._watch, args=(Path(folder),), daemon=True)
            watch.start()
            while time.monotonic() < ends:
                self._one_server(folder, chance, min(ends, time.monotonic() + KILL_S))
            self._over.set()
            watch.join()
        bound = round(self._given.gib * 2**30)
        print(
            f"{self._given.churn_minutes:g} minutes, {self._given.model}, {self._given.prompts} prompts: "
            + ", ".join(f"{name} {num}" for name, num in sorted(self._counted.items()))
        )
        print(f"the folder: at most {self._largest:,} bytes of {bound:,}")
        return int(self._counted["wrong answers"] > 0 or self._largest > bound)

    def _one_server(self, folder: str, chance: random.Random, ends: float) -> None:
        options = ["--kv-disk", folder, "--kv-disk-gib", str(self._given.gib), "--threads", "1"]
        options += ["--max-model-len", str(self._given.tokens + 64), "--no-keep-learned", "--max-num-seqs", "4"]
        with ExitStack() as stack:
            url, process = stack.enter_context(server(self._given.model, options))
            asking = stack.enter_context(ThreadPoolExecutor(4))
            flips_at, answers = time.monotonic() + FLIP_S, []
            while time.monotonic() < ends:
                number = min(chance.randrange(self._given.prompts), chance.randrange(self._given.prompts))
                answers.append((number, asking.submit(self._ask, url, number)))
                if time.monotonic() > flips_at:
                    flips_at += FLIP_S
                    self._flip(Path(folder), chance)
                time.sleep(1 / self._given.a_second)
                while answers and answers[0][1].done():
                    self._compare(*answers.pop(0))
            with urlopen(url + "/metrics") as told:
                self._add_metrics(told.read().decode())
            process.send_signal(signal.SIGKILL)
            self._counted["kills"] += 1
            for number, answer in answers:
                self._compare(number, answer)

    def _ask(self, url: str, number: int) -> str | None:
        """The answer; None of a server that was killed."""
        body = {"model": self._given.model, "prompt": self._prompt(number), "max_tokens": 8, "temperature": 0}
        with suppress(OSError, HTTPException):
            asked = HTTPConnection(url.removeprefix("http://"), timeout=120)
            asked.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            text = asked.getresponse().read()
            return str(json.loads(text)["choices"][0]["text"])
        return None

    def _compare(self, number: int, answer: object) -> None:
        text = answer.result()  # type: ignore[attr-defined]
        if number not in self._expected:
            params = SamplingParams(max_tokens=8, temperature=0.0)
            self._expected[number] = self._plain.generate([self._prompt(number)], params)[0].outputs[0].text
        if text is None:
            self._counted["answers cut off by a kill"] += 1
        elif text == self._expected[number]:
            self._counted["right answers"] += 1
        else:
            self._counted["wrong answers"] += 1

    def _prompt(self, number: int) -> str:
        chance, words = random.Random(number), WORDS.split()
        return " ".join(chance.choice(words) for _ in range(chance.randrange(100, self._given.tokens * 2 // 3)))

    def _flip(self, folder: Path, chance: random.Random) -> None:
        """One bit of one file."""
        files = sorted(folder.rglob("*.kv"))
        with suppress(OSError), chance.choice(files).open("r+b") as file:
            place = chance.randrange(file.seek(0, 2))
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
            self._counted["bits flipped"] += 1

    def _watch(self, folder: Path) -> None:
        while not self._over.wait(0.5):
            sizes = []
            for path in folder.rglob("*.kv"):
                with suppress(FileNotFoundError):
                    sizes.append(path.stat().st_blocks * 512)
            self._largest = max(self._largest, sum(sizes))

    def _add_metrics(self, text: str) -> None:
        for name, value in re.findall(
            r"^forerun_kv_tier_(\w+?)(?:_total)?(?:\{.*\})? ([0-9.e+]+)$", text, re.MULTILINE
        ):
            if name in (
                "stored_blocks",
                "loaded_blocks",
                "evicted_blocks",
                "corrupted_blocks",
                "failed_writes",
                "hits",
            ):
                self._counted[name.replace("_", " ")] += round(float(value))


if __name__ == "__main__":
    main()
