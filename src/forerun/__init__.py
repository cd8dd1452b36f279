"""forerun: faster decoding for open language models, with output proven unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.config import DrafterConfig, EngineConfig
from forerun.core import CompletionOutput, RequestOutput, SamplingParams
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "DrafterConfig",
    "EngineConfig",
    "ForerunError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import LLM, and torch with it, only when it is asked for: `forerun --help` stays quick."""
    if name == "LLM":
        from forerun.llm import LLM

        return LLM
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
