"""P-EAGLE heads: several tokens guessed at once, with the logits of the formulas, and no token changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.config import DrafterConfig
from forerun.errors import CheckpointError, ModelError, VocabularyError
from forerun.models.heads.eagle import read_eagle
from forerun.models.heads.source import open_head
from tests.drafters import test_eagle
from tests.drafters.test_dflash import assert_as_computed, overhear, plain, requests
from tests.drafters.test_eagle import LAYERS, eagle3_config, eagle3_reference, eagle3_tensors, truth
from tests.support import heads, tiny
from tests.support.heads import HIDDEN, Draw

LAYOUT, MASK, DRAFTS = "speculators-qwen3", 91, 4  # two layers
PARALLEL: dict[str, Any] = {
    "speculators_model_type": "peagle",
    "mask_token_id": MASK,
    "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTS}]},
}


@dataclass(frozen=True)
class Reference:
    """A head by its formulas: all slots behind the root hold the mask token and mask_hidden."""

    inner: heads.Reference
    mask_hidden: Tensor
    first_slot = 0

    def after(self, known: Sequence[int], num_slots: int) -> Tensor:
        """Logits [drafts, V] of a block whose root is the last known token."""
        by_layer, inner = truth().states(known), self.inner
        states = torch.cat([by_layer[layer] for layer in inner.layers], dim=1)[: len(known) - 1]
        features = inner.fuse(torch.cat([states, self.mask_hidden.expand(num_slots - 1, -1)]))
        tokens = [*known[1:], *[MASK] * (num_slots - 1)]
        return inner.outcome(inner.inner(inner.embedding[tokens], features))[0][-num_slots:]


def make(folder: Path, **fields: Any) -> tuple[Path, Reference]:
    tensors, hidden = eagle3_tensors(LAYOUT), Draw(5).matrix(1, 3 * HIDDEN)
    config = {**eagle3_config(LAYOUT), **PARALLEL, **fields}
    config = {name: value for name, value in config.items() if value is not None}
    heads.write(folder, {**tensors, "mask_hidden": hidden[None]}, config)
    return folder, Reference(eagle3_reference(tensors, test_eagle.FLAGS[LAYOUT]), hidden)


def options(folder: Path, width: int) -> DrafterConfig:
    most = 9 if width > 1 else 6
    return DrafterConfig(name="eagle", model=str(folder), max_draft_tokens=most, tree_width=width, adaptive=False)


@pytest.mark.parametrize("width", [1, 3])
def test_logits_are_those_of_the_formulas(width: int, tmp_path: Path) -> None:
    """While drafting in an engine: several requests, chunked prompts, accepted and refused drafts."""
    folder, reference = make(tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), max_num_batched_tokens=24)
    heard = overhear(made, stride=2)
    tokens, stats = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0)
    assert_as_computed(heard, reference)
    assert max(len(found) for _, found in heard) == DRAFTS and tiny.num_accepted(stats) > 0


@pytest.mark.parametrize(("width", "temperature"), [(1, 0.0), (3, 0.7)])
def test_nothing_changes_but_speed(width: int, temperature: float, tmp_path: Path) -> None:
    folder, _ = make(tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), num_kv_blocks=26)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert any(stat.num_preemptions for stat in stats)


def test_a_block_is_as_long_as_the_head_was_trained_for(tmp_path: Path) -> None:
    kernels, target = tiny.kernels(), heads.target(LAYERS)
    for section, num_drafts in (({}, 8), ({"proposal_methods": [{"speculative_tokens": 3}]}, 3)):
        folder, _ = make(tmp_path / str(num_drafts), speculators_config=section)
        block = read_eagle(open_head(folder), target, kernels).parts.block
        assert block is not None and (block.num_depths, block.is_causal) == (num_drafts, True)


@pytest.mark.parametrize("name", ["pard_token", "ptd_token_id"])
@pytest.mark.parametrize("shape", [(3 * HIDDEN,), (1, 3 * HIDDEN)])
def test_other_layouts_say_the_same(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """The mask token by another name, the states of empty slots in fewer dimensions."""
    made = make(tmp_path, mask_token_id=None, parallel_drafting=True, **{name: MASK})[0]
    tensors = load_file(made / "model.safetensors")
    wanted = tensors["mask_hidden"].flatten()
    save_file({**tensors, "mask_hidden": wanted.view(shape)}, made / "model.safetensors")
    parts = read_eagle(open_head(made), heads.target(LAYERS), tiny.kernels()).parts
    assert parts.block is not None and parts.block.mask_token_id == MASK
    assert parts.blank is not None and torch.equal(parts.blank, wanted)


def test_states_of_another_size_are_refused(tmp_path: Path) -> None:
    made, _ = make(tmp_path)
    tensors = load_file(made / "model.safetensors")
    save_file({**tensors, "mask_hidden": tensors["mask_hidden"][..., 1:].clone()}, made / "model.safetensors")
    with pytest.raises(CheckpointError, match="mask_hidden"):
        read_eagle(open_head(made), heads.target(LAYERS), tiny.kernels())


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"mask_token_id": None}, CheckpointError, "lacks 'mask_token_id'"),
        ({"mask_token_id": 96}, VocabularyError, "mask_token_id 96"),
        ({"mask_token_id": None, "ptd_token_id": 96}, VocabularyError, "ptd_token_id 96"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
            CheckpointError,
            "speculative_tokens",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    fields: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:  # fmt: skip
    folder, _ = make(tmp_path, **fields)
    with pytest.raises(error, match=says):
        read_eagle(open_head(folder), heads.target(LAYERS), tiny.kernels())
