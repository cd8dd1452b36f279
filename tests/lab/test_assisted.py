"""Drafts across tokenizers beside transformers' assisted generation: what is counted, and that texts are compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import assisted
from forerun.weights.resolve import resolve_model
from tests.support import mini, other_tokens


def test_both_are_counted_and_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded draft model under other ids drafts for both; each pass brings what was accepted, and one token."""
    draft = other_tokens.with_unused_row(other_tokens.write_renumbered(resolve_model("mini-draft"), tmp_path / "draft"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in mini.PROMPTS[:2]), "utf-8")
    arguments = ["mini", str(draft), "--prompts", str(prompts), "--max-tokens", "12", "--drafts", "3"]
    monkeypatch.setattr(sys, "argv", ["assisted.py", *arguments])
    assert assisted.main() == 0
    lines = capsys.readouterr().out.splitlines()
    for line, name in zip(lines[2:4], ("forerun", "transformers"), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        tokens, passes, drafted = int(cells[1]), int(cells[2]), float(cells[4]) * int(cells[2])
        assert cells[0].startswith(name) and float(cells[3]) == pytest.approx(tokens / passes, abs=1e-3)
        assert 0 < tokens - passes <= drafted + 1
    assert lines[-1] == "python lab/assisted.py " + " ".join(arguments)


def test_a_difference_without_a_tie_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    class Apart(assisted.Theirs):
        """Finds any two tokens that far apart."""

        def __init__(self, gap: float) -> None:
            self._gap = gap

        def gap(self, known: list[int], one: int, other: int) -> float:  # type: ignore[override]
            assert (known, one, other) == ([7, 1], 2, 3)
            return self._gap

    same, one, other = (assisted.Answer(ids, 1, 0) for ids in ((1, 2), (1, 2), (1, 3)))
    assert assisted.differences(Apart(0.0), [[7]], [(same, one)]) == []
    assert assisted.differences(Apart(1e-6), [[7]], [(one, other)]) == []
    assert "a tie" in capsys.readouterr().out
    assert assisted.differences(Apart(0.5), [[7]], [(one, other)]) == ["prompt 1: token 1, logits 5.00e-01 apart"]
    longer = assisted.Answer((1, 2, 4), 1, 0)
    assert len(assisted.differences(Apart(0.0), [[7]], [(one, longer)])) == 1
