"""Steps whose passes one native call runs together, so that Python's memory stays in the caches for all of them.

Knows: when nothing can happen between steps, how many run in one call, whether a step is the one that ran ahead. Does
not know: what passes compute, what becomes of a choice.

What a plain step chooses is all that the next plain step needs, and so it is where drafts are copied from the request's
own text. So a call computes several steps and keeps their logits and choices; the steps then go their usual way, one by
one, and find their pass here instead of running it. A step that is not the very one that ran (other requests, drafts,
prompts) drops what is left and runs its own: rows that were written ahead lie behind the root, where drafts lie
otherwise, and whoever computes a row writes it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from forerun.core import Request
from forerun.drafters.base import EngineDrafter
from forerun.engine.scheduler import Scheduler
from forerun.engine.timings import Timings
from forerun.engine.work import Work, rows_of
from forerun.kernels.suffix import SuffixText
from forerun.runtime.runner import Runner, SequenceSteps, StepPass, ahead_runner
from forerun.speculation.noise import Purpose, stream_id
from forerun.speculation.sampling import is_plain

MAX_CALL_S: Final = 0.01  # what ran ahead comes at once, and a new request waits for it: a burst nobody notices


class PassesAhead:
    """The passes of the next steps of the running requests."""

    def __init__(self, scheduler: Scheduler, clock: Timings) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._passes: list[StepPass] = []  # of the steps to come, the next one last
        self._next: list[tuple[Request, int]] = []  # whose roots the next step computes, and where they are
        self._usual = 0, 0.0  # rows of the steps of the last call, and seconds of one pass
        self._texts: dict[
            str, SuffixText
        ] = {}  # by request: where a call looks up drafts, known tokens and those ahead

    @property
    def is_empty(self) -> bool:
        """Whether no pass has run ahead."""
        return not self._passes

    def take(self, work: Sequence[Work], runner: Runner, drafter: EngineDrafter, num_alike: int) -> StepPass | None:
        """This step's pass: it has run ahead, or runs now with those of the next steps. None: it runs as usual.

        `num_alike`: steps after this one that the policy plans alike, and whose tokens the coupled rule chooses.
        """
        here = [(entry.item.request, entry.item.request.root_position) for entry in work]
        chains = [_chain(entry) for entry in work]
        if self._passes and here == self._next and chains == self._passes[-1].tokens:
            self._clock.forward_s += self._passes[-1].seconds
        else:
            self.drop()
            if num_alike > 0 and None not in chains and self._is_steady(work):
                self._passes = self._run(work, runner, drafter, num_alike)[::-1]
            if not self._passes:
                return None
            self._clock.lap_call([each.seconds for each in reversed(self._passes)])
        found = self._passes.pop()
        self._next = [
            (request, position + len(nodes))
            for (request, position), (nodes, _) in zip(here, found.choices, strict=True)
        ]
        return found

    def drop(self) -> None:
        """The next step will not be the one that ran: its time was spent all the same."""
        self._clock.forward_s += _seconds(self._passes)
        self._passes.clear()

    def end(self, requests: Sequence[Request]) -> None:
        """Requests are over: nothing goes on as it ran, and what passes take is measured anew."""
        self.drop()
        self._usual = 0, 0.0
        for request in requests:
            self._texts.pop(request.request_id, None)

    def _is_steady(self, work: Sequence[Work]) -> bool:
        """Nobody else can be part of the next step."""
        scheduler = self._scheduler
        return scheduler.limits.max_num_steps > 1 and scheduler.is_settled and len(work) == len(scheduler.running)

    def _run(self, work: Sequence[Work], runner: Runner, drafter: EngineDrafter, num_alike: int) -> list[StepPass]:
        """The passes of as many steps from this one on as can run in one call; none if this one cannot."""
        num_rows = sum([entry.item.max_nodes for entry in work])
        usual_rows, pass_s = self._usual
        in_time = int(MAX_CALL_S / pass_s) if usual_rows == num_rows else 1  # the first says what passes take
        able = ahead_runner(runner, num_rows)
        if able is None or (in_time <= 1 and usual_rows == num_rows):
            return []
        sequences = [found for entry in work if (found := self._sequence(entry, drafter)) is not None]
        if len(sequences) < len(work):
            return []
        left = min([sequence.num_left for sequence in sequences])
        most = min(self._scheduler.limits.max_num_steps, in_time, num_alike + 1, left)
        self._scheduler.reserve_ahead(most - 1 + max([entry.item.max_nodes for entry in work]))
        passes = able.run_ahead(sequences, most)
        self._usual = num_rows, _seconds(passes) / len(passes)
        return passes

    def _sequence(self, entry: Work, drafter: EngineDrafter) -> SequenceSteps | None:
        """What the call must know of a request; None if its steps need Python in between."""
        request, num_drafts = entry.item.request, entry.item.max_nodes - 1
        params = request.params
        if request.adapter is not None or not is_plain(params):
            return None
        stream = stream_id(request.sample_index, Purpose.TARGET)
        known = rows_of(entry), params.temperature, request.seed, stream, request.stop_token_ids, request.num_remaining
        if num_drafts == 0:
            return SequenceSteps(*known)
        lookup = drafter.lookup(request)
        if lookup is None:
            return None
        text = self._texts.setdefault(request.request_id, lookup.text)
        if text.size > len(request.token_ids):  # it has tokens of steps that were dropped, which come again
            return None
        text.extend(request.token_ids[text.size :])
        return SequenceSteps(*known, num_drafts, lookup.shortest, lookup.longest, text)


def _seconds(passes: Sequence[StepPass]) -> float:
    return sum([each.seconds for each in passes])


def _chain(entry: Work) -> Sequence[int] | None:
    """Tokens of the root and the chain below it; None if the step computes something else of the request."""
    draft = entry.draft
    if draft is None or entry.item.num_span > 0 or draft.pending is not None:
        return None
    tree = draft.tree
    is_chain = draft.num_nodes == len(tree) and list(tree.parents) == list(range(-1, len(tree) - 1))
    return tree.tokens if is_chain else None
