"""Models to quantize, text, and how far a quantized model's logits are from the float ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.models.loader import LoadedModel, load_model
from forerun.quantize.run import open_source, quantize_model, round_model
from forerun.quantize.settings import QuantizeSettings
from forerun.quantize.text import cut
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer
from tests.models import factory

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {"sliding_window": None}),
}


def tiny(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A small random model whose inputs differ in magnitude, as those of trained models do."""
    model_type, fields = CASES[case]
    model = factory.random_hf_model(model_type, {**SIZES, **fields})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.mul_(torch.logspace(-0.7, 0.7, parameter.shape[0])[torch.randperm(parameter.shape[0])])
    return factory.save_checkpoint(model, folder, dtype)


def shallow_mini(folder: Path, num_layers: int = 1) -> Path:
    """The embedded model's first layers: trained weights, so that methods differ as they do in use."""
    source = resolve_model("mini")
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    gone = tuple(f"model.layers.{index}." for index in range(num_layers, config["num_hidden_layers"]))
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prose(length: int = 128) -> list[list[int]]:
    """Sequences of the embedded model's tokens: this project's documents."""
    texts = [path.read_text("utf-8") for path in sorted(factory.REPO.glob("*.md"))]
    return cut(texts, Tokenizer.from_folder(resolve_model("mini")), length)


def sequences(num: int = 24, length: int = 32) -> list[list[int]]:
    """Tokens of a first-order chain: not uniform, so that inputs are correlated."""
    generator = torch.Generator().manual_seed(7)
    chain = (torch.randn(96, 96, generator=generator) * 2).softmax(-1)
    tokens = torch.randint(3, 96, (num,), generator=generator)
    columns = [tokens]
    for _ in range(length - 1):
        columns.append(torch.multinomial(chain[columns[-1]], 1, generator=generator)[:, 0])
    return torch.stack(columns, 1).tolist()


def quantized(folder: Path, out: Path, text: list[list[int]] | None = None, **options: Any) -> LoadedModel:
    """Quantize a folder into `out`, then load that."""
    kernels = factory.make_kernels()
    settings = QuantizeSettings(**options)
    source = open_source(folder, settings)
    if settings.method == "rtn":
        round_model(source, out, settings, lambda num: None)
    else:
        quantize_model(source, load_model(folder, kernels), out, settings, text or sequences(), lambda num: None)
    return load_model(out, kernels)


def logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """[len(ids), V]."""
    return factory.Runner(loaded.model, len(ids)).span(ids).logits


def logit_error(found: LoadedModel, truth: LoadedModel, text: list[list[int]]) -> float:
    """Mean squared difference of logits over sequences, relative to their variance."""
    pairs = [(logits(found, ids), logits(truth, ids)) for ids in text]
    wrong, right = (torch.cat(side) for side in zip(*pairs, strict=True))
    return float((wrong - right).pow(2).mean() / right.var())
