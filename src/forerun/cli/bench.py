"""`forerun bench speed`: drafters against plain decoding, on one model and one set of prompts.

Knows: options and tables. Does not know: how speed is measured (`forerun.bench.speed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.chart import check_chart
from forerun.bench.prompts import PromptCase, read_prompts
from forerun.cli import options as opt
from forerun.cli.console import out, print_json, print_note, progress, table
from forerun.cli.engine import open_llm, other_engine, prepare
from forerun.cli.groups import values
from forerun.config import DrafterConfig
from forerun.core import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

PLAIN = "none"


def speed(
    target: opt.Target,
    sizes: opt.DraftSizes,
    loading: opt.Loading,
    drafters: opt.Drafters = None,
    prompts: opt.PromptsFile = None,
    limit: opt.Limit = None,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 0.0,
    repeats: Annotated[int, typer.Option(help="Runs of every prompt and drafter.", min=1)] = 3,
    seed: opt.Seed = 0,
    by_category: Annotated[bool, typer.Option(help="Also print a table for each category of prompts.")] = False,
    chart: opt.ChartFile = None,
    json: opt.JsonOption = False,
    adaptive: opt.Adaptive = True,
    verification: opt.Verification = "coupled",
) -> None:
    """Measure tokens per second of each drafter, interleaved prompt by prompt, and speed-ups with their intervals."""
    check_chart(chart)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    cases = read_prompts(prompts, limit)
    name = target.name
    wanted = opt.chosen_drafters(drafters, name, sizes.draft_model)
    check_drafters(wanted)
    _prepare_all(name, wanted, sizes)
    plain = open_llm(
        name, plain_with(sizes, adaptive, across_requests=False), verification=verification, **values(loading),
        max_num_seqs=1, prefix_caching=False, keep_learned=False,
    )  # fmt: skip
    engines = engines_by_name(plain, wanted, sizes)
    _note_widened(plain)
    report = _measure(engines, cases, params, repeats, by_category)
    settings = {"model": name, "prompts": str(prompts or "own"), "max_tokens": max_tokens, "temperature": temperature}
    report |= {**settings, "repeats": repeats, "verification": verification, "seed": seed}
    print_json(report) if json else _show(report)
    if chart is not None:
        chart.write_text(_drawn(report), "utf-8")


def _prepare_all(model: str, drafters: Sequence[str], sizes: opt.DraftSizes) -> None:
    """`prepare` for each drafter, with the draft model for those that take one."""
    from forerun.drafters.named import takes_model

    for drafter in drafters:
        draft_model = sizes.draft_model if takes_model(drafter) else None
        prepare(model, drafter, draft_model, max_draft_tokens=sizes.max_draft_tokens)


def _note_widened(llm: LLM) -> None:
    from forerun.bench.speed import WIDENED_FROM

    origin = llm.loaded.raw_config.get(WIDENED_FROM)
    if origin:
        print_note(
            f"this model was widened from {origin['model']}: it writes that model's text at the cost of a larger one"
        )


def plain_with(sizes: opt.DraftSizes, adaptive: bool, **others: Any) -> DrafterConfig:
    """Plain decoding with options for the engines of `engines_by_name`, of which each takes those that it reads."""
    sizes_of = {name: getattr(sizes, name) for name in ("tree_width", "head_weights", "draft_vocabulary")}
    return DrafterConfig(name=PLAIN, adaptive=adaptive, **sizes_of, **others)


def engines_by_name(plain: LLM, names: Sequence[str], sizes: opt.DraftSizes) -> dict[str, LLM]:
    """An engine for every drafter on the same weights, plain first."""
    asked = (sizes.draft_model, sizes.max_draft_tokens)
    return {PLAIN: plain, **{name: other_engine(plain, name, *asked) for name in names if name != PLAIN}}


def _measure(
    engines: dict[str, LLM], cases: Sequence[PromptCase], params: SamplingParams, repeats: int, by_category: bool
) -> dict[str, Any]:
    from forerun.bench.conversation import fitting_cases
    from forerun.bench.machine import describe_machine
    from forerun.bench.speed import measure, report

    plain = engines[PLAIN]
    fitting = fitting_cases(plain, cases)
    with progress("prompts", len(fitting)) as advance:
        rounds = measure(engines, fitting, params, repeats, advance)
    compare = params.greedy or plain.config.verification == "coupled"
    result = report(rounds, fitting, compare, by_category)
    return {**result, "num_prompts": len(fitting), "num_too_long": len(cases) - len(fitting),
            "machine": describe_machine(plain.kernels)}  # fmt: skip


def _show(report: dict[str, Any]) -> None:
    from forerun.bench.machine import machine_line
    from forerun.bench.report import NOISE

    console = out()
    console.print(_table(report["rows"], report["details"], _title(report)))
    for category, rows in report.get("categories", {}).items():
        console.print()
        console.print(_table(rows, report["category_details"][category], category))
    print_note(NOISE)
    print_note(machine_line(report["machine"]))
    if report["num_too_long"]:
        print_note(f"{report['num_too_long']} prompts are longer than the context and were left out")


def _title(report: dict[str, Any]) -> str:
    return f"{report['model']}, {report['num_prompts']} prompts, temperature {report['temperature']:g}"


def _drawn(report: dict[str, Any]) -> str:
    """The speed-ups as SVG, over categories if there are any."""
    from forerun.bench.chart import svg
    from forerun.bench.report_pictures import speedups

    groups = {"all": report["rows"], **report.get("categories", {})}
    names = [row["drafter"] for row in report["rows"] if row["drafter"] != PLAIN]
    return svg(speedups(_title(report), groups, names or [PLAIN]))


def _table(rows: Sequence[dict[str, Any]], details: dict[str, dict[str, Any]], title: str) -> Any:
    """Speed and speed-up including the prefill, then of decoding alone."""
    from forerun.bench.report import decode_gain, gain, marked, spread

    columns = ("drafter", "tokens/s", "speed-up", "95%\ninterval", "decoding", "tokens\na pass", "identical")
    result = table(*columns, title=title)
    for row in rows:
        same = {True: "yes", False: "NO", None: "-"}[row["identical"]]
        detail = details[row["drafter"]]
        figures = (gain(row), spread(row), decode_gain(detail), f"{row['acceptance_length']:.2f}")
        result.add_row(marked(row, detail), f"{row['tokens_per_s']:.1f}", *figures, same)
    return result


def check_drafters(names: Sequence[str]) -> None:
    """Raise ConfigError for a drafter that does not exist, before a model is loaded."""
    from forerun.drafters.named import read

    for name in names:
        read(name)
