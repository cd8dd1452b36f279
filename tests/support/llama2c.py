"""Converting llama2.c checkpoints (karpathy/llama2.c) to a Hugging Face folder.

Knows: the binary layouts v0 (float32, no magic), v1 (float32) and v2 (int8 groups), and that llama2.c rotates
neighbouring pairs where Hugging Face rotates halves. Also its vocabularies (tok*.bin): the pieces and
scores of a sentencepiece model. Source: llama2.c export.py, tokenizer.py, run.c, runq.c.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.safetensors_write import write_tensors
from forerun.weights.sentencepiece import PieceType, PieceVocabulary, build_tokenizer, read_sentencepiece

MAGIC = 0x616B3432  # "ak42"
HEADER_BYTES = 256  # of v1 and v2
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
BOS_ID, EOS_ID = 1, 2
SPECIAL_NAMES = ("<unk>", "<s>", "</s>")
BYTE_NAMES = tuple(f"<0x{byte:02X}>" for byte in range(256))


@dataclass(frozen=True, slots=True)
class Shape:
    """The seven sizes of the header, and how the file stores weights."""

    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position: int
    tied: bool
    version: int
    group_size: int = 0  # of v2

    @property
    def head_dim(self) -> int:
        """Entries of one head."""
        return self.hidden_size // self.num_heads


class Reader:
    """Walks through the bytes of a file; raises CheckpointError when they run out."""

    def __init__(self, path: Path) -> None:
        """Read the whole file."""
        try:
            self._raw = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        self._path = path
        self._at = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        """The next values in `struct` notation, little-endian without padding."""
        return struct.unpack("<" + layout, self._take(struct.calcsize("<" + layout)))

    def floats(self, *shape: int) -> Tensor:
        """The next float32 tensor."""
        return self._tensor(torch.float32, 4, shape)

    def int8(self, count: int) -> Tensor:
        """The next signed bytes -> [count]."""
        return self._tensor(torch.int8, 1, (count,))

    def seek(self, position: int) -> None:
        """Go on at `position`."""
        self._at = position

    @property
    def rest(self) -> int:
        """Bytes not read yet."""
        return len(self._raw) - self._at

    def _tensor(self, dtype: torch.dtype, width: int, shape: tuple[int, ...]) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        raw = bytearray(self._take(count * width))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)

    def _take(self, count: int) -> bytes:
        if count < 1 or count > self.rest:
            raise CheckpointError(
                f"{self._path} is damaged: {count} bytes expected at position {self._at}, {self.rest} are left; copy "
                "the file again"
            )
        self._at += count
        return self._raw[self._at - count : self._at]


def convert_llama2c(bin_path: Path, tokenizer_bin: Path, out_dir: Path) -> Path:
    """Write config.json, model.safetensors and tokenizer.json for a llama2.c model; returns `out_dir`.

    tokenizer_bin is llama2.c's tok*.bin (or a sentencepiece .model). Raises CheckpointError, UnsupportedError.
    """
    reader = Reader(bin_path)
    shape = read_shape(reader, bin_path)
    tensors = dict(_tensors(reader, shape))
    vocabulary = read_vocabulary(tokenizer_bin, shape.vocab_size)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_tensors(out_dir / "model.safetensors", tensors)
    build_tokenizer(vocabulary, start=SPECIAL_NAMES[BOS_ID]).save(str(out_dir / "tokenizer.json"))
    for name, value in _json_files(shape).items():
        (out_dir / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return out_dir


def read_shape(reader: Reader, path: Path) -> Shape:
    """The header; leaves the reader at the first weight."""
    (magic,) = reader.unpack("I")
    if magic != MAGIC:
        reader.seek(0)
        sizes = list(reader.unpack("7i"))
        tied, sizes[5] = sizes[5] > 0, abs(sizes[5])  # a negative vocabulary: an output matrix of its own
        return _checked(_shape(sizes, tied, version=0), path)
    (version,) = reader.unpack("i")
    if version not in (1, 2):
        raise UnsupportedError(f"{path} is llama2.c version {version}; supported are 0 (no magic), 1 and 2")
    *sizes, tied = reader.unpack("7iB")
    group_size = reader.unpack("i")[0] if version == 2 else 0
    reader.seek(HEADER_BYTES)
    return _checked(_shape(sizes, bool(tied), version, group_size), path)


def _shape(sizes: Sequence[int], tied: bool, version: int, group_size: int = 0) -> Shape:
    hidden, ffn, layers, heads, kv_heads, vocab, positions = sizes
    return Shape(hidden, ffn, layers, heads, kv_heads, vocab, positions, tied, version, group_size)


def _checked(shape: Shape, path: Path) -> Shape:
    sizes = (
        shape.hidden_size, shape.ffn_size, shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.vocab_size,
        shape.max_position,
    )  # fmt: skip
    divides = min(sizes) > 0 and shape.hidden_size % shape.num_heads == 0 == shape.num_heads % shape.num_kv_heads
    if not divides or max(sizes) > 2**24 or (shape.version == 2 and shape.group_size < 1):
        raise CheckpointError(f"{path} is no llama2.c checkpoint: its header says {sizes}; give a model .bin file")
    return shape


def _tensors(reader: Reader, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and tensor, in the file's order."""
    for kind in _order(shape):
        yield from _KINDS[kind](reader, shape)


def _order(shape: Shape) -> list[str]:
    head = [] if shape.tied else ["lm_head"]
    matrices = ["q", "k", "v", "o"]
    if shape.version == 0:
        return ["embedding", "attention_norm", *matrices, "mlp_norm", "gate", "down", "up", "norm", "rope", *head]
    return ["attention_norm", "mlp_norm", "norm", "embedding", *matrices, "gate", "down", "up", *head]


def _matrix(reader: Reader, shape: Shape, rows: int, columns: int) -> Tensor:
    """A weight matrix -> [rows, columns] float32, dequantized for v2 (int8 values, then one scale a group)."""
    if shape.version != 2:
        return reader.floats(rows, columns)
    count = rows * columns
    if count % shape.group_size:
        raise CheckpointError(f"a matrix of {rows} x {columns} cannot be cut into groups of {shape.group_size}")
    values = reader.int8(count).float().reshape(-1, shape.group_size)
    scales = reader.floats(count // shape.group_size, 1)
    return (values * scales).reshape(rows, columns)


def _single(name: str, matrix: bool = True) -> Any:
    def read(reader: Reader, shape: Shape) -> Iterator[tuple[str, Tensor]]:
        sizes = (shape.vocab_size, shape.hidden_size)
        yield name, _matrix(reader, shape, *sizes) if matrix else reader.floats(shape.hidden_size)

    return read


def _norms(name: str) -> Any:
    def read(reader: Reader, shape: Shape) -> Iterator[tuple[str, Tensor]]:
        for index in range(shape.num_layers):
            yield f"model.layers.{index}.{name}.weight", reader.floats(shape.hidden_size)

    return read


def _linears(name: str, rows: str, columns: str) -> Any:
    def read(reader: Reader, shape: Shape) -> Iterator[tuple[str, Tensor]]:
        sizes = _sizes(shape)
        for index in range(shape.num_layers):
            matrix = _matrix(reader, shape, sizes[rows], sizes[columns])
            if name.endswith(("q_proj", "k_proj")):
                matrix = _halves(matrix, shape.head_dim)
            yield f"model.layers.{index}.{name}.weight", matrix

    return read


def _sizes(shape: Shape) -> dict[str, int]:
    return {"hidden": shape.hidden_size, "ffn": shape.ffn_size, "kv": shape.num_kv_heads * shape.head_dim}


def _halves(matrix: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head from pairs (0,1)(2,3)... to halves: even rows first, then odd ones."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _skip_rope(reader: Reader, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """v0 stores the cosines and sines; they follow from the sizes."""
    reader.floats(2 * shape.max_position, shape.head_dim // 2)
    return iter(())


_KINDS: dict[str, Any] = {
    "embedding": _single("model.embed_tokens.weight"),
    "lm_head": _single("lm_head.weight"),
    "norm": _single("model.norm.weight", matrix=False),
    "attention_norm": _norms("input_layernorm"),
    "mlp_norm": _norms("post_attention_layernorm"),
    "q": _linears("self_attn.q_proj", "hidden", "hidden"),
    "k": _linears("self_attn.k_proj", "kv", "hidden"),
    "v": _linears("self_attn.v_proj", "kv", "hidden"),
    "o": _linears("self_attn.o_proj", "hidden", "hidden"),
    "gate": _linears("mlp.gate_proj", "ffn", "hidden"),
    "down": _linears("mlp.down_proj", "hidden", "ffn"),
    "up": _linears("mlp.up_proj", "ffn", "hidden"),
    "rope": _skip_rope,
}


def _json_files(shape: Shape) -> dict[str, dict[str, Any]]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": shape.max_position,
        "clean_up_tokenization_spaces": False,
    }
    # llama2.c ends a text at BOS: its training separates stories by it.
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, BOS_ID]}
    return {"config.json": config, "tokenizer_config.json": tokenizer, "generation_config.json": generation}


# -- vocabularies --------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path, vocab_size: int) -> PieceVocabulary:
    """Read `vocab_size` tokens of a tok*.bin or a sentencepiece .model; raises CheckpointError."""
    vocabulary = read_sentencepiece(path) if path.suffix == ".model" else _from_bin(path, vocab_size)
    if len(vocabulary.pieces) != vocab_size or vocabulary.pieces[:3] != SPECIAL_NAMES:
        raise CheckpointError(
            f"{path} has {len(vocabulary.pieces)} tokens beginning with {', '.join(vocabulary.pieces[:3])}; the model "
            f"has {vocab_size}, beginning with {', '.join(SPECIAL_NAMES)}; give the model's own tokenizer"
        )
    return vocabulary


def _from_bin(path: Path, vocab_size: int) -> PieceVocabulary:
    """Spaces are spaces here, and the names of BOS and EOS are surrounded by newlines."""
    entries = _read_entries(path, vocab_size)
    pieces = (*SPECIAL_NAMES, *(text for _, text in entries[3:]))
    has_bytes = pieces[3:259] == BYTE_NAMES
    kinds = [PieceType.UNKNOWN, PieceType.CONTROL, PieceType.CONTROL, *([PieceType.BYTE] * 256 if has_bytes else [])]
    kinds += [PieceType.NORMAL] * (vocab_size - len(kinds))
    scores = tuple(score for score, _ in entries)
    return PieceVocabulary(pieces=pieces[:vocab_size], scores=scores, types=tuple(kinds[:vocab_size]), space=" ")


def _read_entries(path: Path, vocab_size: int) -> list[tuple[float, str]]:
    """int32 longest length, then for each token float32 score, int32 length, bytes."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    entries: list[tuple[float, str]] = []
    position = 4
    for token_id in range(vocab_size):
        if position + 8 > len(raw):
            raise CheckpointError(f"{path} ends after {token_id} of {vocab_size} tokens; give the model's tokenizer")
        score, length = struct.unpack_from("<fi", raw, position)
        end = position + 8 + length
        if length < 0 or end > len(raw):
            raise CheckpointError(f"{path} is damaged: token {token_id} claims {length} bytes; copy the file again")
        entries.append((score, raw[position + 8 : end].decode("utf-8", "replace")))
        position = end
    return entries
