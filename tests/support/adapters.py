"""Small random LoRA adapters in PEFT's files, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."


def matrices(base: Path) -> dict[str, tuple[int, int]]:
    """The shapes of the dense matrices of a checkpoint's modules, by module."""
    tensors = load_file(base / "model.safetensors")
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2
    }


def write_adapter(
    folder: Path, base: Path, modules: Iterable[str], seed: int = 0, rank: int = 4, ranks: Mapping[str, int] = {},
    dtype: torch.dtype = torch.float32, **fields: Any,
) -> Path:  # fmt: skip
    """Adapt the modules whose names end so, with ranks of `ranks` where a name ends so; `fields` of the config."""
    generator, tensors, shapes = torch.Generator().manual_seed(seed), dict[str, Tensor](), matrices(base)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype)

    for module, (rows, columns) in shapes.items():
        if module.endswith(tuple(modules)):
            own = next((r for end, r in ranks.items() if module.endswith(end)), rank)
            if "embed_tokens" in module:
                tensors[f"{PREFIX}{module}.lora_embedding_A"] = random(own, rows)
                tensors[f"{PREFIX}{module}.lora_embedding_B"] = random(columns, own)
            else:
                tensors[f"{PREFIX}{module}.lora_A.weight"] = random(own, columns)
                tensors[f"{PREFIX}{module}.lora_B.weight"] = random(rows, own)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    write_config(folder, **{"r": rank, "target_modules": list(modules), "rank_pattern": dict(ranks), **fields})
    return folder


def write_config(folder: Path, **fields: Any) -> None:
    """The fields PEFT writes, changed by `fields`."""
    usual = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False,
        "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True, "lora_dropout": 0.0,
        "fan_in_fan_out": False, "modules_to_save": None, "target_modules": None, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **fields}), encoding="utf-8")


def merged(folder: Path, base: Path, adapter: Path, scales: Mapping[str, float]) -> Path:
    """A copy of the checkpoint with scale * B A added to every adapted matrix; "" is the scale of all others."""
    tensors, low = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in low if "lora_A" in name or "lora_embedding_A" in name]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight").removesuffix(".lora_embedding_A")
        down, up = (
            low[name].double(),
            low[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")].double(),
        )
        scale = next(scale for end, scale in scales.items() if module.endswith(end))
        change = scale * (up @ down)
        tensor = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (tensor.double() + (change.T if "embedding" in name else change)).to(tensor.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
