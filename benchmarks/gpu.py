"""forerun on an NVIDIA card: checks every kernel, measures kernels, passes and drafters; one JSON and pictures.

    python benchmarks/gpu.py [--parts check,card,...] [--out FOLDER]

Takes less than 8 minutes, no network and no compiler: a part stops asking for more cases when its time is up and names
what it left out. Writes benchmarks/results/DATE-gpu-CARD.json, .md and .png after every part, so a run that is stopped
keeps what it had. The parts:

* check: the tests of the Triton kernels on the card, every op against the reference, row invariance included;
* card: copy bandwidth and matmul rate, what everything else is compared with;
* products: every matrix of the 1B and 8B shapes, bf16 and 4 bits, 1 to 64 rows, by CUDA events, caches cold;
* attention: one sequence, 1k to 128k tokens, splits side by side and one after the other;
* curve: whole passes at these shapes, as `forerun bench curve` has them;
* speed: every drafter against plain decoding on mini and on mini widened to the 8B shape, batches of 1, 8 and 32;
* peers: transformers' `generate` and assisted generation on the same models.

Ends with status 1 if a row had other bits in a batch, an op other numbers than the reference, a drafter other tokens
than plain decoding, or a case failed, be it for want of memory. `--rehearse` runs every part at tiny sizes on the CPU,
under Triton's interpreter: its figures mean nothing, but everything in here is run.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from forerun.bench.machine import describe_machine
from forerun.errors import ForerunError
from forerun.kernels.device import cuda_device
from forerun.kernels.select import select_kernels

if TYPE_CHECKING:
    from gpu_setting import Bench, Due

RESULTS = Path(__file__).with_name("results")
SECONDS = {"check": 90, "card": 5, "products": 60, "attention": 30, "curve": 110, "speed": 110, "peers": 35}


def main() -> None:
    """Run the parts, keep what they found after each."""
    given = options()
    if given.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, so before everything that does
    try:
        device = torch.device("cpu") if given.rehearse else cuda_device()
        kernels = select_kernels("triton", device=device.type)
    except ForerunError as error:
        raise SystemExit(f"{error}. Without a card `--rehearse` tries the script out on the CPU.") from error
    with tempfile.TemporaryDirectory(prefix="forerun-gpu-", dir=given.folder) as folder:
        status = run(prepared(kernels, Path(folder), given.rehearse), given)
    raise SystemExit(status)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Checks and measures forerun on an NVIDIA card.")
    parser.add_argument("--parts", default=",".join(SECONDS), help="by commas: %(default)s")
    parser.add_argument("--out", type=Path, help="a folder; benchmarks/results unless given")
    parser.add_argument("--folder", help="where widened models are written meanwhile (up to 20 GB)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU under Triton's interpreter")
    given = parser.parse_args()
    given.parts = [part for part in given.parts.split(",") if part]
    unknown = [part for part in given.parts if part not in SECONDS]
    if unknown or not given.parts:
        parser.error(f"--parts: there is no {', '.join(unknown) or 'part'}; choose from {', '.join(SECONDS)}")
    if given.rehearse and given.out is None:
        parser.error("--rehearse: give --out, so that its figures do not lie among the results")
    return given


def prepared(kernels: Any, folder: Path, rehearses: bool) -> Bench:
    """The setting of a run; the bandwidth is measured first, everything is compared with it."""
    from gpu_kernels import bandwidth
    from gpu_setting import CARD, Bench, rehearsal, timer, tiny_model

    small = str(tiny_model(folder / "tiny")) if rehearses else "mini"
    sizes = rehearsal(Path(small)) if rehearses else CARD
    seconds = timer(kernels.device)
    draft = small if rehearses else "mini-draft"
    return Bench(kernels, sizes, folder, small, draft, seconds, bandwidth(kernels.device, sizes, seconds), rehearses)


def run(bench: Bench, given: argparse.Namespace) -> int:
    """The parts in order -> 0, or 1 if something is wrong."""
    from gpu_report import keep, lines, markdown, wrong
    from gpu_setting import Due

    machine = describe_machine(bench.kernels)
    name = "rehearsal" if bench.rehearses else torch.cuda.get_device_name(bench.device)
    path = (given.out or RESULTS) / f"{machine['date']}-gpu-{name.replace(' ', '-')}.json"
    parts: dict[str, Any] = {}
    result: dict[str, Any] = {"command": " ".join(["python benchmarks/gpu.py", *sys.argv[1:]]), "card": name}
    due_s, start = 0.0, perf_counter()
    for part in (part for part in SECONDS if part in given.parts):
        due_s += 3600 if bench.rehearses else SECONDS[part]  # what one part leaves of its time is the next one's
        began = perf_counter()
        found = attempted(part, bench, Due(start + due_s - began))
        parts[part] = {**found, "seconds": round(perf_counter() - began, 1)}
        print(f"{part}: {parts[part]['seconds']} s, {len(found['rows'])} rows", file=sys.stderr, flush=True)
        result |= {"rehearsal": bench.rehearses, "parts": parts, "lines": lines(parts), "machine": machine}
        keep(result, path)
        gc.collect()
        torch.cuda.empty_cache()
    print(markdown(result))
    print(f"\nkept in {path}", file=sys.stderr)
    for what in wrong(parts):
        print(f"WRONG {what}", file=sys.stderr)
    return 1 if wrong(parts) else 0


def attempted(part: str, bench: Bench, due: Due) -> dict[str, Any]:
    """A part; if it fails as a whole, that is what was found, and the others go on."""
    import gpu_kernels
    import gpu_models

    actions = {action.__name__: action for action in (
        gpu_kernels.check, gpu_kernels.card, gpu_kernels.products, gpu_kernels.attention,
        gpu_models.curve, gpu_models.speed, gpu_models.peers,
    )}  # fmt: skip
    try:
        return actions[part](bench, due)
    except Exception as error:  # reported, and the run ends with status 1
        return {"rows": [], "left_out": [], "errors": {part: f"{type(error).__name__}: {error}"[:2000]}}


if __name__ == "__main__":
    main()
