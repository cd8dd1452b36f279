"""Opens an engine for a command, and sums up what a request cost.

Knows: the offline API. Does not know: options of single commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.cli.console import err, print_note
from forerun.config import WITH_MODEL
from forerun.core import RequestStats

if TYPE_CHECKING:
    from forerun.llm import LLM


def open_llm(model: str, drafter: str, draft_model: str | None = None, **options: Any) -> LLM:
    """Load a model, with a spinner on a terminal. Options that are None keep their defaults."""
    with err().status(f"loading {model}"):
        from forerun.llm import LLM

        given = {name: value for name, value in options.items() if value is not None}
        llm = LLM(model, drafter=drafter, draft_model=draft_model, **given)
    note_slow_kernels(llm.kernels, options.get("kernels"))
    return llm


def note_slow_kernels(kernels: Any, asked: str | None) -> None:
    """Say so where the torch reference runs without having been asked for."""
    backend, reason = kernel_choice(kernels)
    if backend == "reference" and asked != "reference":
        print_note(f"running on the torch reference kernels, which are slow: {reason}")


def kernel_choice(kernels: Any) -> tuple[str, str]:
    """The backend chosen and why."""
    selection = getattr(kernels, "selection", None)
    return (selection.backend, selection.reason) if selection else (kernels.name, "")


def other_engine(llm: LLM, drafter: str, draft_model: str | None = None, max_draft_tokens: int | None = None) -> LLM:
    """Another drafter on the same weights; `draft_model` is for drafters that take one and name none."""
    with err().status(f"preparing drafter {drafter}"):
        options = drafter_options(llm, drafter, draft_model)
        return llm.with_drafter(drafter, max_draft_tokens=max_draft_tokens, **options)


def drafter_options(llm: LLM, drafter: str, draft_model: str | None) -> dict[str, Any]:
    """The options of `llm`'s own drafter, for another one."""
    own = llm.config.drafter
    names = ("tree_width", "head_weights", "adaptive", "ngram_min", "ngram_max", "across_requests")
    options: dict[str, Any] = {name: getattr(own, name) for name in names}
    if draft_model and drafter in (*WITH_MODEL, "portfolio", "auto"):
        options["draft_model"] = draft_model
    return options


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


def stats_line(llm: LLM, stats: RequestStats, token_ids: Sequence[int]) -> str:
    """One line: tokens, speed, acceptance length and, with a drafter, the estimated speed-up over plain decoding."""
    parts = [f"{stats.num_tokens} tokens in {stats.num_steps} steps", f"{stats.tokens_per_s:.1f} tokens/s"]
    if llm.config.drafter.name != "none":
        parts.append(f"acceptance length {stats.acceptance_length:.2f}")
        parts += _speedup(llm, stats, token_ids)
    return " · ".join(parts)


def _speedup(llm: LLM, stats: RequestStats, token_ids: Sequence[int]) -> list[str]:
    from forerun.bench.plain import estimated_speedup, plain_step_s

    step_s = plain_step_s(llm, token_ids)
    speedup = estimated_speedup(stats, step_s)
    if speedup is None:
        return []
    return [f"estimated speed-up {speedup:.2f}x (a plain step takes {step_s * 1e3:.2f} ms)"]
