"""`forerun bench widen`: a trained model at the cost of a larger one.

Knows: options. Does not know: tensors (`forerun.bench.widen`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note, table

Size = Annotated[int | None, typer.Option(min=1, show_default="the shape's, else the model's")]
SIZE_NAMES = {
    "hidden_size": "hidden size",
    "num_layers": "layers",
    "ffn_size": "feed-forward size",
    "num_q": "query heads",
    "num_kv": "key-value heads",
}


def widen(
    model: Annotated[str, typer.Argument(help="A folder, a hub id or an embedded model.")],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    shape: Annotated[
        str | None,
        typer.Option(help="Take the sizes of a shape (qwen2.5-0.5b, llama-3.2-1b, llama-3.1-8b) or of a config.json."),
    ] = None,
    hidden_size: Size = None,
    layers: Size = None,
    ffn_size: Size = None,
    heads: Size = None,
    kv_heads: Size = None,
    json: opt.JsonOption = False,
) -> None:
    """Write a larger model that computes the same function: real acceptance at a real cost, for measurements.

    With a hidden size 4 or 16 times the model's own and as many query heads to a key-value head every bit stays the
    same, otherwise logits agree to about four digits. The vocabulary and the size of a head stay. Say of numbers
    measured on such a model that it was widened.
    """
    sizes = {"hidden_size": hidden_size, "num_layers": layers, "ffn_size": ffn_size, "num_q": heads, "num_kv": kv_heads}
    report = _widen(model, folder, shape, sizes)
    print_json(report) if json else _show(report)


def _widen(model: str, folder: Path, shape: str | None, given: dict[str, int | None]) -> dict[str, Any]:
    from forerun.bench.shapes import read_shape
    from forerun.bench.widen import open_source, widen
    from forerun.bench.widen_sizes import choose_sizes
    from forerun.weights.resolve import resolve_model

    source = open_source(resolve_model(model))
    sizes = choose_sizes(source[1], read_shape(shape) if shape else None, given)
    with err().status(f"writing {folder}"):
        report = widen(source, sizes, folder.expanduser().absolute(), model)
    return {"model": model, "folder": str(folder), **report}


def _show(report: dict[str, Any]) -> None:
    result = table("", "before", "now", title=f"{report['folder']}: {report['model']}, widened")
    for name, words in SIZE_NAMES.items():
        result.add_row(words, str(report["sizes_before"][name]), str(report["sizes"][name]))
    out().print(result)
    print_note(f"{report['num_parameters'] / 1e6:.0f}M parameters, {report['weight_bytes'] / 1e9:.2f} GB")
    if not report["same_bits"]:
        own = report["sizes_before"]
        print_note(
            f"rounding differs: logits agree to about four digits; a hidden size of {4 * own['hidden_size']} or "
            f"{16 * own['hidden_size']} with {own['num_q'] // own['num_kv']} query heads to a key-value head keeps "
            "every bit"
        )


def widen_head(
    model: Annotated[str, typer.Argument(help="A model that `forerun bench widen` wrote.")],
    head: Annotated[
        str, typer.Argument(help="The folder of Medusa, EAGLE-3 or MTP heads of the model it was made from.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not exist.")],
    json: opt.JsonOption = False,
) -> None:
    """Write draft heads for a widened model that draft what they drafted for the model it was made from.

    Read are Medusa heads in vLLM's layout, EAGLE-3 heads in SafeAILab's and MTP modules in MiMo's, as `forerun train`
    writes them. Their own layer grows as the target's layers did.
    """
    from forerun.bench.widen_heads import WidenedTarget, widen_head
    from forerun.weights.resolve import resolve_model

    target = WidenedTarget.open(resolve_model(model))
    with err().status(f"writing {folder}"):
        report = widen_head(target, resolve_model(head), folder.expanduser().absolute())
    if json:
        print_json({"model": model, "folder": str(folder), **report})
    else:
        size, of = f"{report['weight_bytes'] / 1e6:.0f} MB", f"hidden size {report['hidden_size']}"
        out().print(f"{folder}: {report['head']} heads for {model}, {of}, {size}")
