"""The small world: text with sense, exact answers, and an examination that training never sees."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from world import drills, facts, make, skills, talk
from world.grammar import Wordings
from world.stories import PLOTS
from world.words import ALL_WORDS

LAB = Path(__file__).resolve().parents[2] / "lab"

LEFT_OVER = re.compile(r"[\[\]{}|]|\?\?|\.\.|  | [,.!?]")
WRONG_ARTICLE = re.compile(r"\b[Aa] (?!one|use|uni)[aeiou]|\b[Aa]n [^aeiou\Wh]")


def records(count: int) -> list[dict]:
    return list(make.records(random.Random(5), count))


def test_no_gap_or_alternative_is_left_over() -> None:
    for plot in PLOTS:
        for seed in range(60):
            told = plot(random.Random(seed))
            for text in (told.text.replace("\n\n", " "), told.title, told.about, *sum(told.questions, ())):
                assert not LEFT_OVER.search(text) and not WRONG_ARTICLE.search(text), text


def test_answers_to_questions_are_in_the_story() -> None:
    """Every name of an answer stands in the text it is about."""
    for seed in range(400):
        told = PLOTS[seed % len(PLOTS)](random.Random(seed))
        for _, answer in told.questions:
            for name in re.findall(r"(?<=[a-z] )[A-Z][a-z]+", answer):
                assert name in told.text, (answer, told.text)


def test_a_hero_keeps_one_pronoun() -> None:
    told = [PLOTS[2](random.Random(seed)) for seed in range(50)]  # one person and a friend who is never "he" or "she"
    for one in told:
        text = f" {one.text} "
        assert not (re.search(r"\b[Ss]he\b", text) and re.search(r"\b[Hh]e\b", text)), text


def test_only_what_is_known_by_heart_is_asked_twice_and_a_seed_gives_the_same() -> None:
    one, two = records(1500), records(1500)
    assert one == two
    others = [json.dumps(record) for record in one if record["kind"] not in make.BY_HEART]
    assert len(others) == len(set(others)) > 900
    assert sum(record["kind"] == talk.SELF for record in one) > 20


def wordings() -> list[tuple[str, Wordings]]:
    return [
        (f"{m.__name__}.{n}", v)
        for m in (drills, facts, skills, talk, make)
        for n, v in vars(m).items()
        if isinstance(v, Wordings)
    ]


@pytest.mark.parametrize(("name", "found"), wordings())
def test_the_examination_has_wordings_of_its_own(name: str, found: Wordings) -> None:
    trained = {text for pattern in found.of("train") for text in every(pattern)}
    asked = {text for pattern in found.test for text in every(pattern)}
    assert trained and asked and not trained & asked


def every(pattern: str) -> Iterator[str]:
    """All texts of a pattern in small letters, without marks and without the place of the text they are about."""
    inner = re.search(r"\[([^\[\]]*)\]", pattern)
    if inner is None:
        yield " ".join(re.sub(r"[.:!,]|\{x\}", " ", pattern.lower()).split())
        return
    for choice in inner[1].split("|"):
        yield from every(pattern[: inner.start()] + choice + pattern[inner.end() :])


def test_examination_questions_do_not_occur_in_training() -> None:
    trained = {turn[1] for record in records(3000) for turn in record.get("turns", ()) if turn[0] == "user"}
    asked = list(make.exam(random.Random(2), 20))
    assert len(asked) == 20 * len(make.EXAM)
    assert not [line for line in asked if line["question"] in trained and line["kind"] not in ("talk", "unknown")]


def test_tasks_have_the_answers_a_program_computes() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        [(asked, answer)] = skills.sorting(rng, "train").turns
        if "," in answer and answer[0].isalpha():
            assert answer.split(", ") == sorted(answer.split(", ")) and all(
                word in asked for word in answer.split(", ")
            )
        [(asked, answer)] = skills.extraction(rng, "test").turns
        assert all(str(value) in asked for value in json.loads(answer).values())
        [(asked, answer)] = skills.copying(rng, "train").turns
        assert answer in asked
        [(asked, answer)] = facts.ask(facts.sum_fact(rng), "sums", rng, "train").turns
        one, kind, two, _, result = answer.rstrip(".").split()
        assert {"plus": int(one) + int(two), "minus": int(one) - int(two), "times": int(one) * int(two)}[kind] == int(
            result
        )


def test_drills_are_answered_from_their_text_alone() -> None:
    misspelt = 0
    for seed in range(300):
        rng = random.Random(seed)
        [(asked, answer)] = drills.copying_drill(rng, "train").turns
        assert answer in asked
        [(asked, answer)] = drills.replacing_drill(rng, "train").turns
        told = set(re.findall(r"\w+", asked))
        assert set(re.findall(r"\w+", answer)) <= told and answer not in asked
        [(asked, answer)] = drills.renaming_drill(rng, "train").turns
        assert set(re.findall(r"\w+", answer)) <= set(re.findall(r"\w+", asked))
        [(asked, answer)] = drills.looking_up_drill(rng, "train").turns
        for name, value in json.loads(answer).items() if answer[0] == "{" else ():
            assert name in asked and str(value) in asked
        [(asked, answer)] = drills.case_drill(rng, "train").turns
        case = str.upper if "capital" in asked.lower() else str.lower
        assert answer.lower() in asked.lower() and answer == case(answer)
        [(asked, answer)] = drills.mending_drill(rng, "train").turns
        right = [word in asked.split() for word in answer.split()]
        assert set(answer.split()) <= set(ALL_WORDS) and sum(right) >= len(right) - 3
        misspelt += not all(right)
        [(asked, answer)] = drills.sorting_drill(rng, "train").turns
        words = answer.split(", ")
        assert words == sorted(set(words)) and all(word in asked for word in words)
        assert len({word[0] for word in words}) < len(words)
    assert misspelt > 280


def test_neighbours_agree() -> None:
    table = {row.country: row for row in facts.countries()}
    assert len(table) == 180 and table["France"].capital == "Paris" and "Spain" in table["France"].neighbours
    assert all(row.country in table[other].neighbours for row in table.values() for other in row.neighbours)


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    for more in (("--samples", "50"), ("--exam", "3")):
        subprocess.run(
            [sys.executable, str(LAB / "world" / "make.py"), str(tmp_path), *more], check=True, capture_output=True
        )
    assert len((tmp_path / "exam.jsonl").read_text().splitlines()) == 3 * len(make.EXAM)
    assert (tmp_path / "small_world.jsonl.xz").stat().st_size > 1000
