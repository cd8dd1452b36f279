"""The training sources: which file holds what, and how one record becomes documents.

Knows the fields of every file of the data folder and the wording of the tasks made from them. Knows nothing of
tokens, splits or mixing. A document is a string; conversations are already rendered in the chat template.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.training.chat import ChatTurn, ask, render_chat
from forerun.training.quotes import quoting_tasks

Record = Mapping[str, Any]
Reader = Callable[[Record, random.Random], list[str]]

MAX_PIECE_CHARS = 6000
MAX_SOURCE_CHARS = 3500
BOOK_HEADER = re.compile(r"^\s*##? (Title|Author|Year):.*$|^-{5,}$", re.MULTILINE)
CALCULATION = re.compile(r"<<.*?>>")
MEETING_NOISE = re.compile(r"\{\w+\}\s*")
SPACE_BEFORE_MARK = re.compile(r" (?=[.,?!;:'](?:\s|\w|$))")
STORY_REQUESTS = (
    "Write a short story called {title}.",
    'Tell me a story: "{title}".',
    "Tell me the story of {title}.",
    "Can you write a story for children with the title {title}?",
)
SUMMARY_REQUESTS = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "Give a short summary of this text:\n\n{text}",
    "{text}\n\nWhat is this about, in one sentence?",
)
EXPLAIN_REQUESTS = ("Write about {title}.", "Tell me about {title}.", "Explain {title}.", "{title}")
CODE_REQUESTS = ("{text}", "{text} Write it in Python.", "Solve this in Python:\n\n{text}")


@dataclass(frozen=True)
class Source:
    """The domain a source is counted under, its reader and its file `FILE.jsonl.xz` ("" is the source's own name).

    A generated source lies in `data.generated_dir` of a recipe.
    """

    domain: str
    licence: str
    read: Reader
    file: str = ""
    generated: bool = False


def clean(text: str) -> str:
    """Drops carriage returns and outer blank lines."""
    return text.replace("\r", "").strip()


def pieces(text: str, max_chars: int = MAX_PIECE_CHARS) -> list[str]:
    """Cuts a long text at paragraph ends into pieces of about `max_chars` characters."""
    result: list[str] = []
    current = ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > max_chars:
            result.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}" if current else paragraph
    return [*result, current] if current.strip() else result


def book(record: Record, _rng: random.Random) -> list[str]:
    """Reads a book without its header, in pieces."""
    return pieces(clean(BOOK_HEADER.sub("", clean(record["text"]))))


def short_story(record: Record, rng: random.Random) -> list[str]:
    """Reads a children's story: half of them plain under their title, half as the answer to a request."""
    title, text = clean(record["title"]), clean(record["text"])
    if rng.random() < 0.5:
        return [f"{title}\n\n{text}"]
    return [ask(rng.choice(STORY_REQUESTS).format(title=title), text)]


def conversation(record: Record, _rng: random.Random) -> list[str]:
    """Reads generated text, or a generated conversation whose turns name their roles."""
    if "text" in record:
        return [record["text"]]
    return [render_chat([ChatTurn(role, said) for role, said in record["turns"]])]


def dialogue(record: Record, _rng: random.Random) -> list[str]:
    """Reads a dialogue; the first speaker is the user."""
    turns = record["turns"]
    first = turns[0][0]
    roles = [("user" if who == first else "assistant", clean(said)) for who, said in turns]
    return [render_chat([ChatTurn(role, said) for role, said in merge_turns(roles)])]


def merge_turns(turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Joins neighbouring turns of one role into one."""
    merged: list[tuple[str, str]] = []
    for role, said in turns:
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]} {said}")
        else:
            merged.append((role, said))
    return merged


def plain_text(record: Record, _rng: random.Random) -> list[str]:
    """Reads running text in pieces."""
    return pieces(clean(record["text"]))


def textbook(record: Record, rng: random.Random) -> list[str]:
    """Reads a textbook section: plain, or the first piece as the answer to a request."""
    title, parts = clean(record["title"]), pieces(clean(record["text"]))
    if parts and rng.random() < 0.5:
        return [ask(rng.choice(EXPLAIN_REQUESTS).format(title=title), parts[0]), *parts[1:]]
    return [f"{title}\n\n{part}" for part in parts]


def summary(text: str, short: str, rng: random.Random) -> str:
    """Renders one summarization pair with a request of varied wording."""
    return ask(rng.choice(SUMMARY_REQUESTS).format(text=text), short)


def blog(record: Record, rng: random.Random) -> list[str]:
    """Reads a blog post as a summarization pair where it has a summary, else plain."""
    text, short = clean(record["text"]), clean(record["summary"] or "")
    if not short:
        return pieces(text)
    return [summary(pieces(text, MAX_SOURCE_CHARS)[0], short, rng)] if text else []


def abstract(record: Record, rng: random.Random) -> list[str]:
    """Reads a paper abstract with one of its one-line summaries."""
    source = " ".join(record["source"])
    return [summary(clean(source), clean(rng.choice(record["target"])), rng)]


def meeting(record: Record, rng: random.Random) -> list[str]:
    """Reads a meeting: each question with the part of the transcript it is about, and its answer."""
    lines = [tidy_speech(line) for line in record["transcript"]]
    documents = []
    for item in record["specific"]:
        spans = item.get("relevant_text_span") or [["0", str(len(lines))]]
        part = "\n".join("\n".join(lines[int(start) : int(end) + 1]) for start, end in spans)
        documents.append(ask(f"{part[:MAX_SOURCE_CHARS]}\n\n{item['query']}", tidy_speech(item["answer"])))
    rng.shuffle(documents)
    return documents


def tidy_speech(text: str) -> str:
    """Drops transcription marks and the spaces before punctuation."""
    return SPACE_BEFORE_MARK.sub("", MEETING_NOISE.sub("", text)).strip()


def maths(record: Record, _rng: random.Random) -> list[str]:
    """Reads a word problem; calculator marks are removed, the final line becomes a sentence."""
    answer = CALCULATION.sub("", record["answer"]).replace("#### ", "The answer is ")
    return [ask(clean(record["question"]), f"{clean(answer)}.")]


def program(record: Record, _rng: random.Random) -> list[str]:
    """Reads a source file in pieces."""
    return pieces(clean(record["text"]))


def exercise(record: Record, rng: random.Random) -> list[str]:
    """Reads a programming exercise and its solution."""
    task = rng.choice(CODE_REQUESTS).format(text=clean(record["statement"])[:MAX_SOURCE_CHARS])
    return [ask(task, fenced(record["solution"]))]


def small_task(record: Record, rng: random.Random) -> list[str]:
    """Reads a one-sentence programming task and its solution."""
    return [ask(rng.choice(CODE_REQUESTS).format(text=clean(record["text"])), fenced(record["code"]))]


def fenced(code: str) -> str:
    """Wraps code as chat models do; tabs become four spaces."""
    return f"```python\n{clean(code).expandtabs(4)}\n```"


def instruction(record: Record, _rng: random.Random) -> list[str]:
    """Reads an instruction with each of its inputs and outputs."""
    wanted = clean(record["instruction"])
    return [ask(f"{wanted}\n\n{clean(case['input'])}", clean(case["output"])) for case in record["instances"]]


def quotes(record: Record, rng: random.Random) -> list[str]:
    """Reads running text as tasks that are answered with sentences of it."""
    text = clean(BOOK_HEADER.sub("", clean(record["text"])))
    return [ask(task, answer) for task, answer in quoting_tasks(text, rng)]


PUBLIC_DOMAIN = "public domain (US)"
SOURCES: Mapping[str, Source] = {
    "classic_young_readers": Source("stories", PUBLIC_DOMAIN, book),
    "classic_general": Source("stories", PUBLIC_DOMAIN, book),
    "african_storybook_en": Source("stories", "CC BY", short_story),
    "pratham_books_en": Source("stories", "CC BY", short_story),
    "sgd_train": Source("dialogue", "CC BY-SA 4.0", dialogue),
    "sgd_dev": Source("dialogue", "CC BY-SA 4.0", dialogue),
    "taskmaster4": Source("dialogue", "CC BY 4.0", dialogue),
    "topical_chat": Source("dialogue", "CDLA-Sharing 1.0", dialogue),
    "self_instruct_seed_tasks": Source("dialogue", "Apache-2.0", instruction),
    "18f_blog_cc0": Source("summarization", "CC0", blog),
    "scitldr_A_train": Source("summarization", "Apache-2.0", abstract),
    "scitldr_A_dev": Source("summarization", "Apache-2.0", abstract),
    "qmsum_train": Source("summarization", "MIT", meeting),
    "textbook_quotes": Source("summarization", "CC BY 4.0", quotes, "openstax_ccby"),
    "young_readers_quotes": Source("summarization", PUBLIC_DOMAIN, quotes, "classic_young_readers"),
    "general_quotes": Source("summarization", PUBLIC_DOMAIN, quotes, "classic_general"),
    "python_small_programs": Source("code", "MIT, BSD-3, Apache-2.0", program),
    "python_libraries": Source("code", "MIT, BSD-3, Apache-2.0", program),
    "exercism_pairs": Source("code", "MIT", exercise),
    "mbpp_train_601_974": Source("code", "CC BY 4.0", small_task),
    "gsm8k_train": Source("maths", "MIT", maths),
    "openstax_ccby": Source("articles", "CC BY 4.0", textbook),
    "cia_factbook_pd": Source("articles", "public domain", plain_text),
    "nltk_state_union_pd": Source("articles", "public domain", plain_text),
    "nltk_inaugural_pd": Source("articles", "public domain", plain_text),
    "small_world": Source("world", "Apache-2.0", conversation, generated=True),
}
DOMAINS = ("stories", "dialogue", "summarization", "code", "maths", "articles", "world")
