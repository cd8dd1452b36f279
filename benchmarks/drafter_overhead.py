"""What drafting without a model costs: microseconds a token at several context lengths, and a step of each drafter.

    python benchmarks/drafter_overhead.py [--model mini] [--contexts 1000,10000,30000] [--drafts 5,15]

The text is this package's own source code in the model's tokens. "update" is what one known token costs (its share of
reading the context at once), "propose" what a step costs in which three tokens became known: reading them, looking up
and growing the tree. "core" is the C++ alone, "drafter" all of it as the engine calls it. Prints JSON with medians
and 90th percentiles; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch

import forerun
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.core import Request
from forerun.drafters.base import Drafter, logits_reader
from forerun.drafters.ngram import NgramDrafter, select_index
from forerun.drafters.recycling import RecyclingDrafter
from forerun.drafters.suffix import CORPUS_TOKENS, LEAST_CHANCE, MAX_MATCH, SuffixDrafter
from forerun.kernels.ops import Kernels
from forerun.kernels.suffix import SuffixCorpus, SuffixKit, select_suffix
from forerun.speculation.draft import Draft

NUM_STEPS = 300
STEP_TOKENS = 3  # a usual acceptance length
ANSWER_TOKENS = 500  # of the texts a corpus is filled with
NGRAM_SIZES = (2, 4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of drafting without a model.")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--contexts", default="1000,10000,30000")
    parser.add_argument("--drafts", default="5,15")
    given = parser.parse_args()
    contexts, drafts = ([int(part) for part in text.split(",")] for text in (given.contexts, given.drafts))
    llm = LLM(given.model, max_num_seqs=1)
    text = own_source(llm, max(contexts) + NUM_STEPS * STEP_TOKENS)
    vocab_size = llm.loaded.model.vocab_size
    rows = [row for size in contexts for num in drafts for row in measure(text, size, num, vocab_size, llm.kernels)]
    print(json.dumps({"rows": rows, "machine": describe_machine(llm.kernels)}, indent=2))


def own_source(llm: LLM, num_tokens: int) -> list[int]:
    """Tokens of the package's Python files, in the order of their names, repeated only if they run out."""
    tokens: list[int] = []
    paths = sorted(Path(forerun.__file__).parent.rglob("*.py"))
    while len(tokens) < num_tokens:
        for path in paths:
            tokens += llm.tokenizer.encode(path.read_text("utf-8"))
    return tokens[:num_tokens]


def measure(
    text: Sequence[int], num_context: int, num_drafts: int, vocab_size: int, kernels: Kernels
) -> list[dict[str, Any]]:
    """A row for each drafter at one context length and number of drafts."""
    kit = select_suffix()
    drafters: dict[str, Callable[[], Drafter]] = {
        "ngram": lambda: NgramDrafter(num_drafts, *NGRAM_SIZES, select_index()),
        "suffix": lambda: SuffixDrafter(num_drafts, kit, corpus_tokens=0),
        "suffix, full corpus": lambda: with_full_corpus(SuffixDrafter(num_drafts, kit), text),
        "recycling": lambda: trained(RecyclingDrafter(num_drafts, vocab_size, kernels), vocab_size),
    }
    place = {"context": num_context, "drafts": num_drafts}
    cores = {"suffix": None, "suffix, full corpus": full_corpus(kit, text)}
    rows = [
        {"drafter": name, "part": "core", **place, **core_cost(kit, corpus, text, num_context, num_drafts)}
        for name, corpus in cores.items()
    ]
    for name, make in drafters.items():
        rows.append({"drafter": name, "part": "drafter", **place, **drafter_cost(make(), text, num_context)})
    return rows


def full_corpus(kit: SuffixKit, text: Sequence[int]) -> SuffixCorpus:
    """A corpus of answers cut from the text, as full as it gets."""
    corpus = kit.corpus(CORPUS_TOKENS, MAX_MATCH + 1)
    for answer in answers(text):
        corpus.add(answer)
    return corpus


def answers(text: Sequence[int]) -> list[Sequence[int]]:
    """As many pieces of the text as fill a corpus without turning it over."""
    starts = [start * 37 % max(1, len(text) - ANSWER_TOKENS) for start in range(CORPUS_TOKENS // (ANSWER_TOKENS + 1))]
    return [text[start : start + ANSWER_TOKENS] for start in starts]


def with_full_corpus(drafter: SuffixDrafter, text: Sequence[int]) -> SuffixDrafter:
    """The drafter after many requests."""
    for index, answer in enumerate(answers(text)):
        request = new_request(f"old-{index}", [0])
        drafter.begin(request)
        request.token_ids.extend(answer)
        request.finish_reason = "stop"
        drafter.end(request.request_id)
    return drafter


def trained(drafter: RecyclingDrafter, vocab_size: int) -> RecyclingDrafter:
    """The drafter once it has seen every token."""
    reader = logits_reader(drafter)
    assert reader is not None
    for first in range(0, vocab_size, 64):
        tokens = torch.arange(first, min(first + 64, vocab_size))
        reader.observe_logits(tokens, torch.randn(len(tokens), vocab_size))
    return drafter


def new_request(name: str, prompt: Sequence[int]) -> Request:
    """A request of the drafters' tests: nothing of it but its tokens matters."""
    return Request(name, tuple(prompt), SamplingParams(max_tokens=None), seed=0)


def core_cost(
    kit: SuffixKit, corpus: SuffixCorpus | None, text: Sequence[int], num_context: int, num_drafts: int
) -> dict[str, float]:
    """Costs of the structure itself."""
    made = kit.text(MAX_MATCH + 1, corpus)
    start = perf_counter()
    made.extend(text[:num_context])
    update_s = (perf_counter() - start) / num_context

    def step(new: Sequence[int]) -> None:
        made.extend(new)
        made.grow(num_drafts, LEAST_CHANCE)

    return costs(update_s, step, text, num_context)


def drafter_cost(drafter: Drafter, text: Sequence[int], num_context: int) -> dict[str, float]:
    """Costs as the engine meets them."""
    request = new_request("a", text[:num_context])
    drafter.begin(request)
    start = perf_counter()
    drafter.propose([Draft(request, drafter.max_nodes)])
    update_s = (perf_counter() - start) / num_context

    def step(new: Sequence[int]) -> None:
        request.token_ids.extend(new)
        drafter.propose([Draft(request, drafter.max_nodes)])

    return costs(update_s, step, text, num_context)


def costs(
    update_s: float, step: Callable[[Sequence[int]], None], text: Sequence[int], num_context: int
) -> dict[str, float]:
    """Time NUM_STEPS steps of STEP_TOKENS tokens each, in microseconds."""
    seconds = []
    for index in range(NUM_STEPS):
        first = num_context + index * STEP_TOKENS
        new = text[first : first + STEP_TOKENS]
        start = perf_counter()
        step(new)
        seconds.append(perf_counter() - start)
    return {
        "update_us": round(update_s * 1e6, 2),
        "propose_us": round(median(seconds) * 1e6, 1),
        "propose_p90_us": round(quantiles(seconds, n=10)[-1] * 1e6, 1),
    }


if __name__ == "__main__":
    main()
