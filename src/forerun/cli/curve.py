"""`forerun bench curve` and `forerun bench prefill`: what passes of a model's shape cost, with random weights.

Knows: options and tables. Does not know: how it is measured (`forerun.bench.curve`, `forerun.bench.prefill`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.bench.chart import Labels, check_chart, lines, svg
from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note, progress, table
from forerun.cli.engine import note_slow_kernels
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.random_model import RandomModel

ShapeName = Annotated[
    str,
    typer.Option(
        "--shape",
        help="qwen2.5-0.5b, llama-3.2-1b, llama-3.1-8b, qwen3.5-4b, gemma-3-4b, gpt-oss-20b, small or a config.json.",
    ),
]
Weights = Annotated[
    str,
    typer.Option("--weights", help="bf16, f32, f16, fp8, nf4, int2 to int8 (int4:32: groups of 32), gguf:Q4_K, ..."),
]
Repeats = Annotated[int, typer.Option(help="How often every pass is measured; the median is reported.", min=1)]


def curve(
    machine: opt.Machine,
    shape: ShapeName = "qwen2.5-0.5b",
    weights: Weights = "bf16",
    tokens: Annotated[str, typer.Option(help="Tokens a pass, separated by commas.")] = "1,2,4,8,16,32",
    context: Annotated[str, typer.Option(help="Known tokens before them, separated by commas.")] = "128,4096",
    repeats: Repeats = 15,
    chart: opt.ChartFile = None,
    json: opt.JsonOption = False,
) -> None:
    """Measure a pass over several tokens, as in verification, and compare it with the machine's read bandwidth."""
    numbers, contexts = whole_numbers(tokens, "--tokens", True), whole_numbers(context, "--context", True)
    check_chart(chart)
    report = _curve(shape, weights, numbers, contexts, repeats, machine)
    print_json(report) if json else _show_curve(report)
    if chart is not None:
        chart.write_text(_drawn_curve(report), "utf-8")


def prefill(
    machine: opt.Machine,
    shape: ShapeName = "qwen2.5-0.5b",
    weights: Weights = "bf16",
    tokens: Annotated[str, typer.Option(help="Tokens of a prompt, separated by commas.")] = "128,512,2048",
    chunk: Annotated[int, typer.Option(help="Tokens computed at once, as the engine does it.")] = 512,
    repeats: Repeats = 5,
    chart: opt.ChartFile = None,
    json: opt.JsonOption = False,
) -> None:
    """Measure how many tokens of a prompt are computed a second."""
    check_chart(chart)
    report = _prefill(shape, weights, whole_numbers(tokens, "--tokens", True), chunk, repeats, machine)
    print_json(report) if json else _show_prefill(report)
    if chart is not None:
        chart.write_text(_drawn_prefill(report), "utf-8")


def whole_numbers(text: str, what: str, checked: bool = False) -> list[int]:
    """The distinct whole numbers of a comma-separated list. Raises ConfigError for anything else.

    checked: the caller looks at their range, and numbers below 0 are left to it.
    """
    parts = opt.names(text)
    if not all((part.removeprefix("-") if checked else part).isdecimal() for part in parts):
        raise ConfigError(f"{what} must be whole numbers separated by commas, such as 1,2,4; got {text!r}")
    return list(dict.fromkeys(int(part) for part in parts))


def _curve(
    shape: str, weights: str, tokens: list[int], contexts: list[int], repeats: int, machine: opt.Machine
) -> dict[str, Any]:
    from forerun.bench.bandwidth import reader
    from forerun.bench.curve import check_cases, measure, read_gb_per_s, rows
    from forerun.bench.shapes import read_shape

    chosen = read_shape(shape)
    check_cases(tokens, contexts, chosen.config.max_position)
    model = _build(chosen, weights, machine, max(contexts) + max(tokens))
    with (
        reader(model.kernels, model.num_threads) as read_speed,
        progress("rounds", repeats) as advance,
    ):
        measured = measure(model.passes, tokens, contexts, repeats, read_speed, advance)
    result = {"rows": rows(measured, model.passes, tokens), "read_gb_per_s": read_gb_per_s(measured)}
    return {**result, "repeats": repeats, **model.report()}


def _prefill(
    shape: str, weights: str, tokens: list[int], chunk: int, repeats: int, machine: opt.Machine
) -> dict[str, Any]:
    from forerun.bench.bandwidth import reader
    from forerun.bench.curve import read_gb_per_s
    from forerun.bench.prefill import check_prompts, measure, rows
    from forerun.bench.shapes import read_shape

    chosen = read_shape(shape)
    check_prompts(tokens, chunk, chosen.config.max_position)
    model = _build(chosen, weights, machine, max(tokens))
    with (
        reader(model.kernels, model.num_threads) as read_speed,
        progress("rounds", repeats) as advance,
    ):
        measured = measure(model.passes, tokens, chunk, repeats, read_speed, advance)
    result = {"rows": rows(measured), "read_gb_per_s": read_gb_per_s(measured)}
    return {**result, "chunk": chunk, "repeats": repeats, **model.report()}


def _build(shape: Any, weights: str, machine: opt.Machine, max_rows: int) -> RandomModel:
    from forerun.bench.random_model import random_model
    from forerun.bench.weight_kinds import read_kind
    from forerun.kernels.select import select_kernels

    kind = read_kind(weights)
    kernels = select_kernels(
        machine.kernels, machine.threads, device=machine.device, pin=machine.pin_threads,
        activations=machine.activations,
    )  # fmt: skip
    note_slow_kernels(kernels, machine.kernels)
    with err().status(Text(f"making {shape.name} with random {kind.name} weights")):
        return random_model(shape, kind, kernels, max_rows)


def _show_curve(report: dict[str, Any]) -> None:
    out().print(_title(report), soft_wrap=True)
    result = table("tokens", "context", "ms", "ratio", "GB/s")
    for row in report["rows"]:
        figures = (f"{row['ms']:.2f}", f"{row['ratio']:.2f}x", f"{row['gb_per_s']:.1f}")
        result.add_row(str(row["tokens"]), str(row["context"]), *figures)
    out().print(result)
    _note_machine(report)


def _show_prefill(report: dict[str, Any]) -> None:
    out().print(_title(report), soft_wrap=True)
    result = table("tokens", "ms", "tokens/s")
    for row in report["rows"]:
        result.add_row(str(row["tokens"]), f"{row['ms']:.1f}", f"{row['tokens_per_s']:.0f}")
    out().print(result)
    _note_machine(report)


def _drawn_curve(report: dict[str, Any]) -> str:
    """Milliseconds over tokens as SVG, a line for each context."""
    rows = report["rows"]
    lengths = dict.fromkeys(row["context"] for row in rows)
    series = {
        f"{length} known tokens": [(row["tokens"], row["ms"]) for row in rows if row["context"] == length]
        for length in lengths
    }
    return svg(lines(Labels(title=_title(report), x="tokens a pass", whole=True, y="milliseconds"), series))


def _drawn_prefill(report: dict[str, Any]) -> str:
    """Tokens a second over lengths as SVG."""
    points = [(row["tokens"], row["tokens_per_s"]) for row in report["rows"]]
    labels = Labels(title=_title(report), x="tokens of the prompt", whole=True, y="tokens a second")
    return svg(lines(labels, {"prefill": points}))


def _title(report: dict[str, Any]) -> str:
    size = f"{report['weight_bytes'] / 1e6:.0f} MB of random {report['weights']} weights"
    return f"{report['shape']}, {size}, {report['threads']} threads, median of {report['repeats']}"


def _note_machine(report: dict[str, Any]) -> None:
    from forerun.bench.machine import machine_line

    print_note(f"the memory was read at {report['read_gb_per_s']:.1f} GB/s meanwhile")
    print_note(machine_line(report["machine"]))
