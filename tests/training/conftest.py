"""Tiny training data and a tiny recipe, made in a temporary folder."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import pytest

from forerun.training.recipe import Recipe, load_recipe

WORDS = ("the", "a", "dog", "cat", "saw", "ran", "to", "house", "tree", "under", "big", "small", "red", "and", "happy")
RECIPE = """
name = "tiny"
seed = 3

[data]
dir = "{data}"

[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
head_dim = 16
ffn_size = 48
max_positions = 256

[schedule]
steps = 8
warmup_steps = 2
decay_steps = 3
seq_len = 16
decay_seq_len = 32
tokens_per_step = 128
micro_tokens = 64

[run]
log_every = 2
checkpoint_every = 100
heldout_every = 4
heldout_windows = 2

[mix]
african_storybook_en = 2
mbpp_train_601_974 = 1
"""


def write_source(folder: Path, name: str, records: list[dict[str, object]]) -> None:
    """Writes a source file."""
    with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def sentence(rng: random.Random) -> str:
    """Makes up some text."""
    return " ".join(rng.choice(WORDS) for _ in range(60)) + "."


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder with two small sources."""
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    stories = [{"title": f"Tale {number}", "text": sentence(rng)} for number in range(120)]
    tasks = [{"text": f"Add {number}.", "code": f"def add(x):\r\n\treturn x + {number}"} for number in range(200)]
    write_source(folder, "african_storybook_en", [dict(story) for story in stories])
    write_source(folder, "mbpp_train_601_974", [dict(task) for task in tasks])
    return folder


@pytest.fixture
def recipe_path(tmp_path: Path, data_dir: Path) -> Path:
    """A recipe file over `data_dir` that trains in a second."""
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(data=data_dir), encoding="utf-8")
    return path


@pytest.fixture
def recipe(recipe_path: Path) -> Recipe:
    """The recipe of `recipe_path`."""
    return load_recipe(recipe_path)
