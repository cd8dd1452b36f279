"""The parts that answers of all APIs share: usage, figures of speculation, log-probabilities.

Knows: figures of samples and how OpenAI writes them. Does not know: chat, completions, HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from forerun.core import DrafterCount, PositionLogprobs, RequestStats, TokenLogprob
from forerun.drafters.registry import all_specs
from forerun.server.streams import Delta
from forerun.weights.detokenizer import IncrementalDetokenizer
from forerun.weights.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # for minus infinity, which JSON cannot express


def head(kind: str, prefix: str, model: str, request_id: str | None = None) -> dict[str, Any]:
    """Id, type, time and model of an answer."""
    return {"id": f"{prefix}-{request_id or uuid4().hex}", "object": kind, "created": int(time()), "model": model}


def token_counts(num_prompt: int, num_written: int) -> dict[str, Any]:
    """OpenAI's count of tokens."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_written, "total_tokens": num_prompt + num_written}


class Account:
    """Adds up what the samples of one HTTP request cost."""

    def __init__(
        self, num_prompts: int, grammar_s: float | None, dropped: Sequence[str] = (), writes: bool = True
    ) -> None:
        """`grammar_s`: seconds until the grammar was compiled, None without one; `dropped`: fields of the request that
        were ignored; `writes`: the tokens chosen are part of the answer."""
        self._grammar_s = grammar_s
        self._prompts: list[RequestStats | None] = [None] * num_prompts
        self._seeds: list[int | None] = [None] * num_prompts
        self._ended: list[Delta] = []
        self._dropped = dropped
        self._writes = writes

    def add(self, prompt_index: int, delta: Delta) -> None:
        """Count a sample's last delta; others are ignored."""
        if delta.stats is not None:
            self._ended.append(delta)
            self._seeds[prompt_index] = delta.seed
            if delta.index == 0:
                self._prompts[prompt_index] = delta.stats

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: a prompt counts once, whatever n is."""
        prompts = [stats for stats in self._prompts if stats is not None]
        num_cached = sum(stats.num_cached_tokens for stats in prompts)
        counted = token_counts(sum(stats.num_prompt_tokens for stats in prompts), self._num_written)
        return {**counted, "prompt_tokens_details": {"cached_tokens": num_cached}}

    def predicted(self, num_tokens: int) -> dict[str, int]:
        """How much of a prediction of `num_tokens` the drafts brought, in OpenAI's words; {} without one."""
        if num_tokens == 0:
            return {}
        readers = [name for name, spec in all_specs().items() if spec.reads_prediction]
        drafters = _drafters(self._stats)
        num_accepted = min(num_tokens, sum(drafters[name]["accepted"] for name in readers if name in drafters))
        return {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_tokens - num_accepted,
        }

    @property
    def _num_written(self) -> int:
        return sum(stats.num_tokens for stats in self._stats) if self._writes else 0

    def forerun(self) -> dict[str, Any]:
        """Figures of speculation and caching."""
        stats = self._stats
        num_steps, num_tokens = sum(s.num_steps for s in stats), self._num_written
        drafters, length = _drafters(stats), num_tokens / num_steps if num_steps else 0.0
        drafted = sum(count["drafted"] for count in drafters.values())
        speedup = _together(stats).estimated_speedup
        return {
            "accepted_tokens": sum(count["accepted"] for count in drafters.values()),
            "drafted_tokens": drafted,
            "num_steps": num_steps,
            "acceptance_length": round(length, 4),
            "estimated_speedup": None if speedup is None else round(speedup, 4),
            "cached_prompt_tokens": sum(s.num_cached_tokens for s in stats),
            "drafters": drafters,
            "seeds": [seed for seed in self._seeds if seed is not None],
            "queue_s": round(max((s.queue_s for s in stats), default=0.0), 6),
            "grammar_s": None if self._grammar_s is None else round(self._grammar_s, 6),
            "ttft_s": round(max((s.ttft_s for s in stats), default=0.0), 6),
            "decode_s": round(max((s.decode_s for s in stats), default=0.0), 6),
            **({"dropped_fields": list(self._dropped)} if self._dropped else {}),
        }

    @property
    def _stats(self) -> list[RequestStats]:
        return [delta.stats for delta in self._ended if delta.stats is not None]


def _together(stats: Sequence[RequestStats]) -> RequestStats:
    """What `estimated_speedup` depends on, of all samples; times are of those that had drafts and know both times."""
    timed = [each for each in stats if each.trees.drafted and each.plain_s is not None]
    return RequestStats(
        num_tokens=sum(each.num_tokens for each in stats),
        num_elsewhere=sum(each.num_elsewhere for each in stats),
        num_steps=sum(each.num_steps for each in stats),
        trees=DrafterCount(drafted=sum(each.trees.drafted for each in timed)),
        step_s=sum(each.step_s for each in timed),
        plain_s=sum(each.plain_s or 0.0 for each in timed),
    )


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
    """The bytes a token stands for; for a special token, those of its name."""
    return tokenizer.special_text(token_id).encode() or tokenizer.token_bytes(token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """`token_bytes` as text; half a character becomes U+FFFD."""
    return token_bytes(tokenizer, token_id).decode("utf-8", "replace")


def token_name(tokenizer: Tokenizer, token_id: int, as_id: bool = False) -> str:
    """How log-probabilities name a token: its text, or "token_id:5" for `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}" if as_id else token_text(tokenizer, token_id)


def chat_logprob(tokenizer: Tokenizer, entry: PositionLogprobs, as_id: bool = False) -> dict[str, Any]:
    """One position in the style of chat completions."""
    top = [_chat_token(tokenizer, other, as_id) for other in entry.top]
    return {**_chat_token(tokenizer, entry.chosen, as_id), "top_logprobs": top}


def _chat_token(tokenizer: Tokenizer, token: TokenLogprob, as_id: bool) -> dict[str, Any]:
    name, raw = token_name(tokenizer, token.token_id, as_id), token_bytes(tokenizer, token.token_id)
    return {"token": name, "logprob": _number(token.logprob), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    as_ids: bool = False,
) -> dict[str, Any]:
    """Positions in the style of completions; `offsets`: the characters before each token."""
    return {
        "tokens": [token_name(tokenizer, token, as_ids) for token in token_ids],
        "token_logprobs": [entry and _number(entry.chosen.logprob) for entry in entries],
        "top_logprobs": [entry and _top(tokenizer, entry, as_ids) for entry in entries],
        "text_offset": list(offsets),
    }


def _top(tokenizer: Tokenizer, entry: PositionLogprobs, as_ids: bool) -> dict[str, float]:
    """Log-probability by text; of two tokens with the same text, the likelier one. The chosen one is included."""
    best: dict[str, float] = {}
    for token in (*entry.top, entry.chosen):
        best.setdefault(token_name(tokenizer, token.token_id, as_ids), _number(token.logprob))
    return best


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[PositionLogprobs | None], as_ids: bool = False
) -> list[dict[str, Any] | None]:
    """A prompt's positions in vLLM's style: by token id, the prompt's own token and the best ones."""
    return [None if entry is None else _by_id(tokenizer, entry, as_ids) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: PositionLogprobs, as_ids: bool) -> dict[str, Any]:
    return {
        str(token.token_id): {
            "logprob": _number(token.logprob),
            "rank": token.rank,
            "decoded_token": token_name(tokenizer, token.token_id, as_ids),
        }
        for token in (entry.chosen, *entry.top)
    }


class Offsets:
    """Where tokens begin in their text, in characters; a token inside a character begins where the character does."""

    def __init__(self, texts: IncrementalDetokenizer, start: int = 0) -> None:
        """`texts`: a detokenizer that was fed none of the tokens; `start`: characters before them."""
        self._texts = texts
        self._place = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._place)
            self._place += len(self._texts.feed([token_id]))
        return found


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where a prompt's tokens begin in its text, which may contain special tokens by name, or not at all."""
    texts, place, found = IncrementalDetokenizer(tokenizer), 0, []
    for token_id in token_ids:
        found.append(place)
        name = tokenizer.special_text(token_id)
        is_spelled = name != "" and text.startswith(name, place)
        place += len(name) if is_spelled else len(texts.feed([token_id]))
    return found


def _number(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
