"""`forerun run`, `pull`, `list` and `rm`: models of a Hugging Face hub by name.

Knows: options and what is printed. Does not know: how files are downloaded (`weights.hub_download`) or answers made.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Any

import typer

from forerun.cli import chat as chatting
from forerun.cli import generate as generating
from forerun.cli import options as opt
from forerun.cli.console import out, print_json, print_note, table
from forerun.cli.engine import downloading
from forerun.cli.groups import values
from forerun.errors import ConfigError

HubNames = Annotated[
    list[str], typer.Argument(metavar="NAME...", help="ORGANISATION/NAME, with :QUANT to pick a GGUF file.")
]


def run(
    model: Annotated[str, typer.Argument(help="ORGANISATION/NAME[:QUANT] of the hub, a folder or an embedded model.")],
    prompt: Annotated[str | None, typer.Argument(help="What to answer; without it a conversation begins.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin a conversation with.")] = None,
    *,
    sampling: opt.Sampling,
    drafting: opt.Drafting,
    loading: opt.AdaptedLoading,
) -> None:
    """Download a model if needed, then talk with it, or answer a prompt (also one from a pipe)."""
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        chatting.chat(opt.Target(model=model), chatting.Talk(system=system), sampling, drafting, loading)
        return
    if system is not None:
        raise ConfigError("--system begins a conversation, but a prompt was given: leave one of them out")
    asked = generating.AskedText(arguments=None if prompt is None else [model, prompt], model=model)
    generating.generate(
        asked, generating.FullSampling(**values(sampling)), drafting, opt.RankedLoading(**values(loading))
    )


def pull(names: HubNames, json: opt.JsonOption = False) -> None:
    """Download models of the hub, or their latest revision; an interrupted download is resumed."""
    from forerun.weights.hub_download import download

    asked = [_hub_name(name) for name in names]
    reports = []
    for name in asked:
        reports.append({"model": str(name), "path": str(download(name, downloading))})
    if json:
        print_json(reports)
        return
    for report in reports:
        out().print(f"{report['model']} is in {report['path']}", soft_wrap=True)


def list_models(json: opt.JsonOption = False) -> None:
    """List the models that are on this machine: those of the hub's cache, and the embedded ones."""
    from forerun.weights.hub import cached_models
    from forerun.weights.resolve import EMBEDDED

    models = cached_models()
    if json:
        cached = [{**model._asdict(), "last_used": round(model.last_used)} for model in models]
        print_json(
            [*cached, *({"name": name, "kind": "embedded", "num_bytes": None, "last_used": None} for name in EMBEDDED)]
        )
        return
    result = table("model", "kind", "size", "last used")
    result.columns[0].overflow = "fold"
    for model in models:
        used = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M")
        result.add_row(model.name, model.kind, f"{model.num_bytes / 1e9:.2f} GB", used)
    if models:
        out().print(result)
    else:
        print_note("no model of the hub was downloaded so far: `forerun pull ORGANISATION/NAME` gets one")
    print_note(f"embedded: {', '.join(EMBEDDED)}")


def rm(names: HubNames, json: opt.JsonOption = False) -> None:
    """Delete models of the hub from the cache, which other programs may share."""
    from forerun.weights.hub import remove_cached

    asked = [_hub_name(name) for name in names]
    reports: list[dict[str, Any]] = [{"model": str(name), "freed_bytes": remove_cached(name)} for name in asked]
    if json:
        print_json(reports)
        return
    for report in reports:
        out().print(f"{report['model']} is deleted, {report['freed_bytes'] / 1e9:.2f} GB are free", soft_wrap=True)


def _hub_name(text: str) -> Any:
    """A name of the hub. Raises ConfigError for an invalid name, and for embedded models."""
    from forerun.weights.hub import HubName
    from forerun.weights.resolve import EMBEDDED

    if text in EMBEDDED:
        raise ConfigError(f"{text} is embedded: it is always there")
    name = HubName.parse(text)
    if name is None:
        raise ConfigError(f"a model of the hub is called ORGANISATION/NAME or ORGANISATION/NAME:QUANT; got {text!r}")
    return name
