"""`forerun verify`: checks that output with drafters equals output without.

Knows: options, tables, the exit status. Does not know: how outputs are compared (`forerun.bench.equality`) nor how
the rejection rule is tested (`forerun.speculation.selfcheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.prompts import PromptCase, read_prompts
from forerun.cli import options as opt
from forerun.cli.bench import PLAIN, check_drafters, engines_by_name, plain_with
from forerun.cli.console import out, print_json, print_note, progress, table
from forerun.cli.engine import open_llm, prepare
from forerun.cli.groups import values
from forerun.core import SamplingParams

if TYPE_CHECKING:
    from forerun.llm import LLM

EXIT_DIFFERENT = 1


def verify(
    target: opt.Target,
    sizes: opt.DraftSizes,
    loading: opt.AdaptedLoading,
    drafters: opt.Drafters = None,
    prompts: opt.PromptsFile = None,
    limit: opt.Limit = None,
    max_tokens: opt.MaxTokens = 64,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.7,1",
    seed: opt.Seed = 0,
    batch_size: Annotated[int, typer.Option(help="Conversations the drafters run at once.", min=1)] = 8,
    tensor_parallel: Annotated[
        str, typer.Option(help="Processes that share every layer, separated by commas.", rich_help_panel=opt.ENGINE)
    ] = "1",
    pipeline_parallel: Annotated[
        str, typer.Option(help="Groups of layers, likewise; all pairs are compared.", rich_help_panel=opt.ENGINE)
    ] = "1",
    json: opt.JsonOption = False,
    adaptive: Annotated[
        bool,
        typer.Option(
            help="Let the policy decide as in normal use; by default every step drafts, which tests more.",
            rich_help_panel=opt.DRAFTING,
        ),
    ] = False,
) -> None:
    """Compare drafters' tokens with plain decoding, and test the rejection rule.

    Exit status 1: a difference, or a drafter that failed. Plain decoding runs in one process, whatever
    --tensor-parallel and --pipeline-parallel say, and takes one conversation at a time; drafter `none` is plain
    decoding in batches. Of adapters, the conversations have none, the first, the second and so on in turn.
    """
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed)
        for t in opt.numbers(temperature, "--temperature")
    ]
    cases = read_prompts(prompts, limit)
    wanted = opt.chosen_drafters(drafters, name := target.name, sizes.draft_model)
    check_drafters(wanted)
    pairs = _pairs(name, tensor_parallel, pipeline_parallel, values(loading))
    options: dict[str, Any] = {
        "drafter": plain_with(sizes, adaptive), "max_num_seqs": batch_size, "keep_learned": adaptive, **values(loading)
    }  # fmt: skip
    plain = open_llm(name, **options)
    report: dict[str, Any] = {"model": name, "prompts": str(prompts or "own"), "max_tokens": max_tokens, "seed": seed}
    report["checks"] = []
    for shards, stages in pairs:
        given: dict[str, Any] = {"tensor_parallel": shards, "pipeline_parallel": stages}
        llm = plain if (shards, stages) == (1, 1) else open_llm(name, **options, **given)
        with nullcontext() if llm is plain else closing(llm):
            engines = engines_by_name(llm, wanted, sizes)
            found = _compare(plain, {drafter: engines[drafter] for drafter in wanted}, cases, params, batch_size)
        report |= {**found, "checks": [*report["checks"], *({**check, **given} for check in found["checks"])]}
    report["rejection"] = _check_rejection(plain)
    report["identical"] = not any(check["differences"] for check in report["checks"])
    report["failed"] = any(check["num_failed"] for check in report["checks"])
    report["passed"] = report["identical"] and not report["failed"] and report["rejection"]["passed"]
    print_json(report) if json else _show(report)
    if not report["passed"]:
        raise typer.Exit(EXIT_DIFFERENT)


def _pairs(
    name: str, tensor_parallel: str, pipeline_parallel: str, loading: dict[str, Any]
) -> list[tuple[int, int]]:  # fmt: skip
    """All pairs of the degrees; raises ConfigError, ModelError or ResourceError for those that cannot be."""
    stages = opt.degrees(pipeline_parallel, "--pipeline-parallel")
    pairs = list(product(opt.degrees(tensor_parallel, "--tensor-parallel"), stages))
    prepare(name, PLAIN)
    from forerun.drafters.named import engine_config
    from forerun.opening import check_ranks

    where = {option: loading[option] for option in ("device", "kernels")}
    for shards, groups in pairs:
        check_ranks(engine_config(name, {"tensor_parallel": shards, "pipeline_parallel": groups, **where}))
    return pairs


def _compare(
    plain: LLM,
    engines: dict[str, LLM],
    cases: Sequence[PromptCase],
    params: Sequence[SamplingParams],
    batch_size: int,
) -> dict[str, Any]:
    from forerun.bench.conversation import fitting_cases
    from forerun.bench.equality import check_equality
    from forerun.bench.machine import describe_machine

    fitting = fitting_cases(plain, cases)
    total = len(fitting) * len(params) * (1 + len(engines))
    with progress("conversations", total) as advance:
        checks = check_equality(plain, engines, fitting, params, batch_size, advance)
    return {
        "checks": [{**asdict(check), "acceptance_length": round(check.acceptance_length, 3)} for check in checks],
        "num_too_long": len(cases) - len(fitting),
        "machine": describe_machine(plain.kernels),
    }


def _check_rejection(llm: LLM) -> dict[str, Any]:
    """The rejection rule's chi-square tests on cases small enough to enumerate, with the kernels in use."""
    from forerun.speculation.selfcheck import CASES, NUM_SAMPLES, check_rejection

    with progress("texts of the rejection rule", len(CASES) * NUM_SAMPLES) as advance:
        checks = check_rejection(llm.kernels, advance=advance)
    return {
        "passed": all(check.passed for check in checks),
        "cases": [{**asdict(check), "passed": check.passed} for check in checks],
    }


def _show(report: dict[str, Any]) -> None:
    console = out()
    result = table("drafter", "temperature", "prompts", "tokens", "tokens a pass", "different")
    for check in report["checks"]:
        length, different = f"{check['acceptance_length']:.2f}", str(len(check["differences"]))
        figures = (f"{check['temperature']:g}", str(check["num_prompts"]), str(check["num_tokens"]))
        result.add_row(_named(check), *figures, length, different)
    console.print(result)
    for check in report["checks"]:
        for difference in check["differences"]:
            console.print(_describe(check, difference), soft_wrap=True)
        if check["num_failed"]:
            said = (
                f"{', '.join(check['failed'])} failed (answers: {check['num_failed']}), so not all drafts were checked"
            )
            console.print(f"drafter {_with_temperature(check)}: {said}", soft_wrap=True)
        elif not check["num_drafted"] and check["drafter"] != PLAIN:
            print_note(f"drafter {_with_temperature(check)} drafted nothing: there were no drafts to check")
    _show_rejection(report["rejection"])
    if report["num_too_long"]:
        console.print(f"{report['num_too_long']} prompts are longer than the context and were left out")
    if report["passed"]:
        console.print("identical", style="bold green")
    elif report["identical"] and report["rejection"]["passed"]:
        console.print("FAILED", style="bold red")
    else:
        console.print("DIFFERENT", style="bold red")


def _named(check: dict[str, Any]) -> str:
    shards, stages = check["tensor_parallel"], check["pipeline_parallel"]
    return str(check["drafter"]) + (f", {shards}x{stages} ranks" if (shards, stages) != (1, 1) else "")


def _with_temperature(check: dict[str, Any]) -> str:
    return f"{_named(check)} at temperature {check['temperature']:g}"


def _describe(check: dict[str, Any], difference: dict[str, Any]) -> str:
    turn = f" turn {difference['turn'] + 1}" if difference["turn"] else ""
    return (
        f"{_with_temperature(check)}: {difference['prompt']}{turn} differs first at "
        f"token {difference['position']}: plain {difference['expected']}, drafted {difference['got']}"
    )


def _show_rejection(rejection: dict[str, Any]) -> None:
    cases = rejection["cases"]
    failed = [case for case in cases if not case["passed"]]
    verdict = f"[red]{len(failed)} FAILED[/]" if failed else "[green]passed[/]"
    out().print(
        "The rejection rule, on a toy model of three tokens whose true chances are known (not on yours): "
        f"{len(cases)} cases, {verdict}",
        markup=True,
    )
    for case in failed:
        out().print(
            f"rejection rule, {case['rule']}: chi-square {case['chi_square']:.1f} over {case['degrees']} degrees, "
            f"p = {case['p_value']:.3f}, {case['num_samples']} texts: [red]FAILED[/]",
            markup=True,
        )
