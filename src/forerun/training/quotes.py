"""Tasks whose answer quotes its source: extractive summaries and questions answered with sentences of the text.

Knows running text. They teach a small model to copy from its prompt, which it can do truthfully, while a summary in
its own words would be made up. Knows nothing of files or tokens.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

SENTENCE_END = re.compile(r"(?<=[.!?][\"'”’)])\s+|(?<=[.!?])\s+")
LONG_WORD = re.compile(r"[A-Za-z][a-z]{4,}")
RUNS = (2, 2, 3, 3, 4, 4, 6, 8, 12)  # sentences of a task's text
LONGEST_REPEATED = 8
SHORTEST_SUMMARIZED = 4
QUESTIONS = (
    "{text}\n\nWhat does the text say about {topic}?",
    "{text}\n{topic}?",
    "{text}\nTell me about {topic}.",
    "{text}\nWhat do we learn about {topic} here?",
    "Quote the part about {topic}.\n\n{text}",
    "What is said about {topic} in this text?\n\n{text}",
)
REPETITIONS = (
    "Repeat: {text}",
    "Repeat this text word for word.\n\n{text}",
    "{text}\n\nSay that again.",
    "Copy the following text.\n\n{text}",
)
SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following text.\n\n{text}",
    "{text}\n\nGive the main points.",
    "Name the most important sentences of this text.\n\n{text}",
)


def sentences_of(text: str) -> list[str]:
    """Splits running text into sentences, each on one line."""
    return [" ".join(part.split()) for part in SENTENCE_END.split(text) if part.split()]


def quoting_tasks(text: str, rng: random.Random) -> list[tuple[str, str]]:
    """Cuts a text into runs of sentences and makes one task, with its answer, of each."""
    sentences = sentences_of(text)
    tasks, start = [], 0
    while start < len(sentences):
        run = sentences[start : start + rng.choice(RUNS)]
        start += len(run)
        tasks.append(quoting_task(run, rng))
    return [task for task in tasks if task[1]]


def quoting_task(sentences: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """Makes a task of a run of sentences: repeat, summarize, or answer a question; the answer may be empty."""
    text, draw = " ".join(sentences), rng.random()
    if draw < 0.25 and len(sentences) <= LONGEST_REPEATED:
        return rng.choice(REPETITIONS).format(text=text), text
    if draw < 0.6 and len(sentences) >= SHORTEST_SUMMARIZED:
        return rng.choice(SUMMARIES).format(text=text), main_sentences(sentences, rng.randint(1, len(sentences) // 2))
    start = rng.randrange(len(sentences))
    topic = topic_of(sentences[start])
    answer = " ".join(sentences[start : start + rng.randint(1, 3)]) if topic else ""
    return rng.choice(QUESTIONS).format(text=text, topic=topic), answer


def main_sentences(sentences: Sequence[str], number: int) -> str:
    """Takes the first sentence and those whose long words are the most frequent ones of the text, in their order."""
    frequency = Counter(word.lower() for sentence in sentences for word in LONG_WORD.findall(sentence))

    def weight(index: int) -> float:
        words = LONG_WORD.findall(sentences[index])
        return sum(frequency[word.lower()] for word in words) / (len(words) + 4)

    best = sorted(range(1, len(sentences)), key=weight, reverse=True)[: number - 1]
    return " ".join(sentences[index] for index in sorted([0, *best]))


def topic_of(sentence: str) -> str:
    """Names what a sentence is about by its two longest words; "" if it has none."""
    words = list(dict.fromkeys(LONG_WORD.findall(sentence)))
    longest = sorted(words, key=len, reverse=True)[:2]
    return " and ".join(word for word in words if word in longest)
