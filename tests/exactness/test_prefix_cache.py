"""Same seed, same tokens: cold or warm cache, shared or copied blocks, preempted, aborted, in chunks, with any drafter.

The toy remembers its whole context, so a single row of another prefix, or one that is missing, changes the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.drafters.base import Observed, Stateless
from forerun.engine.outputs import RequestGroup
from forerun.speculation.draft import Draft
from tests.support import harness, mini
from tests.support.toy import NoisyToy, ToyModel

MODEL = ToyModel(memory=0)
PREFIX = [random.Random(7).randrange(24) for _ in range(22)]  # 5 blocks of 4 and a half


def groups(num: int = 5, seed: int = 0, max_tokens: int = 12, n: int = 1) -> list[RequestGroup]:
    """Requests that begin alike: with the whole prefix or a part of it, then with something of their own or nothing."""
    rng = random.Random(seed)
    made = []
    for index in range(num):
        prompt = PREFIX[: rng.choice([22, 22, 21, 20, 16, 7])] + [rng.randrange(24) for _ in range(rng.randint(0, 5))]
        params = SamplingParams(max_tokens=max_tokens + index % 3, seed=seed + index, n=n)
        made.append(harness.request(index, prompt, params))
    return made


def plain(wanted: Sequence[RequestGroup]) -> list[list[list[int]]]:
    """One request at a time, nothing kept in between."""
    return harness.plain(wanted, model=MODEL, prefix_caching=False)


def fresh(wanted: Sequence[RequestGroup]) -> list[RequestGroup]:
    return [harness.fresh(group) for group in wanted]


def cached_tokens(wanted: Sequence[RequestGroup]) -> list[int]:
    return [sample.stats().num_cached_tokens for group in wanted for sample in group.samples]


@pytest.mark.parametrize("rows", [3, 17, 512])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "draft-tree"])
def test_cold_and_warm(drafter: str, rows: int) -> None:
    wanted = groups(seed=rows)
    truth = plain(wanted)
    made = harness.engine(drafter, model=MODEL, max_num_batched_tokens=rows)
    cold, warm = fresh(wanted), fresh(wanted)
    assert harness.run(made, cold) == truth
    assert harness.run(made, warm) == truth
    asked = [len(group.samples[0].request.prompt_token_ids) for group in wanted]
    assert cached_tokens(warm) == [num - 1 for num in asked], "only the root is computed again"
    assert sum(cached_tokens(cold)) > 0, "requests that begin alike did not share anything"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafter", ["none", "draft", "draft-tree"])
def test_preempted_and_resumed_from_what_is_left(drafter: str, seed: int) -> None:
    wanted = groups(6, seed=seed, max_tokens=25)
    made = harness.engine(drafter, model=MODEL, max_num_batched_tokens=24, num_kv_blocks=26, max_num_prefill_tokens=5)
    again = fresh(wanted)
    assert harness.run(made, again) == plain(wanted)
    assert sum(s.request.num_preemptions for g in again for s in g.samples) > 0, "nothing was preempted"
    assert made.scheduler.prefix_cache is not None
    assert made.scheduler.prefix_cache.stats.evicted_blocks > 0, "nothing was evicted"


@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_samples_share_their_prompt(drafter: str) -> None:
    [group] = groups(1, n=4)
    made = harness.engine(drafter, model=MODEL)
    again = harness.fresh(group)
    assert harness.run(made, [again]) == plain([group])
    num_prompt = len(again.samples[0].request.prompt_token_ids)
    assert cached_tokens([again])[0] == 0
    assert all(num >= (num_prompt - 1) // 4 * 4 for num in cached_tokens([again])[1:])


@pytest.mark.parametrize("drafter", ["none", "draft", "draft-tree"])
def test_abort_in_the_middle(drafter: str) -> None:
    """Whoever shares blocks with an aborted request goes on; the aborted one's are free within the step."""
    wanted = groups(5, seed=3, max_tokens=16)
    truth = plain(wanted)
    made = harness.engine(drafter, model=MODEL, max_num_batched_tokens=30)
    again = fresh(wanted)
    for group in again:
        made.add(group)
    for number in (0, 3):
        for _ in range(3):
            made.step()
        made.abort(again[number].request_id)
        assert not again[number].samples[0].request.block_ids
        made.scheduler.check_integrity()
    harness.run(made, [])
    for number in (1, 2, 4):
        assert again[number].samples[0].request.output_token_ids == truth[number][0]
    assert harness.run(made, fresh(wanted)) == truth


def test_conversations_go_on_from_their_own_answers() -> None:
    """A second turn finds the first one's prompt and answer, as far as they fill blocks."""
    made = harness.engine("draft", model=MODEL)
    first = harness.request(0, PREFIX, SamplingParams(max_tokens=20, seed=1))
    harness.run(made, [first])
    text = first.samples[0].request.token_ids
    second = harness.request(1, [*text, 3, 1, 4], SamplingParams(max_tokens=10, seed=2))
    again = harness.fresh(second)
    assert harness.run(made, [again]) == plain([second])
    assert cached_tokens([again])[0] >= (len(text) - 1) // 4 * 4


def test_hits_are_the_same_with_a_drafter_and_cost_it_nothing() -> None:
    """A draft model starts on the rows that others' drafts left in the shared blocks."""
    wanted = groups(4, seed=5)
    found, read = [], []
    for drafter, caching in (("none", True), ("draft", True), ("draft", False)):
        draft = NoisyToy(MODEL, 0.7)
        made = harness.engine(drafter, model=MODEL, draft=draft, max_num_seqs=1, prefix_caching=caching)
        harness.run(made, fresh(wanted))
        cold = draft.num_rows_computed
        warm = fresh(wanted)
        harness.run(made, warm)
        found.append(cached_tokens(warm))
        read.append(draft.num_rows_computed - cold)
    assert found[0] == found[1] and found[2] == [0] * 4
    assert read[2] - read[1] == sum(found[1]), "the draft model read again what was in the cache"


def test_a_draft_model_that_lagged_reads_what_it_missed() -> None:
    """Blocks computed without drafts serve a request with drafts, whose draft model computes their rows itself."""
    quiet, loud = groups(2, seed=8)
    quiet.samples[0].request.speculate = False
    made = harness.engine("draft", model=MODEL, draft=MODEL)
    truth = plain([loud])
    harness.run(made, [quiet])
    again = harness.fresh(loud)
    assert harness.run(made, [again]) == truth
    assert cached_tokens([again])[0] > 0
    assert again.samples[0].stats().acceptance_length > 3, "drafts from an equal model were wrong"


def test_prompt_logprobs_are_computed_warm_too() -> None:
    params = SamplingParams(max_tokens=3, seed=1, prompt_logprobs=2)
    cold, warm = (harness.request(0, PREFIX, params) for _ in range(2))
    made = harness.engine("none", model=MODEL)
    assert harness.run(made, [cold]) == harness.run(made, [warm])
    assert cached_tokens([warm]) == [0]
    assert warm.output().prompt_logprobs == cold.output().prompt_logprobs
    assert None not in (warm.output().prompt_logprobs or ())[1:]


class Reader(Stateless):
    """Reads the target's hidden states, which a toy makes of the token, and insists on not missing any.

    Its "KV" at a position are the token there and the hidden state before it, as in EAGLE and MTP.
    """

    name = "reader"
    max_nodes = 4
    hidden_layers = (0,)

    def __init__(self) -> None:
        self.num_known: dict[str, int] = {}
        self.before: dict[str, float | None] = {}  # hidden state of the last token it has seen
        self.num_boundaries = 0

    def begin(self, request: Request) -> None:
        self.num_known[request.request_id] = 0
        self.before[request.request_id] = None

    def resume(self, request: Request, num_ready: tuple[int, ...], boundary: Tensor | None) -> None:
        assert request.num_computed <= num_ready[0], "others' rows are missing"
        if num_ready[0] == request.num_computed:
            assert boundary is not None, "it cannot go on from here"
            assert boundary.tolist() == [float(request.token_ids[request.num_computed - 1])]
            self.num_boundaries += 1
        self.num_known[request.request_id] = request.num_computed
        self.before[request.request_id] = boundary.item() if boundary is not None else None

    def observe(self, observed: Sequence[Observed], hidden: dict[int, Tensor]) -> None:
        for seen in observed:
            name, rows = seen.request.request_id, seen.rows
            states = [float(hidden[0][row]) for row in rows]
            known = self.num_known[name]
            assert states == [float(t) for t in seen.request.token_ids[known : known + len(rows)]]
            self.num_known[name] = known + len(rows)
            self.before[name] = states[-1] if states else self.before[name]

    def num_ready(self, request: Request) -> tuple[int, ...]:
        return (self.num_known.get(request.request_id, 0),)

    def propose(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            name, before = draft.request.request_id, self.before[draft.request.request_id]
            if before is not None and self.num_known[name] == draft.request.root_position:
                assert before == float(draft.request.token_ids[-2])
            draft.add_chain([(draft.request.token_ids[-1] + 1) % 24] * 2)

    def end(self, request_id: str) -> None:
        self.num_known[request_id] = 0
        self.before[request_id] = None


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 9}, {"num_kv_blocks": 26}])
def test_drafters_of_hidden_states_miss_nothing(options: dict[str, int]) -> None:
    wanted = groups(6, seed=4, max_tokens=20)
    truth, found = plain(wanted), []
    for drafter in (None, Reader()):
        made = harness.engine("none", model=MODEL, **options)
        if drafter is not None:
            harness.with_drafter(made, drafter)
        assert harness.run(made, fresh(wanted)) == truth
        warm = fresh(wanted)
        assert harness.run(made, warm) == truth
        found.append(cached_tokens(warm))
    assert drafter is not None and drafter.num_boundaries > 0
    if not options:
        assert found[0] == found[1]


DRAFTERS = {"draft": {"adaptive": False}, "draft-tree": {"adaptive": False, "tree_width": 3, "max_draft_tokens": 9}}


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_on_real_weights(drafter: str) -> None:
    """Real kernels: shared and copied rows carry the very bits that computing them again would give."""
    prompts = [" ".join([mini.PROMPTS[5], mini.PROMPTS[0], end]) for end in ("was", "was not", "Once", "was not")]
    params = SamplingParams(max_tokens=16, seed=3, ignore_eos=True, logprobs=1)
    truth = [mini.drafting("none", prefix_caching=False).generate(prompt, params)[0] for prompt in prompts]
    llm = mini.drafting(drafter.split("-")[0], max_num_batched_tokens=40, **DRAFTERS.get(drafter, {}))
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in truth]
        assert [o.outputs[0].logprobs for o in outputs] == [o.outputs[0].logprobs for o in truth]
    assert all(o.outputs[0].stats.num_cached_tokens == len(o.prompt_token_ids) - 1 for o in outputs)
