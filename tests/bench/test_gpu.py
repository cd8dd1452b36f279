"""The script for cards: parts of its rehearsal under Triton's interpreter; verdicts on given figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Of the rehearsal "check" runs tests/kernels/triton once more, "speed" and "peers" take minutes under the interpreter.
PARTS = ["card", "products", "attention", "curve"]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_report

    return gpu_report


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_the_rehearsal_runs_and_finds_nothing_wrong(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run("--rehearse", "--parts", ",".join(PARTS), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(next(tmp_path.glob("*-gpu-rehearsal.json")).read_text())
    parts = result["parts"]
    assert list(parts) == PARTS and result["rehearsal"] is True
    assert all(part["rows"] and not part["errors"] and not part["left_out"] for part in parts.values())
    assert all(row["as_reference"] and row["row_has_its_bits"] for row in parts["products"]["rows"])
    assert all(row["unsplit_has_the_bits"] and row["as_reference"] for row in parts["attention"]["rows"])
    assert [line["found"] for line in result["lines"] if line["what"].startswith(("bf16", "4-bit", "EAGLE"))] == [
        None
    ] * 7
    assert "not measured" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_refuses_and_names_the_rehearsal() -> None:
    done = run("--parts", "card")
    assert done.returncode == 1 and "sees no CUDA device" in done.stderr and "--rehearse" in done.stderr


def test_unknown_parts_and_a_rehearsal_among_the_results_are_refused() -> None:
    assert "there is no curves; choose from check" in run("--parts", "card,curves").stderr
    assert "give --out" in run("--rehearse").stderr


def test_lines_compare_what_was_found(report: Any) -> None:
    row = {"shape": "llama-3.1-8b", "weights": "bf16", "context": 1024}
    curve = [{**row, "tokens": 1, "share": 0.7, "ratio": 1.0}, {**row, "tokens": 16, "share": 0.7, "ratio": 1.1}]
    speed = [{"drafter": "eagle=x", "model": "widened", "widened_to": "llama-3.1-8b", "batch": 1, "temperature": 0.0,
              "speedup": 3.0, "identical": False}]  # fmt: skip
    parts = {name: {"rows": rows, "errors": {}} for name, rows in (("curve", curve), ("speed", speed))}
    told = {line["what"]: (line["found"], line["holds"]) for line in report.lines(parts)}
    assert told["bf16, 8B shape, M = 1: share of copy bandwidth"] == (0.7, False)
    assert told["bf16, 8B shape: M = 16 over M = 1"] == (1.1, True)
    assert told["EAGLE-3, widened to 8B, batch 1: times plain"] == (3.0, True)
    assert told["EAGLE-3, widened to 8B, batch 32: times plain"] == (None, None)
    assert told["answers that are not plain decoding's"] == (1, False)
    assert told["rows with other bits in a batch"] == (None, None)
    assert len(report.wrong(parts)) == 1 and "identical" in report.wrong(parts)[0]


def test_cases_that_fail_or_come_too_late_are_named(report: Any) -> None:
    pytest.importorskip("triton")
    from gpu_setting import Due, in_time

    now = iter((0.0, 1.0, 2.0, 9.0))
    due = Due(5.0, lambda: next(now))
    found = in_time(["a", "b", "c"], due, str, lambda case: [{"case": case}] if case == "a" else [{}["gone"]])
    assert found["rows"] == [{"case": "a"}] and found["left_out"] == ["c"] and "KeyError" in found["errors"]["b"]


def test_what_pytest_says_is_counted(report: Any) -> None:
    pytest.importorskip("triton")
    from gpu_kernels import verdicts

    output = "tests/a.py::test_x PASSED [ 50%]\n[gw1] [100%] FAILED tests/a.py::test_y\n1 passed"
    assert verdicts(output, 1)["rows"] == [{"PASSED": 1, "FAILED": 1}] and "pytest" in verdicts(output, 1)["errors"]
    assert verdicts("tests/a.py::test_x PASSED [ 50%]", None)["left_out"]
