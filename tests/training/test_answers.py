"""Answers written once for many trainings: turn after turn, gone on with, packed into rows, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.test_heads_run import job_of, recipe_of, target  # noqa: F401 (a fixture)
from typer.testing import CliRunner

from forerun import LLM
from forerun.cli.train import app
from forerun.errors import CheckpointError, ConfigError, DataError, TrainingError
from forerun.training.heads import answers
from forerun.training.heads.answers import answer_file_rows, read_lines
from forerun.training.heads.build import make_head
from forerun.training.heads.config import Eagle3Config, load_head_recipe
from forerun.training.heads.console import HeadConsole
from forerun.training.heads.conversations import AnswerOptions, answer_files, read_temperatures
from forerun.training.heads.export import export_head
from forerun.training.heads.prompts import read_file
from forerun.training.heads.rows import Rows
from forerun.training.heads.run import load_target, make_trainer, train_head
from forerun.training.heads.sequences import check_lengths
from forerun.training.heads.token_list import count_texts

BAD_FILES = (
    ("", "no file of answers"),
    ('{}\n{"prompt": [1]}\n', "no file of answers"),
    ("{}\n", "holds no answer"),
    ('{}\n{"prompt": [1], "answer": [2, 900]}\n', "token id 900, the target knows 0 to 279"),
)
OPTIONS = AnswerOptions(prompt_tokens=40, answer_tokens=6, temperatures=(0.0, 1.0), seed=3)


def lines_of(path: Path) -> list[dict[str, list[int]]]:
    """The prompts and answers of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts, two of them with a second turn, and one record without words."""
    turns: list[list[str]] = [["the dog saw"], ["a cat ran", "why?"], ["to the house"], ["red tree", "and?"], [" "]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": each}) + "\n" for each in turns))
    return path


def test_texts_of_windows_are_parts_between_empty_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfOne.\r\nStill one.\r\n\r\nTwo.\r\n")
    assert [turns for turns, _ in read_file(path)] == [["One.\nStill one."], ["Two.\n"]]


def test_a_second_turn_follows_on_the_targets_own_answer(target: Path, prompts: Path, tmp_path: Path) -> None:  # noqa: F811
    model = str(target / "model")
    first, second = answer_files(model, [prompts], tmp_path / "out", OPTIONS, lambda _: None)
    tokenizer = LLM(model).tokenizer
    said = {tokenizer.decode(x["prompt"]).split("\n")[1]: x["answer"] for x in lines_of(first)}
    assert set(said) == {"the dog saw", "a cat ran", "to the house", "red tree"}
    wanted = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": tokenizer.decode(said[one])},
         {"role": "user", "content": two}]
        for one, two in (("a cat ran", "why?"), ("red tree", "and?"))
    ]  # fmt: skip
    found = sorted(line["prompt"] for line in lines_of(second))
    assert found == sorted(tokenizer.encode_chat(messages)[-40:] for messages in wanted)
    assert all(len(line["answer"]) <= 6 for line in lines_of(first) + lines_of(second))


@pytest.mark.parametrize(
    ("command", "option", "least"),
    [
        ("answers", "--turns", 1),
        ("answers", "--answer-tokens", 1),
        ("answers", "--prompt-tokens", 1),
        ("eagle3", "--data-tokens", 0),
        ("eagle3", "--capture-bytes", 0),
    ],
)
def test_numbers_out_of_range_are_named_by_their_option(command: str, option: str, least: int) -> None:
    words = ["--target", "no-model", "--data", "no.jsonl", "--out", "nowhere", option, str(least - 1)]
    result = CliRunner().invoke(app, [command, *words])
    assert result.exit_code == 2 and f"Invalid value for '{option}'" in result.output


def test_answers_interrupted_equal_answers_uninterrupted(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr(answers, "BATCH", 2)
    words = ["answers", "--target", str(target / "model"), "--data", str(prompts), "--out", str(tmp_path / "out")]
    words += ["--answer-tokens", "6", "--temperatures", "0,1", "--prompt-tokens", "40"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and result.output.count("finished") == 2, result.output
    assert "2 of 4, 0:00:" in result.output and "4 of 4, 0:00:00 left" in result.output
    path = tmp_path / "out" / "turn1.answers"
    whole = path.read_text()
    path.write_text(whole[: 2 * len(whole) // 3])  # as a crash leaves it
    assert CliRunner().invoke(app, words).exit_code == 0
    assert path.read_text() == whole


def test_heads_learn_from_files_of_answers_and_of_tokens(target: Path, prompts: Path, tmp_path: Path) -> None:  # noqa: F811
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"question": f"the dog saw {i} cats"}) + "\n" for i in range(30)))
    (path,) = answer_files(str(target / "model"), [many], tmp_path / "out", OPTIONS, lambda _: None)
    recipe = recipe_of("mtp", tmp_path)
    recipe = replace(recipe, schedule=replace(recipe.schedule, seq_len=64))  # room for the longest answer
    job = replace(job_of(target, tmp_path / "run"), data=(path, target / "tokens.bin"))
    rows = make_trainer(recipe, job, HeadConsole()).feed.rows
    texts = [length for length, prompt in zip(rows.lens.tolist(), rows.prompts.tolist(), strict=True) if prompt == 0]
    assert texts and set(texts) == {64} and len(rows) > len(texts)
    written = sum(len(line["answer"]) for line in lines_of(path) if len(line["answer"]) > 1)
    held = [line["prompt"] for line in lines_of(tmp_path / "run" / "data" / "heldout.jsonl")]
    kept = [line for line in lines_of(path) if len(line["answer"]) > 1]
    assert held == [kept[number]["prompt"] for number in (0, len(kept) // 3, 2 * (len(kept) // 3))]
    not_trained = sum(len(kept[number]["answer"]) for number in (0, len(kept) // 3, 2 * (len(kept) // 3)))
    assert rows.num_answered == written - not_trained + sum(texts)
    assert train_head(recipe, job, HeadConsole())


def test_sequences_that_do_not_fit_are_told_or_refused() -> None:
    said: list[str] = []
    check_lengths(Rows.of([[1] * 4, [2] * 4], [2, 3]), 4, said.append)
    assert not said
    check_lengths(Rows.of([[1] * 4, [2] * 9], [2, 3]), 4, said.append)
    assert said == ["1 of 2 sequences are cut at schedule.seq_len 4, the longest by 5 tokens"]
    with pytest.raises(DataError, match="every prompt fills schedule.seq_len 4, .* raise it, at most to 9"):
        check_lengths(Rows.of([[1] * 6, [2] * 9], [4, 5]), 4, said.append)


def test_packed_rows_hold_the_same_tokens_and_answers() -> None:
    sequences = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12]]
    rows = Rows.of(sequences, [1, 1, 3, 0, 1])
    packed = rows.packed(5)
    assert [packed.sequence(i).tolist() for i in range(len(packed))] == [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]
    ids, answer = packed.batch([0, 2], 6)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 0], [10, 11, 12, 0, 0, 0]]
    assert answer.tolist() == [[False, True, True, False, True, False], [True, True, False, False, False, False]]
    assert packed.counts(13).equal(rows.counts(13)) and packed.num_answered == rows.num_answered == 6
    apart = rows.take(torch.tensor([0, 2, 3]).numpy()).packed(100)  # what lies between is not taken in
    assert [apart.sequence(i).tolist() for i in range(len(apart))] == [[1, 2, 3], [6, 7, 8, 9, 10, 11]]
    joined = Rows.join([apart, Rows.of([[20, 21]], [1])])
    assert [joined.sequence(i).tolist() for i in range(3)] == [[1, 2, 3], [6, 7, 8, 9, 10, 11], [20, 21]]
    assert joined.batch([2], 2)[1].tolist() == [[False, True]]


def test_data_tokens_bound_files_of_answers(target: Path, tmp_path: Path) -> None:  # noqa: F811
    many = tmp_path / "many.jsonl"
    many.write_text("".join(json.dumps({"question": f"the dog saw {i} cats"}) + "\n" for i in range(30)))
    (path,) = answer_files(str(target / "model"), [many], tmp_path / "out", OPTIONS, lambda _: None)
    whole = answer_file_rows(path, 280)
    most = whole.num_tokens // 2
    rows = answer_file_rows(path, 280, most)
    assert most - int(whole.lens.max()) < rows.num_tokens <= most and len(rows) < len(whole)
    assert [rows.sequence(i).tolist() for i in range(len(rows))] == [
        whole.sequence(i).tolist() for i in range(len(rows))
    ]
    recipe = recipe_of("mtp", tmp_path).with_sizes(None, None, most, None)
    recipe = replace(recipe, schedule=replace(recipe.schedule, seq_len=64))
    used = make_trainer(recipe, replace(job_of(target, tmp_path / "run"), data=(path,)), HeadConsole()).feed.rows
    assert 0 < used.num_tokens < most
    with pytest.raises(DataError, match="holds no answer within --data-tokens 3; raise that"):
        answer_file_rows(path, 280, 3)


def test_answers_in_tokens_of_another_tokenizer_are_refused(target: Path, tmp_path: Path) -> None:  # noqa: F811
    (path,) = answer_files(str(target / "model"), [target / "prompts.jsonl"], tmp_path, OPTIONS, lambda _: None)[:1]
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "vocabulary": "another"}) + "\n" + rest)
    with pytest.raises(DataError, match="in tokens of another tokenizer than the target's: let this target answer"):
        make_trainer(recipe_of("mtp", tmp_path), replace(job_of(target, tmp_path / "run"), data=(path,)), HeadConsole())
    with pytest.raises(DataError, match="in tokens of another tokenizer"):
        count_texts([path], str(target / "model"))


def test_files_of_before_that_tell_no_tokenizer_are_gone_on_with(target: Path, tmp_path: Path) -> None:  # noqa: F811
    given = (str(target / "model"), [target / "prompts.jsonl"], tmp_path, OPTIONS)
    (path,) = answer_files(*given, lambda _: None)[:1]
    first, rest = path.read_text().split("\n", 1)
    about = {name: value for name, value in json.loads(first).items() if name != "vocabulary"}
    path.write_text(json.dumps(about) + "\n" + rest[: rest.rindex("\n", 0, -1) + 1])  # the last answer is missing
    answer_files(*given, lambda _: None)
    assert path.read_text() == json.dumps(about) + "\n" + rest
    path.write_text(json.dumps({**about, "seed": 9}) + "\n" + rest)
    with pytest.raises(TrainingError, match="was written for"):
        answer_files(*given, lambda _: None)


def test_bad_files_of_answers_are_refused(target: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "x.answers"
    for text, message in BAD_FILES:
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            answer_file_rows(path, 280)
    job = replace(job_of(target, tmp_path / "run"), data=(target / "tokens.bin", target / "prompts.jsonl"))
    with pytest.raises(DataError, match="1 of 2 files are .bin or .answers files, the others prompts"):
        make_trainer(recipe_of("mtp", tmp_path), job, HeadConsole())
    path.write_text("a shopping list\nmilk")
    with pytest.raises(TrainingError, match="is no file of answers: .* delete it, or use another --out"):
        read_lines(path, {})
    assert path.read_text() == "a shopping list\nmilk"
    with pytest.raises(ConfigError, match="give numbers separated by commas"):
        read_temperatures("0;1")
    with pytest.raises(ConfigError, match="none below 0"):
        AnswerOptions(temperatures=(-1.0,))


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "mtp", "draft"])
def test_a_training_starts_from_an_exported_head(kind: str, target: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe, loaded, counts = recipe_of(kind, tmp_path), load_target(str(target / "model"), "cpu"), torch.arange(280)
    head = make_head(recipe, loaded, counts)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.25)
    export_head(head, target / "model", tmp_path / "export")
    again = make_head(replace(recipe, start_from=str(tmp_path / "export")), loaded, counts)
    for name, weight in again.state_dict().items():
        assert weight.equal(head.state_dict()[name].bfloat16().float()), name
    with pytest.raises(CheckpointError, match="no readable exported head"):
        make_head(replace(recipe, start_from=str(tmp_path)), loaded, counts)
    if kind in ("medusa", "eagle3"):
        start = replace(recipe, start_from=str(tmp_path / "export"))
        other = make_head(start, loaded, counts.flip(0))  # this data's frequent tokens are others: the head's rows stay
        name = "d2t" if kind == "eagle3" else "token_map"
        assert other.tensors()[name].equal(head.tensors()[name])
    if kind == "eagle3":
        file = tmp_path / "export" / "model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "t2d": ~tensors["t2d"]}, file)
        with pytest.raises(CheckpointError, match="a t2d that is not its draft vocabulary's"):
            make_head(replace(recipe, start_from=str(file.parent)), loaded, counts)


def test_eagle3_reads_the_layers_of_its_recipe(target: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "layers.toml"
    path.write_text(
        'name = "x"\nkind = "eagle3"\n[head]\naux_layers = [0, 1, 2]\nvocab_size = 0\n[schedule]\nseq_len = 32\n'
    )
    recipe, loaded = load_head_recipe("eagle3", path), load_target(str(target / "model"), "cpu")
    assert make_head(recipe, loaded, torch.arange(280)).layers == (0, 1, 2)
    with pytest.raises(ConfigError, match=r"aux_layers = \[0, 1, 3\]: the target has the states 0 .* to 2"):
        make_head(replace(recipe, head=Eagle3Config(aux_layers=(0, 1, 3))), loaded, torch.arange(280))
    with pytest.raises(ConfigError, match="must be three layers, each above the last"):
        Eagle3Config(aux_layers=(2, 1, 0))
    path.write_text(path.read_text().replace("[0, 1, 2]", '[0, "a"]'))
    with pytest.raises(ConfigError, match="head.aux_layers = 'a' should be of type int"):
        load_head_recipe("eagle3", path)
