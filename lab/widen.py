"""A trained model at the cost of a larger one: the same function in a larger shape, and draft heads for it.

    python lab/widen.py mini ./mini-1b --shape llama-3.2-1b [--layers 8] ...
    python lab/widen.py mini-mtp ./mini-1b-mtp --for ./mini-1b

Knows: options. Does not know: tensors (`widening`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import command
from forerun.bench.shapes import read_shape
from forerun.cli import options as opt
from forerun.cli.console import err, out, print_json, print_note, table
from forerun.errors import ConfigError
from forerun.weights.resolve import resolve_model
from widening.heads import WidenedTarget, widen_head
from widening.model import open_source
from widening.model import widen as widen_model
from widening.sizes import choose_sizes

Size = Annotated[int | None, typer.Option(min=1, show_default="the shape's, else the model's")]
SIZE_NAMES = {
    "hidden_size": "hidden size",
    "num_layers": "layers",
    "ffn_size": "feed-forward size",
    "num_q": "query heads",
    "num_kv": "key-value heads",
}


def widen(
    model: Annotated[
        str, typer.Argument(help="A folder, a hub id or an embedded model; with --for the folder of a draft head.")
    ],
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
    widened: Annotated[
        str | None, typer.Option("--for", help="Widen a draft head for this model, which this command wrote.")
    ] = None,
    json: opt.JsonOption = False,
) -> None:
    """Write a larger model that computes the same function: real acceptance at a real cost, for measurements.

    With a hidden size 4 or 16 times the model's own and as many query heads to a key-value head every bit stays the
    same, otherwise logits agree to about four digits. The vocabulary and the size of a head stay. Say of numbers
    measured on such a model that it was widened.

    With --for MODEL, write a draft head for that widened model which drafts what it drafted for the original. Read are
    Medusa heads in vLLM's layout, EAGLE-3 heads in SafeAILab's, MTP modules in MiMo's and DFlash heads in z-lab's, as
    `forerun train` writes them. Their own layers grow as the model's layers did.
    """
    sizes = {"hidden_size": hidden_size, "num_layers": layers, "ffn_size": ffn_size, "num_q": heads, "num_kv": kv_heads}
    if widened is None:
        report, show = _widen(model, folder, shape, sizes), _show
    elif shape is None and not any(sizes.values()):
        report, show = _widen_head(model, folder, widened), _show_head
    else:
        raise ConfigError(f"a draft head gets the sizes of {widened}; give --for or sizes, not both")
    print_json(report) if json else show(report)


def _widen(model: str, folder: Path, shape: str | None, given: dict[str, int | None]) -> dict[str, Any]:
    source = open_source(resolve_model(model))
    sizes = choose_sizes(source[1], read_shape(shape) if shape else None, given)
    with err().status(f"writing {folder}"):
        report = widen_model(source, sizes, folder.expanduser().absolute(), model)
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


def _widen_head(head: str, folder: Path, model: str) -> dict[str, Any]:
    target = WidenedTarget.open(resolve_model(model))
    with err().status(f"writing {folder}"):
        report = widen_head(target, resolve_model(head), folder.expanduser().absolute())
    return {"model": model, "folder": str(folder), **report}


def _show_head(report: dict[str, Any]) -> None:
    size, of = f"{report['weight_bytes'] / 1e6:.0f} MB", f"hidden size {report['hidden_size']}"
    out().print(f"{report['folder']}: {report['head']} head for {report['model']}, {of}, {size}", soft_wrap=True)


if __name__ == "__main__":
    command.run(widen)
