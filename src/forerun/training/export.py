"""Writing a trained network as a Hugging Face Llama folder, and reading one back for training.

Knows the files of such a folder. Knows nothing of how the weights were trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from forerun.errors import CheckpointError, VocabularyError
from forerun.training.chat import END_OF_TEXT, TURN_END
from forerun.training.net import Net, NetConfig
from forerun.training.tokenizer import TOKENIZER_FILES


def llama_config(config: NetConfig, eos_token_id: int | None) -> dict[str, Any]:
    """Describes the network as a Llama `config.json` does."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.published(),
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }


def export_model(net: Net, tokenizer_dir: Path, folder: Path) -> None:
    """Writes weights (rounded to bfloat16), configuration and tokenizer of a model into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer_dir / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    write_json(folder / "config.json", llama_config(net.config, ends[0]))
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    weights = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in net.state_dict().items()}
    write_weights(folder, weights)


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Writes a model.safetensors; whoever reads meanwhile finds the one before, and so does who runs out of room."""
    temporary = folder / "model.tmp"
    try:
        temporary.write_bytes(save(weights, metadata={"format": "pt"}))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(folder / "model.safetensors")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path) -> Net:
    """Reads an exported folder back in float32; raises CheckpointError if it is not one."""
    try:
        table = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        net = Net(net_config(table))
        weights = load_file(folder / "model.safetensors")
        net.load_state_dict({name: weight.float() for name, weight in weights.items()})
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is no model exported by `forerun train lm`: {error}") from error
    return net.eval()


def net_config(table: dict[str, Any]) -> NetConfig:
    """Reads the shape from a `config.json`."""
    return NetConfig(
        vocab_size=table["vocab_size"],
        hidden_size=table["hidden_size"],
        num_layers=table["num_hidden_layers"],
        num_heads=table["num_attention_heads"],
        num_kv_heads=table["num_key_value_heads"],
        head_dim=table["head_dim"],
        ffn_size=table["intermediate_size"],
        max_positions=table["max_position_embeddings"],
        rope_theta=table["rope_theta"],
        norm_eps=table["rms_norm_eps"],
    )


def check_same_vocabulary(teacher: Net, vocab_size: int) -> None:
    """Refuses a student whose vocabulary is not its teacher's."""
    if teacher.config.vocab_size != vocab_size:
        raise VocabularyError(
            f"the teacher has {teacher.config.vocab_size} tokens, model.vocab_size is {vocab_size}; make them equal"
        )
