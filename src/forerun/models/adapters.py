"""LoRA adapters as PEFT saves them: a folder of adapter_config.json and adapter_model.safetensors.

Knows: PEFT's fields and tensor names, and which layer of a decoder each module is a part of. Does not know: requests,
how an update is computed (`layers.lora`).

The tensors say which modules are adapted, so fields that only chose them while training are not read. Everything that
can be wrong with the files, and with files that are for another model, is found in headers.
Source: peft src/peft/tuners/lora (config.py, layer.py), utils/other.py (get_pattern_key).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from forerun.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.embedding import TableEmbedding
from forerun.layers.linear import Linear
from forerun.layers.lora import LowRankUpdate
from forerun.layers.mlp import GatedMLP
from forerun.layers.moe import ExpertsBesideDense, MixtureOfExperts, SharedExpert
from forerun.models.adapted import LoraAdapter
from forerun.models.decoder import Decoder
from forerun.models.family import TensorNames
from forerun.models.stages import StagedDecoder
from forerun.quant.dense import DenseWeight
from forerun.quant.formats import find_format
from forerun.quant.rows import packs_part
from forerun.weights.checkpoint import FLOAT_DTYPES, Checkpoint, read_file, read_json, text_name
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.identity import stamps_of

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
BASE = "base_model_name_or_path"
# Fields that change nothing here: how the adapter was trained, or which modules were chosen.
INERT = frozenset((
    "auto_mapping", BASE, "revision", "inference_mode", "task_type", "peft_version",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out",
    "megatron_config", "megatron_core", "runtime_config", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size",
))  # fmt: skip
READ = frozenset(("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"))
# Values of other fields that change nothing; any other value of theirs, and any other field, is refused.
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # others begin by changing the base model
}
NOTHING: tuple[object, ...] = (None, False, [], {})
MERGE = "merge the adapter into its model (peft: merge_and_unload, then save_pretrained)"
UNCOMPARED = "%s brings a copy of %s, which cannot be compared with the model's, as that was converted: it is left out"
ROWS = 4096  # of a table that are compared at a time
TABLES = ("embed_tokens", "lm_head")  # of which PEFT adds the model's own to files of adapters that change them
_T = TypeVar("_T")
log = logging.getLogger("forerun.models")


class LowRankPair(NamedTuple):
    """The two matrices of one adapted module."""

    down: str  # names of tensors
    up: str
    shape: tuple[int, int]  # of the module's matrix: outputs, inputs; of an embedding width, vocabulary
    scale: float
    of_embedding: bool


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter's files. `open` reads config and headers; matrices are read by `bind`."""

    folder: Path
    checkpoint: Checkpoint
    modules: Mapping[str, LowRankPair]
    copies: Mapping[str, str]  # tensors that must be the model's own matrices, by module; PEFT adds tables to files

    @staticmethod
    def open(folder: Path, names: TensorNames, is_text_part: bool = False) -> PeftAdapter:
        """`is_text_part`: of a multimodal model. Raises ModelNotFoundError, CheckpointError and UnsupportedError."""
        folder = Path(os.path.expanduser(folder))
        if not folder.is_dir():
            raise ModelNotFoundError(f"there is no adapter folder {folder}: give the one PEFT's save_pretrained wrote")
        config = read_json(folder / CONFIG_FILE)
        _check_fields(folder, config)
        path = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
        if path is None:
            raise CheckpointError(f"{folder} has no {WEIGHT_FILES[0]}, the adapter's weights; copy the folder again")
        checkpoint = Checkpoint(folder, config, {n.removeprefix(PREFIX): t for n, t in read_file(path).items()})
        modules = dict(_pairs(folder, checkpoint))
        low_rank = {name for pair in modules.values() for name in (pair.down, pair.up)}
        copies = dict(_copies(folder, set(checkpoint) - low_rank))
        if is_text_part:
            modules, copies = _of_text(modules), _of_text(copies)
        if not modules:
            raise CheckpointError(f"{folder} has no low-rank matrices of a text model; copy the folder again")
        return PeftAdapter(folder, checkpoint, _as_stored(modules, names), _as_stored(copies, names))

    @contextmanager
    def beside(self, base: Path) -> Iterator[None]:
        """Errors of what does not fit this model begin with the one that the adapter names, if that is another."""
        try:
            yield
        except (CheckpointError, UnsupportedError) as error:
            named = self.checkpoint.config.get(BASE)
            if not isinstance(named, str) or not named or _short_name(Path(named)) in _short_name(base):
                raise
            raise type(error)(
                f"{self.folder} is probably for another model: the base model that its {CONFIG_FILE} names is "
                f"{named[:100]}, and this is {base}; load it beside that one. What does not fit here: {error}"
            ) from error

    def _check_targets(self, known: Iterable[str]) -> None:
        """Raise CheckpointError if no tensors are there for modules of the model that were adapted."""
        config = self.checkpoint.config
        if config.get("exclude_modules") or config.get("layers_to_transform") is not None:
            return  # layers that have such a module may have been left out
        named = config.get("target_modules")
        targets = named if isinstance(named, list) else []
        all_known = list(known)
        for name in map(str, targets):  # others are usual names of models in general
            if _has_end(all_known, name) and not _has_end(self.modules, name):
                raise CheckpointError(
                    f"{self.folder} has no low-rank matrices of {name}, which {CONFIG_FILE} names; copy the folder "
                    "again"
                )

    def check_base(self, base: Checkpoint | GgufCheckpoint, names: TensorNames, scale: float) -> None:
        """Check what the headers of a checkpoint tell; `scale`: what the model multiplies its embedding's rows with.

        Raises CheckpointError for an adapter of another model, and UnsupportedError.
        """
        modules = (name.rpartition(".")[0] for name, *_ in base.stored())
        self._check_targets(module for module in modules if ".experts." not in module)  # often no modules there
        for module, pair in self.modules.items():
            name, shape = f"{module}.weight", pair.shape[::-1] if pair.of_embedding else pair.shape
            if find_format(base, module) is None and module != names.lm_head:  # a tied one is not stored
                raise CheckpointError(
                    f"{self.folder} is for another model: it adapts {module}, which this model does not have; give an "
                    "adapter of this model"
                )
            if _is_unadaptable(module, names):
                raise self._unadaptable([module])
            if pair.of_embedding and scale != 1:
                raise self._scaled_embedding()
            is_dense = base.has(name) and base.stored_as(name) in FLOAT_DTYPES  # `bind` checks the others
            if is_dense and base.shape(name) != shape:
                raise self._other_base(module, shape, base.shape(name))

    def _unadaptable(self, modules: Sequence[str]) -> UnsupportedError:
        return UnsupportedError(
            f"{self.folder} adapts {modules[0]} ({len(modules)} such modules), which forerun cannot adapt in this "
            "model: it adapts the matrices of attention, of dense feed-forward layers and of shared experts, embedding "
            f"and lm_head; {MERGE}"
        )

    def _scaled_embedding(self) -> UnsupportedError:
        return UnsupportedError(
            f"{self.folder} adapts the embedding of a model that scales it, which forerun does not do; {MERGE}"
        )

    def _other_base(self, module: str, found: tuple[int, ...], has: tuple[int, ...]) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} is for another model: its matrices of {module} are for {list(found)}, this model's is "
            f"{list(has)}; give an adapter of this model"
        )

    def bind(self, name: str, model: Decoder, names: TensorNames, kernels: Kernels) -> LoraAdapter:
        """Read the matrices for the layers of `model`. Raises CheckpointError and UnsupportedError, naming modules."""
        stamps = stamps_of(self.folder)
        places, parts = dict(_places(model, names)), dict[object, list[tuple[ModulePlace, LowRankPair]]]()
        elsewhere = model.stage.elsewhere(names.layer) if isinstance(model, StagedDecoder) else ()
        here = {module: pair for module, pair in self.modules.items() if not module.startswith(elsewhere)}
        missing = sorted(module for module in here if module not in places)
        if missing:
            raise self._unadaptable(missing)
        self._check_targets(places)
        self._check_copied_shapes(places)
        for module, pair in here.items():
            place = places[module]
            if pair.shape != place.shape or pair.of_embedding != (module == names.embedding):
                raise self._other_base(module, pair.shape, place.shape)
            parts.setdefault(place.layer, []).append((place, pair))
        in_order = {layer: sorted(own, key=lambda part: part[0].first) for layer, own in parts.items()}
        updates = {at: self._read(own, kernels) for at, own in in_order.items()}
        return LoraAdapter(name, str(self.folder), {at: one for at, one in updates.items() if one is not None}, stamps)

    def _read(self, parts: Sequence[tuple[ModulePlace, LowRankPair]], kernels: Kernels) -> LowRankUpdate | None:
        """The update of a layer, of whose columns the modules are parts in this order; None: another rank's columns."""
        first, pairs = parts[0][0].first, [pair for _, pair in parts]
        downs = [self.checkpoint.tensor(pair.down) for pair in pairs]  # each [rank, K]
        ups = [(place.first, self.checkpoint.tensor(pair.up)) for place, pair in parts]
        scales = torch.cat([torch.full((len(down),), pair.scale) for down, pair in zip(downs, pairs, strict=True)])
        whole = _joined(ups)
        first, outputs = _of_rank(parts[0][0].layer, first, whole)
        if not len(outputs):
            return None
        scales, down = scales.to(kernels.device), torch.cat(downs)
        up = DenseWeight(packs_part(kernels, len(whole)), outputs)
        if not pairs[0].of_embedding:
            return LowRankUpdate(partial(DenseWeight(kernels, down).matmul, bias=None), scales, up, first)
        if parts[0][0].scale != 1:
            raise self._scaled_embedding()
        table = down.float().T.contiguous().to(kernels.device)  # [V, rank]
        return LowRankUpdate(TableEmbedding(kernels, table), scales, up)

    def check_copies(self, base: Checkpoint | GgufCheckpoint, names: TensorNames) -> None:
        """Raise UnsupportedError for tables of the adapter that differ from those that the model's files hold."""
        for module, name in self.copies.items():
            table = f"{module}.weight"
            if module == names.lm_head and not base.has(table):  # it is tied
                table = f"{names.embedding}.weight"
            if isinstance(base, GgufCheckpoint) or not base.has(table) or base.stored_as(table) not in FLOAT_DTYPES:
                log.warning(UNCOMPARED, self.folder, module)
            elif not _is_copy(self.checkpoint.tensor(name), base.raw(table)):
                raise self._own_table(module)

    def _check_copied_shapes(self, places: Mapping[str, ModulePlace]) -> None:
        for module, name in self.copies.items():
            if module not in places or sorted(self.checkpoint.shape(name)) != sorted(places[module].shape):
                raise self._own_table(module)

    def _own_table(self, module: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.folder} brings a {module} of its own ({self.copies[module]}), which differs from this model's; "
            f"{MERGE}"
        )


class ModulePlace(NamedTuple):
    """Where a module of the checkpoint is in a decoder."""

    layer: object
    shape: tuple[int, int]
    first: int = 0  # column of what the layer's modules give together
    scale: float = 1.0  # of an embedding's rows


def _places(model: Decoder, names: TensorNames) -> Iterator[tuple[str, ModulePlace]]:
    """The modules of a decoder that can be adapted, those whose rows are the rows of the pass."""
    parts = model.parts
    for layer in parts.layers:
        for part in (*layer.mixers, _for_every_row(layer.mlp)):
            for linear in part.linears if part is not None else ():
                if isinstance(linear, Linear):
                    yield from _modules_of(linear)
    vocab_size, width = parts.embedding.shape
    yield names.lm_head, ModulePlace(parts.lm_head, (vocab_size, parts.lm_head.weight.shape[1]))
    yield names.embedding, ModulePlace(parts.embedding, (width, vocab_size), scale=parts.embedding.scale)


def _for_every_row(mlp: object) -> GatedMLP | SharedExpert | None:
    """The part of a feed-forward layer that computes every row: experts compute those that chose them."""
    if isinstance(mlp, ExpertsBesideDense):
        return mlp.dense
    return mlp.shared if isinstance(mlp, MixtureOfExperts) else mlp if isinstance(mlp, GatedMLP) else None


def _joined(parts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Matrices [rows, rank] of modules whose rows begin there -> one [all rows, all ranks], zero outside of them."""
    blocks, end = list[Tensor](), parts[0][0]
    for first, matrix in parts:
        blocks += [matrix.new_zeros(first - end, 0), matrix]
        end = first + len(matrix)
    joined: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return joined


def _of_rank(layer: object, first: int, up: Tensor) -> tuple[int, Tensor]:
    """Of a matrix for the columns from `first` on of all of a layer's modules: where those of this rank are, and it."""
    row_ids = layer.row_ids if isinstance(layer, Linear) else None
    if row_ids is None:
        return first, up
    inside = (row_ids >= first) & (row_ids < first + len(up))
    return int((row_ids < first).sum()), up[row_ids[inside] - first]


def _modules_of(linear: Linear) -> Iterator[tuple[str, ModulePlace]]:
    first = 0
    for module, rows in linear.modules:
        yield module, ModulePlace(linear, (rows, linear.weight.shape[1]), first)
        first += rows


# -- reading ----------------------------------------------------------------------------------------------------


def _check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError, by name, for fields that change what is computed and are not implemented."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedError(
            f"{folder} is a PEFT adapter of the kind {config.get('peft_type')!r}; forerun runs LORA; {MERGE}"
        )
    for name, value in config.items():
        plain = value in NOTHING or value in HARMLESS.get(name, ())
        if name not in INERT and name not in READ and not plain:
            raise UnsupportedError(
                f"{folder / CONFIG_FILE} sets {name} to {str(value)[:100]}, which forerun does not implement; {MERGE}"
            )


def _pairs(folder: Path, checkpoint: Checkpoint) -> Iterator[tuple[str, LowRankPair]]:
    """The adapted modules. Raises CheckpointError for one without its two matrices, or of other ranks than stated."""
    for down in sorted(checkpoint):
        for kind, end in (("lora_", ".weight"), ("lora_embedding_", "")):
            module = down.removesuffix(f".{kind}A{end}")
            up = f"{module}.{kind}B{end}"
            if module != down:
                if not checkpoint.has(up):
                    raise CheckpointError(f"{folder} has {down} but no {up}; copy the folder again")
                yield module, _pair(folder, checkpoint, module, down, up, kind == "lora_embedding_")


def _copies(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The whole tables among an adapter's other tensors, by module. Raises UnsupportedError for anything else."""
    for name in sorted(names):
        module = name.removesuffix(".weight").removesuffix(".base_layer")
        if module == name or not module.endswith(TABLES):
            raise UnsupportedError(
                f"{folder} has tensors that are no low-rank matrices, e.g. {name}, which forerun does not add; {MERGE}"
            )
        yield module, name


def _of_text(by_module: Mapping[str, _T]) -> dict[str, _T]:
    """What belongs to a multimodal model's text part, by the names of a model of text alone."""
    named = ((text_name(f"{module}."), value) for module, value in by_module.items())
    return {name.removesuffix("."): value for name, value in named if name is not None}


def _as_stored(by_module: Mapping[str, _T], names: TensorNames) -> dict[str, _T]:
    """By the names of the checkpoint. transformers calls a decoder `model` whatever its tensors are stored below."""
    stored = {}
    for module, value in by_module.items():
        for running, published in names.running:
            module = module.replace(f".{running}.", f".{published}.")
        stored[re.sub(r"^model\.", f"{names.layer.partition('.')[0]}.", module)] = value
    return stored


def _is_copy(table: Tensor, own: Tensor) -> bool:
    """Whether a table [V, H] is the model's own in the precision in which it is stored."""
    parts = (slice(first, first + ROWS) for first in range(0, table.shape[0], ROWS))
    return table.shape == own.shape and all(torch.equal(table[part], own[part].to(table.dtype)) for part in parts)


def _is_unadaptable(module: str, names: TensorNames) -> bool:
    """Whether it is among the modules of a mixture, whose rows are regrouped, or has its matrix split in two."""
    experts = names.experts.expert.partition("{")[0]
    return f".{experts}" in module or module.endswith((f".{names.experts.router}", f".{names.latents.up}"))


def _short_name(model: Path) -> str:
    """The last part of a model's name, in small letters; in the hub's cache, folders have the names of commits."""
    return (model.parent.parent.name.rpartition("--")[2] if model.parent.name == "snapshots" else model.name).lower()


def _has_end(modules: Iterable[str], name: str) -> bool:
    """Whether PEFT finds a module by this name."""
    return any(f".{module}".endswith(f".{name}") for module in modules)


def _pair(
    folder: Path, checkpoint: Checkpoint, module: str, down: str, up: str, of_embedding: bool
) -> LowRankPair:  # fmt: skip
    config, shapes = checkpoint.config, (checkpoint.shape(down), checkpoint.shape(up))
    rank = _setting(folder, config, "r", "rank_pattern", module)
    alpha = _setting(folder, config, "lora_alpha", "alpha_pattern", module)
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or not shapes[0][0] == shapes[1][1] == rank:
        raise CheckpointError(
            f"{folder} has {down} {list(shapes[0])} and {up} {list(shapes[1])}, but {CONFIG_FILE} states rank {rank:g} "
            f"for {module}: [{rank:g}, inputs] and [outputs, {rank:g}] are needed; copy the folder again"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankPair(down, up, (shapes[1][0], shapes[0][1]), scale, of_embedding)


def _setting(folder: Path, config: Mapping[str, Any], name: str, pattern: str, module: str) -> float:
    """A number that a pattern may change for some modules, as PEFT matches them: the first whose end fits."""
    patterns = config.get(pattern) or {}
    try:
        key = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
        value = config.get(name, 8) if key is None else patterns[key]
    except (re.error, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {pattern} {patterns!r:.100} cannot be read: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {name} of {module} must be a number above 0, got {value!r}")
    return value
