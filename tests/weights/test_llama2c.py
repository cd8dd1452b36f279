"""llama2.c checkpoints: every version, tokenizers as in run.c, and files that are something else."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.sentencepiece import PieceType, PieceVocabulary, build_tokenizer
from forerun.weights.tokenizer import Tokenizer
from tests.support.llama2c import convert_llama2c, read_vocabulary
from tests.support.shared import shared_data
from tests.support.stories import stories260k

VOCAB = 270


def write_vocabulary(path: Path, size: int = VOCAB) -> Path:
    """A tok.bin as llama2.c's tokenizer.py writes it."""
    texts = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{b:02X}>" for b in range(256)), " ", "a", "b", "c", " a", "ab"]
    texts += [" ab", "bc", "abc", "cc", "ccc"]
    entries = b"".join(
        struct.pack("<fi", -float(index), len(text.encode())) + text.encode() for index, text in enumerate(texts[:size])
    )
    path.write_bytes(struct.pack("<i", 8) + entries)
    return path


def write_v0(path: Path, tied: bool) -> Path:
    """dim 8, hidden 12, 1 layer, 2 heads, 1 kv head: every weight is its place in the file."""
    sizes = (8, 12, 1, 2, 1, VOCAB if tied else -VOCAB, 16)
    counts = [VOCAB * 8, 8, 64, 32, 32, 64, 8, 96, 96, 96, 8, 2 * 16 * 2] + ([] if tied else [VOCAB * 8])
    values = torch.arange(sum(counts), dtype=torch.float32)
    path.write_bytes(struct.pack("<7i", *sizes) + values.numpy().tobytes())
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_v0(tied: bool, tmp_path: Path) -> None:
    source = write_v0(tmp_path / "model.bin", tied)
    out = convert_llama2c(source, write_vocabulary(tmp_path / "tok.bin"), tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied and ("lm_head.weight" in tensors) is not tied
    first = VOCAB * 8 + 8
    query = torch.arange(first, first + 64, dtype=torch.float32).reshape(8, 8)
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], query[[0, 2, 1, 3, 4, 6, 5, 7]])
    gate = tensors["model.layers.0.mlp.gate_proj.weight"]
    assert gate.shape == (12, 8) and gate[0, 0] == VOCAB * 8 + 8 + 64 + 32 + 32 + 64 + 8
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (8, 12)


def test_v1_equals_v0(tmp_path: Path) -> None:
    for name in ("stories260K", "stories260K_v1"):
        stories260k(tmp_path / name, f"{name}.bin")
    old = load_file(tmp_path / "stories260K" / "model.safetensors")
    new = load_file(tmp_path / "stories260K_v1" / "model.safetensors")
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)


def test_v2_and_sentencepiece_vocabulary(tmp_path: Path) -> None:
    folder = shared_data("weights/stories3M-q80")
    out = convert_llama2c(folder / "stories3M-q80.bin", folder / "tok4096.bin", tmp_path / "q80")
    weight = load_file(out / "model.safetensors")["model.layers.5.mlp.up_proj.weight"]
    groups = weight.reshape(-1, 64)
    steps = groups.abs().amax(dim=1, keepdim=True) / 127
    assert torch.allclose((groups / steps).round() * steps, groups, atol=1e-6)
    other = shared_data("weights/babyllama105")
    out = convert_llama2c(other / "model5000.bin", other / "tok105.model", tmp_path / "baby")
    tokenizer = Tokenizer.from_folder(out)
    assert tokenizer.decode(tokenizer.encode("a small text.")) == "a small text."


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "damaged"),
        (struct.pack("<7i", 0, 0, 0, 0, 0, 0, 0), "no llama2.c checkpoint"),
        (struct.pack("<7i", 8, 12, 1, 3, 1, 512, 16), "no llama2.c checkpoint"),
        (struct.pack("<7i", *[2**30] * 7), "no llama2.c checkpoint"),
        (struct.pack("<7i", 8, 12, 1, 2, 1, 512, 16) + b"\0" * 99, "damaged"),
        (struct.pack("<Ii7iBi", 0x616B3432, 2, 8, 12, 1, 2, 1, 512, 16, 1, 0).ljust(256), "no llama2.c checkpoint"),
        (struct.pack("<Ii7iBi", 0x616B3432, 2, 8, 12, 1, 2, 1, 512, 16, 1, 7).ljust(99999), "groups of 7"),
    ],
)
def test_damage(raw: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(raw)
    with pytest.raises(CheckpointError, match=named):
        convert_llama2c(tmp_path / "model.bin", write_vocabulary(tmp_path / "tok.bin"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_version(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(struct.pack("<Ii", 0x616B3432, 9).ljust(300))
    with pytest.raises(UnsupportedError, match="version 9"):
        convert_llama2c(tmp_path / "model.bin", write_vocabulary(tmp_path / "tok.bin"), tmp_path / "out")


def test_wrong_vocabulary(tmp_path: Path) -> None:
    source = write_v0(tmp_path / "model.bin", tied=True)
    with pytest.raises(CheckpointError, match="ends after 265 of 270"):
        convert_llama2c(source, write_vocabulary(tmp_path / "tok.bin", 265), tmp_path / "out")


def run_c_encode(vocabulary: PieceVocabulary, text: str) -> list[int]:
    """run.c's encode: code points or their bytes, then the best-scoring pair again and again."""
    ids_by_text = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    ids: list[int] = []
    for character in " " + text if text else "":
        found = ids_by_text.get(character)
        ids += [found] if found is not None else [byte + 3 for byte in character.encode()]
    while True:
        pairs = [vocabulary.pieces[a] + vocabulary.pieces[b] for a, b in pairwise(ids)]
        known = [(vocabulary.scores[ids_by_text[p]], -i) for i, p in enumerate(pairs) if p in ids_by_text]
        if not known:
            return ids
        place = -max(known)[1]
        ids[place : place + 2] = [ids_by_text[pairs[place]]]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="abc  ▁é\n😀", max_size=20))
def test_encoding_is_that_of_run_c(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "tok.bin"
    vocabulary = read_vocabulary(path if path.exists() else write_vocabulary(path), VOCAB)
    assert vocabulary.types[3] == PieceType.BYTE
    tokenizer = Tokenizer(build_tokenizer(vocabulary, "<s>"), {"bos_token": "<s>"})
    ids = tokenizer.encode(text)
    assert ids == [1, *run_c_encode(vocabulary, text)]
    assert tokenizer.decode(ids) == text
