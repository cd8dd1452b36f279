"""Draft models that guess several tokens at once: the logits of a plain loop over mask tokens, and no token changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import CheckpointError
from forerun.models.loader import load_model
from forerun.models.trimmed import trimmed_decoder
from tests.drafters.test_dflash import assert_as_computed, overhear, plain, requests
from tests.drafters.test_eagle import LAYERS
from tests.models import factory
from tests.support import heads, tiny
from tests.support.heads import VOCAB

DRAFT_LAYERS, MASK = 2, 91


class Reference:
    """The draft model in transformers: behind the last known token it reads mask tokens."""

    first_slot = 0

    @torch.no_grad()
    def after(self, known: Sequence[int], num_slots: int) -> Tensor:
        """Logits [drafts, V]."""
        tokens = [*known, *[MASK] * (num_slots - 1)]
        logits: Tensor = heads.truth(DRAFT_LAYERS).model(torch.tensor([tokens])).logits
        return logits[0, -num_slots:]


def make(folder: Path, **fields: Any) -> Path:
    factory.save_checkpoint(heads.truth(DRAFT_LAYERS).model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def engine(folder: Path, width: int, **options: Any) -> Engine:
    model = load_model(folder, tiny.kernels()).model
    most = 9 if width > 1 else 4
    drafter = DrafterConfig(
        name="draft", model=str(folder), max_draft_tokens=most, tree_width=width, adaptive=False,
        draft_vocabulary=options.pop("draft_vocabulary", None),
    )  # fmt: skip
    options = {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    config = EngineConfig(model="tiny", drafter=drafter, **options)
    return assemble(config, heads.target(LAYERS), tiny.kernels(), lambda name: model)


@pytest.mark.parametrize("field", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize("width", [1, 3])
def test_logits_are_those_of_a_plain_loop(field: str, width: int, tmp_path: Path) -> None:
    """While drafting in an engine: what was kept of mask tokens is not found by later steps."""
    made = engine(make(tmp_path, **{field: MASK}), width, max_num_batched_tokens=24)
    heard = overhear(made, stride=2)
    tokens, stats = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0)
    assert_as_computed(heard, Reference())  # type: ignore[arg-type]
    assert max(len(found) for _, found in heard) == (9 if width > 1 else 4) and tiny.num_accepted(stats) > 0


@pytest.mark.parametrize(("width", "temperature"), [(1, 0.0), (3, 0.7)])
def test_nothing_changes_but_speed(width: int, temperature: float, tmp_path: Path) -> None:
    made = engine(make(tmp_path, pard_token=MASK), width, num_kv_blocks=26)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert any(stat.num_preemptions for stat in stats)


def test_the_rejection_rule_takes_its_drafts_too(tmp_path: Path) -> None:
    made = engine(make(tmp_path, pard_token=MASK), 1, verification="rejection")
    _, stats = tiny.run(made, requests(3))
    assert tiny.num_accepted(stats) > 0


def test_a_draft_vocabulary_leaves_the_mask_token_alone(tmp_path: Path) -> None:
    """It is read, not proposed: it need not be among the tokens kept."""
    folder, kept = make(tmp_path, pard_token=MASK), list(range(10, 40))
    (folder / "kept.json").write_text(json.dumps(kept))
    made = engine(folder, 1, draft_vocabulary=str(folder / "kept.json"))
    heard = overhear(made, stride=1)
    tokens, _ = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0) and heard
    for _, found in heard:
        assert torch.nonzero(found[0] > -torch.inf).flatten().tolist() == kept
    model = load_model(folder, tiny.kernels()).model
    assert trimmed_decoder(model, str(folder), str(folder / "kept.json"), tiny.kernels()).mask_token_id == MASK


@pytest.mark.parametrize("token_id", [-1, VOCAB, "mask"])
def test_no_token_is_refused(token_id: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="pard_token"):
        load_model(make(tmp_path, pard_token=token_id), tiny.kernels())
