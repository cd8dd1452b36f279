"""Preparing a run folder: the tokenizer and the token files of all sources of a recipe, once.

Knows the order of the work. The parts know how: reading and splitting is `data`, the tokenizer is `tokenizer`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from forerun.errors import TrainingError
from forerun.training import data
from forerun.training.recipe import Recipe
from forerun.training.sources import SOURCES
from forerun.training.tokenizer import TOKENIZER_FILES, save_tokenizer, train_tokenizer

Report = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A complete data folder: tokenizer files, token files and what they hold."""

    folder: Path
    tokenizer: Tokenizer
    counts: dict[str, data.SourceCounts]


def prepare(recipe: Recipe, folder: Path, report: Report) -> Prepared:
    """Makes the data of `recipe` in `folder`, or takes what an earlier call left there."""
    counts = data.read_manifest(folder)
    if counts is None:
        counts = prepare_anew(recipe, folder, report)
    missing = [name for name in recipe.mix if name not in counts]
    if missing:
        raise TrainingError(f"{folder} was prepared without {', '.join(missing)}; delete it and start again")
    return Prepared(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), counts)


def prepare_anew(recipe: Recipe, folder: Path, report: Report) -> dict[str, data.SourceCounts]:
    """Reads all sources, trains or copies the tokenizer, and writes the folder; the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    data_dir = Path(recipe.data.dir)
    leaks = data.benchmark_grams(Path(recipe.data.bench_dir) if recipe.data.bench_dir else None)
    report(f"reading {len(recipe.mix)} sources from {data_dir}; {len(leaks)} benchmark 13-grams")
    folders = {name: Path(recipe.data.generated_dir) if SOURCES[name].generated else data_dir for name in recipe.mix}
    splits = {name: data.split_source(folders[name], name, leaks, recipe.seed) for name in recipe.mix}
    tokenizer = make_tokenizer(recipe, folder, splits, report)
    counts = {name: data.store(folder, name, split, tokenizer) for name, split in splits.items()}
    for name, count in counts.items():
        report(f"  {name}: {count}")
    data.write_manifest(folder, counts)
    return counts


def make_tokenizer(recipe: Recipe, folder: Path, splits: dict[str, data.Split], report: Report) -> Tokenizer:
    """Trains the tokenizer, or copies that of the model the run starts from or imitates."""
    if recipe.tokenizer_from:
        for name in TOKENIZER_FILES:
            shutil.copy(Path(recipe.tokenizer_from) / name, folder / name)
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    report(f"training a tokenizer of {recipe.model.vocab_size} tokens")
    total = sum(recipe.mix.values())
    shares = [(splits[name], weight / total) for name, weight in recipe.mix.items()]
    sample = data.tokenizer_sample(shares, recipe.tokenizer.sample_chars)
    tokenizer = train_tokenizer(sample, recipe.model.vocab_size)
    if tokenizer.get_vocab_size() != recipe.model.vocab_size:
        raise TrainingError(
            f"the text gives only {tokenizer.get_vocab_size()} tokens, model.vocab_size asks for "
            f"{recipe.model.vocab_size}; use more text or a smaller vocabulary"
        )
    save_tokenizer(tokenizer, folder, recipe.model.max_positions)
    return tokenizer
