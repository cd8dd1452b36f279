"""The embedded pair, loaded once a test process, and prompts for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from forerun import LLM

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
