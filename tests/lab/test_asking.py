"""Chat prompts made of training text: every kind comes, gaps are filled, benchmarks stay out, seeds decide."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from asking import asker, german, wordings
from asking.asker import SHARES, Asker, PromptMaterial, load_material, make_prompts
from forerun.errors import DataError
from forerun.training.data import grams
from tests.support.scripts import run_script
from tests.training.conftest import write_source

PROSE = " ".join(
    f"Then old Mister Harold Brown of Zanzibar told sailor number {i} about the wonderful lighthouse near Port Arthur."
    for i in range(120)
)
GAP = re.compile(r"\{\w*\}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A training folder with a few records of each source that prompts are made of."""
    data = tmp_path / "train"
    data.mkdir()
    book = {"title": "Sea", "author": "A. B.", "text": f"# Title: Sea\n\n{PROSE}", "path": "a.json", "summary": ""}
    for name in ("openstax_ccby", "classic_young_readers", "classic_general", "pratham_books_en", "18f_blog_cc0"):
        write_source(data, name, [dict(book)])
    for name in ("nltk_state_union_pd", "nltk_inaugural_pd", "cia_factbook_pd"):
        write_source(data, name, [{"path": "x", "text": PROSE}])
    write_source(data, "qmsum_train", [{"transcript": ["{vocalsound} We should , I think , start ."] * 40}])
    write_source(data, "gsm8k_train", [{"question": f"Ann has {i} eggs. How many?", "answer": ""} for i in range(10)])
    cases = [{"input": "night", "output": "day"}]
    write_source(data, "self_instruct_seed_tasks", [{"instruction": "Name the opposite.", "instances": cases}])
    write_source(data, "mbpp_train_601_974", [{"text": "Write a function to add."}])
    write_source(data, "exercism_pairs", [{"statement": "# Instructions\n\nSort the words."}])
    write_source(data, "python_small_programs", [{"text": "def f(x):\n    return {x: 1}\n"}])
    for name in ("sgd_dev", "taskmaster4", "topical_chat"):
        write_source(data, name, [{"turns": [["U", "One tea please"], ["S", "Sure."], ["U", "Thanks"]]}])
    return data


@pytest.fixture
def material(folder: Path) -> PromptMaterial:
    """What prompts are made of."""
    return load_material(folder)


def test_every_kind_comes_in_its_share_and_no_gap_is_left(material: PromptMaterial) -> None:
    rng = random.Random(1)
    kinds = rng.choices(list(SHARES), list(SHARES.values()), k=600)
    asked = [Asker(material, rng).conversation(kind) for kind in kinds]
    assert {x.kind for x in asked} == set(SHARES)
    for x in asked:
        assert x.turns and all(turn.strip() for turn in x.turns)
        assert not [gap for turn in x.turns for gap in GAP.findall(turn)]
    lens = Counter(len(x.turns) for x in asked)
    assert set(lens) == {1, 2} and 0.05 < lens[2] / len(asked) < 0.3
    words = {x.kind: max(len(y.turns[0].split()) for y in asked if y.kind == x.kind) for x in asked}
    assert words["summary"] > 150 and words["passages"] > 200 and words["fact"] < 20


def test_passages_are_whole_sentences_of_a_text(material: PromptMaterial) -> None:
    passage = Asker(material, random.Random(2)).passage((200, 400))
    assert any(passage in " ".join(text.split()) for text in material.texts)
    assert passage.endswith(".") and passage.startswith(("Then", "We"))


def test_prompts_differ_are_decided_by_the_seed_and_share_no_run_with_a_benchmark(material: PromptMaterial) -> None:
    first = make_prompts(material, frozenset(), 60, seed=3)
    assert first == make_prompts(material, frozenset(), 60, seed=3) != make_prompts(material, frozenset(), 60, seed=4)
    assert len({x.turns for x in first}) == 60
    leaks = frozenset(grams(PROSE))
    clean = make_prompts(material, leaks, 40, seed=3)
    assert all(leaks.isdisjoint(grams(turn)) for x in clean for turn in x.turns)
    assert not all(leaks.isdisjoint(grams(turn)) for x in first for turn in x.turns), "nothing had to be left out"


def test_too_little_text_is_said(material: PromptMaterial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asker, "SHARES", {"problem": 1.0})
    assert len(make_prompts(material, frozenset(), 8, 1)) == 8
    with pytest.raises(DataError, match="gives only 10 different prompts; ask for fewer than 20"):
        make_prompts(material, frozenset(), 20, 1)


def test_german_sentences_vary_and_keep_the_verb_second() -> None:
    rng = random.Random(1)
    found = [german.sentence(rng) for _ in range(300)]
    assert len(set(found)) > 290
    verbs = {form for forms in german.VERBS for form in forms}
    starts = [*german.SUBJECTS, *german.PLACES, *(re.sub(r"\{\w+\}", r"\\d+", time) for time in german.TIMES)]
    begins = re.compile("|".join(f"(?:{start}) (?:{'|'.join(verbs)}) " for start in starts), re.IGNORECASE)
    assert all(begins.match(text) for text in found)


def test_no_wording_has_an_unknown_gap(material: PromptMaterial) -> None:
    asker = Asker(material, random.Random(5))
    known = {*asker.gaps(), "text", "code", "german", "passages", "question"}
    patterns = [line for name, lines in vars(wordings).items() if name.isupper() for line in lines]
    assert len(patterns) > 100
    assert {gap.strip("{}") for line in patterns for gap in GAP.findall(line)} <= known


def test_the_command_writes_a_conversation_a_line(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "prompts.jsonl"
    words = ("--data", str(folder), "--out", str(out), "--count", "30", "--seed", "2")
    assert "30 prompts" in run_script("prompts", *words).stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 30 and {line["category"] for line in lines} <= set(SHARES)
    made = make_prompts(load_material(folder), frozenset(), 30, 2)
    assert [tuple(line["turns"]) for line in lines] == [x.turns for x in made]
