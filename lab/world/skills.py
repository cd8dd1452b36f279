"""Tasks with one right answer: copying, extracting, editing, sorting, counting, answering from a passage.

Knows: how a task is worded and what its answer is, by computing it. Does not know: facts about the world. Items of the
examination are drawn from the same words but never the same texts.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable

from world.grammar import GrammarSample, Wordings, expand
from world.stories import story
from world.words import (
    ALL_WORDS,
    DAYS,
    FOODS,
    FRUITS,
    JOBS,
    MONTHS,
    NUMBERS,
    STREETS,
    SURNAMES,
    THINGS,
    TOWNS,
    person,
    thing,
)  # fmt: skip

# -- copying ----------------------------------------------------------------------------------------------------

COPY = Wordings(
    train=("[Repeat|Copy]: {x}", "[Repeat|Copy] [this|the following] [text|line|sentence]: {x}", "Say [exactly|] this: {x}",
           "[Please|] repeat after me: {x}", "Write this [again|once more]: {x}", "[Please|] copy this text.\n\n{x}",
           "Repeat the following.\n{x}", "Echo: {x}"),
    test=("Give this back to me word for word: {x}", "Type this again: {x}", "Copy what follows: {x}"),
)  # fmt: skip


def _sentence(rng: random.Random) -> str:
    """One sentence of a story, or a made-up one."""
    if rng.random() < 0.5:
        lines = [line for part in story(rng).paragraphs for line in part.split(". ")]
        line = rng.choice(lines).strip()
        return line if line[-1:] in '.!?"' else f"{line}."
    who, other = person(rng), person(rng)
    return expand(rng.choice((
        "{name} has {n} {things} and a {thing}.", "On {day}, {name} will meet {other} in {town}.",
        "The {thing} of {name} is [on the table|in the {room}|under the bed].", "{name} bought {n} {fruit} for {other}.",
        "My code is {code}.", "The {job} lives at {number} {street} in {town}.", "{name}, {other} and I went to {town} in {month}.",
    )), rng, _names(rng) | {"name": who.name, "other": other.name})  # fmt: skip


def _names(rng: random.Random) -> dict[str, str]:
    code = "".join(rng.choice(string.ascii_uppercase + string.digits) for _ in range(rng.randint(4, 8)))
    return {
        "n": NUMBERS[rng.randint(2, 12)], "things": rng.choice(THINGS) + "s", "thing": thing(rng), "day": rng.choice(DAYS),
        "town": rng.choice(TOWNS), "fruit": rng.choice(FRUITS), "code": code, "job": rng.choice(JOBS), "room": "kitchen",
        "number": str(rng.randint(1, 199)), "street": rng.choice(STREETS), "month": rng.choice(MONTHS),
    }  # fmt: skip


def copying(rng: random.Random, split: str) -> GrammarSample:
    """A line, some lines, words or a code to be written again."""
    kind = rng.random()
    if kind < 0.55:
        text = " ".join(_sentence(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    elif kind < 0.75:
        text = " ".join(rng.sample(ALL_WORDS, rng.randint(2, 9)))
    elif kind < 0.9:
        text = "".join(rng.choice(string.ascii_letters + string.digits) for _ in range(rng.randint(4, 14)))
    else:
        text = str(rng.randint(1000, 10**9))
    return GrammarSample("copying", ((expand("{f}", rng, {"f": _framed(COPY, rng, split, text)}), text),))


def _framed(wordings: Wordings, rng: random.Random, split: str, text: str, **more: str) -> str:
    """A wording with its text, which is not looked into for brackets."""
    names = {"x": "\0", **more}
    return expand(rng.choice(wordings.of(split)), rng, names).replace("\0", text)


# -- fields of a message ----------------------------------------------------------------------------------------

EXTRACT = Wordings(
    train=("Extract {keys} as JSON: {x}", "[Read|Take] this message and give me {keys} as JSON.\n\n{x}",
           "{x}\n\nWrite {keys} as JSON.", "Turn this into JSON with {keys}: {x}", "[Find|Get] {keys} in this text. Answer in "
           "JSON.\n\n{x}", "Text: {x}\n\nJSON with {keys}:"),
    test=("Give {keys} of this text as a JSON object.\n\n{x}", "From the text below, produce JSON with {keys}.\n{x}"),
)  # fmt: skip
MESSAGES = (
    ("[Hello|Hi|Dear team], [my name is|this is|I am] {name} from {town}. [I would like to|I want to] [order|buy] {n} {item}. "
     "[Please call|You can call|Call] me at {phone}.", ("name", "town", "n", "item", "phone")),
    ("{name} [lives|has a house] at {address} in {town}. {He} is {age} years old and works as a {job}.",
     ("name", "address", "town", "age", "job")),
    ("[We meet|The meeting is|Let us meet] on {day} at {time} in {town}. {name} will [bring|take] the {item}.",
     ("day", "time", "town", "name", "item")),
    ("Order {code}: {n} {item} for {name}, to be [sent|delivered] to {address} on {day}.",
     ("code", "n", "item", "name", "address", "day")),
    ("[My friend|Our {job}] {name} was born in {month} in {town}. {His} favourite food is {food}, and {he} is {age}.",
     ("name", "month", "town", "food", "age")),
    ("[Lost|Missing]: a {item}. It was last seen on {day} in {town}. [If you find it, please|Please] write to {email}.",
     ("item", "day", "town", "email")),
    ("The [shop|bakery|library] in {town} opens at {time} on {day}. Ask for {name}, phone {phone}.",
     ("town", "time", "day", "name", "phone")),
)  # fmt: skip
LABELS = {"n": "count"}
KEYS_SAID = {"n": "count"}


def extraction(rng: random.Random, split: str) -> GrammarSample:
    """Some fields of a message as a JSON object, in the order asked for."""
    who = person(rng)
    surname = rng.choice(SURNAMES)
    pattern, fields = rng.choice(MESSAGES)
    values: dict[str, object] = {
        "name": f"{who.name} {surname}" if rng.random() < 0.6 else who.name, "town": rng.choice(TOWNS), "n": rng.randint(2, 30),
        "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}", "address": f"{rng.randint(1, 199)} {rng.choice(STREETS)}",
        "age": rng.randint(6, 90), "job": rng.choice(JOBS), "day": rng.choice(DAYS), "month": rng.choice(MONTHS),
        "time": f"{rng.randint(1, 12)}:{rng.choice(('00', '15', '30', '45'))}", "food": rng.choice(FOODS),
        "code": f"{rng.choice(string.ascii_uppercase)}{rng.randint(10, 9999)}",
        "email": f"{who.name.lower()}@{rng.choice(TOWNS).lower()}.org",
    }  # fmt: skip
    values["item"] = rng.choice(THINGS) + "s" if "{n} {item}" in pattern else thing(rng)
    text = expand(pattern, rng, {name: str(value) for name, value in values.items()} | who.pronouns())
    asked = sorted(rng.sample(fields, rng.randint(2, min(4, len(fields)))), key=fields.index)
    keys = [LABELS.get(name, name) for name in asked]
    said = f"{', '.join(keys[:-1])} and {keys[-1]}"
    answer = json.dumps({key: values[name] for key, name in zip(keys, asked, strict=True)})
    return GrammarSample("extraction", ((_framed(EXTRACT, rng, split, text, keys=said), answer),))


# -- answering from a passage -----------------------------------------------------------------------------------

FROM_PASSAGE = Wordings(
    train=("{x}\n\n{q}", "{x}\n\nQuestion: {q}", "Read this [story|text] and answer.\n\n{x}\n\n{q}", "{q}\n\n{x}",
           "Here is a [story|text]:\n\n{x}\n\n{q}", "Text: {x}\n\nQuestion: {q}\nAnswer:"),
    test=("Use the text to answer: {q}\n\n{x}", "{x}\n\nNow tell me: {q}", "Story:\n{x}\n\nMy question: {q}"),
)  # fmt: skip


def from_passage(rng: random.Random, split: str) -> GrammarSample:
    """One to three questions about a story."""
    told = story(rng)
    asked = rng.sample(told.questions, min(len(told.questions), rng.choice((1, 1, 2, 3))))
    question, answer = asked[0]
    first = _framed(FROM_PASSAGE, rng, split, told.text, q=question)
    return GrammarSample("from_passage", ((first, answer), *asked[1:]))


# -- edits ------------------------------------------------------------------------------------------------------

REPLACE = Wordings(
    train=("Replace {a} with {b}: {x}", "[Change|Replace] every {a} [to|by] {b} in this text.\n\n{x}", "In this text, write {b} instead "
           "of {a}: {x}", "{x}\n\nReplace {a} with {b}."),
    test=("Swap {a} for {b} in the following: {x}", "Put {b} where it says {a}.\n\n{x}"),
)  # fmt: skip
CORRECT = Wordings(
    train=("[Correct|Fix] the [spelling|mistakes|typos]: {x}", "[Please|] correct this [sentence|text]: {x}",
           "{x}\n\nCorrect the spelling.", "Find and fix the typos. {x}"),
    test=("Write this without mistakes: {x}", "Repair the spelling here: {x}"),
)  # fmt: skip
CASE = Wordings(
    train=("Write this in {c} letters: {x}", "[Change|Turn] this [to|into] {c} letters: {x}", "{x}\n\nIn {c} letters, please."),
    test=("Put this into {c} letters: {x}",),
)  # fmt: skip
RENAME = Wordings(
    train=("Rename {a} to {b} in this code.\n\n{x}", "Rename the variable {a} to {b}:\n\n{x}", "{x}\n\nRename {a} to {b}.",
           "[Please|] call {a} {b} instead.\n\n{x}"),
    test=("In this code {a} should be named {b}.\n\n{x}", "Use the name {b} for {a} here:\n\n{x}"),
)  # fmt: skip
CODE = (
    "def {f}({a}, {b}):\n    {c} = {a} + {b}\n    return {c}",
    "def {f}({a}):\n    {c} = 0\n    for {b} in {a}:\n        {c} += {b}\n    return {c}",
    "def {f}({a}):\n    if {a} > {num}:\n        return {a} - {num}\n    return {a}",
    "{a} = {num}\n{b} = {a} * 2\nprint({a}, {b})",
    "def {f}({a}):\n    {c} = []\n    for {b} in {a}:\n        if {b} > {num}:\n            {c}.append({b})\n    return {c}",
    "class {F}:\n    def __init__(self, {a}):\n        self.{a} = {a}\n\n    def {f}(self):\n        return self.{a}",
    "{a} = input()\n{b} = len({a})\nif {b} > {num}:\n    print({a})",
    "def {f}({a}, {b}={num}):\n    while {a} > {b}:\n        {a} = {a} // 2\n    return {a}",
)
NAMES = [
    "count",
    "total",
    "value",
    "items",
    "result",
    "index",
    "name",
    "text",
    "number",
    "size",
    "price",
    "width",
    "height",
    "length",
    "word",
    "line",
    "data",
    "key",
    "user",
    "score",
    "limit",
    "first",
    "last",
    "left",
    "right",
    "sum",
    "mean",
    "rows",
    "cells",
    "path",
    "values",
    "points",
    "start",
    "end",
    "step",
    "depth",
    "level",
    "parts",
    "money",
    "age",
]
VERBS = [
    "add",
    "find",
    "count",
    "make",
    "get",
    "load",
    "save",
    "check",
    "update",
    "read",
    "write",
    "show",
    "sort",
    "filter",
    "merge",
    "compute",
    "double",
    "clean",
    "print",
]


def replacing(rng: random.Random, split: str) -> GrammarSample:
    """A name or a thing of a text replaced by another."""
    told = story(rng)
    part = rng.choice([part for part in told.paragraphs if len(part) > 60] or told.paragraphs)
    words = {word.strip('.,!?";:') for word in part.split()}
    known = sorted(
        word for word in words if word.isalpha() and (word[0].isupper() or word in ALL_WORDS) and len(word) > 2
    )
    names = [
        word for word in known if part.count(word) == sum(1 for w in part.split() if w.strip(".,!?\";:'s") == word)
    ]
    old = rng.choice(names or [part.split()[0]])
    new = person(rng).name if old[0].isupper() else rng.choice(ALL_WORDS)
    return GrammarSample("edits", ((_framed(REPLACE, rng, split, part, a=old, b=new), part.replace(old, new)),))


def correcting(rng: random.Random, split: str) -> GrammarSample:
    """A sentence with one or two letters doubled, dropped or swapped."""
    line = _sentence(rng)
    words = line.split(" ")
    places = [i for i, word in enumerate(words) if word.isalpha() and word.islower() and len(word) > 3]
    for place in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        words[place] = _misspelt(words[place], rng)
    return GrammarSample("edits", ((_framed(CORRECT, rng, split, " ".join(words)), line),))


def _misspelt(word: str, rng: random.Random) -> str:
    i = rng.randrange(1, len(word) - 1)
    return rng.choice(
        (word[:i] + word[i] + word[i:], word[:i] + word[i + 1 :], word[:i] + word[i + 1] + word[i] + word[i + 2 :])
    )


def changing_case(rng: random.Random, split: str) -> GrammarSample:
    """A line in capital or small letters."""
    line = _sentence(rng)
    case = rng.choice(("capital", "small"))
    return GrammarSample(
        "edits", ((_framed(CASE, rng, split, line, c=case), line.upper() if case == "capital" else line.lower()),)
    )


def renaming(rng: random.Random, split: str) -> GrammarSample:
    """A variable or a function of a short program renamed."""
    one, two, three, new, verb_object = rng.sample(NAMES, 5)
    function = f"{rng.choice(VERBS)}_{verb_object}"
    names = {
        "a": one,
        "b": two,
        "c": three,
        "f": function,
        "F": function.title().replace("_", ""),
        "num": str(rng.randint(1, 99)),
    }
    pattern = rng.choice(CODE)
    gap = rng.choice([name for name in ("a", "b", "f") if f"{{{name}}}" in pattern])
    new = f"{rng.choice(VERBS)}_{new}" if gap == "f" else new
    before, after = pattern.format(**names), pattern.format(**{**names, gap: new})
    fence = "```python\n{}\n```"
    return GrammarSample(
        "edits", ((_framed(RENAME, rng, split, fence.format(before), a=names[gap], b=new), fence.format(after)),)
    )


def editing(rng: random.Random, split: str) -> GrammarSample:
    """One of the edits."""
    return rng.choice((replacing, replacing, correcting, changing_case, renaming, renaming))(rng, split)


# -- lists ------------------------------------------------------------------------------------------------------

SORT = Wordings(
    train=("Sort [these words|the words|this list] [alphabetically|by the alphabet|from A to Z]: {x}", "[Put|Bring] these words in "
           "alphabetical order: {x}", "{x}\n\nSort these words.", "[Please|] sort: {x}"),
    test=("Order these words from A to Z: {x}", "Arrange alphabetically: {x}"),
)  # fmt: skip
SORT_NUMBERS = Wordings(
    train=("Sort these numbers: {x}", "Sort [from small to large|from the smallest to the largest]: {x}",
           "Put these numbers in order: {x}"),
    test=("Order these numbers: {x}",),
)  # fmt: skip
COUNT = Wordings(
    train=("How many words are in this list: {x}?", "Count the words: {x}", "How many words are here? {x}", "Count: {x}"),
    test=("Tell me the number of words: {x}", "How long is this list: {x}?"),
)  # fmt: skip
PICK = Wordings(
    train=("What is the {o} word of this list: {x}?", "Give me the {o} word: {x}", "Which word is {o}? {x}", "{x}\n\nThe {o} word?"),
    test=("Name the {o} word here: {x}", "In this list, which one is {o}? {x}"),
)  # fmt: skip
REVERSE = Wordings(
    train=("Reverse this list: {x}", "Write this list backwards: {x}", "[Turn|Put] the words in reverse order: {x}"),
    test=("Give the list from last to first: {x}",),
)  # fmt: skip
SUMMARIZE = Wordings(
    train=("Summarize this [story|text].\n\n{x}", "{x}\n\nSummarize this in [two|a few] sentences.", "What is this story about?\n\n{x}",
           "Give a short summary.\n\n{x}", "Summary, please: {x}"),
    test=("Shorten this story.\n\n{x}", "Tell me the main points of this:\n\n{x}"),
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth", "fifth")


def sorting(rng: random.Random, split: str) -> GrammarSample:
    """Two to seven words by the alphabet, most often five; or numbers by size."""
    count = rng.choice((2, 3, 4, 5, 5, 5, 5, 6, 7))
    if rng.random() < 0.15:
        numbers = rng.sample(range(1, 100), count)
        return GrammarSample("sorting_numbers", ((_framed(SORT_NUMBERS, rng, split, ", ".join(map(str, numbers))),
                                           ", ".join(map(str, sorted(numbers)))),))  # fmt: skip
    words = rng.sample(ALL_WORDS, count)
    return GrammarSample("sorting", ((_framed(SORT, rng, split, ", ".join(words)), ", ".join(sorted(words))),))


def counting(rng: random.Random, split: str) -> GrammarSample:
    """How many words a list has."""
    words = rng.sample(ALL_WORDS, rng.randint(1, 10))
    answer = f"{NUMBERS[len(words)].capitalize()} word{'s' * (len(words) > 1)}."
    return GrammarSample("counting", ((_framed(COUNT, rng, split, ", ".join(words)), answer),))


def picking(rng: random.Random, split: str) -> GrammarSample:
    """One word of a list by its place."""
    words = rng.sample(ALL_WORDS, rng.randint(3, 7))
    place = rng.randrange(min(5, len(words)))
    ordinal, answer = (ORDINALS[place], words[place]) if rng.random() < 0.8 else ("last", words[-1])
    return GrammarSample("picking", ((_framed(PICK, rng, split, ", ".join(words), o=ordinal), answer),))


def reversing(rng: random.Random, split: str) -> GrammarSample:
    """A list backwards."""
    words = rng.sample(ALL_WORDS, rng.randint(2, 6))
    return GrammarSample("reversing", ((_framed(REVERSE, rng, split, ", ".join(words)), ", ".join(reversed(words))),))


def summarizing(rng: random.Random, split: str) -> GrammarSample:
    """The story in the sentences that answer its questions, at most three."""
    told = story(rng)
    return GrammarSample(
        "summarizing",
        ((_framed(SUMMARIZE, rng, split, told.text), " ".join(answer for _, answer in told.questions[:3])),),
    )


SKILLS: tuple[tuple[float, Callable[[random.Random, str], GrammarSample]], ...] = (
    (0.18, copying), (0.17, extraction), (0.14, from_passage), (0.24, editing), (0.17, sorting), (0.02, counting),
    (0.03, picking), (0.03, reversing), (0.02, summarizing),
)  # fmt: skip


def skill(rng: random.Random, split: str) -> GrammarSample:
    """A task of one of the kinds."""
    return rng.choices([make for _, make in SKILLS], [share for share, _ in SKILLS])[0](rng, split)
