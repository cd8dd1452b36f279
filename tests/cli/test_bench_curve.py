"""`forerun bench curve` and `prefill`: JSON fields, tables, bad input."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.factory import CASES, SIZES
from tests.support.scripts import run_script

CURVE = {
    "rows", "read_gb_per_s", "machine", "shape", "weights", "threads", "repeats", "weight_bytes", "recorded",
}  # fmt: skip
ROW = ["tokens", "context", "ms", "ratio", "gb_per_s"]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("bandwidth", "random_model"):
        monkeypatch.setattr(f"forerun.bench.{module}.buffer_bytes", lambda: 4 << 20)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2", **SIZES, **CASES["qwen2"][1]}))
    return str(path)


@pytest.mark.parametrize("weights", ["bf16", "gguf:Q4_0"])
def test_curve_json(run_json: Any, shape: str, weights: str) -> None:
    options = ("--tokens", "2,3", "--context", "4,32", "--repeats", "2", "--threads", "1")
    report = run_json("bench", "curve", "--shape", shape, "--weights", weights, *options)
    assert set(report) == CURVE and report["weights"] == weights.lower() and report["threads"] == 1
    assert all(list(row) == ROW and row["ms"] > 0 and row["ratio"] > 0 for row in report["rows"])
    assert [(row["context"], row["tokens"]) for row in report["rows"]] == [(4, 2), (4, 3), (32, 2), (32, 3)]
    assert report["read_gb_per_s"] > 0 and {"cpu", "kernels", "commit"} <= set(report["machine"])


def test_one_token_is_the_measure_of_the_others(run_json: Any, shape: str) -> None:
    rows = run_json("bench", "curve", "--shape", shape, "--tokens", "1,4", "--context", "8", "--repeats", "1")["rows"]
    assert rows[0]["ratio"] == 1.0 and rows[1]["ratio"] == pytest.approx(rows[1]["ms"] / rows[0]["ms"], rel=0.01)


def test_prefill_json(run_json: Any, shape: str) -> None:
    report = run_json("bench", "prefill", "--shape", shape, "--tokens", "8,40", "--chunk", "16", "--repeats", "1")
    assert set(report) == CURVE | {"chunk"} and report["chunk"] == 16
    for row, tokens in zip(report["rows"], (8, 40), strict=True):
        assert list(row) == ["tokens", "ms", "tokens_per_s"] and row["tokens"] == tokens
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3, rel=0.02)


def test_charts(run: Any, shape: str, tmp_path: Path) -> None:
    for command, options in (("curve", ("--tokens", "1,2", "--context", "4,8")), ("prefill", ("--tokens", "8,16"))):
        chart = tmp_path / f"{command}.svg"
        run("bench", command, "--shape", shape, "--repeats", "1", *options, "--chart", str(chart))
        text = chart.read_text("utf-8")
        assert text.count("<circle") == (4 if command == "curve" else 2)
        assert ("4 known tokens" in text) == (command == "curve")


@pytest.mark.parametrize("command", ["curve", "prefill"])
def test_a_chart_that_cannot_be_written_costs_no_figures(
    run: Any, shape: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"forerun.cli.curve._drawn_{command}", fail)
    options = ("--shape", shape, "--tokens", "4", "--repeats", "1", "--chart", str(tmp_path / "a.svg"))
    said = run("bench", command, *options, *(("--context", "8") if command == "curve" else ()), status=2)
    assert "tokens" in said.stdout and said.stderr.splitlines()[-1].startswith("error: output: No space left")


def test_tables(run: Any, shape: str) -> None:
    said = run("bench", "curve", "--shape", shape, "--tokens", "1,2", "--context", "8", "--repeats", "1")
    assert [line.split()[0] for line in said.stdout.splitlines()[1:4]] == ["tokens", "1", "2"]
    assert "the memory was read at" in said.stderr
    lines = run("bench", "prefill", "--shape", shape, "--tokens", "8", "--repeats", "1").stdout.splitlines()
    assert lines[1].split() == ["tokens", "ms", "tokens/s"] and lines[2].split()[0] == "8"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "gpt-9"], "no shape and no file 'gpt-9'"),
        (["--weights", "fp7"], "weights 'fp7' are unknown"),
        (["--tokens", "1,x"], "--tokens must be whole numbers"),
        (["--tokens", "65"], "the nodes of a draft tree"),
        (["--context", "63", "--tokens", "2"], "--context must be from 0 to 62"),
        (["--context", "-1"], "--context must be from 0 to 62"),
        (["--context", "--1"], "--context must be whole numbers"),
    ],
)
def test_bad_values_are_named(run: Any, shape: str, arguments: list[str], said: str) -> None:
    stderr = run("bench", "curve", "--shape", shape, "--tokens", "2", "--context", "8", *arguments, status=2).stderr
    assert stderr.startswith("error: ") and said in " ".join(stderr.split())


def test_a_gguf_file_is_no_shape(run: Any, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    said = run("bench", "curve", "--shape", str(tmp_path / "x.gguf"), status=2).stderr
    assert "x.gguf is a GGUF file; a shape is qwen2.5-0.5b" in " ".join(said.split())
    assert "config.json" in said


def test_what_does_not_fit_is_refused_before_it_is_made(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("built in spite of the memory")

    monkeypatch.setattr("forerun.bench.random_model.random_decoder", never)
    monkeypatch.setattr("forerun.models.memory.available_bytes", lambda: 10**9)
    said = run("bench", "curve", "--shape", "llama-3.2-1b", status=2).stderr
    assert "measuring llama-3.2-1b with bf16 weights needs about" in said and "1.00 GB are available" in said


def test_speed_says_that_a_model_was_widened(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "wide"
    run_script("widen", "mini-draft", str(out), "--layers", "3")
    options = ("--drafters", "none", "--limit", "1", "--max-tokens", "2", "--repeats", "1")
    assert "widened from mini-draft" in " ".join(run("bench", "speed", str(out), *options).stderr.split())
