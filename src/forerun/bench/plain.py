"""What a plain step costs: a few steps of the same model without a drafter.

Knows: how to measure it beside another engine. Does not know: terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.bench.speed import decode_tokens
from forerun.core import RequestStats, SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

NUM_STEPS = 12
MAX_CONTEXT = 512  # tokens of the text to measure behind; longer contexts cost a little more a step


def plain_step_s(llm: LLM, token_ids: Sequence[int]) -> float:
    """Seconds of a plain decoding step of `llm`'s model behind `token_ids`."""
    room = min(MAX_CONTEXT, llm.loaded.model.max_position - NUM_STEPS - 1)
    context = list(token_ids[-room:])
    limits = {"max_model_len": len(context) + NUM_STEPS + 1, "max_num_seqs": 1}
    plain = llm.with_drafter("none", **limits, num_kv_blocks=None, kv_cache_bytes=None)
    params = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True, temperature=0.0)
    stats = plain.generate([context], params)[0].outputs[0].stats
    return stats.decode_s / max(1, stats.num_steps - 1)


def estimated_speedup(stats: RequestStats, step_s: float) -> float | None:
    """Decoding speed over one token a plain step; None for a request of one step."""
    if stats.decode_s <= 0 or stats.num_steps < 2:
        return None
    return decode_tokens(stats) / stats.decode_s * step_s
