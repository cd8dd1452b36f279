"""Widened heads draft for a widened model what the small ones draft for the small model: token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.assemble import assemble
from forerun.bench.speed import WIDENED_FROM
from forerun.config import DrafterConfig, EngineConfig
from forerun.errors import ConfigError, UnsupportedError
from forerun.models.loader import load_model
from forerun.weights.checkpoint import Checkpoint
from tests.models import factory
from tests.support import harness, tiny
from widening.heads import WidenedTarget, widen_head
from widening.model import open_source, widen
from widening.sizes import choose_sizes

HIDDEN, VOCAB, FFN = factory.SIZES["hidden_size"], factory.VOCAB_SIZE, factory.SIZES["intermediate_size"]
DRAFT_VOCAB = 40
NUM_LAYERS = 7
EXACT = {"hidden_size": 128, "num_layers": 9, "ffn_size": 112, "num_q": 8, "num_kv": 4}
ROUNDED = {"hidden_size": 80, "num_layers": 7, "ffn_size": 60, "num_q": 10, "num_kv": 5}
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
}


class Source:
    """Random tensors, the same in every run."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * 0.3

    def norm(self, size: int = HIDDEN) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def layer(self, prefix: str, columns: int, norms: Sequence[str]) -> dict[str, Tensor]:
        rows = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
        found = {f"{prefix}.self_attn.{name}.weight": self.matrix(count, columns) for name, count in rows.items()}
        found[f"{prefix}.self_attn.o_proj.weight"] = self.matrix(HIDDEN, 32)
        found |= {f"{prefix}.mlp.{name}.weight": self.matrix(FFN, HIDDEN) for name in ("gate_proj", "up_proj")}
        found[f"{prefix}.mlp.down_proj.weight"] = self.matrix(HIDDEN, FFN)
        return found | {f"{prefix}.{name}.weight": self.norm() for name in norms}


def medusa(folder: Path, kind: str) -> Path:
    """`own`: an output layer a head; `shared`: the target's, some of its rows."""
    source, shared = Source(), kind == "shared"
    tensors = {f"blocks.{head}.layers.0.weight": source.matrix(HIDDEN, HIDDEN) for head in range(3)}
    tensors |= {f"blocks.{head}.layers.0.bias": source.matrix(HIDDEN) for head in range(3)}
    if shared:
        tensors["token_map"] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:DRAFT_VOCAB]
        tensors["lm_head.weight"] = load_file(folder.parent / "small" / "model.safetensors")["lm_head.weight"][
            tensors["token_map"]
        ]
    else:
        tensors |= {f"lm_heads.{head}.weight": source.matrix(VOCAB, HIDDEN) for head in range(3)}
    return write(
        folder,
        tensors,
        {
            "model_type": "medusa",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "truncated_vocab_size": DRAFT_VOCAB if shared else VOCAB,
            "num_heads": 3,
            "num_hidden_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": shared,
        },
    )


def eagle(folder: Path, kind: str) -> Path:
    """`flags`: EAGLE-3.1's norms."""
    source, flags = Source(), kind == "flags"
    chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCAB].sort().values
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = {
        "fc.weight": source.matrix(HIDDEN, 3 * HIDDEN),
        **source.layer("midlayer", 2 * HIDDEN, norms),
        "norm.weight": source.norm(),
        "lm_head.weight": source.matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": chosen - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True),
    }
    if flags:
        tensors |= {f"fc_norm.{index}.weight": source.norm() for index in range(3)}
    config = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    return write(folder, tensors, {**config, "fc_norm": flags, "norm_output": flags, "target_hidden_size": HIDDEN})


def mtp(folder: Path, kind: str) -> Path:
    source, prefix = Source(), "model.mtp_layers.0"
    norms = ["token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm"]
    tensors = source.layer(prefix, HIDDEN, norms)
    tensors[f"{prefix}.input_proj.weight"] = source.matrix(HIDDEN, 2 * HIDDEN)
    config = {**SHAPE, "model_type": "mimo_mtp", "num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    return write(folder, tensors, config)


def dflash(folder: Path, kind: str) -> Path:
    """Two layers, with blocks of 6, that read three states."""
    source = Source()
    tensors = {"fc.weight": source.matrix(HIDDEN, 3 * HIDDEN), "hidden_norm.weight": source.norm()}
    for index in range(2):
        prefix = f"layers.{index}"
        tensors |= source.layer(prefix, HIDDEN, ("input_layernorm", "post_attention_layernorm"))
        tensors |= {f"{prefix}.self_attn.{name}.weight": source.norm(8) for name in ("q_norm", "k_norm")}
    tensors["norm.weight"] = source.norm()
    config = {**SHAPE, "model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": NUM_LAYERS, "block_size": 6}
    return write(
        folder,
        tensors,
        {**config, "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 3, 6]}},
    )


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def small(folder: Path) -> Path:
    """The checkpoint of `tiny.target(NUM_LAYERS)`."""
    folder.mkdir()
    return tiny.write_llama(folder, tiny.random_layers(NUM_LAYERS))


def widened(folder: Path, out: Path, sizes: dict[str, Any]) -> WidenedTarget:
    source = open_source(folder)
    widen(source, choose_sizes(source[1], None, sizes), out, folder.name)
    return WidenedTarget.open(out)


def drafts(model_folder: Path, head: Path, name: str, width: int) -> list[Any]:
    """Every proposed tree, node by node, while two requests are served."""
    model = load_model(model_folder, tiny.kernels()).model
    drafter = DrafterConfig(name=name, model=str(head), max_draft_tokens=7, tree_width=width, adaptive=False)
    config = EngineConfig(model=str(model_folder), drafter=drafter, block_size=4, max_model_len=tiny.MAX_LEN)
    made, seen = assemble(config, model, tiny.kernels(), lambda _: model, model_folder), []
    propose = tiny.inner(made).propose

    def watched(wanted: Any) -> None:
        propose(wanted)
        seen.extend((list(d.tree.tokens), list(d.tree.parents)) for d in wanted)

    tiny.inner(made).propose = watched
    harness.run(made, [harness.fresh(group) for group in tiny.groups(2, temperature=0.0, max_tokens=12)])
    assert not any(health.num_errors for health in made.drafter.health.values())
    return seen


@pytest.mark.parametrize(("sizes", "width"), [(EXACT, 1), (ROUNDED, 3)])
@pytest.mark.parametrize(
    ("name", "make", "kind"),
    [
        ("medusa", medusa, "own"),
        ("medusa", medusa, "shared"),
        ("eagle", eagle, "plain"),
        ("eagle", eagle, "flags"),
        ("mtp", mtp, ""),
        ("dflash", dflash, ""),
    ],
)
def test_the_same_drafts(name: str, make: Any, kind: str, sizes: dict[str, Any], width: int, tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    head = make(tmp_path / "head", kind)
    target = widened(model, tmp_path / "large", sizes)
    report = widen_head(target, head, tmp_path / "large-head")
    assert report["hidden_size"] == sizes["hidden_size"]
    before = drafts(model, head, name, width)
    assert any(len(tokens) > 3 for tokens, _ in before)
    assert drafts(tmp_path / "large", tmp_path / "large-head", name, width) == before


def test_sizes_follow_the_target(tmp_path: Path) -> None:
    target = widened(small(tmp_path / "small"), tmp_path / "large", EXACT)
    widen_head(target, mtp(tmp_path / "mtp", ""), tmp_path / "out")
    made, config = Checkpoint.open(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    prefix = "model.mtp_layers.0."
    assert made.shape(prefix + "self_attn.q_proj.weight") == (64, 128)
    assert made.shape(prefix + "mlp.down_proj.weight") == (128, 112)
    assert config["num_key_value_heads"] == 4 and config["rms_norm_eps"] == pytest.approx(1e-5 / 4)
    assert config["num_hidden_layers"] == 9 and config[WIDENED_FROM]["hidden_size"] == HIDDEN
    assert bool((made.tensor(prefix + "mlp.up_proj.weight") != 0).all())
    assert not bool(made.tensor(prefix + "mlp.down_proj.weight")[HIDDEN:].any())


def test_a_shared_output_layer_stays_shared(tmp_path: Path) -> None:
    from forerun.models.decoder import Decoder
    from forerun.models.medusa_heads import load_medusa

    model = small(tmp_path / "small")
    head = medusa(tmp_path / "head", "own")
    tensors = {n: t for n, t in load_file(head / "model.safetensors").items() if not n.startswith("lm_heads")}
    tensors["lm_head.weight"] = load_file(model / "model.safetensors")["lm_head.weight"]
    config = {**json.loads((head / "config.json").read_text()), "original_lm_head": True}
    shared = write(tmp_path / "shared", tensors, config)
    widen_head(widened(model, tmp_path / "large", EXACT), shared, tmp_path / "out")
    loaded = load_model(tmp_path / "large", tiny.kernels()).model
    assert isinstance(loaded, Decoder)
    assert load_medusa(tmp_path / "out", loaded, tiny.kernels()).linears[-1] is loaded.parts.lm_head


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    with pytest.raises(ConfigError, match="no widened model"):
        WidenedTarget.open(model)
    target = widened(model, tmp_path / "large", EXACT)
    odd = dflash(tmp_path / "odd", "")
    tensors = load_file(odd / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    save_file(tensors, odd / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{3 * HIDDEN - 1} columns, which are not whole states of {HIDDEN}"):
        widen_head(target, odd, tmp_path / "out")
    other = write(tmp_path / "other", {"x.weight": torch.zeros(2)}, {"hidden_size": HIDDEN})
    with pytest.raises(UnsupportedError, match="no head that can be widened"):
        widen_head(target, other, tmp_path / "out")
    head = eagle(tmp_path / "head", "plain")
    tensors = load_file(head / "model.safetensors")
    extra = write(tmp_path / "extra", {**tensors, "more.weight": torch.zeros(2)}, dict(SHAPE))
    with pytest.raises(UnsupportedError, match=r"1 tensors that cannot be widened, e.g. more\.weight"):
        widen_head(target, extra, tmp_path / "out")
    wrong = write(tmp_path / "wrong", tensors, {**SHAPE, "hidden_size": 48})
    with pytest.raises(ConfigError, match="hidden_size 48"):
        widen_head(target, wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
