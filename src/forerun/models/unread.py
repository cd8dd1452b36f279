"""What a checkpoint holds that the decoder built from it did not read.

Knows: which tensors change nothing, or belong to what is not computed. Does not know: how tensors are read.
"""

from __future__ import annotations

from forerun.errors import UnsupportedError
from forerun.models.build import INERT_TENSORS
from forerun.models.config import ModelConfig
from forerun.models.family import Family
from forerun.models.stages import PipelineStage
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.gguf_checkpoint import GgufCheckpoint


def refuse_unread(
    checkpoint: Checkpoint | GgufCheckpoint, config: ModelConfig, family: Family, stage: PipelineStage
) -> None:
    """Raise UnsupportedError if tensors of a stage are left over: it would not compute what it was trained to."""
    names = family.names
    layers = tuple(names.layer.format(index=index) + "." for index in range(stage.first, stage.end))
    tables = (f"{names.embedding}.", f"{names.final_norm}.", f"{names.lm_head}.") if stage.count == 1 else ()
    own = (*layers, *tables)
    unused = [name for name in checkpoint.unread if name.startswith(own) and not name.endswith(INERT_TENSORS)]
    unused = [name for name in unused if not _adds_nothing(checkpoint, name)]
    unused = [name for name in unused if not names.unread or names.unread not in name]
    unused = [name for name in unused if not name.startswith((*_replaced(config, family), *_unused(config, family)))]
    if config.tie_embeddings:  # lm_head.weight is then a copy of the embedding
        unused = [name for name in unused if name != f"{names.lm_head}.weight"]
    if unused:
        raise UnsupportedError(checkpoint.left_over(unused, config.model_type))


def _replaced(config: ModelConfig, family: Family) -> tuple[str, ...]:
    """Keys and values of layers that read another one's; published files hold them nevertheless."""
    names, readers = family.names, [i for i, shape in enumerate(config.shapes) if shape.kv_layer is not None]
    modules = (*names.qkv[1:], names.key_norm)
    return tuple(f"{names.layer.format(index=index)}.{module}." for index in readers for module in modules)


def _unused(config: ModelConfig, family: Family) -> tuple[str, ...]:
    """Experts that give back what they read; transformers stores matrices for them nevertheless."""
    if config.experts is None or not config.experts.num_zero:
        return ()
    numbers = range(config.experts.num_real, config.experts.routing.num_experts)
    layers = {family.names_of(family.names, index).layer.format(index=index) for index in range(config.num_layers)}
    return tuple(f"{layer}.{family.names.experts.expert.format(index=i)}." for layer in layers for i in numbers)


def _adds_nothing(checkpoint: Checkpoint | GgufCheckpoint, name: str) -> bool:
    """Whether the tensor is a bias of zeros; AutoGPTQ writes one for every matrix."""
    return name.endswith(".bias") and not bool(checkpoint.tensor(name).any())
