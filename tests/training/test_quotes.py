"""Tasks that quote: every answer is made of whole sentences of its text, in their order."""

from __future__ import annotations

import random

import pytest

from forerun.training.quotes import main_sentences, quoting_tasks, sentences_of, topic_of

TEXT = """The river rose in the night. Nobody in the village had expected it! "Take the boats," said
the miller. They carried children and chickens to the church.

In the morning the water had gone. Only the millwheel was missing, and the miller laughed about
it for years. Who needs a wheel? The river has one."""


def test_sentences_end_at_marks_and_lie_on_one_line() -> None:
    sentences = sentences_of(TEXT)
    assert len(sentences) == 8
    assert sentences[2] == '"Take the boats," said the miller.'
    assert sentences[6] == "Who needs a wheel?"
    assert " ".join(sentences) == " ".join(TEXT.split())


@pytest.mark.parametrize("seed", range(40))
def test_answers_are_sentences_of_the_task(seed: int) -> None:
    sentences = sentences_of(TEXT)
    tasks = quoting_tasks(TEXT, random.Random(seed))
    assert tasks
    for task, answer in tasks:
        places = [sentences.index(part) for part in sentences_of(answer)]
        assert places and places == sorted(places)
        assert all(sentences[place] in task for place in places)


def test_all_kinds_of_tasks_come_up() -> None:
    tasks = [task for seed in range(60) for task in quoting_tasks(TEXT * 3, random.Random(seed))]
    assert any(" ".join(answer.split()) in task and len(answer) > 0.8 * len(task) - 60 for task, answer in tasks)
    assert any("Summarize" in task for task, _ in tasks)
    assert any("What does the text say about" in task for task, _ in tasks)


def test_main_sentences_begin_with_the_first_and_prefer_frequent_words() -> None:
    text = ["Begin here.", "Nothing else.", "Badgers like badgers.", "Everybody sleeps.", "Badgers again."]
    assert main_sentences(text, 2) == "Begin here. Badgers like badgers."


def test_topic_is_the_longest_words_in_their_order() -> None:
    assert topic_of("Only the millwheel was missing.") == "millwheel and missing"
    assert topic_of("He is it.") == ""


def test_no_text_no_tasks() -> None:
    assert quoting_tasks("", random.Random(0)) == []
