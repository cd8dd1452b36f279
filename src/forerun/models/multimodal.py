"""Multimodal models, of which forerun runs the text part.

Knows: which model types wrap which text models. Does not know: images, how tensors are named (`Checkpoint.text_part`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WRAPPERS = {  # model type -> that of the text part if it has none
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "step3p7": "step3p5",
}
PART_OF = "_text_part_of"  # in the config: the model type of the whole
_OF_THE_WHOLE = ("quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype", "torch_dtype")


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json would say of the text part alone; for a model of text, `raw` itself."""
    kind, part = raw.get("model_type"), raw.get("text_config")
    if kind not in WRAPPERS or not isinstance(part, Mapping):
        return dict(raw)
    whole = {name: raw[name] for name in _OF_THE_WHOLE if raw.get(name) is not None}
    return {"model_type": WRAPPERS[kind], **part, **whole, PART_OF: kind}
