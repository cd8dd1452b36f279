"""The MTP module of Nemotron-H, whose attention and experts are layers of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import UnsupportedError
from forerun.models.heads.mtp import num_modules, read_mtp
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from tests.drafters.test_mtp import WEIGHTS, engine, requests
from tests.models import factory
from tests.support import tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import HIDDEN, Draw, Reference, Truth

KINDS = factory.SPARSE["layers_block_type"]


class Module:
    """A random target and a module made of two layers more of the same model, as transformers computes them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        fields = {**factory.SPARSE, "layers_block_type": [*KINDS, "full_attention", "moe"], **changes}
        model = factory.random_hf_model("nemotron_h", {**fields, "max_position_embeddings": 128})
        self.folder, draw, num = factory.save_checkpoint(model, folder), Draw(5), len(KINDS)
        self.own = {role: draw.norm() for role in ("0.enorm", "0.hnorm", "1.final_layernorm")}
        self.own["0.eh_proj"] = draw.matrix(HIDDEN, 2 * HIDDEN)
        tensors = {self._renamed(name, num): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file(
            tensors | {f"mtp.layers.{role}.weight": tensor for role, tensor in self.own.items()}, folder / WEIGHTS
        )
        self.change(layers_block_type=KINDS, num_nextn_predict_layers=1, mtp_layers_block_type=["attention", "moe"])
        self.layers = model.model.layers[num:]
        model.model.layers = model.model.layers[:num]
        model.model.embed_tokens, model.model.norm = model.model.embeddings, model.model.norm_f  # as Truth knows them
        self.truth = Truth(model)

    def _renamed(self, name: str, num: int) -> str:
        for index in (0, 1):
            name = name.replace(f"backbone.layers.{num + index}.", f"mtp.layers.{index}.")
        return name

    def change(self, **fields: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")

    def _rms(self, x: Tensor, role: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.own[role]

    @torch.no_grad()
    def inner(self, embedded: Tensor, feature: Tensor) -> Tensor:
        pair = torch.cat([self._rms(embedded, "0.enorm"), self._rms(feature, "0.hnorm")], dim=1)
        rows = (pair @ self.own["0.eh_proj"].T)[None]
        mask = torch.full((rows.shape[1], rows.shape[1]), -torch.inf).triu(1)[None, None]
        return self.layers[1](self.layers[0](rows, attention_mask=mask))[0]

    def reference(self) -> Reference:
        def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
            normed = self._rms(y, "1.final_layernorm")
            return normed @ self.truth.lm_head.T, normed

        return Reference(self.truth.embedding, [len(KINDS) + 1], lambda states: states, self.inner, outcome)


@pytest.mark.parametrize(("width", "latent"), [(1, None), (3, 12)])
def test_it_computes_the_formulas_and_changes_no_token(width: int, latent: int | None, tmp_path: Path) -> None:
    module = Module(tmp_path, moe_latent_size=latent)
    target = load_model(module.folder, tiny.kernels()).model
    assert num_modules(module.folder) == 1
    made = engine(target, module.folder, None, width, max_num_batched_tokens=24)
    ear, wanted = overhear(made, stride=5), requests(4)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(target), requests(4))[0]  # type: ignore[arg-type]
    assert_as_computed(ear, module.reference(), module.truth.states)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mtp_layers_block_type": ["linear_attention", "moe"]}, "asks for layers linear_attention, moe"),
        ({"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*E*E"}, "full_attention, moe, full_attention"),
    ],
)
def test_other_layers_are_refused(fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    module = Module(tmp_path)
    module.change(**fields)
    target = load_model(module.folder, tiny.kernels()).model
    with pytest.raises(UnsupportedError, match=says):
        read_mtp(open_head(module.folder), target, tiny.kernels())
