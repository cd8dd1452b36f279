"""Models run through transformers beside transformers' own `generate`: tokens/s with one request and with several.

    python benchmarks/fallback.py [--model gpt-neox-160m] [--dtype float32] [--drafters ngram,suffix] [--max-tokens 64]

--model: a name of SHAPES, whose weights are random, or any model that forerun loads, a family of its own included.
Every answer has the same number of tokens, chosen greedily. Each way of answering runs once to warm up, then all take
turns, and the median is printed as JSON. transformers runs on as many threads as forerun, with its default attention;
several requests are one padded batch for it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.bench.prompts import read_prompts
from forerun.weights.resolve import resolve_model

# Sizes as in the published config.json of pythia-160m, gpt2, opt-125m and bloom's smallest beside mini's vocabulary.
COMMON = {"vocab_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt-neox-160m": {"model_type": "gpt_neox", "intermediate_size": 3072, "max_position_embeddings": 2048},
    "gpt2-124m": {"model_type": "gpt2", "n_positions": 1024},
    "opt-125m": {"model_type": "opt", "ffn_dim": 3072, "word_embed_proj_dim": 768, "max_position_embeddings": 2048},
    "bloom-125m": {"model_type": "bloom"},
}
PADDING = 0
LONGEST_PROMPT = 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Beside transformers' own generate.")
    parser.add_argument("--model", default="gpt-neox-160m")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of random weights")
    parser.add_argument("--drafters", default="ngram,suffix")
    parser.add_argument("--their-dtype", default="auto", help="that transformers computes in")
    parser.add_argument("--prompts", type=Path, default=None)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model in SHAPES:
            model = str(write_random(model, getattr(torch, given.dtype), Path(folder)))
        print(json.dumps({"model": given.model, **measure(model, given)}, indent=2))


def write_random(name: str, dtype: torch.dtype, folder: Path) -> Path:
    """A model of SHAPES with random weights and the tokenizer of mini."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**COMMON, **SHAPES[name]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    model.to(dtype).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("mini") / file, folder / file)
    return folder


def measure(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every way to answer, and what was answered differently from plain decoding."""
    from transformers import AutoModelForCausalLM

    plain = LLM(model, implementation="transformers", drafter="none", prefix_caching=False)
    module = AutoModelForCausalLM.from_pretrained(plain.loaded.folder, dtype=given.their_dtype).eval()
    torch.set_num_threads(getattr(plain.kernels, "num_threads", torch.get_num_threads()))
    cases = read_prompts(given.prompts, given.requests)
    prompts = [plain.tokenizer.encode(case.turns[0])[:LONGEST_PROMPT] for case in cases]
    params = SamplingParams(max_tokens=given.max_tokens, ignore_eos=True, temperature=0.0)
    engines = {"none": plain}
    for name in filter(None, given.drafters.split(",")):
        engines[name] = plain.with_drafter(name, across_requests=False, keep_learned=False)
    ways: dict[str, Callable[[], object]] = {
        "transformers, one by one": lambda: [theirs(module, [prompt], given.max_tokens) for prompt in prompts],
        "transformers, together": lambda: theirs(module, prompts, given.max_tokens),
    }
    for name, llm in engines.items():
        ways[f"{name}, one by one"] = lambda llm=llm: [ours(llm, [prompt], params)[0] for prompt in prompts]
        ways[f"{name}, together"] = lambda llm=llm: ours(llm, prompts, params)
    answers = {way: run() for way, run in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - start)
    num_tokens = len(prompts) * given.max_tokens
    own = {way: answer for way, answer in answers.items() if not way.startswith("transformers")}
    return {
        "pooled": bool(plain.loaded.kv_specs),
        "num_parameters": plain.loaded.model.num_parameters,
        "prompts": [len(prompt) for prompt in prompts],
        "tokens_per_s": {way: round(num_tokens / statistics.median(taken), 1) for way, taken in times.items()},
        "different": [way for way, answer in own.items() if answer != own["none, one by one"]],
        "machine": describe_machine(plain.kernels),
    }


def ours(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    """Answers of forerun."""
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


@torch.no_grad()
def theirs(module: Any, prompts: Sequence[list[int]], max_tokens: int) -> torch.Tensor:
    """Answers of transformers, of several prompts in one batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "min_new_tokens": max_tokens, "max_new_tokens": max_tokens}
    made: torch.Tensor = module.generate(ids, attention_mask=mask, pad_token_id=PADDING, **options)
    return made[:, width:]


if __name__ == "__main__":
    main()
