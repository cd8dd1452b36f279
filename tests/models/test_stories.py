"""A real model: stories260K writes its published greedy sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.loader import load_model
from tests.models import factory
from tests.support.llama2c import convert_llama2c
from tests.support.shared import shared_data
from tests.support.stories import published_sample, stories260k

BOS = 1


@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
def test_greedy_sample(name: str, tmp_path: Path) -> None:
    loaded = load_model(stories260k(tmp_path, name), factory.make_kernels())
    text = loaded.tokenizer.decode(factory.greedy(loaded.model, [BOS], 32))
    assert len(text) > 60 and published_sample().startswith(text.strip())


def test_the_tokens_of_the_sample_are_the_likeliest(tmp_path: Path) -> None:
    loaded = load_model(stories260k(tmp_path), factory.make_kernels())
    ids = loaded.tokenizer.encode(published_sample())
    assert ids[0] == BOS and len(ids) > 250
    logits = factory.Runner(loaded.model, len(ids), block_size=16).span(ids).logits
    assert logits.argmax(dim=1)[:-1].tolist() == ids[1:]


def test_quantized_stories(tmp_path: Path) -> None:
    source = shared_data("weights/stories3M-q80")
    folder = convert_llama2c(source / "stories3M-q80.bin", source / "tok4096.bin", tmp_path)
    loaded = load_model(folder, factory.make_kernels())
    text = loaded.tokenizer.decode(factory.greedy(loaded.model, [BOS], 20))
    assert text.startswith("Once upon a time, there was a little girl named")
