"""Loading a folder with transformers: what it can run as a causal language model, and one line for what it cannot.

Knows: transformers' tables of model types and what its loading reports. Does not know: how the loaded model is run.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import logging as hf_logging

from forerun.errors import CheckpointError, ForerunError, ResourceError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.models.base import LayerSpec
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.family import MAX_LAYERS
from forerun.models.hf import HFModel
from forerun.models.hf_fitting import fit, probe
from forerun.models.hf_matrices import stand_in, why_not
from forerun.models.hf_pooled import PooledHFModel, specs_of

log = logging.getLogger("forerun.models")

_MAX_REASON = 300  # characters of another library's message


def read_hf_config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Transformers' configuration of a local folder whose config.json is `raw`.

    Raises CheckpointError for a damaged config.json, UnsupportedError for what transformers cannot run as a causal
    language model.
    """
    _check_type(folder, raw)
    with _quiet(), _one_line(f"transformers cannot read config.json of {folder}", "correct the file"):
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        _check_config(folder, config)
    return config


def load_hf_model(folder: Path, config: Any, dtype: torch.dtype | None, kernels: Kernels) -> HFModel | PooledHFModel:
    """Load a local folder of that configuration; dtype None keeps the stored precision.

    On a CPU over the pool if the model can be run so (`hf_fitting`), else row by row. float16 is widened.
    Raises CheckpointError for missing, misshapen or damaged tensors, UnsupportedError if a library is missing.
    """
    with (
        _quiet(),
        _one_line(f"transformers cannot load {folder}", "compare config.json and the weights with the source"),
    ):
        module = _load(folder, config, dtype)
        if kernels.device.type == "cpu":
            reason = why_not(module)
            if reason is None:
                try:
                    return _with_kernels(module, kernels)
                except Exception as error:  # of a model that reads the matrices of its layers itself
                    if _is_of_memory(error):
                        raise
                    reason = _reason(error)
                del module  # behind the `except`, whose traceback holds it too: two copies may not fit
                gc.collect()
                module = _load(folder, config, dtype)
            log.info("%s runs without forerun's kernels: %s", folder, reason)
        model = HFModel(module.to(kernels.device), kernels.device)
        _try_out(model)
    return model


def kv_specs_of(config: Any, dtype: torch.dtype | None) -> tuple[LayerSpec, ...]:
    """What a model of that configuration keeps in the pool, told without its weights; () if it runs row by row.

    dtype None: the stored one.
    """
    theirs: Any = AutoModelForCausalLM
    try:
        with _quiet(), torch.device("meta"):
            module = theirs.from_config(config, attn_implementation="eager").eval()
        narrow = (dtype or module.dtype) == torch.bfloat16
        stand_in(module, None)
        with _quiet():  # some modules warn in a pass
            sites, _ = probe(module.to_empty(device="cpu"))
    except Exception as error:
        log.info("%s models run row by row: %s", config.model_type, _reason(error))
        return ()
    return specs_of(sites, torch.bfloat16 if narrow else torch.float32)


def _load(folder: Path, config: Any, dtype: torch.dtype | None) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), config=config, local_files_only=True, trust_remote_code=False, dtype=dtype or "auto",
        output_loading_info=True, ignore_mismatched_sizes=True, attn_implementation="eager",
    )  # fmt: skip
    module, report = loaded
    _check_tensors(folder, report)
    if any(parameter.dtype == torch.float16 for parameter in module.parameters()):
        module = module.float()
    return module.eval()


def _with_kernels(module: Any, kernels: Kernels) -> HFModel | PooledHFModel:
    """The module with its matrices in the kernels, over the pool if it can be."""
    narrow = module.dtype == torch.bfloat16
    stand_in(module, kernels)
    try:
        return fit(module, kernels, torch.bfloat16 if narrow else torch.float32)
    except Exception as error:
        if _is_of_memory(error):
            raise
        log.info("%s runs row by row: %s", type(module).__name__, _reason(error))
    model = HFModel(module)
    _try_out(model)
    return model


def _check_type(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what is no causal language model of transformers, before it looks for code to run."""
    kind, code = str(raw.get("model_type")), raw.get("auto_map")
    if kind in CONFIG_MAPPING and kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if code:
        names = ", ".join(sorted(map(str, code.values())) if isinstance(code, Mapping) else [str(code)])
        raise UnsupportedError(
            f"{folder} is a {kind} model, which brings Python code of its own ({names[:160]}); forerun runs no code of "
            "checkpoints (trust_remote_code): choose a model whose family transformers has"
        )
    if kind in CONFIG_MAPPING:
        raise UnsupportedError(
            f"{folder} is a {kind} model, which transformers {transformers.__version__} does not run as a causal "
            "language model; choose one that writes text from left to right"
        )
    raise UnsupportedError(
        f"{folder} is a {kind} model, which neither forerun nor transformers {transformers.__version__} knows; correct "
        "model_type in config.json, or install a newer transformers if the model is newer than this one"
    )


def _check_config(folder: Path, config: Any) -> None:
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or config.model_type == "bert-generation"
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            f"{folder} is an encoder-decoder ({config.model_type}); forerun runs decoders alone: choose a causal "
            "language model"
        )
    if is_encoder and not getattr(config, "is_decoder", False):
        raise UnsupportedError(
            f"{folder} is an encoder ({config.model_type} with is_decoder false), which fills gaps and writes no text; "
            "choose a causal language model"
        )
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise CheckpointError(f"config.json of {folder} asks for {layers} layers, at most {MAX_LAYERS} are possible")


def _check_tensors(folder: Path, report: Mapping[str, Any]) -> None:
    missing = sorted(str(name) for name in report["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors, e.g. {', '.join(missing[:3])}; the checkpoint is incomplete: "
            "download or copy it again"
        )
    misshapen = sorted((str(name), list(stored), list(wanted)) for name, stored, wanted in report["mismatched_keys"])
    if misshapen:
        name, stored, wanted = misshapen[0]
        raise CheckpointError(
            f"{folder} has {len(misshapen)} tensors of another shape than config.json asks for, e.g. {name} {stored} "
            f"instead of {wanted}; weights and config.json do not belong together"
        )


def _try_out(model: HFModel) -> None:
    """Two tokens, the second on the cache of the first: what config.json asks for may load and yet not run."""
    rows = SequenceRows("", [0], 0, (0, 0), 2)
    model.forward(ForwardBatch.build([rows], block_size=len(rows.span)), ())
    model.release(rows.request_id)


@contextmanager
def _one_line(what: str, remedy: str) -> Iterator[None]:
    """Turn what transformers raises, dozens of kinds over many lines, into one CheckpointError of one line."""
    try:
        yield
    except ForerunError:
        raise
    except ImportError as error:
        raise UnsupportedError(f"{what}: {_reason(error)}; install what it needs, or choose another model") from error
    except Exception as error:
        if _is_of_memory(error):
            raise ResourceError(f"{what}: {_reason(error)}; free memory, or choose a smaller model") from error
        raise CheckpointError(f"{what}: {_reason(error)}; {remedy}") from error


def _is_of_memory(error: Exception) -> bool:
    """Whether memory ran out, which says nothing about the model."""
    return isinstance(error, (MemoryError, ResourceError, torch.OutOfMemoryError)) or "allocate memory" in str(error)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    cut = text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."
    return f"{type(error).__name__}: {cut}".removesuffix(": ")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and warnings."""
    theirs: Any = hf_logging
    shown, level = theirs.is_progress_bar_enabled(), theirs.get_verbosity()
    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.set_verbosity(level)
        if shown:
            theirs.enable_progress_bar()
