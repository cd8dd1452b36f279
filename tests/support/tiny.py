"""Small random decoders on the kernels a user gets, engines around them, and what every drafter on them must keep."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import RequestStats, SamplingParams
from forerun.drafters.portfolio import Portfolio
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.kernels.ops import Kernels
from forerun.models.decoder import Decoder
from forerun.models.loader import load_model
from tests.models import factory
from tests.support import harness

MAX_LEN = 96
PLAIN = DrafterConfig()


@lru_cache(maxsize=1)
def kernels() -> Kernels:
    return factory.make_kernels()


@lru_cache(maxsize=8)
def target(num_layers: int) -> Decoder:
    """A random Llama of 32 dimensions and 96 tokens."""
    return llama(random_layers(num_layers))


def random_layers(num_layers: int) -> list[dict[str, Tensor]]:
    """Tensors of every layer by the names they have below it."""
    generator, sizes = torch.Generator().manual_seed(num_layers), factory.SIZES
    hidden, ffn, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    kv_rows = hidden // heads * sizes["num_key_value_heads"]
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv_rows, hidden), "v_proj": (kv_rows, hidden)}
    matrices = {f"self_attn.{name}.weight": shape for name, shape in {**shapes, "o_proj": (hidden, hidden)}.items()}
    matrices |= {f"mlp.{name}.weight": (ffn, hidden) for name in ("gate_proj", "up_proj")}
    matrices["mlp.down_proj.weight"] = (hidden, ffn)
    norms = [f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    return [
        {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in matrices.items()}
        | {name: 1.0 + 0.1 * torch.randn(hidden, generator=generator) for name in norms}
        for _ in range(num_layers)
    ]


def llama(layers: Sequence[dict[str, Tensor]]) -> Decoder:
    """A Llama of these layers between a random table and a random output layer, loaded from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(write_llama(Path(folder), layers), kernels()).model
    assert isinstance(model, Decoder)
    return model


def write_llama(folder: Path, layers: Sequence[dict[str, Tensor]]) -> Path:
    """Its checkpoint."""
    generator, vocab_size, hidden = torch.Generator().manual_seed(1), factory.VOCAB_SIZE, factory.SIZES["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": 0.15 * torch.randn(vocab_size, hidden, generator=generator),
        "lm_head.weight": 0.15 * torch.randn(vocab_size, hidden, generator=generator),
        "model.norm.weight": 1.0 + 0.1 * torch.randn(hidden, generator=generator),
    }
    tensors |= {f"model.layers.{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.items()}
    config = {**factory.SIZES, "model_type": "llama", "num_hidden_layers": len(layers), "max_position_embeddings": 128}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    factory.write_tokenizer(folder)
    return folder


def engine(model: Decoder, drafter: DrafterConfig = PLAIN, **options: Any) -> Engine:
    """An engine that always drafts as much as it may, unless `drafter` is adaptive."""
    options = {"block_size": 4, "max_model_len": MAX_LEN, **options}
    config = EngineConfig(model="tiny", drafter=drafter, **options)
    return assemble(config, model, kernels(), lambda name: model)


def groups(num: int, **params: Any) -> list[RequestGroup]:
    """Requests with random prompts of 1 to 40 tokens."""
    rng = random.Random(num)
    prompts = [[rng.randrange(3, factory.VOCAB_SIZE) for _ in range(rng.randint(1, 40))] for _ in range(num)]
    options = {"max_tokens": 20, "ignore_eos": True, **params}
    return [harness.request(i, p, SamplingParams(seed=i, **options), MAX_LEN) for i, p in enumerate(prompts)]


def run(made: Engine, wanted: Sequence[RequestGroup]) -> tuple[list[list[list[int]]], list[RequestStats]]:
    """Run fresh copies of the requests -> tokens by group and sample, stats of the first samples."""
    again = [harness.fresh(group) for group in wanted]
    tokens = harness.run(made, again)
    assert not any(health.num_errors for health in made.drafter.health.values()), "a drafter raised"
    return tokens, [group.output().outputs[0].stats for group in again]


def plain(model: Decoder, wanted: Sequence[RequestGroup]) -> list[list[list[int]]]:
    """Plain decoding, one request at a time."""
    return harness.alone(wanted, partial(engine, model), model)


def expected(num_layers: int, num: int, **params: Any) -> list[list[list[int]]]:
    """What `target(num_layers)` says to `groups(num, **params)`."""
    return plain(target(num_layers), groups(num, **params))


def num_accepted(stats: Sequence[RequestStats]) -> int:
    return sum(count.accepted for stat in stats for count in stat.drafters.values())


def inner(made: Engine) -> Any:
    """The drafter that a portfolio holds; the first of several."""
    assert isinstance(made.drafter, Portfolio)
    return made.drafter.members[0].drafter
