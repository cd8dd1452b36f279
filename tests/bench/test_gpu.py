"""The script for cards: parts of its rehearsal under Triton's interpreter; verdicts on given figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Of the rehearsal "check" runs tests/kernels/triton once more, "speed" and "peers" take minutes under the interpreter.
PARTS = ["compiling", "card", "curve", "attention", "products"]


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
    assert result["machine"]["triton"] and "card_at_end" in result
    assert "not measured" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_refuses_and_names_the_rehearsal() -> None:
    done = run("--parts", "card")
    assert done.returncode == 1 and "sees no CUDA device" in done.stderr and "--rehearse" in done.stderr


def test_unknown_parts_and_a_rehearsal_among_the_results_are_refused() -> None:
    assert "there is no curves; choose from compiling" in run("--parts", "card,curves").stderr
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


def noted(found: dict[str, Any]) -> Any:
    from gpu_watch import Noted

    found |= {"rows": [], "left_out": [], "errors": {}}
    return Noted(found, lambda: found.update(kept=found.get("kept", 0) + 1))


def test_cases_that_fail_or_come_too_late_are_named(report: Any) -> None:
    pytest.importorskip("triton")
    from gpu_setting import Due, in_time

    def measure(case: str) -> Iterator[dict[str, Any]]:
        yield {"case": case}
        if case == "b":
            raise KeyError("gone")

    now, found = iter((0.0, 1.0, 2.0, 9.0)), dict[str, Any]()
    in_time(["a", "b", "c"], Due(5.0, lambda: next(now)), noted(found), str, measure)
    assert found["rows"] == [{"case": "a"}, {"case": "b"}] and found["left_out"] == ["c"]
    assert list(found["errors"]) == ["b"] and "KeyError: 'gone'" in found["errors"]["b"]
    assert found["kept"] == 3  # after every row and error


def test_what_pytest_says_is_counted(report: Any) -> None:
    pytest.importorskip("triton")
    from gpu_kernels import verdicts

    output = "tests/a.py::test_x PASSED [ 50%]\n[gw1] [100%] FAILED tests/a.py::test_y\n1 passed"
    assert verdicts(output, 1) == ({"PASSED": 1, "FAILED": 1}, False, output)
    assert verdicts("tests/a.py::test_x PASSED [ 50%]", None) == ({"PASSED": 1}, True, "")


WORKER = """
import os, sys, time
from pathlib import Path
from gpu_watch import end_with_parent, read_state, write_state
end_with_parent()
path = Path(sys.argv[1])
state = read_state(path) or {"parts": {}}
for part in ("first", "crashes", "hangs", "last"):
    if part not in state["parts"]:
        state["running"] = {"part": part, "until": time.time() + (0.2 if part == "hangs" else 60)}
        state["parts"][part] = {"rows": [part], "left_out": [], "errors": {}}
        write_state(state, path)
        if part == "crashes":
            os.abort()
        if part == "hangs":
            time.sleep(600)
state["running"] = None
write_state(state, path)
"""


def test_a_part_that_crashes_or_hangs_costs_its_own_figures_only(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_watch import read_state, supervise

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own process keeps its ways to end
    (tmp_path / "worker.py").write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{WORKER}")
    state = tmp_path / "state.json"
    assert supervise([sys.executable, str(tmp_path / "worker.py"), str(state)], state) == 1
    parts = read_state(state)["parts"]
    assert list(parts) == ["first", "crashes", "hangs", "last"] and all(part["rows"] for part in parts.values())
    assert [list(part["errors"]) for part in parts.values()] == [[], ["crashes"], ["hangs"], []]
    assert "status -6" in parts["crashes"]["errors"]["crashes"] and "too long" in parts["hangs"]["errors"]["hangs"]


def test_a_run_that_is_told_to_end_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\n{WORKER}")
    (tmp_path / "state.json").write_text('{"parts": {"first": {}, "crashes": {}}}')  # what is left hangs
    (tmp_path / "watch.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nfrom pathlib import Path\n"
        "import gpu_watch\ngpu_watch.time.time = lambda: 0.0\n"  # never overdue
        "command = [sys.executable, sys.argv[1], sys.argv[2]]\ngpu_watch.supervise(command, Path(sys.argv[2]))\n"
    )
    files = [str(tmp_path / name) for name in ("watch.py", "worker.py", "state.json")]
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([sys.executable, *files], stdout=subprocess.PIPE) as watch:
            wait_until(lambda: "hangs" in Path(files[2]).read_text())
            watch.send_signal(ending)
            assert watch.stdout is not None and watch.stdout.read() == b""  # ends when nobody holds it any more
        Path(files[2]).write_text('{"parts": {"first": {}, "crashes": {}}}')


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to that")
