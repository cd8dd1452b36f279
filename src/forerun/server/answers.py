"""The parts answers share: usage, what speculation did, log-probabilities.

Knows: figures of samples and how OpenAI writes them. Does not know: chat, completions, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import time
from typing import Any
from uuid import uuid4

from forerun.core import PositionLogprobs, RequestStats, TokenLogprob
from forerun.server.service import Delta
from forerun.weights.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # minus infinity, which JSON cannot say


def head(kind: str, prefix: str, model: str) -> dict[str, Any]:
    """Id, type, time and model of an answer."""
    return {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time()), "model": model}


class Account:
    """Adds up what the samples of one HTTP request cost."""

    def __init__(self, num_prompts: int) -> None:
        self._prompts: list[RequestStats | None] = [None] * num_prompts
        self._ended: list[Delta] = []

    def add(self, prompt_index: int, delta: Delta) -> None:
        """Count a sample's last delta; others are ignored."""
        if delta.stats is not None:
            self._ended.append(delta)
            if delta.index == 0:
                self._prompts[prompt_index] = delta.stats

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: prompts once, whatever n is."""
        prompts = [stats for stats in self._prompts if stats is not None]
        num_prompt = sum(stats.num_prompt_tokens for stats in prompts)
        num_written = sum(stats.num_tokens for stats in self._stats)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_written,
            "total_tokens": num_prompt + num_written,
            "prompt_tokens_details": {"cached_tokens": sum(stats.num_cached_tokens for stats in prompts)},
        }

    def forerun(self) -> dict[str, Any]:
        """What speculation and caching did."""
        stats = self._stats
        num_steps, num_tokens = sum(s.num_steps for s in stats), sum(s.num_tokens for s in stats)
        speedups = [delta.speedup for delta in self._ended if delta.speedup is not None]
        drafters = _drafters(stats)
        return {
            "accepted_tokens": sum(count["accepted"] for count in drafters.values()),
            "drafted_tokens": sum(count["drafted"] for count in drafters.values()),
            "num_steps": num_steps,
            "acceptance_length": round(num_tokens / num_steps, 4) if num_steps else 0.0,
            "estimated_speedup": round(sum(speedups) / len(speedups), 4) if speedups else None,
            "cached_prompt_tokens": sum(s.num_cached_tokens for s in stats),
            "drafters": drafters,
            "seeds": sorted({delta.seed for delta in self._ended}),
            "queue_s": round(max((s.queue_s for s in stats), default=0.0), 6),
            "ttft_s": round(max((s.ttft_s for s in stats), default=0.0), 6),
            "decode_s": round(max((s.decode_s for s in stats), default=0.0), 6),
        }

    @property
    def _stats(self) -> list[RequestStats]:
        return [delta.stats for delta in self._ended if delta.stats is not None]


def _drafters(stats: Sequence[RequestStats]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for entry in stats:
        for name, count in entry.drafters.items():
            known = total.setdefault(name, {"drafted": 0, "accepted": 0})
            known["drafted"] += count.drafted
            known["accepted"] += count.accepted
    return total


# -- log-probabilities ------------------------------------------------------------------------------------------


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes a token stands for; a special token's name."""
    return tokenizer.special_text(token_id).encode() or tokenizer.token_bytes(token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The same as text; half a character becomes U+FFFD."""
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def chat_logprob(tokenizer: Tokenizer, entry: PositionLogprobs) -> dict[str, Any]:
    """One position in the style of chat completions."""
    top = [_chat_token(tokenizer, other) for other in entry.top]
    return {**_chat_token(tokenizer, entry.chosen), "top_logprobs": top}


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    raw = token_bytes(tokenizer, token.token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _number(token.logprob), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[PositionLogprobs | None], offset: int
) -> dict[str, Any]:
    """Positions in the style of completions; `offset`: characters before the first token."""
    texts = [token_text(tokenizer, token) for token in token_ids]
    offsets = list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else []
    return {
        "tokens": texts,
        "token_logprobs": [entry and _number(entry.chosen.logprob) for entry in entries],
        "top_logprobs": [entry and _top(tokenizer, entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer, entry: PositionLogprobs) -> dict[str, float]:
    """By text; of two tokens with the same text the more probable one. The chosen one is always there."""
    best: dict[str, float] = {}
    for token in (*entry.top, entry.chosen):
        best.setdefault(token_text(tokenizer, token.token_id), _number(token.logprob))
    return best


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
