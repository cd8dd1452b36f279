"""Suffix drafting: what most often followed the same last tokens, in this request, answers before it and a corpus.

Knows: token ids of each request, of what its answer is expected to repeat, of finished answers, and of texts in a file.
Does not know: any model, how occurrences are found (kernels.suffix).

Sources: SAM decoding (arXiv 2411.10666), SuffixDecoding (arXiv 2411.04975), REST (arXiv 2311.08252). Trees grow best
first by chances that blend how often a token followed matches of several lengths; they also are the nodes' log
survival.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from forerun.core import Request
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec, Lessons, Stateless
from forerun.kernels.suffix import SuffixCorpus, SuffixKit, SuffixStore, SuffixText, select_suffix
from forerun.speculation.draft import Draft
from forerun.speculation.tree import ROOT

MAX_MATCH: Final = 32  # longest tail that is looked up; longer ones are no more informative
LEAST_CHANCE: Final = 0.03  # of a node's whole path: rarer guesses are not worth a row even where rows are cheap
CORPUS_TOKENS: Final = 1 << 18  # of answers kept for all requests, about 170 bytes each
END_MARK: Final = -1  # behind each answer that is kept
SHARE_APART: Final = 16  # answers with one adapter or salt get one in so many of these tokens
# How often a prediction counts as seen. Texts of 300 tokens with 5 % changed, 12 and 24 drafts: 6.1 and 7.2 tokens a
# step if once, 6.7 and 8.6 if twice, 6.7 and 8.9 if three times.
PREDICTED: Final = 2


def build(context: DrafterContext) -> Drafter:
    """The suffix drafter on the fastest implementation that is installed."""
    options, kit = context.options, select_suffix()
    store = None if options.corpus is None else kit.store(*context.load_corpus(options.corpus))
    corpus_tokens = CORPUS_TOKENS if options.across_requests else 0
    return SuffixDrafter(options.max_draft_tokens, kit, corpus_tokens, store=store)


SPEC = DrafterSpec(
    name="suffix",
    build=build,
    help="the same, in this request and in answers before it, weighed by how often",
    options=("across_requests", "corpus"),
    max_draft_tokens=12,
    reads_prediction=True,
    auto=1,
    vllm_names=("suffix",),
)


@dataclass(slots=True)
class _Reading:
    """A request and the part of its text that was read, behind `num_before` tokens of what is expected."""

    request: Request
    text: SuffixText
    num_before: int


class _Answers:
    """Answers of ended requests: an index to draft from, and their tokens, for a later process."""

    def __init__(self, kit: SuffixKit, window: int, max_tokens: int) -> None:
        self.corpus: SuffixCorpus | None = kit.corpus(max_tokens, window) if max_tokens else None
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._texts: deque[array[int]] = deque()

    def add(self, answer: Sequence[int]) -> None:
        """Remember an answer; old ones make room."""
        if self.corpus is None or not answer:
            return
        self.corpus.add(answer)
        self._texts.append(array("i", answer[-self._max_tokens + 1 :]))
        self._num_tokens += len(self._texts[-1]) + 1
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._texts.popleft()) + 1

    def tokens(self) -> Any:
        """All of them, the oldest first, each with an end mark -> [n] int32."""
        whole = [np.array([*text, END_MARK], np.int32) for text in self._texts]
        return np.concatenate(whole) if whole else np.zeros(0, np.int32)

    def read(self, tokens: Any) -> None:
        """Add what `tokens` gave. Raises ValueError for something else."""
        if tokens.ndim != 1 or (len(tokens) and (tokens.min() < END_MARK or tokens[-1] != END_MARK)):
            raise ValueError("no answers")
        start = 0
        for end in np.flatnonzero(tokens == END_MARK).tolist():
            self.add(tokens[start:end].tolist())
            start = end + 1


class SuffixDrafter(Stateless):
    """Proposes the most probable continuations of a request's tail, by what followed it before.

    `corpus_tokens` bounds what is kept of the answers of ended requests, which all requests of the same adapter and
    salt draft from; the oldest go first, 0 keeps none. `store`: texts that all requests draft from, too. Guesses whose
    whole path is less probable than `least_chance` are dropped.
    """

    name = SPEC.name

    def __init__(
        self,
        max_draft_tokens: int,
        kit: SuffixKit,
        corpus_tokens: int = CORPUS_TOKENS,
        least_chance: float = LEAST_CHANCE,
        max_match: int = MAX_MATCH,
        store: SuffixStore | None = None,
    ) -> None:
        self.max_nodes = max_draft_tokens + 1
        self._kit = kit
        self._window = max_match + 1
        self._least_chance = least_chance

        def answers(is_apart: bool) -> _Answers:
            return _Answers(kit, self._window, corpus_tokens // SHARE_APART if is_apart else corpus_tokens)

        self._answers = Lessons(answers, _Answers.tokens, _Answers.read)
        self.lessons = self._answers if corpus_tokens else None
        self._stores = () if store is None else (store,)
        self._readings: dict[str, _Reading] = {}

    def begin(self, request: Request) -> None:
        """Start an empty text; it catches up when the request first drafts."""
        text = self._kit.text(self._window, self._answers.of(request).corpus, *self._stores)
        self._readings[request.request_id] = _Reading(request, text, 0)

    def propose(self, drafts: Sequence[Draft]) -> None:
        """Grow each tree from the tail's occurrences."""
        for draft in drafts:
            text = self._caught_up(draft)
            nodes = [ROOT]  # of the root, then of every guess
            for parent, token, chance in text.grow(draft.num_free, self._least_chance):
                nodes.append(draft.add(nodes[parent + 1], token, math.log(chance)))

    def _caught_up(self, draft: Draft) -> SuffixText:
        """The request's text with all known tokens."""
        request = draft.request
        if request.request_id not in self._readings:  # preempted since
            self.begin(request)
        reading = self._readings[request.request_id]
        text = reading.text
        if request.prediction and text.size == 0:  # first what is expected, as it would follow the prompt
            text.extend([*request.prompt_token_ids[1 - self._window :], *request.prediction] * PREDICTED)
            reading.num_before = text.size
        new = request.token_ids[text.size - reading.num_before :]
        if len(new) > self.max_nodes:  # more than one step can add
            draft.num_caught_up += len(new)
        text.extend(new)
        return text

    def end(self, request_id: str) -> None:
        """Drop the text; keep the answer of a request that is over (a preempted one will go on)."""
        reading = self._readings.pop(request_id, None)
        if reading is not None and reading.request.finish_reason is not None:
            self._answers.of(reading.request).add(reading.request.output_token_ids)
