"""What engines on the same model have in common, and how it comes to be: kernels, weights, adapters, other ranks.

Knows: the order of checks and of loading. Does not know: engines, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.config import EngineConfig
from forerun.drafters.registry import draft_models, spec_of, telling_heads
from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels
from forerun.models.adapted import LoraAdapter
from forerun.models.draft_models import DraftModels, check_draft
from forerun.models.loader import LoadedModel, load_adapter, load_model
from forerun.models.parts import check_division
from forerun.runtime.parallel.leader import Crew


@dataclass(slots=True)
class SharedModel:
    """What engines on the same model have in common."""

    loaded: LoadedModel
    kernels: Kernels
    drafts: DraftModels
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    crew: Crew | None = None  # the other ranks; None: there are none


def open_shared(config: EngineConfig) -> SharedModel:
    """Load what the options name. Raises ConfigError, ModelError, KernelError, ResourceError and RankLost."""
    for name in draft_models(config.drafter):  # here, because reading the target's weights may take minutes
        with telling_heads(name):
            check_draft(config.model, name)
    crew = None
    with telling_heads(config.model):
        if config.num_ranks > 1:
            from forerun.runtime.parallel.start import lead  # imports torch.distributed

            loaded, kernels, crew = lead(config)
        else:
            kernels = select_kernels(
                config.kernels, config.threads, device=config.device, pin=config.pin_threads,
                activations=config.activations,
            )  # fmt: skip
            loaded = load_model(
                config.model, kernels, dtype=config.dtype, generation_config=config.generation_config,
                max_position=config.max_model_len, implementation=config.implementation,
                adapters=tuple(config.lora.values()),
            )  # fmt: skip
    adapters = {name: load_adapter(name, path, loaded, kernels) for name, path in config.lora.items()}
    return SharedModel(loaded, kernels, DraftModels(loaded, kernels, config.dtype), adapters, crew)


def check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError or UnsupportedError for what several ranks do not do. Reads headers only."""
    if config.num_ranks == 1:
        return
    asked = f"tensor_parallel {config.tensor_parallel} with pipeline_parallel {config.pipeline_parallel}"
    refused = {
        "adapters (lora) are": bool(config.lora),
        "device 'cuda' is": config.device == "cuda" or config.kernels == "triton",
        "implementation 'transformers' is": config.implementation == "transformers",
    }
    what = next((what for what, is_given in refused.items() if is_given), None)
    if what is not None:
        raise UnsupportedError(
            f"{what} not for models in several processes so far, which {asked} asks for: leave one of the two out"
        )
    for drafter in (config.drafter, *config.drafter.members):
        if ":" not in drafter.name and spec_of(drafter.name).runs_layers:
            raise UnsupportedError(
                f"the drafter {drafter.name} runs the target's own layers, which {asked} divides among processes: "
                "choose another one"
            )
    check_division(config.model, config.tensor_parallel, config.pipeline_parallel)
