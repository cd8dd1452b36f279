"""`forerun bench serve`: load any OpenAI-compatible server and measure how it copes.

Knows: options, what is printed. Does not know: requests (`forerun.bench.serve_client`), loads (`serve_load`), figures
(`serve_report`).
"""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.bench.prompts import read_prompts
from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note, progress, table
from forerun.cli.engine import needing
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.serve_client import Client, RequestOutcome
    from forerun.bench.serve_load import OfferedLoad
    from forerun.bench.serve_report import Objective
    from forerun.bench.serve_workload import Conversation, RequestFields, Scale

WORK, LOAD, GOALS = "What is asked", "How it is asked", "What is reported"
USUAL_CONCURRENCY = 16
TIMES = {"ttft_s": "first text (TTFT)", "tpot_s": "per token (TPOT)", "gap_s": "between pieces",
         "latency_s": "whole answer"}  # fmt: skip
SENT_LATE_S = 0.05  # beyond this p99, the measurement may be of the load generator itself


def _work(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=WORK, **limits)


def _load(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=LOAD, **limits)


def _goal(help_text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=GOALS, **limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The server, the load, and what is reported."""

    url: Annotated[str, typer.Argument(metavar="[URL]", help="The server's address.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Name of the model, or several with commas, in turn. Default: the first that the server lists.",
        ),
    ] = None
    api_key: Annotated[str | None, typer.Option(help="API key, if the server needs one.")] = None
    endpoint: Annotated[str, _work("chat, completions, or auto: by the kind of each prompt.")] = "auto"
    prompts: Annotated[
        Path | None,
        _work(
            "A .jsonl file of prompts; the twelve built-in ones unless given. Turns of a conversation are requests of "
            "their own."
        ),
    ] = None
    input_len: Annotated[
        int | None, _work("Instead of a file: prompts of random words with about so many tokens.", min=1)
    ] = None
    input_spread: Annotated[float, _work("Lengths differ from --input-len by up to this share.", min=0, max=1)] = 0.0
    prefix_len: Annotated[int, _work("Tokens of a prefix that requests share.", min=0)] = 0
    num_prefixes: Annotated[int, _work("Prefixes of that length, taken in turn.", min=1)] = 1
    max_tokens: Annotated[int, _work("Most tokens of an answer.", "--max-tokens", "-n", min=1)] = 128
    temperature: Annotated[float, _work("0 always takes the most probable token.", "--temperature", "-t", min=0)] = 0.0
    ignore_eos: Annotated[bool, _work("Always --max-tokens; not every server knows this field.", "--ignore-eos")] = (
        False
    )
    extra_body: Annotated[str | None, _work('More fields, as JSON: \'{"speculation": "off"}\'.')] = None
    usage: Annotated[bool, _work("Ask for token counts; without them pieces of text are counted.")] = True
    seed: Annotated[int, _work("For texts, arrival times and answers.")] = 0
    num_requests: Annotated[int, _load("Requests that are measured.", min=1)] = 64
    concurrency: Annotated[
        int | None,
        _load(
            "Most requests at the same time; 16 without --rate.", min=1, show_default="no limit with --rate, else 16"
        ),
    ] = None
    rate: Annotated[
        float | None,
        _load("Arrivals a second, at random (Poisson) times; without it the next request comes when one has ended."),
    ] = None
    warmup: Annotated[int, _load("Requests sent before measuring.", min=0)] = 1
    timeout: Annotated[float, _load("Seconds a request may take.", min=0.001)] = 600.0
    slo_ttft: Annotated[
        float | None, _goal("Goodput counts requests with their first text in so many seconds.", min=0)
    ] = None
    slo_tpot: Annotated[float | None, _goal("Goodput counts requests with so few seconds a token.", min=0)] = None
    chart: opt.ChartFile = None
    json: opt.JsonOption = False


def bench_serve(given: Options) -> None:
    """Put a load on any OpenAI-compatible server: latencies, throughput, goodput, errors."""
    request = _request(given)
    import asyncio

    outcomes, facts = asyncio.run(_measure(request))
    report = _report(request, outcomes, facts)
    print_json(report) if given.json else _show(report)
    if given.chart is not None:
        _draw(request, outcomes, report, given.chart)
        if not given.json:
            out().print(f"chart: {given.chart}", soft_wrap=True)
    if report["num_answered"] == 0:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Request:
    """The options, checked."""

    given: Options
    root: str
    load: OfferedLoad
    objective: Objective
    extra: dict[str, Any]


def _request(given: Options) -> _Request:
    """Raises ConfigError for options that do not go together, before anything is sent."""
    with needing("server", "bench serve"):
        from forerun.bench.serve_client import api_root
        from forerun.bench.serve_load import OfferedLoad
    from forerun.bench.chart import check_chart
    from forerun.bench.serve_report import Objective
    from forerun.bench.serve_workload import ENDPOINTS

    if given.endpoint not in ENDPOINTS:
        raise ConfigError(f"--endpoint must be one of {', '.join(ENDPOINTS)}; got {given.endpoint!r}")
    if given.prompts is not None and given.input_len is not None:
        raise ConfigError("--prompts and --input-len were given: give one of them")
    if given.input_spread and given.input_len is None:
        raise ConfigError("--input-spread goes with --input-len")
    check_chart(given.chart)
    usual = USUAL_CONCURRENCY if given.rate is None else None
    load = OfferedLoad(given.concurrency or usual, given.rate, given.seed)
    return _Request(given, api_root(given.url), load, Objective(given.slo_ttft, given.slo_tpot), _extra(given))


def _extra(given: Options) -> dict[str, Any]:
    try:
        fields = jsonlib.loads(given.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {given.extra_body}")
    return {**fields, **({"ignore_eos": True} if given.ignore_eos else {})}


async def _measure(request: _Request) -> tuple[list[RequestOutcome], dict[str, Any]]:
    """All outcomes, and facts found before: the model's name, tokens per word."""
    from forerun.bench.serve_client import open_client
    from forerun.bench.serve_load import LoadRun, warm_up

    given = request.given
    async with open_client(request.root, given.api_key, given.timeout) as client:
        fields = await _fields(request, client)
        conversations, scale = await _conversations(given, client, fields)
        with err().status("warming up"):
            await warm_up(client, fields, given.warmup, request.load.concurrency or 1, given.endpoint)
        with progress("requests", given.num_requests) as advance:
            outcomes = await LoadRun(client, fields, advance)(conversations, request.load)
    return outcomes, {"model": fields.model, "num_conversations": len(conversations), "words": asdict(scale)}


async def _fields(request: _Request, client: Client) -> RequestFields:
    from forerun.bench.serve_workload import RequestFields

    given = request.given
    model = given.model or await client.first_model()
    return RequestFields(model, given.max_tokens, given.temperature, given.seed, given.usage, request.extra)


async def _conversations(given: Options, client: Client, fields: RequestFields) -> tuple[list[Conversation], Scale]:
    """The conversations to send; tokens per word are measured only if lengths are asked for."""
    from forerun.bench import serve_workload as work
    from forerun.bench.serve_load import measure_scale

    count, endpoint, seed = given.num_requests, given.endpoint, given.seed
    prefixes = work.Prefixes(given.prefix_len, given.num_prefixes)
    cases = read_prompts(given.prompts) if given.input_len is None else []
    sized = given.input_len is not None or prefixes.num_tokens
    scale = await measure_scale(client, fields, endpoint) if sized else work.Scale()
    if given.input_len is None:
        return work.from_cases(count, cases, prefixes, scale, seed, endpoint), scale
    lengths = work.Lengths(given.input_len, given.input_spread)
    return work.synthetic(count, lengths, prefixes, scale, seed, endpoint), scale


def _report(request: _Request, outcomes: list[RequestOutcome], facts: dict[str, Any]) -> dict[str, Any]:
    from forerun import __version__
    from forerun.bench.serve_report import summary

    same = ("endpoint", "input_len", "input_spread", "prefix_len", "num_prefixes", "max_tokens", "temperature",
            "seed", "warmup")  # fmt: skip
    settings = {name: getattr(request.given, name) for name in same}
    load = {"rate": request.load.rate, "concurrency": request.load.concurrency, "timeout_s": request.given.timeout}
    prompts = None if request.given.input_len else str(request.given.prompts or "own")
    own = {"url": request.root, **facts, "prompts": prompts, **settings, **load, "extra_body": request.extra}
    return {**own, **summary(outcomes, request.objective), "forerun": __version__}


def _draw(request: _Request, outcomes: list[RequestOutcome], report: dict[str, Any], path: Path) -> None:
    from forerun.bench.serve_pictures import draw

    path.write_text(draw(outcomes, request.objective, _title(report)), "utf-8")


def _title(report: dict[str, Any]) -> str:
    rate, limit = report["rate"], report["concurrency"]
    parts = [f"{rate:g} arrivals a second"] if rate is not None else []
    parts += [f"at most {limit} at a time" if parts else f"{limit} at a time"] if limit is not None else []
    return f"{report['model']}, {report['num_requests']} requests, {', '.join(parts)}"


def _show(report: dict[str, Any]) -> None:
    result = table("milliseconds", "mean", "p50", "p90", "p99", title=_title(report))
    for key, name in TIMES.items():
        figures = report[key]
        cells = ["-"] * 4 if figures is None else [f"{figures[p] * 1e3:.1f}" for p in ("mean", "p50", "p90", "p99")]
        result.add_row(name, *cells)
    out().print(result)
    out().print()
    for line in _lines(report):
        out().print(line, soft_wrap=True)
    for kind, error in report["errors"].items():
        out().print(f"{error['count']} failed, {kind}: {error['first']}", soft_wrap=True)
    _notes(report)


def _lines(report: dict[str, Any]) -> list[str]:
    """Throughput, prompts, speculation, goodput: a line each for what is known."""
    answered = f"{report['num_answered']} of {report['num_requests']} answered in {report['duration_s']:.2f} s"
    rates = f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} tokens/s"
    lines = [f"{answered}: {rates}, at most {report['max_in_flight']} under way"]
    if report["prompt_tokens"] is not None:
        cached = report["cached_prompt_tokens"]
        of_these = "" if cached is None else f", {cached} of them from the prefix cache"
        lines.append(f"prompts of {report['prompt_tokens']} tokens together{of_these}")
    if report["acceptance_length"] is not None:
        lines.append(f"{report['acceptance_length']:.2f} tokens a pass")
    if report["goodput"] is not None:
        good = report["goodput"]
        lines.append(f"goodput {good['requests_per_s']:.2f} requests/s, {good['share']:.1%} of all")
    return lines


def _notes(report: dict[str, Any]) -> None:
    if report["tokens_counted_by"]["pieces"]:
        print_note("the server did not count tokens: pieces of text were counted, which may hold several")
    if (report["input_len"] or report["prefix_len"]) and not report["words"]["measured"]:
        print_note("the server does not say how long prompts are: a word was taken for one token")
    late = report["sent_late_s"]
    if late is not None and late["p99"] > SENT_LATE_S and report["rate"] is not None:
        print_note(f"requests were sent up to {late['p99']:.2f} s (p99) late, which their times include: the limit of "
                   "--concurrency was reached, or this machine is too slow for the rate")  # fmt: skip
