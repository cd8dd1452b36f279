"""How far log-likelihoods are from float32: forerun's and transformers' in bfloat16, from the same stored weights.

    python lab/likelihoods.py MODEL TEXT [--length 256] [--limit 8] [--set num_hidden_layers=4 ...]

MODEL is a folder or an embedded name, or a config.json: then random weights of that configuration, rounded to bfloat16,
with `mini`'s tokenizer. The truth is transformers in float32 on the weights as they are stored. All engines predict the
same tokens of the same sequences. forerun in float32 stands below: what separates two float32 engines.

Knows: the command, and how far one engine's log-probabilities are from another's. Does not know: GGUF files
(`perplexities.py`, which measures with this).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.bench.machine import describe_machine
from forerun.errors import ConfigError
from forerun.kernels.ops import Kernels
from forerun.kernels.select import select_kernels
from forerun.models.base import Model
from forerun.models.loader import load_model, load_tokenizer
from forerun.quantize.perplexity import logits_of
from forerun.quantize.text import cut, read_texts
from forerun.weights.resolve import resolve_model

Engine = Callable[[Sequence[int]], Tensor]  # token ids -> logits after each but the last [len - 1, V]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
COLUMNS = ("engine", "mean error of a token, nats", "root mean square", "largest", "mean error of a sequence",
           "root mean square, all log-probabilities")  # fmt: skip


@dataclass
class Apart:
    """How far an engine's log-probabilities are from the truth, and what it says of the text."""

    sequences: list[Tensor] = field(default_factory=list)  # errors of the log-likelihoods of their tokens, in nats
    nats: float = 0.0  # negative log-likelihood of the text
    squares: float = 0.0  # squared errors of the log-probabilities of all tokens of the vocabulary, summed
    num_entries: int = 0

    def add(self, logits: Tensor, truth: Tensor, wanted: Tensor) -> None:
        """One sequence: logits [n, V] of the engine and of the truth, and the tokens that follow [n]."""
        found, exact = (rows.double().log_softmax(-1) for rows in (logits, truth))
        own, true = (rows.gather(1, wanted[:, None])[:, 0] for rows in (found, exact))  # [n]
        self.sequences.append(own - true)
        self.nats -= float(own.sum())
        self.squares += float((found - exact).square().sum())
        self.num_entries += found.numel()

    @property
    def tokens(self) -> Tensor:
        """The errors of all tokens' log-likelihoods [tokens]."""
        return torch.cat(self.sequences)

    @property
    def mean(self) -> float:
        """The mean size of an error of a token's log-likelihood, in nats."""
        return float(self.tokens.abs().mean())

    @property
    def perplexity(self) -> float:
        """Of the text, by this engine."""
        return math.exp(self.nats / len(self.tokens))

    @property
    def root_mean_square(self) -> float:
        """Of the errors of all log-probabilities."""
        return math.sqrt(self.squares / self.num_entries)


def apart(engines: Mapping[str, Engine], truth: Engine, sequences: Sequence[Sequence[int]]) -> dict[str, Apart]:
    """Each engine beside the truth on the same sequences; only one sequence's logits are held at a time."""
    found = {name: Apart() for name in engines}
    for ids in sequences:
        exact, wanted = truth(ids), torch.tensor(ids[1:])
        for name, engine in engines.items():
            found[name].add(engine(ids), exact, wanted)
    return found


# -- engines ------------------------------------------------------------------------------------------------------


def by_forerun(source: Path, kernels: Kernels, dtype: str = "auto") -> Engine:
    """forerun's own loader, kernels and cache."""
    model: Model = load_model(source, kernels, dtype=dtype).model
    return lambda ids: torch.cat([rows.clone() for rows in logits_of(model, ids)])


def by_transformers(folder: Path, dtype: torch.dtype) -> Engine:
    """transformers, which computes in the precision its weights have."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def logits(ids: Sequence[int]) -> Tensor:
        rows: Tensor = model(torch.tensor([list(ids[:-1])])).logits[0].float()
        return rows

    return logits


def write_random(config: Path, changes: Mapping[str, Any], folder: Path) -> None:
    """Random weights of a configuration in bfloat16, with `mini`'s tokenizer. Raises ConfigError for sizes too small.

    Matrices are drawn so that they keep the size of what they multiply, norms lie around one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**json.loads(config.read_text("utf-8")), **changes, "dtype": "bfloat16"}
    fields.pop("layer_types", None)  # one for each layer, of which there may be others now
    source, own = resolve_model("mini"), AutoConfig.for_model(**fields)
    if own.vocab_size < load_tokenizer("mini").vocab_size:
        raise ConfigError(f"vocab_size {own.vocab_size} is less than the tokens of mini, whose tokenizer is used")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(own)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)


# -- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    """Print a row an engine."""
    given = options()
    kernels = select_kernels("auto", given.threads)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = source_of(given, Path(name))
        sequences = cut(read_texts(given.text), load_tokenizer(folder), given.length, given.limit)
        engines = {
            "forerun, bfloat16": by_forerun(folder, kernels, "bfloat16"),
            "transformers, bfloat16": by_transformers(folder, torch.bfloat16),
            "forerun, float32": by_forerun(folder, kernels, "float32"),
        }
        found = apart(engines, by_transformers(folder, torch.float32), sequences)
    print(table(found))
    own, other = found["forerun, bfloat16"], found["transformers, bfloat16"]
    print(f"\ntransformers' mean error of a token is {other.mean / own.mean:.1f} times forerun's")
    machine, num_tokens = describe_machine(kernels), len(own.tokens)
    changed = "".join(f", {change}" for change in given.set)
    print(f"{given.model}{changed}; {num_tokens} tokens of {given.text.name}; {machine['cpu']}, {kernels.name}, "
          f"torch {torch.__version__}, commit {machine['commit']}, {machine['date']}")  # fmt: skip


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How far log-likelihoods in bfloat16 are from float32.")
    parser.add_argument("model", help="a folder, an embedded name, or a config.json for random weights")
    parser.add_argument("text", type=Path, help=".txt or .jsonl, as for `forerun perplexity`")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change the config.json")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--limit", type=int, default=8, help="sequences")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def source_of(given: argparse.Namespace, folder: Path) -> Path:
    """The folder of the weights; random ones are written to `folder`."""
    if not given.model.endswith(".json"):
        if given.set:
            raise ConfigError(
                f"--set changes a config.json for random weights; {given.model} has weights: leave it out"
            )
        return resolve_model(given.model)
    write_random(Path(given.model), dict(read_change(text) for text in given.set), folder)
    return folder


def read_change(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as in JSON. Raises ConfigError."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise ConfigError(f"--set {text!r} is not NAME=VALUE with a value as in JSON") from error


def table(found: Mapping[str, Apart]) -> str:
    """Markdown, a row an engine."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name, one in found.items():
        of_sequences = torch.stack([errors.sum() for errors in one.sequences]).abs().mean()
        figures = (
            one.mean,
            one.tokens.square().mean().sqrt(),
            one.tokens.abs().max(),
            of_sequences,
            one.root_mean_square,
        )
        lines.append(f"| {name} | {' | '.join(f'{float(figure):.2e}' for figure in figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
