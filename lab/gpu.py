"""forerun on an NVIDIA GPU: checks every kernel, measures kernels, passes and drafters; one JSON and pictures.

    python lab/gpu.py [--parts roofline,curve,...] [--out FOLDER]

Takes less than 8 minutes, no network and no compiler: a part stops asking for more cases when its time is up and names
what it left out. Writes benchmarks/results/DATE-gpu-NAME.json and .md after every case and pictures after every part,
so a run that is stopped keeps what it had; a part that crashes or hangs is named, and the others go on. The parts, what
matters most first:

* compiling: these models' kernels, on all cores; what a GPU would refuse is named (`gpu_compile.py` needs none);
* roofline: copy bandwidth and matmul rate, what everything else is compared with;
* curve: whole passes at the 1B and 8B shapes and at Qwen3.5-4B's, bf16 and 4 bits, as `forerun bench curve` has them;
* attention: one sequence, 1k to 128k tokens, splits side by side and one after the other;
* recurrent: convolutions, the gated delta rule and Mamba-2 of published layers over known rows, chains and trees;
* speed: every drafter against plain decoding on mini widened to the 8B shape (a process of its own writes that model
  meanwhile) and on mini, batches of 1, 32 and 8;
* check: the tests of the Triton kernels on the GPU, every op against the reference, row invariance included;
* products: every matrix of these shapes, 1 to 64 rows, by CUDA events, caches cold; one matrix in every GGUF type, with
  the bits a weight takes on the GPU;
* peers: transformers' `generate` and assisted generation on the same models.

Ends with status 1 if a row had other bits in a batch, an op other numbers than the reference, a drafter other tokens
than plain decoding, or a case failed, be it for want of memory. `--rehearse` runs every part at tiny sizes on the CPU,
under Triton's interpreter: its figures mean nothing, but everything in here is run.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_watch import Found, Noted, end_with_parent, read_state, supervise, write_state

if TYPE_CHECKING:
    from gpu_setting import Bench

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
SOURCES = Path(__file__).resolve().parents[1] / "src"
SECONDS = {
    "compiling": 40, "roofline": 5, "curve": 95, "attention": 25, "recurrent": 10, "speed": 140, "check": 65,
    "products": 45, "peers": 30,
}  # fmt: skip
GRACE_S = 60  # beyond its time a part is given so long for the case it is at, then it is stopped
VERSIONS = ("torch", "triton", "transformers", "numpy")
NATIVE = "forerun.kernels.cpu._native"


def main() -> None:
    """Watch over a process that does the work, or be that process."""
    given = options()
    find_package()
    if given.state is not None:
        raise SystemExit(work(given))
    with tempfile.TemporaryDirectory(prefix="forerun-gpu-", dir=given.folder) as name:
        state = Path(name) / "state.json"
        arguments = [*sys.argv[1:], "--folder", name, "--state", str(state)]
        raise SystemExit(supervise([sys.executable, __file__, *arguments], state))


def find_package() -> None:
    """Where forerun is not installed, the sources beside this file do, for processes started from here too."""
    if find_spec("forerun") is None:
        sys.path.insert(0, str(SOURCES))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Checks and measures forerun on an NVIDIA GPU.")
    parser.add_argument("--parts", default=",".join(SECONDS), help="by commas: %(default)s")
    parser.add_argument("--out", type=Path, help="a folder; benchmarks/results unless given")
    parser.add_argument("--folder", help="where widened models are written meanwhile (up to 20 GB)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU under Triton's interpreter")
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)  # of the process that does the work
    given = parser.parse_args()
    given.parts = [part for part in given.parts.split(",") if part]
    unknown = [part for part in given.parts if part not in SECONDS]
    if unknown or not given.parts:
        parser.error(f"--parts: there is no {', '.join(unknown) or 'part'}; choose from {', '.join(SECONDS)}")
    if given.rehearse and given.out is None:
        parser.error("--rehearse: give --out, so that its figures do not lie among the results")
    return given


def work(given: argparse.Namespace) -> int:
    """All parts that are left, in this process -> its status."""
    end_with_parent()
    if given.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before everything that does
        os.environ["OPENBLAS_CORETYPE"] = "Nehalem"  # with AVX2 a row's bits depend on its place
        from quick_interpreter import quicken

        quicken()
    import torch

    from forerun.errors import ForerunError
    from forerun.kernels.device import cuda_device
    from forerun.kernels.select import select_kernels

    try:
        device = torch.device("cpu") if given.rehearse else cuda_device()
        kernels = select_kernels("triton", device=device.type)
    except ForerunError as error:
        raise SystemExit(f"{error}. Without a GPU `--rehearse` tries the script out on the CPU.") from error
    bench = prepared(kernels, Path(given.folder), given.rehearse)
    if {"speed", "peers"} & set(given.parts):
        begin_widening(bench)
    return GpuRun(bench, given).all_parts()


def prepared(kernels: Any, folder: Path, rehearses: bool) -> Bench:
    """The setting of a run; the bandwidth is measured first, everything is compared with it."""
    from gpu_kernels import bandwidth
    from gpu_setting import ON_GPU, Bench, rehearsal, timer, tiny_model
    from gpu_widen import WideningProcess

    small = str(tiny_model(folder / "tiny")) if rehearses else "mini"
    sizes = rehearsal(Path(small)) if rehearses else ON_GPU
    seconds = timer(kernels.device)
    draft = small if rehearses else "mini-draft"
    speed = bandwidth(kernels.device, sizes, seconds)
    return Bench(kernels, sizes, folder, small, draft, seconds, speed, rehearses, WideningProcess(folder))


def begin_widening(bench: Bench) -> None:
    """Start what takes a core most of a minute, so that it is there when engines run on it."""
    from gpu_widen import HEADS

    heads, shapes = ((), ()) if bench.rehearses else (HEADS, bench.sizes.shapes)
    try:
        bench.widening.begin(bench.small, heads, shapes, bench.device)
    except Exception:  # costs the parts that wait for it, which name it, and no others
        traceback.print_exc()


class GpuRun:
    """The parts in order, and what they have found so far, kept after every case."""

    def __init__(self, bench: Bench, given: argparse.Namespace) -> None:
        from forerun.bench.machine import describe_machine

        self._bench, self._given = bench, given
        self._state = read_state(given.state) or {"parts": {}, "began": time.time(), "gpu_at_start": nvidia_smi()}
        self._machine = {**describe_machine(bench.kernels), **versions()}

    def all_parts(self) -> int:
        """Those that no process before this one has begun -> 0, or 1 if something is wrong."""
        from gpu_report import markdown, wrong

        parts = self._state["parts"]
        due_s = 0.0  # what a part leaves of its time is the next one's
        for part in (part for part in SECONDS if part in self._given.parts):
            due_s += 3600 if self._bench.rehearses else SECONDS[part]
            if part not in parts:
                self._one(part, self._state["began"] + due_s - time.time())
        self._state |= {"running": None, "gpu_at_end": nvidia_smi()}
        self._keep(pictures=True)
        print(markdown(self._result()))
        print(f"\nkept in {self._path}", file=sys.stderr)
        for what in wrong(parts):
            print(f"WRONG {what}", file=sys.stderr)
        return 1 if wrong(parts) else 0

    def _one(self, part: str, left_s: float) -> None:
        from gpu_setting import Due

        began = time.time()
        self._state["running"] = {"part": part, "until": began + max(left_s, 0.0) + GRACE_S}
        found: Found = {"rows": [], "left_out": [], "errors": {}}
        self._state["parts"][part] = found
        self._keep()
        self._attempt(part, Due(left_s), found)
        found["seconds"] = round(time.time() - began, 1)
        print(f"{part}: {found['seconds']} s, {len(found['rows'])} rows", file=sys.stderr, flush=True)
        self._state["running"] = None
        self._keep(pictures=True)
        self._let_go(part, found)

    def _attempt(self, part: str, due: Any, found: Found) -> None:
        """A part; if it fails as a whole, that is what was found, and the others go on."""
        try:
            actions()[part](self._bench, due, Noted(found, self._keep))
        except Exception:  # reported, and the run ends with status 1
            found["errors"][part] = traceback.format_exc()[-2000:]

    def _let_go(self, part: str, found: Found) -> None:
        """Give memory back; where the GPU answers no more, this process ends and the next goes on."""
        import torch

        gc.collect()
        try:
            torch.cuda.empty_cache()
            torch.ones(1, device=self._bench.device).sum().item()
        except Exception as error:
            self._state["running"] = {"part": part, "until": 0}
            found["errors"]["gpu"] = f"{type(error).__name__}: {error}"[:2000]
            self._keep()
            os._exit(3)

    def _keep(self, pictures: bool = False) -> None:
        """Write the state and the results; what goes wrong in writing costs no figures."""
        from gpu_report import draw, keep

        write_state(self._state, self._given.state)
        try:
            keep(self._result(), self._path)
            if pictures:
                draw(self._state["parts"], self._path)
        except Exception:
            traceback.print_exc()

    @property
    def _name(self) -> str:
        import torch

        return "rehearsal" if self._bench.rehearses else torch.cuda.get_device_name(self._bench.device)

    @property
    def _path(self) -> Path:
        return (self._given.out or RESULTS) / f"{self._machine['date']}-gpu-{self._name.replace(' ', '-')}.json"

    def _result(self) -> dict[str, Any]:
        from gpu_report import lines

        parts = self._state["parts"]
        command = ["python lab/gpu.py", *(["--rehearse"] if self._bench.rehearses else [])]
        return {
            "command": " ".join([*command, "--parts", ",".join(self._given.parts)]),
            "gpu": self._name,
            "rehearsal": self._bench.rehearses,
            "parts": parts,
            "lines": lines(parts),
            "machine": self._machine,
            **{name: self._state.get(name) for name in ("gpu_at_start", "gpu_at_end")},
        }


def actions() -> dict[str, Callable[..., None]]:
    """Every part by its name."""
    import gpu_kernels
    import gpu_models
    import gpu_recurrent

    return {action.__name__: action for action in (
        gpu_kernels.compiling, gpu_kernels.roofline, gpu_models.curve, gpu_kernels.attention, gpu_recurrent.recurrent,
        gpu_models.speed, gpu_kernels.check, gpu_kernels.products, gpu_models.peers,
    )}  # fmt: skip


def versions() -> dict[str, str | None]:
    """Of what figures depend on beside forerun."""
    import torch

    found: dict[str, str | None] = {"cuda": torch.version.cuda}
    found["host_kernels"] = "C++" if find_spec(NATIVE) else "none: drafts are looked up in Python"
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def nvidia_smi() -> str | None:
    """What nvidia-smi prints: driver, clocks, temperature, who else is on the GPU; None where there is none."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


if __name__ == "__main__":
    main()
