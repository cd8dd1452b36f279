"""The suite every drafter passes: whatever it is asked, it proposes usable trees, and it keeps nothing it should not.

A drafter that runs on any target is added to DRAFTERS in tests/support/harness.py, where tests/exactness finds it, too;
one that needs a decoder's layers or hidden states to ON_DECODERS.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest

from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.drafters.base import DrafterHealth, EngineDrafter
from forerun.drafters.portfolio import Portfolio
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.models.decoder import Decoder
from forerun.speculation.draft import Draft
from tests.drafters import test_dflash, test_eagle, test_medusa, test_mtp, test_orders
from tests.support import harness, heads, other_tokens, tiny
from tests.support.drafting import reachable_strings
from tests.support.toy import ToyModel

CHAIN: dict[str, Any] = {"max_draft_tokens": 4, "tree_width": 1, "adaptive": False}
TREE: dict[str, Any] = {"max_draft_tokens": 9, "tree_width": 3, "adaptive": False}
MOST_LAYERS = {"layers": (0, 1, 2, 4, 5)}
ON_TOY = [name for name in harness.DRAFTERS if name != "none"]
ON_DECODERS: dict[str, dict[str, Any]] = {
    "eagle": CHAIN,
    "eagle-tree": TREE,
    "dflash": CHAIN,
    "dflash-tree": TREE,
    "dspark-rnn-tree": TREE,
    "xpress-tree": TREE,
    "lilicorr": CHAIN,
    "mtp": CHAIN,
    "mtp-tree": TREE,
    "medusa": CHAIN,
    "medusa-tree": TREE,
    "layer_skip": CHAIN | MOST_LAYERS,
    "layer_skip-tree": TREE | MOST_LAYERS,
}
WITH_OTHER_TOKENS = "draft-other-tokens"


@dataclass(frozen=True)
class Subject:
    """A drafter on the target it is tested with."""

    name: str
    vocab_size: int
    engine: Callable[..., Engine]  # from options of EngineConfig
    plain: Callable[[Sequence[RequestGroup]], list[list[list[int]]]]  # plain decoding, one request at a time


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Kind -> a checkpoint of such heads."""

    @lru_cache
    def write(kind: str) -> str:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "eagle":
            test_eagle.make("whole-vocabulary", folder)
        elif kind == "dflash":
            test_dflash.make("dflash-2", folder)
        elif kind in test_orders.KINDS:
            test_orders.make(kind, folder)
        elif kind == "mtp":
            heads.write(folder, test_mtp.mimo_tensors(), test_mtp.mimo_config())
        else:
            test_medusa.write_fitted(folder)
        return str(folder)

    return write


@pytest.fixture(params=[*ON_TOY, *ON_DECODERS, WITH_OTHER_TOKENS])
def subject(request: pytest.FixtureRequest, folder_of: Callable[[str], str]) -> Subject:
    name = request.param
    if name in ON_TOY:
        return Subject(name, ToyModel().vocab_size, lambda **options: harness.engine(name, **options), harness.plain)
    if name == WITH_OTHER_TOKENS:
        model = other_tokens.pair()[0]
        assert isinstance(model, Decoder)
        return Subject(name, model.vocab_size, other_tokens.engine, lambda wanted: tiny.plain(model, wanted))
    kind = name.removesuffix("-tree")
    drafter = "dflash" if kind in test_orders.KINDS else kind
    targets = {
        "eagle": lambda: heads.target(test_eagle.LAYERS),
        "dflash": lambda: heads.target(test_dflash.LAYERS),
        "mtp": lambda: heads.target(test_mtp.LAYERS),
        "medusa": lambda: tiny.target(test_medusa.TARGET_LAYERS),
        "layer_skip": lambda: tiny.target(6),
    }
    target, model = targets[drafter](), None if kind == "layer_skip" else folder_of(kind)
    config = DrafterConfig(name=drafter, model=model, **ON_DECODERS[name])
    return Subject(
        name,
        target.vocab_size,
        lambda **options: tiny.engine(target, config, **options),
        lambda wanted: tiny.plain(target, wanted),
    )


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(6) for _ in range(rng.randint(1, 40))] for _ in range(num)]


def groups(num: int, **params: Any) -> list[RequestGroup]:
    options = {"max_tokens": 20, **params}
    return [harness.request(i, p, SamplingParams(seed=i, **options)) for i, p in enumerate(prompts(num))]


class Watched:
    """Wraps a drafter and checks what passes between it and the engine."""

    def __init__(self, inner: EngineDrafter, vocab_size: int) -> None:
        assert isinstance(inner, Portfolio)
        self.inner = inner
        self.vocab_size = vocab_size
        self.alive: set[str] = set()
        self.proposed = 0
        for name in ("name", "max_nodes", "hidden_layers", "kv_specs", "weight_bytes"):
            setattr(self, name, getattr(inner, name))
        self.wants_logits, self.take_calls = inner.wants_logits, inner.take_calls

    @property
    def health(self) -> dict[str, DrafterHealth]:
        return self.inner.health

    def wants_states(self, requests) -> bool:  # type: ignore[no-untyped-def]
        return self.inner.wants_states(requests)

    def begin(self, request) -> None:  # type: ignore[no-untyped-def]
        assert request.request_id not in self.alive
        self.alive.add(request.request_id)
        self.inner.begin(request)

    def observe(self, observed, hidden) -> None:  # type: ignore[no-untyped-def]
        for seen in observed:
            assert seen.request.num_computed <= seen.request.root_position + 1
        self.inner.observe(observed, hidden)

    def observe_logits(self, token_ids, logits, firsts) -> None:  # type: ignore[no-untyped-def]
        assert token_ids.shape == logits.shape[:1] and logits.shape[1] == self.vocab_size
        self.inner.observe_logits(token_ids, logits, firsts)

    def propose(self, drafts: list[Draft]) -> None:
        before = [list(d.request.token_ids) for d in drafts]
        self.inner.propose(drafts)
        for draft, tokens in zip(drafts, before, strict=True):
            check_tree(draft, self.vocab_size)
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


def check_tree(draft: Draft, vocab_size: int) -> None:
    tree = draft.tree
    assert 1 <= len(tree) <= draft.max_nodes
    assert tree.tokens[0] == draft.request.token_ids[-1]
    assert all(0 <= token < vocab_size for token in tree.tokens)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
    for node in range(len(tree)):
        children = [tree.tokens[c] for c in tree.children(node)]
        assert len(children) == len(set(children)), "siblings differ"


def watched(made: Engine, subject: Subject) -> Watched:
    seen = Watched(made.drafter, subject.vocab_size)
    made.drafter = seen
    return seen


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 7}, {"num_kv_blocks": 26, "max_num_seqs": 4}])
def test_trees_are_usable_and_nothing_stays(subject: Subject, options: dict[str, int]) -> None:
    made = subject.engine(**options)
    seen = watched(made, subject)
    wanted = groups(5)
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == subject.plain(wanted)
    assert not seen.alive
    assert seen.proposed > 0
    ended = {sample.request.request_id for group in wanted for sample in group.samples}
    for drafter in seen.inner.members:
        assert not reachable_strings(drafter) & ended, "state of ended requests is kept"


def test_some_drafts_are_accepted(subject: Subject) -> None:
    """Greedy toy text soon repeats, and random heads draw with the target's own noise: each gets something right."""
    wanted = groups(4, temperature=0.0 if subject.name in ON_TOY else 1.0, max_tokens=40)
    made = subject.engine()
    again = [harness.fresh(g) for g in wanted]
    harness.run(made, again)
    stats = [g.output().outputs[0].stats for g in again]
    assert sum(c.accepted for s in stats for c in s.drafters.values()) > 0
    assert sum(s.num_tokens for s in stats) > sum(s.num_steps for s in stats)


def test_abort_in_the_middle(subject: Subject) -> None:
    wanted = groups(4)
    made = subject.engine()
    seen = watched(made, subject)
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
    plain = subject.plain(wanted)
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


def test_rejection_rule_runs_everywhere(subject: Subject) -> None:
    """The rejection rule under chunks, small pools and batches: right lengths, legal tokens, repeatable."""
    options = {"verification": "rejection", "max_num_batched_tokens": 19, "num_kv_blocks": 30}
    wanted = groups(4, top_k=6, max_tokens=12)
    first = harness.run(subject.engine(**options), [harness.fresh(g) for g in wanted])
    again = harness.run(subject.engine(**options), [harness.fresh(g) for g in wanted])
    if subject.name not in ("draft-adaptive", "portfolio"):  # their budgets follow measured times
        assert first == again
    assert all(len(sample) == 12 for group in first for sample in group)


def test_rejection_rule_at_temperature_zero_is_greedy(subject: Subject) -> None:
    wanted = groups(3, temperature=0.0, max_tokens=12)
    made = subject.engine(verification="rejection")
    assert harness.run(made, [harness.fresh(g) for g in wanted]) == subject.plain(wanted)
