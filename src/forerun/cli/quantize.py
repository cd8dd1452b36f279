"""`forerun quantize`: writes a model in fewer bits, in a layout that other engines load, too.

Knows: options, what is printed before and after. Does not know: how matrices are rounded (`forerun.quantize`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note, progress, table
from forerun.cli.engine import fetch
from forerun.config import check_threads
from forerun.errors import ConfigError, suggestion

if TYPE_CHECKING:
    from forerun.kernels.ops import Kernels
    from forerun.models.loader import LoadedModel
    from forerun.quantize.perplexity import Perplexity
    from forerun.quantize.run import Quantizable
    from forerun.quantize.settings import QuantizeSettings
    from forerun.quantize.text import CalibrationText

OWN_SEQUENCES = 32  # of text that the model writes itself, which is slower than reading a file
SEQUENCES = 128
USUAL_LENGTH = 512
MEASURED = 16  # held-out sequences that perplexity is measured on
GGUF_SUFFIX = ".gguf"
HF, GGUF = "With --format hf", "With --format gguf"
FOREIGN_OPTIONS = {  # format -> parameters that belong to the other format: their option names
    "hf": {"mix": "--type"},
    "gguf": {
        "method": "--method", "bits": "--bits", "group_size": "--group-size", "sym": "--sym/--asym",
        "act_order": "--act-order", "clip": "--clip", "damp": "--damp",
    },
}  # fmt: skip
TYPES = "F32, F16, BF16, Q8_0, Q6_K, Q4_K_M, Q4_K_S or Q4_0."
NARROW_BLOCKS = {"Q5_0", "Q8_0", "F16"}  # what rows get that are no whole blocks of Q4_K or Q6_K
CALIBRATING = {"calibration": "--calibration", "sequences": "--sequences", "seed": "--seed"}  # gptq and awq only


def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder, a hub id or an embedded model.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder that is written, or the file if it ends in .gguf.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="hf (GPTQ's or AWQ's layout) or gguf.", show_default="gguf for OUT.gguf, else hf"
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="rtn (rounding), gptq or awq.", rich_help_panel=HF)] = "gptq",
    bits: Annotated[int, typer.Option(help="8, 4, 3 or 2.", rich_help_panel=HF)] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale; -1: a row.", rich_help_panel=HF)] = 128,
    sym: Annotated[bool, typer.Option("--sym/--asym", help="Without or with zero points.", rich_help_panel=HF)] = True,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="gptq: the largest inputs first.", rich_help_panel=HF)
    ] = False,
    clip: Annotated[
        bool | None,
        typer.Option(help="Search ranges smaller than the weights'.", show_default="with awq", rich_help_panel=HF),
    ] = None,
    damp: Annotated[
        float, typer.Option(help="gptq: added to the Hessian's diagonal, a share of its mean.", rich_help_panel=HF)
    ] = 0.01,
    mix: Annotated[str, typer.Option("--type", help=TYPES, rich_help_panel=GGUF)] = "Q4_K_M",
    calibration: Annotated[
        Path | None,
        typer.Option(help="gptq, awq: .txt or .jsonl to calibrate with.", show_default="the model's own text"),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="gptq, awq: sequences of it.", min=1, show_default="128; 32 of own text")
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.", min=2, show_default="512, or all the model can use")
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(help="Measure on this text.", show_default="what calibration holds out, if anything")
    ] = None,
    seed: Annotated[int, typer.Option(help="gptq, awq: of the text the model writes itself.")] = 0,
    kernels: opt.KernelsName = "auto",
    threads: opt.Threads = None,
    json: opt.JsonOption = False,
) -> None:
    """Write a model in fewer bits, in a layout that other engines load. An interrupted gptq or awq run is resumed."""
    form, mix = form or ("gguf" if target.suffix == GGUF_SUFFIX else "hf"), mix.upper()
    _refuse_others(context, form, method)
    check_threads(threads)
    _check_target(target, form, mix)
    _check_source(model)
    text = _TextOptions(calibration, sequences, length, perplexity, seed, kernels, threads)
    if form == "gguf":
        report = {"format": "gguf", "type": mix, **_quantize_gguf(model, target, mix, text)}
    else:
        options = {"method": method, "bits": bits, "group_size": group_size, "sym": sym}
        options |= {"act_order": act_order, "clip": clip, "damp": damp}
        report = {"format": "hf", **options, **_quantize_hf(model, target, options, text)}
    report = {"model": model, "out": str(target), **report}
    print_json(report) if json else _show(report)


@dataclass(frozen=True, slots=True)
class _TextOptions:
    """The text a run reads, and the kernels that run it."""

    calibration: Path | None
    sequences: int | None
    length: int | None
    perplexity: Path | None
    seed: int
    kernels: str
    threads: int | None


def _refuse_others(context: typer.Context, form: str, method: str) -> None:
    """Raise ConfigError for an unknown format, and for options that have no effect with this format or method."""
    if form not in FOREIGN_OPTIONS:
        raise ConfigError(f"--format must be one of {', '.join(FOREIGN_OPTIONS)}; got {form!r}")
    for name, option in FOREIGN_OPTIONS[form].items():
        if _is_given(context, name):
            raise ConfigError(f"{option} is no option of --format {form}: leave it out, or choose the other format")
    for name, option in CALIBRATING.items():
        if (form == "gguf" or method == "rtn") and _is_given(context, name):
            raise ConfigError(
                f"{option} is of methods gptq and awq, which calibrate: leave it out, or choose one of these; "
                "--perplexity gives a text to measure on"
            )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _quantize_hf(model: str, folder: Path, options: dict[str, Any], given: _TextOptions) -> dict[str, Any]:
    from forerun.quantize.run import open_source, round_model
    from forerun.quantize.settings import QuantizeSettings

    settings = QuantizeSettings(**options)
    source = open_source(fetch(model), settings)
    if settings.method != "rtn":
        return _calibrated(model, source, folder, settings, given)

    def write() -> None:
        with progress("matrices", len(source.modules)) as advance:
            round_model(source, folder, settings, advance)

    return _written(model, folder, given, write)


def _quantize_gguf(model: str, file: Path, mix: str, given: _TextOptions) -> dict[str, Any]:
    from forerun.models.gguf_export import export_gguf
    from forerun.weights.checkpoint import Checkpoint

    source = fetch(model)

    def write() -> None:
        num_tensors = sum(1 for _ in Checkpoint.open(source))
        with progress("tensors", num_tensors) as advance:
            export_gguf(source, file, mix, Path(model).name, lambda done, total: advance(1))

    return {**_written(model, file, given, write), **_types(file)}


def _types(file: Path) -> dict[str, Any]:
    """How the tensors of a GGUF file are stored: bytes of each type, the largest first, and bits a weight in all."""
    from forerun.weights.gguf_file import GgufFile

    tensors, sizes = GgufFile.open(file).tensors.values(), Counter[str]()
    for tensor in tensors:
        sizes[tensor.layout.name] += tensor.nbytes
    num_weights = sum(prod(tensor.shape) for tensor in tensors)
    return {"types": dict(sizes.most_common()), "bits_per_weight": round(8 * sizes.total() / num_weights, 3)}


def _written(model: str, target: Path, given: _TextOptions, write: Callable[[], None]) -> dict[str, Any]:
    """Write without calibration; models are loaded only to measure perplexity on a given text."""
    from forerun.quantize.output import weight_bytes

    if given.perplexity is None:
        write()
        return {
            "before": {"file_bytes": weight_bytes(fetch(model))},
            "after": {"file_bytes": weight_bytes(target)},
        }
    ops = _kernels(given)
    loaded = load(model, ops)
    length = sequence_length(loaded, given.length)
    measured = _read(given.perplexity, loaded, length)
    before = _figures(loaded, measured, loaded.folder)
    del loaded
    write()
    return {"length": length, "before": before, "after": _figures(load(str(target), ops), measured, target)}


def _calibrated(
    model: str, source: Quantizable, folder: Path, settings: QuantizeSettings, given: _TextOptions
) -> dict[str, Any]:
    """Quantize by a method that calibrates on text."""
    ops = _kernels(given)
    loaded = load(model, ops)
    length = sequence_length(loaded, given.length)
    text = _text(loaded, model, given, length)
    measured = text.held_out if given.perplexity is None else _read(given.perplexity, loaded, length)
    before = _figures(loaded, measured, loaded.folder)
    _run(source, loaded, folder, settings, text)
    after = _figures(load(str(folder), ops), measured, folder)
    return {"num_sequences": len(text.sequences), "length": length, "before": before, "after": after}


def _check_source(model: str) -> None:
    if model.lower().endswith(GGUF_SUFFIX):
        raise ConfigError(f"{model} is a GGUF file, whose weights were rounded already: give the model it was made of")


def _check_target(target: Path, form: str, mix: str) -> None:
    """Raise ConfigError for a type that cannot be written, and for a target name of the other format."""
    if form == "hf":
        if target.suffix == GGUF_SUFFIX:
            raise ConfigError(
                f"{target} is the name of a GGUF file, but --format hf writes a folder: leave --format out"
            )
        if target.exists() and not target.is_dir():
            raise ConfigError(f"{target} is a file, but --format hf writes a folder: give the name of a new folder")
        return
    from forerun.quant.gguf_encode import FILE_TYPES

    if mix not in FILE_TYPES:
        raise ConfigError(
            f"--type must be one of {', '.join(FILE_TYPES)}, the types forerun writes; got {mix!r}"
            f"{suggestion(mix, FILE_TYPES)} (others llama.cpp's llama-quantize makes of an F16 file)"
        )
    if target.suffix != GGUF_SUFFIX:
        raise ConfigError(f"{target} must end in .gguf, as --format gguf writes a file")
    if target.exists():
        raise ConfigError(f"{target} exists already: choose the name of a new file")


def load(model: str, kernels: Kernels) -> LoadedModel:
    """Load a model, with a spinner on a terminal."""
    from forerun.models.loader import load_model

    fetch(model)
    with err().status(Text(f"loading {model}")):
        return load_model(model, kernels)


def sequence_length(loaded: LoadedModel, wanted: int | None) -> int:
    """Tokens of a sequence: as wanted, or the usual number. Raises ConfigError for more than the model can use."""
    possible = loaded.model.max_position
    if wanted is not None and wanted > possible:
        raise ConfigError(f"--length must be at most {possible}, the positions this model can use; got {wanted}")
    return min(USUAL_LENGTH, possible) if wanted is None else wanted


def measure(loaded: LoadedModel, sequences: list[list[int]]) -> Perplexity:
    """Perplexity over sequences, with a bar on a terminal."""
    from forerun.quantize.perplexity import measure_perplexity

    def num_bytes(token: int) -> int:
        return len(loaded.tokenizer.token_bytes(token))

    with progress("perplexity", len(sequences)) as advance:
        return measure_perplexity(loaded.model, sequences, num_bytes, advance)


def _kernels(given: _TextOptions) -> Kernels:
    from forerun.kernels.select import select_kernels

    return select_kernels(given.kernels, given.threads)


def _read(path: Path, loaded: LoadedModel, length: int, limit: int | None = None) -> list[list[int]]:
    from forerun.quantize.text import cut, read_texts

    return cut(read_texts(path), loaded.tokenizer, length, limit)


def _text(loaded: LoadedModel, model: str, given: _TextOptions, length: int) -> CalibrationText:
    """Text from the file, or else written by the model; a part of it is held out."""
    from forerun.quantize.text import split, with_held_out

    wanted = given.sequences or (OWN_SEQUENCES if given.calibration is None else SEQUENCES)
    if given.calibration is not None:
        return split(_read(given.calibration, loaded, length, with_held_out(wanted)), wanted)
    from forerun.llm import LLM
    from forerun.quantize.selftext import sample_sequences

    print_note("the model writes a text of its own to calibrate with; --calibration gives another")
    llm = LLM(model, drafter="none", kernels=given.kernels, threads=given.threads)
    return split(sample_sequences(llm, with_held_out(wanted), length, given.seed, err().is_terminal), wanted)


def _run(
    source: Quantizable, loaded: LoadedModel, folder: Path, settings: QuantizeSettings, text: CalibrationText
) -> None:
    from forerun.quantize.run import quantize_model

    with progress("layers", source.config.num_layers) as advance:
        quantize_model(source, loaded, folder, settings, text.sequences, advance)


def _figures(loaded: LoadedModel, measured: list[list[int]], path: Path) -> dict[str, Any]:
    from forerun.quantize.output import weight_bytes

    found = measure(loaded, measured[:MEASURED])
    return {
        "perplexity": round(found.perplexity, 4),
        "bits_per_byte": round(found.bits_per_byte, 5),
        "weight_bytes": loaded.model.weight_bytes,
        "file_bytes": weight_bytes(path),
    }


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # figure -> its column
    "perplexity": ("perplexity", "{:.3f}".format),
    "bits_per_byte": ("bits per byte", "{:.4f}".format),
    "weight_bytes": ("in memory", lambda num: f"{num / 1e6:.1f} MB"),
    "file_bytes": ("on disk", lambda num: f"{num / 1e6:.1f} MB"),
}


def _show(report: dict[str, Any]) -> None:
    result = table("", *(COLUMNS[figure][0] for figure in report["before"]))
    for name in ("before", "after"):
        result.add_row(name, *(COLUMNS[figure][1](value) for figure, value in report[name].items()))
    out().print(result)
    if "types" in report:
        sizes = ", ".join(f"{nbytes / 1e6:.1f} MB {name}" for name, nbytes in report["types"].items())
        out().print(f"{sizes}: {report['bits_per_weight']:g} bits a weight", soft_wrap=True)
        if set(report["types"]) & NARROW_BLOCKS and report["type"].startswith(("Q4_K", "Q6_K")):
            print_note(
                "blocks of Q4_K and Q6_K take 256 weights: matrices with other rows are in the types beside them"
            )
    out().print(f"written to {report['out']}", soft_wrap=True)
