"""Same model, prompt, parameters and seed: the same tokens, whatever drafts, batches, chunks or preemptions do."""

from __future__ import annotations

import itertools
import random

import pytest

from forerun.core import SamplingParams
from forerun.engine.outputs import RequestGroup
from tests.support import harness
from tests.support.adversary import Adversary
from tests.support.toy import ToyModel

VOCAB = 24


class EvenOdd:
    """A grammar: the parity of allowed tokens alternates with the length of the output."""

    def allowed(self, output_token_ids):  # type: ignore[no-untyped-def]
        return [t for t in range(VOCAB) if t % 2 == len(output_token_ids) % 2]


PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.7},
    "warm": {"temperature": 1.0},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all-filters": {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "presence-frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "greedy-penalties": {"temperature": 0.0, "presence_penalty": 1.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {3: 2.5, 4: -100.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 5, 8, 13, 21)},
    "bad-words": {"bad_words": ("x",)},
    "grammar": {"grammar": EvenOdd()},
    "stop-token": {"stop_token_ids": (7,), "min_tokens": 6},
    "stop-string": {"stop": ("ab", "c", "fgh")},
}


def groups(num: int, kind: str, seed: int = 0, max_tokens: int = 20) -> list[RequestGroup]:
    """Requests of different lengths that share parameters but not prompts."""
    rng = random.Random(seed)
    made = []
    for index in range(num):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(max_tokens=max_tokens + index % 3, seed=seed + index, **PARAMETERS[kind])
        group = harness.request(index, prompt, params)
        for sample in group.samples:
            if params.bad_words:
                sample.request.bad_word_ids = ((5,), (6, 7), (8, 9, 10))
        made.append(group)
    return made


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("drafter", ["draft", "draft-tree"])
def test_every_sampling_parameter(kind: str, drafter: str) -> None:
    wanted = groups(3, kind)
    assert harness.run(harness.engine(drafter), [harness.fresh(g) for g in wanted]) == harness.plain(wanted)


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-adaptive", "draft-tree"])
def test_every_batch_size(batch: int, drafter: str) -> None:
    wanted = groups(8, "warm", seed=5)
    made = harness.engine(drafter, max_num_seqs=batch)
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == harness.plain(wanted)


@pytest.mark.parametrize("rows", [1, 3, 13, 64])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
def test_every_chunk_size(rows: int, drafter: str) -> None:
    wanted = groups(4, "warm", seed=9)
    made = harness.engine(drafter, max_num_batched_tokens=rows)
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == harness.plain(wanted)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_forced_preemption(drafter: str, block_size: int) -> None:
    wanted = groups(8, "warm", seed=3, max_tokens=30)
    made = harness.engine(drafter, num_kv_blocks=96 // block_size + 1, block_size=block_size)
    again = [harness.fresh(g) for g in wanted]
    assert harness.run(made, again) == harness.plain(wanted)
    assert sum(s.request.num_preemptions for g in again for s in g.samples) > 0, "nothing was preempted"


def test_samples_of_one_request_differ_and_repeat() -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=16)
    [samples] = harness.run(harness.engine("draft"), [harness.request(0, [1, 2, 3], params)])
    assert len({tuple(s) for s in samples}) == 4
    assert [samples] == harness.plain([harness.request(0, [1, 2, 3], params)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["greedy", "warm", "repetition", "stop-string", "grammar"])
def test_adversarial_drafter(seed: int, kind: str) -> None:
    wanted = groups(5, kind, seed=seed)
    truth = harness.plain(wanted)
    adversary = Adversary(seed, VOCAB, max_nodes=12, truth=lambda request: truth[int(request.parent_id)][0])
    made = harness.with_drafter(harness.engine("none", max_num_batched_tokens=40), adversary)
    again = [harness.fresh(g) for g in wanted]
    assert harness.run(made, again) == truth
    accepted = sum(c.accepted for g in again for s in g.samples for c in s.drafters.values())
    assert accepted > 0, "the adversary was never right, so nothing was tested"


@pytest.mark.parametrize("seed", range(3))
def test_adversary_under_preemption_and_chunks(seed: int) -> None:
    wanted = groups(6, "warm", seed=seed, max_tokens=30)
    truth = harness.plain(wanted)
    adversary = Adversary(seed, VOCAB, max_nodes=20, truth=lambda request: truth[int(request.parent_id)][0])
    made = harness.with_drafter(harness.engine("none", max_num_batched_tokens=23, num_kv_blocks=30), adversary)
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == truth


def test_whole_context_counts() -> None:
    """A toy that remembers everything notices any lost or misplaced row."""
    model = ToyModel(memory=0)
    wanted = groups(5, "warm", seed=21, max_tokens=40)
    for drafter, rows in itertools.product(["ngram", "draft", "draft-tree"], [5, 512]):
        made = harness.engine(drafter, model=model, max_num_batched_tokens=rows, num_kv_blocks=40)
        assert harness.run(made, [harness.fresh(g) for g in wanted]) == harness.plain(wanted, model=model)


def test_context_limit() -> None:
    """Requests that run into the end of the context end there, speculating or not."""
    wanted = [harness.request(i, [i] * (60 + i), SamplingParams(max_tokens=None, seed=i)) for i in range(4)]
    for drafter in ("ngram", "draft", "draft-tree"):
        again = [harness.fresh(g) for g in wanted]
        assert harness.run(harness.engine(drafter), again) == harness.plain(wanted)
        assert all(
            len(s.request.token_ids) == 96 and s.request.finish_reason == "length" for g in again for s in g.samples
        )


def test_speculation_can_be_switched_off_per_request() -> None:
    wanted = groups(3, "warm")
    again = [harness.fresh(g) for g in wanted]
    again[1].samples[0].request.speculate = False
    assert harness.run(harness.engine("draft"), again) == harness.plain(wanted)
    assert not again[1].samples[0].drafters
    assert again[0].samples[0].drafters
