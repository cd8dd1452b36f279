"""Tasks whose answer quotes its source: extractive summaries and questions answered with sentences of the text.

Knows running text. They teach a small model to copy from its prompt, which it can do truthfully, where a summary in
words of its own would be made up. Knows nothing of files or tokens.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence

SENTENCE_END = re.compile(r"(?<=[.!?][\"'”’)])\s+|(?<=[.!?])\s+")
LONG_WORD = re.compile(r"[A-Za-z][a-z]{4,}")
MIN_SENTENCES = 6
QUESTIONS = (
    "{text}\n\nWhat does the text say about {topic}?",
    "{text}\n{topic}?",
    "{text}\nTell me about {topic}.",
    "{text}\nWhat do we learn about {topic} here?",
    "Quote the part about {topic}.\n\n{text}",
    "What is said about {topic} in this text?\n\n{text}",
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
    """Makes one task, with its answer, of a piece of text; none of a text that is too short."""
    sentences = sentences_of(text)
    if len(sentences) < MIN_SENTENCES:
        return []
    body = " ".join(sentences)
    if rng.random() < 0.5:
        return [(rng.choice(SUMMARIES).format(text=body), main_sentences(sentences, rng.randint(2, 4)))]
    start = rng.randrange(len(sentences))
    topic = topic_of(sentences[start])
    answer = " ".join(sentences[start : start + rng.randint(1, 3)])
    return [(rng.choice(QUESTIONS).format(text=body, topic=topic), answer)] if topic else []


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
