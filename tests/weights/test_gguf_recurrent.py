"""GGUF files of families with recurrent layers, written by llama.cpp's own converter.

fixtures/gguf/NAME.gguf is what `convert_hf_to_gguf.py FOLDER --outtype f32 --outfile NAME.gguf` (llama.cpp of
llama-cpp-python 0.3.36, whose `get_vocab_base_pre` was made to answer "gpt-2"; `--no-mtp` for Qwen) made of the
folder that `save` writes, its config.json read as it is, with `architectures` and, of Granite, Nemotron and Kimi, kinds
of layers as published ones have them, of Kimi the names of the dense part, too. The models are
`factory.random_hf_model` of CASES.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import ForerunError, ModelError, UnsupportedError
from forerun.models.loader import load_model, read_config
from tests.models import factory
from tests.models.factory import (
    DELTA,
    FALCON_H1,
    GRANITE_HYBRID,
    KIMI,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    QWEN_EXPERTS,
    SPARSE,
    Runner,
)

gguf = pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers  # noqa: E402

TOKENS = [3, 17, 40, 8, 25, 61, 9, 33, 50, 12, 77, 4, 5, 81, 30, 22]
FIXTURES = Path(__file__).parent / "fixtures" / "gguf"
SQUARE = {**DELTA, "linear_value_head_dim": 12}  # as llama.cpp needs it
ALL_SPARSE = [
    "linear_attention",
    "moe",
    "full_attention",
    "linear_attention",
    "moe",
]  # as llama.cpp's converter needs it
LATENT = {"moe_latent_size": 12}
QWEN_MOE = {**SQUARE, **QWEN_EXPERTS, "shared_expert_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("qwen3_next", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen35": ("qwen3_5_text", SQUARE),
    "qwen35-plain": ("qwen3_5_text", {**SQUARE, "linear_num_key_heads": 4, "tie_word_embeddings": True}),
    "qwen35moe": ("qwen3_5_moe_text", QWEN_MOE),
    "lfm2": ("lfm2", {**LFM2, "block_multiple_of": 8}),
    "lfm2moe": ("lfm2_moe", LFM2_MOE),
    "granitehybrid": ("granitemoehybrid", GRANITE_HYBRID),
    "granitehybrid-moe": ("granitemoehybrid", {**GRANITE_HYBRID, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "falcon-h1": ("falcon_h1", {**FALCON_H1, "head_dim": 16}),
    "falcon-h1-norm": (
        "falcon_h1", {**FALCON_H1, "head_dim": 16, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "mamba_head_dim": 16}),
    "nemotron_h_moe": ("nemotron_h", {**SPARSE, "layers_block_type": ALL_SPARSE, "mamba_head_dim": 16, **LATENT}),
    "kimi-linear": ("kimi_linear", {**KIMI, "linear_num_heads": 4}),  # as many as attention has, for llama.cpp
}  # fmt: skip
# Where the file's matrices are others: columns in another order, multiplied with the multipliers; or the exponentials
# in it were computed on a machine whose last bits are others.
ROUNDED_OTHERWISE = (
    "qwen35", "qwen35moe", "falcon-h1", "falcon-h1-norm", "granitehybrid", "granitehybrid-moe", "nemotron_h",
    "kimi-linear",
)  # fmt: skip


def save(case: str, folder: Path) -> Path:
    """The model as a folder."""
    model_type, fields = CASES[case]
    return factory.save_checkpoint(factory.random_hf_model(model_type, fields), folder)


def logits(path: Path) -> Tensor:
    return Runner(load_model(path, factory.make_kernels()).model, 40).span(TOKENS).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_safetensors(case: str, tmp_path: Path) -> None:
    folder = save(case, tmp_path / "folder")
    found, expected = logits(FIXTURES / f"{case}.gguf"), logits(folder)
    if case in ROUNDED_OTHERWISE:
        assert factory.rms_error(found, expected.double()) < 1e-5 * float(expected.std())
    else:
        assert torch.equal(found, expected)


def test_layers_of_a_single_part() -> None:
    """Which one is told by the sizes of a file, one for each layer."""
    config = read_config(FIXTURES / "nemotron_h.gguf")
    assert config is not None and config.recurrent is not None
    assert config.parts == ("mixer", "mlp", "mixer", "mixer", "mixer", "mlp")
    assert config.recurrent.layers == {0, 3, 4} and {rope.rotary_dim for rope in config.layer_ropes} == {0}


def changed(case: str, tmp_path: Path, add: Any) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes((FIXTURES / f"{case}.gguf").read_bytes())
    makers.write_again(path, add)
    return path


REFUSED: dict[str, tuple[str, Any, str]] = {
    "window": ("lfm2", lambda w: w.add_sliding_window(7), "lfm2.attention.sliding_window = 7 without saying in which"),
    "pooling": ("lfm2", lambda w: w.add_pooling_type(gguf.PoolingType.MEAN), "sets lfm2.pooling_type = 1"),
    "steps": ("granitehybrid", lambda w: w.add_ssm_dt_b_c_rms(True), "sets granitehybrid.ssm.dt_b_c_rms = True"),
    "scale": ("lfm2moe", lambda w: w.add_expert_weights_scale(2.0), "sets lfm2moe.expert_weights_scale = 2.0"),
    "module": ("kimi-linear", lambda w: w.add_nextn_predict_layers(1), "sets kimi-linear.nextn_predict_layers = 1"),
    "gating": ("qwen35moe", lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "gating_func = 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    name, add, says = REFUSED[case]
    with pytest.raises(ModelError, match=says):
        load_model(changed(name, tmp_path, add), factory.make_kernels())


def test_adapters_beside_multiplied_matrices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Falcon-H1's multipliers"):
        load_model(FIXTURES / "falcon-h1.gguf", factory.make_kernels(), adapters=[tmp_path])


def test_layers_for_drafting_are_left_out(tmp_path: Path) -> None:
    """A file that counts its last block as one for drafting runs the others."""
    config = read_config(changed("qwen35", tmp_path, lambda w: w.add_nextn_predict_layers(1)))
    assert config is not None and config.num_layers == 3


def test_quantized_rows_are_put_in_order(tmp_path: Path) -> None:
    kinds = {"attn_qkv": "Q8_0", "attn_gate": "Q8_0", "ssm_beta": "Q8_0", "": "F32"}
    path = tmp_path / "model.gguf"
    path.write_bytes((FIXTURES / "qwen35.gguf").read_bytes())
    makers.write_again(path, types=kinds)
    found, exact = logits(path), logits(FIXTURES / "qwen35.gguf")
    assert 0 < factory.rms_error(found, exact.double()) < 0.05 * float(exact.std())


@pytest.mark.parametrize("case", ["qwen35moe", "nemotron_h", "kimi-linear"])
def test_changed_headers_never_crash(case: str, tmp_path: Path) -> None:
    whole, draw, path = (FIXTURES / f"{case}.gguf").read_bytes(), random.Random(0), tmp_path / "model.gguf"
    header = whole.index(b"tokenizer.ggml.model")
    for _ in range(100):
        raw, place = bytearray(whole), draw.randrange(header)
        raw[place : place + 2] = draw.randbytes(2)
        path.write_bytes(raw)
        with contextlib.suppress(ForerunError):
            load_model(path, factory.make_kernels())
