"""Long prompts, read by replicas of their own before another one answers.

Knows: which prompts are worth the way, how long to wait, when to try no more for a while. Does not know: Ray, who
answers, how blocks are stored: a replica that reads a prompt ends its order when the prompt's blocks are in the folder
from which the others load them, and refuses it at the end if they are not.
Whatever happens here, the replica that answers computes what it does not find, so that the answer is the same.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Final

from prometheus_client import Counter

from forerun.core import SamplingParams
from forerun.replicas.orders import Ordered, Refusal, ReplicaOrder, Tokens, keys_of
from forerun.replicas.routing import KEY_TOKENS, MAX_KEYS, PrefixRouting
from forerun.replicas.transport import ReplicaLost, Replicas

ANYBODY: Final = ""  # has a prompt: whoever computed it, the others load it
TIME_SHARE: Final = (
    0.5  # of what is left until the deadline: then there is time to read the prompt where it is answered
)
MAX_BAD: Final = 3  # prompts in a row that were late or failed; then none is sent for a while
REST_S: Final = 60.0
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, seed=0)

log = logging.getLogger("forerun.server")


class PromptReader:
    """Has prompts read that have `min_tokens` tokens which no replica has read yet, and waits `wait_s` for it."""

    def __init__(self, replicas: Replicas, min_tokens: int, wait_s: float) -> None:
        self.replicas = replicas
        self._min_tokens, self._wait_s = min_tokens, wait_s
        self._known = PrefixRouting()
        self._num_bad, self._rests_until_s = 0, -inf  # on the clock of `perf_counter`
        self.prompts = Counter(
            "forerun_prefilled_prompts",
            "Prompts sent to prefill replicas: stored, late (answered without waiting longer) or failed.",
            ["outcome"], registry=None,
        )  # fmt: skip

    def known(self, ordered: Ordered, answer: Tokens = ()) -> None:
        """A replica that answers has a request's prompt, and has written this behind it."""
        request = ordered.group.samples[0].request
        self._known.sent(keys_of(request, answer) if answer else ordered.prefix, ANYBODY)

    async def read(self, ordered: Ordered, kind: str, left_s: float) -> None:
        """Return when a prompt's blocks are stored, or will not be, or need not be.

        `kind`: of the replicas that answer; `left_s`: until the request's deadline.
        """
        if perf_counter() < self._rests_until_s or self._num_new(ordered) < self._min_tokens:
            return
        if not any(load.healthy for load in self.replicas.loads().values()):
            return
        outcome, why, longest_s = "failed", "", min(self._wait_s, TIME_SHARE * left_s)
        try:
            async with asyncio.timeout(longest_s):
                await self._run(_reading(ordered, kind))
            outcome = "stored"
        except TimeoutError:
            outcome, why = "late", "it took too long"  # what it has stored is loaded all the same
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # the client has left, or this process ends
                raise
            why = "it was given up on the way"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        self.prompts.labels(outcome).inc()
        if outcome != "late" or longest_s == self._wait_s:  # a short deadline says nothing of them
            self._judge(outcome == "stored")
        if why:
            told = {"request": ordered.group.request_id, "why": why}
            log.warning("a prompt was not read in advance: the replica that answers does it", extra=told)

    def _judge(self, was_good: bool) -> None:
        """Send no prompts for a while after several for which nobody gained anything."""
        self._num_bad = 0 if was_good else self._num_bad + 1
        if self._num_bad >= MAX_BAD:
            self._rests_until_s = perf_counter() + REST_S
            log.warning("prompts are not read in advance for %.0f s: %d in a row were not", REST_S, self._num_bad)

    def _num_new(self, ordered: Ordered) -> int:
        """Tokens of the prompt that a prefill replica could spare the one that answers."""
        request, keys = ordered.group.samples[0].request, ordered.prefix
        num_known = round(self._known.matched(keys, ANYBODY) * len(keys))
        if request.prompt_logprobs is not None or num_known == MAX_KEYS:  # all are computed; nothing is known of more
            return 0
        return len(request.prompt_token_ids) - num_known * KEY_TOKENS

    async def _run(self, order: ReplicaOrder) -> None:
        is_read = False
        async with aclosing(self.replicas.run(order)) as said:  # type: ignore[type-var]
            async for each in said:
                if isinstance(each, Refusal):
                    raise ReplicaLost(each.message, each)
                is_read |= isinstance(each, list) and any(delta.finish_reason is not None for delta in each)
        if not is_read:
            raise ReplicaLost("it ended before the prompt was read")


def _reading(ordered: Ordered, kind: str) -> ReplicaOrder:
    """What a prefill replica is to do: the prompt, and a token that nobody reads."""
    order = ordered.order((), kind)
    options = {name: order.options[name] for name in ("cache_salt", "priority")}
    return replace(
        order, params=ONE_TOKEN, grammar=None, options=options, constrained=False, traced=False, written={0: ()}
    )
