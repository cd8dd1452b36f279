"""guidellm: a small benchmark, which asks for usage in every event of its streams."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tour import BASE, KEY, MODEL, check

FOLDER = Path(tempfile.mkdtemp())


@check("benchmark")
def _():
    out, prompts = FOLDER / "report.json", FOLDER / "prompts.jsonl"
    asked = [f"Tell me about {about}." for about in ("a fox", "a bear", "the sea", "a tree")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    backend = {"kind": "openai_http", "target": BASE, "model": MODEL, "api_key": KEY}
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--backend", json.dumps(backend),
               "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
               "--data", json.dumps({"kind": "json_file", "path": str(prompts)}),
               "--output", json.dumps({"kind": "json", "path": str(out)}), "--disable-console-interactive"]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr)
    [result] = json.loads(out.read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    return totals["successful"] >= 4 and not totals["errored"]
