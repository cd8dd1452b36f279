"""GGUF files of a shape with random weights, for engines that read models from files.

Knows: the names and metadata llama.cpp and OpenVINO GenAI ask for, the block sizes of GGUF. Does not know: engines.
Every matrix has the one block type asked for (the quantizer's own files mix several), or the one llama.cpp's quantizer
takes instead where rows are not whole blocks of 256; beside experts in MXFP4 all others are Q8_0, as gpt-oss is
published. The integers are random bytes,
only the scales inside a block are written on purpose, so that a file of a gigabyte takes seconds and every pass has
ordinary numbers. Norms, biases, routers and convolutions are float32. The vocabulary is made up: nothing is tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from forerun.bench.shapes import Shape
from forerun.errors import ConfigError
from forerun.models.config import ModelConfig
from forerun.models.recurrent_dims import DeltaDims

Bytes = npt.NDArray[np.uint8]
PERIOD = 100_003  # blocks; a prime, so that no two rows begin alike
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
# Where the float16 numbers of a block lie, and the spread of the integers each multiplies: scale, then minimum.
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 74),),
    "Q4_0": ((0, 4.6),),
    "Q4_1": ((0, 4.6), (2, 1)),
    "Q5_0": ((0, 9.2),),
    "Q5_1": ((0, 9.2), (2, 1)),
    "Q2_K": ((80, 8), (82, 8)),
    "Q3_K": ((108, 40),),
    "Q4_K": ((0, 150), (2, 36)),
    "Q5_K": ((0, 300), (2, 36)),
    "Q6_K": ((208, 1400),),
    "IQ4_NL": ((0, 70),),
    "IQ4_XS": ((0, 1300),),
    "MXFP4": (),  # a power of two, see `_blocks`
}
NARROW = {  # for rows that are not whole blocks of 256
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
DENSE = {"F32": np.float32, "F16": np.float16}
MXFP4_SPREAD, MXFP4_BIAS = 5.9, 128  # of the doubled codes, of the exponents


class OfFamily(NamedTuple):
    """What llama.cpp calls a family, and the norms of its layers."""

    architecture: str
    norms: tuple[str, ...] = ("attn_norm", "post_attention_norm")


FAMILIES = {
    "qwen3_5_text": OfFamily("qwen35"),
    "gpt_oss": OfFamily("gpt-oss"),
    "gemma3_text": OfFamily("gemma3", ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")),
}
Sizes = tuple[int, ...]  # of a tensor, outputs before inputs


def model_file(shape: Shape, block_type: str, folder: Path) -> Path:
    """The file of that block type in `folder`, written if it is not there; raises as `write_gguf`."""
    file = folder / block_type / "model.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(shape, block_type, file)
    return file


def write_gguf(shape: Shape, block_type: str, path: Path) -> Path:
    """Write the file; raises ConfigError for types and widths GGUF cannot have."""
    if block_type not in SCALES and block_type not in (*DENSE, "BF16"):
        raise ConfigError(f"no random GGUF of type {block_type}; choose {', '.join((*DENSE, 'BF16', *SCALES))}")
    writer = gguf.GGUFWriter(path, _family(shape.config).architecture)
    _add_sizes(writer, shape, block_type)
    _add_special(writer, shape)
    _add_vocabulary(writer, shape.config.vocab_size)
    random = np.random.default_rng(0)
    for name, dimensions in _tensors(shape):
        if _is_float(name, dimensions):
            writer.add_tensor(name, _floats(random, name, dimensions))
        else:
            stored = _type(block_type, dimensions)
            kind = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(name, _matrix(random, name, dimensions, stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_types(shape: Shape, block_type: str) -> set[str]:
    """The block types of the matrices in its file."""
    return {_type(block_type, sizes) for name, sizes in _tensors(shape) if not _is_float(name, sizes)}


def _type(block_type: str, dimensions: Sizes) -> str:
    """Of a matrix of that size, or of the experts' matrices together."""
    if block_type == "MXFP4" and len(dimensions) == 2:
        return "Q8_0"
    return NARROW.get(block_type, block_type) if dimensions[-1] % 256 else block_type


def _is_float(name: str, dimensions: Sizes) -> bool:
    """Whether a tensor is one that quantizers leave in float32."""
    return len(dimensions) == 1 or name.endswith((".bias", ".ffn_gate_inp.weight", ".ssm_conv1d.weight"))


def _floats(random: np.random.Generator, name: str, dimensions: Sizes) -> npt.NDArray[np.float32]:
    """Vectors around 1 (-1 where a state decays by them), matrices that keep the size of what they multiply."""
    values = random.standard_normal(dimensions).astype(np.float32)
    if len(dimensions) > 1:
        return values / np.float32(math.sqrt(dimensions[-1]))
    return (-1 if name.endswith(".ssm_a") else 1) + np.float32(0.1) * values


def _family(config: ModelConfig) -> OfFamily:
    return FAMILIES.get(config.model_type, OfFamily(config.model_type, ("attn_norm", "ffn_norm")))


def _add_sizes(writer: Any, shape: Shape, block_type: str) -> None:
    config = shape.config
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.heads.num_q)
    writer.add_head_count_kv(config.heads.num_kv)
    writer.add_key_length(config.heads.head_dim)
    writer.add_value_length(config.heads.head_dim)
    writer.add_rope_dimension_count(config.heads.rotary_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(FILE_TYPES.get(block_type, int(gguf.LlamaFileType.ALL_F32)))


def _add_vocabulary(writer: Any, size: int) -> None:
    """Bytes as GPT-2 spells them, one merge, and made-up words."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))][:256]
    words = [*letters, "ab", *(f"<w{index}>" for index in range(257, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words[:size])
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_pad_token_id(size - 1)


def _add_special(writer: Any, shape: Shape) -> None:
    """The keys of what Llama does not have."""
    config, rope = shape.config, shape.config.rope
    if any(config.windows):
        writer.add_sliding_window(max(config.windows))
    if rope.kind != "llama3" and rope.factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.kind))
        writer.add_rope_scaling_factor(rope.factor)
    if rope.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position)
    if config.experts is not None:
        writer.add_expert_count(config.experts.routing.num_experts)
        writer.add_expert_used_count(config.experts.routing.top_k)
        writer.add_expert_feed_forward_length(config.experts.ffn_size)
    if isinstance(config.recurrent, DeltaDims):
        heads = config.recurrent.heads
        writer.add_full_attention_interval(shape.raw["full_attention_interval"])
        writer.add_ssm_conv_kernel(config.recurrent.taps)
        writer.add_ssm_inner_size(heads.values_size)
        writer.add_ssm_state_size(heads.key_dim)
        writer.add_ssm_time_step_rank(heads.num_values)
        writer.add_ssm_group_count(heads.num_keys)
        third = rope.rotary_dim // 6  # of the rotated pairs, for time, height and width
        writer.add_rope_dimension_sections([rope.rotary_dim // 2 - 2 * third, third, third, 0])


def _tensors(shape: Shape) -> Iterator[tuple[str, Sizes]]:
    """Names and sizes [outputs, inputs], [experts, outputs, inputs] or [size]."""
    config = shape.config
    yield "token_embd.weight", (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        of_layer: dict[str, Sizes] = {f"{name}.weight": (config.hidden_size,) for name in _family(config).norms}
        if config.is_recurrent(index):
            assert isinstance(config.recurrent, DeltaDims), config.recurrent
            of_layer |= _delta_net(config.recurrent, config.hidden_size)
        else:
            of_layer |= _attention(config)
        of_layer |= _feed_forward(config) if config.experts is None else _experts(config)
        for name, sizes in of_layer.items():
            yield f"blk.{index}.{name}", sizes
    yield "output_norm.weight", (config.hidden_size,)
    if not config.tie_embeddings:
        yield "output.weight", (config.vocab_size, config.hidden_size)


def _attention(config: ModelConfig) -> dict[str, Sizes]:
    heads, hidden = config.heads, config.hidden_size
    query, key = heads.num_q * heads.head_dim, heads.num_kv * heads.head_dim
    found: dict[str, Sizes] = {}
    for name, rows in (("attn_q", query * (1 + config.gated_attention)), ("attn_k", key), ("attn_v", key)):
        found[f"{name}.weight"] = (rows, hidden)
        if config.biases.qkv:
            found[f"{name}.bias"] = (rows,)
    if config.qk_norm == "head":
        found |= {f"attn_{part}_norm.weight": (heads.head_dim,) for part in "qk"}
    if config.shapes[0].has_sinks:
        found["attn_sinks.weight"] = (heads.num_q,)
    if config.biases.out:
        found["attn_output.bias"] = (hidden,)
    return {**found, "attn_output.weight": (hidden, query)}


def _delta_net(dims: DeltaDims, hidden: int) -> dict[str, Sizes]:
    heads = dims.heads
    return {
        "attn_qkv.weight": (heads.row_size, hidden),
        "attn_gate.weight": (heads.values_size, hidden),
        "ssm_conv1d.weight": (heads.row_size, dims.taps),
        "ssm_dt.bias": (heads.num_values,),
        "ssm_a": (heads.num_values,),
        "ssm_beta.weight": (heads.num_values, hidden),
        "ssm_alpha.weight": (heads.num_values, hidden),
        "ssm_norm.weight": (heads.value_dim,),
        "ssm_out.weight": (hidden, heads.values_size),
    }


def _feed_forward(config: ModelConfig) -> dict[str, Sizes]:
    hidden, ffn = config.hidden_size, config.ffn_size
    return {"ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden), "ffn_down.weight": (hidden, ffn)}


def _experts(config: ModelConfig) -> dict[str, Sizes]:
    assert config.experts is not None
    count, ffn, hidden = config.experts.routing.num_experts, config.experts.ffn_size, config.hidden_size
    found: dict[str, Sizes] = {"ffn_gate_inp.weight": (count, hidden)}
    for part, sizes in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        found[f"ffn_{part}_exps.weight"] = (count, *sizes)
        if config.experts.biases:
            found[f"ffn_{part}_exps.bias"] = (count, sizes[0])
    return {**found, "ffn_gate_inp.bias": (count,)} if config.experts.biases else found


def _matrix(random: np.random.Generator, name: str, dimensions: Sizes, block_type: str) -> Any:
    """Entries of about 1 / sqrt(inputs), in the bytes of the file."""
    rows, columns = math.prod(dimensions[:-1]), dimensions[-1]
    scale = 1 / math.sqrt(columns)
    if block_type in DENSE:
        values = (random.standard_normal(PERIOD) * scale).astype(DENSE[block_type])
        return _tiled(values, rows * columns).reshape(dimensions)
    if block_type == "BF16":
        values = (random.standard_normal(PERIOD) * scale).astype(np.float32).view(np.uint32)
        return _tiled((values >> 16).astype(np.uint16), rows * columns).reshape(dimensions).view(np.uint8)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    if columns % size:
        raise ConfigError(
            f"{name} has {columns} inputs, which blocks of {size} ({block_type}) do not divide; choose a type with "
            "blocks of 32, such as Q4_0 or Q8_0"
        )
    return _blocks(random, block_type, rows * columns // size, num_bytes, scale).reshape(*dimensions[:-1], -1)


def _blocks(random: np.random.Generator, block_type: str, count: int, num_bytes: int, scale: float) -> Bytes:
    blocks = random.integers(0, 256, (min(count, PERIOD), num_bytes), dtype=np.uint8)
    if block_type == "Q8_0":
        blocks[blocks == 0x80] = 0x81  # no quantizer writes -128, and ik_llama.cpp adds 127 to make bytes
    if block_type == "MXFP4":
        exponents = np.log2(scale / MXFP4_SPREAD * random.uniform(0.5, 1.5, len(blocks)))
        blocks[:, 0] = np.round(exponents) + MXFP4_BIAS
    for place, spread in SCALES[block_type]:
        sizes = scale / spread * random.uniform(0.5, 1.5, len(blocks))
        signs = random.choice((-1, 1), len(blocks))  # integers of a block need not have mean 0
        halves = (sizes * signs).astype(np.float16)
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    return _tiled(blocks, count)


def _tiled(values: Any, count: int) -> Any:
    """The values over and over, `count` of them."""
    repeats = -(-count // len(values))
    return np.concatenate([values] * repeats)[:count] if repeats > 1 else values[:count]
