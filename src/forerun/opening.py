"""What engines on the same model have in common, and how it comes to be: kernels, weights, adapters, other ranks.

Knows: the order of checks and of loading. Does not know: engines, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forerun.config import EngineConfig, launched_rank
from forerun.drafters.registry import draft_models, spec_of, telling_heads
from forerun.errors import UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels
from forerun.models.adapted import LoraAdapter
from forerun.models.draft_models import DraftModels, check_draft
from forerun.models.loader import LoadedModel, check_adapters, load_adapter, load_model
from forerun.models.parts import check_division
from forerun.runtime.parallel.crew import Crew
from forerun.runtime.parallel.leader import RankedModel
from forerun.runtime.parallel.places import RankPlace, check_places
from forerun.weights.resolve import resolve_model


@dataclass(slots=True)
class SharedModel:
    """What engines on the same model have in common."""

    loaded: LoadedModel
    kernels: Kernels
    drafts: DraftModels
    adapters: dict[str, LoraAdapter] = field(default_factory=dict)
    crew: Crew | None = None  # the other ranks; None: there are none

    def read_adapter(self, name: str, path: str) -> LoraAdapter:
        """A LoRA adapter, of which each rank has its part. Raises ModelError, ResourceError and RankLost."""
        if self.crew is None:
            return load_adapter(name, path, self.loaded, self.kernels)
        assert isinstance(self.loaded.model, RankedModel)
        part = replace(self.loaded, model=self.loaded.model.part)
        adapter = load_adapter(name, path, part, self.kernels)
        self.crew.open_adapter(adapter)
        return adapter


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
    shared = SharedModel(loaded, kernels, DraftModels(loaded, kernels, config.dtype), {}, crew)
    try:
        shared.adapters = {name: shared.read_adapter(name, path) for name, path in config.lora.items()}
    except BaseException:
        if crew is not None:
            crew.close()
        raise
    return shared


def check_ranks(config: EngineConfig) -> None:
    """Raise ConfigError, UnsupportedError or ResourceError for what several ranks do not do. Reads headers only."""
    if config.num_ranks == 1:
        return
    asked = f"tensor_parallel {config.tensor_parallel} with pipeline_parallel {config.pipeline_parallel}"
    if config.implementation == "transformers":
        raise UnsupportedError(
            "implementation 'transformers' is not for models in several processes so far, which "
            f"{asked} asks for: leave one of the two out"
        )
    for drafter in (config.drafter, *config.drafter.members):
        if ":" not in drafter.name and spec_of(drafter.name).runs_layers:
            raise UnsupportedError(
                f"the drafter {drafter.name} runs the target's own layers, which {asked} divides among processes: "
                "choose another one"
            )
    check_division(config.model, config.tensor_parallel, config.pipeline_parallel)
    if launched_rank() is None:  # all are started here; others say where they are when they meet
        check_places(config, dict.fromkeys(range(config.num_ranks), RankPlace.here(None)))
    check_adapters(config.lora.values(), resolve_model(config.model), config.implementation)
