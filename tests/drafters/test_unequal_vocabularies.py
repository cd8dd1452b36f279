"""A draft model with the target's tokenizer whose output layer is padded to another number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.core import SamplingParams
from tests.support import harness
from tests.support.toy import ToyModel

VOCAB = 24


class Padded(ToyModel):
    """The target's logits cut or padded to `num_rows`; what is padded looks likely."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(vocab_size=VOCAB)
        self.whole, self.vocab_size = VOCAB, num_rows

    def logits(self, tokens: list[int]) -> Tensor:
        assert max(tokens) < self.vocab_size, "it has no row for this token"
        num_rows, self.vocab_size = self.vocab_size, self.whole
        row = super().logits(tokens)
        self.vocab_size = num_rows
        return torch.cat([row, torch.full((max(0, num_rows - self.whole),), 3.0)])[:num_rows]


def groups(**params):  # type: ignore[no-untyped-def]
    prompts = ([4, 5, 22, 6], *([i, i + 1, i + 2] for i in range(8)))  # a smaller model has no row for 22
    given = {"max_tokens": 40, **params}
    return [harness.request(i, prompt, SamplingParams(seed=i, **given)) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("num_rows", [20, 30])
@pytest.mark.parametrize("drafter", ["draft", "draft-tree"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"logit_bias": {22: 1.0, 3: 2.0}}, {"top_k": 5}])
def test_it_drafts_what_both_have(num_rows: int, drafter: str, verification: str, params: dict[str, object]) -> None:
    made = harness.engine(drafter, model=ToyModel(), draft=Padded(num_rows), verification=verification)
    drafted = groups(**params)
    texts = harness.run(made, drafted)
    assert not any(health.num_errors for health in made.drafter.health.values())
    assert sum(group.output().outputs[0].stats.trees.accepted for group in drafted) > 0
    if verification == "coupled" or params.get("temperature") == 0.0:
        assert texts == harness.run(harness.engine("none", model=ToyModel()), groups(**params))
