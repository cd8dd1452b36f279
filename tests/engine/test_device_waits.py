"""How often a step waits for its device: counted on one without numbers, where every uncounted question raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.models.loader import load_model
from forerun.policy.fixed import FixedPolicy
from forerun.policy.policy import AdaptivePolicy
from forerun.runtime import head_trees, trees
from forerun.speculation.drawn import DrawnTree, trees_of
from tests.drafters import test_eagle, test_medusa, test_mtp
from tests.models import factory
from tests.models.test_device import META
from tests.models.test_device_chains import MetaKernels
from tests.support import harness, heads
from tests.support.enqueued import as_on_a_gpu
from tests.support.hopeful import expect_much

NUM_DRAFTS = 4  # of which heads grow a tree


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what was read; every token read is 7, which every drafter guesses therefore."""
    found: list[tuple[int, ...]] = []

    def answer(x: Tensor) -> Tensor:
        if x.device != META:
            return x
        found.append(tuple(x.shape))
        return torch.full(x.shape, 7, dtype=x.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", answer)
    monkeypatch.setattr(trees, "trees_of", as_chains)
    monkeypatch.setattr(head_trees, "trees_of", as_chains)
    return found


def as_chains(tokens: Tensor, parents: Tensor, log_chances: Tensor, places: Tensor) -> list[DrawnTree]:
    """Chains, whatever numbers stand for their parents."""
    tokens[:, NUM_DRAFTS:] = -1
    return trees_of(tokens, torch.arange(parents.shape[1]).expand_as(parents), log_chances, places)


def engine(
    folder: Path, kernels: Any, name: str = "none", head: str | None = None, width: int | None = None,
    adaptive: bool = False, members: tuple[DrafterConfig, ...] = (), **options: Any,
) -> Engine:  # fmt: skip
    """Everything as on a GPU, but for what writes work down."""
    model: Any = load_model(folder, kernels).model
    drafter = DrafterConfig(
        name=name, model=head, max_draft_tokens=NUM_DRAFTS, tree_width=width, adaptive=adaptive, members=members
    )
    config = EngineConfig(model="tiny", drafter=drafter, block_size=4, max_model_len=48, **options)
    with as_on_a_gpu():
        return assemble(config, model, kernels, lambda _: load_model(folder, kernels).model)


def run(made: Engine, waits: list[Any], num: int = 2, temperature: float = 0.8) -> list[int]:
    """Waits of each step after the prompts', of requests that go on."""
    for index in range(num):
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature)
        made.add(harness.request(index, [5, 9, 4], params, 48))
    made.step()
    counts = []
    for _ in range(4):
        waits.clear()
        made.step()
        counts.append(len(waits))
    assert made.has_work and not any(health.num_errors for health in made.drafter.health.values())
    return counts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return factory.make_checkpoint("qwen3", tmp_path)


def test_a_plain_step_waits_once(folder: Path, waits: list[Any]) -> None:
    made = engine(folder, MetaKernels())
    assert run(made, waits) == [1, 1, 1, 1] and waits == [(2,)]


def test_a_step_without_choices_waits_for_none(folder: Path, waits: list[Any]) -> None:
    made = engine(folder, MetaKernels(), max_num_batched_tokens=8, max_num_prefill_tokens=4)
    made.add(harness.request(0, list(range(5, 25)), SamplingParams(max_tokens=4), 48))
    made.step()
    assert waits == []


def test_drafting_by_lookup_adds_none(folder: Path, waits: list[Any]) -> None:
    made = engine(folder, MetaKernels(), "ngram")
    assert run(made, waits)[1:] == [1, 1, 1] and waits[-1][0] > 2


def test_recurrent_layers_add_none(tmp_path: Path, waits: list[Any]) -> None:
    """Their passes, and the replays of what was accepted, which is everything."""
    made = engine(factory.make_checkpoint("qwen3.5", tmp_path), MetaKernels(), "ngram")
    assert run(made, waits)[1:] == [1, 1, 1] and waits[-1][0] > 2
    assert not made.runner.replays


NUM_CHOICES = 2 * (NUM_DRAFTS + 1)  # of two requests
IN_ALL = NUM_CHOICES + 4 * 2 * NUM_DRAFTS  # and what is told of their drafts
OF_MEDUSA = NUM_CHOICES + 3 * 2 * NUM_DRAFTS


def with_draft(folder: Path, width: int, **options: Any) -> Engine:
    return engine(folder, MetaKernels(), "draft", "a model", width, **options)


def with_head(folder: Path, head: Path, width: int, **options: Any) -> Engine:
    heads.write(head, test_mtp.mimo_tensors(), test_mtp.mimo_config())
    return engine(folder, MetaKernels(), "mtp", str(head), width, **options)


def with_eagle(folder: Path, head: Path, width: int, **options: Any) -> Engine:
    head.mkdir()
    made, _ = test_eagle.make("eagle1", head)
    return engine(folder, MetaKernels(), "eagle", str(made), width, **options)


def with_medusa(folder: Path, head: Path, width: int, **options: Any) -> Engine:
    head.mkdir()
    drawn = test_medusa.random_heads(NUM_DRAFTS, 1)
    return engine(folder, MetaKernels(), "medusa", str(test_medusa.write_vllm(head, drawn)), width, **options)


@pytest.mark.parametrize(("width", "temperature"), [(1, 0.0), (2, 0.8)])
def test_a_drafted_step_waits_once_for_drafts_and_choices(
    folder: Path, tmp_path: Path, waits: list[Any], width: int, temperature: float
) -> None:
    for made in (with_draft(folder, width), with_head(folder, tmp_path / "head", width)):
        assert run(made, waits, temperature=temperature) == [1, 1, 1, 1] and waits == [(IN_ALL,)]


def test_the_hosts_other_work_is_done_before_the_wait(folder: Path, tmp_path: Path, waits: list[Any]) -> None:
    made, found = with_draft(folder, 2), list[int]()
    made.meanwhile = lambda: found.append(len(waits))
    assert run(made, waits) == [1, 1, 1, 1] and found == [0, 0, 0, 0, 0]  # the prompts' step among them


@pytest.mark.parametrize("width", [1, 2])
def test_a_policy_that_looks_at_drafts_waits_once_more(
    folder: Path, tmp_path: Path, waits: list[Any], width: int
) -> None:
    class Looking(FixedPolicy):
        looks_at_drafts = True

    for made in (with_draft(folder, width), with_head(folder, tmp_path / "head", width)):
        made.policy = Looking(NUM_DRAFTS + 1)
        assert run(made, waits) == [2, 2, 2, 2]
        drafts, choices = waits
        assert drafts == (4, 2, NUM_DRAFTS) and choices == (NUM_CHOICES,)


@pytest.mark.parametrize(("width", "temperature"), [(1, 0.8), (2, 0.0)])
def test_drafting_with_medusa_heads_waits_once(
    folder: Path, tmp_path: Path, waits: list[Any], width: int, temperature: float
) -> None:
    made = with_medusa(folder, tmp_path / "head", width)
    assert run(made, waits, temperature=temperature) == [1, 1, 1, 1] and waits == [(OF_MEDUSA,)]


ADAPTIVE: dict[str, Callable[..., Engine]] = {
    "draft": lambda folder, _, width: with_draft(folder, width, adaptive=True),
    "mtp": lambda folder, head, width: with_head(folder, head, width, adaptive=True),
    "eagle": lambda folder, head, width: with_eagle(folder, head, width, adaptive=True),
    "medusa": lambda folder, head, width: with_medusa(folder, head, width, adaptive=True),
}


@pytest.mark.parametrize(("name", "width"), [("draft", 1), ("draft", 2), ("mtp", 2), ("eagle", 1), ("medusa", 2)])
def test_the_adaptive_policy_waits_once(folder: Path, tmp_path: Path, waits: list[Any], name: str, width: int) -> None:
    made = ADAPTIVE[name](folder, tmp_path / "head", width)
    assert isinstance(made.policy, AdaptivePolicy) and not made.policy.looks_at_drafts, "where passes run on a GPU"
    expect_much(made)
    assert run(made, waits) == [1, 1, 1, 1]
    assert waits == [(OF_MEDUSA if name == "medusa" else IN_ALL,)], "all drafts there is room for"
    assert sum(record.stats().drafters[name].drafted for record in made.records.values()) > 0


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_draft_model_that_reads_a_prompt_first_is_waited_for(folder: Path, waits: list[Any], adaptive: bool) -> None:
    """What reading takes can be told from the pass then; every later step waits once."""
    made, counts = with_draft(folder, 1, adaptive=adaptive), list[int]()
    if adaptive:
        expect_much(made)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    made.add(harness.request(0, list(range(5, 5 + 2 * NUM_DRAFTS)), params, 48))
    for _ in range(4):
        waits.clear()
        made.step()
        counts.append(len(waits))
    assert counts == [2, 1, 1, 1]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_portfolio_waits_once_more_where_two_may_draft_for_a_request(
    folder: Path, waits: list[Any], adaptive: bool
) -> None:
    """Behind lookups a model's drafts are late in steps in which those find nothing; before them never."""
    lookup = DrafterConfig(name="ngram", max_draft_tokens=2, ngram_min=8, ngram_max=8)
    of_model = DrafterConfig(name="draft", model="a model", tree_width=1)
    for members, expected in (((lookup, of_model), [1, 2, 2, 2]), ((of_model, lookup), [2, 2, 2, 2])):
        made = engine(folder, MetaKernels(), "portfolio", members=members, adaptive=adaptive)
        if adaptive:
            expect_much(made)
        assert run(made, waits) == expected
