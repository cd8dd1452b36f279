"""`--explain`: what speculation did for one answer, and why.

Knows: how figures of a request are worded. Does not know: how they were counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forerun.cli.console import print_note
from forerun.core import DepthCount, RequestStats


def explain_dict(stats: RequestStats) -> dict[str, Any]:
    """The field "explain" of `generate --json --explain`."""
    return {
        "estimated_speedup": _rounded(stats.estimated_speedup, 3),
        "acceptance_length": round(stats.acceptance_length, 4),
        "num_steps": stats.num_steps,
        "num_plain_steps": stats.num_plain_steps,
        "wasted_nodes": stats.trees.wasted,
        "draft_s": round(stats.draft_s, 6),
        "verify_s": round(stats.verify_s, 6),
        "draft_errors": len(stats.failed_drafters),
        "failed_drafters": list(stats.failed_drafters),
        "why_plain": stats.why_plain,
        "drafters": {
            name: {"drafted": count.drafted, "accepted": count.accepted, "by_depth": _depths_dict(count.depths)}
            for name, count in stats.drafters.items()
        },
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _depths_dict(depths: Sequence[DepthCount]) -> list[dict[str, int]]:
    return [{"steps": each.tried, "drafted": each.drafted, "accepted": each.accepted} for each in depths]


def print_explanation(stats: RequestStats) -> None:
    """Dim lines on standard error."""
    for line in explain_lines(stats):
        print_note(line)


def explain_lines(stats: RequestStats) -> Iterator[str]:
    """What to say of one answer."""
    yield _steps_line(stats)
    for name, count in stats.drafters.items():
        yield f"{name}: {count.accepted} of {count.drafted} drafts accepted{_by_depth(count.depths)}"
    if stats.estimated_speedup is not None:
        yield f"estimated speed-up of decoding {stats.estimated_speedup:.2f}x, compared with measured plain steps"
    if stats.step_s > 0.0:
        yield f"drafting took {stats.draft_s * 1e3:.1f} ms, verifying {stats.verify_s * 1e3:.1f} ms"
    for name in stats.failed_drafters:
        yield f"drafter {name} failed; the text is the same without it"
    if stats.why_plain is not None:
        yield f"most steps had no drafts: {stats.why_plain}"


def _steps_line(stats: RequestStats) -> str:
    drafted = stats.num_steps - stats.num_plain_steps
    return f"{drafted} of {stats.num_steps} steps had drafts; {stats.trees.wasted} drafted tokens were verified in vain"


def _by_depth(depths: Sequence[DepthCount]) -> str:
    """By depth, the share of steps with a draft that deep in which one was accepted."""
    rates = ", ".join(f"{each.accepted / each.tried:.0%}" for each in depths if each.tried)
    return f" ({rates} by depth)" if rates else ""
