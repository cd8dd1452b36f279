"""The text of Step-3.7 in transformers, which has no class for it alone, in files as Step-3.5 is published."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NAMES = (  # of transformers, and as published
    ("mlp.gate.weight", "moe.gate.weight"),
    ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
    ("mlp.experts.down_proj", "moe.down_proj.weight"),
    ("mlp.shared_experts.", "share_expert."),
)
GATE_UP = "mlp.experts.gate_up_proj"


class StepForCausalLM(nn.Module):
    """Step3p7TextModel and an output layer."""

    def __init__(self, raw: dict[str, Any]) -> None:
        """`raw`: a config.json with the published fields."""
        from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        super().__init__()
        self.raw = raw
        self.config = Step3p7TextConfig(**{name: value for name, value in raw.items() if name != "model_type"})
        self.config._attn_implementation = "eager"
        self.model = Step3p7TextModel(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(token_ids, use_cache=False).last_hidden_state))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.raw), encoding="utf-8")
        save_file(published(self.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder: Path, dtype: torch.dtype) -> StepForCausalLM:
        """float64 is the exact arithmetic on the stored weights; buffers keep their precision otherwise."""
        model = cls(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(_in_transformers(load_file(folder / "model.safetensors")), strict=False)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return (model.double() if dtype == torch.float64 else model).eval().requires_grad_(False)


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of published files: gates and ups of experts are two tensors."""
    found = {}
    for name, tensor in tensors.items():
        for theirs, own in NAMES:
            name = name.replace(theirs, own)
        parts = {name: tensor}
        if name.endswith(GATE_UP):
            halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            parts = {name.replace(GATE_UP, f"moe.{part}_proj.weight"): half for part, half in halves}
        found |= {own: part.contiguous().clone() for own, part in parts.items()}
    return found


def _in_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*)moe\.gate_proj\.weight", name):
            found[match[1] + GATE_UP] = torch.cat([tensor, tensors[f"{match[1]}moe.up_proj.weight"]], dim=1)
            continue
        for theirs, own in NAMES:
            name = name.replace(own, theirs)
        found[name] = tensor
    return found
