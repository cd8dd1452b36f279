"""Decoders with recurrent layers: what is accepted leaves the state that plain decoding would leave, to the bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.cache.states import RecurrentStates
from forerun.errors import CheckpointError, ResourceError, UnsupportedError
from forerun.models.base import CommittedPath
from forerun.models.config import ModelConfig, num_parameters
from forerun.models.families import FAMILIES
from forerun.models.hybrid import HybridDecoder
from forerun.models.loader import load_model, read_config
from forerun.models.overview import look_at
from tests.models import factory

NUM_CASES = int(os.environ.get("FORERUN_RANDOM_CASES", "4"))
MAX_TOKENS = 120


KINDS = [
    "qwen3-next", "qwen3.5", "kimi-linear", "lfm2", "granite-hybrid", "falcon-h1", "nemotron-h", "nemotron-h-latent",
]  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, fields = factory.CASES[request.param]
    model = factory.random_hf_model(model_type, {**fields, "max_position_embeddings": 256})
    return factory.save_checkpoint(model, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def model(folder: Path) -> HybridDecoder:
    found = load_model(folder, factory.make_kernels()).model
    assert isinstance(found, HybridDecoder)
    return found


def test_chunks_trees_and_plain_decoding_give_the_same_bits(model: HybridDecoder) -> None:
    """Of logits and, after a random path of a tree was accepted, of the state; several trees one after the other."""
    dice, kernels = Random(0), factory.make_kernels()
    for _ in range(NUM_CASES):
        drafted, plain, whole = (factory.Runner(model, MAX_TOKENS + 64) for _ in range(3))
        known = random_tokens(dice, dice.randint(1, 100))
        expected, start = whole.span(known).logits, 0
        for offset, token in enumerate(known):
            assert torch.equal(plain.root(token, offset), expected[offset])
        while start < len(known):
            chunk = known[start : start + dice.randint(1, 100)]
            assert torch.equal(drafted.span(chunk, start).logits, expected[start : start + len(chunk)])
            start += len(chunk)
        while start < MAX_TOKENS:
            tree, parents = random_tree(dice)
            logits, path = drafted.tree(tree, parents, start), random_path(dice, parents)
            rows = torch.tensor([[start + node for node in path], range(start, start + len(path))], dtype=torch.int32)
            kernels.move_rows(drafted.kvs, rows[0], rows[1])  # the pool's part of a commit
            drafted.model.commit([CommittedPath("r", path)])
            for offset, node in enumerate(path, start):
                assert torch.equal(plain.root(tree[node], offset), logits[node])
            assert all(map(torch.equal, state_of(drafted), state_of(plain)))
            start += len(path)


def random_tokens(dice: Random, count: int) -> list[int]:
    return [dice.randrange(3, factory.VOCAB_SIZE) for _ in range(count)]


def random_tree(dice: Random) -> tuple[list[int], list[int]]:
    """Up to 64 nodes: any shape, or branching in three at every node."""
    size, is_even = dice.choice((1, 2, 5, 12, 64)), dice.random() < 0.3
    parents = [(node - 1) // 3 if is_even else dice.randrange(max(0, node - 9), node) for node in range(1, size)]
    return random_tokens(dice, size), [-1, *parents]


def random_path(dice: Random, parents: Sequence[int]) -> tuple[int, ...]:
    path = [dice.randrange(len(parents))]
    while path[-1]:
        path.append(parents[path[-1]])
    return tuple(path[::-1])


def state_of(runner: factory.Runner) -> list[Tensor]:
    assert runner.states is not None
    return [tensor for layer in runner.states.layers for tensor in (layer.tails, layer.memory)]


def test_a_request_that_begins_anew_has_the_state_before_the_first_token(model: HybridDecoder) -> None:
    runner, known = factory.Runner(model, 40), list(range(3, 20))
    first = runner.span(known).logits
    runner.span([7, 7, 7], len(known))
    assert torch.equal(runner.span(known).logits, first)


def test_slots_are_owned_and_given_back(model: HybridDecoder) -> None:
    states = RecurrentStates(model.state_specs, 2, model.device)
    slots = {states.begin("a", 0), states.begin("b", 0)}
    assert slots == {0, 1} and states.num_free == 0 and states.begin("a", 0) in slots
    model.with_states(states).release("a")
    states.release("unknown")
    assert states.num_free == 1 and states.begin("c", 0) in slots


def test_a_request_runs_from_its_own_state_only(model: HybridDecoder) -> None:
    runner = factory.Runner(model, 40)
    runner.span([5, 6, 7])
    for start in (1, 2, 4):
        with pytest.raises(RuntimeError, match=f"goes on after {start} tokens"):
            runner.span([8], start)
        runner.span([5, 6, 7])
    runner.span([8], 3)


def test_a_copy_that_is_interrupted_is_not_kept(model: HybridDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    states = RecurrentStates(model.state_specs, 2, model.device)
    states.begin("a", 0)
    states.end("a", 4)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            states.keep("a", 7, in_answer=False)
    assert not states.has(7) and states.num_free == 1
    states.keep("a", 7, in_answer=False)
    states.release("a")
    assert states.has(7) and states.num_free == 1
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            states.restore("b", 7)
    with pytest.raises(RuntimeError, match="goes on after 4 tokens"):
        states.begin("b", 4)
    states.release("b")
    states.restore("c", 7)
    states.begin("c", 4)
    states.begin("d", 0)  # what is kept makes room
    assert not states.has(7)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_bare_model_has_no_state_to_commit_or_release(model: HybridDecoder) -> None:
    model.commit([CommittedPath("r", (0, 1))])
    model.release("r")


def test_layers_are_those_that_config_names(folder: Path) -> None:
    config = read_config(folder)
    assert config is not None and config.recurrent is not None
    expected = {"falcon_h1": {0, 1}, "nemotron_h": {0, 3} | ({4} if config.experts is None else set())}
    assert config.recurrent.layers == expected.get(config.model_type, {0, 1, 3})
    assert not config.is_recurrent(config.num_layers)  # of a module for drafting
    assert num_parameters(config) == load_model(folder, factory.make_kernels()).model.num_parameters


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("qwen3-next", {"layer_types": ["full_attention", "mamba"]}, "got 'mamba' for layer 1"),
        ("qwen3-next", {"layer_types": ["full_attention"] * 5}, "layer_types must name one of .* got 5 entries"),
        ("qwen3-next", {"layer_types": ["linear_attention"] * 4}, "no layer has full_attention.*LLM.MODEL, impl"),
        ("granite-hybrid", {"layer_types": ["mamba"] * 4}, "no layer has attention.*LLM.MODEL, implementation="),
        ("kimi-linear", {"num_key_value_heads": 1}, "is 1, num_attention_heads .*: correct the file if"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("granite-hybrid", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("granite-hybrid", {"time_step_limit": [0.1, 2.0]}, "time_step_limit is"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("falcon-h1", {"projectors_bias": True}, "projectors_bias is True"),
        ("nemotron-h", {"time_step_limit": [0.001, 1e9]}, "time_step_limit is"),
        ("nemotron-h", {"mamba_dt_limit": [0.01, 0.1]}, "time_step_limit is"),
        ("nemotron-h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act is 'gelu'"),
        ("nemotron-h", {"layers_block_type": ["full_attention", "conv"] * 3}, "asks for layers of conv"),
        ("nemotron-h-moe", {"n_shared_experts": 2}, "n_shared_experts is 2"),
        ("kimi-linear", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling type 'yarn'"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi-linear", {"mla_use_output_gate": True}, "mla_use_output_gate is True"),
        ("kimi-linear", {"attn_res_block_size": 4}, "attn_res_block_size is 4"),
        ("kimi-linear", {"hidden_act": "situ"}, "hidden_act is 'situ'"),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "scoring_func is 'softmax'"),
        ("kimi-linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "does not know: gate_lower_bound"),
    ],
)
def test_what_cannot_be_computed_is_refused(case: str, fields: dict[str, Any], message: str) -> None:
    model_type, given = factory.CASES[case]
    with pytest.raises(UnsupportedError, match=message):
        ModelConfig.read({**factory.SIZES, **given, "model_type": model_type, **fields}, FAMILIES[model_type])


def config_of(case: str, fields: dict[str, Any]) -> ModelConfig:
    model_type, given = factory.CASES[case]
    return ModelConfig.read({**factory.SIZES, **given, "model_type": model_type, **fields}, FAMILIES[model_type])


def test_early_names_of_fields_mean_the_same() -> None:
    early = {"mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_conv_bias": False, "attention_head_dim": 16}
    limits = {"norm_eps": 1e-5, "mamba_dt_limit": [0.0, {"__float__": "Infinity"}]}
    without = {"n_groups": None, "head_dim": None}
    expected = config_of("nemotron-h", {"use_conv_bias": False})
    assert config_of("nemotron-h", {**without, **early, **limits}) == expected
    with pytest.raises(CheckpointError, match="mamba_n_groups is 1 and n_groups, another name of it, 2"):
        config_of("nemotron-h", {"mamba_n_groups": 1})


def hub_fields(kda: list[int], full: list[int]) -> dict[str, Any]:
    sizes = {"num_heads": 3, "head_dim": 12, "short_conv_kernel_size": 4}
    return {"layer_types": None, "linear_attn_config": {"kda_layers": kda, "full_attn_layers": full, **sizes}}


def test_kimi_linear_as_the_hub_has_it(tmp_path: Path) -> None:
    """Its config.json counts layers from 1 and has names of its own; transformers saves dense parts as mixtures."""
    folder = factory.make_checkpoint("kimi-linear", tmp_path)
    config, weights, path = read_config(folder), folder / "model.safetensors", folder / "config.json"
    saved = factory.Runner(load_model(folder, factory.make_kernels()).model, 40).span([5, 9, 40]).logits
    renamed = {
        re.sub(r"layers\.0\.block_sparse_moe", "layers.0.mlp", name): tensor
        for name, tensor in load_file(weights).items()
    }
    assert "model.layers.0.mlp.down_proj.weight" in renamed
    save_file(renamed, weights, metadata={"format": "pt"})
    written = json.loads(path.read_text())
    own = {name: value for name, value in written.items() if not name.startswith(("linear_", "mlp_layer", "layer_"))}
    published = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True, "use_grouped_topk": True}
    others = {"moe_router_activation_func": "sigmoid", "num_nextn_predict_layers": 0, "rope_theta": 10000.0}
    path.write_text(json.dumps({**own, **published, **others, "head_dim": 72, **hub_fields([1, 2, 4], [3])}))
    assert "model_max_length" in own and "num_experts_per_token" in own
    found = read_config(folder)
    assert found is not None and config is not None
    assert [found.has_experts(layer) for layer in range(4)] == [config.has_experts(layer) for layer in range(4)]
    assert replace(found, experts=config.experts) == config  # which says by other fields which layers are dense
    published_one = factory.Runner(load_model(folder, factory.make_kernels()).model, 40)
    assert torch.equal(published_one.span([5, 9, 40]).logits, saved)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (hub_fields([1, 2], [3]), "must name each of 4 layers once"),
        (hub_fields([0, 1, 3], [2]), "must name each of 4 layers once"),
        ({**hub_fields([1, 2, 3], [4]), "layer_types": factory.KIMI["layer_types"]}, "differ in which layers attend"),
        ({"layer_types": None}, "which layers attend"),
        ({"linear_attn_config": [4]}, "linear_attn_config must be an object"),
    ],
)
def test_layers_of_kimi_linear_that_are_not_all_named_are_an_error(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        config_of("kimi-linear", fields)


def test_heads_that_do_not_fit_are_an_error() -> None:
    raw = {**factory.SIZES, **factory.GRANITE_HYBRID, "model_type": "granitemoehybrid"}
    for fields, message in (({"mamba_d_head": 15}, "are not the 64"), ({"mamba_n_groups": 3}, "no multiple of")):
        with pytest.raises(CheckpointError, match=message):
            ModelConfig.read({**raw, **fields}, FAMILIES["granitemoehybrid"])


@pytest.mark.parametrize("later", [{}, {"tie_word_embeddings": True}], ids=str)
def test_the_older_field_of_lfm2_says_whether_the_output_layer_is_the_embedding(
    later: dict[str, bool], tmp_path: Path
) -> None:
    """As in transformers, also where a file has both."""
    model_type, fields = factory.CASES["lfm2"]
    model = factory.random_hf_model(model_type, {**fields, "tie_word_embeddings": False})
    folder, known = factory.save_checkpoint(model, tmp_path), list(range(3, 20))
    raw = json.loads((folder / "config.json").read_text())
    del raw["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps({**raw, **later, "tie_embedding": False}))
    truth = factory.hf_logits(folder, known, torch.float64)
    found = factory.Runner(load_model(folder, factory.make_kernels()).model, 20).span(known).logits
    assert factory.rms_error(found, truth) <= 2 * factory.rms_error(
        factory.hf_logits(folder, known, torch.float32), truth
    )


PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "lfm2": (
        {
            "num_hidden_layers": 16, "hidden_size": 2048, "block_ff_dim": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_heads": 32,
            "block_norm_eps": 1e-5, "conv_dim": 2048, "conv_dim_out": 2048, "use_pos_enc": True, "tie_embedding": True,
        },
        1.1703,
    ),
    "granitemoehybrid": (
        {
            "num_hidden_layers": 40, "hidden_size": 2048, "shared_intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 100352, "mamba_d_head": 64, "mamba_d_state": 128,
            "mamba_n_heads": 64, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "nope",
            "normalization_function": "rmsnorm", "init_method": "mup", "tie_word_embeddings": True,
            "layer_types": [*["mamba"] * 9, "attention"] * 4,
        },
        3.191,
    ),
    "falcon_h1": (
        {
            "num_hidden_layers": 36, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32784, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
            "mamba_d_head": 64, "mamba_d_state": 128, "mamba_use_mlp": True, "mlp_expansion_factor": 8,
            "rope_theta": 1e11,
        },
        0.5214,
    ),
    "nemotron_h": (
        {
            "num_hidden_layers": 56, "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 131072, "mamba_head_dim": 80, "sliding_window": None,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            "time_step_rank": 256, "rescale_prenorm_residual": True,
        },
        8.888,
    ),
    "nemotron_h moe": (
        {
            "num_hidden_layers": 52, "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
            "num_key_value_heads": 2, "vocab_size": 131072, "mamba_num_heads": 64, "sliding_window": None,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "norm_eps": 1e-5,
            "time_step_limit": [0.0, 1e30], "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 1.0, "mlp_hidden_act": "relu2", "mamba_ssm_cache_dtype": "float32",
        },
        31.58,
    ),
    "kimi_linear": (
        {
            "num_hidden_layers": 27, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 163840, "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None,
            "max_position_embeddings": None, "model_max_length": 1048576, "num_experts": 256,
            "num_experts_per_token": 8, "num_shared_experts": 1,
            "moe_intermediate_size": 1024, "rope_scaling": None, "moe_renormalize": True, "num_expert_group": 1,
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128,
                "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4,
            },
        },
        49.12,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configs_have_the_published_sizes(model_type: str) -> None:
    fields, billions = PUBLISHED[model_type]
    model_type = model_type.partition(" ")[0]
    raw = {**factory.SIZES, "rms_norm_eps": 1e-5, "model_type": model_type, **fields}
    assert num_parameters(ModelConfig.read(raw, FAMILIES[model_type])) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    "fields", [{"norm_topk_prob": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}], ids=str
)
def test_what_transformers_does_not_read_is_refused(fields: dict[str, object]) -> None:
    model_type, others = factory.CASES["qwen3.5-moe"]
    raw = {**factory.SIZES, **others, "model_type": model_type}
    assert ModelConfig.read(raw, FAMILIES[model_type]).experts is not None
    with pytest.raises(UnsupportedError, match=next(iter(fields))):
        ModelConfig.read({**raw, **fields}, FAMILIES[model_type])


def test_too_little_memory_for_a_slot_is_an_error_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = look_at(str(folder))
    state = sum(spec.bytes_per_slot for spec in found.state_specs)
    monkeypatch.setattr("forerun.models.memory.memory_of", lambda device: found.weight_bytes + 3 * state)
    monkeypatch.setattr("forerun.models.loader._build", None)
    with pytest.raises(ResourceError, match="with room for the recurrent state of a request, needs about"):
        load_model(folder, factory.make_kernels())


def test_too_little_memory_for_a_slot_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun import LLM

    monkeypatch.setattr("forerun.assemble.memory_of", lambda device: 1000)
    with pytest.raises(ResourceError, match="recurrent state.*a quarter of"):
        LLM(str(folder))
