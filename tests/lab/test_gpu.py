"""The script for GPUs: parts of its rehearsal under Triton's interpreter; verdicts on given figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gpu_report
from gpu_watch import Noted, read_state, supervise

LAB = Path(__file__).resolve().parents[2] / "lab"
# Three parts are tested elsewhere: "speed" and "peers" below, on the CPU's kernels, as engines take minutes under the
# interpreter; "compiling" below and in test_gpu_compile.py.
PARTS = ["roofline", "curve", "attention", "recurrent", "check", "products"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(LAB / "gpu.py"), *arguments]
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
    assert all(row["as_reference"] and row["row_has_its_bits"] for row in parts["recurrent"]["rows"])
    assert [row["rows"] for row in parts["recurrent"]["rows"]] == ["known", "chain", "tree"] * 2
    assert all(row["unsplit_has_the_bits"] and row["as_reference"] for row in parts["attention"]["rows"])
    assert parts["check"]["rows"] == [{"PASSED": 2}]
    assert [line["found"] for line in result["lines"] if line["what"].startswith(("bf16", "4-bit", "EAGLE"))] == [
        None
    ] * 7
    assert result["machine"]["triton"] and "gpu_at_end" in result
    assert "not measured" in next(tmp_path.glob("*.md")).read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_and_names_the_rehearsal() -> None:
    done = run("--parts", "roofline")
    assert done.returncode == 1 and "sees no CUDA device" in done.stderr and "--rehearse" in done.stderr


def test_all_parts_and_one_that_is_late_take_less_than_ten_minutes() -> None:
    pytest.importorskip("triton")
    import gpu

    assert sum(gpu.SECONDS.values()) <= 455  # of 8 minutes; the rest is starting, and the case that ends late
    assert sum(gpu.SECONDS.values()) + gpu.GRACE_S <= 540
    assert list(gpu.SECONDS) == list(gpu.actions())


def test_unknown_parts_and_a_rehearsal_among_the_results_are_refused() -> None:
    assert "there is no curves; choose from compiling" in run("--parts", "roofline,curves").stderr
    assert "give --out" in run("--rehearse").stderr


def test_lines_compare_what_was_found() -> None:
    row = {"shape": "llama-3.1-8b", "weights": "bf16", "context": 1024}
    curve = [{**row, "tokens": 1, "share": 0.7, "ratio": 1.0}, {**row, "tokens": 16, "share": 0.7, "ratio": 1.1}]
    speed = [{"drafter": "eagle=x", "model": "widened", "widened_to": "llama-3.1-8b", "batch": 1, "temperature": 0.0,
              "is_long": False, "speedup": 3.0, "identical": False}]  # fmt: skip
    parts = {name: {"rows": rows, "errors": {}} for name, rows in (("curve", curve), ("speed", speed))}
    told = {line["what"]: (line["found"], line["holds"]) for line in gpu_report.lines(parts)}
    assert told["bf16, 8B shape, M = 1: share of copy bandwidth"] == (0.7, False)
    assert told["bf16, 8B shape: M = 16 over M = 1"] == (1.1, True)
    assert told["EAGLE-3, widened to 8B, batch 1: times plain"] == (3.0, True)
    assert told["EAGLE-3, widened to 8B, batch 32: times plain"] == (None, None)
    assert told["answers that are not plain decoding's"] == (1, False)
    assert told["rows with other bits in a batch"] == (None, None)
    assert len(gpu_report.wrong(parts)) == 1 and "identical" in gpu_report.wrong(parts)[0]


def noted(found: dict[str, Any]) -> Any:
    found |= {"rows": [], "left_out": [], "errors": {}}
    return Noted(found, lambda: found.update(kept=found.get("kept", 0) + 1))


def test_cases_that_fail_or_come_too_late_are_named() -> None:
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


@pytest.mark.slow
def test_engines_and_their_peers_on_the_kernels_there_are(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    import gpu_models
    from forerun.bench.drafters import needing_nothing
    from forerun.kernels.select import select_kernels
    from gpu_setting import Bench, BenchSizes, Due, timer
    from gpu_widen import HEADS, WideningProcess

    kernels = select_kernels("auto", threads=1)
    if kernels.name == "reference":
        pytest.skip("without kernels it takes minutes")
    sizes = BenchSizes(("llama-3.2-1b",), (8,), batches=(2,), prompts=2, peer_prompts=1, runs=1, passes=2,
                  temperatures=(0.0,), max_tokens=8, max_model_len=256, long_model_len=320)  # fmt: skip
    widening, device = WideningProcess(tmp_path), torch.device("cpu")
    bench = Bench(kernels, sizes, tmp_path, "mini", "mini-draft", timer(device), 1e10, False, widening, "auto")
    widening.begin("mini", HEADS, (), device)
    parts: dict[str, dict[str, Any]] = {"speed": {}, "peers": {}}
    for name, part in parts.items():
        getattr(gpu_models, name)(bench, Due(600.0), noted(part))
        assert not part["errors"] and not part["left_out"]
    rows = parts["speed"]["rows"]
    cases = [(row["temperature"], row["model"], row["batch"], row["is_long"]) for row in rows
             if row["drafter"] == "none"]  # fmt: skip
    assert cases == [(0.0, "widened", 2, False), (0.0, "mini", 2, False), (0.0, "mini", 2, True)]
    assert all(row["identical"] and not row["num_failed"] for row in rows) and gpu_report.wrong(parts) == []
    drafters = {row["drafter"].partition("=")[0] for row in rows}
    assert drafters == {"none", *HEADS, "draft", *needing_nothing(), "portfolio", "fixed eagle"}
    assert max(row["acceptance_length"] for row in rows) > 1.5
    found = {(row["model"], row["method"]): row["tokens_per_s"] for row in parts["peers"]["rows"]}
    assert found.keys() == set(product(("widened", "mini"), ("generate", "assisted"))) and min(found.values()) > 0
    told = {line["what"]: line["found"] for line in gpu_report.lines(parts)}
    assert told["answers that are not plain decoding's"] == 0
    assert told["EAGLE-3, widened to 8B, batch 1: times plain"] is None  # it was widened to another size


def test_passes_in_a_row_are_told_one_by_one() -> None:
    pytest.importorskip("triton")
    from forerun.bench.curve import measure, rows
    from gpu_models import InARow

    class Fake:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.runner = self.cache = self
            self.seen: list[tuple[int, int]] = []

        def chain(self, *case: int) -> Any:
            return case

        def enqueue(self, batch: Any) -> None:
            self.seen.append(batch)

        def bytes_read(self, context: int, tokens: int) -> int:
            return 6_000_000_000

    passes: Any = Fake()
    turns = InARow(passes, 3)
    seconds = iter(range(0, 100, 6))
    measured = measure(turns, [1], [8], 2, lambda: 1.0, clock=lambda: next(seconds))
    assert passes.seen == [(8, 1)] * 9  # one that does not count and two, three passes each
    assert rows(turns.each(measured), turns, [1]) == [
        {"tokens": 1, "context": 8, "ms": 2000.0, "ratio": 1.0, "gb_per_s": 3.0}
    ]


def test_cases_that_something_must_be_shown_for_come_first() -> None:
    pytest.importorskip("triton")
    from gpu_models import peer_cases, speed_cases
    from gpu_setting import ON_GPU

    cases = speed_cases(ON_GPU)
    assert cases[:2] == [("widened", 0.0, 1, False), ("widened", 0.0, 32, False)] and len(set(cases)) == 14
    methods = peer_cases(ON_GPU)
    assert [case[0] for case in methods[:4]] == ["widened", "widened", "mini", "mini"] and len(set(methods)) == 8


def test_what_was_not_widened_is_named_and_what_was_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from gpu_widen import WideningProcess

    device = torch.device("cpu")
    first = WideningProcess(tmp_path)
    first.begin("mini-draft", ("none",), (), device)
    folder, heads, errors = first.result()
    assert (folder / "config.json").exists() and heads == {} and "mini-none" in errors["none"]
    config = json.loads((first.shape / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text())
    again = WideningProcess(tmp_path)  # as a run does that was started again
    again.begin("mini-draft", ("none",), (), device)
    assert again.result(timeout_s=0.0).folder == folder  # no process has anything left to do
    silent = WideningProcess(tmp_path / "none")
    with pytest.raises(RuntimeError, match="not widened: its process said nothing"):
        silent.result()


def test_what_a_gpu_would_refuse_is_an_error_of_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    import gpu_kernels
    from gpu_setting import ON_GPU, Due

    fine = {"kernel": "a", "registers": 64, "stack": 0, "shared": 512, "problems": []}
    asked: list[Any] = []

    def ahead(shapes: Any, *others: Any) -> list[dict[str, Any]]:
        asked.extend(shapes)
        return [fine, {"kernel": "b", "error": "ptxas", "stack": 8, "problems": ["error: ptxas", "too much"]}]

    monkeypatch.setattr(gpu_kernels, "ahead", ahead)
    bench: Any = SimpleNamespace(small="mini", draft="mini-draft", sizes=ON_GPU, device=torch.device("cpu"),
                                 widening=SimpleNamespace(shape=tmp_path))  # fmt: skip
    found: dict[str, Any] = {}
    gpu_kernels.compiling(bench, Due(9.0), noted(found))
    assert (
        asked[:2] == list(ON_GPU.shapes) and len(asked) == 6
    )  # two models, a hybrid, mini and its draft, and the widened one
    assert found["rows"] == [{"kernels": 2, "spilling": 1, "registers": 64, "shared": 512}]
    assert found["errors"] == {"b": "error: ptxas; too much"}


def test_what_pytest_says_is_counted() -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest's own process keeps its ways to end
    (tmp_path / "worker.py").write_text(f"import sys\nsys.path.insert(0, {str(LAB)!r})\n{WORKER}")
    state = tmp_path / "state.json"
    assert supervise([sys.executable, str(tmp_path / "worker.py"), str(state)], state) == 1
    parts = read_state(state)["parts"]
    assert list(parts) == ["first", "crashes", "hangs", "last"] and all(part["rows"] for part in parts.values())
    assert [list(part["errors"]) for part in parts.values()] == [[], ["crashes"], ["hangs"], []]
    assert "status -6" in parts["crashes"]["errors"]["crashes"] and "too long" in parts["hangs"]["errors"]["hangs"]


def test_a_run_that_is_told_to_end_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(f"import sys\nsys.path.insert(0, {str(LAB)!r})\n{WORKER}")
    (tmp_path / "state.json").write_text('{"parts": {"first": {}, "crashes": {}}}')  # what is left hangs
    (tmp_path / "watch.py").write_text(
        f"import sys\nsys.path.insert(0, {str(LAB)!r})\nfrom pathlib import Path\n"
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
