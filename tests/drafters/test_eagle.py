"""EAGLE heads: in every layout they give the logits of the formulas, and what they draft changes no token."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.config import DrafterConfig
from forerun.core import Request
from forerun.engine.outputs import RequestGroup
from forerun.errors import CheckpointError, ModelError, UnsupportedError, VocabularyError
from forerun.models.heads.eagle import read_eagle
from forerun.models.heads.source import open_head
from tests.drafters import test_mtp
from tests.support import harness, heads, tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import CONFIG, DRAFT_VOCAB, HIDDEN, VOCAB, Draw, Reference, Truth, layer_of, rms
from tests.support.shared import shared_data

LAYERS = 7  # enough for the published choice of three states: 2, 3, 4
IDS = [2, 3, 4]
LAYOUTS = (
    "eagle1", "eagle1-bin", "eagle1-two-layers", "safeailab", "specforge", "eagle3.1", "speculators",
    "speculators-qwen3", "whole-vocabulary",
)  # fmt: skip
SPEED = {"adaptive": False}


def truth() -> Truth:
    return heads.truth(LAYERS)


def make(layout: str, folder: Path) -> tuple[Path, Reference]:
    """A checkpoint of a layout, and the head it holds."""
    if layout.startswith("eagle1"):
        return _make_eagle1(folder, 2 if layout == "eagle1-two-layers" else 1, layout == "eagle1-bin")
    return _make_eagle3(layout, folder)


# -- EAGLE-1 -------------------------------------------------------------------------------------------------------


def _make_eagle1(folder: Path, num_layers: int, as_bin: bool) -> tuple[Path, Reference]:
    draw = Draw(num_layers + as_bin)
    tensors = {"fc.weight": draw.matrix(HIDDEN, 2 * HIDDEN), "embed_tokens.weight": truth().embedding.clone()}
    if not as_bin:
        tensors["fc.bias"] = draw.bias()
    for index in range(num_layers):
        tensors |= draw.block(f"layers.{index}", HIDDEN)
        if index:
            tensors[f"layers.{index}.input_layernorm.weight"] = draw.norm()

    def inner(embedded: Tensor, feature: Tensor) -> Tensor:
        z = torch.cat([embedded, feature], dim=1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0.0)
        for index in range(num_layers):
            x = rms(z, tensors[f"layers.{index}.input_layernorm.weight"]) if index else z
            z = layer_of(x, z, tensors, f"layers.{index}")
        return z

    reference = Reference(
        embedding=truth().embedding,
        layers=[LAYERS + 1],
        fuse=lambda states: states,
        inner=inner,
        outcome=lambda z: (z @ truth().lm_head.T, z),
    )
    config = {**CONFIG, "num_hidden_layers": num_layers, "bias": not as_bin}
    return heads.write(folder, tensors, config, as_bin), reference


# -- EAGLE-3 -------------------------------------------------------------------------------------------------------

FLAGS: dict[str, dict[str, Any]] = {
    "safeailab": {},
    "specforge": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [0, 3, 7],
        "speculators_model_type": "eagle3",
    },
    "speculators-qwen3": {"norm_before_residual": False, "speculators_model_type": "eagle3"},
    "whole-vocabulary": {"draft_vocab_size": VOCAB},
}


def _make_eagle3(layout: str, folder: Path) -> tuple[Path, Reference]:
    tensors, config = eagle3_tensors(layout), eagle3_config(layout)
    return heads.write(folder, tensors, config), eagle3_reference(tensors, FLAGS[layout])


def _prefix(layout: str) -> str:
    return "layers.0" if layout.startswith("speculators") else "midlayer"


def eagle3_tensors(layout: str) -> dict[str, Tensor]:
    draw, prefix, flags = Draw(LAYOUTS.index(layout)), _prefix(layout), FLAGS[layout]
    qwen = layout == "speculators-qwen3"
    size = flags.get("draft_vocab_size", DRAFT_VOCAB)
    tensors = {
        "fc.weight": draw.matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": draw.norm(),
        "lm_head.weight": draw.matrix(size, HIDDEN),
        f"{prefix}.input_layernorm.weight": draw.norm(),
        f"{prefix}.hidden_norm.weight": draw.norm(),
        **draw.block(prefix, 2 * HIDDEN, head_dim=16 if qwen else 8),
    }
    if size < VOCAB:
        known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:size].sort().values
        tensors["d2t"] = known - torch.arange(size)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), known)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": draw.norm() for i in range(3)}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = draw.norm(3 * HIDDEN)
    if qwen:
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": draw.norm(16) for name in ("q", "k")}
        tensors |= draw.block("layers.1", HIDDEN, head_dim=16)
        tensors |= {f"layers.1.self_attn.{name}_norm.weight": draw.norm(16) for name in ("q", "k")}
        tensors |= {"layers.1.input_layernorm.weight": draw.norm(), "embed_tokens.weight": draw.matrix(VOCAB, HIDDEN)}
    return tensors


def eagle3_config(layout: str) -> dict[str, Any]:
    flags = {"draft_vocab_size": DRAFT_VOCAB, **FLAGS[layout]}
    if not layout.startswith("speculators"):
        return {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], **flags}
    layer = {**CONFIG, **({"model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 2} if "qwen3" in layout else {})}
    return {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer, **flags}


def eagle3_reference(tensors: dict[str, Tensor], flags: dict[str, Any]) -> Reference:
    prefix = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"

    def fuse(states: Tensor) -> Tensor:
        if flags.get("fc_norm"):
            parts = [rms(part, tensors[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.split(HIDDEN, dim=1))]
            states = torch.cat(parts, dim=1)
        if flags.get("norm_before_fc"):
            states = rms(states, tensors["input_norm.weight"])
        return states @ tensors["fc.weight"].T

    def inner(embedded: Tensor, g: Tensor) -> Tensor:
        normed = rms(g, tensors[f"{prefix}.hidden_norm.weight"])
        u = torch.cat([rms(embedded, tensors[f"{prefix}.input_layernorm.weight"]), normed], dim=1)
        y = layer_of(u, normed if flags.get("norm_before_residual") else g, tensors, prefix)
        if "layers.1.input_layernorm.weight" in tensors:
            y = layer_of(rms(y, tensors["layers.1.input_layernorm.weight"]), y, tensors, "layers.1")
        return y

    def outcome(y: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(y, tensors["norm.weight"])
        logits = normed @ tensors["lm_head.weight"].T
        if "d2t" in tensors:
            wide = torch.full((len(y), VOCAB), -torch.inf)
            wide[:, torch.arange(len(tensors["d2t"])) + tensors["d2t"]] = logits
            logits = wide
        return logits, normed if flags.get("norm_output") else y

    nested = flags.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    ids = [i + 1 for i in nested] if nested else flags.get("eagle_aux_hidden_state_layer_ids", IDS)
    embedding = tensors.get("embed_tokens.weight", truth().embedding)
    return Reference(embedding=embedding, layers=ids, fuse=fuse, inner=inner, outcome=outcome)


# -- tests ---------------------------------------------------------------------------------------------------------


def options(folder: Path, width: int, **others: Any) -> DrafterConfig:
    return DrafterConfig(
        name="eagle", model=str(folder), max_draft_tokens=9 if width > 1 else 4, tree_width=width, **{**SPEED, **others}
    )


@lru_cache
def plain(num: int, temperature: float) -> list[list[list[int]]]:
    return tiny.run(tiny.engine(heads.target(LAYERS)), requests(num, temperature))[0]


def requests(num: int, temperature: float = 1.0) -> list[RequestGroup]:
    return tiny.groups(num, temperature=temperature, max_tokens=14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_formulas(layout: str, tmp_path: Path) -> None:
    """While drafting trees in an engine: several requests, chunked prompts, accepted and refused drafts."""
    folder, reference = make(layout, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 3), max_num_batched_tokens=24)
    ear = overhear(made, stride=13)
    tokens, stats = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0)
    assert_as_computed(ear, reference, truth().states)
    assert tiny.num_accepted(stats) > 0


LIMITS = [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("temperature", "limits"), [(0.0, LIMITS[0]), (0.7, LIMITS[1]), (1.0, LIMITS[2]), (1.0, LIMITS[3])]
)
def test_nothing_changes_but_speed(width: int, temperature: float, limits: dict[str, int], tmp_path: Path) -> None:
    folder, _ = make("eagle3.1", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), **limits)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0
    assert ("num_kv_blocks" in limits) == any(stat.num_preemptions for stat in stats)


@pytest.mark.parametrize("width", [1, 3])
def test_rejection_without_temperature_is_greedy(width: int, tmp_path: Path) -> None:
    folder, _ = make("eagle1", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), verification="rejection")
    assert tiny.run(made, requests(4, 0.0))[0] == plain(4, 0.0)


@pytest.mark.parametrize("width", [1, 3])
def test_rejection_with_temperature_is_repeatable(width: int, tmp_path: Path) -> None:
    folder, _ = make("safeailab", tmp_path)
    wanted = tiny.groups(3, temperature=0.9, top_k=8, max_tokens=10)
    runs = []
    for _ in range(2):
        made = tiny.engine(heads.target(LAYERS), options(folder, width), verification="rejection")
        runs.append(tiny.run(made, wanted)[0])
    assert runs[0] == runs[1]
    assert all(len(sample) == 10 for group in runs[0] for sample in group)


def test_drawn_trees_have_one_shape(tmp_path: Path) -> None:
    """Under the rejection rule what was drawn decides about no node: every tree of a size is the same, with its q."""
    folder, _ = make("safeailab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 3), verification="rejection")
    propose, shapes = made.drafter.propose, set()

    def watch(drafts: Any) -> None:
        propose(drafts)
        for draft in drafts:
            tree = draft.tree
            assert all((tree.proposal(node) is not None) == bool(tree.children(node)) for node in range(len(tree)))
            if len(tree) > 1 and draft.max_nodes == 10:
                shapes.add(tuple(tree.parents))

    made.drafter.propose = watch  # type: ignore[method-assign]
    tiny.run(made, requests(3))
    assert len(shapes) == 1
    assert len(shapes.pop()) == 10


def test_a_prefix_hit_goes_on_from_shared_rows(tmp_path: Path) -> None:
    """A request that begins on blocks of another drafts at once, with the logits of the formulas."""
    folder, reference = make("safeailab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    prompt = [3 + i * 7 % 90 for i in range(30)]
    params = requests(1)[0].samples[0].request.params
    ear = overhear(made, stride=1)
    tiny.run(made, [harness.request(0, prompt, params, tiny.MAX_LEN)])
    ear.heard.clear()
    texts = [prompt[:29], [*prompt[:29], 5, 41], [*prompt[:26], 7]]
    others = [harness.request(i, text, params, tiny.MAX_LEN) for i, text in enumerate(texts, 1)]
    tokens, stats = tiny.run(made, others)
    assert tokens == tiny.run(tiny.engine(heads.target(LAYERS)), others)[0]
    assert all(stat.num_cached_tokens >= 24 for stat in stats)
    assert_as_computed(ear, reference, truth().states)
    assert min(len(known) for known, _, _ in ear.heard if known[:29] == texts[0]) == 29, "drafts in its first step"


class Refusing:
    """In the place of `Thrift`."""

    allows = False

    def learn(self, *_: float) -> None: ...

    def leaves(self, _: object) -> bool:
        return False


def test_where_following_does_not_pay_passes_give_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such requests have no drafts, nor those that begin on their blocks; others still have the formulas'."""
    folder, reference = make("safeailab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    follower, thrift = tiny.inner(made)._follower, Refusing()
    monkeypatch.setattr(follower, "_thrift", thrift)
    passes, observe = list[int](), made.drafter.observe
    monkeypatch.setattr(
        made.drafter, "observe", lambda seen, hidden: (passes.append(len(hidden)), observe(seen, hidden))
    )
    wanted, others = requests(3), tiny.groups(5, temperature=1.0, max_tokens=14)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == plain(3, 1.0) and not any(stat.drafters for stat in stats)
    assert set(passes) == {0} and not follower._follows and not follower._left
    thrift.allows, ear = True, overhear(made, stride=1)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == plain(3, 1.0) and any(stat.num_cached_tokens for stat in stats)
    assert not any(stat.drafters for stat in stats if stat.num_cached_tokens)
    tokens, stats = tiny.run(made, others)
    assert tokens == tiny.run(tiny.engine(heads.target(LAYERS)), others)[0] and all(stat.drafters for stat in stats)
    assert_as_computed(ear, reference, truth().states)


def test_blocks_computed_without_states_lose_those_of_what_lay_there(tmp_path: Path) -> None:
    folder, _ = make("safeailab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1), num_kv_blocks=26, max_num_seqs=1)
    tiny.run(made, requests(4))
    kept = [block for block in range(26) if made.boundaries.of(block) is not None]
    tiny.inner(made)._follower._thrift = Refusing()
    tiny.run(made, tiny.groups(7, temperature=1.0, max_tokens=30))
    assert kept and all(made.boundaries.of(block) is None for block in range(26))


def test_beside_another_head_in_a_portfolio(tmp_path: Path) -> None:
    """Each of two heads finds its own states among those both ask for, and rows of trees that both grew."""
    folder, reference = make("safeailab", tmp_path / "eagle")
    mimo = heads.write(tmp_path / "mtp", test_mtp.mimo_tensors(), test_mtp.mimo_config())
    members = (
        DrafterConfig(name="eagle", model=str(folder), max_draft_tokens=4, tree_width=2),
        DrafterConfig(name="mtp", model=str(mimo), max_draft_tokens=4),
    )
    both = DrafterConfig(name="portfolio", members=members, max_draft_tokens=12, adaptive=False)
    made = tiny.engine(heads.target(LAYERS), both, num_kv_blocks=30)
    ear = overhear(made, stride=9)
    assert made.drafter.hidden_layers == (2, 3, 4, 7)
    followers = [member.drafter._follower for member in made.drafter.members]  # type: ignore[attr-defined]
    assert [follower._thrift for follower in followers] == [None, None], "fixed drafts are wanted always"
    tokens, stats = tiny.run(made, requests(4))
    assert tokens == plain(4, 1.0)
    assert_as_computed(ear, reference, truth().states)
    drafters = {name for stat in stats for name, count in stat.drafters.items() if count.drafted}
    assert drafters == {"eagle", "mtp"}


def test_no_draft_without_a_state_before(tmp_path: Path) -> None:
    """A prompt of one token gives no state to draft from in the first step, and drafts from the second on."""
    folder, reference = make("safeailab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    ear = overhear(made, stride=1)
    params = requests(1)[0].samples[0].request.params
    wanted = [harness.request(0, [9], params, tiny.MAX_LEN)]
    assert tiny.run(made, wanted)[0] == tiny.run(tiny.engine(heads.target(LAYERS)), wanted)[0]
    assert min(len(known) for known, _, _ in ear.heard) == 2
    assert_as_computed(ear, reference, truth().states)


def test_a_tree_keeps_the_likeliest_nodes(tmp_path: Path) -> None:
    """All nodes drawn compete for the places, deep ones with broad ones; a confident head draws deep trees."""
    folder, _ = make("whole-vocabulary", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 3))
    depths: set[int] = set()
    propose = made.drafter.propose

    def watch(drafts: Any) -> None:
        propose(drafts)
        for draft in drafts:
            depths.add(max(draft.tree.depths))
            parents = draft.tree.parents
            assert all(draft.survival[node] <= draft.survival[parents[node]] for node in range(1, len(draft.tree)))
            assert len(draft.tree) in (1, draft.max_nodes)

    made.drafter.propose = watch  # type: ignore[method-assign]
    tiny.run(made, requests(3, 0.0))
    assert max(depths) > 2


def read(folder: Path) -> Any:
    return read_eagle(open_head(folder), heads.target(LAYERS), tiny.kernels())


def changed(tmp_path: Path, layout: str, drop: str = "", **fields: Any) -> Path:
    folder, _ = make(layout, tmp_path)
    source = open_head(folder)
    tensors = {}
    for name in source:
        if name != drop and name != "t2d":
            tensors[name] = source.integers(name) if name == "d2t" else source.tensor(name)
    config = {name: value for name, value in {**source.config, **fields}.items() if value != "absent"}
    return heads.write(folder, tensors, config)


SAFEAILAB_FIELDS: dict[str, dict[str, Any]] = {
    "the target's 40 layers": {"num_hidden_layers": 40},
    "the target's 80 layers": {"num_hidden_layers": 80},
    "no list of states": {"eagle_aux_hidden_state_layer_ids": []},
    "ModelOpt's": {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [],
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        }
    },
}


@pytest.mark.parametrize("stated", SAFEAILAB_FIELDS)
def test_what_config_json_copies_from_the_target_or_says_of_training_changes_no_logit(
    stated: str, tmp_path: Path
) -> None:
    _, reference = make("safeailab", tmp_path)
    folder = changed(tmp_path, "safeailab", **SAFEAILAB_FIELDS[stated])
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    ear = overhear(made, stride=5)
    assert tiny.run(made, requests(2))[0] == plain(2, 1.0)
    assert_as_computed(ear, reference, truth().states)


def test_layers_behind_the_midlayer_are_counted_in_the_file(tmp_path: Path) -> None:
    draw = Draw(9)
    tensors = eagle3_tensors("safeailab") | draw.block("layers.1", HIDDEN)
    tensors["layers.1.input_layernorm.weight"] = draw.norm()
    folder = heads.write(tmp_path, tensors, eagle3_config("safeailab"))
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    ear = overhear(made, stride=5)
    assert tiny.run(made, requests(2))[0] == plain(2, 1.0)
    assert_as_computed(ear, eagle3_reference(tensors, {}), truth().states)


@pytest.mark.parametrize(
    ("layout", "drop", "fields", "error", "says"),
    [
        ("safeailab", "", {"vocab_size": 50}, VocabularyError, "50 tokens"),
        ("safeailab", "", {"hidden_size": 64}, UnsupportedError, "hidden size 64"),
        ("safeailab", "", {"target_hidden_size": 48}, UnsupportedError, "target_hidden_size"),
        ("safeailab", "", {"eagle_aux_hidden_state_layer_ids": [2, 9, 4]}, UnsupportedError, "2, 9, 4"),
        ("safeailab", "", {"eagle_aux_hidden_state_layer_ids": [2, 4]}, UnsupportedError, "2, 4"),
        ("safeailab", "", {"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedError, "eagle_config"),
        ("safeailab", "", {"eagle_config": {"use_mtp_layernorm": True}}, UnsupportedError, "use_mtp_layernorm is True"),
        ("safeailab", "", {"eagle_config": {"parallel_draft_step": 4}}, UnsupportedError, "parallel_draft_step is 4"),
        ("safeailab", "", {"draft_vocab_size": 39}, CheckpointError, "tensor d2t of"),
        ("safeailab", "", {"draft_vocab_size": 400}, CheckpointError, "draft_vocab_size 400"),
        ("safeailab", "", {"use_sliding_window": True}, UnsupportedError, "sliding"),
        ("safeailab", "", {"residual_scaling": 0.5}, UnsupportedError, "residual_scaling"),
        ("safeailab", "", {"speculators_model_type": "dflash"}, UnsupportedError, "dflash"),
        ("safeailab", "fc.weight", {}, CheckpointError, "fc.weight"),
        ("safeailab", "d2t", {}, CheckpointError, "d2t"),
        ("safeailab", "lm_head.weight", {}, CheckpointError, "lm_head.weight"),
        ("safeailab", "midlayer.self_attn.o_proj.weight", {}, CheckpointError, "o_proj"),
        ("safeailab", "midlayer.hidden_norm.weight", {}, UnsupportedError, "not an EAGLE head"),
        ("eagle3.1", "", {"fc_norm": False}, UnsupportedError, "fc_norm.0.weight"),
        ("speculators", "", {"norm_before_fc": False}, UnsupportedError, "input_norm.weight"),
        ("eagle1", "fc.weight", {}, UnsupportedError, "not an EAGLE head"),
        ("eagle1", "layers.0.mlp.up_proj.weight", {}, CheckpointError, "up_proj"),
        ("eagle1-two-layers", "", {"num_hidden_layers": 1}, UnsupportedError, "layers.1."),
    ],
)
def test_what_does_not_fit_is_refused(
    layout: str, drop: str, fields: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says.replace(".", r"\.")):
        read(changed(tmp_path, layout, drop, **fields))


def test_offsets_that_leave_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder, _ = make("safeailab", tmp_path)
    tensors = eagle3_tensors("safeailab")
    tensors["d2t"][3] = 200
    heads.write(folder, tensors, eagle3_config("safeailab"))
    with pytest.raises(CheckpointError, match="draft token 3"):
        read(folder)
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["d2t"][1] = -1
    heads.write(folder, tensors, eagle3_config("safeailab"))
    with pytest.raises(CheckpointError, match="several draft tokens"):
        read(folder)


def test_a_broken_bin_file_is_named(tmp_path: Path) -> None:
    folder, _ = make("eagle1-bin", tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        read(folder)
    torch.save({"fc.weight": [1]}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds 'fc\.weight', which is no plain tensor"):
        read(folder)


def test_published_configurations_are_understood() -> None:
    """Every SpecForge EAGLE-3 configuration describes a layer forerun reads, but for multimodal rotations."""
    from forerun.models.config import ModelConfig
    from forerun.models.heads import eagle, reading

    source = open_head_of_nothing()
    found = sorted(shared_data("configs/draft_specforge").glob("*ea*gle3*.json"))
    assert len(found) > 5
    for path in found:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if (raw.get("rope_scaling") or {}).get("type") == "mrope":
            continue
        config = ModelConfig.read(raw, reading._family(source, "midlayer", eagle.HEAD_FIELDS))
        assert config.num_layers == 1, path.name


class open_head_of_nothing:
    def has(self, name: str) -> bool:
        return False


def test_requests_are_left_as_they_were(tmp_path: Path) -> None:
    folder, _ = make("eagle1", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 3))
    request: Request = tiny.groups(1)[0].samples[0].request
    made.drafter.begin(request)
    assert made.drafter.num_ready(request) == (0,)
    made.drafter.end(request.request_id)
    made.drafter.end("never seen")
