"""Compiles kernels for GPUs without one; run as a program, since the interpreter must be off from the start.

`python -m tests.kernels.triton.ahead_of_time MODULE...` compiles what each module's `kernels()` lists and prints a JSON
list for each module. An entry of `kernels()` is a kernel, its arguments (a type such as "*fp32" or "i32" for what is
given at run time, anything else for constants) and its launch options, to which "architecture" may be added: 90, an
H200, unless given; 80 is an A100.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TYPES = re.compile(r"\*?(fp64|fp32|fp16|bf16|i8|i32|i64|u1|u8|u32|u64)")
ROOT = Path(__file__).resolve().parents[3]


def compiled_in_subprocess(modules: Sequence[str], cache: Path) -> list[list[dict[str, Any]]]:
    """What the program says about each module, compiled afresh into `cache`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # the same machine code, in less time
    command = [sys.executable, "-m", "tests.kernels.triton.ahead_of_time", *modules]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    lists: list[list[dict[str, Any]]] = json.loads(result.stdout)
    return lists


def compile_kernel(kernel: Any, arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Name, shared bytes, registers and bytes of stack a thread, instructions of interest, and `sums_of` the kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: kind for name, kind in arguments.items() if isinstance(kind, str) and TYPES.fullmatch(kind)}
    signature = {name: types.get(name, "constexpr") for name in arguments}
    constants = {name: value for name, value in arguments.items() if name not in types}
    places = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=places)
    options = dict(options)
    target = GPUTarget("cuda", options.pop("architecture", 90), 32)
    compiled = triton.compile(source, target=target, options=options)
    registers, stack = resources(compiled.asm["cubin"])
    found = sorted(set(re.findall(r"mma\.sync|cp\.async(?=\.c[ag])|fma\.rn\.f32|fma\.rn\.f64", compiled.asm["ptx"])))
    return {
        "name": kernel.fn.__name__,
        "shared": compiled.metadata.shared,
        "registers": registers,
        "stack": stack,
        "instructions": found,
        "sums": sums_of(compiled.asm["ttgir"]),
    }


def sums_of(code: str) -> list[str]:
    """Every sum of floats in Triton's GPU code: the tiles' types and which thread has what, which decides the order."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reductions = re.findall(r'"tt\.reduce"\(.*?\}\) : \((.*?)\) ->', code, re.DOTALL)
    products = re.findall(r"^.* = tt\.dot .*? : (.*)$", code, re.MULTILINE)
    found = [types for types in (*reductions, *products) if "i32" not in types]  # of integers any order will do
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), types) for types in found]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread, as NVIDIA's tool beside Triton reads them."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    assert len(found) == 1, text
    return int(found[0][0]), int(found[0][1])


if __name__ == "__main__":
    lists = [importlib.import_module(name).kernels() for name in sys.argv[1:]]
    print(json.dumps([[compile_kernel(*entry) for entry in entries] for entries in lists]))
