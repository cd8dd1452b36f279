"""Calibration text and perplexity."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from forerun.config import Implementation
from forerun.errors import DataError
from forerun.models.loader import load_model
from forerun.quantize.perplexity import CHUNK, measure_perplexity
from forerun.quantize.text import cut, read_texts, split, with_held_out
from forerun.weights.tokenizer import Tokenizer
from tests.models import factory


def test_files(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"prompt": "two"}, {"turns": ["three", "four"]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "b.txt").write_text("five\nsix")
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two", "three\n\nfour"]
    assert read_texts(tmp_path / "b.txt") == ["five\nsix"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b"{", "a.jsonl:1: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]', "a.jsonl:2: none of text, prompt and turns"),
        ("a.jsonl", b'{"text": 3}', "none of text"),
        ("a.jsonl", b'{"turns": "x"}', "none of text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"\xff", "not UTF-8"),
    ],
)
def test_bad_files(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_texts(tmp_path / name)
    with pytest.raises(DataError, match="cannot read"):
        read_texts(tmp_path / "missing.txt")


def test_sequences(tmp_path: Path) -> None:
    factory.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [len(ids) for ids in cut(["abcdefg", "hijk"], tokenizer, 4)] == [4, 4, 3]
    assert [len(ids) for ids in cut(["abcdefg", "hi"], tokenizer, 4)] == [4, 4]  # one token predicts nothing
    assert [len(ids) for ids in cut(["abcdefghijklm"], tokenizer, 4, 2)] == [4, 4]
    numbered = [[number, 0] for number in range(20)]
    text = split(numbered, 10)
    assert len(text.sequences) == 10 and [ids[0] for ids in text.held_out] == [7, 15]
    assert not [ids for ids in text.sequences if ids in text.held_out]
    assert len(split(numbered[: with_held_out(14)], 14).sequences) == 14
    assert len(split(numbered[:2], 5).held_out) == 1
    with pytest.raises(DataError, match="shorter than two sequences"):
        split(numbered[:1], 5)


@pytest.mark.parametrize("implementation", ["forerun", "transformers"])
def test_perplexity_is_that_of_transformers(implementation: Implementation, tmp_path: Path) -> None:
    folder = factory.save_checkpoint(factory.random_hf_model("llama", {"max_position_embeddings": 400}), tmp_path)
    torch.manual_seed(0)
    text = [torch.randint(3, 96, (length,)).tolist() for length in (CHUNK + 40, 12)]
    model = load_model(folder, factory.make_kernels(), implementation=implementation).model
    found = measure_perplexity(model, text, lambda token: 2)
    truth = sum(
        torch.nn.functional.cross_entropy(
            factory.hf_logits(folder, ids, torch.float64)[:-1], torch.tensor(ids[1:]), reduction="sum"
        ).item()
        for ids in text
    )
    assert found.nats == pytest.approx(truth, rel=1e-5)
    assert found.num_tokens == CHUNK + 40 + 12 - 2 and found.num_bytes == 2 * found.num_tokens
    assert found.perplexity == pytest.approx(math.exp(truth / found.num_tokens), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(truth / math.log(2) / found.num_bytes, rel=1e-5)
    with pytest.raises(DataError, match="fewer than two tokens"):
        measure_perplexity(model, [[1]], lambda token: 1)
