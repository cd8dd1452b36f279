"""`forerun bench drafters`: every drafter and the portfolio against plain decoding, with a report.

Knows: options, suites by name, what is printed. Does not know: what is measured (`forerun.bench.drafters`) nor how the
report looks (`forerun.bench.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.prompts import PromptCase, read_prompts
from forerun.cli import options as opt
from forerun.cli.bench import PLAIN
from forerun.cli.console import err, out, print_json, print_note, progress, table
from forerun.cli.curve import whole_numbers
from forerun.cli.engine import open_llm
from forerun.cli.groups import values
from forerun.core import SamplingParams
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.drafters import Entrant
    from forerun.llm import LLM

COLUMNS = ("drafter", "tokens/s", "speed-up", "95% interval", "decoding", "tokens a pass", "identical")
AUTO, OWN, SPEC_BENCH = "auto", "own", "spec-bench"


def drafters(
    target: opt.Target,
    given: opt.DraftSizes,
    loading: opt.Loading,
    suite: Annotated[str, typer.Option(help="own (the twelve built-in prompts), spec-bench or a .jsonl file.")] = OWN,
    prompts: Annotated[Path | None, typer.Option(help="Where Spec-Bench's question.jsonl is.")] = None,
    drafters: Annotated[
        str,
        typer.Option(
            help="auto (all that work with the model), or names, NAME=MODEL, FILE.py:CLASS, separated by commas."
        ),
    ] = AUTO,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,1",
    limit: opt.Limit = None,
    max_tokens: opt.MaxTokens = 128,
    repeats: Annotated[int, typer.Option(help="Runs of every prompt and drafter.", min=1)] = 3,
    seed: opt.Seed = 0,
    fixed: Annotated[
        str | None,
        typer.Option(help="Besides the policy, measure these fixed numbers of drafts a step, such as 1,2,4,8."),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="Compare the verification rules: coupled, token, block, tree.")
    ] = False,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the report.")] = Path("drafter-report"),
    json: opt.JsonOption = False,
    verification: opt.Verification = "coupled",
    keep_profile: Annotated[
        bool,
        typer.Option(help="Keep what was found: `inspect` tells it, and policies that know nothing start from it."),
    ] = True,
) -> None:
    """Measure every drafter and the portfolio against plain decoding; recommend one; write a report into a folder."""
    cases, name = _cases(suite, prompts, limit), target.name
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed)
        for t in opt.numbers(temperature, "--temperature")
    ]
    names, sizes = _names(drafters, name, given.draft_model), whole_numbers(fixed, "--fixed") if fixed else []
    _check(rules, verification, out_folder)
    plain = open_llm(
        name, PLAIN, max_num_seqs=1, prefix_caching=False, across_requests=False, verification=verification,
        keep_learned=False, **values(loading),
    )  # fmt: skip
    asked = {key: value for key, value in values(given).items() if value is not None and key != "draft_model"}
    drafting = {"across_requests": False, **asked}
    report = {"model": name, "suite": suite, "prompts": str(prompts or suite), "max_tokens": max_tokens,
              "repeats": repeats, "seed": seed, "verification": verification}  # fmt: skip
    report |= _measure(plain, names, (sizes, rules), drafting, cases, params, repeats, drafters == AUTO, keep_profile)
    if keep_profile and "recommended" in report:
        measured = f"{len(cases)} {'built-in prompts' if suite == OWN else f'prompts of {prompts or suite}'}"
        _keep_profile(plain, report, measured)
    paths = _write(out_folder, report)
    print_json(report) if json else _show(report, paths)


def _cases(suite: str, prompts: Path | None, limit: int | None) -> list[PromptCase]:
    """The prompts of a suite. Raises ConfigError for one that does not exist, DataError for a bad file."""
    from forerun.bench.drafters import spec_bench

    if suite == SPEC_BENCH:
        if prompts is None:
            raise ConfigError(
                "Spec-Bench does not come with forerun: get data/spec_bench/question.jsonl from its repository "
                "(hemingkx/Spec-Bench) and give its path with --prompts"
            )
        return spec_bench(read_prompts(prompts, limit))
    if prompts is not None:
        raise ConfigError(f"--prompts goes with --suite spec-bench, not with {suite!r}: give --suite {prompts}")
    if suite == OWN:
        return read_prompts(None, limit)
    if not suite.endswith(".jsonl"):
        raise ConfigError(f"--suite must be own, spec-bench or a .jsonl file; got {suite!r}")
    return read_prompts(Path(suite), limit)


def _names(text: str, model: str, draft_model: str | None) -> list[str]:
    """The drafters asked for; --draft-model is added to those that need a model."""
    if text == AUTO:
        from forerun.bench.drafters import auto_drafters

        return auto_drafters(model, draft_model)
    return [_with_model(name, draft_model) for name in opt.names(text)]


def _with_model(text: str, draft_model: str | None) -> str:
    from forerun.drafters.named import read

    spec, rest = read(text)
    return f"{text}={draft_model}" if draft_model and spec.model and not rest else text


def _check(rules: bool, verification: str, folder: Path) -> None:
    """Refuse what does not go together, before anything is loaded."""
    from forerun.bench.report import check_folder

    if rules and verification != "coupled":
        raise ConfigError("--rules compares all verification rules: leave --verification out")
    check_folder(folder)


def _measure(
    plain: LLM,
    names: Sequence[str],
    variants: tuple[Sequence[int], bool],
    options: dict[str, Any],
    cases: Sequence[PromptCase],
    params: Sequence[SamplingParams],
    repeats: int,
    may_lack: bool,
    keep_profile: bool,
) -> dict[str, Any]:
    from forerun.bench import drafters as bench
    from forerun.bench.conversation import fitting_cases
    from forerun.bench.machine import describe_machine

    wanted = bench.entrants(names, *variants)
    with err().status("preparing drafters"):
        engines, left_out = bench.build(plain, wanted, options, may_lack)
    _check_some(engines, left_out)
    fitting = fitting_cases(plain, cases)
    with progress("prompts", len(fitting) * len(params)) as advance:
        runs = bench.run(engines, fitting, params, repeats, advance)
    present: list[Entrant] = [entrant for entrant in wanted if entrant.name in engines]
    found = {}
    if not variants[1]:  # rules are compared, not drafters
        best, gains = bench.recommended(runs, present)
        found = {"recommended": best, "gains": gains}
        if keep_profile:
            bench.let_start_from(engines, [entrant for entrant in present if entrant.num_fixed is None])
    return {
        **found,
        "runs": [{**run, "against_fixed": bench.against_fixed(run, present)} for run in runs],
        "fixed": [entrant.name for entrant in present if entrant.num_fixed],
        "left_out": left_out,
        "pass_ms": bench.pass_costs_ms(engines),
        "num_prompts": len(fitting),
        "num_too_long": len(cases) - len(fitting),
        "machine": describe_machine(plain.kernels),
    }


def _keep_profile(plain: LLM, report: dict[str, Any], measured: str) -> None:
    """For `forerun inspect`."""
    from time import time

    from forerun.assemble import machine_of
    from forerun.config import profiles_folder
    from forerun.learned import Profile

    model, machine = str(plain.loaded.folder), machine_of(plain.kernels)
    Profile(model, machine, measured, time(), report["recommended"], report["gains"]).save(profiles_folder())


def _check_some(engines: dict[str, LLM], left_out: dict[str, str]) -> None:
    if len(engines) == 1:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"there is no drafter to compare with plain decoding; name one with --drafters ({reasons})")


def _write(folder: Path, report: dict[str, Any]) -> list[Path]:
    from forerun.bench.report import write
    from forerun.bench.report_pictures import draw

    return write(folder, report, draw(report))


def _show(report: dict[str, Any], paths: Sequence[Path]) -> None:
    """The first table of each temperature, and the paths of the report."""
    from forerun.bench.report import NOISE, drafter_table

    for run in report["runs"]:
        full = drafter_table(run, f"{report['model']}, temperature {run['temperature']:g}")
        columns = [full.header.index(name) for name in COLUMNS]
        result = table(*(name.replace(" ", "\n") for name in COLUMNS), title=full.title)
        for row in full.rows:
            result.add_row(*(row[column] for column in columns))
        out().print(result)
        out().print()
    print_note(NOISE)
    for name, reason in report["left_out"].items():
        print_note(f"{name} was left out: {reason}")
    out().print("report: " + ", ".join(str(path) for path in paths), soft_wrap=True)
    if "recommended" in report:
        gain = report["gains"].get(report["recommended"])
        said = f"{gain:.2f} times plain decoding" if gain else "no drafter gains beyond noise on these prompts"
        out().print(f"recommended: --drafter {report['recommended']}, {said}", soft_wrap=True)
