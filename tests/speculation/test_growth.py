"""What a grower says of its children's chances: by how far their scores lead, under the noise the target will see."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core import Request, SamplingParams
from forerun.kernels import philox
from forerun.kernels.ops import NUM_RIVALS, RIVALS_SCALE
from forerun.kernels.select import select_kernels
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from forerun.speculation.noise import Purpose, stream_id
from forerun.speculation.tree import ROOT
from tests.support.drafting import draw_children

VOCAB = 60
WIDTH = 3


def drawn(logits: torch.Tensor, temperature: float, coupled: bool = True, seed: int = 5) -> Draft:
    request = Request("r", (4, 5, 6), SamplingParams(temperature=temperature), seed=seed)
    draft = Draft(request, 1 + WIDTH)
    draw_children(TreeGrower(select_kernels("reference"), coupled), draft, logits, WIDTH)
    return draft


def scores(logits: torch.Tensor, temperature: float, seed: int = 5) -> torch.Tensor:
    """What the target of these logits would choose the best of, after the prompt of `drawn` -> [V] float64."""
    noise = philox.gumbel(seed, 3, stream_id(0, Purpose.TARGET), VOCAB)
    return logits.double() / temperature + torch.from_numpy(noise) if temperature else logits.double()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_children_and_chances_are_those_of_the_scores(temperature: float) -> None:
    logits = 2.0 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    draft, best = drawn(logits, temperature), scores(logits, temperature).sort(descending=True)
    assert list(draft.tree.tokens[1:]) == best.indices[:WIDTH].tolist()
    expected = torch.log_softmax(best.values[:NUM_RIVALS] / RIVALS_SCALE, dim=0)[:WIDTH]
    assert draft.survival[1:] == pytest.approx(expected.tolist(), abs=1e-9)


def test_a_sure_first_child_leaves_little_to_the_others() -> None:
    logits = torch.zeros(VOCAB)
    logits[7] = 30.0
    draft = drawn(logits, 1.0)
    assert draft.tree.tokens[1] == 7 and draft.survival[1] > math.log(0.999) > draft.survival[2]


@pytest.mark.parametrize("error", [0.5, 1.0])
def test_chances_come_true_where_the_target_errs_from_the_draft(error: float) -> None:
    """The target's logits are the draft's and an error: who is said to be likely is right more often."""
    generator, said, right = torch.Generator().manual_seed(11), [], []
    for seed in range(400):
        logits = 2.0 * torch.randn(VOCAB, generator=generator)
        draft = drawn(logits, 1.0, seed=seed)
        target = scores(logits + error * torch.randn(VOCAB, generator=generator), 1.0, seed)
        said.append(math.exp(draft.survival[1]))
        right.append(float(draft.tree.tokens[1] == int(target.argmax())))
    order = torch.tensor(said).argsort()
    low, high = torch.tensor(right)[order[:130]].mean(), torch.tensor(right)[order[-130:]].mean()
    assert high > low + 0.3, (low, high)


def test_under_the_rejection_rule_rank_alone_counts() -> None:
    """A child must not be pruned by its own value there: what was drawn may not decide what is verified."""
    generator = torch.Generator().manual_seed(2)
    first, second = (drawn(torch.randn(VOCAB, generator=generator), 1.0, coupled=False) for _ in range(2))
    assert first.tree.tokens != second.tree.tokens and first.survival == second.survival
    assert first.tree.proposal(ROOT) is not None


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01, 1e-5])
def test_no_child_is_drawn_that_its_distribution_excludes(temperature: float) -> None:
    """At low temperatures q underflows to zero beside its best token: a second child would be no draw from it."""
    logits = torch.zeros(VOCAB)
    logits[7], logits[8] = 12.0, 4.0
    for seed in range(20):
        draft = drawn(logits, temperature, coupled=False, seed=seed)
        q = draft.tree.proposal(ROOT)
        assert q is not None and draft.tree.tokens[1:]
        assert all(float(q[token]) > 0.0 for token in draft.tree.tokens[1:])


@pytest.mark.parametrize("columns", [VOCAB - 5, VOCAB + 5])
def test_ranks_are_of_the_targets_tokens(columns: int) -> None:
    """Of a drafter whose output layer is padded to another number of rows."""
    request, logits = Request("r", (4, 5, 6), SamplingParams(), seed=5), torch.zeros(1, 2, columns)
    logits[:, :, -1] = 30.0
    grower = TreeGrower(select_kernels("reference"), True, VOCAB)
    ids, scores = grower.rank_depths([request], logits, VOCAB + 9)
    assert ids.shape == (1, 2, VOCAB) and set(ids.flatten().tolist()) <= {*range(VOCAB), -1}
    missing = list(range(columns, VOCAB))
    assert not torch.isin(ids[scores > -math.inf], torch.tensor(missing or [-1])).any()
