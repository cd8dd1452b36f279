"""The comparison with other engines: its files, its turns, its tables. The engines themselves are not run here."""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import gguf
import pytest
import torch

import peer_engines
import peer_files
import peers
from forerun.bench.passes import TimedPasses
from forerun.bench.shapes import Shape, part_of, read_shape
from forerun.errors import ConfigError
from forerun.kernels.select import select_kernels
from forerun.models.config import ModelConfig
from forerun.models.loader import load_model


@pytest.fixture
def shape() -> Shape:
    known = read_shape("qwen2.5-0.5b")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 300}
    raw = {**known.raw, **sizes, "num_attention_heads": 4}
    return known._replace(raw=raw, config=ModelConfig.read(raw, known.family))


def with_hidden_size(shape: Shape, size: int) -> Shape:
    return shape._replace(config=ModelConfig.read({**shape.raw, "hidden_size": size}, shape.family))


@pytest.mark.parametrize(
    "block_type", ["Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "BF16", "F16"]
)
def test_files_hold_ordinary_numbers(shape: Shape, block_type: str, tmp_path: Path) -> None:
    path = peer_files.write_gguf(shape, block_type, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 14 and reader.get_field("qwen2.attention.head_count_kv").contents() == 2
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type.name == block_type and list(down.shape) == [512, 256]
    values = gguf.dequantize(down.data, down.tensor_type)
    assert 0.2 < float(values.std()) * 512**0.5 < 5 and values.shape == (256, 512)
    assert tensors["blk.0.attn_q.bias"].tensor_type.name == "F32"
    assert block_type != "Q8_0" or not (down.data.reshape(-1, 34)[:, 2:] == 0x80).any()  # -128 is no quantizer's


def test_files_that_cannot_be_are_refused(shape: Shape, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no random GGUF of type Q9"):
        peer_files.write_gguf(shape, "Q9", tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="blocks of 32 \\(Q8_0\\) do not divide"):
        peer_files.write_gguf(with_hidden_size(shape, 72), "Q8_0", tmp_path / "model.gguf")


def test_narrow_rows_have_the_type_of_the_quantizer_and_engines_without_it_are_left_out(
    shape: Shape, tmp_path: Path
) -> None:
    narrow = with_hidden_size(shape, 320)
    reader = gguf.GGUFReader(peer_files.write_gguf(narrow, "Q4_K", tmp_path / "model.gguf"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["blk.0.ffn_down.weight"] == "Q4_K"
    assert peers.unread("openvino", narrow, "Q4_K") == "it cannot have Q5_0"
    assert peers.unread("openvino", shape, "Q2_K") == "it cannot have Q2_K"
    readers = (("openvino", shape), ("openvino-ir", narrow), ("llama.cpp", narrow))
    assert [peers.unread(name, some, "Q4_K") for name, some in readers] == [None] * 3


NARROW = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW_DELTA = {f"linear_num_{part}_heads": count for part, count in (("key", 1), ("value", 2))}


@pytest.mark.parametrize(
    ("name", "block_type", "fields"),
    [
        ("qwen3.5-4b", "Q4_K", NARROW_DELTA),
        ("gemma-3-4b", "Q4_K", {"head_dim": 64}),
        ("gpt-oss-20b", "MXFP4", {"num_local_experts": 8}),
    ],
)
def test_files_of_other_families_are_models(name: str, block_type: str, fields: dict[str, int], tmp_path: Path) -> None:
    known = part_of(read_shape(name), 6, 300)
    raw = {**known.raw, **NARROW, **fields}
    shape = known._replace(raw=raw, config=ModelConfig.read(raw, known.family))
    path = peer_files.write_gguf(shape, block_type, tmp_path / "model.gguf")
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert kinds == {"F32", "MXFP4", "Q8_0"} if block_type == "MXFP4" else {"F32", "Q4_K"}
    assert peer_files.stored_types(shape, block_type) == kinds - {"F32"}
    kernels = select_kernels("auto", 1)
    loaded = load_model(path, kernels)
    config = loaded.config
    assert config is not None and (config.rope, config.windows) == (shape.config.rope, shape.config.windows)
    assert (config.recurrent, config.heads, config.experts) == (
        shape.config.recurrent, shape.config.heads, shape.config.experts
    )  # fmt: skip
    model: Any = loaded.model
    passes = TimedPasses(model, kernels, 40)
    first, again = (passes.runner.run(passes.chain(0, 8)).logits for _ in range(2))
    assert torch.equal(first, again) and bool(first.isfinite().all()) and 0.1 < float(first.std()) < 30


def test_parts_of_shapes() -> None:
    part = part_of(read_shape("gpt-oss-20b"), 6, 50272).config
    assert (part.num_layers, part.vocab_size, len(part.windows)) == (6, 50272, 6)
    with pytest.raises(ConfigError, match="num_hidden_layers 24; choose from 1 to that, not 25"):
        part_of(read_shape("gpt-oss-20b"), 25, None)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_llama_goes_back_to_what_it_knew(monkeypatch: pytest.MonkeyPatch, is_hybrid: bool) -> None:
    api = MagicMock(__version__="1", **{"llama_decode.return_value": 0, "llama_state_seq_get_size.return_value": 5,
                    "llama_model_is_recurrent.return_value": False,
                    "llama_model_is_hybrid.return_value": is_hybrid})  # fmt: skip
    monkeypatch.setitem(sys.modules, "llama_cpp", api)
    engine = peer_engines.LlamaCpp({"file": "model.gguf", "type": "Q4_K", "threads": 2, "vocab_size": 300})
    engine.chain(128, 8)
    first = 0 if is_hybrid else 128  # states cannot be cut at a position
    assert [call.args[1:] for call in api.llama_memory_seq_rm.call_args_list] == [(0, first, -1)] * 2
    restored = [call.args[2:] for call in api.llama_state_seq_set_data.call_args_list]
    assert restored == ([(5, 0)] * 2 if is_hybrid else [])


class FakeWorker:
    """A pass takes a millisecond a token, ten times that in the first turn."""

    version, compared = "1", "nothing"

    def __init__(self, log: list[tuple[str, str, int]], name: str, factor: float) -> None:
        self.log, self.name, self.factor = log, name, factor

    def logits(self, tokens: int) -> list[float]:
        return [1.0, self.factor]

    def seconds(self, first: str, tokens: int) -> float:
        case = (self.name, first, tokens)
        self.log.append(case)
        return self.factor * tokens * (1e-3 if self.log.count(case) > 1 else 1e-2)


def test_ik_llama_decodes_the_tokens_the_others_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = MagicMock(**{"ik_commit.return_value": b"8337e4cd", "ik_load.return_value": 1,
                           "ik_context.return_value": 2, "ik_decode.return_value": 0})  # fmt: skip
    monkeypatch.setattr(ctypes, "CDLL", {"ik.so": library}.__getitem__)
    engine = peer_engines.IkLlama(
        {"ik_llama": "ik.so", "file": "model.gguf", "type": "Q4_K", "threads": 2, "vocab_size": 300}
    )
    assert engine.version == "8337e4cd" and "Q4_K, repacked" in engine.compared
    engine.chain(128, 8)
    library.ik_load.assert_called_once_with(b"model.gguf")
    assert library.ik_context.call_args.args[1:] == (256, 512, 2)
    passes = [(list(call.args[1]), *call.args[2:]) for call in library.ik_decode.call_args_list]
    chain = (peer_engines.token_ids(8, 300), 8, 128, True)
    assert passes == [(peer_engines.token_ids(128, 300), 128, 0, False), chain, chain]
    assert [call.args[1:] for call in library.llama_kv_cache_seq_rm.call_args_list] == [(0, 128, -1)] * 2
    library.ik_decode.return_value = 1
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        engine.prefill(8)
    assert not peers.installed("ik_llama.cpp", None) and not peers.installed("ik_llama.cpp", tmp_path / "ik.so")
    assert peers.installed("ik_llama.cpp", tmp_path)


def test_engines_take_turns_and_the_first_turn_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forerun.bench.bandwidth.buffer_bytes", lambda: 1 << 20)
    monkeypatch.setattr(peers, "PAUSE_S", 0)
    log: list[tuple[str, str, int]] = []
    workers = {"a": FakeWorker(log, "a", 1.0), "b": FakeWorker(log, "b", 2.0)}
    given = argparse.Namespace(context="128", tokens="1,8", prefill="512", repeats=2, threads=1)
    assert peers.agreement(workers) == {"a": 1.0, "b": pytest.approx(3 / 10**0.5, abs=1e-6)}
    times, speeds = peers.take_turns(workers, given)
    assert [name for name, *_ in log[:6]] == ["a", "b"] * 3 and len(log) == 18 and len(speeds) == 2
    rows = peers.rows_of(times)
    assert {"engine": "a", "tokens": 8, "ms": 8.0, "context": 128, "ratio": 8.0} in rows
    assert {"engine": "b", "tokens": 512, "ms": 1024.0, "prefill": True, "tokens_per_s": 500.0} in rows
    run = {"weights": "Q4_0", "rows": rows, "skipped": {"c": "no reader"}, "read_gb_per_s": 9.5,
           "engines": {name: {"version": "1", "compared": "nothing", "cosine": 1.0} for name in workers}}  # fmt: skip
    result = {"command": "x", "shape": "small", "threads": 1, "repeats": 2, "not_installed": ["d"], "runs": [run],
              "machine": {"cpu": "c", "commit": "0", "date": "2026-01-01", "kernels": "cpu-avx2 (why)"}}  # fmt: skip
    peers.keep(result, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"2026-01-01-peers-small-Q4_0-cpu-avx2.{end}" for end in ("json", "md")}
    assert json.loads((tmp_path / "2026-01-01-peers-small-Q4_0-cpu-avx2.json").read_text()) == result
    said = capsys.readouterr().out
    assert "| b | 2.0 | 16.0 | 8.00 | 500 |" in said
    assert "c was left out: no reader" in said and "Not installed: d." in said
