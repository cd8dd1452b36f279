"""LongCat's MTP module gives the logits of its formula, and drafts change no token; what of its config is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM
from forerun.errors import UnsupportedError
from forerun.models.config import ModelConfig, active_parameters, num_parameters
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES
from forerun.models.loader import load_model
from forerun.models.subset import subset_decoder
from tests.drafters.test_mtp import WEIGHTS, chosen, engine, requests
from tests.models import factory
from tests.models.factory import Runner
from tests.models.test_mixtures import generated
from tests.support import tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import HIDDEN, Draw, Reference, Truth

MODULE = "model.mtp.layers.0"
LONGCAT: dict[str, Any] = {  # LongCat-Flash
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "attention_bias": False,
    "attention_dropout": 0.0, "vocab_size": 131072, "hidden_size": 6144, "ffn_hidden_size": 12288,
    "expert_ffn_hidden_size": 2048, "num_layers": 28, "num_attention_heads": 64, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "routed_scaling_factor": 6.0, "n_routed_experts": 512, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 1e7, "zero_expert_num": 256, "zero_expert_type": "identity",
    "moe_topk": 12, "attention_method": "MLA", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class WithLongcatModule:
    """A random target whose checkpoint holds a module: latent attention and a dense part of transformers' kinds."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashDecoderLayer

        model = factory.random_hf_model("longcat_flash", {**factory.LONGCAT, "max_position_embeddings": 128})
        self.folder, self.truth = factory.save_checkpoint(model, folder), Truth(model)
        self.layer: Any = LongcatFlashDecoderLayer(model.config, 0).eval().requires_grad_(False)
        draw = Draw(7)
        for name, parameter in self.layer.named_parameters():
            is_norm = "norm" in name
            parameter.data = draw.norm(len(parameter)) if is_norm else draw.matrix(*parameter.shape[-2:])
        self.own = {role: draw.norm() for role in ("enorm.m", "hnorm.m")}
        self.last, self.projection = draw.norm(), draw.matrix(HIDDEN, 2 * HIDDEN)
        self.table = draw.matrix(factory.VOCAB_SIZE, HIDDEN)
        save_file(load_file(folder / WEIGHTS) | self._stored(), folder / WEIGHTS, metadata={"format": "pt"})

    def _stored(self) -> dict[str, Tensor]:
        names = {"self_attn.0": "self_attn", "mlps.0": "transformer_layer.mlp", "input_layernorm.0": "input_layernorm",
                 "post_attention_layernorm.0": "post_attention_layernorm"}  # fmt: skip
        inside = {
            name.replace(theirs, own, 1): tensor
            for name, tensor in self.layer.state_dict().items()
            for theirs, own in names.items()
            if name.startswith(f"{theirs}.")
        }
        inside |= {f"{name}.weight": weight for name, weight in self.own.items()}
        inside["eh_proj.weight"] = self.projection
        whole = {"model.mtp.norm.weight": self.last, "model.mtp.embed_tokens.weight": self.table}
        return {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in inside.items()} | whole

    def reference(self) -> Reference:
        def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
            normed = _rms(y, self.last)
            return normed @ self.truth.lm_head.T, normed

        return Reference(
            embedding=self.table,
            layers=[factory.LONGCAT["num_layers"] + 1],
            fuse=lambda states: states,
            inner=self.inner,
            outcome=outcome,
            sees_first=True,
        )

    @torch.no_grad()
    def inner(self, embedded: Tensor, feature: Tensor) -> Tensor:
        pair = [_rms(embedded, self.own["enorm.m"]), _rms(feature, self.own["hnorm.m"])]
        rows = (torch.cat(pair, dim=1) @ self.projection.T)[None]  # [1, rows, H]
        num_rows = rows.shape[1]
        positions = torch.tensor([[0, *range(num_rows - 1)]])
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        angles = self.truth.model.model.rotary_emb(rows, positions)
        layer = self.layer
        normed = layer.input_layernorm[0](rows)
        rows = rows + layer.self_attn[0](normed, attention_mask=mask, position_embeddings=angles)[0]
        return (rows + layer.mlps[0](layer.post_attention_layernorm[0](rows)))[0]


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def test_the_module_computes_the_formula(tmp_path: Path) -> None:
    given = WithLongcatModule(tmp_path)
    assert chosen(given.folder) == ["suffix", "recycling", "mtp"]
    loaded = load_model(given.folder, tiny.kernels())
    ear, wanted = overhear(made := engine(loaded.model, given.folder, None, 3), stride=7), requests(3)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(loaded.model), wanted)[0]  # type: ignore[arg-type]
    assert_as_computed(ear, given.reference(), given.truth.states)
    assert tiny.num_accepted(stats) > 0


@pytest.mark.parametrize("width", [1, 3])
def test_drafts_change_nothing_but_speed(width: int, tmp_path: Path) -> None:
    given = WithLongcatModule(tmp_path)
    model = load_model(given.folder, tiny.kernels()).model
    for temperature in (0.0, 1.0):
        wanted = requests(4, temperature)
        expected = tiny.run(tiny.engine(model), wanted)[0]  # type: ignore[arg-type]
        for limits in ({}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}):
            tokens, stats = tiny.run(engine(model, given.folder, None, width, **limits), wanted)
            assert tokens == expected, (temperature, limits)
            assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0


def test_halves_of_layers_that_draft_alone_change_nothing(tmp_path: Path) -> None:
    """What a first half leaves for the second to add is missed, or comes later: both only guess."""
    folder = factory.make_checkpoint("longcat", tmp_path)
    model = load_model(folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    for layers in ((0, 2), (1, 3), (0, 1, 3), (2,)):
        assert Runner(subset_decoder(model, layers), 8).span([5, 9, 40]).logits.isfinite().all()
    plain = LLM(str(folder), drafter="none", threads=1)
    drafted = LLM(str(folder), drafter="layer_skip", threads=1, adaptive=False)
    for temperature in (0.0, 1.0):
        found, expected = (generated(llm, temperature) for llm in (drafted, plain))
        assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]


def test_the_published_config() -> None:
    config = ModelConfig.read(LONGCAT, FAMILIES["longcat_flash"])
    assert num_parameters(config) / 1e9 == pytest.approx(560.7, rel=2e-3)  # "560B"
    assert active_parameters(config) / 1e9 == pytest.approx(32.18, rel=1e-3)  # "up to 31.3B", without a table's rows
    assert config.num_layers == 56 and [config.has_experts(layer) for layer in (0, 1, 54, 55)] == [True, False] * 2
    assert config.latents is not None and (config.latents.query_scale, config.latents.scale) == (2.0, 12**0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"zero_expert_type": "copy"}, "zero_expert_type is 'copy'"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora is False"),
        ({"router_bias": True}, "router_bias is True"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"num_hidden_layers": 28}, "num_hidden_layers is 28"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling type 'yarn'"),
        ({"ngram_vocab_size_ratio": 2.0, "emb_neighbor_num": 4}, "ngram_vocab_size_ratio is 2.0"),
        ({"nextn_use_scmoe": True}, "nextn_use_scmoe is True"),
    ],
)
def test_what_changes_the_computation_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        ModelConfig.read({**LONGCAT, **changes}, FAMILIES["longcat_flash"])
