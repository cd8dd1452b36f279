"""Reads vLLM's --speculative-config, for users who switch from vLLM.

Knows: its options and ours; the names of methods are in each DrafterSpec. Does not know: what a drafter does.
Source of the names: vLLM, docs/features/speculative_decoding and config/speculative.py.
"""

from __future__ import annotations

import json
from typing import Any

from forerun.drafters.registry import all_specs
from forerun.errors import ConfigError

NAMES = {
    "model": "draft_model",
    "num_speculative_tokens": "max_draft_tokens",
    "prompt_lookup_min": "ngram_min",
    "prompt_lookup_max": "ngram_max",
}
WITHOUT_EFFECT = {  # what forerun does anyway
    "draft_tensor_parallel_size": (1,),
    "disable_padded_drafter_batch": (True, False),
    "draft_sample_method": ("greedy", "probabilistic"),
}


def parse_speculative_config(text: str) -> dict[str, Any]:
    """vLLM's JSON -> our options `drafter`, `draft_model`, `max_draft_tokens`, `ngram_min`, `ngram_max`.

    Raises ConfigError for anything that has no meaning here.
    """
    given = _read(text)
    methods = {method: spec for spec in all_specs().values() for method in spec.vllm_names}
    method = given.pop("method", None) or ("draft_model" if given.get("model") else None)
    if method not in methods:
        known = ", ".join(map(repr, methods))
        raise ConfigError(f"speculative_config: method must be one of {known}; got {method!r}")
    spec = methods[method]
    if not spec.model and given.get("model") in (method, f"[{method}]"):  # vLLM lets `model` repeat the method here
        del given["model"]
    unknown = [name for name, value in given.items() if name not in NAMES and not _has_no_effect(name, value)]
    if unknown:
        given_ones, allowed = (", ".join(map(repr, names)) for names in (unknown, ("method", *NAMES)))
        raise ConfigError(f"speculative_config: {given_ones} not supported here; the fields are {allowed}")
    options = {NAMES[name]: value for name, value in given.items() if name in NAMES and value is not None}
    if "ngram_max" in options and "ngram_min" in spec.options:  # as in vLLM: the minimum defaults to the maximum
        options.setdefault("ngram_min", options["ngram_max"])
    return {"drafter": spec.name, **options}


def _has_no_effect(name: str, value: Any) -> bool:
    return value is None or value in WITHOUT_EFFECT.get(name, ())


def _read(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f'speculative_config must be an object such as {{"method": "ngram"}}; got {text}')
    return given
