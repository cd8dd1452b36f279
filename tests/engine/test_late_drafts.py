"""Drafts that are read with the target's choices: the same tokens, whatever shares the step, and the same counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import Request, SamplingParams
from forerun.engine.engine import Engine
from forerun.models.captured import CapturedModel
from forerun.models.heads.captured import CapturedHead
from forerun.speculation.growth import Draft
from forerun.speculation.late import LateDrafts
from forerun.speculation.verifier import CoupledVerifier
from tests.drafters import test_mtp
from tests.models.test_device_chains import Enqueued
from tests.support import heads, tiny

LAYERS = 2


@pytest.fixture
def num_late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trees were late in every step that had some, and grew."""
    found: list[int] = []
    finish = LateDrafts.finish

    def counted(late: LateDrafts, host: Any) -> None:
        finish(late, host)
        found.append(sum(len(draft.tree) > 1 for draft in late._all))

    monkeypatch.setattr(LateDrafts, "finish", counted)
    return found


def engine(drafter: DrafterConfig, **options: Any) -> Engine:
    """Everything as on a card, but for what writes work down."""
    model, kernels = tiny.target(LAYERS), tiny.kernels()
    options = {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    made = assemble(EngineConfig(model="tiny", drafter=drafter, **options), model, kernels, lambda _: model)
    made.model = CapturedModel(model, kernels, Enqueued(), made._kvs, made.drafter.hidden_layers)
    made.verifier = CoupledVerifier(kernels, at_once=True)
    return made


class ReadFirst(CoupledVerifier):
    """The same choices, of drafts that were read before."""

    def takes_late(self, requests: Sequence[Request]) -> bool:
        return False


def with_draft(width: int, **options: Any) -> Engine:
    """The target drafts for itself, so that much is accepted."""
    config = DrafterConfig(name="draft", model="tiny", max_draft_tokens=7, tree_width=width, adaptive=False)
    made = engine(config, **options)
    inner: Any = tiny.inner(made)
    inner._model = CapturedModel(tiny.target(LAYERS), tiny.kernels(), Enqueued(), inner._kvs)
    return made


def with_head(width: int, folder: Path, **options: Any) -> Engine:
    """A random head, of which next to nothing is accepted."""
    heads.write(folder, test_mtp.mimo_tensors(), test_mtp.mimo_config())
    config = DrafterConfig(name="mtp", model=str(folder), max_draft_tokens=6, tree_width=width, adaptive=False)
    made = engine(config, **options)
    inner: Any = tiny.inner(made)
    inner._head = CapturedHead(inner._head._head, tiny.kernels(), Enqueued(), inner._kvs)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_late_drafts_of_a_model_change_no_token(width: int, temperature: float, num_late: list[int]) -> None:
    groups = tiny.groups(4, temperature=temperature, max_tokens=14)
    made = with_draft(width, max_num_batched_tokens=40, max_num_prefill_tokens=5)  # prompts are read beside drafts
    found, stats = tiny.run(made, groups)
    assert found == tiny.plain(tiny.target(LAYERS), groups)
    assert max(num_late) >= 2 and tiny.num_accepted(stats) > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_late_drafts_of_a_head_change_no_token(
    width: int, temperature: float, tmp_path: Path, num_late: list[int]
) -> None:
    groups = tiny.groups(3, temperature=temperature, max_tokens=10)
    found, _ = tiny.run(with_head(width, tmp_path), groups)
    assert found == tiny.plain(tiny.target(LAYERS), groups) and max(num_late) == 3


@pytest.mark.parametrize("width", [1, 3])
def test_a_late_tree_is_the_one_that_is_read_at_once(width: int, num_late: list[int]) -> None:
    groups = tiny.groups(3, temperature=1.0, max_tokens=12)
    late, early = with_draft(width), with_draft(width)
    early.verifier = ReadFirst(tiny.kernels(), at_once=True)
    (tokens, stats), (expected, expected_stats) = tiny.run(late, groups), tiny.run(early, groups)
    assert tokens == expected and num_late
    for own, other in zip(stats, expected_stats, strict=True):
        assert (own.num_steps, own.trees, own.drafters) == (other.num_steps, other.trees, other.drafters)


def test_requests_whose_logits_are_shaped_are_read_first(num_late: list[int]) -> None:
    groups = tiny.groups(2, temperature=1.0, max_tokens=6, top_k=5)
    assert tiny.run(with_draft(3), groups)[0] == tiny.plain(tiny.target(LAYERS), groups)
    assert num_late == []


def test_tokens_of_a_longer_vocabulary_are_fed_as_the_last_of_the_targets() -> None:
    draft = Draft(Request("r", (1, 2), SamplingParams(), seed=3), 4, may_be_late=True)
    tokens = torch.tensor([[6, 9, -1]])
    late = LateDrafts([draft], tokens, lambda _: None, tokens)
    rows = late.rows([(draft, 5)], vocab_size=8)
    assert rows.rows.tolist() == [6, 7, 8] and rows.token_ids.tolist() == [6, 7, 0]
