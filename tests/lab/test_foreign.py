"""A draft model with another tokenizer: its text, the table it begins with, and that it drafts."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

import foreign
from forerun import SamplingParams
from forerun.errors import ConfigError
from forerun.models.loader import load_tokenizer
from forerun.training.data import read_records
from forerun.training.export import load_model
from forerun.weights.resolve import resolve_model
from tests.support import mini

PROMPT, ANSWER = "Tell me a story.", "Once upon a time there was a fox."


def write_gpt2(folder: Path) -> Path:
    """Files as GPT-2's, with a few merges."""
    merges = ["t h", "th e", "\u0120 the", "o n"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    folder.mkdir()
    vocab = {token: index for index, token in enumerate([*tokens, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", "utf-8")
    return folder


def write_answers(path: Path) -> Path:
    tokenizer = load_tokenizer("mini")
    prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    line = {"prompt": prompt, "answer": [*tokenizer.encode(ANSWER), tokenizer.token_id("<|im_end|>")]}
    path.write_text(json.dumps({"target": "mini"}) + "\n" + json.dumps(line) + "\n", "utf-8")
    return path


def test_a_start_and_a_text_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2, answers, out = write_gpt2(tmp_path / "gpt2"), write_answers(tmp_path / "turn1.answers"), tmp_path / "out"
    arguments = [str(out), "--tokenizer", str(gpt2), "--answers", str(answers)]
    monkeypatch.setattr(sys, "argv", ["foreign.py", *arguments])
    foreign.main()
    [record] = read_records(out, "small_world")
    said = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>"
    assert record == {"kind": "answer", "text": said}
    with lzma.open(out / foreign.TEXT, "rt", encoding="utf-8") as file:
        assert len(file.readlines()) == 1

    start, old = load_model(out / "start"), load_model(resolve_model("mini-draft"))
    made, own = load_tokenizer(out / "start"), load_tokenizer("mini-draft")
    assert made.vocab_size == 256 + 4 + 1 + 2 and made.eos_token_ids == (made.token_id("<|im_end|>"), 260)
    assert made.decode(made.encode(said), skip_special_tokens=False) == said
    new, table = start.state_dict()[foreign.TABLE], old.state_dict()[foreign.TABLE].bfloat16().float()
    for text in (" the", "on", "<|im_start|>", "<|endoftext|>"):
        [token] = made.encode(text)
        assert torch.equal(new[token], table[own.encode(text)].mean(0).bfloat16().float()), text
    assert all(torch.equal(w, old.state_dict()[n]) for n, w in start.state_dict().items() if n != foreign.TABLE)

    params = SamplingParams(max_tokens=8, temperature=0.0)
    drafting = mini.drafting("draft", draft_model=str(out / "start"), adaptive=False, max_draft_tokens=3)
    [plain], [drafted] = (llm.generate([mini.PROMPTS[0]], params) for llm in (mini.plain(), drafting))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.outputs[0].stats.trees.drafted > 0


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no vocab\.json and no merges\.txt"):
        foreign.read_gpt2(tmp_path, load_tokenizer("mini"))
