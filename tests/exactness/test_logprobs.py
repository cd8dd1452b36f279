"""Log-probabilities are those of the model, and the same with and without speculation."""

from __future__ import annotations

import pytest
import torch

from forerun.core import RequestOutput, SamplingParams
from forerun.engine import logprobs
from tests.support import harness
from tests.support.toy import ToyModel

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def outputs(drafter: str, rows: int = 512):  # type: ignore[no-untyped-def]
    params = SamplingParams(logprobs=3, prompt_logprobs=2, temperature=0.7, seed=1, max_tokens=15, top_k=5)
    group = harness.request(0, PROMPT, params)
    harness.run(harness.engine(drafter, max_num_batched_tokens=rows), [group])
    return group.output()


@pytest.mark.parametrize("drafter", ["ngram", "draft", "draft-tree"])
@pytest.mark.parametrize("rows", [3, 512])
def test_equal_to_plain(drafter: str, rows: int) -> None:
    plain, fast = outputs("none"), outputs(drafter, rows)
    assert fast.outputs[0].logprobs == plain.outputs[0].logprobs
    assert fast.prompt_logprobs == plain.prompt_logprobs
    assert fast.outputs[0].cumulative_logprob == plain.outputs[0].cumulative_logprob


def test_against_the_model() -> None:
    out = outputs("draft")
    tokens = [*PROMPT, *out.outputs[0].token_ids]
    model = ToyModel()
    assert out.prompt_logprobs is not None and out.outputs[0].logprobs is not None
    entries = [*out.prompt_logprobs, *out.outputs[0].logprobs]
    assert entries[0] is None and len(entries) == len(tokens)
    for position, entry in enumerate(entries[1:], 1):
        assert entry is not None
        row = torch.log_softmax(model.logits(tokens[:position]).double(), 0)
        assert entry.chosen.token_id == tokens[position]
        assert entry.chosen.logprob == float(row[tokens[position]])
        assert entry.chosen.rank == int((row > row[tokens[position]]).sum()) + 1
        assert [t.rank for t in entry.top] == list(range(1, len(entry.top) + 1))
        assert entry.top[0].token_id == int(row.argmax())


def test_samples_of_a_prompt_read_it_once_whatever_is_asked_of_it() -> None:
    def run(**more: int) -> tuple[int, RequestOutput]:
        model = ToyModel()
        params = SamplingParams(n=8, seed=1, max_tokens=1, temperature=0.7, **more)
        group = harness.request(0, [*PROMPT] * 4, params)
        made = harness.engine("none", model=model)
        before = model.num_rows_computed  # a pass while the engine is made
        harness.run(made, [group])
        return model.num_rows_computed - before, group.output()

    (num_rows, out), (num_plain_rows, plain) = run(logprobs=1, prompt_logprobs=1), run()
    assert num_rows == num_plain_rows < 2 * 4 * len(PROMPT)
    assert [sample.token_ids for sample in out.outputs] == [sample.token_ids for sample in plain.outputs]
    assert out.prompt_logprobs is not None and None not in out.prompt_logprobs[1:]
    assert len(out.prompt_logprobs) == 4 * len(PROMPT) and plain.prompt_logprobs is None


@pytest.mark.parametrize("num", [0, 1, 5, 20, 400])
def test_the_best_are_those_of_a_sorted_row(num: int) -> None:
    """Ties, minus infinity and NaN included, without sorting the row."""
    generator = torch.Generator().manual_seed(3)
    for number in range(30):
        row = torch.randint(0, 12, (400,), generator=generator).double()
        row[torch.rand(400, generator=generator) < 0.3] = -torch.inf
        if number % 10 == 9:
            row[7] = torch.nan
        values, ids = torch.sort(row, descending=True, stable=True)
        best = logprobs._best(row, num)
        assert [entry.token_id for entry in best] == ids[:num].tolist()
        assert torch.equal(torch.tensor([e.logprob for e in best]).double().nan_to_num(), values[:num].nan_to_num())
        assert [entry.rank for entry in best] == list(range(1, min(num, 400) + 1))
