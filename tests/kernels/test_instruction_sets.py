"""Every instruction set gives the same bits, ARM's too: csrc/tests/kernel_hashes.cpp hashes what kernels write.

The program is linked from the object files of the installed extension, and built once more for 64-bit ARM, where it
runs under qemu.
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from tests.support.programs import ROOT, build_target, native_test, program

from forerun.kernels.select import AMX

ARM_BUILD = ROOT / "build" / "aarch64"
ARM_COMPILER = "aarch64-linux-gnu-g++"
ARM_CPUS = {"max": {"neoni8mm", "neondot", "neon", "portable"}, "cortex-a53": {"neon", "portable"}}

Hashes = dict[str, dict[str, str]]  # instruction set -> case -> hash


def _hashes(*command: str | Path) -> Hashes:
    """What the program prints; it fails where a kernel is without a case."""
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: Hashes = defaultdict(dict)
    for isa, case, hashed in map(str.split, printed.splitlines()):
        found[isa][case] = hashed
    return found


ADDED_BY_TILES = re.compile(r"attention(_split)?-.*-(bfloat16|int8)")  # in AMX's own order (docs/decisions/0014)


def _assert_same(found: Hashes, expected: dict[str, str]) -> None:
    for isa, hashes in found.items():
        assert hashes.keys() == expected.keys()
        differ = [case for case in expected if hashes[case] != expected[case]]
        assert not [case for case in differ if isa != AMX or not ADDED_BY_TILES.fullmatch(case)], isa


@pytest.fixture(scope="module")
def own_hashes() -> Hashes:
    """Of the instruction sets that this machine has."""
    return _hashes(native_test("kernel_hashes"))


@pytest.mark.slow
def test_this_machines_instruction_sets_give_the_same_bits(own_hashes: Hashes) -> None:
    from forerun.kernels.cpu import _native

    assert list(own_hashes) == _native.available_isas()
    _assert_same(own_hashes, own_hashes["portable"])


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes half a minute on an idle core
@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="its own instruction sets are ARM's")
def test_arm_gives_the_same_bits(own_hashes: Hashes) -> None:
    emulator, compiler = program("qemu-aarch64"), program(ARM_COMPILER)
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static")
    # Half of -O3's time to compile. The bits are the same: nothing is fused or reordered that the source does not.
    options = (f"-DCMAKE_CXX_COMPILER={compiler}", "-DFORERUN_OPTIMIZE=-O1")
    configure = [program("cmake"), "-S", ROOT, "-B", ARM_BUILD, *options, *system]
    subprocess.run(configure, check=True)
    arm_program = build_target(ARM_BUILD, "kernel_hashes")
    for cpu, isas in ARM_CPUS.items():
        found = _hashes(emulator, "-cpu", cpu, arm_program)
        assert set(found) == isas
        _assert_same(found, own_hashes["portable"])


def test_a_compiler_that_is_too_old_leaves_the_kernels_out(tmp_path: Path) -> None:
    """Installing goes on, and says which compilers are new enough."""
    old = tmp_path / "old-c++"
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mavxvnni*|*i8mm*) exit 1;; esac\nexec {program("c++")} "$@"\n')
    old.chmod(0o755)
    configure = [program("cmake"), "-S", ROOT, "-B", tmp_path / "build", f"-DCMAKE_CXX_COMPILER={old}"]
    done = subprocess.run(configure, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "too old for some instruction sets" in " ".join(done.stderr.split())
    targets = subprocess.run(
        [program("cmake"), "--build", tmp_path / "build", "--target", "help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_native" not in targets.stdout
