"""Preparing a run folder: the tokenizer and the token files of all sources of a recipe, once.

Knows the order of the work. Does not know: reading and splitting (`data`), tokenizers (`tokenizer`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forerun.errors import TrainingError
from forerun.training import data
from forerun.training.export import write_json
from forerun.training.recipe import Recipe, changes
from forerun.training.run_folder import clear
from forerun.training.sources import SOURCES
from forerun.training.tokenizer import TOKENIZER_FILES, save_tokenizer, train_tokenizer

Report = Callable[[str], None]
ABOUT = "about.json"  # what the data depends on


@dataclass(frozen=True)
class Prepared:
    """A complete data folder: tokenizer files, token files and what they hold."""

    folder: Path
    tokenizer: Tokenizer
    counts: dict[str, data.SourceCounts]


def prepare(recipe: Recipe, run: Path, report: Report, fresh: bool = False) -> Prepared:
    """Makes the data of `recipe` in the run's `data/`, or reuses what an earlier call left there.

    fresh: deletes an earlier run, once all text is read.
    """
    folder = run / "data"
    counts = None if fresh else data.read_manifest(folder)
    if counts is None:
        counts = prepare_anew(recipe, run, report, fresh)
    elif (folder / ABOUT).is_file():  # data that earlier versions prepared has none
        changed = changes(json.loads((folder / ABOUT).read_text(encoding="utf-8")), about_data(recipe))
        if changed:
            raise TrainingError(
                f"{folder} holds other data: {'; '.join(changed)}. Use the recipe as it was, another --out, or --fresh"
            )
    missing = [name for name in recipe.mix if name not in counts]
    if missing:
        raise TrainingError(f"{folder} was prepared without {', '.join(missing)}; delete it and start again")
    return Prepared(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), counts)


def prepare_anew(recipe: Recipe, run: Path, report: Report, fresh: bool) -> dict[str, data.SourceCounts]:
    """Reads all sources, trains or copies the tokenizer, and writes the folder; the manifest comes last."""
    data_dir = Path(recipe.data.dir)
    leaks = data.benchmark_grams(Path(recipe.data.bench_dir) if recipe.data.bench_dir else None)
    report(f"reading {len(recipe.mix)} sources from {data_dir}; {len(leaks)} benchmark 13-grams")
    folders = {name: Path(recipe.data.generated_dir) if SOURCES[name].generated else data_dir for name in recipe.mix}
    splits = {name: data.split_source(folders[name], name, leaks, recipe.seed) for name in recipe.mix}
    tokenizer = make_tokenizer(recipe, splits, report)
    if fresh:
        clear(run)
    folder = run / "data"
    folder.mkdir(parents=True, exist_ok=True)
    keep_tokenizer(recipe, tokenizer, folder)
    counts = {name: data.store(folder, name, split, tokenizer) for name, split in splits.items()}
    for name, count in counts.items():
        report(f"  {name}: {count}")
    write_json(folder / ABOUT, about_data(recipe))
    data.write_manifest(folder, counts)
    return counts


def about_data(recipe: Recipe) -> dict[str, Any]:
    """What the token files depend on."""
    parts = {name: value for name, value in asdict(recipe).items() if name in ("seed", "mix", "data", "tokenizer")}
    return {**parts, "tokenizer_from": recipe.tokenizer_from, "vocab_size": recipe.model.vocab_size}


def make_tokenizer(recipe: Recipe, splits: dict[str, data.DataSplit], report: Report) -> Tokenizer:
    """Trains the tokenizer, or reads the tokenizer of the model the run starts from or distills."""
    if recipe.tokenizer_from:
        folder = Path(recipe.tokenizer_from)
        missing = [name for name in TOKENIZER_FILES if not (folder / name).is_file()]
        if missing:
            raise TrainingError(f"{folder}, whose tokenizer the recipe takes, has no {' and no '.join(missing)}")
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
    return tokenizer


def keep_tokenizer(recipe: Recipe, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer into the folder; a model's tokenizer is copied unchanged."""
    if not recipe.tokenizer_from:
        save_tokenizer(tokenizer, folder, recipe.model.max_positions)
        return
    for name in TOKENIZER_FILES:
        shutil.copy(Path(recipe.tokenizer_from) / name, folder / name)
