"""What drafting costs on this machine: a drafter is asked to draft for a made-up text before the engine serves anybody.

Knows: the drafter's verbs and the order in which an engine uses them. Does not know: policies, what drafters do inside.
The pool must be empty; what is left in it afterwards belongs to nobody.
"""

from __future__ import annotations

from time import perf_counter

from forerun.cache.kv_cache import KVCache
from forerun.core import Request, SamplingParams
from forerun.drafters.base import Drafter, Observed
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft

_NUM_KNOWN = 8  # tokens of the text
_SIZES = (1, 2, 3, 4, 8, 16)  # drafts a call
_TIMINGS = 3  # calls of which the quickest counts, after one that does not
_BUDGET_S = 0.2  # after which no further size is tried


def measure_draft_costs(drafter: Drafter, runner: Runner, kv_cache: KVCache) -> dict[int, float]:
    """Seconds a call takes by the number of drafts it gives; {} for a drafter without weights of its own.

    `runner` executes the target, and gives the states the drafter wants.
    """
    needed = kv_cache.num_blocks_for(_NUM_KNOWN + drafter.max_nodes)
    if drafter.weight_bytes == 0 or needed > kv_cache.num_blocks or drafter.max_nodes <= 1:
        return {}
    request = Request("", (0,) * _NUM_KNOWN, SamplingParams(temperature=0.0), seed=0, max_len=_NUM_KNOWN + 64)
    request.block_ids = list(range(needed))
    drafter.begin(request)
    drafter.resume(request, (), None)
    try:
        _show_text(drafter, request, runner, kv_cache)
        return _time_calls(drafter, request)
    finally:
        drafter.end(request.request_id)


def _show_text(drafter: Drafter, request: Request, runner: Runner, kv_cache: KVCache) -> None:
    """The target reads all but the last token."""
    num_read = request.root_position
    rows = SequenceRows(request.request_id, request.block_ids, 0, request.token_ids[:num_read], num_read)
    batch = ForwardBatch.build([rows], kv_cache.block_size)
    out = runner.run(batch)
    request.num_computed = num_read
    drafter.observe([Observed(request, range(num_read), (), ())], out.hidden)


def _time_calls(drafter: Drafter, request: Request) -> dict[int, float]:
    costs: dict[int, float] = {}
    began = perf_counter()
    for size in _SIZES:
        if size < drafter.max_nodes and perf_counter() - began < _BUDGET_S:
            calls = [_time_call(drafter, request, size) for _ in range(1 + _TIMINGS)]
            costs |= {num: min(s for n, s in calls[1:] if n == num) for num in {n for n, _ in calls[1:]} if num > 0}
    return costs


def _time_call(drafter: Drafter, request: Request, size: int) -> tuple[int, float]:
    """Drafts given, seconds taken."""
    draft = Draft(request, size + 1)
    start = perf_counter()
    drafter.propose([draft])
    return len(draft.tree) - 1, perf_counter() - start
