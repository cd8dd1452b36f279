"""Opens an engine for a command, and summarises a request's figures.

Knows: the offline API, and how a missing extra is told. Does not know: options of single commands.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from forerun.cli import options as opt
from forerun.cli.console import err, print_note
from forerun.cli.groups import values
from forerun.core import RequestStats
from forerun.errors import ConfigError
from forerun.progress import progress_bar

if TYPE_CHECKING:
    from forerun.config import DrafterConfig
    from forerun.llm import LLM
    from forerun.models.loader import LoadedModel
    from forerun.models.overview import Overview


def open_llm(
    model: str,
    drafter: str | DrafterConfig,
    draft_model: str | None = None,
    note: Callable[[str], None] = print_note,
    **options: Any,
) -> LLM:
    """Load a model, with a spinner on a terminal; `note` hears what is slow or left out. None is a default.

    The option `lora` is a list as on the command line.
    """
    given = engine_options(drafter=drafter, draft_model=draft_model, **options)
    prepare(model, **given)
    with err().status(Text(f"loading {model}")):
        from forerun.llm import LLM

        llm = LLM(model, **given)
    note_slow_kernels(llm.kernels, options.get("kernels"), note)
    for said in (why_slow(llm.loaded), what_part(llm.loaded)):
        if said is not None:
            note(said)
    return llm


def engine_options(**options: Any) -> dict[str, Any]:
    """What LLM is given besides the model. None is a default; `lora` is a list as on the command line."""
    given = {name: value for name, value in options.items() if value is not None}
    return {**given, "lora": opt.adapters(options.get("lora"))}


def open_to_answer(
    name: str, sampling: opt.Sampling, drafting: opt.Drafting, loading: opt.AdaptedLoading, **options: Any
) -> LLM:
    """An engine with these groups of options. Raises ConfigError for more adapters than an answer can have."""
    if len(loading.lora or ()) > 1:
        raise ConfigError(f"--lora was given {len(loading.lora or ())} times, but an answer has one adapter: give one")
    _import_engine()
    options |= {**drafting.of(name), **values(loading), "generation_config": sampling.generation_config}
    return open_llm(name, **options)


def adapter_of(llm: LLM) -> str | None:
    """The name of the adapter that answers have, where at most one is loaded."""
    return next(iter(llm.adapters), None)


@contextmanager
def needing(extra: str, command: str) -> Iterator[None]:
    """Wraps imports of what only an extra installs; raises ConfigError, which says how to install it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'`forerun {command}` needs `pip install ".[{extra}]"` in the checkout of forerun ({error})'
        ) from error


def prepare(model: str, drafter: str | DrafterConfig, draft_model: str | None = None, **options: Any) -> None:
    """Before anything is loaded: check the options, and download models from the hub."""
    _import_engine()
    from forerun.drafters.named import engine_config

    wanted = {**options, "drafter": drafter, "draft_model": draft_model}
    engine_config(model, wanted)
    fetch(model)
    drafters = engine_config(model, wanted).drafter  # `auto` knows now what the model offers
    for name in (drafters.model, *(member.model for member in drafters.members)):
        if name is not None:
            fetch(name)


def _import_engine() -> None:
    """Import torch and the engine. Their million objects are never garbage, so nobody looks there, now or later."""
    if "forerun.llm" in sys.modules:
        return
    gc.disable()
    try:
        with err().status("starting"):
            import forerun.llm  # noqa: F401
        gc.freeze()
    finally:
        gc.enable()


def fetch(model: str) -> Path:
    """A model's folder or file, downloaded with a progress bar if it is not on this machine."""
    from forerun.weights.resolve import find_local, resolve_model

    return find_local(model) or resolve_model(model, downloading)


def downloading(model: str, num_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show a download: a bar on a terminal, else one line."""
    shown = err().is_terminal
    if not shown:
        print_note(f"downloading {model}, {num_bytes / 1e9:.2f} GB")
    return progress_bar(model, num_bytes, shown, in_bytes=True)


def why_slow(loaded: LoadedModel | Overview) -> str | None:
    """The note for a model that runs through transformers; None for one that forerun runs itself."""
    if loaded.implementation == "forerun":
        return None
    if loaded.kv_specs:
        how = "with forerun's attention and matrices: as exactly as others, but not as fast as"
    else:
        how = "a token at a time: as exactly as others, but drafts and batches gain nothing, unlike with"
    name = loaded.raw_config.get("model_type")
    return (
        f"{name} models run through transformers, {how} families that forerun runs itself (docs/models.md lists them)"
    )


def what_part(loaded: LoadedModel | Overview) -> str | None:
    """The note for a multimodal model; None for one of text alone."""
    from forerun.models.multimodal import PART_OF

    whole = loaded.raw_config.get(PART_OF)
    return f"this is the text part of a {whole} model: images and sound are not read" if whole else None


def note_sampling(llm: LLM, given: Collection[str]) -> None:
    """Print the sampling parameters that the model's generation_config.json sets, but for those that are given."""
    found = ", ".join(f"{name} {value:g}" for name, value in llm.loaded.sampling.items() if name not in given)
    if found:
        print_note(f"by default {found}, from generation_config.json (ignore it with --generation-config none)")


def note_slow_kernels(kernels: Any, asked: str | None, note: Callable[[str], None] = print_note) -> None:
    """Say so if the torch reference runs without being asked for."""
    if kernels.name == "reference" and asked != "reference":
        note(f"running on the torch reference kernels, which are slow: {kernels.reason}")


def other_engine(llm: LLM, drafter: str, draft_model: str | None = None, max_draft_tokens: int | None = None) -> LLM:
    """Another drafter on the same weights; `draft_model` is for drafters that need one and do not name it."""
    with err().status(Text(f"preparing drafter {drafter}")):
        options = drafter_options(llm, drafter, draft_model)
        return llm.with_drafter(drafter, max_draft_tokens=max_draft_tokens, **options)


def drafter_options(llm: LLM, drafter: str, draft_model: str | None) -> dict[str, Any]:
    """The options of `llm`'s drafter that another drafter reads."""
    from forerun.drafters.named import only_read

    own = llm.config.drafter
    names = ("tree_width", "head_weights", "draft_vocabulary", "adaptive", "ngram_min", "ngram_max", "across_requests")
    shared = {name: getattr(own, name) for name in names}
    return only_read(llm.config.model, drafter, {**shared, "draft_model": draft_model})


def stats_dict(stats: RequestStats) -> dict[str, Any]:
    """The fields of `generate --json`, fixed by a test."""
    return {
        "num_tokens": stats.num_tokens,
        "num_steps": stats.num_steps,
        "acceptance_length": round(stats.acceptance_length, 4),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "ttft_s": round(stats.ttft_s, 6),
        "drafters": {
            name: {"drafted": count.drafted, "accepted": count.accepted} for name, count in stats.drafters.items()
        },
    }


def stats_line(stats: RequestStats) -> str:
    """One line: tokens, speed and, where something was drafted, tokens a pass and estimated speed-up."""
    steps = f"{stats.num_steps} step{'s' * (stats.num_steps != 1)}"
    tokens = f"{stats.num_tokens} token{'s' * (stats.num_tokens != 1)}"
    parts = [f"{tokens} in {steps}", f"{stats.tokens_per_s:.1f} tokens/s"]
    if stats.trees.drafted:
        parts.append(f"{stats.acceptance_length:.2f} tokens a pass")
    if stats.estimated_speedup is not None:
        parts.append(f"estimated speed-up {stats.estimated_speedup:.2f}x")
    return " · ".join(parts)
