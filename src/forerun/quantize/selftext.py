"""Calibration text where the user gives none: written by the model itself.

Knows: how to ask it. Does not know: what the text is for. (Liu et al., "LLM-QAT", arXiv 2305.17888, do the same.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.core import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM


def sample_sequences(llm: LLM, num: int, length: int, seed: int = 0, progress: bool = False) -> list[list[int]]:
    """`num` sequences of `length` tokens at temperature 1, the same for the same seed."""
    start = _start_token(llm)
    seeds = range(seed, seed + num)
    params = [SamplingParams(max_tokens=length - 1, temperature=1.0, seed=own, ignore_eos=True) for own in seeds]
    outputs = llm.generate([[start]] * num, params, progress=progress)
    return [[start, *output.outputs[0].token_ids] for output in outputs]


def _start_token(llm: LLM) -> int:
    """The token that texts begin after: the start token, else an end token, as if another text had ended."""
    tokenizer = llm.tokenizer
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return tokenizer.eos_token_ids[-1] if tokenizer.eos_token_ids else 0
