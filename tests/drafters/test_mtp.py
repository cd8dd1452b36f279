"""MTP modules: DeepSeek's and MiMo's give the logits of the formulas, and what they draft changes no token."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from forerun.llm import engine_config
from forerun.models.heads.mtp import read_mtp
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from tests.models import factory
from tests.support import heads, tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import CONFIG, HIDDEN, VOCAB, Draw, Reference, Truth, layer_of, rms

LAYERS = 2
MIMO = "model.mtp_layers.0"
WEIGHTS = "model.safetensors"


def engine(model: Any, folder: Path | None, head: Path | None, width: int, **options: Any) -> Engine:
    """An engine whose target was read from `folder`."""
    drafter = DrafterConfig(
        name="mtp", model=head and str(head), max_draft_tokens=9 if width > 1 else 4, tree_width=width, adaptive=False
    )
    options = {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    config = EngineConfig(model="tiny", drafter=drafter, **options)
    return assemble(config, model, tiny.kernels(), lambda name: model, folder)


def requests(num: int, temperature: float = 1.0) -> list[RequestGroup]:
    return tiny.groups(num, temperature=temperature, max_tokens=14)


# -- MiMo ----------------------------------------------------------------------------------------------------------


def mimo_tensors() -> dict[str, Tensor]:
    draw = Draw(3)
    tensors = draw.block(MIMO, HIDDEN)
    tensors |= {
        f"{MIMO}.self_attn.{name}_proj.bias": draw.bias(HIDDEN // 2 if name != "q" else HIDDEN) for name in "qkv"
    }
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        tensors[f"{MIMO}.{name}.weight"] = draw.norm()
    return {**tensors, f"{MIMO}.input_proj.weight": draw.matrix(HIDDEN, 2 * HIDDEN)}


def mimo_config() -> dict[str, Any]:
    return {**CONFIG, "model_type": "mimo_mtp", "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}


def mimo_reference(
    truth: Truth | None = None, multiplier: float = 1.0, after_head: Callable[[Tensor], Tensor] = lambda logits: logits
) -> Reference:
    """The module of `mimo_tensors` for a target whose embeddings and logits are changed so."""
    tensors, truth = mimo_tensors(), truth or heads.truth(LAYERS)

    def inner(embedded: Tensor, feature: Tensor) -> Tensor:
        pair = [rms(feature, tensors[f"{MIMO}.hidden_layernorm.weight"])]
        pair.append(rms(embedded, tensors[f"{MIMO}.token_layernorm.weight"]))
        x = torch.cat(pair, dim=1) @ tensors[f"{MIMO}.input_proj.weight"].T
        return layer_of(rms(x, tensors[f"{MIMO}.input_layernorm.weight"]), x, tensors, MIMO)

    return Reference(
        embedding=truth.embedding * multiplier,
        layers=[LAYERS],
        fuse=lambda states: states,
        inner=inner,
        outcome=lambda y: (after_head(rms(y, tensors[f"{MIMO}.final_layernorm.weight"]) @ truth.lm_head.T), y),
    )


@lru_cache
def plain(num: int, temperature: float) -> list[list[list[int]]]:
    return tiny.run(tiny.engine(heads.target(LAYERS)), requests(num, temperature))[0]


@pytest.mark.parametrize("width", [1, 3])
def test_mimo_computes_the_formulas(width: int, tmp_path: Path) -> None:
    folder = heads.write(tmp_path, mimo_tensors(), mimo_config())
    made = engine(heads.target(LAYERS), None, folder, width, max_num_batched_tokens=24)
    ear = overhear(made, stride=5)
    tokens, stats = tiny.run(made, requests(4))
    assert tokens == plain(4, 1.0)
    assert_as_computed(ear, mimo_reference(), heads.truth(LAYERS).states)
    assert tiny.num_accepted(stats) > 0


TARGETS: dict[str, tuple[dict[str, Any], float, Callable[[Tensor], Tensor]]] = {
    "granite": ({"logits_scaling": 8.0, "embedding_multiplier": 3.0}, 3.0, lambda logits: logits / 8),
    "cohere2": ({"logit_scale": 0.3}, 1.0, lambda logits: 0.3 * logits),
    "gemma2": ({"final_logit_softcapping": 2.0}, HIDDEN**0.5, lambda logits: 2 * torch.tanh(logits / 2)),
}


@pytest.mark.parametrize("model_type", TARGETS)
def test_logits_of_the_targets_output_layer_are_scaled_and_capped_as_the_targets(
    model_type: str, tmp_path: Path
) -> None:
    fields, multiplier, after_head = TARGETS[model_type]
    fields = {**fields, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    truth = Truth(factory.random_hf_model(model_type, fields))
    target = load_model(factory.save_checkpoint(truth.model, tmp_path / "target"), tiny.kernels()).model
    made = engine(target, None, heads.write(tmp_path / "head", mimo_tensors(), mimo_config()), 3)
    ear, wanted = overhear(made, stride=5), requests(3)
    assert tiny.run(made, wanted)[0] == tiny.run(tiny.engine(target), wanted)[0]  # type: ignore[arg-type]
    assert_as_computed(ear, mimo_reference(truth, multiplier, after_head), truth.states)


LIMITS = [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("temperature", "limits"), [*zip((0.0, 0.7, 1.0, 1.0), LIMITS, strict=True)])
def test_nothing_changes_but_speed(width: int, temperature: float, limits: dict[str, int], tmp_path: Path) -> None:
    folder = heads.write(tmp_path, mimo_tensors(), mimo_config())
    made = engine(heads.target(LAYERS), None, folder, width, **limits)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0


def test_the_targets_own_folder_is_read_without_a_name(tmp_path: Path) -> None:
    """MiMo's module in the files of a Qwen2-like target, whose own loading it does not disturb."""
    model = factory.random_hf_model("qwen2", {"num_hidden_layers": LAYERS, "max_position_embeddings": 128})
    folder = factory.save_checkpoint(model, tmp_path)
    save_file({**load_file(folder / WEIGHTS), **mimo_tensors()}, folder / WEIGHTS)
    loaded = load_model(folder, tiny.kernels())
    made = engine(loaded.model, folder, None, 1)
    wanted = requests(3)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(loaded.model), wanted)[0]  # type: ignore[arg-type]
    assert tiny.num_accepted(stats) > 0


def test_auto_takes_the_module_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    model = factory.random_hf_model("qwen2", {"num_hidden_layers": LAYERS, "max_position_embeddings": 128})
    folder = factory.save_checkpoint(model, tmp_path / "mimo")
    assert chosen(folder) == ["suffix", "recycling"]
    save_file({**load_file(folder / WEIGHTS), **mimo_tensors()}, folder / WEIGHTS)
    assert chosen(folder) == ["suffix", "recycling", "mtp"]
    assert chosen(DeepSeek(tmp_path / "deepseek", True).folder) == ["suffix", "recycling", "mtp"]


def test_auto_leaves_a_module_that_cannot_be_read(tmp_path: Path) -> None:
    """Several modules, or a target that runs through transformers: naming `mtp` says why, `auto` does without."""
    folder = DeepSeek(tmp_path, True).folder
    path, tensors = folder / "config.json", load_file(folder / WEIGHTS)
    save_file({**tensors, f"model.layers.{LAYERS + 1}.enorm.weight": Draw(1).norm()}, folder / WEIGHTS)
    assert chosen(folder) == ["suffix", "recycling"]
    save_file(tensors, folder / WEIGHTS)
    path.write_text(path.read_text(encoding="utf-8").replace('"deepseek_v3"', '"unheard_of"'), encoding="utf-8")
    assert chosen(folder) == ["suffix", "recycling"]
    assert chosen(tmp_path / "nowhere") == ["suffix", "recycling"]


def chosen(folder: Path) -> list[str]:
    return [member.name for member in engine_config(str(folder), {"drafter": "auto"}).drafter.members]


# -- DeepSeek ------------------------------------------------------------------------------------------------------


class DeepSeek:
    """A random DeepSeek-V3 of two layers with a module behind them, as transformers computes its parts."""

    def __init__(self, folder: Path, shares_tables: bool) -> None:
        _, fields = factory.CASES["deepseek"]
        fields = {**fields, "num_hidden_layers": LAYERS + 1, "max_position_embeddings": 128}
        model = factory.random_hf_model("deepseek_v3", fields)
        self.folder = factory.save_checkpoint(model, folder)
        draw, prefix = Draw(5), f"model.layers.{LAYERS}"
        self.own = {name: draw.norm() for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
        self.own["eh_proj.weight"] = draw.matrix(HIDDEN, 2 * HIDDEN)
        if not shares_tables:
            self.own |= {
                name: draw.matrix(VOCAB, HIDDEN) for name in ("embed_tokens.weight", "shared_head.head.weight")
            }
        tensors = {**load_file(folder / WEIGHTS), **{f"{prefix}.{name}": t for name, t in self.own.items()}}
        save_file(tensors, folder / WEIGHTS)
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
        path.write_text(json.dumps(config), encoding="utf-8")
        self.layer = model.model.layers[LAYERS]
        model.model.layers = model.model.layers[:LAYERS]
        self.truth = Truth(model)

    def reference(self) -> Reference:
        own, truth = self.own, self.truth
        lm_head = own.get("shared_head.head.weight", truth.lm_head)

        def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
            normed = rms6(y, own["shared_head.norm.weight"])
            return normed @ lm_head.T, normed

        return Reference(
            embedding=own.get("embed_tokens.weight", truth.embedding),
            layers=[LAYERS + 1],
            fuse=lambda states: states,
            inner=self.inner,
            outcome=outcome,
            mask_start=True,
        )

    @torch.no_grad()
    def inner(self, embedded: Tensor, feature: Tensor) -> Tensor:
        """The layer over the rows behind one of zeros: the first token's, which has no state before it."""
        pair = [rms6(embedded, self.own["enorm.weight"]), rms6(feature, self.own["hnorm.weight"])]
        z = torch.cat(pair, dim=1) @ self.own["eh_proj.weight"].T
        rows = torch.cat([torch.zeros(1, HIDDEN), z])[None]  # [1, rows, H]
        num_rows = rows.shape[1]
        positions = torch.tensor([[0, *range(num_rows - 1)]])
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        angles = self.truth.model.model.rotary_emb(rows, positions)
        out = self.layer(rows, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN)[1:]


def rms6(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("shares_tables", [True, False])
def test_deepseek_computes_the_formulas(shares_tables: bool, tmp_path: Path) -> None:
    deepseek = DeepSeek(tmp_path, shares_tables)
    loaded = load_model(deepseek.folder, tiny.kernels())
    made = engine(loaded.model, deepseek.folder, None, 3, max_num_batched_tokens=24)
    ear = overhear(made, stride=7)
    wanted = requests(3)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(loaded.model), wanted)[0]  # type: ignore[arg-type]
    assert_as_computed(ear, deepseek.reference(), deepseek.truth.states)
    assert tiny.num_accepted(stats) > 0


# -- what does not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop", "add", "fields", "error", "says"),
    [
        (f"{MIMO}.input_proj.weight", "", {}, UnsupportedError, "no MTP module"),
        (f"{MIMO}.mlp.down_proj.weight", "", {}, CheckpointError, "down_proj"),
        (f"{MIMO}.final_layernorm.weight", "", {}, CheckpointError, "final_layernorm"),
        ("", "model.mtp_layers.1.input_proj.weight", {}, UnsupportedError, "several MTP modules"),
        ("", f"{MIMO}.gate.weight", {}, UnsupportedError, "gate.weight"),
        ("", "", {"hidden_size": 48}, UnsupportedError, "hidden size 48"),
        ("", "", {"vocab_size": 95}, ModelError, "95 tokens"),
        ("", "", {"logit_scale": 2.0}, UnsupportedError, "logit_scale"),
    ],
)
def test_what_does_not_fit_is_refused(
    drop: str, add: str, fields: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:
    tensors = {name: tensor for name, tensor in mimo_tensors().items() if name != drop}
    if add:
        tensors[add] = torch.ones(4, 4)
    folder = heads.write(tmp_path, tensors, {**mimo_config(), **fields})
    with pytest.raises(error, match=says):
        read_mtp(open_head(folder), heads.target(LAYERS), tiny.kernels())


def test_without_a_module_the_user_is_told_where_to_put_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft-model"):
        engine(heads.target(LAYERS), None, None, 1)
    with pytest.raises(UnsupportedError, match="no MTP module"):
        engine(heads.target(LAYERS), factory.save_checkpoint(heads.truth(LAYERS).model, tmp_path), None, 1)


def test_a_target_that_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    folder = factory.save_checkpoint(heads.truth(LAYERS).model, tmp_path / "target")
    head = heads.write(tmp_path / "head", mimo_tensors(), mimo_config())
    loaded = load_model(folder, tiny.kernels(), implementation="transformers")
    with pytest.raises(UnsupportedError, match="transformers"):
        engine(loaded.model, folder, head, 1)
