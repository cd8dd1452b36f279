"""`forerun quantize` and `forerun perplexity`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.quantize import models

TEXT = "The cat sat on the mat, and the dog sat by the door. " * 40


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(models.tiny("llama", tmp_path / "model"))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def test_quantize_measures_before_and_after(run_json: Any, model: str, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    options = ["--bits", "8", "--group-size", "32", "--length", "32", "--sequences", "8", "--calibration", text]
    report = run_json("quantize", model, out, *options)
    before, after = report["before"], report["after"]
    assert report["num_sequences"] == 8 and report["method"] == "gptq"
    assert after["perplexity"] == pytest.approx(before["perplexity"], rel=0.05)
    assert after["file_bytes"] < before["file_bytes"] and after["weight_bytes"] < before["weight_bytes"]
    again = run_json("perplexity", out, "--text", text, "--length", "32", "--limit", "4")
    plain = run_json("perplexity", model, "--text", text, "--length", "32", "--limit", "4")
    assert again["num_tokens"] == 4 * 31 and again["num_bytes"] == plain["num_bytes"]
    assert again["perplexity"] == pytest.approx(plain["perplexity"], rel=0.05)
    assert again["bits_per_byte"] != plain["bits_per_byte"]


def test_awq_in_words(run: Any, model: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--method", "awq", "--asym", "--group-size", "16", "--length", "16", "--sequences", "4"]
    shown = run("quantize", model, str(out), *options, "--calibration", text, "--perplexity", text).stdout
    assert "before" in shown and "after" in shown and str(out) in " ".join(shown.split())
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    shown = run("perplexity", str(out), "--text", text, "--length", "16", "--limit", "2").stdout
    assert "bits per byte over 30 tokens (30 bytes)" in shown


def test_the_model_writes_its_own_text(run_json: Any, model: str, tmp_path: Path) -> None:
    options = ["--method", "gptq", "--group-size", "32", "--length", "16", "--sequences", "3"]
    report = run_json("quantize", model, str(tmp_path / "out"), *options)
    assert report["num_sequences"] == 3


@pytest.mark.parametrize(
    ("name", "options"),
    [("out", ["--method", "rtn", "--group-size", "32"]), ("out.gguf", ["--type", "Q8_0"])],
    ids=["rtn", "gguf"],
)
def test_rounding_loads_no_model(
    run_json: Any, model: str, tmp_path: Path, name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.models.loader.load_model", None)
    report = run_json("quantize", model, str(tmp_path / name), *options)
    assert set(report["before"]) == set(report["after"]) == {"file_bytes"}
    assert report["after"]["file_bytes"] < report["before"]["file_bytes"]


@pytest.mark.parametrize(("name", "options"), [("out", ["--method", "rtn"]), ("out.gguf", [])], ids=["rtn", "gguf"])
def test_rounding_calibrates_nothing(run: Any, text: str, tmp_path: Path, name: str, options: list[str]) -> None:
    said = run("quantize", "mini", str(tmp_path / name), *options, "--calibration", text, status=2).stderr
    assert "--calibration is of methods gptq and awq" in " ".join(said.split())


def test_gguf(run_json: Any, text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "mini.gguf")
    options = ["--format", "gguf", "--type", "Q8_0", "--perplexity", text, "--length", "64"]
    report = run_json("quantize", "mini", out, *options)
    before, after = report["before"], report["after"]
    assert set(report["types"]) == {"Q8_0", "F32"} and 8.5 <= report["bits_per_weight"] < 8.6
    assert report["type"] == "Q8_0" and after["file_bytes"] == Path(out).stat().st_size < before["file_bytes"]
    assert after["perplexity"] == pytest.approx(before["perplexity"], rel=0.02)


def test_types_that_rows_do_not_fit_are_said(run: Any, tmp_path: Path) -> None:
    """The rows of mini's hidden size, 384, are no whole blocks of 256; those of its inner size, 1024, are."""
    shown = run("quantize", "mini", str(tmp_path / "mini.gguf"), "--type", "q6_k")
    line = next(line for line in shown.stdout.splitlines() if line.endswith("bits a weight"))
    assert "MB Q8_0" in line and "MB Q6_K" in line and 6.6 < float(line.split()[-4]) < 8.5
    assert "matrices with other rows" in " ".join(shown.stderr.split())


def test_help_lists_the_types_that_can_be_written(run: Any) -> None:
    from forerun.quant.gguf_encode import FILE_TYPES

    shown = run("quantize", "--help").stdout
    assert all(name in shown for name in FILE_TYPES)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "gguf", "--bits", "4"], "--bits is no option of --format gguf"),
        (["--type", "Q8_0"], "--type is no option of --format hf"),
        (["--format", "onnx"], "--format must be one of hf, gguf"),
        (["--format", "gguf"], "must end in .gguf"),
        (["--format", "gguf", "--type", "Q9"], "--type must be one of F32, F16, Q4_0"),
        (["--format", "gguf", "--type", "IQ4_XS"], "llama.cpp's llama-quantize makes of an F16 file"),
        (["--method", "rtn", "--threads", "0"], "threads must be from 1 to"),
        (["--format", "gguf", "--type", "Q4KM"], "got 'Q4KM'; did you mean Q4_K_M"),
    ],
)
def test_options_of_the_other_format(run: Any, tmp_path: Path, options: list[str], said: str) -> None:
    assert said in " ".join(run("quantize", "mini", str(tmp_path / "out"), *options, status=2).stderr.split())


def test_a_name_that_ends_in_gguf_is_a_gguf_file(run: Any, run_json: Any, text: str, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    said = run("quantize", "mini", str(out), "--format", "hf", status=2).stderr
    assert "is the name of a GGUF file, but --format hf writes a folder" in " ".join(said.split())
    report = run_json("quantize", "mini", str(out), "--perplexity", text, "--length", "64")
    assert report["type"] == "Q4_K_M" and out.is_file()
    again = run("quantize", "mini", str(out), status=2).stderr
    assert "exists already" in " ".join(again.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "magic"], "method must be one of rtn, gptq, awq"),
        (["--bits", "5"], "bits must be one of"),
        (["--group-size", "64"], "which --group-size 64 does not divide"),
        (["--calibration", "missing.txt", "--group-size", "32"], "cannot read the text file missing.txt"),
        (["--length", "65", "--group-size", "32"], "--length must be at most 64"),
    ],
)
def test_errors(run: Any, model: str, text: str, tmp_path: Path, options: list[str], said: str) -> None:
    given = options if "--calibration" in options else [*options, "--calibration", text]
    result = run("quantize", model, str(tmp_path / "out"), *given, status=2)
    assert result.stderr.startswith("error: ") and said in " ".join(result.stderr.split())


def test_off_a_terminal_progress_is_lines(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs that take longer than ten seconds."""
    assert "tensors:" not in run("quantize", "mini", str(tmp_path / "quick.gguf"), "--type", "Q8_0").stderr
    monkeypatch.setattr("forerun.progress.SECONDS_A_LINE", 0.0)
    said = run("quantize", "mini", str(tmp_path / "slow.gguf"), "--type", "Q8_0").stderr.splitlines()
    lines = [line for line in said if line.startswith("tensors: ")]
    assert len(lines) > 10 and lines[0].startswith("tensors: 1 of ") and lines[0].endswith(" left")


def test_a_file_is_no_folder(run: Any, text: str) -> None:
    said = run("quantize", "mini", text, "--method", "rtn", status=2).stderr
    assert "text.txt is a file, but --format hf writes a folder" in " ".join(said.split())


def test_a_gguf_file_is_not_quantized_again(run: Any, tmp_path: Path) -> None:
    said = run("quantize", str(tmp_path / "x.gguf"), str(tmp_path / "y.gguf"), status=2).stderr
    assert "is a GGUF file, whose weights were rounded already" in said
