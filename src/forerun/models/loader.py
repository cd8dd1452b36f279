"""load_model: from a name to a model that runs.

Knows: the order of loading, and what is checked before anything large is read. Does not know: any family.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forerun.config import Implementation
from forerun.core import SamplingParams
from forerun.errors import CheckpointError, ConfigError, ModelError, SamplingError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.kernels.ranks import ALONE, Ranks
from forerun.models.adapted import LoraAdapter
from forerun.models.adapters import BASE, MERGE, PeftAdapter
from forerun.models.adapters import CONFIG_FILE as ADAPTER_FILE
from forerun.models.base import LayerSpec, Model
from forerun.models.build import Builder, Progress
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.families import FAMILIES
from forerun.models.family import Family
from forerun.models.fields import THROUGH_TRANSFORMERS
from forerun.models.gguf_family import as_in_gguf
from forerun.models.memory import SHARE_OF_HOST, check_memory
from forerun.models.multimodal import PART_OF, text_config
from forerun.models.shares import check_shares
from forerun.models.stages import PipelineStage, divide
from forerun.models.storage import check_float16, decoder_bytes, dense_bytes, state_specs
from forerun.models.unread import refuse_unread
from forerun.quant.formats import check_tensors
from forerun.quant.settings import asks_small_cache
from forerun.weights.checkpoint import Checkpoint, has_weights, read_json, read_model_config
from forerun.weights.generation import GenerationConfig, end_ids
from forerun.weights.gguf_checkpoint import GgufCheckpoint, is_gguf
from forerun.weights.gguf_config import LIMITED_BY
from forerun.weights.identity import Stamp, stamps_of
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer, check_vocabulary

log = logging.getLogger("forerun.models")

DTYPES: dict[str, torch.dtype | None] = {
    "auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": None,
}  # fmt: skip
LIMITS = {  # why families, or models with a field, stop before the positions their config.json states
    "deepseek_v32": "past index_topk positions it attends to a selection of them, which forerun does not do",
    "llama4_text": "past floor_scale positions it multiplies queries by position, which forerun does not do",
    "dual_chunk_attention_config": (
        "past its first chunk it counts positions by chunks (dual chunk attention), which forerun does not do"
    ),
}
LONG_ROPE = "past its original context this model computes attention differently, which forerun does not do"
NOT_SHARED = (
    "which several ranks cannot share: leave tensor parallel at 1, or take a model of a family that forerun runs "
    "itself (docs/models.md lists them)"
)
CACHE_NOTICE = (
    "%s asks for an FP8 cache of keys and values, which forerun does not have: %s (kv_cache_dtype chooses another)"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and everything that was read with it."""

    model: Model
    tokenizer: Tokenizer
    folder: Path  # or the GGUF file
    raw_config: Mapping[str, Any]  # config.json, or what it would be for a GGUF file
    config: ModelConfig | None  # None for a model that runs through transformers
    implementation: str  # "forerun" or "transformers"
    sampling: Mapping[str, Any] = field(default_factory=dict)  # sampling defaults of generation_config.json
    stamps: tuple[Stamp, ...] = ()  # of the files, taken before they were read

    @property
    def kv_specs(self) -> tuple[LayerSpec, ...]:
        """What the model keeps in the pool; () for one that runs row by row."""
        return self.model.kv_specs


def load_model(
    name_or_path: str | Path,
    kernels: Kernels,
    dtype: str = "auto",
    max_position: int | None = None,
    progress: Progress | None = None,
    implementation: Implementation = "auto",
    generation_config: str = "auto",
    adapters: Iterable[str | Path] = (),
    ranks: Ranks = ALONE,
    stage: tuple[int, int] = (0, 1),
) -> LoadedModel:
    """Load an embedded model, a folder, a GGUF file or a hub id.

    dtype: "auto" keeps the stored precision (a CPU computes float16 from a copy widened to float32, which is exact);
    "float16" does the same and refuses checkpoints that are not stored in float16. max_position: positions to build
    for, at most what the checkpoint can use. progress(done, total) is called as layers are read. implementation: "auto"
    runs the families that forerun implements itself and all others through transformers. generation_config: the source
    of sampling defaults and end tokens, "auto" for the model's own file, "none", or a file or folder. adapters: folders
    that will be given to `load_adapter`, checked first. ranks: those who compute the model together, each its share.
    stage: which of how many pipeline stages to load.
    Raises ModelError and ResourceError, where possible before any weight is read.
    """
    dtype_named(dtype)
    named, folder = GenerationConfig.named(generation_config), resolve_model(name_or_path)
    stamps, generation = stamps_of(folder), named or GenerationConfig.beside(folder)
    _check_sampling(generation)
    if dtype == "float16":
        check_float16(folder)
    check_adapters(adapters, folder, implementation)
    if is_gguf(folder):
        loaded = _load_gguf(folder, kernels, dtype, max_position, progress, implementation, ranks, stage)
    elif _choose(raw := _read_raw(folder), implementation) == "transformers":
        if ranks.size > 1:
            raise UnsupportedError(f"{_model_type(raw)} models run through transformers, {NOT_SHARED}")
        loaded = _load_through_transformers(folder, raw, kernels, DTYPES[dtype], max_position)
    else:
        loaded = _load_native(folder, raw, kernels, dtype, max_position, progress, ranks, stage)
    if named is not None and (named.end_ids is not None or not is_gguf(folder)):
        loaded.tokenizer.end_at(end_ids(folder, named))
    return replace(loaded, sampling=generation.sampling, stamps=stamps)


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of a model named as for `load_model`; raises CheckpointError where there is none."""
    folder = resolve_model(name_or_path)
    return GgufCheckpoint.open(folder).tokenizer() if is_gguf(folder) else Tokenizer.from_folder(folder)


def dtype_named(dtype: str) -> torch.dtype | None:
    """What unquantized matrices are converted to, None for nothing; raises ConfigError for a name that is none."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]


def load_adapter(name: str, path: str | Path, loaded: LoadedModel, kernels: Kernels) -> LoraAdapter:
    """A LoRA adapter for a model that forerun runs itself. Raises ModelError and ResourceError."""
    family = _family_with_adapters(loaded.folder, loaded.implementation, loaded.raw_config)
    adapter = PeftAdapter.open(Path(path), family.names, is_text_part=PART_OF in loaded.raw_config)
    assert isinstance(loaded.model, Decoder)
    with adapter.beside(loaded.folder):
        if adapter.copies:
            adapter.check_copies(open_checkpoint(loaded.folder), family.names)
        check_memory(adapter.checkpoint.nbytes, f"loading {path}", kernels.device)
        return adapter.bind(name, loaded.model, family.names, kernels)


def check_adapters(paths: Iterable[str | Path], folder: Path, implementation: Implementation) -> None:
    """Raise ModelError for adapters that cannot be loaded, or are for another model. Reads headers only."""
    for path in paths:
        base = open_checkpoint(folder)
        raw = base.config
        family = _family_with_adapters(folder, "forerun" if is_gguf(folder) else _choose(raw, implementation), raw)
        adapter, config = PeftAdapter.open(Path(path), family.names, is_text_part=PART_OF in raw), read_config(folder)
        with adapter.beside(folder):
            adapter.check_base(base, family.names, 1.0 if config is None else config.scales.embedding)


def _family_with_adapters(folder: Path, implementation: str, raw: Mapping[str, Any]) -> Family:
    family = find_family(raw)
    if implementation == "transformers" or family is None:
        raise UnsupportedError(
            f"{MERGE}: {_model_type(raw)} models run through transformers, and adapters are for families that forerun "
            "runs itself (docs/models.md lists them)"
        )
    if is_gguf(folder) and family.model_type == "falcon_h1":
        raise UnsupportedError(
            f"{folder} has matrices that are multiplied with Falcon-H1's multipliers, and adapters are trained beside "
            "matrices that are not: load the adapter with the model's safetensors"
        )
    return family


def _check_sampling(generation: GenerationConfig) -> None:
    try:
        SamplingParams(**generation.sampling)
    except SamplingError as error:
        raise ConfigError(
            f"{generation.path}: {error}; correct the file, or ignore it with generation_config 'none'"
        ) from error


def find_family(raw: Mapping[str, Any]) -> Family | None:
    """The family of a config.json, None if forerun has no implementation of its own."""
    return FAMILIES.get(_model_type(raw))


def read_config(folder: Path) -> ModelConfig | None:
    """The configuration in a folder or GGUF file; None for a model that runs through transformers. Reads no weights."""
    if is_gguf(folder):
        return _gguf_config(GgufCheckpoint.open(folder))
    raw = _read_raw(folder)
    family = find_family(raw)
    return None if family is None else ModelConfig.read(raw, family)


def open_checkpoint(folder: Path) -> Checkpoint | GgufCheckpoint:
    """The tensors in a folder or GGUF file, of a multimodal model those of its text part, with its configuration."""
    return GgufCheckpoint.open(folder) if is_gguf(folder) else _open_text(folder, _read_raw(folder))


def _open_text(folder: Path, raw: Mapping[str, Any]) -> Checkpoint:
    stored = Checkpoint.open(folder)
    return stored.text_part(dict(raw)) if PART_OF in raw else stored


def _read_raw(folder: Path) -> dict[str, Any]:
    """A folder's config.json, of a multimodal model what it says of the text part.

    Raises UnsupportedError for a PEFT adapter, which is no model by itself. A merged model may lie beside one.
    """
    if (folder / ADAPTER_FILE).exists() and not has_weights(folder):
        base = str(read_json(folder / ADAPTER_FILE).get(BASE))[:100]
        raise UnsupportedError(
            f"{folder} is a PEFT adapter for the model {base} ({ADAPTER_FILE}), not a model; load that model with the "
            f"adapter beside it: `forerun generate {base} --lora NAME={folder}` (chat and serve alike), or "
            "LLM(..., lora={name: folder})"
        )
    raw = read_model_config(folder)
    text = text_config(raw)
    return text if text.get("model_type") in FAMILIES else raw


def _model_type(raw: Mapping[str, Any]) -> str:
    found = raw.get("model_type")
    if not isinstance(found, str):
        raise CheckpointError(
            f"config.json has no model_type (got {found!r}): name the model's family there (docs/models.md lists those "
            "that forerun runs itself; others run through transformers)"
        )
    return found


def _choose(raw: Mapping[str, Any], implementation: Implementation) -> str:
    family = find_family(raw)
    if implementation == "forerun" and family is None:
        raise UnsupportedError(
            f"leave `implementation` at 'auto', and the model runs through transformers: forerun has no implementation "
            f"of its own for {_model_type(raw)} models (docs/models.md lists those it has)"
        )
    if implementation == "auto":
        return "transformers" if family is None else "forerun"
    return implementation


def _load_native(
    folder: Path, raw: Mapping[str, Any], kernels: Kernels, dtype: str, max_position: int | None,
    progress: Progress | None, ranks: Ranks, place: tuple[int, int],
) -> LoadedModel:  # fmt: skip
    family = find_family(raw)
    assert family is not None
    config = ModelConfig.read(raw, family)
    check_device(config, kernels.device)
    check_shares(config, ranks.size)
    positions = _positions(config.max_position, max_position, raw)
    checkpoint = _open_text(folder, raw)
    config = tied_as_stored(config, family, checkpoint)
    check_tensors(checkpoint)
    stage = divide(config, family, checkpoint, place[1])[place[0]]
    _check_memory(config, family, checkpoint, kernels, DTYPES[dtype], positions, stage.share / ranks.size)
    tokenizer = Tokenizer.from_folder(folder)
    parts = ranks, stage
    model = _build(config, family, checkpoint, tokenizer, kernels, DTYPES[dtype], positions, progress, *parts)
    if asks_small_cache(raw):
        in_8_bits = any(spec.dtype is torch.int8 for spec in model.kv_specs)
        log.warning(CACHE_NOTICE, folder, "int8 takes its place" if in_8_bits else "latents stay in 16 bits")
    return LoadedModel(model, tokenizer, folder, raw, config, "forerun")


def tied_as_stored(config: ModelConfig, family: Family, checkpoint: Checkpoint) -> ModelConfig:
    """The config, untied if the checkpoint has an output layer that is not a copy of the embedding.

    Configs of multimodal models say of the whole that it is tied when the text part is not; transformers compares, too.
    """
    head, table = (f"{module}.weight" for module in (family.names.lm_head, family.names.embedding))
    if not config.tie_embeddings or not (checkpoint.has(head) and checkpoint.has(table)):
        return config
    own, copied = checkpoint.raw(head), checkpoint.raw(table)
    return replace(config, tie_embeddings=own.dtype == copied.dtype and torch.equal(own, copied))


def check_device(config: ModelConfig, device: torch.device) -> None:
    """Raise UnsupportedError for a model that forerun does not run there."""
    if config.on_cpus_only and device.type != "cpu":
        raise UnsupportedError(
            f"{config.on_cpus_only}, those of {config.model_type} models run on CPUs only so far; choose device 'cpu', "
            f"or {THROUGH_TRANSFORMERS}"
        )


def _load_gguf(
    path: Path, kernels: Kernels, dtype: str, max_position: int | None, progress: Progress | None,
    implementation: Implementation, ranks: Ranks, place: tuple[int, int],
) -> LoadedModel:  # fmt: skip
    """A model from a GGUF file alone. dtype: of unquantized matrices; quantized ones stay as stored."""
    if implementation == "transformers":
        raise UnsupportedError(f"{path} is a GGUF file, which forerun runs itself; leave `implementation` at 'auto'")
    checkpoint = GgufCheckpoint.open(path)
    family, config = gguf_family(checkpoint), _gguf_config(checkpoint)
    check_device(config, kernels.device)
    check_shares(config, ranks.size)
    positions = _positions(config.max_position, max_position, checkpoint.config)
    stage = divide(config, family, checkpoint, place[1])[place[0]]
    _check_memory(config, family, checkpoint, kernels, DTYPES[dtype], positions, stage.share / ranks.size)
    tokenizer = checkpoint.tokenizer()
    parts = ranks, stage
    model = _build(config, family, checkpoint, tokenizer, kernels, DTYPES[dtype], positions, progress, *parts)
    return LoadedModel(model, tokenizer, path, checkpoint.config, config, "forerun")


def gguf_family(checkpoint: GgufCheckpoint) -> Family:
    """The family as GGUF files have it."""
    family = find_family(checkpoint.config)
    assert family is not None, checkpoint.config["model_type"]
    return as_in_gguf(family)


def _gguf_config(checkpoint: GgufCheckpoint) -> ModelConfig:
    try:
        return ModelConfig.read(checkpoint.config, gguf_family(checkpoint))
    except ModelError as error:
        raise type(error)(f"{checkpoint.folder}, its metadata read as a config.json: {error}") from error


def _build(
    config: ModelConfig, family: Family, checkpoint: Checkpoint | GgufCheckpoint, tokenizer: Tokenizer,
    kernels: Kernels, dtype: torch.dtype | None, positions: int, progress: Progress | None, ranks: Ranks,
    stage: PipelineStage,
) -> Decoder:  # fmt: skip
    """The decoder. Raises ModelError if vocabulary, config and tensors do not belong together."""
    check_vocabulary(tokenizer, config.vocab_size)
    model = Builder(config, family, checkpoint, kernels, dtype, positions, ranks=ranks, stage=stage).decoder(progress)
    refuse_unread(checkpoint, config, family, stage)
    return model


def _check_memory(
    config: ModelConfig, family: Family, checkpoint: Checkpoint | GgufCheckpoint, kernels: Kernels,
    dtype: torch.dtype | None, positions: int, share: float,
) -> None:  # fmt: skip
    """Raise ResourceError unless a share of the weights and of a request's recurrent state, and the rope table, fit."""
    weights = decoder_bytes(config, family, checkpoint, dtype, kernels.float_activations)
    state = sum(spec.bytes_per_slot for spec in state_specs(config))
    needed = int((weights + state / SHARE_OF_HOST) * share) + positions * config.rope.rotary_dim * 4
    purpose = f"loading {checkpoint.folder}" + (", with room for the recurrent state of a request," if state else "")
    check_memory(needed, purpose, kernels.device)


def _positions(possible: int, wanted: int | None, raw: Mapping[str, Any]) -> int:
    if wanted is None:
        return possible
    if not 1 <= wanted <= possible:
        stated = raw.get("max_position_embeddings")
        stretched = isinstance(stated, int) and stated > possible
        reasons = (why for name, why in LIMITS.items() if name == raw.get("model_type") or raw.get(name))
        known = next(reasons, LONG_ROPE if stretched else "")
        reason = raw.get(LIMITED_BY, known)
        raise ConfigError(
            f"max_model_len must be from 1 to {possible}, the positions this model can use; got {wanted}"
            + (f" ({reason})" if reason else "")
        )
    return wanted


def _load_through_transformers(
    folder: Path, raw: Mapping[str, Any], kernels: Kernels, dtype: torch.dtype | None, max_position: int | None
) -> LoadedModel:
    from forerun.models.hf_loading import load_hf_model, read_hf_config  # imports transformers, which takes seconds

    _model_type(raw)
    config = read_hf_config(folder, raw)
    tokenizer = Tokenizer.from_folder(folder)
    check_memory(dense_bytes(Checkpoint.open(folder), dtype), f"loading {folder}", kernels.device)
    model = load_hf_model(folder, config, dtype, kernels)
    check_vocabulary(tokenizer, model.vocab_size)
    model.limit(_positions(model.max_position, max_position, raw))
    return LoadedModel(model, tokenizer, folder, raw, None, "transformers")
