"""Writes tests/models/adapters: a small random model, and LoRA adapters of it as PEFT saves them.

Knows: PEFT. Does not know: forerun, whose tests read what is written here. Beside each adapter lie the
log-probabilities that PEFT's merged model gives a prompt's tokens, in float64 and in float32, whose distance is
float32's own error. Run in an environment with torch, transformers and peft 0.21.2 or later:

    tools/bin/python lab/adapter_fixtures.py tests/models/adapters
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

PROMPT = list(range(20, 43))
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear",
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.o_proj": 7}, "alpha_pattern": {"^model.*k_proj": 3},
    },
    "rslora": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ["gate_proj", "up_proj", "o_proj"]},
    "embedding": {"r": 5, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "layers": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
}  # fmt: skip


def random_weights(model: Any, spread: float, seed: int, only: str = "") -> None:
    """Fill the parameters whose names hold `only`; norms are around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name))


def logprobs(model: Any, dtype: torch.dtype) -> list[float]:
    """Of every token of PROMPT but the first."""
    with torch.no_grad():
        logits = model.to(dtype)(torch.tensor([PROMPT])).logits[0]
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])
    return [float(value) for value in chosen[:, 0].double()]


def main(folder: Path) -> None:
    """Write everything anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)  # files say where the model was
    base = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("llama", **SIZES), attn_implementation="eager"
    )
    random_weights(base, 0.15, 0)
    base.save_pretrained("base")
    for seed, (name, fields) in enumerate(ADAPTERS.items(), 1):
        own = transformers.AutoModelForCausalLM.from_pretrained("base", attn_implementation="eager")
        adapted = peft.get_peft_model(own, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        random_weights(adapted, 0.3, seed, only="lora_")
        adapted.save_pretrained(name)
        Path(name, "README.md").unlink(missing_ok=True)
        merged = adapted.double().merge_and_unload()
        exact, single = logprobs(merged, torch.float64), logprobs(merged, torch.float32)
        said = {"peft": peft.__version__, "torch": torch.__version__, "prompt": PROMPT, "exact": exact,
                "float32": single}  # fmt: skip
        Path(name, "expected.json").write_text(json.dumps(said) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
