"""Widened models compute the same function: families with every switch, and the embedded model on real prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.bench.shapes import read_shape
from forerun.bench.speed import WIDENED_FROM
from forerun.errors import CheckpointError, ConfigError, ResourceError, UnsupportedError
from forerun.kernels.select import select_kernels
from forerun.models.loader import load_model
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.resolve import resolve_model
from tests.models import factory
from tests.support import mini
from widening.model import open_source, widen
from widening.sizes import Sizes, appended, choose_sizes, head_axes, is_exact, joined

TOKENS = [5, 9, 33, 2, 71, 44, 18, 5, 60, 7]
SIZES_HIDDEN = factory.SIZES["hidden_size"]
LARGER: dict[str, int | None] = {"hidden_size": 128, "num_layers": 4, "ffn_size": 112, "num_q": 8, "num_kv": 4}


def widened(folder: Path, out: Path, **given: int | None) -> dict[str, Any]:
    source = open_source(folder)
    return widen(source, choose_sizes(source[1], None, given), out, folder.name)


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, factory.make_kernels()).model
    return factory.Runner(model, 16).span(TOKENS).logits


@pytest.mark.parametrize("case", ["llama", "llama-tied-biased", "mistral-window", "qwen2-windows", "qwen3", "phi3"])
def test_every_family_keeps_its_function(case: str, tmp_path: Path) -> None:
    folder = factory.make_checkpoint(case, tmp_path / "small")
    report = widened(folder, tmp_path / "large", **LARGER)
    assert report["sizes"] == LARGER and report["same_bits"]
    small, large = logits(folder), logits(tmp_path / "large")
    assert torch.allclose(large, small, rtol=0, atol=2e-5 * float(small.abs().max()))


def test_any_hidden_size_and_other_groups(tmp_path: Path) -> None:
    """Groups of 4 instead of 2, then of 1 (a key-value head is repeated); norms by a factor that must be rounded."""
    folder = factory.make_checkpoint("llama", tmp_path / "small")
    small = logits(folder)
    for index, (num_q, num_kv) in enumerate([(8, 2), (5, 5)]):
        out = tmp_path / f"large{index}"
        report = widened(folder, out, hidden_size=80, num_q=num_q, num_kv=num_kv)
        assert not report["same_bits"]
        assert torch.allclose(logits(out), small, rtol=0, atol=1e-4 * float(small.abs().max()))


def test_new_entries_are_random_where_they_change_nothing(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "small")
    widened(folder, tmp_path / "large", **LARGER)
    large = Checkpoint.open(tmp_path / "large")
    layer = "model.layers.{}.{}.weight"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for index in range(4):
            assert bool((large.tensor(layer.format(index, name)) != 0).all()), name
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        old, new = large.tensor(layer.format(1, name)), large.tensor(layer.format(2, name))
        assert not bool(new.any()) and bool(old.any()) and not bool(old[SIZES_HIDDEN:].any())
    assert not bool(large.tensor("model.embed_tokens.weight")[:, SIZES_HIDDEN:].any())
    assert bool((large.tensor("lm_head.weight") != 0).all())


def test_mini_writes_the_same_tokens_from_the_same_bits(tmp_path: Path) -> None:
    """Greedy text on several prompts, then the bits of every logit."""
    report = widened(resolve_model("mini-draft"), tmp_path / "w", hidden_size=512, num_layers=3, ffn_size=512, num_q=4)
    assert report["same_bits"] and report["sizes"]["num_kv"] == 2
    kernels = select_kernels("cpu:avx512" if mini.plain().kernels.name.endswith("amx") else "auto")  # decision 0009
    small = load_model("mini-draft", kernels).model
    large = load_model(tmp_path / "w", kernels).model
    for prompt in mini.PROMPTS:
        ids = mini.plain().tokenizer.encode(prompt)
        assert factory.greedy(large, ids, 24) == factory.greedy(small, ids, 24)
    before, after = (factory.Runner(model, len(ids)).span(ids).logits for model in (small, large))
    assert torch.equal(before, after) or kernels.name == "reference"


def test_mini_writes_the_same_tokens_where_norms_are_rounded(tmp_path: Path) -> None:
    report = widened(resolve_model("mini"), tmp_path / "w", hidden_size=448, num_layers=9, num_q=8, num_kv=2)
    assert not report["same_bits"]
    kernels, small = mini.plain().kernels, mini.plain().loaded.model
    large = load_model(tmp_path / "w", kernels).model
    for prompt in mini.PROMPTS[:3]:
        ids = mini.plain().tokenizer.encode(prompt)
        assert factory.greedy(large, ids, 24) == factory.greedy(small, ids, 24)


def test_the_folder_says_what_it_was_made_from_and_holds_the_tokenizer(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("qwen2", tmp_path / "small")
    widened(folder, tmp_path / "large", **LARGER)
    raw = json.loads((tmp_path / "large" / "config.json").read_text())
    assert raw[WIDENED_FROM]["model"] == "small" and raw[WIDENED_FROM]["hidden_size"] == SIZES_HIDDEN
    assert raw["rms_norm_eps"] == pytest.approx(1e-6 / 4) and raw["layer_types"] == ["full_attention"] * 4
    assert (tmp_path / "large" / "tokenizer.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]


@pytest.mark.parametrize("case", ["mixtral", "deepseek"])
def test_mixtures_and_latents_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be widened; supported are llama"):
        widened(factory.make_checkpoint(case, tmp_path / "small"), tmp_path / "large", num_layers=4)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(("umask", "folder_rights", "file_rights"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640)])
def test_others_may_read_what_the_umask_lets_them(
    tmp_path: Path, umask: int, folder_rights: int, file_rights: int
) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "small")
    before = os.umask(umask)
    try:
        widened(folder, tmp_path / "large", **LARGER)
    finally:
        os.umask(before)
    assert (tmp_path / "large").stat().st_mode & 0o777 == folder_rights
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "large").iterdir()} == {file_rights}


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "small")
    config = open_source(folder)[1]
    for given, said in (
        ({"hidden_size": 16}, "--hidden-size 16 is less than the model's 32"),
        ({"num_layers": 1}, "--layers 1 is less"),
        ({"num_q": 7, "num_kv": 2}, "--heads 7 is not a multiple of --kv-heads 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose_sizes(config, None, given)
    with pytest.raises(ConfigError, match="heads of 64 entries, the model of 8"):
        choose_sizes(config, read_shape("llama-3.2-1b"), {})
    with pytest.raises(ConfigError, match="exists already"):
        widened(folder, folder)
    with pytest.raises(ConfigError, match="there is no folder"):
        widened(folder, tmp_path / "none" / "large")
    monkeypatch.setattr("widening.model.shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ResourceError, match="0.00 GB are free"):
        widened(folder, tmp_path / "large")


def test_unknown_families_and_tensors_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = factory.make_checkpoint("llama", tmp_path / "small")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "mtp.head.weight": torch.ones(2)}, path)
    with pytest.raises(UnsupportedError, match="1 tensors that cannot be widened, e.g. mtp.head.weight"):
        widened(folder, tmp_path / "large")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="up_proj.weight holds NaN"):
        widened(folder, tmp_path / "large")
    assert not (tmp_path / "large").exists() and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(UnsupportedError, match="is a single file"):
        open_source(path)
    config = folder / "config.json"
    sections = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    config.write_text(json.dumps({**json.loads(config.read_text()), **sections}))
    with pytest.raises(UnsupportedError, match="widen the unquantized checkpoint"):
        open_source(folder)
    config.write_text(config.read_text().replace('"llama"', '"gemma2"'))
    with pytest.raises(UnsupportedError, match="type gemma2 cannot be widened"):
        open_source(folder)


def test_exact_factors() -> None:
    assert [times for times in range(1, 70) if is_exact(384, 384 * times)] == [1, 4, 16, 64]
    assert not is_exact(384, 2048)


def test_head_axes_keep_groups_together() -> None:
    old = Sizes(hidden_size=1, num_layers=1, ffn_size=1, num_q=4, num_kv=2)
    new = Sizes(hidden_size=1, num_layers=1, ffn_size=1, num_q=9, num_kv=3)
    query, key = head_axes(old, new, 1)
    assert query.origin.tolist() == [0, 1, -1, 2, 3, -1, -1, -1, -1] and key.origin.tolist() == [0, 1, -1]
    split = Sizes(hidden_size=1, num_layers=1, ffn_size=1, num_q=5, num_kv=5)
    query, key = head_axes(old, split, 2)
    assert query.origin.tolist() == [*range(8), -1, -1] and key.origin.tolist() == [0, 1, 0, 1, 2, 3, 2, 3, -1, -1]
    mini_sizes = Sizes(hidden_size=1, num_layers=1, ffn_size=1, num_q=6, num_kv=2)
    with pytest.raises(ConfigError, match="2 key-value heads with 3 query heads each .* at least 4 are needed"):
        head_axes(mini_sizes, Sizes(hidden_size=1, num_layers=1, ffn_size=1, num_q=6, num_kv=3), 1)
    both = joined((appended(1, 2), appended(2, 3)))
    assert both.origin.tolist() == [0, -1, 1, 2, -1] and both.old_size == 3
