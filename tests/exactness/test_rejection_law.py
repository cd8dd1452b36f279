"""The rejection rule end to end: drafter, engine and verifier together give the target's distribution.

Sampled texts of many seeds are counted and compared with the exact law by chi-square, several steps deep, so that
noise shared between drafting and recovery, or between steps, shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.speculation.selfcheck import check_rejection, chi_square_p_value
from forerun.speculation.verifier import RejectionVerifier
from tests.support import harness
from tests.support.toy import NoisyToy, ToyModel

pytestmark = pytest.mark.slow
NUM = 600
LENGTH = 3


def law(model: ToyModel, text: tuple[int, ...]) -> float:
    chance, tokens = 1.0, [0]
    for token in text:
        chance *= float(torch.softmax(model.logits(tokens).double(), 0)[token])
        tokens.append(token)
    return chance


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        ("token", DrafterConfig(name="draft", model="toy", max_draft_tokens=3, adaptive=False)),
        ("block", DrafterConfig(name="draft", model="toy", max_draft_tokens=3, adaptive=False)),
        ("block", DrafterConfig(name="draft", model="toy", max_draft_tokens=5, tree_width=2)),
        ("block", DrafterConfig(name="ngram", ngram_min=1, ngram_max=2, adaptive=False, max_draft_tokens=2)),
        ("block", replace(harness.DRAFTERS["portfolio"], max_draft_tokens=4, adaptive=False)),
        ("token", replace(harness.DRAFTERS["portfolio"], max_draft_tokens=4)),
    ],
    ids=["token", "block", "tree", "ngram", "portfolio", "guided"],
)
def test_law_of_generated_text(rule: str, drafter: DrafterConfig) -> None:
    model = ToyModel(vocab_size=3, memory=2, spread=1.0)
    made = harness.engine(
        drafter, model=model, draft=NoisyToy(model, 0.8), verification="rejection", chain_rule=rule, max_num_seqs=64
    )
    groups = [harness.request(i, [0], SamplingParams(seed=i, max_tokens=LENGTH + 3)) for i in range(NUM)]
    texts = [tuple(samples[0][:LENGTH]) for samples in harness.run(made, groups)]
    counts = Counter(texts)
    expected = {t: NUM * law(model, t) for t in product(range(3), repeat=LENGTH)}
    statistic = sum((counts[t] - mean) ** 2 / mean for t, mean in expected.items())
    assert chi_square_p_value(statistic, len(expected) - 1) > 1e-4


def test_self_check_passes() -> None:
    done: list[int] = []
    checks = check_rejection(harness.kernels(), num_samples=600, advance=done.append)
    assert all(check.passed for check in checks) and sum(done) == 600 * len(checks)


def test_self_check_notices_a_biased_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that always accepts one token is wrong; the check must see it."""
    verify_one = RejectionVerifier._verify_one

    def biased(self, logits, candidate, give_up_s):  # type: ignore[no-untyped-def]
        if len(candidate.draft.tree) > 1 and candidate.draft.tree.tokens[1] == 0:
            from forerun.speculation.verify import Choice

            return Choice((0, 1), 0)
        return verify_one(self, logits, candidate, give_up_s)

    monkeypatch.setattr(RejectionVerifier, "_verify_one", biased)
    assert not all(check.passed for check in check_rejection(harness.kernels(), num_samples=600))


def test_chi_square_p_value() -> None:
    """Against tabulated quantiles."""
    assert chi_square_p_value(3.841, 1) == pytest.approx(0.05, abs=1e-3)
    assert chi_square_p_value(18.307, 10) == pytest.approx(0.05, abs=1e-3)
