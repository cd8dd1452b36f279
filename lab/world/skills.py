"""Tasks with one right answer: copying, extracting, editing, sorting, counting, answering from a passage.

Knows: how a task is worded and what its answer is, by computing it. Does not know: facts about the world. Items of the
examination are drawn from the same words but never the same texts.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable

from world.grammar import GrammarSample, Wordings, a, expand, listed
from world.stories import story
from world.words import (
    ALL_WORDS,
    COLOURS,
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
    Person,
    neighbours,
    person,
    plural,
    thing,
)  # fmt: skip

# -- copying ----------------------------------------------------------------------------------------------------

COPY = Wordings(
    train=(
        "[Repeat|Copy]: {x}",
        "[Repeat|Copy] [this|the following] [text|line|sentence|]: {x}",
        "Say [exactly|just|only|] this: {x}",
        "[Please|] repeat after me: {x}",
        "Write this [again|once more|one more time|down]: {x}",
        "[Please|] copy this [text|].\n\n{x}",
        "Repeat [the following|what I write|what comes next].\n{x}",
        "Echo: {x}",
        "{x}\n\n[Repeat|Copy] [this|that|it].",
        "{x}\n\n[Say|Write] that [again|once more].",
        "[Give|Send|Hand] me this [text|line|] [again|once more|unchanged]: {x}",
        "[Can|Could] you [repeat|copy|write] this [for me|]? {x}",
        "[Type|Print] [the following|this line|this text]: {x}",
        "[Please|] [print|type] exactly what I [write|say]: {x}",
        "I want you to [repeat|copy] this: {x}",
        "[Copy|Repeat] [all|everything] [that follows|after the colon]: {x}",
        "Answer with these words and nothing else: {x}",
        "Word for word, please: {x}",
        "[Write|Give] back [the text|the line] below.\n\n{x}",
        "Make a copy of this: {x}",
        "Do not change anything, only [repeat|copy] it: {x}",
        "[Text|Line]: {x}\n\n[Copy|Repeat] the [text|line].",
        "[Repeat|Copy|Write] it letter by letter: {x}",
        "Say it back to me: {x}",
    ),
    test=("Give this back to me word for word: {x}", "Type this again: {x}", "Copy what follows: {x}"),
    asks=(
        "[repeat|copy|echo|quote|reproduce] [this|the text|this text|the following|it|the line|these words]",
        "[say|write|print|tell me|show me] [this|the text|this text|the following|it|the line|these words] [again|once more|a second time|one more time]",
        "[say|write|print|repeat|copy|type] [this|the text|this text|the following|it|the line|these words] [word for word|unchanged|without changes|as it is|exactly|exactly as it is]",
        "[return|output|send back|hand back|give me] [this|the text|this text|the following|it|the line|these words] [unchanged|as it is|exactly|without changes|word by word]",
        "[make|write|give me] [a copy|an exact copy|one more copy] of [this|the text|the line|it]",
    ),
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


def drawn(alphabet: str, least: int, most: int, rng: random.Random) -> str:
    """`least` to `most` characters of the alphabet."""
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(least, most)))


def _names(rng: random.Random) -> dict[str, str]:
    code = drawn(string.ascii_uppercase + string.digits, 4, 8, rng)
    return {
        "n": NUMBERS[rng.randint(2, 12)], "things": plural(rng.choice(THINGS)), "thing": thing(rng), "day": rng.choice(DAYS),
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
        text = drawn(string.ascii_letters + string.digits, 4, 14, rng)
    else:
        text = str(rng.randint(1000, 10**9))
    return GrammarSample("copying", ((expand("{f}", rng, {"f": framed(COPY, rng, split, text)}), text),))


def framed(wordings: Wordings, rng: random.Random, split: str, text: str, **more: str) -> str:
    """A wording with its text, which is not looked into for brackets."""
    names = {"x": "\0", **more}
    said = re.sub(r" +(?=[:.,!?\n])", "", expand(rng.choice(wordings.of(split)), rng, names))
    if "\n" in text:  # a text of several lines begins on a line of its own
        said = re.sub("(?<=\\S) \0", "\n\n\0", said)
    return said.replace("\0", text)


# -- fields of a message ----------------------------------------------------------------------------------------

EXTRACT = Wordings(
    train=(
        "Extract {keys} as JSON: {x}",
        "[Read|Take] this message and give me {keys} as JSON.\n\n{x}",
        "{x}\n\nWrite {keys} as JSON.",
        "Turn this into JSON with {keys}: {x}",
        "[Find|Get] {keys} in this text. Answer in JSON.\n\n{x}",
        "Text: {x}\n\nJSON with {keys}:",
        "{x}\n\n[Extract|Find|Give me] {keys} [as JSON|in JSON|as a JSON object].",
        "[I need|Show me|Write] {keys} as [JSON|a JSON object]: {x}",
        "[Make|Write] [JSON|a JSON object] [with|of] {keys} [from|out of] this [text|message]: {x}",
        "[What are|Tell me] {keys} [in|of] this [message|text]? Use JSON.\n\n{x}",
        "Message:\n{x}\n\n[Return|Give] {keys} as JSON.",
        "[Return|Produce|Output] [a JSON object|JSON] with [the fields|the keys|] {keys} for this [text|message].\n{x}",
        "[Please|] fill in {keys} as JSON: {x}",
        "Read the [text|message|lines] below and write JSON with {keys}.\n\n{x}",
        "[From|In] this [message|text] I need {keys}, as JSON: {x}",
        "[Write|Note|List] {keys} of the [message|text|lines] below in JSON.\n\n{x}",
        "JSON please, with {keys}: {x}",
        "{x}\n\nFill this in: {keys}. Use JSON.",
        "[Look for|Search for|Find|Get] {keys}. [Reply|Answer] [in|with] JSON.\n\n{x}",
        "[Can you|Could you|Please] [write|give me|list|find] {keys} as [JSON|a JSON object]?\n\n{x}",
        "[An object|A JSON object] with {keys}, please: {x}",
        "{x}\n\n[Which|What] {keys} [are|is] [said|named] [here|there]? [Answer|Write] in JSON.",
    ),
    test=("Give {keys} of this text as a JSON object.\n\n{x}", "From the text below, produce JSON with {keys}.\n{x}"),
    asks=(
        "[extract|find|get|take|pick|read|collect|look up] {keys} [as JSON|in JSON|as a JSON object|in JSON format]",
        "[write|show me|give me|give|name|state|list|note|return|tell me] {keys} [as JSON|in JSON|as a JSON object]",
        "[write|make|build|create|return|give me|fill] [JSON|a JSON object|an object in JSON] with {keys}",
        "[extract|find|get|take|pull] {keys} [from|out of] [this|the text|the message|it] [as JSON|in JSON|as a JSON object]",
        "[write|make|build|create] [JSON|a JSON object] with {keys} [from|out of] [this|it|the message|the lines]",
    ),
)  # fmt: skip
MESSAGES = (
    ("{name} is {age} years old.", ("name", "age")), ("{name} lives in {town}.", ("name", "town")),
    ("{name}, {age}, {town}", ("name", "age", "town")), ("{name} from {town} likes {food}.", ("name", "town", "food")),
    ("Call {name} at {phone}[ on {day}|].", ("name", "phone")), ("{name}'s favourite food is {food}.", ("name", "food")),
    ("{n} {item}, please, for {name}.", ("n", "item", "name")), ("I am {name}, a {job} from {town}.", ("name", "job", "town")),
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
    ("{name} paid for {n} {item} on {day}. [The number of the bill is|Bill] {code}. [Write to|The address is] {email}.",
     ("name", "n", "item", "day", "code", "email")),
    ("[Dear {name}|Hi {name}], your {item} [is ready|has arrived]. [Come|Please come] to {address} in {town} [before|after] {time}.",
     ("name", "item", "address", "town", "time")),
    ("[The new|Our new] {job} is {name}, {age} years old, from {town}. {He} [starts|begins] on {day}. [Phone|Call]: {phone}.",
     ("job", "name", "age", "town", "day", "phone")),
    ("[In|Every] {month} we [eat|cook] {food} at {address}. [Ask|Tell] {name}, who is {age}, if you want to come. [Email|Mail]: {email}.",
     ("month", "food", "address", "name", "age", "email")),
)  # fmt: skip
LABELS = {"n": "count"}
KEYS_SAID = {"n": "count"}


def extraction(rng: random.Random, split: str) -> GrammarSample:
    """Some fields of a message as a JSON object, in the order asked for."""
    who = person(rng)
    surname = rng.choice(SURNAMES)
    if split == "train" and rng.random() < 0.25:  # beginning like the first name, after which it may be left out
        surname = rng.choice([each for each in SURNAMES if each[0] == who.name[0]] or SURNAMES)
    pattern, fields = rng.choice(MESSAGES)
    values: dict[str, object] = {
        "name": f"{who.name} {surname}" if rng.random() < 0.6 else who.name, "town": rng.choice(TOWNS), "n": rng.randint(2, 30),
        "phone": f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}", "address": f"{rng.randint(1, 199)} {rng.choice(STREETS)}",
        "age": rng.randint(6, 90), "job": rng.choice(JOBS), "day": rng.choice(DAYS), "month": rng.choice(MONTHS),
        "time": f"{rng.randint(1, 12)}:{rng.choice(('00', '15', '30', '45'))}", "food": rng.choice(FOODS),
        "code": f"{rng.choice(string.ascii_uppercase)}{rng.randint(10, 9999)}",
        "email": f"{who.name.lower()}@{rng.choice(TOWNS).lower()}.org",
    }  # fmt: skip
    if split == "train" and rng.random() < 0.3:  # names that nobody has
        values["name"] = " ".join(
            drawn(string.ascii_lowercase, 3, 8, rng).capitalize() for _ in range(rng.choice((1, 2)))
        )
    values["item"] = plural(rng.choice(THINGS)) if "{n} {item}" in pattern else thing(rng)
    text = expand(pattern, rng, {name: str(value) for name, value in values.items()} | who.pronouns())
    most = len(fields) if split == "train" else min(4, len(fields))  # the exam never asked for more
    asked = sorted(rng.sample(fields, rng.randint(2, most)), key=fields.index)
    keys = [LABELS.get(name, name) for name in asked]
    answer = json.dumps({key: values[name] for key, name in zip(keys, asked, strict=True)})
    said = listed(keys)
    if split == "train" and rng.random() < 0.3:
        said = rng.choice((f"the {said}", listed([f"the {key}" for key in keys]), ", ".join(keys)))
    return GrammarSample("extraction", ((framed(EXTRACT, rng, split, text, keys=said), answer),))


# -- answering from a passage -----------------------------------------------------------------------------------

FROM_PASSAGE = Wordings(
    train=(
        "{x}\n\n{q}",
        "{x}\n\nQuestion: {q}",
        "Read this [story|text] and answer.\n\n{x}\n\n{q}",
        "{q}\n\n{x}",
        "Here is a [story|text]:\n\n{x}\n\n{q}",
        "Text: {x}\n\nQuestion: {q}\nAnswer:",
        "[Answer|Please answer] from the [text|story]: {q}\n\n{x}",
        "[Question|My question]: {q}\n\n[Text|Story]: {x}",
        "{x}\n\n[Can you tell me|Please tell me|Tell me]: {q}",
        "[With|By] this [text|story], [answer|tell me]: {q}\n\n{x}",
        "[Look at|Read] the [text|story] [below|]. {q}\n\n{x}",
        "[Text|Passage]:\n{x}\n\n[Answer this|I ask you]: {q}",
        "{x}\n\nI have a question. {q}",
        "{x}\n\n[What do you think|After reading this]: {q}",
        "[Story|Passage]: {x}\n\n{q}",
    ),
    test=("Use the text to answer: {q}\n\n{x}", "{x}\n\nNow tell me: {q}", "Story:\n{x}\n\nMy question: {q}"),
)  # fmt: skip


SIMPLE_FACTS = (  # what is said of somebody, the question, the answer
    ("{name} lives in {v}.", "Where does {name} live?", TOWNS), ("{name} comes from {v}.", "Where does {name} come from?", TOWNS),
    ("{name} has a {v}.", "What does {name} have?", THINGS), ("{name} likes {v}.", "What does {name} like?", FOODS),
    ("{name} is a {v}.", "What is {name}?", JOBS), ("{name} bought {v}.", "What did {name} buy?", FRUITS),
    ("{name} came on {v}.", "When did {name} come?", DAYS), ("{name} was born in {v}.", "When was {name} born?", MONTHS),
    ("{name} is {v} years old.", "How old is {name}?", tuple(map(str, range(5, 95)))),
)  # fmt: skip


def from_few_facts(rng: random.Random, split: str) -> GrammarSample:
    """A question about one of two to five short sentences, most often the same thing of several people."""
    people: list[Person] = []
    while len(people) < 3:
        people.append(person(rng, *people))
    kinds = rng.sample(SIMPLE_FACTS, rng.choice((1, 1, 2)))
    told: list[tuple[str, str]] = []
    for said, question, values in kinds:
        for one, value in zip(people, rng.sample(values, len(people)), strict=True):
            value = f"{rng.choice(COLOURS)} {value}" if values is THINGS and rng.random() < 0.5 else value
            line = said.replace("a {v}", a(value)).format(name=one.name, v=value)
            told.append((line, question.format(name=one.name)))
    told = rng.sample(told, rng.randint(2, min(5, len(told))))
    answer, asked = rng.choice(told)
    text = " ".join(line for line, _ in told)
    return GrammarSample("from_passage", ((framed(FROM_PASSAGE, rng, split, text, q=asked), answer),))


def from_passage(rng: random.Random, split: str) -> GrammarSample:
    """One to three questions about a story, or one about a few facts."""
    if split == "train" and rng.random() < 0.4:
        return from_few_facts(rng, split)
    told = story(rng)
    asked = rng.sample(told.questions, min(len(told.questions), rng.choice((1, 1, 2, 3))))
    question, answer = asked[0]
    first = framed(FROM_PASSAGE, rng, split, told.text, q=question)
    return GrammarSample("from_passage", ((first, answer), *asked[1:]))


# -- edits ------------------------------------------------------------------------------------------------------

REPLACE = Wordings(
    train=(
        "Replace {a} [with|by] {b}: {x}",
        "[Change|Replace] [every|each|all] {a} [to|by|with] {b} in this text.\n\n{x}",
        "In this text, write {b} instead of {a}: {x}",
        "{x}\n\nReplace {a} [with|by] {b}.",
        "{x}\n\n[Change|Turn] {a} [to|into] {b}.",
        "[Swap|Exchange|Substitute] {a} [with|by] {b}: {x}",
        "{x}\n\n[Swap|Exchange] {a} for {b}.",
        "[Put|Use|Write] {b} [instead of|in place of] {a}.\n\n{x}",
        "[Wherever|Where] [you see|there is|you find] {a}, [write|put] {b}: {x}",
        "[Swap|Exchange] the word {a} and [put|write] {b} [instead|there].\n\n{x}",
        "{x}\n\n[Write|Put] {b} [where|wherever] {a} [stands|is written].",
        "[Rewrite|Write] this text with {b} [for|instead of] {a}: {x}",
        "[Please|] [make|turn] {a} into {b} [here|in this text]: {x}",
        "[Edit|Change] the text: {a} [becomes|should be|is now] {b}.\n\n{x}",
        "{a} should [be|become] {b} [in this|in the following] [text|story]: {x}",
        "The word {a} is wrong, it should be {b}. [Correct|Change] it.\n\n{x}",
        "[Text|Story]: {x}\n\n[Task:|] [Swap|Replace|Change] {a} [and write|with] {b}.",
        "[Take out|Remove] {a} and [put|write] {b} in its place: {x}",
        "[Can|Could] you [change|replace|swap] {a} [to|with] {b}? {x}",
        "[Now|] tell it with {b} instead of {a}.\n\n{x}",
        "In the following, {a} [must|should] be {b}.\n{x}",
        "{x}\n\n[Please|Now] use {b} instead of {a}.",
        "[Put|Write] {b} [wherever|everywhere] {a} is [written|found].\n\n{x}",
    ),
    test=("Swap {a} for {b} in the following: {x}", "Put {b} where it says {a}.\n\n{x}"),
    asks=(
        "[replace|substitute] {a} [by|with] {b} [in this|in the text|in this text|in the following|below|here|everywhere|in it|]",
        "[change|turn|convert] [the word|every|each|] {a} [to|into] {b} [in this|in the text|in this text|in the following|below|here|everywhere|in it|]",
        "[put|write|use|insert|say|take|set] {b} [instead of|in place of|rather than|in the place of] {a} [in this|in the text|in this text|in the following|below|here|everywhere|in it|]",
        "[write|use|insert|say|set|have] {b} [where|wherever|in each place where] [it says|the text says|it reads|there is|there stands|you read|you see|you find] {a}",
        "[put|write|set] {b} [where|wherever] [there is|you read|you see|you find|the text has|I wrote] {a}",
        "[exchange|swap] [the word|the name|every|each|] {a} [for|with] {b}",
        "[remove|delete|take out|strike out] {a} and [write|put|use] {b} [instead|there|in its place]",
        "let {a} [be|become] {b} [in this|here|]",
        "give me [this|the text|it] with {b} [instead of|in place of|for|where it says] {a}",
    ),
)  # fmt: skip
CORRECT = Wordings(
    train=(
        "[Correct|Fix] the [spelling|mistakes|typos|errors] [here|]: {x}",
        "[Please|] correct this [sentence|text|line|]: {x}",
        "{x}\n\nCorrect the [spelling|mistakes].",
        "Find and [fix|correct] the [typos|mistakes|errors]. {x}",
        "{x}\n\n[Fix|Repair] [it|this|the typos|the mistakes].",
        "[Write|Spell] [this|it] [correctly|right|the right way]: {x}",
        "[Repair|Mend|Improve] [this|the] [sentence|text|line]: {x}",
        "[Give|Show|Tell] me the [correct|right] [spelling|sentence] [of this|]: {x}",
        "[There is a typo|There are typos|There are mistakes|Something is spelt wrong] here. [Fix|Correct] it.\n\n{x}",
        "[Can|Could] you [correct|fix|repair] this [sentence|]? {x}",
        "[Check|Mind] the spelling: {x}",
        "[Write|Say] it again without [errors|typos]: {x}",
        "[Sentence|Text]: {x}\n\n[Correct|Fixed|Without typos]:",
        "Some letters are wrong. [Write|Put] it right: {x}",
        "[Please|] [remove|take out] the [mistakes|typos]: {x}",
        "[This|It] is misspelt: {x}",
    ),
    test=("Write this without mistakes: {x}", "Repair the spelling here: {x}"),
    asks=(
        "[correct|fix|check|mend|improve|clean up] the [spelling|typos|mistakes|errors|spelling mistakes|misspelt words] [here|in this|in it|in the text|]",
        "[correct|fix|repair|mend|improve|clean up|put right] [the sentence|the text|this|it|this sentence|the line|what I wrote|these words]",
        "[write|spell|say|type|print] [the sentence|the text|this|it|this sentence|the line|what I wrote|these words] [correctly|right|as it should be|with the right spelling|in correct English|properly]",
        "[write|copy|repeat|give me|show me] [the sentence|the text|this|it|this sentence|the line|what I wrote|these words] without [typos|errors|spelling errors|spelling mistakes|misspelt words|wrong letters]",
        "[remove|take out|find and fix|mend] [the|all] [typos|errors|mistakes|wrong letters]",
        "give me [the sentence|the text|this|it|this sentence|the line|what I wrote|these words] [corrected|in the right spelling|without the typos|spelt right]",
    ),
)  # fmt: skip
CASE = Wordings(
    train=(
        "Write this in {c} letters: {x}",
        "[Change|Turn|Make] this [to|into] {c} letters: {x}",
        "{x}\n\nIn {c} letters, please.",
        "[Use|Only] {c} letters: {x}",
        "[Put|Write] [it|the text|the line] in {c} letters.\n\n{x}",
        "{x}\n\n[Write|Put|Turn] [that|it] [in|into] {c} letters.",
        "[Say|Type|Repeat|Copy] this in {c} letters: {x}",
        "[Can|Could] you write this in {c} letters? {x}",
        "All [in|] {c} letters: {x}",
        "[Rewrite|Convert] [this|the text] [with|to|using] {c} letters: {x}",
        "[Put|Change] [everything|all letters] [into|to] {c} letters: {x}",
        "[I want|I need] this in {c} letters: {x}",
    ),
    test=("Put this into {c} letters: {x}",),
    asks=(
        "[write|print|type|say|spell|repeat|copy|show me|give me] [the sentence|the text|this|it|this sentence|the line|what I wrote|these words] in {c} letters",
        "[change|turn|convert] [the sentence|the text|this|it|this sentence|the line|what I wrote|these words] [to|into] {c} letters",
        "[put|set|bring] [it|the text|the sentence|everything|all of it] [in|into|to] {c} letters",
        "use [only|nothing but|just|] {c} letters [for this|here|]",
    ),
)  # fmt: skip
RENAME = Wordings(
    train=(
        "Rename {a} to {b} in this code.\n\n{x}",
        "Rename the variable {a} to {b}:\n\n{x}",
        "{x}\n\nRename {a} to {b}.",
        "[Please|] call {a} {b} instead.\n\n{x}",
        "[Change|Rename] the name {a} to {b}.\n\n{x}",
        "{x}\n\n[Call|Name] {a} {b} [instead|].",
        "[Use|Write|Take] {b} [instead of|in place of] {a} [in this code|in the program|]:\n\n{x}",
        "{x}\n\n[Use|Write] [the name|] {b} instead of {a}.",
        "[Replace|Change] [the name|] {a} [with|by|to] {b} [in the code|here|]:\n\n{x}",
        "In this [program|function|script], [rename|change] {a} to {b}.\n\n{x}",
        "{a} should be [called|renamed to] {b} [here|in this code].\n\n{x}",
        "[Code|Program]:\n\n{x}\n\n{a} [becomes|should be] {b}.",
        "[Can|Could] you rename {a} to {b}?\n\n{x}",
        "[Give|Show] me this code with {b} instead of {a}.\n\n{x}",
        "The name {a} is [bad|not clear]. [Use|Call it|Take] {b}.\n\n{x}",
        "[Refactor|Edit] this: {a} is now [called|named] {b}.\n\n{x}",
        "[Here|In this code], {a} [gets the name|is to be named|is renamed to] {b}.\n\n{x}",
        "{x}\n\nThe new name of {a} is {b}.",
        "[Take|Choose|Use] {b} as the name [of|for] {a}[ in this code|]:\n\n{x}",
        "[Let|Make] {b} the name of {a}.\n\n{x}",
        "In this [program|function|script] {a} should be [called|named|renamed to] {b}.\n\n{x}",
        "In [this|the] code {a} [must|should] be [called|renamed to|written as] {b}.\n\n{x}",
        "[Have|Use|Put] {b} for {a} [here|in this code|in the program][.|:]\n\n{x}",
    ),
    test=("In this code {a} should be named {b}.\n\n{x}", "Use the name {b} for {a} here:\n\n{x}"),
    asks=(
        "rename [the name|the variable|the function|] {a} [to|into|as] {b}",
        "[change|turn] [the name|the variable|] {a} [to|into] {b} [in this code|here|in the program|]",
        "replace [the name|the variable|] {a} [with|by] {b} [in this code|here|in the program|]",
        "[call|name] {a} {b} [instead|now|from now on|here|]",
        "[use|write|take|put] [the name|] {b} [instead of|in place of|rather than] {a} [here|in the code|]",
        "[take|choose|write|put] [the name|] {b} for {a} [here|in this|]",
        "[use|write|put] {b} [where|wherever] [it says|there is|the code says|you see] {a}",
        "[use|take] {b} as the [new|] name [for|of] {a} [here|in this code|]",
        "give {a} the [new|better|] name {b}",
        "let {a} be [called|named|renamed to] {b} [here|in this code|]",
    ),
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
    return GrammarSample("edits", ((framed(REPLACE, rng, split, part, a=old, b=new), part.replace(old, new)),))


def correcting(rng: random.Random, split: str) -> GrammarSample:
    """A sentence with one to four letters doubled, dropped or swapped."""
    line = _sentence(rng)
    words = line.split(" ")
    places = [i for i, word in enumerate(words) if word.isalpha() and word.islower() and len(word) > 3]
    for place in rng.sample(places, min(len(places), rng.choice((1, 2, 3, 4) if split == "train" else (1, 1, 2)))):
        words[place] = misspelt(words[place], rng)
    return GrammarSample("edits", ((framed(CORRECT, rng, split, " ".join(words)), line),))


def misspelt(word: str, rng: random.Random) -> str:
    """The word with a letter doubled, dropped or swapped with the next, and no other word of the small world."""
    while True:
        i = rng.randrange(1, len(word) - 1)
        wrong = rng.choice(
            (word[:i] + word[i] + word[i:], word[:i] + word[i + 1 :], word[:i] + word[i + 1] + word[i] + word[i + 2 :])
        )
        if wrong != word and wrong not in ALL_WORDS:
            return wrong


def changing_case(rng: random.Random, split: str) -> GrammarSample:
    """A line in capital or small letters."""
    line = _sentence(rng)
    case = rng.choice(("capital", "small"))
    return cased("edits", case, line, line, rng, split)


def cased(kind: str, case: str, shown: str, text: str, rng: random.Random, split: str) -> GrammarSample:
    """The text in "capital" or "small" letters, which are sometimes asked for by another name; `shown` is asked about."""
    asked = framed(CASE, rng, split, shown, c=case)
    if split == "train" and rng.random() < 0.4:
        upper = rng.choice(("upper case", "uppercase", "upper case letters", "capitals"))
        asked = asked.replace("capital letters", upper)
        asked = asked.replace("small letters", rng.choice(("lower case", "lowercase", "lower case letters")))
    return GrammarSample(kind, ((asked, text.upper() if case == "capital" else text.lower()),))


def program(
    variables: tuple[str, str, str], function: str, renamed: str, rng: random.Random
) -> tuple[str, dict[str, str], str]:
    """A pattern of `CODE`, the names in it, and the one of `renamed` ("abf": two variables, the function) to change."""
    names = dict(zip("abc", variables, strict=True))
    names |= {"f": function, "F": function.title().replace("_", ""), "num": str(rng.randint(1, 99))}
    pattern = rng.choice(CODE)
    return pattern, names, rng.choice([name for name in renamed if f"{{{name}}}" in pattern])


def renaming(rng: random.Random, split: str) -> GrammarSample:
    """A variable or a function of a short program renamed."""
    one, two, three, new, verb_object = rng.sample(NAMES, 5)
    function = f"{rng.choice(VERBS)}_{verb_object}"
    pattern, names, gap = program((one, two, three), function, "abf", rng)
    new = f"{rng.choice(VERBS)}_{new}" if gap == "f" else new
    before, after = pattern.format(**names), pattern.format(**{**names, gap: new})
    fence = "```python\n{}\n```"
    return GrammarSample(
        "edits", ((framed(RENAME, rng, split, fence.format(before), a=names[gap], b=new), fence.format(after)),)
    )


def editing(rng: random.Random, split: str) -> GrammarSample:
    """One of the edits."""
    return rng.choice((replacing, replacing, correcting, changing_case, renaming, renaming))(rng, split)


# -- lists ------------------------------------------------------------------------------------------------------

SORT = Wordings(
    train=(
        "Sort [these words|the words|this list|] [alphabetically|by the alphabet|from A to Z|]: {x}",
        "[Put|Bring] these words in alphabetical order: {x}",
        "{x}\n\nSort [these words|the list|them|this].",
        "[Please|] sort: {x}",
        "[Put|Bring|Write|List] [the words|the list|this list|them] [from A to Z|in the order of the alphabet]: {x}",
        "[Order|Arrange] [the words|this list|the list|these words] [by the alphabet|by their first letters|in alphabetical order]: {x}",
        "{x}\n\n[Put|Bring] them in alphabetical order.",
        "{x}\n\n[Order|Arrange] them [from A to Z|by the alphabet].",
        "[Can|Could] you sort [these words|this list|this]? {x}",
        "[Words|List]: {x}\n\n[Sorted|In alphabetical order|From A to Z]:",
        "[In alphabetical order|From A to Z|Alphabetically], please: {x}",
        "[Which order|What order] do these words have in a dictionary? {x}",
        "[Sort|Order] as in a dictionary: {x}",
        "Make an alphabetical list of {x}.",
    ),
    test=("Order these words from A to Z: {x}", "Arrange alphabetically: {x}"),
    asks=(
        "[sort|order|arrange|line up] [them|the words|the list|this list|these|the following] [alphabetically|by the alphabet|in alphabetical order|by first letter|]",
        "[put|bring|write|list|place|set] [them|the words|the list|this list|these words|these] in [alphabetical order|the order of the alphabet|the right order|dictionary order|order]",
        "[sort|write|list|put|arrange|bring] [them|the words|this list|these|the list] from A to Z",
        "[sort|order|list] [alphabetically|by the alphabet]",
        "[order|arrange|sort] [the words|these words|the list] [as in a dictionary|by their letters|by the order of the alphabet|by A to Z]",
        "[make|write|give me] [an alphabetical list|a sorted list|a list from A to Z] [of these words|of them|of this|]",
        "[sort|order] [this|these words|everything]",
    ),
)  # fmt: skip
SORT_NUMBERS = Wordings(
    train=(
        "Sort these numbers: {x}",
        "Sort [from small to large|from the smallest to the largest|by size]: {x}",
        "Put these numbers in order: {x}",
        "{x}\n\nSort the numbers.",
        "[Order|Arrange] [the numbers|these] [from small to large|by size]: {x}",
        "[Write|List] these numbers [from small to large|in order]: {x}",
        "[Smallest|Small ones] first: {x}",
    ),
    test=("Order these numbers: {x}",),
    asks=(
        "[sort|arrange|line up] [the numbers|them|these numbers|this list] [by size|from small to large|from the smallest to the largest|]",
        "[put|bring|write|list] [the numbers|them|these numbers] in [order|the right order|order of size|rising order]",
    ),
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
    count = rng.choice((3, 4, 5, 5, 5, 5, 6, 6, 7) if split == "train" else (2, 3, 4, 5, 5, 5, 5, 6, 7))
    if rng.random() < 0.15:
        numbers = rng.sample(range(1, 100), count)
        return GrammarSample("sorting_numbers", ((framed(SORT_NUMBERS, rng, split, ", ".join(map(str, numbers))),
                                           ", ".join(map(str, sorted(numbers)))),))  # fmt: skip
    words = rng.sample(ALL_WORDS, count)
    if split == "train" and rng.random() < 0.4:  # of these the second or third letter decides
        alike = neighbours(rng, rng.randint(2, min(4, count)))
        words = rng.sample([*alike, *(word for word in words if word not in alike)][:count], count)
    text = in_a_line(words, rng) if split == "train" else ", ".join(words)
    return GrammarSample("sorting", ((framed(SORT, rng, split, text), ", ".join(sorted(words))),))


def in_a_line(words: list[str], rng: random.Random) -> str:
    """A list as people type it."""
    form = rng.random()
    if form < 0.6:
        return ", ".join(words) + rng.choice(("", "", "", "."))
    return listed(words) if form < 0.75 else rng.choice((" ", " ", "\n", "; ")).join(words)


def counting(rng: random.Random, split: str) -> GrammarSample:
    """How many words a list has."""
    words = rng.sample(ALL_WORDS, rng.randint(1, 10))
    answer = f"{NUMBERS[len(words)].capitalize()} word{'s' * (len(words) > 1)}."
    return GrammarSample("counting", ((framed(COUNT, rng, split, ", ".join(words)), answer),))


def picking(rng: random.Random, split: str) -> GrammarSample:
    """One word of a list by its place."""
    words = rng.sample(ALL_WORDS, rng.randint(3, 7))
    place = rng.randrange(min(5, len(words)))
    ordinal, answer = (ORDINALS[place], words[place]) if rng.random() < 0.8 else ("last", words[-1])
    return GrammarSample("picking", ((framed(PICK, rng, split, ", ".join(words), o=ordinal), answer),))


def reversing(rng: random.Random, split: str) -> GrammarSample:
    """A list backwards."""
    words = rng.sample(ALL_WORDS, rng.randint(2, 6))
    return GrammarSample("reversing", ((framed(REVERSE, rng, split, ", ".join(words)), ", ".join(reversed(words))),))


def summarizing(rng: random.Random, split: str) -> GrammarSample:
    """The story in the sentences that answer its questions, at most three."""
    told = story(rng)
    return GrammarSample(
        "summarizing",
        ((framed(SUMMARIZE, rng, split, told.text), " ".join(answer for _, answer in told.questions[:3])),),
    )


SKILLS: tuple[tuple[float, Callable[[random.Random, str], GrammarSample]], ...] = (
    (0.16, copying), (0.14, extraction), (0.1, from_passage), (0.31, editing), (0.2, sorting), (0.02, counting),
    (0.02, picking), (0.03, reversing), (0.02, summarizing),
)  # fmt: skip


def skill(rng: random.Random, split: str) -> GrammarSample:
    """A task of one of the kinds."""
    return rng.choices([make for _, make in SKILLS], [share for share, _ in SKILLS])[0](rng, split)
