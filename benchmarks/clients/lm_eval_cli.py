"""lm-eval: log-likelihoods through completions with the server's own tokenizer, and generation through chat."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tour import KEY, MODEL, V1, check

FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (
    {"question": "The sky is", "choices": ["blue", "a potato"], "answer": 0},
    {"question": "Grass is", "choices": ["green", "a telephone"], "answer": 0})))  # fmt: skip
DATA = f"""dataset_path: json
dataset_kwargs:
  data_files:
    test: {FOLDER}/rows.jsonl
test_split: test
doc_to_text: question
"""
CHOOSE = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
WRITE = """output_type: generate_until
doc_to_target: '{{choices[0]}}'
generation_kwargs:
  until: ['.']
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
(FOLDER / "choose.yaml").write_text(f"task: choose\n{DATA}{CHOOSE}")
(FOLDER / "write.yaml").write_text(f"task: write\n{DATA}{WRITE}")


def lm_eval(kind, path, task, *more, tokenizer="remote"):
    out = FOLDER / f"{task}-{kind}"
    where = f"model={MODEL},base_url={V1}/{path},tokenizer_backend={tokenizer},auth_token={KEY}"
    settings = f"{where},num_concurrent=1,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", settings, "--tasks", task,
               "--include_path", str(FOLDER), "--output_path", str(out), *more]  # fmt: skip
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "OPENAI_API_KEY": KEY})
    [found] = out.rglob("results_*.json")
    return json.loads(found.read_text())["results"][task]


@check("log-likelihoods, remote tokenizer")
def _():
    return "acc,none" in lm_eval("local-completions", "completions", "choose")


@check("generation through chat")
def _():
    return lm_eval("local-chat-completions", "chat/completions", "write", "--apply_chat_template", tokenizer="None")
