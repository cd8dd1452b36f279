"""Measures what passes and drafting cost on this machine, on a made-up text before the engine serves requests.

Knows: the methods of runners and drafters, and the order in which an engine calls them. Does not know: policies, what
those methods do. The pool must be empty; afterwards its contents are meaningless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from forerun.cache.kv_cache import KVCache
from forerun.core import Request, SamplingParams
from forerun.drafters.base import Drafter, Observed
from forerun.kernels.cores import step_clock
from forerun.kernels.device import synchronize
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.policy.costs import CallCosts
from forerun.runtime.runner import Runner
from forerun.speculation.draft import Draft

_NUM_KNOWN = 64  # tokens of the text; reading it is timed, too
_SIZES = (1, 2, 3, 4, 8, 16)  # drafts per call
_TIMINGS = 3  # timed calls, after one for warming up; the fastest counts
_BUDGET_S = 0.2  # then no further size is tried; per row count, no further pass
_MIN_PASSES, _MAX_PASSES = 2, 5  # the fastest counts: other work on the machine only adds time


def measure_passes(rows: Sequence[int], runner: Runner, kv_cache: KVCache) -> dict[int, float]:
    """Seconds of a pass by its rows, on an empty cache.

    Row counts take turns, so that a slow moment of the machine affects all of them.
    """
    batches = {num_rows: _batch_of(num_rows, kv_cache) for num_rows in rows}
    times: dict[int, list[float]] = {num_rows: [] for num_rows in rows}
    began = perf_counter()
    for turn in range(_MAX_PASSES):
        if turn < _MIN_PASSES or perf_counter() - began < _BUDGET_S * len(rows):
            for num_rows, batch in batches.items():
                times[num_rows].append(_seconds_of(runner, batch, kv_cache))
    return {num_rows: min(seconds) for num_rows, seconds in times.items()}


def _batch_of(num_rows: int, kv_cache: KVCache) -> ForwardBatch:
    rows = SequenceRows(
        request_id="",
        block_table=range(kv_cache.num_blocks_for(num_rows)),
        start=0,
        span=(),
        tree_start=0,
        tree_tokens=[0] * num_rows,
        tree_rows=range(num_rows),
        tree_masks=[(1 << (i + 1)) - 1 for i in range(num_rows)],
        tree_depths=range(num_rows),
    )
    return ForwardBatch.build([rows], kv_cache.block_size)


def _seconds_of(runner: Runner, batch: ForwardBatch, kv_cache: KVCache) -> float:
    clock = step_clock(kv_cache.device)
    start = clock()
    runner.run(batch)
    synchronize(kv_cache.device)
    return clock() - start


def measure_calls(drafter: Drafter, runner: Runner, kv_cache: KVCache, longest: int) -> CallCosts:
    """What the drafter's calls cost; a drafter without weights of its own is not measured, nor one for a target that
    cannot hold the text.

    `runner` executes the target, with the hidden states the drafter needs. longest: rows of one sequence it can hold.
    """
    costs = CallCosts(draws_levels=drafter.weight_bytes > 0)
    if not costs.draws_levels or _NUM_KNOWN + drafter.max_nodes > longest or drafter.max_nodes <= 1:
        return costs
    needed = kv_cache.num_blocks_for(_NUM_KNOWN + drafter.max_nodes)
    max_len = _NUM_KNOWN + 64
    request = Request("", (0,) * _NUM_KNOWN, SamplingParams(temperature=0.0), seed=0, max_len=max_len)
    request.block_ids = list(range(needed))
    drafter.begin(request)
    drafter.resume(request, (), None)
    try:
        _show_text(drafter, request, runner, kv_cache)
        _time_calls(costs, drafter, request, step_clock(kv_cache.device))
    finally:
        drafter.end(request.request_id)
    return costs


def _show_text(drafter: Drafter, request: Request, runner: Runner, kv_cache: KVCache) -> None:
    """The target reads all but the last token."""
    num_read = request.root_position
    rows = SequenceRows(request.request_id, request.block_ids, 0, request.token_ids[:num_read], num_read)
    batch = ForwardBatch.build([rows], kv_cache.block_size)
    out = runner.run(batch)
    request.num_computed = num_read
    drafter.observe([Observed(request, range(num_read), (), ())], out.hidden)


def _time_calls(costs: CallCosts, drafter: Drafter, request: Request, clock: Callable[[], float]) -> None:
    """Record the fastest call of each size; the very first call also reads the text."""
    began = perf_counter()
    for size in _SIZES:
        if size < drafter.max_nodes and perf_counter() - began < _BUDGET_S:
            calls = [_time_call(drafter, request, size, clock) for _ in range(1 + _TIMINGS)]
            seconds, num_drafts, depth, _ = min(calls[1:])
            costs.expect(num_drafts, depth, seconds)
            if (num_read := calls[0][-1]) > 0:
                costs.expect_reading(num_read, calls[0][0] - seconds)


def _time_call(
    drafter: Drafter, request: Request, size: int, clock: Callable[[], float]
) -> tuple[float, int, int, int]:
    """Seconds taken, drafts and levels given, tokens read."""
    draft = Draft(request, size + 1)
    start = clock()
    drafter.propose([draft])
    seconds = clock() - start
    return seconds, len(draft.tree) - 1, max(draft.tree.depths), draft.num_caught_up
