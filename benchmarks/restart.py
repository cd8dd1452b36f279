"""Time to the first text of a long prompt after `kill -9`, with a tier on disk and without one: a table.

    python benchmarks/restart.py [--model mini] [--tokens 1500] [--repeats 3] [--threads N]

Each measurement is a process of its own: it loads the model, gets the prompt and tells how long the first token took;
then it is killed with SIGKILL. "cold" has an empty folder; "restarted" has what a killed process left. The files may
still be in the operating system's memory, as after any restart of a process alone. Texts are compared.
Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

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
llm.engine.scheduler.prefix_cache.lower.flush()
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
    given = parser.parse_args()
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


if __name__ == "__main__":
    main()
