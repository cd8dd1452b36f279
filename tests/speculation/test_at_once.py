"""Walking down all plain trees in one call decides what walking level by level does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.errors import LogitsError
from forerun.kernels.ops import NoiseKeys
from forerun.kernels.reference import ReferenceKernels
from forerun.speculation.draft import Draft
from forerun.speculation.tree import MAX_NODES, ROOT
from forerun.speculation.verifier import Candidate, CoupledVerifier

VOCAB = 5
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=2),
    SamplingParams(temperature=1.0, repetition_penalty=1.3),
)


class Counting(ReferenceKernels):
    """How often the host asked for tokens."""

    num_calls = 0

    def gumbel_argmax(self, logits: Tensor, temperatures: Tensor, keys: NoiseKeys) -> Tensor:
        self.num_calls += 1
        return super().gumbel_argmax(logits, temperatures, keys)


def random_draft(request: Request, dice: random.Random) -> Draft:
    """A tree, of which in half the cases a part is verified."""
    draft = Draft(request, MAX_NODES)
    for _ in range(dice.randrange(12)):
        draft.add(dice.randrange(len(draft.tree)), dice.randrange(VOCAB), 0.0)
    if dice.random() < 0.5:
        kept = [ROOT]
        for node in range(1, len(draft.tree)):
            if draft.tree.parents[node] in kept and dice.random() < 0.7:
                kept.append(node)
        draft.keep(kept)
    return draft


def level_by_level(params: SamplingParams) -> SamplingParams:
    """The same distribution by parameters that shape logits."""
    return replace(params, logit_bias={0: 0.0})


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_decide_alike(seed: int) -> None:
    dice = random.Random(seed)
    requests = [Request(str(i), (1, 2, 3), PARAMS[dice.randrange(len(PARAMS))], seed + i) for i in range(4)]
    candidates, num_rows = [], 1  # row 0 belongs to nobody
    for request in requests:
        candidates.append(Candidate(random_draft(request, dice), num_rows))
        num_rows += candidates[-1].draft.num_nodes
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    logits[dice.randrange(num_rows)] = torch.nan
    verifier = CoupledVerifier(ReferenceKernels())
    whole = verifier.verify(logits, candidates)
    for request in requests:
        request.params = level_by_level(request.params)
    for one, other in zip(verifier.verify(logits, candidates), whole, strict=True):
        assert isinstance(one, LogitsError) == isinstance(other, LogitsError)
        assert isinstance(one, LogitsError) or one == other


def test_plain_requests_ask_once_however_deep_the_walk_is() -> None:
    draft = Draft(Request("a", (0,), PARAMS[0], 0), MAX_NODES)
    draft.add_chain([1, 1, 1])
    logits = torch.nn.functional.one_hot(torch.ones(4, dtype=torch.int64), VOCAB).float()
    for params, calls in ((PARAMS[0], 1), (level_by_level(PARAMS[0]), 4)):
        draft.request.params, kernels = params, Counting()
        [choice] = CoupledVerifier(kernels).verify(logits, [Candidate(draft, 0)])
        assert not isinstance(choice, LogitsError) and choice.nodes == (0, 1, 2, 3) and kernels.num_calls == calls
