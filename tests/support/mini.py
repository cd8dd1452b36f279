"""The embedded pair, loaded once a test process, and prompts for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from forerun import LLM, SamplingParams

PROMPTS = (
    "Once upon a time there was a little fox who",
    "def add(a, b):\n    return",
    "Q: What is 12 + 30?\nA:",
    "The president said that the nation",
    "A",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the",
)


@lru_cache(maxsize=1)
def plain() -> LLM:
    """The target, plain, on the fastest kernels of this machine."""
    return LLM("mini", max_num_seqs=16, max_model_len=512)


def drafting(name: str, **options: Any) -> LLM:
    """The same weights with a drafter."""
    return plain().with_drafter(name, **options)


_ALONE: dict[tuple[LLM, str, str], tuple[int, ...]] = {}


def alone(
    llm: LLM, prompts: Sequence[Any], sampling: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    """Tokens of each prompt on its own, by a plain engine; computed once a test process."""
    listed = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    found = []
    for prompt, own in zip(prompts, listed, strict=True):
        key = llm, repr(prompt), repr(own)
        if key not in _ALONE:
            _ALONE[key] = llm.generate([prompt], own)[0].outputs[0].token_ids
        found.append(_ALONE[key])
    return found
