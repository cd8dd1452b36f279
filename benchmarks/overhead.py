"""Engine overhead per step at batch 1: everything but the target's forward, plain and with drafts of 4.

    python benchmarks/overhead.py [--model mini] [--max-tokens 400]

Prints JSON: medians over decoding steps, in milliseconds. "plain" and "ngram_4" are the engine alone (an n-gram draft
is a lookup); in "draft_4" the phase "draft" also holds the draft model's own forwards, which are not overhead.
"adaptive" is "draft_4" with the policy that decides how much is drafted, in the steps where it drafts 4.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from forerun import LLM, DrafterConfig, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.bench.overhead import steps_of, summary

NUM_DRAFTED = 4
TEXT = "the cat sat on the mat and the dog sat on the cat and the mat lay on the dog " * 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Engine overhead per step at batch 1.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--draft-model", default=None, help="for models other than mini")
    parser.add_argument("--max-tokens", type=int, default=400)
    given = parser.parse_args()
    print(json.dumps(measure(given.model, given.draft_model, given.max_tokens), indent=2))


def measure(model: str, draft_model: str | None, max_tokens: int) -> dict[str, Any]:
    """Overhead without drafts, with n-gram drafts, and with a draft model if there is one."""
    plain = LLM(model, max_num_seqs=1, prefix_caching=False, keep_learned=False)
    fixed: dict[str, Any] = {"max_draft_tokens": NUM_DRAFTED, "adaptive": False}
    engines = {"plain": (plain, 0)}
    ngram = plain.with_drafter(DrafterConfig(name="ngram", ngram_min=1, ngram_max=1, **fixed))
    engines["ngram_4"] = (ngram, NUM_DRAFTED)
    draft = draft_model or ("mini-draft" if model == "mini" else None)
    if draft:
        drafter = DrafterConfig(name="draft", model=draft, **fixed)
        engines["draft_4"] = (plain.with_drafter(drafter), NUM_DRAFTED)
        engines["adaptive"] = (plain.with_drafter(replace(drafter, adaptive=True)), NUM_DRAFTED)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    prompt = plain.tokenizer.encode(TEXT)
    results = {name: _run(llm, prompt, params, num) for name, (llm, num) in engines.items()}
    return {"model": model, "max_tokens": max_tokens, **results, "machine": describe_machine(plain.kernels)}


def _run(llm: LLM, prompt: list[int], params: SamplingParams, num_drafted: int) -> dict[str, Any]:
    list(steps_of(llm, prompt, params))  # warm-up
    return summary(list(steps_of(llm, prompt, params)), num_drafted)


if __name__ == "__main__":
    main()
