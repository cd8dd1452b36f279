"""Every drafter, the portfolio and their settings against plain decoding: what `forerun bench drafters` measures.

Knows: which drafters take part, under which rule and with how many drafts, and what is compared with what. Does not
know: how speed is measured (`bench.speed`), nor how a report looks (`bench.report`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from forerun.bench.interval import geometric_mean
from forerun.bench.prompts import PromptCase
from forerun.bench.speed import PLAIN, measure, report
from forerun.config import DrafterConfig
from forerun.core import SamplingParams
from forerun.drafters.named import engine_config, only_read, own_model, read
from forerun.drafters.registry import all_specs
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.policy.costs import Costs

CHAT: Final = "multi-turn conversation"
CHAT_CATEGORIES: Final = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "coupled": {},
    "token": {"verification": "rejection", "chain_rule": "token", "tree_width": 1},
    "block": {"verification": "rejection", "chain_rule": "block", "tree_width": 1},
    "tree": {"verification": "rejection", "tree_width": 2},
}


@dataclass(frozen=True, slots=True)
class Entrant:
    """A drafter with its settings; `options` are arguments of `LLM.with_drafter` that differ between entrants."""

    name: str  # in the report
    drafter: str  # as on the command line
    options: Mapping[str, Any] = field(default_factory=dict)
    num_fixed: int | None = None  # drafts a step if fixed; None: the policy chooses


def spec_bench(cases: Sequence[PromptCase]) -> list[PromptCase]:
    """Spec-Bench's six tasks: its eight MT-bench categories are one (Xia et al., arXiv 2401.07851)."""
    return [replace(case, category=CHAT) if case.category in CHAT_CATEGORIES else case for case in cases]


def auto_drafters(model: str, draft_model: str | None) -> list[str]:
    """All drafters that work with `model`, as written on the command line; the portfolio last."""
    own = [spec.name for spec in all_specs().values() if own_model(model, spec)]
    offered = [member.name for member in engine_config(model, {"drafter": "auto"}).drafter.members]
    if draft_model is None:
        return list(dict.fromkeys([*needing_nothing(), *own, *offered, "portfolio"]))
    given = f"draft={draft_model}"
    others = [name for name in offered if name != "draft"]
    everything = [*needing_nothing(), *(name for name in own if name != "draft"), *others, given]
    return [*dict.fromkeys(everything), "portfolio=" + "+".join([*others, given])]


def needing_nothing() -> list[str]:
    """The drafters that need nothing but the target."""
    return [spec.name for spec in all_specs().values() if spec.is_single and not spec.model]


def entrants(drafters: Sequence[str], fixed: Sequence[int], rules: bool) -> list[Entrant]:
    """The drafters under the policy, then with each fixed number of drafts, then under each rule."""
    names = [name for name in drafters if name != PLAIN]
    result = [] if rules else [Entrant(name, name) for name in names]
    for name in names:
        if not _is_portfolio(name):
            result += [_fixed(name, num) for num in fixed]
        if rules:
            result += [Entrant(f"{name} {rule}", name, RULES[rule]) for rule in _rules_for(name)]
    return result


def _fixed(name: str, num: int) -> Entrant:
    return Entrant(f"{name} fixed {num}", name, {"adaptive": False, "max_draft_tokens": num}, num_fixed=num)


def _rules_for(name: str) -> Iterator[str]:
    """The tree rule is compared with the chain rules only for drafters that draw chains; trees always use it."""
    return (rule for rule in RULES if rule != "tree" or read(name)[0].tree_width is not None)


def build(
    plain: LLM, wanted: Sequence[Entrant], options: Mapping[str, Any], may_lack: bool
) -> tuple[dict[str, LLM], dict[str, str]]:
    """An engine for every entrant on the same weights, plain first, and why drafters were left out.

    `may_lack`: leave out drafters that this model does not support, instead of raising the error.
    """
    engines: dict[str, LLM] = {PLAIN: plain}
    left_out: dict[str, str] = {}
    for entrant in (each for each in wanted if each.drafter not in left_out):
        try:
            given = only_read(plain.config.model, entrant.drafter, {**options, **entrant.options})
            engines[entrant.name] = plain.with_drafter(entrant.drafter, **given)
        except ForerunError as error:
            if not may_lack:
                raise
            left_out[entrant.drafter] = str(error)
    return engines, left_out


def run(
    engines: Mapping[str, LLM],
    cases: Sequence[PromptCase],
    params: Sequence[SamplingParams],
    repeats: int,
    advance: Callable[[int], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A report of all prompts and of each category for each of `params`, in order."""
    reports = []
    for given in params:
        rounds = measure(engines, cases, given, repeats, advance)
        result = report(rounds, cases, compare=True, by_category=True)
        _forget_identity(result, {name for name, llm in engines.items() if not _must_equal(engines[PLAIN], llm, given)})
        reports.append({"temperature": given.temperature, **result})
    return reports


def _must_equal(plain: LLM, llm: LLM, params: SamplingParams) -> bool:
    """Whether the tokens must equal plain decoding's, not only their distribution."""
    return params.greedy or (plain.config.verification == llm.config.verification == "coupled")


def _forget_identity(result: dict[str, Any], others: Collection[str]) -> None:
    for row in (*result["rows"], *(row for rows in result["categories"].values() for row in rows)):
        if row["drafter"] in others:
            row["identical"] = None


def let_start_from(engines: Mapping[str, LLM], wanted: Sequence[Entrant]) -> None:
    """Let policies of later runs that know nothing yet begin with what these engines' policies learned."""
    from forerun.assemble import start_from

    for llm in (engines[entrant.name] for entrant in wanted):
        usual = replace(llm.config, drafter=_sharing(llm.config.drafter))
        start_from(llm.engine, usual, llm.loaded.model, llm.kernels)


def _sharing(options: DrafterConfig) -> DrafterConfig:
    """The options as they are outside of benchmarks, where requests may learn from each other."""
    return replace(options, across_requests=True, members=tuple(map(_sharing, options.members)))


def pass_costs_ms(engines: Mapping[str, LLM]) -> dict[int, float]:
    """Milliseconds of a pass by its rows, as the engine with the most rows measured them; {} without a policy."""
    measured: list[Costs] = [
        costs for llm in engines.values() if (costs := getattr(llm.engine.policy, "costs", None)) is not None
    ]
    points = max((costs.passes.points for costs in measured), key=len, default={})
    return {rows: round(seconds * 1e3, 4) for rows, seconds in points.items()}


def against_fixed(result: Mapping[str, Any], wanted: Sequence[Entrant]) -> list[dict[str, Any]]:
    """The policy compared with the best fixed number of drafts: a row per category and drafter that has both.

    The portfolio is compared with the best of all fixed settings.
    """
    rows = []
    for category, figures in (("all", result["rows"]), *result["categories"].items()):
        speedups = {row["drafter"]: row["speedup"] for row in figures}
        for entrant in (e for e in wanted if e.num_fixed is None and e.name in speedups):
            rivals = [f for f in wanted if f.num_fixed and f.name in speedups and _competes(f, entrant)]
            best = max(rivals, key=lambda rival: speedups[rival.name], default=None)
            if best is not None:
                rows.append(_beside(category, entrant.name, best.name, speedups))
    return rows


def recommended(runs: Sequence[Mapping[str, Any]], wanted: Sequence[Entrant]) -> tuple[str, dict[str, float]]:
    """The drafter that gains most over all temperatures, plain decoding where none gains, and what each gains.

    Only drafters whose amount the policy chooses are compared. One is recommended for a gain beyond noise at some
    temperature, and never where its tokens had to be those of plain decoding and were not. A gain is a speed over that
    of plain decoding.
    """
    gains, sure = {}, {PLAIN: 0.0}
    for name in (entrant.name for entrant in wanted if entrant.num_fixed is None):
        rows = [row for run in runs for row in run["rows"] if row["drafter"] == name]
        if rows and all(row["speedup"] for row in rows):
            gains[name] = round(geometric_mean([row["speedup"] for row in rows]), 3)
            is_sure = any(row["speedup"] > 1.0 and not row["within_noise"] for row in rows)
            is_exact = all(row["identical"] is not False for row in rows)
            if gains[name] > 1.0 and is_sure and is_exact:
                sure[name] = gains[name]
    return max(sure, key=sure.__getitem__), gains


def _competes(fixed: Entrant, entrant: Entrant) -> bool:
    return fixed.drafter == entrant.drafter or _is_portfolio(entrant.drafter)


def _is_portfolio(drafter: str) -> bool:
    return "members" in read(drafter)[0].options


def _beside(category: str, name: str, best: str, speedups: Mapping[str, float]) -> dict[str, Any]:
    own, fixed = speedups[name], speedups[best]
    ratio = round(own / fixed, 3) if fixed else None
    return {"category": category, "drafter": name, "speedup": own, "best_fixed": best, "fixed_speedup": fixed,
            "ratio": ratio}  # fmt: skip
