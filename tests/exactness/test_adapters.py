"""LoRA adapters change the rows of their own requests alone: the same bits in any batch, with any drafter."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.core import CompletionOutput
from forerun.errors import CheckpointError, ConfigError, ModelNotFoundError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.models.adapters import PeftAdapter
from forerun.models.family import TensorNames
from forerun.models.loader import load_adapter, load_model
from forerun.weights.resolve import resolve_model
from tests.models import factory
from tests.support.adapters import PREFIX, matrices, merged, write_adapter, write_config
from tests.weights.gguf_makers import write_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# case -> what is adapted: joined and single matrices, both tables, latent attention beside a mixture, a dense part
# beside experts, shared experts, recurrent layers
CASES = {
    "llama": (*ALL, "lm_head", "embed_tokens"),
    "llama-tied-biased": (*ALL, "embed_tokens"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "olmo2": ALL,
    "deepseek": (
        "q_a_proj",
        "q_b_proj",
        "shared_experts.gate_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
        "shared_experts.down_proj",
    ),
    "qwen2-moe": (
        "shared_expert.gate_proj",
        "shared_expert.up_proj",
        "shared_expert.down_proj",
        "shared_expert_gate",
        "q_proj",
        "o_proj",
    ),
    "gemma4-experts": ("gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"),
    "qwen3.5": (*ALL, "in_proj_qkv", "in_proj_z", "out_proj"),
    "falcon-h1": ("in_proj", "out_proj", *ALL),
    "lfm2": ("in_proj", "out_proj", "q_proj", "v_proj", "w1", "w2"),
    "kimi-linear": (
        "q_proj",
        "f_b_proj",
        "v_proj",
        "f_a_proj",
        "g_a_proj",
        "g_b_proj",
        "self_attn.b_proj",
        "kv_a_proj_with_mqa",
        *ALL,
    ),
}
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43))]
DRAFTERS = ["ngram", "suffix", "recycling", "layer_skip", "portfolio=ngram+recycling"]
ENGINES: list[dict[str, int]] = [
    {},
    {"max_num_batched_tokens": 5},
    {"num_kv_blocks": 20, "block_size": 4, "max_model_len": 64},
]
NAMES = [f"a{index}" for index in range(8)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=16, seed=1, ignore_eos=True, top_k=4, logprobs=3)


def adapted(folder: Path, base: Path, modules: tuple[str, ...], seed: int, **fields: object) -> Path:
    ranks = {"o_proj": 3, "down_proj": 1} if seed % 2 else {}
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    return write_adapter(folder / f"a{seed}", base, modules, seed, rank=4 + seed, ranks=ranks, dtype=dtype, **fields)


@pytest.fixture(scope="module", params=list(CASES))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("adapters")
    base = factory.make_checkpoint(request.param, folder / "base")
    paths = {
        name: str(adapted(folder, base, CASES[request.param][: 2 + index], index, use_rslora=index == 3))
        for index, name in enumerate(NAMES)
    }
    return LLM(str(base), lora=paths, max_num_seqs=1, threads=1, prefix_caching=False)


def answers(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate(prompts, PARAMS, lora=names)]


def test_eight_adapters_in_one_batch_equal_each_alone(llm: LLM) -> None:
    """Sixteen rows a step: every adapter twice. Log-probabilities are compared too, to the bit."""
    prompts = [PROMPTS[index % 4] for index in range(16)]
    names: list[str | None] = [*NAMES, *reversed(NAMES)]
    alone = answers(llm, prompts, names)
    together = answers(llm.with_drafter("none", max_num_seqs=16), prompts, names)
    assert [(a.token_ids, a.logprobs) for a in together] == [(a.token_ids, a.logprobs) for a in alone]
    plain = answers(llm, prompts, [None] * 16)
    assert sum(a.token_ids != p.token_ids for a, p in zip(alone, plain, strict=True)) > 8, "adapters change nothing"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_changes_a_token(llm: LLM, drafter: str, request: pytest.FixtureRequest) -> None:
    """In one of the engines, so that every two of model, drafter and engine meet."""
    place = list(CASES).index(request.node.callspec.params["llm"]) + DRAFTERS.index(drafter)
    options = ENGINES[place % len(ENGINES)]
    names: list[str | None] = [None, "a1", "a4", "a7"]
    expected = [answer.token_ids for answer in answers(llm, PROMPTS, names)]
    made = llm.with_drafter(drafter, adaptive=False, **{"max_num_seqs": 4, "prefix_caching": True, **options})
    for _ in range(2):
        assert [answer.token_ids for answer in answers(made, PROMPTS, names)] == expected, options


@pytest.mark.parametrize("drafter", ["draft", "eagle", "medusa", "mtp"])
def test_no_trained_drafter_changes_a_token(drafter: str, tmp_path: Path) -> None:
    """Drafters with weights of their own are not adapted; they read the adapted model's hidden states."""
    base = resolve_model("mini")
    path = write_adapter(tmp_path / "one", base, ("q_proj", "v_proj", "down_proj"))
    llm = LLM("mini", lora={"one": str(path)}, threads=1, max_num_seqs=1, prefix_caching=False)
    names: list[str | None] = [None, "one", "one", None]
    expected = [answer.token_ids for answer in answers(llm, PROMPTS, names)]
    made = llm.with_drafter(drafter, draft_model=f"mini-{drafter}", adaptive=False, max_num_seqs=4, prefix_caching=True)
    for _ in range(2):
        found = answers(made, PROMPTS, names)
        assert [answer.token_ids for answer in found] == expected
    assert sum(count.drafted for answer in found for count in answer.stats.drafters.values()) > 0


def test_plain_parameters_do_not_lose_the_adapter(tmp_path: Path) -> None:
    """Steps of such requests are made at once where nothing is adapted."""
    path = write_adapter(tmp_path / "one", resolve_model("mini"), ("q_proj", "v_proj", "down_proj"))
    llm = LLM("mini", lora={"one": str(path)}, threads=1, max_num_seqs=4, prefix_caching=False)
    params, names = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), ["one", None, "one"]
    # each alone, its log-probabilities wanted: such steps go phase by phase
    watched = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    expected = [
        llm.generate([prompt], watched, lora=name)[0].outputs[0].token_ids
        for prompt, name in zip(PROMPTS[:3], names, strict=True)
    ]
    together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], params, lora=names)]
    alone = [
        llm.generate([prompt], params, lora=name)[0].outputs[0].token_ids
        for prompt, name in zip(PROMPTS[:3], names, strict=True)
    ]
    assert together == alone == expected
    base = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    assert [a != b for a, b in zip(alone, base, strict=True)] == [True, False, True], "the adapter changes nothing"


def test_prefixes_are_shared_within_an_adapter_alone(llm: LLM) -> None:
    prompt = list(range(20, 43))
    made = llm.with_drafter("none", prefix_caching=True, block_size=4)
    for name in (None, "a1", "a2"):
        cold = answers(llm, [prompt], [name])[0]
        first, second = (answers(made, [prompt], [name])[0] for _ in range(2))
        assert first.token_ids == second.token_ids == cold.token_ids
        assert (first.stats.num_cached_tokens, second.stats.num_cached_tokens > 0) == (0, True)
    made.engine.scheduler.check_integrity()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_model(case: str, tmp_path: Path) -> None:
    """Within float32's rounding of the checkpoint to which scale * B A was added in float64."""
    base = factory.make_checkpoint(case, tmp_path / "base")
    modules = tuple(name for name in CASES[case] if "tied" not in case or name != "embed_tokens")
    ranks = {"o_proj": 3, "out_proj": 5}
    own = write_adapter(tmp_path / "own", base, modules, ranks=ranks, alpha_pattern={"o_proj": 6}, lora_alpha=12)
    whole = merged(tmp_path / "whole", base, own, {"o_proj": 6 / 3, "out_proj": 12 / 5, "": 12 / 4})
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20, logprobs=20)
    made = LLM(str(base), lora={"own": str(own)}, threads=1)
    expected = LLM(str(whole), threads=1).generate([PROMPTS[3]], params)[0]
    found = made.generate([PROMPTS[3]], params, lora="own")[0]
    plain = made.generate([PROMPTS[3]], params)[0]
    assert expected.prompt_logprobs and found.prompt_logprobs and plain.prompt_logprobs
    pairs = list(zip(found.prompt_logprobs, expected.prompt_logprobs, plain.prompt_logprobs, strict=True))[1:]
    errors = [abs(f.chosen.logprob - e.chosen.logprob) for f, e, _ in pairs if f and e]
    assert max(errors) < 2e-4
    assert max(abs(p.chosen.logprob - e.chosen.logprob) for _, e, p in pairs if p and e) > 0.05, "nothing was adapted"


def test_adapters_come_and_go(tmp_path: Path) -> None:
    base = factory.make_checkpoint("llama", tmp_path / "base")
    first, second = (str(adapted(tmp_path, base, ALL, seed)) for seed in (1, 2))
    llm = LLM(str(base), threads=1)
    with pytest.raises(ConfigError, match="no adapter 'sql'"):
        llm.generate([PROMPTS[0]], PARAMS, lora="sql")
    llm.load_adapter("sql", first)
    with pytest.raises(ConfigError, match="already"):
        llm.load_adapter("sql", second)
    stream = llm.stream(PROMPTS[0], PARAMS, lora="sql")
    next(stream)
    llm.unload_adapter("sql")
    llm.load_adapter("sql", second)
    *_, kept = stream
    new = llm.generate([PROMPTS[0]], PARAMS, lora="sql")[0].outputs[0]
    alone = LLM(str(base), lora={"one": first, "two": second}, threads=1, prefix_caching=False)
    old, other = (alone.generate([PROMPTS[0]], PARAMS, lora=name)[0].outputs[0] for name in ("one", "two"))
    assert kept.outputs[0].token_ids == old.token_ids, "a running request lost its adapter"
    assert new.token_ids == other.token_ids != old.token_ids, "prefixes of the old adapter were used for the new one"


# -- bad input --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return factory.make_checkpoint("llama", tmp_path_factory.mktemp("bad") / "base")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"a_field_of_next_year": 3}, "a_field_of_next_year"),
        ({"peft_type": "LOHA"}, "LOHA"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    fields: dict[str, object], said: str, base: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "bad", base, ATTENTION, **fields)
    with pytest.raises(UnsupportedError, match=said):
        load_model(base, select_kernels("reference"), adapters=[path])


def test_an_unloaded_adapter_is_freed_with_its_last_request(base: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", base, ATTENTION)
    llm = LLM(str(base), lora={"one": str(path)}, threads=1, block_size=4)
    held = ref(llm.adapters["one"])
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), lora="one")  # no step follows the one that admits it
    llm.unload_adapter("one")
    gc.collect()
    assert held() is None


def test_a_home_folder_is_found(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "one", base, ATTENTION)
    monkeypatch.setenv("HOME", str(tmp_path))
    load_model(base, select_kernels("reference"), adapters=["~/one"])


def test_only_some_layers_may_be_adapted(base: Path, tmp_path: Path) -> None:
    """Those may lack a module that others have, which the adapter names."""
    path = write_adapter(
        tmp_path / "one", base, ("layers.0.self_attn.q_proj",), target_modules=list(ATTENTION), layers_to_transform=[0]
    )
    load_model(base, select_kernels("reference"), adapters=[path])


def test_an_unknown_adapter_is_refused(base: Path) -> None:
    llm = LLM(str(base), threads=1)
    wrong: Any
    for wrong in ("nobody", 5):
        with pytest.raises(ConfigError, match=f"no adapter '?{wrong}"):
            llm.generate([PROMPTS[0]], PARAMS, lora=[wrong])


def test_damaged_folders_are_refused(base: Path, tmp_path: Path) -> None:
    kernels = select_kernels("reference")

    def refused(path: Path, kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said):
            load_model(base, kernels, adapters=[path])

    refused(tmp_path / "nowhere", ModelNotFoundError, "nowhere")
    path = write_adapter(tmp_path / "one", base, ATTENTION)
    write_config(path, r=5, target_modules=list(ATTENTION))
    refused(path, CheckpointError, "states rank 5")
    write_config(path, target_modules=[*ATTENTION, "down_proj"])
    refused(path, CheckpointError, "down_proj")
    with pytest.raises(CheckpointError, match="down_proj"):
        load_adapter("one", path, load_model(base, kernels), kernels)
    write_config(path, target_modules=[*ATTENTION, "a_name_of_other_models"])
    load_model(base, kernels, adapters=[path])
    write_config(path, rank_pattern={"(": 3})
    refused(path, CheckpointError, "rank_pattern")
    write_config(path, lora_alpha="much")
    refused(path, CheckpointError, "lora_alpha")
    (path / "adapter_model.safetensors").unlink()
    refused(path, CheckpointError, "adapter_model.safetensors")


def test_tables_beside_the_updates_must_be_the_models_own(base: Path, tmp_path: Path) -> None:
    """PEFT writes the base's embedding and output layer, too, where an adapter changes one of them."""
    kernels = select_kernels("reference")
    path, own = write_adapter(tmp_path / "one", base, ("lm_head",)), load_file(base / "model.safetensors")
    updates, loaded = load_file(path / "adapter_model.safetensors"), load_model(base, kernels)
    name = f"{PREFIX}lm_head.base_layer.weight"
    save_file({**updates, name: own["lm_head.weight"]}, path / "adapter_model.safetensors")
    assert len(load_adapter("one", path, loaded, kernels).updates) == 1
    save_file({**updates, name: own["lm_head.weight"] + 1}, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="lm_head of its own"):
        load_adapter("one", path, loaded, kernels)
    save_file({**updates, name: own["lm_head.weight"].bfloat16()}, path / "adapter_model.safetensors")
    for dtype in ("auto", "bfloat16"):  # the files are compared: what the model was converted to makes no difference
        assert load_adapter("one", path, load_model(base, kernels, dtype=dtype), kernels).updates
    save_file({**updates, name: torch.zeros(7, 32)}, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="lm_head of its own"):
        load_adapter("one", path, loaded, kernels)
    save_file({**updates, f"{PREFIX}model.norm.weight": torch.ones(32)}, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match=r"model\.norm"):
        load_adapter("one", path, loaded, kernels)


def test_tables_beside_the_updates_of_a_quantized_base_are_compared_by_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, kernels = factory.make_checkpoint("qwen3", tmp_path / "base"), select_kernels("reference")
    file = tmp_path / "base.gguf"
    write_model(file, base, factory.random_hf_model(*factory.CASES["qwen3"]), "qwen3", {"output": "Q8_0", "": "F32"})
    path, own = write_adapter(tmp_path / "one", base, ("lm_head",)), load_file(base / "model.safetensors")
    updates, loaded = load_file(path / "adapter_model.safetensors"), load_model(file, kernels)
    name = f"{PREFIX}lm_head.base_layer.weight"
    save_file({**updates, name: own["lm_head.weight"]}, path / "adapter_model.safetensors")
    with caplog.at_level("WARNING", logger="forerun.models"):
        assert load_adapter("one", path, loaded, kernels).updates
    assert "copy of lm_head" in caplog.text
    save_file({**updates, name: torch.zeros(7, 32)}, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="lm_head of its own"):
        load_adapter("one", path, loaded, kernels)


def test_of_a_multimodal_models_adapter_the_text_part_is_read(base: Path, tmp_path: Path) -> None:
    """Patterns match the names of the whole model."""
    path = write_adapter(tmp_path / "one", base, ("q_proj",), alpha_pattern={"^model.language_model.*0.*": 12})
    plain = PeftAdapter.open(path, TensorNames())
    tensors = load_file(path / "adapter_model.safetensors")
    named = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in tensors.items()}
    image = {f"{PREFIX}model.visual.blocks.0.qkv.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    save_file({**named, **image}, path / "adapter_model.safetensors")
    found = PeftAdapter.open(path, TensorNames(), is_text_part=True)
    assert found.modules.keys() == plain.modules.keys()
    assert [found.modules[name].scale for name in sorted(found.modules)] == [3, 2]


@pytest.mark.parametrize("case", ["falcon-h1", "granite-hybrid", "kimi-linear", "lfm2", "nemotron-h", "nemotron-h-moe"])
def test_modules_may_have_the_names_of_a_running_model(case: str, tmp_path: Path) -> None:
    """PEFT writes the names that modules have in transformers, which may differ from those of the checkpoint."""
    base, kernels = factory.make_checkpoint(case, tmp_path / "base"), select_kernels("reference")
    modules = ("q_proj", "in_proj", "out_proj", "o_proj", "f_a_proj", "shared_experts.down_proj")
    path = write_adapter(tmp_path / "one", base, modules)
    tensors = load_file(path / "adapter_model.safetensors")
    running = {name for name, _ in factory.random_hf_model(*factory.CASES[case]).named_modules()}
    renamed = {name: re.sub(r"^(base_model\.model\.)backbone\.", r"\1model.", name) for name in tensors}
    own = (("block_sparse_moe.", "mlp."), ("self_attn.f_", "self_attn.forget_gate.f_")) if "kimi" in case else ()
    for published, name in own:
        renamed = {stored: new.replace(published, name) for stored, new in renamed.items()}
    assert {name.split(".lora_")[0].removeprefix(PREFIX) for name in renamed.values()} <= running
    save_file({renamed[name]: tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    loaded = load_model(base, kernels, adapters=[path])
    assert load_adapter("one", path, loaded, kernels).updates


def test_adapters_of_other_models_are_refused_before_weights_are_read(base: Path, tmp_path: Path) -> None:
    kernels = select_kernels("reference")
    deeper = factory.random_hf_model("llama", {"num_hidden_layers": 3})
    other = factory.save_checkpoint(deeper, tmp_path / "deeper")
    with pytest.raises(CheckpointError, match=r"layers\.2.* another model|another model.*layers\.2"):
        load_model(base, kernels, adapters=[write_adapter(tmp_path / "deep", other, ATTENTION)])
    wider = factory.save_checkpoint(factory.random_hf_model("llama", {"hidden_size": 64}), tmp_path / "wider")
    with pytest.raises(CheckpointError, match="another model"):
        load_model(base, kernels, adapters=[write_adapter(tmp_path / "wide", wider, ATTENTION)])
    loaded = load_model(base, kernels)
    with pytest.raises(CheckpointError, match="another model"):
        load_adapter("wide", tmp_path / "wide", loaded, kernels)


def test_an_adapter_that_does_not_fit_names_the_model_that_it_is_for(base: Path, tmp_path: Path) -> None:
    """At once if its config names another one; nothing is said of that where the names agree, or where it fits."""
    kernels = select_kernels("reference")
    loaded = load_model(base, kernels)
    wider = factory.save_checkpoint(factory.random_hf_model("llama", {"hidden_size": 64}), tmp_path / "wider")
    snapshot = f"/hub/models--org--{base.name}/snapshots/0123abcd"
    for named, begins in (("org/Wider", f"{tmp_path / 'one'} is probably for another model"), ("", ""), (None, ""),
                          (f"org/{base.name.upper()}", ""), (snapshot, "")):  # fmt: skip
        path = write_adapter(tmp_path / "one", wider, ATTENTION, base_model_name_or_path=named)
        for load in (partial(load_adapter, "one", path, loaded), partial(load_model, base, adapters=[path])):
            with pytest.raises(CheckpointError, match="its matrices of") as caught:
                load(kernels=kernels)
            said = str(caught.value)
            assert said.startswith(begins) and ("names is org/Wider, and this is" in said) == bool(begins)
    fitting = write_adapter(tmp_path / "fits", base, ATTENTION, base_model_name_or_path="org/Wider")
    assert load_adapter("one", fitting, loaded, kernels).updates


def test_experts_are_not_adapted(tmp_path: Path) -> None:
    base = factory.make_checkpoint("qwen3-moe", tmp_path / "base")
    router = next(name for name in matrices(base) if name.endswith("mlp.gate"))
    path = write_adapter(tmp_path / "router", base, (router,))
    kernels = select_kernels("reference")
    with pytest.raises(UnsupportedError, match=r"mlp\.gate"):
        load_adapter("router", path, load_model(base, kernels), kernels)


@pytest.mark.parametrize(
    ("case", "module"),
    [
        ("qwen3-moe", "mlp.gate"),
        ("deepseek", "self_attn.kv_b_proj"),
        ("gemma2", "embed_tokens"),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused_before_weights_are_read(
    case: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = factory.make_checkpoint(case, tmp_path / "base")
    path = write_adapter(tmp_path / "one", base, (module,))
    monkeypatch.setattr("forerun.models.loader.Builder", None)
    with pytest.raises(UnsupportedError, match="embedding of a model that scales" if "embed" in module else module):
        load_model(base, select_kernels("reference"), adapters=[path])
