"""`forerun perplexity`: how well a model predicts a text.

Knows: options and what is printed. Does not know: how it is measured (`forerun.quantize.perplexity`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options as opt
from forerun.cli.console import out, print_json
from forerun.cli.quantize import load, measure, sequence_length


def perplexity(
    target: opt.Target,
    machine: opt.Machine,
    text: Annotated[Path, typer.Option(help=".txt or .jsonl of texts or prompts.")],
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.", min=2, show_default="512, or all the model can use")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use this many sequences of the text.", min=1)] = None,
    json: opt.JsonOption = False,
) -> None:
    """Measure perplexity and bits per byte of a text, through the same forward pass that generates."""
    from forerun.kernels.select import select_kernels
    from forerun.quantize.text import cut, read_texts

    texts = read_texts(text)
    name = target.name
    kernels = select_kernels(
        machine.kernels, machine.threads, device=machine.device, pin=machine.pin_threads,
        activations=machine.activations,
    )  # fmt: skip
    loaded = load(name, kernels)
    found = measure(loaded, cut(texts, loaded.tokenizer, sequence_length(loaded, length), limit))
    report = {
        "model": name,
        "text": str(text),
        "perplexity": round(found.perplexity, 5),
        "bits_per_byte": round(found.bits_per_byte, 6),
        "num_tokens": found.num_tokens,
        "num_bytes": found.num_bytes,
    }
    if json:
        print_json(report)
        return
    out().print(
        f"perplexity {report['perplexity']:.4f}, {report['bits_per_byte']:.5f} bits per byte over "
        f"{found.num_tokens} tokens ({found.num_bytes} bytes)"
    )
