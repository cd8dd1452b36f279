"""MTP modules of many families give the logits of the formulas, and drafts change no token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import SamplingParams
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from forerun.llm import engine_config
from forerun.models.decoder import Decoder
from forerun.models.heads.chained import ChainedHeads
from forerun.models.heads.mtp import num_modules, open_mtp, read_mtp
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from forerun.models.trimmed import kept_tokens
from tests.models import factory
from tests.support import harness, heads, tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import (
    CONFIG,
    HIDDEN,
    VOCAB,
    ChainedReference,
    Draw,
    Reference,
    Truth,
    layer_of,
    rms,
)
from tests.weights.gguf_makers import write_mixture

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
    """MiMo's module in the files of its target, whose own loading it does not disturb."""
    loaded = load_model(folder := write_mimo(tmp_path, mimo_tensors()), tiny.kernels())
    made = engine(loaded.model, folder, None, 1)
    wanted = requests(3)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(loaded.model), wanted)[0]  # type: ignore[arg-type]
    assert tiny.num_accepted(stats) > 0


def write_mimo(folder: Path, more: dict[str, Tensor]) -> Path:
    """A random MiMo, which is a Qwen2 by another name, and further tensors."""
    model = factory.random_hf_model("qwen2", {"num_hidden_layers": LAYERS, "max_position_embeddings": 128})
    factory.save_checkpoint(model, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config), encoding="utf-8")
    save_file({**load_file(folder / WEIGHTS), **more}, folder / WEIGHTS)
    return folder


def test_auto_takes_the_module_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path / "mimo", {})
    assert chosen(folder) == ["suffix", "recycling"]
    save_file({**load_file(folder / WEIGHTS), **mimo_tensors()}, folder / WEIGHTS)
    assert chosen(folder) == ["suffix", "recycling", "mtp"]
    assert chosen(WithModule(tmp_path / "deepseek").folder) == ["suffix", "recycling", "mtp"]


def test_auto_leaves_a_module_that_cannot_be_read(tmp_path: Path) -> None:
    """Several modules, or a target that runs through transformers: naming `mtp` says why, `auto` does without."""
    folder = WithModule(tmp_path).folder
    path, tensors = folder / "config.json", load_file(folder / WEIGHTS)
    save_file({**tensors, f"model.layers.{LAYERS + 1}.enorm.weight": Draw(1).norm()}, folder / WEIGHTS)
    assert chosen(folder) == ["suffix", "recycling"]
    save_file(tensors, folder / WEIGHTS)
    path.write_text(path.read_text(encoding="utf-8").replace('"deepseek_v3"', '"unheard_of"'), encoding="utf-8")
    assert chosen(folder) == ["suffix", "recycling"]
    assert chosen(tmp_path / "nowhere") == ["suffix", "recycling"]


def chosen(folder: Path) -> list[str]:
    return [member.name for member in engine_config(str(folder), {"drafter": "auto"}).drafter.members]


# -- DeepSeek, GLM, Step, Qwen, Ernie, MiMo-V2 ----------------------------------------------------------------------

NAMES = {  # role -> tensors, where N is the number of the target's layers
    "layer": "model.layers.N",
    "token": "model.layers.N.enorm",
    "state": "model.layers.N.hnorm",
    "projection": "model.layers.N.eh_proj",
    "final": "model.layers.N.shared_head.norm",
}
QWEN_NAMES = {
    "layer": "mtp.layers.0",
    "token": "mtp.pre_fc_norm_embedding",
    "state": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "final": "mtp.norm",
}
ERNIE_NAMES = {
    "layer": "model.mtp_block.0",
    "token": "model.mtp_emb_norm.0",
    "state": "model.mtp_hidden_norm.0",
    "projection": "model.mtp_linear_proj.0",
}
MIMO_V2_NAMES = {
    "layer": "model.mtp.layers.0",
    "token": "model.mtp.layers.0.enorm",
    "state": "model.mtp.layers.0.hnorm",
    "projection": "model.mtp.layers.0.eh_proj",
    "final": "model.mtp.layers.0.final_layernorm",
}
STEP_NAMES = {**NAMES, "final": "model.layers.N.transformer.shared_head.norm"}
OWN_TABLES = ("embed_tokens", "shared_head.head")
STEP_TABLES = ("transformer.shared_head.output",)
TYPES = {"layer_types": "full_attention", "mlp_layer_types": "sparse"}  # and those of a module's layer
MIMO_V2_TYPES = {"layer_types": "sliding_attention", "mlp_layer_types": "dense"}
STEP_LISTS = {  # which go on behind the target's layers
    "layer_types": "sliding_attention", "rope_theta": 10000.0, "partial_rotary_factors": 1.0, "swiglu_limits": 0.0,
    "swiglu_limits_shared": 0.0,
}  # fmt: skip


def names_of(model_type: str) -> dict[str, str]:
    named = {"qwen": QWEN_NAMES, "ernie": ERNIE_NAMES, "step": STEP_NAMES, "mimo_v2": MIMO_V2_NAMES}
    return next((names for start, names in named.items() if model_type.startswith(start)), NAMES)


class WithModule:
    """A random target whose checkpoint holds a module with a layer of its kind, as transformers computes its parts."""

    def __init__(
        self, folder: Path, case: str = "deepseek", has_tables: bool = False, num_modules: int | None = None
    ) -> None:
        """`num_modules`: None for as many as are published."""
        model_type, fields = factory.CASES[case]
        self.num_layers = num = fields.get("num_hidden_layers", LAYERS)
        self.is_step = model_type == "step3p5"
        lists = {"step3p5": STEP_LISTS, "mimo_v2_flash": MIMO_V2_TYPES}.get(model_type, TYPES)
        self.window = fields["sliding_window"] if lists is not TYPES else 0  # of the module's layer
        self.num_modules = num_modules or (3 if self.window else 1)
        lasts = {name: [last] * self.num_modules for name, last in lists.items()}
        more: dict[str, Any] = {name: [*fields[name], *last] for name, last in lasts.items() if name in fields}
        if "moe_k" in fields:  # an Ernie, whose module has no experts
            more["moe_layer_end_index"] = num - 1
        fields = {**fields, **more, "num_hidden_layers": num + self.num_modules, "max_position_embeddings": 128}
        model = factory.random_hf_model(model_type, fields)
        self.eps, self.is_latent = model.config.rms_norm_eps, "kv_lora_rank" in fields
        self.less = 1.0 if model_type.startswith(("qwen", "step")) else 0.0  # what stored norms are less
        names = names_of(model_type)
        self.names = [
            {role: name.replace("N", str(num + depth)).replace("mtp.layers.0", f"mtp.layers.{depth}")
             for role, name in names.items()} for depth in range(self.num_modules)
        ]  # fmt: skip
        self.folder = factory.save_checkpoint(model, folder)
        draws = [Draw(5 + depth) for depth in range(self.num_modules)]
        roles = [role for role in ("token", "state", "final") if role in names]
        self.own = [
            {**{role: draw.norm() for role in roles}, "projection": draw.matrix(HIDDEN, 2 * HIDDEN)} for draw in draws
        ]
        tables = (STEP_TABLES if self.is_step else OWN_TABLES) if has_tables else ()
        self.tables = [{name: draw.matrix(VOCAB, HIDDEN) for name in tables} for draw in draws]
        tensors = load_file(folder / WEIGHTS)
        save_file({self._renamed(name): tensor for name, tensor in tensors.items()} | self._stored(), folder / WEIGHTS)
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {name: config[name][:num] for name in TYPES if config.get(name) and not self.is_step}
        count = "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
        path.write_text(json.dumps({**config, "num_hidden_layers": num, count: self.num_modules}), encoding="utf-8")
        self.layers = model.model.layers[num:]
        model.model.layers = model.model.layers[:num]
        self.truth = Truth(model)

    def _renamed(self, name: str) -> str:
        for depth, names in enumerate(self.names):
            name = name.replace(f"model.layers.{self.num_layers + depth}.", f"{names['layer']}.")
        return re.sub(r"(mtp\.layers\.\d\.)post_attention", r"\1pre_mlp", name) if self.window else name

    def _stored(self) -> dict[str, Tensor]:
        stored = dict[str, Tensor]()
        for names, own, tables in zip(self.names, self.own, self.tables, strict=True):
            less = {role: self.less * (role != "projection") for role in own}
            stored |= {f"{names[role]}.weight": tensor - less[role] for role, tensor in own.items()}
            stored |= {f"{names['layer']}.{name}.weight": table for name, table in tables.items()}
        return stored

    def reference(self) -> Reference | ChainedReference:
        modules = [self._module(depth) for depth in range(self.num_modules)]
        return modules[0] if len(modules) == 1 else ChainedReference(modules)

    def _module(self, depth: int) -> Reference:
        truth, tables = self.truth, self.tables[depth]
        own_heads = (tables[name] for name in ("shared_head.head", *STEP_TABLES) if name in tables)
        lm_head = next(own_heads, truth.lm_head)

        def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
            normed = self._rms(y, "final", depth)
            return normed @ lm_head.T, y if self.is_step else normed

        return Reference(
            embedding=tables.get("embed_tokens", truth.embedding),
            layers=[self.num_layers + (not self.is_step)],
            fuse=lambda states: states,
            inner=partial(self.inner, depth=depth),
            outcome=outcome,
            mask_start=self.names[depth]["token"].endswith(".enorm") and not self.window,
            sees_first=self.window > 0,
        )

    @torch.no_grad()
    def inner(self, embedded: Tensor, feature: Tensor, depth: int = 0) -> Tensor:
        """The layer over the rows; latent attention sees one of zeros before: the first token's, without a state.

        In a window that row is among those given. Each module stands one position before the one that feeds it.
        """
        pair = [self._rms(embedded, "token", depth), self._rms(feature, "state", depth)]
        z = torch.cat(pair, dim=1) @ self.own[depth]["projection"].T
        num_before = int(self.is_latent)
        rows = torch.cat([torch.zeros(num_before, HIDDEN), z])[None]  # [1, rows, H]
        num_rows, num_first = rows.shape[1], max(num_before, int(self.window > 0))
        positions = torch.tensor([[max(row - num_first - depth, 0) for row in range(num_rows)]])
        mask = torch.full((num_rows, num_rows), -torch.inf).triu(1)[None, None]
        if self.window:
            mask += torch.full((num_rows, num_rows), -torch.inf).tril(-self.window)
        kind = ["sliding_attention"] if self.window else []
        angles = self.truth.model.model.rotary_emb(rows, positions, *kind)
        layer = self.layers[depth]
        out = layer(rows, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1, HIDDEN)[num_before:]

    def _rms(self, x: Tensor, role: str, depth: int) -> Tensor:
        """An Ernie's last norm is the target's."""
        weight = self.own[depth].get(role, self.truth.model.model.norm.weight.detach())
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight


@pytest.mark.parametrize(
    ("case", "has_tables"),
    [
        ("deepseek", False),
        ("deepseek", True),
        ("glm4-moe", True),
        ("glm4-moe-biased", False),
        ("glm4-moe-lite", True),
        ("qwen3-next", False),
        ("qwen3.5", False),
        ("qwen3.5-moe", False),
        ("ernie4.5-moe", False),
        ("step3.5", True),
        ("mimo-v2", False),
    ],
)
def test_a_layer_of_the_targets_kind_computes_the_formulas(case: str, has_tables: bool, tmp_path: Path) -> None:
    given = WithModule(tmp_path, case, has_tables)
    assert chosen(given.folder) == ["suffix", "recycling", "mtp"]
    loaded = load_model(given.folder, tiny.kernels())
    made = engine(loaded.model, given.folder, None, 3, max_num_batched_tokens=24)
    ear = overhear(made, stride=7)
    wanted = requests(3)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(loaded.model), wanted)[0]  # type: ignore[arg-type]
    assert_as_computed(ear, given.reference(), given.truth.states)
    assert tiny.num_accepted(stats) > 0


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("case", ["glm4-moe", "qwen3.5", "step3.5", "mimo-v2"])
def test_a_layer_of_the_targets_kind_changes_nothing_but_speed(case: str, width: int, tmp_path: Path) -> None:
    given = WithModule(tmp_path, case)
    model = load_model(given.folder, tiny.kernels()).model
    for temperature in (0.0, 1.0):
        wanted = requests(4, temperature)
        expected = tiny.run(tiny.engine(model), wanted)[0]  # type: ignore[arg-type]
        for limits in LIMITS:
            tokens, stats = tiny.run(engine(model, given.folder, None, width, **limits), wanted)
            assert tokens == expected, (temperature, limits)
            assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0


@pytest.mark.parametrize(("case", "width"), [("step3.5", 1), ("mimo-v2", 3)])
def test_modules_one_behind_the_other_go_on_where_others_ended(case: str, width: int, tmp_path: Path) -> None:
    """After prefix hits at and inside blocks, preemptions and parts of a prompt, drafts are still the formulas'."""
    given = WithModule(tmp_path, case)
    model = load_model(given.folder, tiny.kernels()).model
    made = engine(model, given.folder, None, width, max_num_batched_tokens=13, num_kv_blocks=16, max_model_len=48)
    prompts = [[(step * i) % 90 + 3 for i in range(num)] for step, num in ((7, 17), (7, 22), (11, 21), (7, 23))]
    params = SamplingParams(seed=1, temperature=1.0, max_tokens=14, ignore_eos=True)
    wanted = [harness.request(i, prompt, params, tiny.MAX_LEN) for i, prompt in enumerate(prompts)]
    expected = tiny.run(tiny.engine(model), wanted)[0]  # type: ignore[arg-type]
    ear, told = overhear(made, stride=3), []
    for _ in range(2):
        tokens, stats = tiny.run(made, wanted)
        assert tokens == expected
        told += stats
    assert {stat.num_cached_tokens % 4 > 0 for stat in told if stat.num_cached_tokens} == {False, True}
    assert sum(stat.num_preemptions for stat in told) > 0
    assert_as_computed(ear, given.reference(), given.truth.states)
    assert {len(drafted) for _, drafted, _ in ear.heard} >= {0, 1, 2, 3}  # beyond the last module's depth, too


def test_a_single_module_of_those_trained_for_several_depths_drafts_all_of_them(tmp_path: Path) -> None:
    given = WithModule(tmp_path, "mimo-v2", num_modules=1)
    assert num_modules(given.folder) == 1
    ear = overhear(made := engine(load_model(given.folder, tiny.kernels()).model, given.folder, None, 3), stride=5)
    tiny.run(made, requests(2))
    assert_as_computed(ear, given.reference(), given.truth.states)


def test_modules_share_the_rows_of_a_draft_vocabulary(tmp_path: Path) -> None:
    given, listed = WithModule(tmp_path, "mimo-v2"), tmp_path / "kept.json"
    listed.write_text(json.dumps([*range(3, 40)]))
    model = load_model(given.folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    kept = kept_tokens(str(listed), model, given.folder)
    read = read_mtp(open_mtp(given.folder), model, tiny.kernels(), kept=kept)
    assert isinstance(read, ChainedHeads)
    assert len({id(module.parts.exit.lm_head) for module in read.modules}) == 1
    config = DrafterConfig(name="mtp", draft_vocabulary=str(listed), max_draft_tokens=4, tree_width=1, adaptive=False)
    options = EngineConfig(model="tiny", drafter=config, block_size=4, max_model_len=tiny.MAX_LEN)
    made = assemble(options, model, tiny.kernels(), lambda name: model, given.folder)
    ear, wanted = overhear(made, stride=5), requests(2)
    assert tiny.run(made, wanted)[0] == tiny.run(tiny.engine(model), wanted)[0]
    for known, drafted, row in ear.heard:
        expected = given.reference().after(known, drafted, given.truth.states)[3:40]
        assert torch.allclose(row[3:40], expected, rtol=1e-3, atol=1e-3) and row[40:].max() == -torch.inf


def test_modules_one_behind_the_other_have_layers_in_windows(tmp_path: Path) -> None:
    given = WithModule(tmp_path, "qwen3.5")
    model = load_model(given.folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    module = read_mtp(open_mtp(given.folder), model, tiny.kernels())
    with pytest.raises(UnsupportedError, match="layers that see everything; supported are several modules"):
        ChainedHeads([module, module])


@pytest.mark.parametrize("case", ["step3.5", "mimo-v2"])
def test_a_module_that_lacks_a_tensor_is_an_error(case: str, tmp_path: Path) -> None:
    given = WithModule(tmp_path, case)
    assert num_modules(given.folder) == 3
    tensors, lost = load_file(given.folder / WEIGHTS), f"{given.names[2]['projection']}.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, given.folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=re.escape(lost)):
        engine(load_model(given.folder, tiny.kernels()).model, given.folder, None, 1)


@pytest.mark.parametrize(
    ("case", "arch"), [("glm4-moe-biased", "glm4moe"), ("unscaled", "deepseek32"), ("unscaled", "deepseek2")]
)
def test_a_module_in_a_gguf_file_computes_the_formulas(
    case: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(factory.CASES, "unscaled", ("deepseek_v3", {**factory.DEEPSEEK, "n_shared_experts": 2}))
    given = WithModule(tmp_path, case, has_tables=True)
    config = AutoConfig.from_pretrained(given.folder, num_hidden_layers=LAYERS + 1)
    path = write_mixture(tmp_path / "model.gguf", given.folder, config, arch, nextn_predict_layers=1)
    assert chosen(path) == ["suffix", "recycling", "mtp"]
    ear = overhear(made := engine(load_model(path, tiny.kernels()).model, path, None, 3), stride=3)
    _, stats = tiny.run(made, requests(2))
    assert_as_computed(ear, given.reference(), given.truth.states)
    assert tiny.num_accepted(stats) > 0


def test_a_module_of_a_multimodal_checkpoint_is_found_beside_its_text_part(tmp_path: Path) -> None:
    given = WithModule(tmp_path, "qwen3.5")
    path = given.folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}}
    path.write_text(json.dumps(whole), encoding="utf-8")
    tensors = load_file(given.folder / WEIGHTS)
    save_file(
        {re.sub("^model", "model.language_model", name): each for name, each in tensors.items()}, given.folder / WEIGHTS
    )
    assert chosen(given.folder) == ["suffix", "recycling", "mtp"]
    model = load_model(given.folder, tiny.kernels()).model
    ear = overhear(made := engine(model, given.folder, None, 1), stride=3)
    tiny.run(made, requests(2))
    assert_as_computed(ear, given.reference(), given.truth.states)


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
    with pytest.raises(UnsupportedError, match="no MTP module for this target: choose another drafter"):
        engine(heads.target(LAYERS), factory.save_checkpoint(heads.truth(LAYERS).model, tmp_path), None, 1)


def test_tables_of_its_own_that_a_qwen_announces_are_refused(tmp_path: Path) -> None:
    given = WithModule(tmp_path, "qwen3.5")
    path = given.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "mtp_use_dedicated_embeddings": True}), encoding="utf-8")
    assert chosen(given.folder) == ["suffix", "recycling"]
    with pytest.raises(UnsupportedError, match="mtp_use_dedicated_embeddings"):
        engine(load_model(given.folder, tiny.kernels()).model, given.folder, None, 1)


@pytest.mark.parametrize("name", ["mtp.layers.1.input_layernorm.weight", "mtp.embed_tokens.weight"])
def test_tensors_of_a_qwen_that_are_not_read_are_refused(name: str, tmp_path: Path) -> None:
    given = WithModule(tmp_path, "qwen3.5")
    save_file({**load_file(given.folder / WEIGHTS), name: Draw(1).norm()}, given.folder / WEIGHTS)
    with pytest.raises(UnsupportedError, match="several MTP modules|embed_tokens"):
        engine(load_model(given.folder, tiny.kernels()).model, given.folder, None, 1)


def test_scales_of_caches_and_activations_change_nothing(tmp_path: Path) -> None:
    given, layer = WithModule(tmp_path, "qwen3.5"), "mtp.layers.0"
    scales = {f"{layer}.{name}": torch.ones(1) for name in ("self_attn.k_scale", "mlp.down_proj.input_scale")}
    save_file(load_file(given.folder / WEIGHTS) | scales, given.folder / WEIGHTS)
    engine(load_model(given.folder, tiny.kernels()).model, given.folder, None, 1)


def test_a_target_that_runs_through_transformers_is_refused(tmp_path: Path) -> None:
    folder = factory.save_checkpoint(heads.truth(LAYERS).model, tmp_path / "target")
    head = heads.write(tmp_path / "head", mimo_tensors(), mimo_config())
    loaded = load_model(folder, tiny.kernels(), implementation="transformers")
    with pytest.raises(UnsupportedError, match="transformers"):
        engine(loaded.model, folder, head, 1)
