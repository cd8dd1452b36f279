"""A GGUF model as a checkpoint: tensors by Hugging Face's names and in its order of rows, a config, a tokenizer.

Knows: how a model is spread over one or several files, and how to undo llama.cpp's reordering of rows. Does not
know: what is in the blocks of quantized tensors, which it returns as bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_config import read_config
from forerun.weights.gguf_file import GgufFile, GgufModel, GgufTensor
from forerun.weights.gguf_layers import check_blocks
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_names import (
    ExpertPlace,
    gates_from_keys,
    gguf_name,
    halves_from_pairs,
    hugging_face_name,
    places,
    reordered_heads,
    values_from_tiles,
)
from forerun.weights.gguf_tokenizer import read_tokenizer
from forerun.weights.gguf_types import FILE_TYPES
from forerun.weights.tokenizer import Tokenizer

SUFFIX = ".gguf"
FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Architectures whose converter changes the order of rows of q and k, and of heads of values in gated delta nets.
REORDERED = ("llama", "mistral3", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe", "smollm3")
TILED = ("qwen35", "qwen35moe")
_TILED_ROWS = re.compile(r"blk\.\d+\.(attn_qkv|attn_gate|ssm_conv1d|ssm_alpha|ssm_beta|ssm_a|ssm_dt)(\.weight|\.bias)?")
MAX_FILES = 10_000
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_READ_WITH_CONFIG = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


class GgufCheckpoint:
    """The tensors of a GGUF model. `open` checks everything but the tensors' data, which is mapped."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        """Use `GgufCheckpoint.open`."""
        self._model = GgufModel(files)
        self._metadata = GGUFMetadata(files[0].path, files[0].metadata)
        self.folder = files[0].path  # what messages name
        self.config = read_config(self._model)
        self._unread = set(self._model.tensors) - set(_READ_WITH_CONFIG)
        self._num_heads = {"q": self.config["num_attention_heads"], "k": self.config["num_key_value_heads"]}
        self._arch = self._metadata.text("general.architecture")
        check_blocks(self._metadata, self._arch, self._model.tensors, int(self.config["num_hidden_layers"]))

    @staticmethod
    def open(path: Path) -> GgufCheckpoint:
        """Read the headers of a file and of those that belong to it; raises CheckpointError or UnsupportedError."""
        first = GgufFile.open(path)
        count = GGUFMetadata(path, first.metadata).integer("split.count", 1)
        return GgufCheckpoint([first] if count <= 1 else _open_all(path, count))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.nbytes for tensor in self._model.tensors.values())

    @property
    def unread(self) -> list[str]:
        """Names of the tensors that have not been read so far, sorted."""
        return sorted(map(hugging_face_name, self._unread))

    def left_over(self, names: Sequence[str], model_type: str) -> str:
        """What to say of tensors that a model of this type does not read."""
        return (
            f"{self.folder} has {len(names)} tensors that its metadata, of a {model_type} model, does not ask for, "
            f"e.g. {', '.join(map(gguf_name, names[:3]))}; forerun would compute without them: convert the model "
            "again with a current llama.cpp, or load it from its safetensors"
        )

    @property
    def file_type(self) -> str:
        """The mix of types the file declares, such as "Q4_K_M"; if none, the type that takes the most bytes."""
        said = self._metadata.get("general.file_type")
        return FILE_TYPES.get(said if isinstance(said, int) else -1) or str(self.config["dtype"])

    def stored(self) -> Iterator[tuple[str, str, int]]:
        """Every tensor's name, the type it is stored in, such as "Q4_K", and its bytes."""
        return ((hugging_face_name(name), of.layout.name, of.nbytes) for name, of in self._model.tensors.items())

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        place = self._place(name)
        return place.name in self._model.tensors and (place.expert or 0) < self._model.tensors[place.name].shape[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return self._entry(name).shape

    def stored_as(self, name: str) -> str:
        """The type a tensor is stored in, such as "Q4_K"."""
        return self._entry(name).layout.name

    def block_type(self, name: str) -> str | None:
        """The type of a quantized tensor, e.g. "Q4_K"; None for F32, F16 and BF16."""
        stored = self.stored_as(name)
        return None if stored in FLOAT_TYPES else stored

    def dtype(self, name: str) -> torch.dtype:
        """The dtype `tensor` gives; float32 for quantized tensors, which the caller decodes."""
        return FLOAT_TYPES.get(self._entry(name).layout.name, torch.float32)

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a floating tensor in its stored precision.

        Raises CheckpointError if it is missing or not of `shape`, UnsupportedError if it is quantized.
        """
        entry = self._entry(name)
        if self.block_type(name) is not None:
            raise UnsupportedError(
                f"{self.describe(name)} is stored as {entry.layout.name}; only matrices may be quantized, this must be "
                f"one of {', '.join(FLOAT_TYPES)}"
            )
        return self.blocks(name, shape).clone().view(FLOAT_TYPES[entry.layout.name]).reshape(shape or entry.shape)

    def rows(self, name: str, shape: tuple[int, int], row_ids: Tensor) -> Tensor:
        """Rows `row_ids` [R] int64 of a matrix of floats; raises as `tensor`."""
        entry = self._entry(name)
        if self.block_type(name) is not None:
            return self.tensor(name, shape)  # which says why not
        stored = self.blocks(name, shape).view(shape[0], -1)[row_ids]  # mapped: others are not read
        return stored.view(FLOAT_TYPES[entry.layout.name]).reshape(-1, shape[1])

    def integers(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """GGUF models have no tensors of plain integers; raises UnsupportedError."""
        raise UnsupportedError(f"{self.describe(name)} cannot be read as plain integers")

    def raw(self, name: str) -> Tensor:
        """A floating tensor in its stored precision; raises UnsupportedError if it is quantized."""
        return self.tensor(name)

    def blocks(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """The stored bytes by rows, in Hugging Face's order of rows -> [rows, bytes of a row] uint8, read-only."""
        entry, place = self._entry(name), self._place(name)
        own = place.name
        if shape is not None:
            self.check_shape(name, shape)
        self._unread.discard(own)
        rows = self._model.rows(own)
        if place.expert is not None:
            matrices = self._model.tensors[own].shape[0] * place.parts
            rows = rows.reshape(matrices, math.prod(entry.shape[:-1]), -1)[place.expert * place.parts + place.part]
        order = self._order(own, entry.shape[0])
        return rows if order is None else rows.view(entry.shape[0], -1)[order]  # a bias has rows of one entry

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError if the tensor is missing or does not hold the rows of `shape`, without reading it."""
        entry = self._entry(name)
        if not _same_rows(entry.shape, tuple(shape)):
            raise CheckpointError(
                f"tensor {self._place(name).name} of {self.folder} has shape {list(entry.shape)}, its metadata asks "
                f"for {list(shape)}; download the file again, or convert the model again"
            )

    def describe(self, name: str) -> str:
        """How messages name the tensor: its file, and its name in that file."""
        return f"{self.folder}: tensor {self._place(name).name}"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the file."""
        return read_tokenizer(self._metadata)

    def _order(self, own: str, num_rows: int) -> Tensor | None:
        """Where the rows of a tensor lie; None: where Hugging Face has them."""
        kind = reordered_heads(own) if self._arch in REORDERED else None
        if kind is not None:
            return halves_from_pairs(num_rows, self._heads(own, kind, num_rows))
        is_tiled = self._arch in TILED and _TILED_ROWS.fullmatch(own) is not None
        if not is_tiled and not (self._arch == "qwen3next" and ".ssm_ba." in own):
            return None
        num_keys, num_values = (int(self.config[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
        if not is_tiled:
            return gates_from_keys(num_keys, num_values)
        keys = 2 * num_keys * int(self.config["linear_key_head_dim"])
        first = keys if ".attn_qkv." in own or ".ssm_conv1d." in own else 0
        if num_rows <= first or (num_rows - first) % num_values:
            raise CheckpointError(f"{self.folder}: the {num_rows} rows of {own} are not {num_values} heads of values")
        heads = torch.arange(first, num_rows).view(num_values, -1)[values_from_tiles(num_keys, num_values)]
        return torch.cat([torch.arange(first), heads.flatten()])

    def _heads(self, own: str, kind: str, num_rows: int) -> int:
        heads = int(self._num_heads[kind])
        if heads < 1 or num_rows % (2 * heads):
            raise CheckpointError(f"{self.folder}: the {num_rows} rows of {own} are not {heads} heads of even size")
        return heads

    def _place(self, name: str) -> ExpertPlace:
        """Where the tensor is: by itself, or inside a tensor that stacks all experts."""
        possible = places(name)
        is_expert = possible[0].expert is not None
        missing = possible[-1] if is_expert else possible[0]
        return next((place for place in possible if place.name in self._model.tensors), missing)

    def _entry(self, name: str) -> GgufTensor:
        """The tensor; for an expert inside a stacked tensor, with the shape of that expert's part."""
        place = self._place(name)
        if not self.has(name):
            raise CheckpointError(
                f"{self.folder} has no tensor {place.name}, which its metadata asks for; the file is incomplete or of "
                "another architecture: download it again, or convert the model again"
            )
        stored = self._model.tensors[place.name]
        if place.expert is None:
            return stored
        rows, *columns = stored.shape[1:]  # no columns of a bias
        return replace(stored, shape=(rows // place.parts, *columns))


def _same_rows(stored: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether both shapes hold the same rows: files may stack matrices by head, or a vector's entries by group."""
    if len(wanted) == 1:
        return math.prod(stored) == wanted[0]
    return (math.prod(stored[:-1]), stored[-1]) == (math.prod(wanted[:-1]), wanted[-1])


def is_gguf(path: Path) -> bool:
    """Whether the path is a GGUF file."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def _open_all(path: Path, count: int) -> list[GgufFile]:
    """All files of a model that is split over several; the first one holds the metadata."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_FILES:
        raise CheckpointError(
            f"{path} is one of {count} files of a model but is not named NAME-00001-of-{count:05d}.gguf; give the "
            "files the names they were published with"
        )
    paths = [path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}.gguf") for index in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of {count} files of the model: {', '.join(missing[:5])}"
        )
    return [GgufFile.open(each) for each in paths]
