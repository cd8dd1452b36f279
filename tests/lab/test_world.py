"""The small world: text with sense, exact answers, and an examination that training never sees."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from world import drills, elementary, facts, make, skills, talk
from world.grammar import Wordings
from world.stories import PLOTS
from world.words import ALL_WORDS, NUMBERS

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
        for m in (drills, elementary, facts, skills, talk, make)
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
    misspelt = alike = 0
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
        request = asked.lower().replace(answer.lower(), "")
        case = str.upper if re.search("capital|upper", request) else str.lower
        assert answer.lower() in asked.lower() and answer == case(answer)
        [(asked, answer)] = drills.mending_drill(rng, "train").turns
        right = [word in asked.split() for word in answer.split()]
        assert set(answer.split()) <= set(ALL_WORDS) and sum(right) >= len(right) - 3
        misspelt += not all(right)
        [(asked, answer)] = drills.sorting_drill(rng, "train").turns
        words = answer.split(", ")
        assert words == sorted(set(words)) and all(word in asked for word in words)
        is_near = any(ord(second[0]) - ord(first[0]) <= 1 for first, second in pairwise(words))
        assert is_near or set(words) <= set(drills.small_words())
        alike += len({word[0] for word in words}) < len(words)
    assert misspelt > 280 and alike > 180


def counted(start: int, end: int | None = None) -> list[int]:
    """The numbers between two, or from one to the only one."""
    first, last = (1, start) if end is None else (start, end)
    return list(range(first, last + 1)) if first <= last else list(range(first, last - 1, -1))


def test_what_is_said_of_numbers_is_right() -> None:
    forms: set[str] = set()
    for seed in range(600):
        fact = elementary.number_fact(random.Random(seed))
        numbers, asked = (list(map(int, re.findall(r"\d+", text))) for text in (fact.answer, fact.direct))
        form = re.sub(r"\d+(, \d+)*", "N", fact.answer)
        forms.add(form)
        right = {
            "N comes after N.": lambda n, q: n == [q[0] + 1, q[0]],
            "N comes before N.": lambda n, q: n == [q[0] - 1, q[0]],
            "N is more than N.": lambda n, q: sorted(q) == n[::-1] and n[0] > n[1],
            "N is less than N.": lambda n, q: sorted(q) == n and n[0] < n[1],
            "Twice N is N.": lambda n, q: n == [q[0], 2 * q[0]],
            "Half of N is N.": lambda n, q: n == [q[0], q[0] / 2],
            "N": lambda n, q: n == counted(*q),
        }.get(form)  # fmt: skip
        if right is None:
            parity, denied = "even" if numbers[0] % 2 == 0 else "odd", fact.answer.startswith("No")
            assert f"{numbers[0]} is an {parity} number." in fact.answer and (parity in fact.direct) != denied, fact
            assert numbers == asked
        else:
            assert right(numbers, asked), fact
    assert len(forms) > 8


def test_animals_are_compared_by_size_and_said_to_be_what_they_are() -> None:
    names = [row[0] for row in facts.rows_of(elementary.ANIMALS)]
    kinds = {row[0]: row[1] for row in facts.rows_of(elementary.ANIMALS)}
    assert (
        names.index("ant") < names.index("mouse") < names.index("dog") < names.index("elephant") < names.index("whale")
    )
    compared = 0
    for seed in range(300):
        fact = elementary.animal_kind(random.Random(seed))
        answer = fact.answer
        if found := re.fullmatch(r"(?:Yes, |No, )?[Aa]n? (\w+) is bigger than an? (\w+)\.", answer):
            compared += 1
            assert names.index(found[1]) >= names.index(found[2]) + elementary.APART, answer
            asked = re.findall(rf"\b({'|'.join(names)})\b", fact.direct)
            assert answer.startswith("No") == (fact.direct.startswith("is ") and asked == [found[2], found[1]]), fact
        elif found := re.match(r"(?:Yes, |No, )?[Aa]n? (\w+) is an? (\w+)\.", answer):
            assert kinds[found[1]] == found[2], answer
    assert compared > 30


def test_lists_have_as_many_items_as_were_asked_for() -> None:
    for seed in range(200):
        fact = elementary.list_fact(random.Random(seed))
        items = re.split(r", | and ", fact.answer.rstrip("."))
        asked = fact.noun.split()[0]
        assert len(items) == len(set(items)) >= 2
        assert asked in ("the", "all") or str(len(items)) == asked or NUMBERS[len(items)] == asked


EXAMPLES = {  # of programs: arguments and what comes out
    "adds two numbers": ((2, 3), 5), "subtracts two numbers": ((2, 3), -1), "multiplies two numbers": ((2, 3), 6),
    "divides two numbers": ((6, 3), 2), "squares a number": ((5,), 25), "doubles a number": ((5,), 10),
    "says whether a number is even": ((5,), False), "says whether a number is odd": ((5,), True),
    "returns the larger of two numbers": ((2, 3), 3), "returns the smaller of two numbers": ((2, 3), 2),
    "adds all numbers of a list": (([1, 2, 4],), 7), "finds the largest number of a list": (([1, 9, 4],), 9),
    "computes the average of a list": (([1, 2, 6],), 3), "computes the factorial of a number": ((5,), 120),
    "computes the n-th Fibonacci number": ((10,), 55), "reverses a string": (("abc",), "cba"),
    "counts the words of a text": (("a bc d",), 3), "counts the vowels of a text": (("Anna said",), 4),
    "says hello": (("Tom",), "Hello, Tom!\n"), "sorts a list": (([3, 1, 2],), [1, 2, 3]),
    "checks whether a word is a palindrome": (("anna",), True),
    "prints the numbers from one to ten": ((), "".join(f"{n}\n" for n in range(1, 11))),
}  # fmt: skip


@pytest.mark.parametrize("task", elementary.PROGRAMS)
def test_programs_do_what_was_asked(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(elementary.PROGRAMS[task], names)
    arguments, wanted = EXAMPLES[task]
    [function] = [value for name, value in names.items() if name != "__builtins__"]
    found = function(*arguments)
    assert (capsys.readouterr().out if found is None else found) == wanted


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
