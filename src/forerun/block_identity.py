"""What the bits of a block of KV depend on, as far as one process knows: by this blocks are named outside of it.

Knows: weights, code, libraries, kernels, tensors. Does not know: engines, drafters, tiers, other ranks.

These are the weights' bytes, forerun's own code and the libraries that compute, the kernels as far as they round
differently (all instruction sets of CPUs give the same bits, but for AMX: decisions 0009 and 0014), and the shapes and
types of all tensors in the pool.
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

import forerun
from forerun.cache.kv_cache import KVCache
from forerun.kernels.ops import Kernels
from forerun.models.base import Model
from forerun.models.decoder import Decoder
from forerun.weights.identity import code_digest, digest_of

FORMAT: Final = 1  # of what is in a record


def about_part(model: Model, kernels: Kernels, folder: Path, kv_cache: KVCache) -> dict[str, str]:
    """Of the model, or the part of it, in this process, read from these files. Raises OSError where they are gone."""
    tensors = [tensor for layer in kv_cache.layers for tensor in (layer.keys, layer.values)]
    shapes = [f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in tensors]
    return {
        "format": str(FORMAT),
        "weights": digest_of(folder),
        "code": _own_code(),
        "libraries": f"torch {torch.__version__}, transformers {_version('transformers')}, triton {_version('triton')}",
        "kernels": rounding_of(kernels, model),
        "blocks": f"{kv_cache.block_size} tokens of {', '.join(shapes)}",
    }


@cache
def _own_code() -> str:
    return code_digest(Path(forerun.__file__).parent)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def rounding_of(kernels: Kernels, model: Model) -> str:
    """Equal for kernels that give the same bits."""
    if not kernels.name.startswith("cpu-"):
        own = f"{kernels.name}, {kernels.reason}{_torch_here() if kernels.device.type == 'cpu' else ''}"
    else:
        own = "cpu with AMX" if "amx" in kernels.name else "cpu"
    by_torch = "" if isinstance(model, Decoder) else _torch_here()
    return f"{own}{', activations in float32' * kernels.float_activations}{by_torch}"


def _torch_here() -> str:
    """Of what torch computes on a CPU: its libraries choose by the processor, and divide sums among threads."""
    return f", torch on {torch.backends.cpu.get_cpu_capability()}, {_processor()}, {torch.get_num_threads()} threads"


def _processor() -> str:
    """The fields that tell one model of a processor from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return hashlib.sha256(json.dumps([found.get(name) for name in names]).encode()).hexdigest()[:16]
