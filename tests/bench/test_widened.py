"""The table of drafters at the cost of a larger model: which rows it has, and how it is printed."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import widened

from forerun.bench.prompts import PromptCase
from forerun.errors import ConfigError
from tests.support import mini


def given(**options: Any) -> Namespace:
    usual = {"work": Path("work"), "model": "mini", "portfolio": "suffix+draft", "vocabulary": 512, "foreign": None,
             "draft": None, "drafters": None}  # fmt: skip
    return Namespace(**{**usual, **options})


def test_every_drafter_has_its_rows() -> None:
    heads = {name: Path("work") / name for name in widened.HEADS}
    rows = {row.name: row for row in widened.entrants(given(foreign="other"), heads)}
    assert list(rows) == [
        "draft", "draft trimmed", "mtp", "mtp trimmed", "eagle", "dflash", "dflash tree", "portfolio",
        "portfolio trimmed", "foreign draft",
    ]  # fmt: skip
    assert rows["portfolio"].drafter == "portfolio=suffix+draft=mini-draft"
    assert rows["dflash"].options == {"tree_width": 1} and not rows["dflash tree"].options
    assert rows["mtp trimmed"].options == {"draft_vocabulary": "work/tokens-512.json"}
    assert rows["foreign draft"].drafter == "draft=other"
    other = widened.entrants(given(model="./other", draft="small", drafters="draft,portfolio"), heads)
    assert [row.drafter for row in other] == ["draft=small", "portfolio=suffix+draft=small"]
    asked = widened.entrants(given(portfolio="suffix+eagle", drafters="portfolio, eagle"), heads)
    assert [row.drafter for row in asked] == ["portfolio=suffix+eagle=work/eagle", "eagle=work/eagle"]


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="--drafters has lucky; there are draft, draft trimmed"):
        widened.entrants(given(drafters="lucky"), {})
    with pytest.raises(ConfigError, match="got 'medusa=x'"):
        widened.head_sources("mini", ["medusa=x"])


def test_heads_that_do_not_exist_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = widened.head_sources("mini-draft", ["dflash=runs/dflash/export"])
    assert found == {"dflash": "runs/dflash/export"}
    assert "there is no mtp head for mini-draft" in capsys.readouterr().err


def test_a_storage_is_measured_at_each_temperature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = mini.plain()
    monkeypatch.setattr(widened, "LLM", lambda *_, **options: plain.with_drafter("none", **options))
    asked = given(work=tmp_path, drafters="draft", temperatures="0,0.7", max_tokens=6, repeats=1, head_weights="int8",
                  shape="small", layers=9)  # fmt: skip
    cases = widened.first_turns([PromptCase(("Say hello.", "Again."), True, "chat", "")])
    results = list(widened.measured(asked, "int4", {}, cases))
    assert [result["temperature"] for result in results] == [0.0, 0.7]
    assert all(row["identical"] for result in results for row in result["rows"])
    assert results[0]["details"]["none"]["num_tokens"] <= 6  # one turn
    lines = widened.markdown(results[1]).splitlines()
    assert lines[1] == "mini widened to small with 9 layers, int4, T = 0.7: 1 prompts, 6 tokens"
    assert [line.split(" | ")[0] for line in lines[5:7]] == ["| none", "| draft"]


def test_a_folder_made_of_something_else_is_refused(tmp_path: Path) -> None:
    made = {"model": "mini", "heads": {"eagle": "mini-eagle"}, "limit": 24}
    for _ in range(2):
        widened.check_made(tmp_path / "work", made)
    with pytest.raises(ConfigError, match=r"made with other heads, limit .*give another folder"):
        widened.check_made(tmp_path / "work", {**made, "heads": {"eagle": "runs/eagle"}, "limit": 100})


def test_dflash_is_set_beside_eagle() -> None:
    figures = {"tokens_per_s": 9.0, "speedup_interval": None, "within_noise": False, "acceptance_length": 3.0,
               "identical": True}  # fmt: skip
    rows = [{"drafter": name, "speedup": gain, **figures} for name, gain in (("eagle", 2.0), ("dflash tree", 2.5))]
    detail = {"decode_speedup": 2.0, "decode_within_noise": False, "decode_interval": None}
    machine = {"cpu": "x", "cores": 2, "kernels": "k", "commit": "c", "date": "d"}
    result = {"rows": rows, "details": {row["drafter"]: detail for row in rows}, "model": "mini", "shape": "s",
              "layers": None, "weights": "bf16", "temperature": 0.0, "num_prompts": 2, "max_tokens": 3,
              "machine": machine, "command": "c"}  # fmt: skip
    assert "dflash tree over eagle: 1.25x" in widened.markdown(result).splitlines()
