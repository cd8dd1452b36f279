"""Examining a model on the small world: what counts as right, what is printed, and the search for other speakers."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.bench.prompts import read_prompts
from tests.support import mini
from world import examine, make


@pytest.mark.parametrize(
    ("text", "is_other"),
    [
        ("The user is happy. A system of stars.", False),
        ("She is an assistant", False),
        ("Hello!\nuser\nI need a table.", True),
        ("Hello!\nuser: I need a table.", True),
        ("Good night. user: I am looking for a bus.", True),
        ("assistant", True),
    ],
)
def test_other_speakers_are_found(text: str, is_other: bool) -> None:
    assert examine.is_other_speaker(text) is is_other


def test_a_token_of_the_template_is_another_speaker() -> None:
    llm: Any = SimpleNamespace(tokenizer=SimpleNamespace(special_ids=frozenset({0, 1, 2}), eos_token_ids=(2, 0)))
    given = [SimpleNamespace(text="Hello", token_ids=ids) for ids in ((7, 8, 2), (7, 1, 8, 2))]
    assert [examine.goes_on_as_another(llm, answer) for answer in given] == [False, True]


def test_the_table_says_what_was_missed() -> None:
    good = examine.ExamTally("edits", 180, [("a", "b", "c")] * 20, 0)
    bad = examine.ExamTally("copying", 195, [("asked it", "wanted it", "gave it")] * 5, 0)
    speaks = examine.ExamTally("talk", 1, [], 1)
    lines = examine.table([good, bad, speaks], show=1).splitlines()
    assert lines[2:5] == [
        "| edits | 90.0% | 90% | met | 0 |",
        "| copying | 97.5% | 98% | missed | 0 |",
        "| talk | 100.0% | ended, one speaker |  | 1 |",
    ]
    assert [tally.missed for tally in (good, bad, speaks)] == [False, True, True]
    assert any("'asked it'" in line for line in lines)
    assert set(examine.WANTED) | set(examine.OPEN) == set(make.EXAM)


def test_a_model_is_examined_and_conversations_are_printed() -> None:
    llm = mini.plain()
    tallies = examine.examined(llm, 1, seed=2, max_tokens=2)
    assert [tally.kind for tally in tallies] == list(make.EXAM)
    assert all(tally.right + len(tally.wrong) == 1 for tally in tallies)
    lines = examine.printed(llm, 2, seed=2, max_tokens=2)
    assert sum(line == "\nseed 1" for line in lines) == 3
    after = lines[lines.index(next(line for line in lines if "Dialogues" in line)) :]
    assert sum(line.startswith("> ") for line in after) > 2 + 2  # a line of every turn; questions have one
    [said], found = examine.searched(llm, 2, seed=2, max_tokens=2)
    assert said.startswith("2 conversations at temperature 0.7, ") and not found


def test_questions_are_prompts_by_category(tmp_path: Path) -> None:
    """`forerun bench speed` reads what `--write` writes: the exam's questions, the kinds in turns."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(examine.as_prompts(2, seed=2)))
    cases = read_prompts(path)
    asked = list(make.exam(random.Random(2), 2))
    assert [case.category for case in cases] == list(make.EXAM) * 2
    assert {(case.category, *case.turns) for case in cases} == {(line["kind"], line["question"]) for line in asked}
