"""Models from GGUF files: the same logits as from safetensors, text from the file alone, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from forerun.cli.app import app as cli
from forerun.core import SamplingParams
from forerun.errors import CheckpointError, UnsupportedError
from forerun.llm import LLM
from forerun.models.decoder import Decoder, DecoderParts
from forerun.models.loader import load_model, read_config
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.gguf_layers import check_blocks
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.resolve import resolve_model
from tests.models import factory
from tests.models.factory import LLAMA3, Runner

gguf = pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers  # noqa: E402

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4]
ARCHITECTURES = {
    "llama": "llama", "llama-tied-biased": "llama", "mistral": "llama", "llama-linear": "llama", "qwen2": "qwen2",
    "qwen3": "qwen3", "phi3": "phi3", "gemma2-file": "gemma2", "gemma3-file": "gemma3", "olmo2": "olmo2",
    "olmo3-file": "olmo2", "exaone4-file": "exaone4", "granite": "granite", "smollm3-file": "smollm3", "glm4": "glm4",
    "cohere2-file": "cohere2", "mistral-small": "mistral3", "ministral3-file": "mistral3",
}  # fmt: skip


# What files do not say is as in the published models.
AS_FILES_HAVE_IT: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-file": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5}),
    "gemma3-file": ("gemma3_text", {**factory.WIDE, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}),
    "olmo3-file": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 5}),
    "exaone4-file": ("exaone4", {**factory.WIDE, "num_hidden_layers": 4, "rms_norm_eps": 1e-6}),
    "smollm3-file": ("smollm3", {"num_hidden_layers": 4}),
    "cohere2-file": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 5}),
    "mistral-small": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "ministral3-file": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {**factory.YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
}


def make(tmp_path: Path, case: str, types: Any = "F32", sizes: dict[str, Any] | None = None) -> tuple[Path, Path, Any]:
    """A folder, the same model as a GGUF file, and what its tensors are worth there."""
    model_type, fields = {**factory.CASES, **AS_FILES_HAVE_IT}[case]
    model = factory.random_hf_model(model_type, {**fields, **(sizes or {})})
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    rope = getattr(model.config, "rope_parameters", {})
    path = tmp_path / "model.gguf"
    worth = makers.write_model(path, folder, model, ARCHITECTURES[case], types)
    if rope.get("rope_type") == "linear":
        makers.write_again(path, lambda writer: (writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                                       writer.add_rope_scaling_factor(rope["factor"])))  # fmt: skip
    return folder, path, worth


def logits(path: Path, kernels: str = "auto", **options: Any) -> Tensor:
    loaded = load_model(path, factory.make_kernels(kernels), **options)
    return Runner(loaded.model, 40).span(TOKENS).logits


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_float32_gives_the_bits_of_safetensors(case: str, tmp_path: Path) -> None:
    folder, path, _ = make(tmp_path, case)
    assert torch.equal(logits(path), logits(folder))
    ours, theirs = read_config(path), read_config(folder)
    assert ours is not None and theirs is not None
    assert (ours.rope, ours.max_position, ours.norm_eps) == (theirs.rope, theirs.max_position, theirs.norm_eps)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_precision_gives_the_bits_of_safetensors(kind: str, tmp_path: Path) -> None:
    model = factory.random_hf_model("llama")
    folder = factory.save_checkpoint(model, tmp_path / "folder", torch.float16 if kind == "F16" else torch.bfloat16)
    makers.write_model(tmp_path / "m.gguf", folder, model.float(), "llama", kind)
    assert torch.equal(logits(tmp_path / "m.gguf"), logits(folder))


QUANTIZED = {
    "Q8_0": "Q8_0",
    "small": {"attn_q": "TQ1_0", "attn_v": "TQ2_0", "attn_k": "IQ2_XS", "output": "IQ2_XS", "": "MXFP4"},
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "": "Q4_K"},
    "mixed": {
        "attn_q": "F16",
        "attn_k": "Q5_1",
        "ffn_gate": "Q4_1",
        "ffn_up": "Q4_0",
        "token_embd": "BF16",
        "": "Q5_0",
    },
}


@pytest.mark.parametrize("types", QUANTIZED)
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3"])
def test_quantized_differs_from_its_float_values_only_by_rounded_activations(
    case: str, types: str, tmp_path: Path
) -> None:
    _, path, worth = make(tmp_path, case, QUANTIZED[types], makers.SIZES)
    model = factory.random_hf_model(factory.CASES[case][0], {**factory.CASES[case][1], **makers.SIZES})
    model.load_state_dict(worth, strict=False)
    expected = logits(factory.save_checkpoint(model, tmp_path / "worth"))
    found = logits(path)
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < 0.06  # 127 steps an activation are 0.4 % a matrix; random attention amplifies it
    unquantized = logits(tmp_path / "folder")
    assert error < float((found - unquantized).norm() / unquantized.norm())


def parts_of(path: Path, **options: Any) -> DecoderParts:
    model = load_model(path, factory.make_kernels(), **options).model
    assert isinstance(model, Decoder)
    return model.parts


@pytest.mark.parametrize("types", QUANTIZED)
def test_matrices_are_worth_what_the_reference_says(types: str, tmp_path: Path) -> None:
    _, path, worth = make(tmp_path, "llama", QUANTIZED[types], makers.SIZES)
    parts = parts_of(path)
    layer, prefix = parts.layers[1], "model.layers.1."
    rows = [worth[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    for found, expected in [
        (layer.attention.qkv, torch.cat(rows)),
        (layer.attention.out, worth[f"{prefix}self_attn.o_proj.weight"]),
        (layer.mlp.gate_up, torch.cat([worth[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])),
        (layer.mlp.down, worth[f"{prefix}mlp.down_proj.weight"]),
        (parts.lm_head, worth["lm_head.weight"]),
    ]:
        assert torch.allclose(found.weight.dequantize(), expected, rtol=1e-6, atol=1e-7)
    table = parts.embedding(torch.arange(parts.embedding.shape[0]))
    assert torch.equal(table, worth["model.embed_tokens.weight"])


@pytest.mark.parametrize("case", ["llama", "qwen2"])  # the second one's output layer is the table
def test_a_table_in_blocks_stays_as_small(case: str, tmp_path: Path) -> None:
    _, path, worth = make(tmp_path, case, QUANTIZED["Q8_0"], makers.SIZES)
    parts = parts_of(path)
    table = worth["model.embed_tokens.weight"]
    assert torch.equal(parts.embedding(torch.arange(len(table))), table)
    assert (parts.embedding.nbytes == 0) is parts.tie_embeddings and parts.embedding.nbytes < table.nbytes / 3
    widened = parts_of(path, dtype="float32")
    assert widened.embedding.nbytes == table.nbytes


def test_quantized_models_keep_their_bits_in_chunks_and_trees(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "qwen2", QUANTIZED["Q4_K_M"], makers.SIZES)
    model = load_model(path, factory.make_kernels()).model
    whole, runner = Runner(model, 40).span(TOKENS).logits, Runner(model, 40)
    assert torch.equal(runner.span(TOKENS[:5]).logits, whole[:5])
    tree = runner.tree([TOKENS[5], 7, TOKENS[6]], [-1, 0, 0], 5)
    assert torch.equal(tree[[0, 2]], whole[5:7])


@pytest.mark.parametrize(("factor", "high"), [(32.0, 4.0), (16.0, 1.0)])
def test_llama3_rope_is_recognised_by_its_factors(factor: float, high: float, tmp_path: Path) -> None:
    rope = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    rope |= {"factor": factor, "high_freq_factor": high}
    model = factory.random_hf_model("llama", {"rope_parameters": rope, "head_dim": 16})
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    exact = read_config(folder)
    assert exact is not None
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    from forerun.layers.rotary import rope_table

    angles = rope_table(exact.rope, 2)[1]  # cosines and sines of the frequencies themselves
    factors = (plain / torch.atan2(angles[8:], angles[:8])).tolist()
    makers.write_model(tmp_path / "m.gguf", folder, model, "llama", "F32", rope_freqs=factors)
    assert torch.equal(logits(tmp_path / "m.gguf"), logits(folder))


def test_other_rope_factors_divide_the_frequencies(tmp_path: Path) -> None:
    model = factory.random_hf_model(
        "llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    )
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    makers.write_model(tmp_path / "m.gguf", folder, model, "llama", "F32", rope_freqs=[2.0] * 4)
    assert torch.allclose(logits(tmp_path / "m.gguf"), logits(folder), atol=1e-5)


def test_phi3_longrope(tmp_path: Path) -> None:
    model_type, fields = factory.CASES["phi3-longrope"]
    model = factory.random_hf_model(model_type, fields)
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    path, rope = tmp_path / "m.gguf", fields["rope_parameters"]
    makers.write_model(path, folder, model, "phi3", "F32", rope_factors_short=rope["short_factor"],
                       rope_factors_long=rope["long_factor"])  # fmt: skip
    makers.write_again(path, lambda writer: (writer.add_rope_scaling_orig_ctx_len(32), writer.add_sliding_window(0)))
    assert torch.allclose(logits(path), logits(folder), atol=1e-5)


@pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor"])
def test_files_of_olmo_3_hold_the_whole_amplitude(key: str, tmp_path: Path) -> None:
    """Under the name older converters give it or today's, which write the base of the windows' rope, too."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    ropes = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    yarn["attention_factor"] = 1.2079441541679836
    fields = {"num_hidden_layers": 4, "sliding_window": 5, "rope_parameters": ropes}
    model = factory.random_hf_model("olmo3", fields)
    folder = factory.save_checkpoint(model, tmp_path / "folder")
    path = tmp_path / "model.gguf"
    makers.write_model(path, folder, model, "olmo2")
    makers.write_again(path, lambda writer: (
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN), writer.add_rope_scaling_factor(8.0),
        writer.add_rope_scaling_orig_ctx_len(16), writer.add_rope_freq_base_swa(1e4),
        writer.add_float32(f"olmo2.rope.scaling.{key}", yarn["attention_factor"])))  # fmt: skip
    ours, theirs = read_config(path), read_config(folder)
    assert ours is not None and theirs is not None
    for found, expected in zip(ours.layer_ropes, theirs.layer_ropes, strict=True):
        assert found.amplitude == pytest.approx(expected.amplitude, rel=1e-7)
        assert replace(found, attention_factor=None) == replace(expected, attention_factor=None)
    assert ours.rope_of(3).amplitude == pytest.approx(1.2079441) and ours.rope_of(0).theta == 1e4
    assert torch.allclose(logits(path), logits(folder), atol=1e-5)


def test_text_from_the_file_alone(tmp_path: Path) -> None:
    folder, path, _ = make(tmp_path, "qwen2")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    (alone,) = LLM(str(path), max_model_len=40).generate(["#$%"], params)
    (usual,) = LLM(str(folder), max_model_len=40).generate(["#$%"], params)
    assert alone.outputs[0].token_ids == usual.outputs[0].token_ids
    loaded = LLM(str(path), max_model_len=40).loaded
    assert loaded.tokenizer.encode_chat([{"role": "user", "content": "#"}])[0] == 1
    assert loaded.folder == path and loaded.raw_config["dtype"] == "F32"


def test_models_in_several_files(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama")
    whole = logits(path)
    reader = gguf.GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors]
    for number, part in enumerate((names[:9], names[9:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{number}-of-00002.gguf", "llama")
        for name, field in reader.fields.items():
            if number == 1 and not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors:
            if tensor.name in part:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            write()
        writer.close()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert torch.equal(logits(first), whole)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 2 files of the model: m-00002-of-00002.gguf"):
        logits(first)
    first.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="is not named NAME-00001-of-00002.gguf"):
        logits(tmp_path / "other.gguf")


def test_inspecting(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama", "Q8_0", makers.SIZES)
    result = CliRunner().invoke(cli, ["inspect", str(path), "--json", "--threads", "1"])
    report = json.loads(result.stdout)
    assert report["folder"] == str(path) and report["dtype"] == "Q8_0" and report["chat_template"]
    assert report["sizes"]["num_heads"] == 8 and report["tokenizer"]["vocab_size"] == factory.VOCAB_SIZE


def test_resolving(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF")
    assert resolve_model(path) == path


def test_ministral_files_end_with_their_original_context(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "ministral3-file")
    assert load_model(path, factory.make_kernels()).model.max_position == 16
    _, path, _ = make(tmp_path, "mistral-small")
    makers.write_again(path, lambda writer: writer.add_attn_temperature_scale(0.1))
    with pytest.raises(UnsupportedError, match="mistral3.attention.temperature_scale without a rope scaling"):
        load_model(path, factory.make_kernels())


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_logit_scale(0.5), "sets llama.logit_scale = 0.5, which forerun does not know"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "type 'longrope' without tensors"),
    ],
)
def test_metadata_that_asks_for_more_is_refused(add: Any, message: str, tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama")
    makers.write_again(path, add)
    with pytest.raises(UnsupportedError, match=message):
        logits(path)


@pytest.mark.parametrize(
    ("kind", "message"), [(15, "is of type 15, which forerun does not know"), (0, "wrong place|cut")]
)
def test_types_that_cannot_be_read_are_named_when_the_file_is_opened(kind: int, message: str, tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama", "Q8_0", makers.SIZES)
    raw = path.read_bytes()
    entry = raw.index(b"blk.0.attn_output.weight") + len(b"blk.0.attn_output.weight") + 4 + 16
    path.write_bytes(raw[:entry] + kind.to_bytes(4, "little") + raw[entry + 4 :])
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        GgufCheckpoint.open(path)


def test_absurd_metadata_is_refused(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama")
    raw = path.read_bytes()
    entry = raw.index(b"llama.attention.head_count_kv") + len(b"llama.attention.head_count_kv") + 4
    path.write_bytes(raw[:entry] + (3).to_bytes(4, "little") + raw[entry + 4 :])
    with pytest.raises(CheckpointError, match="model.gguf, its metadata read as a config.json: .*not a multiple"):
        logits(path)


def test_unknown_architectures_types_and_leftovers_are_refused(tmp_path: Path) -> None:
    folder, path, _ = make(tmp_path, "llama")
    with pytest.raises(UnsupportedError, match="leave `implementation` at 'auto'"):
        logits(path, implementation="transformers")
    model = factory.random_hf_model("llama")
    makers.write_model(tmp_path / "g.gguf", folder, model, "gemma3n")
    with pytest.raises(UnsupportedError, match="architecture 'gemma3n'; forerun runs GGUF files of llama, qwen2"):
        logits(tmp_path / "g.gguf")
    makers.write_model(tmp_path / "l.gguf", folder, model, "llama", "F32", **{"blk.0.ffn_sub_norm": [1.0]})
    with pytest.raises(
        UnsupportedError, match=r"l.gguf has 1 tensors that its metadata, .* e.g. blk.0.ffn_sub_norm.weight"
    ):
        logits(tmp_path / "l.gguf")


def change_number(path: Path, key: str, value: int) -> None:
    """Another 32-bit number for a key of the metadata, in place."""
    raw = path.read_bytes()
    entry = raw.index(key.encode()) + len(key) + 4
    path.write_bytes(raw[:entry] + value.to_bytes(4, "little") + raw[entry + 4 :])


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("block_count", -1, r"tensors of 1 layers more than llama.block_count, which is 1, e.g. blk.1"),
        ("block_count", 1, r"no tensors of 1 of its 3 layers, e.g. blk.2, but llama.block_count is 3"),
        ("embedding_length", 32, r"llama.embedding_length must be 32, the width of token_embd.weight, got 64"),
    ],
)
def test_layers_and_widths_other_than_stated_are_refused(key: str, change: int, message: str, tmp_path: Path) -> None:
    """When the file is opened: nobody computes with half a model, and inspecting one says so, too."""
    _, path, _ = make(tmp_path, "llama")
    config = read_config(path)
    assert config is not None
    known = {"block_count": config.num_layers, "embedding_length": config.hidden_size}[key]
    change_number(path, f"llama.{key}", known + change)
    with pytest.raises(CheckpointError, match=message):
        logits(path)
    result = CliRunner().invoke(cli, ["inspect", str(path), "--threads", "1"])
    assert result.exit_code == 2 and key in " ".join(result.stderr.split())


@pytest.mark.parametrize(("modules", "said"), [("nextn.eh_proj attn_q", None), ("attn_q", "1 layers more than")])
def test_blocks_past_the_last_may_hold_modules_for_drafting_alone(modules: str, said: str | None) -> None:
    metadata = GGUFMetadata(Path("x.gguf"), {"glm4moe.block_count": 1})
    names = ["output.weight", "blk.0.attn_q.weight", *(f"blk.1.{name}.weight" for name in modules.split())]
    with pytest.raises(CheckpointError, match=said) if said else nullcontext():
        check_blocks(metadata, "glm4moe", names, num_layers=1)


def test_scales_of_whole_tensors_are_refused(tmp_path: Path) -> None:
    _, path, _ = make(tmp_path, "llama", "MXFP4", makers.SIZES)
    makers.write_again(path, lambda writer: writer.add_tensor("blk.0.attn_q.scale", torch.ones(1).numpy()))
    with pytest.raises(UnsupportedError, match=r"1 tensors that .* does not ask for, e.g. .*scale"):
        logits(path)
