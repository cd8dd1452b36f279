"""`python lab/widen.py`: JSON fields, tables, bad input, for models and heads."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.scripts import run_script

FIELDS = {"model", "folder", "sizes", "sizes_before", "weight_bytes", "num_parameters", "same_bits"}


def test_a_model_as_json_and_as_a_table(tmp_path: Path) -> None:
    out = tmp_path / "wide"
    arguments = ("mini-draft", str(out), "--hidden-size", "512", "--layers", "3", "--json")
    report = json.loads(run_script("widen", *arguments).stdout)
    assert set(report) == FIELDS and report["same_bits"] is True
    assert report["sizes"] == {**report["sizes_before"], "hidden_size": 512, "num_layers": 3}
    said = run_script("widen", "mini-draft", str(tmp_path / "other"), "--ffn-size", "400", "--hidden-size", "192")
    assert "feed-forward size" in said.stdout and "rounding differs" in said.stderr
    error = run_script("widen", "mini-draft", str(out), status=2).stderr
    assert error.startswith("error: ") and "exists already" in error


def test_a_head_for_the_widened_model(tmp_path: Path) -> None:
    model, head = str(tmp_path / "wide"), str(tmp_path / "head")
    run_script("widen", "mini", model, "--layers", "9")
    refused = run_script("widen", "mini-mtp", head, "--for", model, "--layers", "9", status=2).stderr
    assert "give --for or sizes, not both" in refused
    assert "mtp head" in run_script("widen", "mini-mtp", head, "--for", model).stdout
    assert (Path(head) / "config.json").is_file()
    assert "no widened model" in run_script("widen", "mini-mtp", head + "2", "--for", "mini", status=2).stderr
