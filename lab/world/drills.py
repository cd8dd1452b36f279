"""Drills: tasks over words drawn at random, in which nothing but the text itself says what comes next.

Knows: copying, replacing, renaming, looking up, changing case, mending and sorting among words without sense, alone or in the
place of some words of a story. A story is easily guessed, so a model that reads stories alone learns to guess where it should
copy; here it cannot. Does not know: how requests are worded (`skills`).
"""

from __future__ import annotations

import json
import random
import re
import string
from functools import cache
from pathlib import Path

from world.grammar import GrammarSample, Wordings, expand, listed
from world.skills import (
    COPY,
    CORRECT,
    EXTRACT,
    RENAME,
    REPLACE,
    SORT,
    cased,
    drawn,
    framed,
    in_a_line,
    misspelt,
    program,
)
from world.stories import story
from world.words import ALL_WORDS, BOYS, GIRLS, SURNAMES, TOWNS, neighbours

TOKENIZER = Path(__file__).resolve().parents[2] / "src" / "forerun" / "mini" / "target" / "tokenizer.json"
_WORD = re.compile("Ġ([A-Z]?[a-z]{2,})")
LOOK_UP = Wordings(
    train=("{x}\n\nWhat is the {k}?", "What is the {k}?\n\n{x}", "[Give|Tell] me the {k}: {x}", "{x}\n\nThe {k}, please.",
           "[Find|Look up] the {k}.\n\n{x}", "[Read|Look at] this: {x}\n\nWhat is the {k}?"),
    test=("Which {k} is given here? {x}",),
)  # fmt: skip


@cache
def known_words() -> tuple[str, ...]:
    """Words, and beginnings of words, that are one token of `mini` behind a blank; in the vocabulary's order."""
    vocabulary = json.loads(TOKENIZER.read_text("utf-8"))["model"]["vocab"]
    return tuple(found[1] for token in vocabulary if (found := _WORD.fullmatch(token)))


@cache
def small_words() -> tuple[str, ...]:
    """Those without a capital."""
    return tuple(word for word in known_words() if word.islower())


@cache
def long_words() -> tuple[str, ...]:
    """Names and words of the small world, of which most are several tokens: there a copy must not slip to another one."""
    return tuple(word for word in (*GIRLS, *BOYS, *SURNAMES, *TOWNS, *ALL_WORDS) if word.isalpha())


def _words(rng: random.Random, count: int) -> list[str]:
    """Different words, about half of them of one token."""
    known = rng.sample(known_words(), count)
    return list(dict.fromkeys(rng.choice(long_words()) if rng.random() < 0.5 else word for word in known))


def _joined(words: list[str], rng: random.Random) -> str:
    """The words in a line, a list, or sentences without sense."""
    form = rng.random()
    if form < 0.5:
        return " ".join(words)
    if form < 0.65:
        return rng.choice((", ", "\n", " - ", "; ")).join(words)
    parts, start = list[str](), 0
    while start < len(words):
        end = start + rng.randint(3, 9)
        parts.append(" ".join(words[start:end]) + rng.choice(".....!?"))
        start = end
    return " ".join(parts)


def _text(words: list[str], rng: random.Random) -> str:
    """The words without sense, or in the place of every third word of a story's paragraph."""
    if rng.random() < 0.5:
        return _joined(words, rng)
    left = list(words)

    def other(found: re.Match[str]) -> str:
        if not left or rng.random() < 0.67:
            return found[0]
        word = left.pop()
        return word.capitalize() if found[0][0].isupper() and word.islower() else word

    return re.sub("[A-Za-z]{2,}", other, rng.choice(story(rng).paragraphs))


def _code(rng: random.Random) -> str:
    """Letters and digits without sense; a letter comes first, so that no code is a number."""
    return rng.choice(string.ascii_letters) + drawn(string.ascii_letters + string.digits, 2, 13, rng)


def copying_drill(rng: random.Random, split: str) -> GrammarSample:
    """Words to be written again; some of them stand there twice, with other words behind them."""
    words = _words(rng, rng.randint(3, 28))
    for _ in range(rng.randint(0, len(words) // 5)):
        words[rng.randrange(len(words))] = rng.choice(words)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        words[rng.randrange(len(words))] = _code(rng)
    text = _text(words, rng)
    return GrammarSample("copying_drill", ((framed(COPY, rng, split, text), text),))


def replacing_drill(rng: random.Random, split: str) -> GrammarSample:
    """One of the words, whatever it is and as often as it stands there, replaced by another."""
    new, *words = _words(rng, rng.randint(6, 25))
    for _ in range(rng.choice((0, 0, 1, 2))):
        words.insert(rng.randint(0, len(words)), rng.choice(words))
    wanted = rng.choice(words)
    alike = [word for word in (*long_words(), *known_words()) if word[:2] == wanted[:2] and word not in (wanted, new)]
    for word in rng.sample(alike, min(len(alike), rng.choice((0, 1, 1, 2)))):  # that must stay
        words.insert(rng.randint(0, len(words)), word)
    before = _text(words, rng)
    there = [word for word in re.findall("[A-Za-z]+", before) if len(word) > 1 and word != new]
    old = wanted if wanted in there else rng.choice(there)
    after = re.sub(rf"\b{old}\b", new, before)
    return GrammarSample("replacing_drill", ((framed(REPLACE, rng, split, before, a=old, b=new), after),))


def renaming_drill(rng: random.Random, split: str) -> GrammarSample:
    """A variable of a short program whose names mean nothing."""
    one, two, three, verb, thing, new = rng.sample(small_words(), 6)
    pattern, names, gap = program((one, two, three), f"{verb}_{thing}", "abc", rng)
    before, after = pattern.format(**names), pattern.format(**{**names, gap: new})
    if rng.random() < 0.7:
        before, after = (f"```python\n{code}\n```" for code in (before, after))
    return GrammarSample("renaming_drill", ((framed(RENAME, rng, split, before, a=names[gap], b=new), after),))


def looking_up_drill(rng: random.Random, split: str) -> GrammarSample:
    """Names and values: some of them as JSON, or one."""
    count = rng.randint(2, 7)
    words = rng.sample(known_words(), 2 * count)
    keys = [word.lower() for word in words[:count]]
    values = [f"{word} {rng.choice(known_words())}" if rng.random() < 0.3 else word for word in words[count:]]
    people = (f"{rng.choice((*GIRLS, *BOYS))} {rng.choice(SURNAMES)}" for _ in values)
    values = [person if rng.random() < 0.4 else value for person, value in zip(people, values, strict=True)]
    values = [str(rng.randint(2, 999)) if rng.random() < 0.15 else value for value in values]
    values = [_code(rng) if rng.random() < 0.1 else value for value in values]
    line = rng.choice(("{k}: {v}", "The {k} is {v}.", "{k} = {v}", "My {k} is {v}.", "{k} - {v}"))
    marks = rng.choice(("\n", " ", ", ")) if line[-1] != "." else rng.choice(("\n", " "))
    text = marks.join(expand(line, rng, {"k": key, "v": value}) for key, value in zip(keys, values, strict=True))
    if rng.random() < 0.35:
        asked = rng.randrange(count)
        return GrammarSample(
            "looking_up_drill",
            ((framed(LOOK_UP, rng, split, text, k=keys[asked]), f"The {keys[asked]} is {values[asked]}."),),
        )
    places = sorted(rng.sample(range(count), rng.randint(2, min(4, count))))
    found = {keys[place]: values[place] for place in places}
    answer = json.dumps({key: int(value) if value.isdigit() else value for key, value in found.items()})
    return GrammarSample("looking_up_drill", ((framed(EXTRACT, rng, split, text, keys=listed(list(found))), answer),))


def case_drill(rng: random.Random, split: str) -> GrammarSample:
    """Words in capital or small letters, most often capital ones: they are other tokens."""
    case = rng.choice(("capital", "capital", "small"))
    words = rng.choice((known_words(), ALL_WORDS))
    if rng.random() < 0.25:
        word = rng.choice(words)
        word = word if rng.random() < 0.7 else word.upper()
        return cased("case_drill", case, f'"{word}"', word, rng, split)
    text = _text(rng.sample(words, rng.randint(1, 10)), rng)
    return cased("case_drill", case, text, text, rng, split)


def mending_drill(rng: random.Random, split: str) -> GrammarSample:
    """Words of the small world without sense together, one to three of them misspelt."""
    words = rng.sample([word for word in ALL_WORDS if word.isalpha() and len(word) > 3], rng.randint(2, 12))
    wrong = [misspelt(word, rng) if place < rng.randint(1, 3) else word for place, word in enumerate(words)]
    places = rng.sample(range(len(words)), len(words))
    before, after = (" ".join(of[place] for place in places) for of in (wrong, words))
    return GrammarSample("mending_drill", ((framed(CORRECT, rng, split, before), after),))


def sorting_drill(rng: random.Random, split: str) -> GrammarSample:
    """Two to seven words by the alphabet, two or more of which stand near each other in it, or any words at all."""
    if rng.random() < 0.15:
        any_words = rng.sample(small_words(), rng.randint(2, 6))
        return GrammarSample(
            "sorting_drill", ((framed(SORT, rng, split, in_a_line(any_words, rng)), ", ".join(sorted(any_words))),)
        )
    words = set[str]()
    for _ in range(rng.randint(1, 2)):
        words |= set(neighbours(rng, rng.choice((2, 2, 3, 4))))
    words |= set(rng.sample(ALL_WORDS, rng.choice((0, 1, 2, 3))))
    listed_words = rng.sample(sorted(words), min(len(words), 7))
    answer = ", ".join(sorted(listed_words))
    return GrammarSample("sorting_drill", ((framed(SORT, rng, split, ", ".join(listed_words)), answer),))


DRILLS = (
    (0.16, copying_drill), (0.24, replacing_drill), (0.11, renaming_drill), (0.12, looking_up_drill), (0.1, case_drill),
    (0.07, mending_drill), (0.2, sorting_drill),
)  # fmt: skip


def drill(rng: random.Random, split: str) -> GrammarSample:
    """One of the drills."""
    return rng.choices([make for _, make in DRILLS], [share for share, _ in DRILLS])[0](rng, split)
