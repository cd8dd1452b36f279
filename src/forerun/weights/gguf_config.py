"""GGUF metadata as the config.json that the same model would have.

Knows: the keys that decoders share, and what they mean in Hugging Face's terms; those of mixtures of experts are in
`gguf_mixtures`, of recurrent layers in `gguf_recurrent`. Does not know: how a config is used. Unknown keys that may
change what a model computes are refused.
Source: llama.cpp gguf-py/gguf/constants.py, convert_hf_to_gguf.py and llama-model.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_dense import DENSE, MISTRAL3
from forerun.weights.gguf_file import GgufModel
from forerun.weights.gguf_gemma4 import GEMMA4_KEYS, gemma4_fields
from forerun.weights.gguf_layers import layer_sizes, layer_values
from forerun.weights.gguf_metadata import GGUFMetadata, share
from forerun.weights.gguf_mixtures import (
    DEEPSEEK32,
    DEEPSEEK32_KEYS,
    DEEPSEEK_KEYS,
    EXPERT_KEYS,
    GLM_KEYS,
    LLAMA4_KEYS,
    QWEN_KEYS,
    deepseek32_fields,
    deepseek_fields,
    glm_fields,
    gpt_oss_fields,
    latent_yarn,
    llama4_fields,
    minimax_fields,
    mixtral_fields,
    qwen_fields,
)
from forerun.weights.gguf_recurrent import RECURRENT
from forerun.weights.gguf_tokenizer import end_token_ids, special_token_id
from forerun.weights.gguf_windowed import MIMO, MIMO_KEYS, STEP, STEP_KEYS, mimo_fields, step_fields

# Architecture -> the keys it has beyond the common ones.
ARCHITECTURES = {
    "llama": EXPERT_KEYS, "qwen2": "", "qwen3": "", "phi3": "", "qwen2moe": QWEN_KEYS, "qwen3moe": QWEN_KEYS,
    "deepseek2": DEEPSEEK_KEYS, "gpt-oss": f"{EXPERT_KEYS} expert_feed_forward_length", "glm4moe": GLM_KEYS,
    "minimax-m2": f"{EXPERT_KEYS} expert_feed_forward_length expert_gating_func", "gemma4": GEMMA4_KEYS,
    "llama4": LLAMA4_KEYS, DEEPSEEK32: DEEPSEEK32_KEYS,
    STEP: STEP_KEYS, MIMO: MIMO_KEYS,
    **{arch: keys for arch, (keys, _) in {**DENSE, **RECURRENT}.items()},
}  # fmt: skip
MIXTURES = {
    "deepseek2": deepseek_fields,
    DEEPSEEK32: deepseek32_fields,
    "gpt-oss": gpt_oss_fields,
    "glm4moe": glm_fields,
    "minimax-m2": minimax_fields,
    "llama4": llama4_fields,
    "gemma4": gemma4_fields,
    STEP: step_fields,
    MIMO: mimo_fields,
}
DIFFERING = ("gemma4", STEP, MIMO)  # architectures whose layers may differ in sizes
_OTHER_NORMS = ("cohere2", "nemotron_h", "nemotron_h_moe")  # whose files name the epsilon of norms otherwise
LIMITED_BY = "_max_position_limited_by"  # in the config: why fewer positions can be used than the file says
NOT_TURNED = 1e30  # a divisor of frequencies
PHI3_WINDOWS = {4096: 2047, 131072: None}  # context -> window; None: longer than the context
MISTRAL_WINDOW = 4096
MISTRAL_REASON = (
    "a GGUF file with 32768 positions on a rope of base 10000 is Mistral 7B v0.1 or made from it, whose sliding window "
    "of 4096 the file does not record: load the model from its safetensors, or write the file with forerun quantize"
)
LLAMA3_SCALINGS = (  # factor, low, high, original: Llama 3.1 and 3.2, Step-3.5, Llama 4 Scout
    (8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.0, 1.0, 32.0, 131072), (16.0, 1.0, 1.0, 8192),
)  # fmt: skip
_READ = (
    "context_length embedding_length block_count feed_forward_length attention.head_count attention.head_count_kv "
    "attention.key_length attention.value_length attention.layer_norm_rms_epsilon attention.sliding_window "
    "rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor rope.scaling.attn_factor "
    "rope.scaling.original_context_length rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow"
)
# Keys without effect: vocab_size comes from the embedding table; the others do not change the arithmetic.
_INERT = "vocab_size tensor_data_layout rope.scaling.finetuned attention.causal"


def read_config(file: GgufModel) -> dict[str, Any]:
    """What config.json would say; raises CheckpointError or UnsupportedError naming the key."""
    metadata = GGUFMetadata(file.path, file.metadata)
    arch = _architecture(metadata)
    _refuse_unknown(metadata, arch)
    vocab_size, hidden = _table_shape(file)
    if metadata.integer(f"{arch}.embedding_length") != hidden:
        raise metadata.wrong(f"{arch}.embedding_length", f"{hidden}, the width of token_embd.weight")
    heads = _size(metadata, arch, "attention.head_count")
    head_dim = _head_dim(metadata, arch, hidden, heads)
    expert_size = metadata.get(f"{arch}.expert_feed_forward_length")  # where no layer is dense, the other key may lack
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _size(metadata, arch, "feed_forward_length", expert_size),
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(metadata, arch, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number(
            f"{arch}.attention.layer_norm_rms_epsilon", 0.0 if arch in _OTHER_NORMS else None
        ),
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": special_token_id(metadata, "bos", vocab_size),
        "eos_token_id": list(end_token_ids(metadata)),
        "dtype": _main_type(file),
    }
    config.update(_rope(file, metadata, arch, head_dim, config["max_position_embeddings"]))
    config.update(_of_family(file, metadata, arch))
    return config


def _architecture(metadata: GGUFMetadata) -> str:
    arch = metadata.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedError(
            f"{metadata.path} holds a model of the architecture {arch!r}; forerun runs GGUF files of "
            f"{', '.join(ARCHITECTURES)}; load another model, or this one from its safetensors"
        )
    return arch


def _refuse_unknown(metadata: GGUFMetadata, arch: str) -> None:
    known = {f"{arch}.{key}" for key in f"{_READ} {ARCHITECTURES[arch]} {_INERT}".split()}
    for key in metadata:
        value = metadata.get(key)
        if not key.startswith(f"{arch}.") or key in known or (np.isscalar(value) and not value):
            continue
        shown = " ".join(repr(value).split())[:60]
        raise UnsupportedError(
            f"{metadata.path} sets {repr(key[:80])[1:-1]} = {shown}, which forerun does not know for the architecture "
            f"{arch} and which may change what the model computes; load the model from its safetensors"
        )


def _table_shape(file: GgufModel) -> tuple[int, int]:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} has no tensor token_embd.weight; it holds a vocabulary or a part of a model"
        )
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2:
        raise CheckpointError(f"{file.path}: token_embd.weight has shape {list(shape)}, not two dimensions")
    return shape[0], shape[1]


def _head_dim(metadata: GGUFMetadata, arch: str, hidden: int, heads: int) -> int:
    if heads < 1:
        raise metadata.wrong(f"{arch}.attention.head_count", "at least 1")
    if arch in ("deepseek2", DEEPSEEK32, "kimi-linear"):  # the rotated part of a head
        return metadata.integer(f"{arch}.rope.dimension_count")
    head_dim = metadata.integer(f"{arch}.attention.key_length", hidden // heads)
    if head_dim < 1 or (arch != MIMO and metadata.integer(f"{arch}.attention.value_length", head_dim) != head_dim):
        raise UnsupportedError(
            f"{metadata.path}: keys of {head_dim} and values of another size; supported are heads of one size"
        )
    return head_dim


def _size(metadata: GGUFMetadata, arch: str, key: str, default: int | None = None) -> int:
    """A size of layers, which only some layers of a recurrent model may have; the first's where they may differ."""
    if arch in DIFFERING:
        return next(iter(layer_values(metadata, arch, key, default)), 0)
    sizes = layer_sizes(metadata, arch, key, default)
    if arch not in RECURRENT and len(set(sizes)) > 1:
        raise metadata.wrong(f"{arch}.{key}", "the same in all layers")
    return max(sizes, default=0)


def _main_type(file: GgufModel) -> str:
    """The tensor type that takes the most bytes."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.layout.name] = sizes.get(tensor.layout.name, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name])


def _of_family(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    """Fields that only some families have."""
    if arch in MIXTURES:
        return MIXTURES[arch](file, metadata)
    if arch in DENSE:
        return DENSE[arch][1](file, metadata)
    window = metadata.integer(f"{arch}.attention.sliding_window", 0)
    if arch == "phi3":
        return {"sliding_window": window or _phi3_window(metadata)}
    if window and (arch in RECURRENT or arch.startswith("qwen")):
        raise UnsupportedError(
            f"{metadata.path} sets {arch}.attention.sliding_window = {window} without saying in which layers; load the "
            "model from its safetensors"
        )
    if arch in RECURRENT:
        return RECURRENT[arch][1](file, metadata)
    if arch.startswith("qwen"):
        return _of_qwen(file, metadata, arch)
    if metadata.get("llama.expert_count"):
        return {**mixtral_fields(file, metadata), "sliding_window": window or None}
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {**{field: name in file.tensors for field, name in biases.items()}, **_unrecorded_window(metadata)}


def _of_qwen(file: GgufModel, metadata: GGUFMetadata, arch: str) -> dict[str, Any]:
    if arch.endswith("moe"):
        return qwen_fields(file, metadata, arch)
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors} if arch == "qwen3" else {}


def _phi3_window(metadata: GGUFMetadata) -> int | None:
    """The window of a file without one; files older than the key are recognised by context, as in llama.cpp."""
    if "phi3.attention.sliding_window" in metadata:
        return None
    context = metadata.integer("phi3.context_length")
    if context not in PHI3_WINDOWS:
        raise UnsupportedError(
            f"{metadata.path} lacks the key phi3.attention.sliding_window, and no Phi-3 of {context} positions is "
            "known; convert the model again with a current llama.cpp"
        )
    return PHI3_WINDOWS[context]


def _unrecorded_window(metadata: GGUFMetadata) -> dict[str, Any]:
    """A limit for files like Mistral 7B v0.1, whose sliding window of 4096 llama.cpp's converter leaves out.

    They are recognised by 32,768 positions and a rope base of 10,000. Up to 4096 positions the window has no effect.
    """
    context, theta = metadata.integer("llama.context_length"), metadata.number("llama.rope.freq_base", 10000.0)
    if (context, theta) != (32768, 10000.0) or metadata.get("llama.rope.scaling.type"):
        return {}
    return {"max_position_embeddings": MISTRAL_WINDOW, LIMITED_BY: MISTRAL_REASON}


def _rope(file: GgufModel, metadata: GGUFMetadata, arch: str, head_dim: int, positions: int) -> dict[str, Any]:
    theta = _positive(metadata, f"{arch}.rope.freq_base", 10000.0)
    rotary_dim = metadata.integer(f"{arch}.rope.dimension_count", head_dim // 2 if arch == STEP else head_dim)
    fields: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": share(rotary_dim, head_dim)}
    kind = metadata.text(f"{arch}.rope.scaling.type", "none")
    scaling = _factors(file, metadata, arch, theta, rotary_dim, positions) or _scaling(metadata, arch, kind, positions)
    if scaling:
        fields["rope_scaling"] = scaling
    if scaling.get("rope_type") == "longrope":
        fields["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return fields


def _positive(metadata: GGUFMetadata, key: str, default: float) -> float:
    value = metadata.number(key, default)
    if value <= 0:
        raise metadata.wrong(key, "above 0")
    return value


def _scaling(metadata: GGUFMetadata, arch: str, kind: str, positions: int) -> dict[str, Any]:
    """rope_scaling for the kinds that a formula defines."""
    prefix = f"{arch}.rope.scaling"
    factor = _positive(metadata, f"{prefix}.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(
            f"{metadata.path} has a rope scaling of type {kind!r} without tensors of its factors; supported are none, "
            "linear and yarn, and longrope with its factors"
        )
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": metadata.integer(f"{prefix}.original_context_length", positions),
        "beta_fast": metadata.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(f"{prefix}.yarn_beta_slow", 1.0),
    }
    if arch in ("deepseek2", DEEPSEEK32):
        return {**scaling, **latent_yarn(metadata, arch)}
    if arch == MISTRAL3 and (mscale := metadata.number(f"{prefix}.yarn_log_multiplier", 0.0)):
        return {**scaling, "mscale": 1.0, "mscale_all_dim": mscale}
    if arch == "olmo2":  # whose files hold the whole amplitude, older ones under the second key
        keys = (f"{prefix}.yarn_attn_factor", f"{prefix}.attn_factor")
        whole = [metadata.number(key) for key in keys if key in metadata]
        return {**scaling, "attention_factor": whole[0]} if whole else scaling
    if arch == "gpt-oss":  # which was trained without truncation; no key says so
        scaling["truncate"] = False
    extra = metadata.number(f"{prefix}.attn_factor", 1.0)
    if extra != 1.0:  # ggml multiplies it by yarn's own factor
        scaling["attention_factor"] = extra * (1.0 + 0.1 * math.log(factor))
    return scaling


def _factors(
    file: GgufModel, metadata: GGUFMetadata, arch: str, theta: float, rotary_dim: int, positions: int
) -> dict[str, Any]:
    """rope_scaling for files that store a divisor for every frequency, {} for others."""
    if "rope_freqs.weight" in file.tensors:
        num = file.tensors["rope_freqs.weight"].shape[0] if arch == STEP else rotary_dim // 2  # more than are turned
        found = _vector(file, "rope_freqs.weight", num)[: rotary_dim // 2]
        if arch == "gemma4":
            return _as_proportional(file, found)
        return _as_llama3(found, theta, rotary_dim) or _as_longrope(found, positions, 1.0)
    if "rope_factors_short.weight" in file.tensors:
        found = _vector(file, "rope_factors_short.weight", rotary_dim // 2)
        original = metadata.integer(f"{arch}.rope.scaling.original_context_length", positions)
        stretch = positions / max(original, 2)
        natural = math.sqrt(1 + math.log(stretch) / math.log(max(original, 2))) if stretch > 1 else 1.0
        return _as_longrope(found, original, metadata.number(f"{arch}.rope.scaling.attn_factor", natural))
    return {}


def _as_longrope(factors: np.ndarray[Any, Any], original: int, amplitude: float) -> dict[str, Any]:
    values = [float(value) for value in factors]
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "factor": 1.0,
        "attention_factor": amplitude,
        "original_max_position_embeddings": original,
    }


def _as_proportional(file: GgufModel, factors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The first frequencies are used, the others divided by so much that nothing turns."""
    num_turned = int((factors == 1.0).sum())
    if not (factors[:num_turned] == 1.0).all() or not (factors[num_turned:] >= NOT_TURNED).all():
        raise UnsupportedError(
            f"{file.path}: rope_freqs.weight holds other divisors than 1 and, for the last frequencies, {NOT_TURNED}; "
            "load the model from its safetensors"
        )
    return {"rope_type": "proportional", "partial_rotary_factor": share(2 * num_turned, 2 * len(factors))}


def _as_llama3(factors: np.ndarray[Any, Any], theta: float, rotary_dim: int) -> dict[str, Any]:
    """Llama 3's own scaling if these are its factors, so that frequencies get the same bits as from its config.json."""
    for factor, low, high, original in LLAMA3_SCALINGS:
        expected = llama3_factors(theta, rotary_dim, factor, low, high, original)
        if np.allclose(factors, expected, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {}


def llama3_factors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray[Any, Any]:
    """Divisors of the frequencies: wavelengths beyond original / low are stretched by factor, a ramp below."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = original / wavelengths
    ramp = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns >= low
    return np.asarray(1 / ((1 - ramp) / factor + ramp))


def _vector(file: GgufModel, name: str, length: int) -> np.ndarray[Any, Any]:
    tensor = file.tensors[name]
    if tensor.layout.name != "F32" or tensor.shape != (length,):
        raise CheckpointError(
            f"{file.path}: {name} is {tensor.layout.name} {list(tensor.shape)}, not F32 [{length}]; convert the model "
            "again"
        )
    values = file.rows(name).numpy().copy().view("<f4").reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise CheckpointError(f"{file.path}: {name} has entries that are not positive; convert the model again")
    return values
