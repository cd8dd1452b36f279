"""stories260K, a real model of 260 thousand parameters, and the text its makers published."""

from __future__ import annotations

from pathlib import Path

from tests.support.llama2c import convert_llama2c
from tests.support.shared import shared_data


def stories260k(out: Path, name: str = "stories260K.bin") -> Path:
    """The model as a folder in Hugging Face layout."""
    source = shared_data("weights/stories260K")
    return convert_llama2c(source / name, source / "tok512.bin", out)


def published_sample() -> str:
    """Its greedy text: the first code block of the model's page, after the command."""
    page = (shared_data("weights/stories260K") / "stories260K.md").read_text("utf-8")
    return page.split("-t 0.0\n", 1)[1].split("```", 1)[0].strip()
