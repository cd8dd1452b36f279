"""Builds engines around the toy model and runs requests to their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import Request, SamplingParams
from forerun.drafters.base import Drafter
from forerun.drafters.portfolio import Member, Portfolio
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup, SampleRecord
from forerun.engine.stopping import OutputText
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels
from forerun.models.base import Model, passes_of
from forerun.policy.costs import CallCosts, Costs, PassCosts
from forerun.policy.fixed import FixedPolicy
from forerun.policy.policy import AdaptivePolicy
from forerun.runtime.bind import bind
from forerun.speculation.verifier import CoupledVerifier
from tests.support.toy import LetterDetokenizer, NoisyToy, ToyModel

DRAFTERS = {
    "none": DrafterConfig(),
    "ngram": DrafterConfig(name="ngram", ngram_min=1, ngram_max=3, adaptive=False),
    "suffix": DrafterConfig(name="suffix", max_draft_tokens=9, adaptive=False),
    "recycling": DrafterConfig(name="recycling", max_draft_tokens=9, adaptive=False),
    "draft": DrafterConfig(name="draft", model="toy", max_draft_tokens=4, adaptive=False),
    "draft-adaptive": DrafterConfig(name="draft", model="toy", max_draft_tokens=4),
    "portfolio": DrafterConfig(
        name="portfolio",
        max_draft_tokens=12,
        members=(
            DrafterConfig(name="ngram", ngram_min=1, ngram_max=3),
            DrafterConfig(name="draft", model="toy", max_draft_tokens=6, tree_width=2),
        ),
    ),
    "portfolio-unguided": DrafterConfig(
        name="portfolio",
        max_draft_tokens=9,
        adaptive=False,
        members=(
            DrafterConfig(name="draft", model="toy", max_draft_tokens=4),
            DrafterConfig(name="ngram", ngram_min=1, ngram_max=3),
        ),
    ),
    "draft-tree": DrafterConfig(name="draft", model="toy", max_draft_tokens=9, tree_width=3, adaptive=False),
}


def kernels() -> Kernels:
    """The fastest there are: noise is drawn by them, and toy tests are about the engine."""
    return select_kernels("auto", threads=1)


def engine(
    drafter: str | DrafterConfig = "none",
    model: Model | None = None,
    draft: Model | None = None,
    max_model_len: int = 96,
    **options: Any,
) -> Engine:
    """An engine on the toy model, with a noisy copy of it as the draft."""
    target = model or ToyModel()
    config = EngineConfig(
        model="toy",
        drafter=DRAFTERS[drafter] if isinstance(drafter, str) else drafter,
        block_size=options.pop("block_size", 4),
        max_model_len=max_model_len,
        **options,
    )
    toy_draft = draft or (NoisyToy(target, 0.7) if isinstance(target, ToyModel) else target)
    made = assemble(config, target, kernels(), lambda name: toy_draft)
    if isinstance(made.policy, AdaptivePolicy):  # a toy's rows cost too much to be worth drafting
        made.policy.costs = Costs(PassCosts({1: 1.0}), calls={name: CallCosts() for name in made.policy.costs.calls})
        made.policy.costs.learn_step(1, drafts=False, seconds=1.0)
    return made


def portfolio_of(made: Engine, drafter: Drafter) -> Portfolio:
    """A drafter as the only member of the engine's portfolio."""
    is_coupled = isinstance(made.verifier, CoupledVerifier)
    return Portfolio([Member(drafter, made.model.vocab_size)], drafter.name, drafter.max_nodes, is_coupled)


def with_drafter(made: Engine, drafter: Drafter) -> Engine:
    """The same engine with a drafter of the test's own, always at its full size."""
    made.drafter = drafter if isinstance(drafter, Portfolio) else portfolio_of(made, drafter)
    made.policy = FixedPolicy(drafter.max_nodes)
    kvs = made.kv_cache.layers[: len(made.model.kv_specs)]
    made.runner = bind(passes_of(made.model, drafter.hidden_layers), kernels(), kvs, made.kv_cache.block_size)
    return made


def request(
    index: int, prompt: Sequence[int], params: SamplingParams, max_model_len: int = 96, stop: Sequence[int] = ()
) -> RequestGroup:
    """One request group with `n` samples, as LLM would make it."""
    max_tokens = params.max_tokens or max_model_len
    requests = [
        Request(
            request_id=f"{index}-{sample}",
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=params.seed if params.seed is not None else index,
            sample_index=sample,
            parent_id=str(index),
            stop_token_ids=frozenset((*params.stop_token_ids, *stop)),
            max_len=min(len(prompt) + max_tokens, max_model_len),
        )
        for sample in range(params.n)
    ]
    return RequestGroup(str(index), None, [SampleRecord(r, OutputText(r, LetterDetokenizer())) for r in requests])


def run(
    made: Engine, groups: Sequence[RequestGroup], max_steps: int = 5000, may_fail: bool = False
) -> list[list[list[int]]]:
    """Add all groups, step to the end, and check that nothing is left behind -> tokens by group and sample.

    `may_fail`: a drafter may; otherwise one that raised is found out here, for the text would not show it.
    """
    for group in groups:
        made.add(group)
    for _ in range(max_steps):
        if not made.has_work:
            break
        made.step()
        made.scheduler.check_integrity()
    assert not made.has_work, "requests did not finish"
    assert not made.groups and not made.records
    assert may_fail or not any(sample.request.failed_drafters for group in groups for sample in group.samples)
    return [[sample.request.output_token_ids for sample in group.samples] for group in groups]


# A group is kept beside its tokens: while it lives, no other grammar has the address that its representation shows.
_ALONE: dict[tuple[Any, ...], tuple[RequestGroup, list[list[int]]]] = {}


def plain(groups: Sequence[RequestGroup], model: Model | None = None, **options: Any) -> list[list[list[int]]]:
    """What plain decoding gives, one request at a time."""
    return alone(groups, partial(engine, "none", model, **options), model, repr(options))


def alone(groups: Sequence[RequestGroup], make: Callable[[], Engine], *about: Any) -> list[list[list[int]]]:
    """What an engine of its own gives each group; computed once a test process for what the engines are `about`."""
    return [_alone(fresh(group), make, *about) for group in groups]


def _alone(group: RequestGroup, make: Callable[[], Engine], *about: Any) -> list[list[int]]:
    key = (*about, repr([sample.request for sample in group.samples]))
    if key not in _ALONE:
        _ALONE[key] = group, run(make(), [group])[0]
    return _ALONE[key][1]


def fresh(group: RequestGroup) -> RequestGroup:
    """The same group before anything happened to it."""
    made = []
    for sample in group.samples:
        old = sample.request
        new = replace(old, token_ids=[], block_ids=[], num_computed=0)
        made.append(SampleRecord(new, OutputText(new, LetterDetokenizer())))
    return RequestGroup(group.request_id, group.prompt, made)
