"""Whole models compile for an H200 without one, and what a GPU would refuse is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import factory

LAB = Path(__file__).resolve().parents[2] / "lab"
KERNELS = {"_attention_kernel", "combine_kernel", "_rope_kernel", "_rms_kernel", "_gate_kernel", "_move_kernel",
           "embed", "multiply", "quantize", "_best_of_part", "_best_of_row", "_grow_kernel",
           "_keep_kernel"}  # fmt: skip
TREES = ("_grow_kernel", "_keep_kernel")  # of which there are never two on a multiprocessor
FAMILIES: dict[str, dict[str, Any]] = {  # matrices of few sizes: every size is a kernel of its own
    "deepseek_v3": {
        **factory.DEEPSEEK, "q_lora_rank": None, "kv_lora_rank": 24, "v_head_dim": 8, "first_k_dense_replace": 0,
        "num_hidden_layers": 1,
    },
    "qwen3_5_text": {
        **factory.DELTA, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "falcon_h1": {**factory.FALCON_H1, "num_hidden_layers": 1, "mamba_d_head": 8, "mamba_d_ssm": 32},
}  # fmt: skip


def compile_kernels(cache: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The program's status and rows, compiled afresh, the interpreter off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # the same machine code, in less time
    out = cache / "rows.json"
    command = [sys.executable, str(LAB / "gpu_compile.py"), *arguments, "--json", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), done.stderr[-4000:]
    return done.returncode, json.loads(out.read_text())


@pytest.mark.slow
def test_a_pass_at_the_8b_shape_compiles_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as gpu.py has it done: in several processes, before it measures."""
    pytest.importorskip("triton")
    from gpu_compile import ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    wanted = (["llama-3.1-8b"], ["int4"], [64], [16], [])  # the widest trees
    rows = ahead(*wanted, torch.device("cpu"), 240.0)
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert row["problems"] == [] and row["shared"] <= 113 << 10, row  # two programs at a time
        assert row["tensor_cores"] == (row["kernel"] in ("multiply", "_attention_kernel")), row
        assert row["stack"] <= (0 if row["kernel"] in TREES else 64), row
        assert row["kernel"] in TREES or row["registers"] * row["threads"] <= 32768, row
    attention = next(row for row in rows if row["kernel"] == "_attention_kernel")
    assert attention["grid"][1] == 8 and attention["grid"][2] > 64  # KV heads; 512 splits, up to eight a program


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Kernels of latents, experts, gated delta rules and Mamba-2, from one process, so that none is compiled twice."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("compiled")
    made = [
        factory.save_checkpoint(factory.random_hf_model(model_type, fields), folder / model_type)
        for model_type, fields in FAMILIES.items()
    ]
    shapes = ("--shapes", ",".join(map(str, made)), "--weights", "bf16", "--rows", "70", "--contexts", "40")
    status, rows = compile_kernels(folder, *shapes, "--trees=", "--formats=")  # of 70 rows 64 are drafts
    assert status == 0 and not any(row["problems"] for row in rows)
    return rows


@pytest.mark.slow
def test_latents_and_experts_compile_and_fit(of_families: list[dict[str, Any]]) -> None:
    wanted = {"_route", "_activate", "_add_up", "_latent_kernel", "_latent_attention_kernel"}
    assert {row["kernel"] for row in of_families} >= wanted


@pytest.mark.slow
def test_recurrent_layers_compile_and_fit(of_families: list[dict[str, Any]]) -> None:
    wanted = {"_conv_kernel", "_tail_kernel", "_prepare_kernel", "_path_kernel", "_state_kernel"}
    assert {row["kernel"] for row in of_families} >= wanted
    assert [row["grid"][0] for row in of_families if row["kernel"] == "_state_kernel"] == [63] * 2, (
        "known rows run the same kernel"
    )
    assert all(row["stack"] == 0 for row in of_families if row["kernel"] in wanted)


def test_what_a_gpu_would_refuse_is_named() -> None:
    pytest.importorskip("triton")
    from gpu_compile import problems

    fine = {"shared": 227 << 10, "registers": 128, "threads": 512, "grid": [1 << 20, 65535, 1]}
    assert problems(fine) == []
    bad = {"shared": (227 << 10) + 1, "registers": 129, "threads": 512, "grid": [1, 65536, 1], "error": "ptxas"}
    assert [text.split()[0] for text in problems(bad)] == ["error:", "232449", "129", "a"]
