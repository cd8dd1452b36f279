"""Reading sources, splits, leak removal, and the order of windows."""

from __future__ import annotations

import json
import lzma
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.errors import DataError, TrainingError
from forerun.training import data
from forerun.training.mixture import Mixture, window_starts
from forerun.training.prepare import prepare
from forerun.training.recipe import Recipe
from forerun.training.sources import SOURCES


def ignore(_line: str) -> None:
    """Takes a report line and drops it."""


def test_one_record_in_fifty_is_held_out(data_dir: Path) -> None:
    split = data.split_source(data_dir, "mbpp_train_601_974", frozenset(), 0)
    assert (len(split.train), len(split.heldout)) == (196, 4)
    assert set(split.train).isdisjoint(split.heldout)


def test_split_depends_on_the_seed_only(data_dir: Path) -> None:
    first, again, other = (data.split_source(data_dir, "african_storybook_en", frozenset(), seed) for seed in (1, 1, 2))
    assert first == again
    assert first.train != other.train


def test_overlap_with_benchmarks_is_dropped(data_dir: Path, tmp_path: Path) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    records = list(data.read_records(data_dir, "african_storybook_en"))
    quoted = " ".join(records[7]["text"].upper().split()[10:25])
    (bench / "question.jsonl").write_text(json.dumps({"turns": [f"Read this: {quoted}"]}) + "\n")
    leaks = data.benchmark_grams(bench)
    assert len(leaks) == 5  # 2 + 15 words
    split = data.split_source(data_dir, "african_storybook_en", leaks, 0)
    assert split.num_leaked == 1
    assert not any(records[7]["text"] in text for text in split.train)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gsm8k_train not found.*--data"):
        next(data.read_records(tmp_path, "gsm8k_train"))
    (tmp_path / "gsm8k_train.jsonl.xz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is damaged"):
        next(data.read_records(tmp_path, "gsm8k_train"))
    with pytest.raises(DataError, match="no benchmark files"):
        data.benchmark_grams(tmp_path / "bench")


def test_generated_sources_come_from_their_own_folder(recipe: Recipe, tmp_path: Path) -> None:
    made = tmp_path / "world"
    made.mkdir()
    records = [
        {"kind": "sums", "turns": [["user", f"What is {i} plus 1?"], ["assistant", f"It is {i + 1}."]]}
        for i in range(400)
    ]
    records += [{"kind": "story_text", "text": f"Story {i}."} for i in range(100)]
    with lzma.open(made / "small_world.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    mixed = replace(recipe, mix={**recipe.mix, "small_world": 1.0}, data=replace(recipe.data, generated_dir=str(made)))
    prepared = prepare(mixed, tmp_path / "run", ignore)
    assert prepared.counts["small_world"].documents == 490
    [text] = SOURCES["small_world"].read(records[3], random.Random(0))
    assert text == "<|im_start|>user\nWhat is 3 plus 1?<|im_end|>\n<|im_start|>assistant\nIt is 4.<|im_end|>\n"


def test_prepared_folder_is_taken_again(recipe: Recipe, tmp_path: Path) -> None:
    first = prepare(recipe, tmp_path / "run", ignore)
    stamp = (tmp_path / "run" / "data" / "tokenizer.json").stat().st_mtime_ns
    again = prepare(recipe, tmp_path / "run", ignore)
    assert again.counts == first.counts
    assert (tmp_path / "run" / "data" / "tokenizer.json").stat().st_mtime_ns == stamp
    tokens = data.load_tokens(first.folder, "mbpp_train_601_974", "train")
    assert len(tokens) == first.counts["mbpp_train_601_974"].train_tokens
    assert (tokens == 0).sum() == first.counts["mbpp_train_601_974"].documents  # one separator each


def test_data_of_another_recipe_is_not_taken(recipe: Recipe, tmp_path: Path) -> None:
    """A run that ended before its first checkpoint has nothing else to tell it by."""
    prepare(recipe, tmp_path / "run", ignore)
    elsewhere = replace(recipe, data=replace(recipe.data, dir="elsewhere"))
    heavier = replace(recipe, mix={**recipe.mix, "mbpp_train_601_974": 5.0})
    for other, said in (
        (replace(recipe, seed=4), "holds other data: seed was 3, is 4. Use the recipe as it was, another --out"),
        (elsewhere, f"data.dir was '{recipe.data.dir}', is 'elsewhere'"),
        (heavier, "mix was"),
        (replace(recipe, start_from="there"), "tokenizer_from was '', is 'there'"),
    ):
        with pytest.raises(TrainingError) as error:
            prepare(other, tmp_path / "run", ignore)
        assert said in str(error.value)
    (tmp_path / "run" / "data" / "about.json").unlink()
    assert prepare(heavier, tmp_path / "run", ignore).counts, "an earlier version prepared it"


def test_too_little_text_for_the_vocabulary(recipe: Recipe, tmp_path: Path) -> None:
    big = replace(recipe, model=replace(recipe.model, vocab_size=60000))
    with pytest.raises(TrainingError, match="asks for 60000"):
        prepare(big, tmp_path / "run", ignore)


def make_mixture() -> Mixture:
    """Two sources whose tokens tell where they stand."""
    sources = {"a": np.arange(101, dtype=np.uint16), "b": np.arange(1000, 1801, dtype=np.uint16)}
    return Mixture(sources, {"a": 3.0, "b": 1.0}, seq_len=10, seed=5)


def test_shares_hold_in_every_stretch() -> None:
    mixture = make_mixture()
    for _ in range(5):
        batch = mixture.next_batch(8)
        assert batch.shape == (8, 11)
        assert int((batch[:, 0] < 1000).sum()) == 6


def test_every_window_comes_once_an_epoch() -> None:
    mixture = make_mixture()
    starts = [int(row[0]) for row in mixture.next_batch(40) if row[0] < 1000]
    epochs = [sorted(starts[begin : begin + 10]) for begin in (0, 10, 20)]
    assert epochs == [list(range(0, 100, 10))] * 3
    assert starts[:10] != starts[10:20]


def test_order_goes_on_from_counts() -> None:
    whole, first, second = make_mixture(), make_mixture(), make_mixture()
    wanted = whole.next_batch(30)
    first.next_batch(13)
    second.counts.update(first.counts)
    assert second.next_batch(17).equal(wanted[13:])


def test_windows_begin_with_documents_where_they_can() -> None:
    """Every document that fits a window is whole in one, whatever the lengths; longer ones are read to their end."""
    rng = np.random.default_rng(3)
    lens = rng.integers(1, 40, size=300)
    tokens = np.concatenate([[*[number + 1] * length, 0] for number, length in enumerate(lens)]).astype(np.uint16)
    seq_len = 16
    windows = [tokens[start : start + seq_len + 1] for start in window_starts(tokens, seq_len, 0)]
    for number, length in enumerate(lens[:-2]):  # the last may lie behind the last window
        seen = [int((window == number + 1).sum()) for window in windows]
        assert max(seen) == length if length <= seq_len - 1 else sum(seen) >= length


def test_windows_without_documents_follow_each_other() -> None:
    assert window_starts(np.zeros(41, dtype=np.uint16), 10, None).tolist() == [0, 10, 20, 30]


def test_too_short_a_source_is_refused() -> None:
    with pytest.raises(DataError, match="source a has 5 tokens"):
        Mixture({"a": np.zeros(5, dtype=np.uint16)}, {"a": 1.0}, seq_len=10, seed=0)
