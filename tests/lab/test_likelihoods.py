"""How far log-likelihoods are from float32: the arithmetic, random models, and one whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import likelihoods
from forerun.errors import ConfigError
from tests.models import factory

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 128,
    "tie_word_embeddings": True, "layer_types": ["full_attention"] * 4,
}  # fmt: skip


def test_errors_are_those_of_log_probabilities() -> None:
    truth, wanted = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1])
    found = likelihoods.Apart()
    found.add(truth + 3.0, truth, wanted)  # the same distribution
    found.add(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), truth, wanted)
    up, down = (float(torch.tensor([1.0, 0.0]).log_softmax(0)[i]) - float(torch.tensor(0.5).log()) for i in (0, 1))
    assert found.tokens.tolist() == pytest.approx([0.0, 0.0, up, 0.0], abs=1e-6)
    assert found.mean == pytest.approx(up / 4) and found.num_entries == 8
    assert found.root_mean_square == pytest.approx(((up**2 + down**2) / 8) ** 0.5)
    assert found.perplexity == pytest.approx((2**3 * 2 / torch.e**up) ** 0.25, rel=1e-5)


def test_a_random_model_of_a_configuration_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    config.write_text(json.dumps(QWEN3))
    text.write_text("Once upon a time there was a fox. " * 4)
    arguments = [str(config), str(text), "--set", "num_hidden_layers=2", "--length", "20", "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["likelihoods.py", *arguments, "--threads", "1"])
    likelihoods.main()
    lines = capsys.readouterr().out.splitlines()
    means = {line.split(" | ")[0][2:]: float(line.split(" | ")[1]) for line in lines[2:5]}
    assert means["forerun, float32"] < 1e-4 < means["forerun, bfloat16"] < means["transformers, bfloat16"]
    assert "38 tokens of text.txt" in lines[-1] and "num_hidden_layers=2" in lines[-1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3))
    with pytest.raises(ConfigError, match="vocab_size 64 is less than the tokens of mini"):
        likelihoods.write_random(config, {"vocab_size": 64}, tmp_path / "out")
    with pytest.raises(ConfigError, match="is not NAME=VALUE"):
        likelihoods.read_change("num_hidden_layers")


def test_engines_give_the_logits_of_all_tokens_but_the_last(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("qwen3", tmp_path / "folder", torch.bfloat16)
    ids = [3, 17, 40, 8, 25]
    own = likelihoods.by_forerun(folder, factory.make_kernels(), "float32")(ids)
    other = likelihoods.by_transformers(folder, torch.float32)(ids)
    assert own.shape == other.shape == (4, factory.VOCAB_SIZE)
    assert torch.allclose(own, other, atol=1e-4)
