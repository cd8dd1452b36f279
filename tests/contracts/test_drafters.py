"""The suite every drafter passes: whatever it is asked, it proposes usable trees, and it keeps nothing it should not.

A new drafter is added to DRAFTERS in tests/support/harness.py and is tested here and by tests/exactness.
"""

from __future__ import annotations

import random

import pytest

from forerun.core import SamplingParams
from forerun.speculation.growth import Draft
from tests.support import harness
from tests.support.toy import ToyModel

VOCAB = 24
SPECULATING = [name for name in harness.DRAFTERS if name != "none"]


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6) for _ in range(rng.randint(1, 40))] for _ in range(num)]


def groups(num: int, **params):  # type: ignore[no-untyped-def]
    options = {"max_tokens": 20, **params}
    return [harness.request(i, p, SamplingParams(seed=i, **options)) for i, p in enumerate(prompts(num))]


class Watched:
    """Wraps a drafter and checks what passes between it and the engine."""

    def __init__(self, inner) -> None:  # type: ignore[no-untyped-def]
        self.inner = inner
        self.alive: set[str] = set()
        self.proposed = 0
        for name in ("name", "max_nodes", "hidden_layers", "kv_specs", "weight_bytes"):
            setattr(self, name, getattr(inner, name))
        self.wants_logits = getattr(inner, "wants_logits", False)

    def begin(self, request) -> None:  # type: ignore[no-untyped-def]
        assert request.request_id not in self.alive
        self.alive.add(request.request_id)
        self.inner.begin(request)

    def observe(self, observed, hidden) -> None:  # type: ignore[no-untyped-def]
        for seen in observed:
            assert seen.request.num_computed <= seen.request.root_position + 1
        self.inner.observe(observed, hidden)

    def observe_logits(self, token_ids, logits) -> None:  # type: ignore[no-untyped-def]
        assert token_ids.shape == logits.shape[:1] and logits.shape[1] == VOCAB
        self.inner.observe_logits(token_ids, logits)

    def propose(self, drafts: list[Draft]) -> None:
        before = [list(d.request.token_ids) for d in drafts]
        self.inner.propose(drafts)
        for draft, tokens in zip(drafts, before, strict=True):
            check_tree(draft)
            assert draft.request.token_ids == tokens, "a drafter changes no request"
            self.proposed += len(draft.tree) - 1

    def num_ready(self, request) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        ready = self.inner.num_ready(request)
        assert all(0 <= num_rows <= request.num_computed for num_rows in ready)
        return ready

    def resume(self, request, num_ready, boundary) -> None:  # type: ignore[no-untyped-def]
        self.inner.resume(request, num_ready, boundary)

    def end(self, request_id: str) -> None:
        self.alive.discard(request_id)
        self.inner.end(request_id)


def check_tree(draft: Draft) -> None:
    tree = draft.tree
    assert 1 <= len(tree) <= draft.max_nodes
    assert tree.tokens[0] == draft.request.token_ids[-1]
    assert all(0 <= token < VOCAB for token in tree.tokens)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    for node in range(len(tree)):
        children = [tree.tokens[c] for c in tree.children(node)]
        assert len(children) == len(set(children)), "siblings differ"


def watched(made):  # type: ignore[no-untyped-def]
    made.drafter = Watched(made.drafter)
    return made.drafter


@pytest.mark.parametrize("drafter", SPECULATING)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}])
def test_trees_are_usable_and_nothing_stays(drafter: str, options: dict[str, int]) -> None:
    made = harness.engine(drafter, **options)
    seen = watched(made)
    wanted = groups(7)
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == harness.plain(wanted)
    assert not seen.alive
    assert seen.proposed > 0
    inner = getattr(seen.inner, "inner", seen.inner)  # of its guard
    state = [v for v in vars(inner).values() if isinstance(v, dict)]
    assert all(not d for d in state), "state of ended requests is kept"


@pytest.mark.parametrize("drafter", SPECULATING)
def test_some_drafts_are_accepted(drafter: str) -> None:
    """Greedy toy text soon repeats, so every drafter must get something right."""
    wanted = groups(4, temperature=0.0, max_tokens=40)
    made = harness.engine(drafter)
    again = [harness.fresh(g) for g in wanted]
    harness.run(made, again)
    stats = [g.output().outputs[0].stats for g in again]
    assert sum(c.accepted for s in stats for c in s.drafters.values()) > 0
    assert sum(s.num_tokens for s in stats) > sum(s.num_steps for s in stats)


@pytest.mark.parametrize("drafter", SPECULATING)
def test_abort_in_the_middle(drafter: str) -> None:
    wanted = groups(4)
    made = harness.engine(drafter)
    seen = watched(made)
    again = [harness.fresh(g) for g in wanted]
    for group in again:
        made.add(group)
    for _ in range(3):
        made.step()
    made.abort(again[1].request_id)
    made.scheduler.check_integrity()
    harness.run(made, [])
    assert again[1].samples[0].request.finish_reason == "abort"
    assert not seen.alive
    plain = harness.plain(wanted)
    for i in (0, 2, 3):
        assert again[i].samples[0].request.output_token_ids == plain[i][0]


@pytest.mark.parametrize("drafter", ["draft", "draft-tree"])
def test_an_equal_draft_model_is_always_right(drafter: str) -> None:
    """With the target as its own draft every greedy and every coupled draft on the chain is accepted."""
    model = ToyModel()
    for temperature in (0.0, 1.0):
        wanted = groups(3, temperature=temperature, max_tokens=30)
        made = harness.engine(drafter, model=model, draft=model)
        again = [harness.fresh(g) for g in wanted]
        assert harness.run(made, again) == harness.plain(wanted, model=model)
        for group in again:
            stats = group.output().outputs[0].stats
            assert stats.acceptance_length > (4.0 if drafter == "draft" else 2.5)


@pytest.mark.parametrize("drafter", SPECULATING)
def test_rejection_rule_runs_everywhere(drafter: str) -> None:
    """The rejection rule under chunks, small pools and batches: right lengths, legal tokens, repeatable."""
    options = {"verification": "rejection", "max_num_batched_tokens": 19, "num_kv_blocks": 30}
    wanted = groups(5, top_k=6)
    first = harness.run(harness.engine(drafter, **options), [harness.fresh(g) for g in wanted])
    again = harness.run(harness.engine(drafter, **options), [harness.fresh(g) for g in wanted])
    if drafter != "draft-adaptive":  # its budgets follow measured times
        assert first == again
    assert all(len(sample) == 20 for group in first for sample in group)


@pytest.mark.parametrize("drafter", SPECULATING)
def test_rejection_rule_at_temperature_zero_is_greedy(drafter: str) -> None:
    wanted = groups(4, temperature=0.0)
    made = harness.engine(drafter, verification="rejection")
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == harness.plain(wanted)
