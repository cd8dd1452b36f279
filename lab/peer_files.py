"""GGUF files of a shape with random weights, for engines that read models from files.

Knows: the names and metadata llama.cpp and OpenVINO GenAI ask for, the block sizes of GGUF. Does not know: engines.
Every matrix has the one block type asked for (the quantizer's own files mix several), or the one llama.cpp's quantizer
takes instead where rows are not whole blocks of 256. The integers are random bytes,
only the scales inside a block are written on purpose, so that a file of a gigabyte takes seconds and every pass has
ordinary numbers. Norms and biases are float32. The vocabulary is made up: nothing is tokenized.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from forerun.bench.shapes import Shape
from forerun.errors import ConfigError

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
}
NARROW = {  # for rows that are not whole blocks of 256
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
DENSE = {"F32": np.float32, "F16": np.float16}


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
    writer = gguf.GGUFWriter(path, shape.config.model_type)
    _add_sizes(writer, shape, block_type)
    _add_vocabulary(writer, shape.config.vocab_size)
    random = np.random.default_rng(0)
    for name, dimensions in _tensors(shape):
        if len(dimensions) == 1:
            writer.add_tensor(name, (1 + 0.1 * random.standard_normal(dimensions)).astype(np.float32))
        else:
            stored = _type(block_type, dimensions[1])
            kind = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(name, _matrix(random, name, dimensions, stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_types(shape: Shape, block_type: str) -> set[str]:
    """The block types of the matrices in its file."""
    return {_type(block_type, dimensions[1]) for _, dimensions in _tensors(shape) if len(dimensions) == 2}


def _type(block_type: str, columns: int) -> str:
    """Of a matrix with rows of so many columns."""
    return NARROW.get(block_type, block_type) if columns % 256 else block_type


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


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes [outputs, inputs], or [size]."""
    config = shape.config
    hidden, ffn, heads = config.hidden_size, config.ffn_size, config.heads
    query, key = heads.num_q * heads.head_dim, heads.num_kv * heads.head_dim
    yield "token_embd.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        prefix = f"blk.{index}."
        yield prefix + "attn_norm.weight", (hidden,)
        for name, rows in (("attn_q", query), ("attn_k", key), ("attn_v", key)):
            yield f"{prefix}{name}.weight", (rows, hidden)
            if config.biases.qkv:
                yield f"{prefix}{name}.bias", (rows,)
        yield prefix + "attn_output.weight", (hidden, query)
        yield prefix + "ffn_norm.weight", (hidden,)
        yield prefix + "ffn_gate.weight", (ffn, hidden)
        yield prefix + "ffn_up.weight", (ffn, hidden)
        yield prefix + "ffn_down.weight", (hidden, ffn)
    yield "output_norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "output.weight", (config.vocab_size, hidden)


def _matrix(random: np.random.Generator, name: str, dimensions: tuple[int, ...], block_type: str) -> Any:
    """Entries of about 1 / sqrt(inputs), in the bytes of the file."""
    rows, columns = dimensions
    scale = 1 / math.sqrt(columns)
    if block_type in DENSE:
        values = (random.standard_normal(PERIOD) * scale).astype(DENSE[block_type])
        return _tiled(values, rows * columns).reshape(rows, columns)
    if block_type == "BF16":
        values = (random.standard_normal(PERIOD) * scale).astype(np.float32).view(np.uint32)
        return _tiled((values >> 16).astype(np.uint16), rows * columns).reshape(rows, columns).view(np.uint8)
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]
    if columns % size:
        raise ConfigError(
            f"{name} has {columns} inputs, which blocks of {size} ({block_type}) do not divide; choose a type with "
            "blocks of 32, such as Q4_0 or Q8_0"
        )
    return _blocks(random, block_type, rows * columns // size, num_bytes, scale).reshape(rows, -1)


def _blocks(random: np.random.Generator, block_type: str, count: int, num_bytes: int, scale: float) -> Bytes:
    blocks = random.integers(0, 256, (min(count, PERIOD), num_bytes), dtype=np.uint8)
    if block_type == "Q8_0":
        blocks[blocks == 0x80] = 0x81  # no quantizer writes -128, and ik_llama.cpp adds 127 to make bytes
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
