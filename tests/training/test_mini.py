"""The embedded family: both folders are complete, agree with each other, and know some English."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from forerun.training.chat import ChatTurn, render_chat
from forerun.training.export import load_model
from forerun.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
MINI = ROOT / "src" / "forerun" / "mini"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MAX_FAMILY_BYTES = 64 * 2**20

pytestmark = pytest.mark.skipif(not (MINI / "target" / "config.json").is_file(), reason="mini is not trained yet")


@pytest.mark.parametrize("name", ["target", "draft"])
def test_folder_is_complete_and_fits_its_recipe(name: str) -> None:
    assert sorted(path.name for path in (MINI / name).iterdir()) == sorted(FILES)
    assert load_model(MINI / name).config == load_recipe(ROOT / "recipes" / f"mini-{name}.toml").model
    with safe_open(MINI / name / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_draft_is_ten_times_smaller_and_shares_the_tokenizer() -> None:
    sizes = [sum(weight.numel() for weight in load_model(MINI / name).parameters()) for name in ("target", "draft")]
    assert sizes[0] >= 10 * sizes[1]
    assert (MINI / "target" / "tokenizer.json").read_bytes() == (MINI / "draft" / "tokenizer.json").read_bytes()


def test_family_stays_small() -> None:
    assert sum(path.stat().st_size for path in MINI.rglob("*") if path.is_file()) < MAX_FAMILY_BYTES


def test_end_tokens_are_those_of_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(MINI / "target" / "tokenizer.json"))
    ends = json.loads((MINI / "target" / "generation_config.json").read_text())["eos_token_id"]
    assert [tokenizer.id_to_token(token_id) for token_id in ends] == ["<|im_end|>", "<|endoftext|>"]


@torch.no_grad()
@pytest.mark.parametrize("name", ["target", "draft"])
def test_english_is_far_likelier_than_chance(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(MINI / name / "tokenizer.json"))
    text = render_chat([ChatTurn("user", "I want to book a table."), ChatTurn("assistant", "What city are you in?")])
    ids = torch.tensor([tokenizer.encode(text).ids])
    logits = load_model(MINI / name)(ids[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    assert float(loss) < 4.0  # chance is ln 8192 = 9.0
