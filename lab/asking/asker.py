"""Chat prompts of many kinds, made of the training sources, for a target to answer and its draft heads to learn from.

Knows which kinds there are, how often each comes, and where the texts, topics and names come from. Knows nothing of
tokens or of answers. No prompt that shares 13 words with a benchmark file is kept.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asking import german, wordings
from forerun.errors import DataError
from forerun.training.data import grams, read_records
from forerun.training.quotes import LONG_WORD, sentences_of
from forerun.training.sources import BOOK_HEADER, clean, tidy_speech

CAPITALIZED = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+(?: [A-Z][a-z]+){0,2}")
PROSE = (
    "openstax_ccby", "classic_young_readers", "classic_general", "pratham_books_en", "18f_blog_cc0",
    "nltk_state_union_pd", "nltk_inaugural_pd", "cia_factbook_pd",
)  # fmt: skip
RECORDS_OF_A_SOURCE = 400
CHARS_OF_A_RECORD = 60_000
SUMMARIZED_CHARS = (500, 3600)
PASSAGE_CHARS = (350, 800)
NUM_PASSAGES = (2, 5)
EXTRACTED_CHARS = (250, 900)
FOLLOWED_UP = 0.5  # of the conversations of open kinds
LOWERED = 0.5  # of the questions, as people type them


@dataclass(frozen=True)
class AskedPrompt:
    """What a user says, turn after turn; the turns after the first follow on the model's answers."""

    kind: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class PromptMaterial:
    """What prompts are made of."""

    texts: tuple[str, ...]  # running text, long
    sentences: tuple[str, ...]
    names: tuple[str, ...]
    words: tuple[str, ...]
    titles: tuple[str, ...]
    countries: tuple[str, ...]
    problems: tuple[str, ...]  # word problems of school mathematics
    tasks: tuple[str, ...]  # instructions people have written
    programs: tuple[str, ...]  # programming tasks
    code: tuple[str, ...]
    dialogues: tuple[tuple[str, ...], ...]  # what the first speaker says


def load_material(data_dir: Path) -> PromptMaterial:
    """Reads what the kinds need of the training folder; raises DataError for a file that is missing or damaged."""
    texts = [text for name in PROSE for text in prose_of(data_dir, name)]
    speech = " ".join(
        " ".join(map(tidy_speech, record["transcript"])) for record in read_records(data_dir, "qmsum_train")
    )
    sentences = [line for text in texts for line in sentences_of(text[:6000]) if 30 < len(line) < 160]
    return PromptMaterial(
        texts=(*texts, *cut(speech, CHARS_OF_A_RECORD)),
        sentences=tuple(sentences),
        names=tuple(dict.fromkeys(name for text in texts for name in CAPITALIZED.findall(text[:8000]))),
        words=tuple(dict.fromkeys(word.lower() for line in sentences for word in LONG_WORD.findall(line))),
        titles=tuple(clean(record["title"]) for name in PROSE[:4] for record in read_records(data_dir, name)),
        countries=tuple(dict.fromkeys(map(country_of, (r["text"] for r in read_records(data_dir, "cia_factbook_pd"))))),
        problems=tuple(clean(record["question"]) for record in read_records(data_dir, "gsm8k_train")),
        tasks=tuple(map(task_of, read_records(data_dir, "self_instruct_seed_tasks"))),
        programs=tuple(programming_tasks(data_dir)),
        code=tuple(clean(record["text"])[:900] for record in read_records(data_dir, "python_small_programs")),
        dialogues=tuple(spoken_by_users(data_dir)),
    )


def prose_of(data_dir: Path, name: str) -> Iterator[str]:
    """The beginnings of some records of a source, without headers."""
    for number, record in enumerate(read_records(data_dir, name)):
        if number < RECORDS_OF_A_SOURCE:
            yield clean(BOOK_HEADER.sub("", clean(record["text"])))[:CHARS_OF_A_RECORD]


def cut(text: str, size: int) -> list[str]:
    """Pieces of `size` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def country_of(text: str) -> str:
    """The first name in an article about a country: most often the country's own."""
    found = CAPITALIZED.search(text) or re.search(r"[A-Z][a-z]+", text)
    return found.group() if found else "the country"


def task_of(record: Mapping[str, object]) -> str:
    """An instruction with its first input."""
    instances = record["instances"]
    assert isinstance(instances, list)  # the published layout
    return f"{clean(str(record['instruction']))}\n\n{clean(str(instances[0]['input']))}".strip()


def programming_tasks(data_dir: Path) -> Iterator[str]:
    """One-sentence tasks and exercises."""
    yield from (clean(record["text"]) for record in read_records(data_dir, "mbpp_train_601_974"))
    for record in read_records(data_dir, "exercism_pairs"):
        yield clean(record["statement"])[:1500]


def spoken_by_users(data_dir: Path) -> Iterator[tuple[str, ...]]:
    """What the first speaker of each dialogue says."""
    for name in ("sgd_dev", "taskmaster4", "topical_chat"):
        for record in read_records(data_dir, name):
            first = record["turns"][0][0]
            yield tuple(clean(said) for who, said in record["turns"] if who == first and clean(said))


class Asker:
    """Makes prompts of one kind after the other."""

    def __init__(self, material: PromptMaterial, rng: random.Random) -> None:
        self.material, self.rng = material, rng

    # -- gaps -----------------------------------------------------------------------------------------------------

    def passage(self, sizes: tuple[int, int]) -> str:
        """A run of whole sentences of a text, of about `sizes` characters, on one line or as it stands."""
        text, size = self.rng.choice(self.material.texts), self.rng.randint(*sizes)
        start = self.rng.randrange(max(1, len(text) - size))
        lines = sentences_of(text[start : start + size + 400])[1:]  # the first one may be cut
        found = ""
        for line in lines:
            if found and len(found) + len(line) > size:
                break
            found = f"{found} {line}".strip()
        return found or text[:size]

    def topic(self) -> str:
        """One or two words."""
        return self.rng.choice(self.material.words)

    def gaps(self) -> dict[str, object]:
        """Something for every gap of every wording that costs little."""
        rng, some = self.rng, self.material
        words = {f"{name}{number}": rng.choice(some.words) for name in ("topic", "word") for number in ("", 2)}
        names = {f"name{number}": rng.choice(some.names) for number in ("", 2, 3)}
        lines = {f"sentence{number}": rng.choice(some.sentences) for number in ("", 2, 3)}
        persons = {"person": rng.choice(wordings.PERSONS), "person2": rng.choice(wordings.PERSONS)}
        numbers = {
            "a": rng.randint(2, 12),
            "b": rng.randint(13, 60),
            "c": rng.randint(61, 900),
            "year": rng.randint(1850, 2022),
        }
        countries = {"country": rng.choice(some.countries), "country2": rng.choice(some.countries)}
        single = {
            "title": rng.choice(some.titles),
            "place": rng.choice(wordings.PLACES),
            "letter": rng.choice("ABCDEFGHIJKLMNOPRSTUW"),
        }
        return {**words, **names, **lines, **persons, **numbers, **countries, **single}

    def fill(self, patterns: Sequence[str], **more: object) -> str:
        """One of the wordings with its gaps filled."""
        return self.rng.choice(patterns).format(**{**self.gaps(), **more})

    def typed(self, question: str) -> str:
        """A question as it is or as people type it."""
        return question.lower() if self.rng.random() < LOWERED else question

    # -- kinds ----------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A text to summarize."""
        return self.fill(wordings.SUMMARIES, text=self.passage(SUMMARIZED_CHARS))

    def from_passages(self) -> str:
        """Some passages, often numbered, and a question about a word or a name in one of them."""
        rng = self.rng
        found = [self.passage(PASSAGE_CHARS) for _ in range(rng.randint(*NUM_PASSAGES))]
        one = rng.choice(found)
        words = LONG_WORD.findall(one) or [self.topic()]
        name = rng.choice(CAPITALIZED.findall(one) or words)
        question = self.typed(self.fill(wordings.PASSAGE_QUESTIONS, topic=rng.choice(words), name=name))
        mark, joint = rng.choice(("", "", "[{}] ", "{}. ", "Passage {}: ")), rng.choice(("\n\n", "\n", "\n\n"))
        listed = joint.join(mark.format(number) + text for number, text in enumerate(found, start=1))
        return self.fill(wordings.FROM_PASSAGES, passages=listed, question=question)

    def fact(self) -> str:
        """A short question about something in the world."""
        return self.typed(self.fill(wordings.FACT_QUESTIONS))

    def translation(self) -> str:
        """A sentence to translate."""
        return self.fill(wordings.TRANSLATIONS, german=german.sentence(self.rng))

    def problem(self) -> str:
        """A word problem."""
        return self.rng.choice(self.material.problems)

    def open_request(self) -> str:
        """Writing, role-play, explaining, reasoning, sums, extraction, code."""
        kind = self.rng.choice(
            ("WRITING", "ROLES", "EXPLAINING", "EXPLAINING", "REASONING", "SUMS", "CODING", "EXTRACTION")
        )
        text = self.passage(EXTRACTED_CHARS) if kind == "EXTRACTION" else ""
        return self.fill(getattr(wordings, kind), text=text, code=self.rng.choice(self.material.code))

    def written_task(self) -> str:
        """An instruction or a programming task that people wrote."""
        return self.rng.choice(self.rng.choice((self.material.tasks, self.material.programs)))

    def conversation(self, kind: str) -> AskedPrompt:
        """A prompt of a kind, with a second turn where that is usual."""
        if kind == "dialogue":
            return AskedPrompt(kind, self.rng.choice(self.material.dialogues)[:2])
        first: dict[str, Callable[[], str]] = {
            "summary": self.summary,
            "passages": self.from_passages,
            "fact": self.fact,
            "translation": self.translation,
            "problem": self.problem,
            "open": self.open_request,
            "task": self.written_task,
        }
        follow = kind == "open" and self.rng.random() < FOLLOWED_UP
        return AskedPrompt(kind, (first[kind](), self.fill(wordings.FOLLOW_UPS)) if follow else (first[kind](),))


SHARES: Mapping[str, float] = {  # of the prompts
    "summary": 0.13,
    "passages": 0.13,
    "fact": 0.16,
    "translation": 0.16,
    "problem": 0.15,
    "open": 0.17,
    "task": 0.05,
    "dialogue": 0.05,
}


def make_prompts(material: PromptMaterial, leaks: frozenset[int], count: int, seed: int) -> list[AskedPrompt]:
    """Makes `count` different prompts, none with a 13-gram in `leaks`; raises DataError if there are not so many."""
    rng = random.Random(seed)
    asker, found = Asker(material, rng), dict[tuple[str, ...], AskedPrompt]()
    for _ in range(4 * count):
        if len(found) == count:
            return list(found.values())
        asked = asker.conversation(rng.choices(list(SHARES), list(SHARES.values()))[0])
        if leaks.isdisjoint(gram for turn in asked.turns for gram in grams(turn)):
            found[asked.turns] = asked
    raise DataError(f"the training text gives only {len(found)} different prompts; ask for fewer than {count}")
