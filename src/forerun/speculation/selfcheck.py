"""Tests that the rejection rule gives the target's distribution, with the code that drafts and verifies.

Knows: a toy target and a toy drafter over a few tokens, small enough that the true law of their texts is a table.
Does not know: real models. Drafts are drawn by TreeGrower, verified by RejectionVerifier, over several steps, so
that randomness wrongly shared between steps shows too; texts are counted and compared by Pearson's chi-square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product

import torch
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.kernels.ops import Kernels
from forerun.speculation.draft import Draft
from forerun.speculation.growth import Place, TreeGrower
from forerun.speculation.tree import ROOT
from forerun.speculation.verifier import Candidate, RejectionVerifier
from forerun.speculation.verify import Choice

CASES = (("token", "token", (1, 1, 1)), ("block", "block", (1, 1, 1)), ("recursive", "block", (2, 2)))
NUM_SAMPLES = 3000  # texts of each case
_VOCAB = 3
_TEXT_LEN = 4
_AT_ONCE = 200  # texts
_SMALLEST_P_VALUE = 1e-5  # chance alone gives less once in 100,000 checks


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """One rule on one tree shape."""

    rule: str
    num_samples: int
    chi_square: float
    degrees: int
    p_value: float

    @property
    def passed(self) -> bool:
        """Whether the counts fit the target's distribution."""
        return self.p_value > _SMALLEST_P_VALUE


def check_rejection(
    kernels: Kernels,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    temperature: float = 1.0,
    advance: Callable[[int], None] = lambda _: None,
) -> list[RuleCheck]:
    """Test every rule on `num_samples` texts; `advance` hears of each text."""
    toys = {name: _Toy(kernels, rule, widths, seed, temperature) for name, rule, widths in CASES}
    return [_check(name, toy, num_samples, advance) for name, toy in toys.items()]


def _check(name: str, toy: _Toy, num_samples: int, advance: Callable[[int], None]) -> RuleCheck:
    counts = Counter[tuple[int, ...]]()
    for first in range(0, num_samples, _AT_ONCE):
        seeds = range(first, min(first + _AT_ONCE, num_samples))
        counts.update(toy.texts(seeds))
        advance(len(seeds))
    expected = {text: num_samples * toy.probability(text) for text in product(range(_VOCAB), repeat=_TEXT_LEN)}
    statistic = sum((counts[text] - mean) ** 2 / mean for text, mean in expected.items())
    degrees = len(expected) - 1
    return RuleCheck(name, num_samples, statistic, degrees, chi_square_p_value(statistic, degrees))


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Chance that a chi-square variable exceeds `statistic`: the regularised upper incomplete gamma function."""
    half = torch.tensor([degrees / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class _Toy:
    """A target and a drafter whose logits are tables over the last token, and a loop that speculates with them."""

    def __init__(self, kernels: Kernels, chain_rule: str, widths: Sequence[int], seed: int, temperature: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._target = torch.randn(_VOCAB, _VOCAB, generator=generator)  # [last token, next token]
        self._drafter = self._target + torch.randn(_VOCAB, _VOCAB, generator=generator)
        self._params = SamplingParams(temperature=temperature, max_tokens=None)
        self._grower = TreeGrower(kernels, coupled=False)
        self._verifier = RejectionVerifier(chain_rule)
        self._widths = widths

    def texts(self, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        """The first tokens of as many speculative runs, side by side: each seed's text is that of a run alone."""
        requests = [Request("check", (0,), self._params, seed) for seed in seeds]
        while unfinished := [request for request in requests if request.num_output < _TEXT_LEN]:
            self._step(unfinished)
        return [tuple(request.output_token_ids[:_TEXT_LEN]) for request in requests]

    def _step(self, requests: Sequence[Request]) -> None:
        drafts = self._draft(requests)
        nodes = [draft.tree.tokens for draft in drafts]
        first_rows = accumulate(map(len, nodes), initial=0)
        candidates = [Candidate(draft, row) for draft, row in zip(drafts, first_rows, strict=False)]
        logits = self._target[torch.tensor([*chain(*nodes)])]  # [nodes of all drafts, vocab_size]
        for draft, choice in zip(drafts, self._verifier.verify(logits, candidates), strict=True):
            assert isinstance(choice, Choice)
            draft.request.token_ids += [*(draft.tree.tokens[node] for node in choice.nodes[1:]), choice.token]

    def _draft(self, requests: Sequence[Request]) -> list[Draft]:
        drafts = [Draft(request, max_nodes=16) for request in requests]
        leaves = [(draft, ROOT) for draft in drafts]
        for width in self._widths:
            logits = self._drafter[torch.tensor([draft.tree.tokens[node] for draft, node in leaves])]
            places = [Place(draft.request, node, draft.tree.path_tokens(node)) for draft, node in leaves]
            drawn = zip(leaves, self._grower.draw(places, logits, width), strict=True)
            leaves = [(draft, child) for (draft, node), children in drawn for child in draft.add_drawn(node, *children)]
        return drafts

    def probability(self, text: Sequence[int]) -> float:
        """The target's probability of a text after the prompt."""
        law: Tensor = torch.softmax(self._target.double() / self._params.temperature, dim=1)
        chance, last = 1.0, 0
        for token in text:
            chance, last = chance * float(law[last, token]), token
        return chance
