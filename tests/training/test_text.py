"""Chat template, tokenizer and source readers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from forerun.training.chat import CHAT_TEMPLATE, SPECIAL_TOKENS, ChatTurn, render_chat
from forerun.training.sources import SOURCES, dialogue, pieces
from forerun.training.tokenizer import save_tokenizer, token_lens_bytes, train_tokenizer

TEXTS = [
    "Hello, it's a test of 12345 words.",
    "def f(x):\n    return x\n\n\n\tif  y:",
    "naïve 日本語 🙂 \x00\x7f",
    " ",
    "a\r\nb  ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*TEXTS, "the cat and the dog " * 50], 300)


def test_template_and_function_agree() -> None:
    turns = [ChatTurn("system", "Be kind."), ChatTurn("user", "Hi {{ x }}\n"), ChatTurn("assistant", "<b>Hello</b>")]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    template = jinja2.Template(CHAT_TEMPLATE, trim_blocks=True, lstrip_blocks=True)
    for prompt in (False, True):
        assert template.render(messages=messages, add_generation_prompt=prompt) == render_chat(turns, prompt)


def test_round_trip_is_lossless(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_and_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.encode("".join(SPECIAL_TOKENS)).ids == [0, 1, 2]


def test_token_lens_count_bytes(tokenizer: Tokenizer) -> None:
    lens_bytes = token_lens_bytes(tokenizer)
    for text in TEXTS:
        assert sum(lens_bytes[token_id] for token_id in tokenizer.encode(text).ids) == len(text.encode())
    assert lens_bytes[:3] == [0, 0, 0]


def test_digits_come_in_threes(tokenizer: Tokenizer) -> None:
    pieces_of = tokenizer.pre_tokenizer.pre_tokenize_str("is 12345")
    assert [piece for piece, _ in pieces_of] == ["is", "Ġ", "123", "45"]


def test_saved_folder_has_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path, 128)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert settings["eos_token"] == "<|im_end|>"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab() == tokenizer.get_vocab()


def test_pieces_keep_the_text() -> None:
    text = "\n\n".join("word " * 20 + str(number) for number in range(40))
    parts = pieces(text, 500)
    assert "\n\n".join(parts) == text
    assert max(map(len, parts)) <= 500


def test_dialogue_roles_follow_the_first_speaker() -> None:
    record = {"turns": [["B", "Hi"], ["A", "Hello"], ["A", "there"], ["B", "Bye"]]}
    wanted = [ChatTurn("user", "Hi"), ChatTurn("assistant", "Hello there"), ChatTurn("user", "Bye")]
    assert dialogue(record, random.Random(0)) == [render_chat(wanted)]


def test_maths_drops_calculator_marks() -> None:
    record = {"question": "1+1?", "answer": "1+1=<<1+1=2>>2 apples.\n#### 2"}
    (text,) = SOURCES["gsm8k_train"].read(record, random.Random(0))
    assert "1+1=2 apples.\nThe answer is 2.<|im_end|>" in text


def test_meeting_quotes_the_span_asked_about() -> None:
    ask = {"query": "What was said?", "answer": "Two .", "relevant_text_span": [["1", "1"]]}
    record = {"transcript": ["A: one", "B: {vocalsound} two ."], "specific": [ask]}
    (text,) = SOURCES["qmsum_train"].read(record, random.Random(0))
    assert "B: two.\n\nWhat was said?" in text
    assert "one" not in text


def test_every_source_reads_a_record() -> None:
    record = {
        "title": "T", "text": "# Title: T\n\nsome text", "turns": [["U", "a"], ["S", "b"]], "summary": "s",
        "source": ["x.", "y."], "target": ["z"], "transcript": ["A: hi"], "specific": [{"query": "q", "answer": "a"}],
        "question": "q", "answer": "a", "statement": "s", "solution": "x = 1", "code": "x = 1",
        "instruction": "i", "instances": [{"input": "", "output": "o"}],
    }  # fmt: skip
    for name, source in SOURCES.items():
        assert all(source.read(record, random.Random(0))), name
