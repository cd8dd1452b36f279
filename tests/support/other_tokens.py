"""Draft models with another tokenizer than the target's: small random ones, and known ones under other ids."""

from __future__ import annotations

import json
import random
import shutil
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.models.base import Model
from forerun.models.loader import load_model, load_tokenizer
from forerun.weights.tokenizer import Tokenizer
from forerun.weights.translation import Translation
from tests.models import factory
from tests.support import tiny
from tests.weights import makers

CHAIN = DrafterConfig(name="draft", model="other", max_draft_tokens=5, tree_width=1, adaptive=False)


def backwards() -> Tokenizer:
    """The letters of `factory.write_tokenizer` with other ids, and a few tokens of two letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: factory.VOCAB_SIZE - 3]
    merges = [("!", "!"), ('"', "#"), ("#", "$"), ("a", "b")]
    names = ["</s>", *reversed(letters), *(a + b for a, b in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


def write_small(folder: Path, tokenizer: Tokenizer, seed: int = 1) -> Path:
    """A random Llama of two layers over a tokenizer."""
    vocab_size, hidden = tokenizer.vocab_size, factory.SIZES["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    layers = tiny.random_layers(2)
    tensors = {
        "model.embed_tokens.weight": 0.15 * torch.randn(vocab_size, hidden, generator=generator),
        "lm_head.weight": 0.15 * torch.randn(vocab_size, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
    }
    tensors |= {f"model.layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 256, "model_type": "llama"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(factory.SIZES | sizes), "utf-8")
    return makers.save(tokenizer, folder, **tokenizer.special_tokens)


def write_renumbered(source: Path, folder: Path, seed: int = 0) -> Path:
    """A model with a byte-level BPE, its embedding tied, under other ids: it says the very same texts."""
    shutil.copytree(source, folder)
    described = json.loads((source / "tokenizer.json").read_text("utf-8"))
    vocabulary = described["model"]["vocab"]
    order = list(range(len(vocabulary)))
    random.Random(seed).shuffle(order)  # new id -> old id
    new_id = {old: new for new, old in enumerate(order)}
    described["model"]["vocab"] = {name: new_id[old] for name, old in vocabulary.items()}
    for token in described["added_tokens"]:
        token["id"] = new_id[token["id"]]
    described["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(described), "utf-8")
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][order].contiguous()
    save_file(tensors, folder / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((source / name).read_text("utf-8"))
        ends = settings["eos_token_id"]
        settings["eos_token_id"] = new_id[ends] if isinstance(ends, int) else [new_id[end] for end in ends]
        (folder / name).write_text(json.dumps(settings), "utf-8")
    return folder


def with_unused_row(folder: Path) -> Path:
    """One more row in the embedding: transformers takes vocabularies of one size for the same."""
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.zeros_like(rows[:1])])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(rows) + 1}), "utf-8")
    return folder


@lru_cache(maxsize=1)
def pair() -> tuple[Model, Model, Translation]:
    """A random target of 96 letters and a random draft model with `backwards`."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        target = tiny.target(2)
        factory.write_tokenizer(folder / "target")
        own = load_tokenizer(folder / "target")
        loaded = load_model(write_small(folder / "draft", backwards()), tiny.kernels())
    translation = Translation(own, loaded.tokenizer, target.vocab_size, loaded.model.vocab_size)
    return target, loaded.model, translation


def engine(drafter: DrafterConfig = CHAIN, **options: Any) -> Engine:
    """An engine on the pair."""
    target, draft, translation = pair()
    options = {"block_size": 4, "max_model_len": tiny.MAX_LEN, **options}
    config = EngineConfig(model="tiny", drafter=drafter, **options)
    return assemble(config, target, tiny.kernels(), lambda _: draft, translation=lambda _: translation)
