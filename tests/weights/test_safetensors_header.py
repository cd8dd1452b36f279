"""Damaged safetensors files: a CheckpointError naming the file, whatever the bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forerun.errors import CheckpointError
from forerun.weights.safetensors_header import read_header

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 3)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path.read_bytes()


def read(folder: Path, raw: bytes) -> dict[str, Any]:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    return dict(read_header(path))


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_a_good_file(good: bytes, tmp_path: Path) -> None:
    entries = read(tmp_path, good)
    assert {name: entry.shape for name, entry in entries.items()} == {"a": (2, 3), "b": (4,), "empty": (0, 3)}
    assert entries["a"].nbytes == 24 and entries["b"].dtype == "BF16"


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"", "only 0 bytes"),
        (b"\x01\0\0", "only 3 bytes"),
        ((1 << 60).to_bytes(8, "little"), "claims 1152921504606846976 bytes"),
        ((400).to_bytes(8, "little") + b"{}", "cut off"),
        (with_header(b"nonsense"), "not JSON"),
        (with_header(b"\xff\xfe{}"), "not JSON"),
        (with_header(b"[" * 20000 + b"]" * 20000), "not JSON"),
        (with_header([1]), "not a JSON object"),
        (with_header({"a": 3}), "not an object"),
        (with_header({"a": {**ENTRY, "dtype": "F33"}}, b"\0" * 8), "unknown dtype 'F33'"),
        (with_header({"a": {**ENTRY, "shape": [-2]}}, b"\0" * 8), "malformed shape"),
        (with_header({"a": {**ENTRY, "shape": [2.0]}}, b"\0" * 8), "malformed shape"),
        (with_header({"a": {**ENTRY, "data_offsets": [8, 0]}}, b"\0" * 8), "malformed shape"),
        (with_header({"a": {**ENTRY, "shape": [3]}}, b"\0" * 8), "cannot have 8 bytes"),
        (with_header({"a": {**ENTRY, "shape": [2**62, 2**62]}}, b"\0" * 8), "cannot have 8 bytes"),
        (with_header({"a": ENTRY}, b"\0" * 4), "cut off"),
        (with_header({"a": ENTRY}, b"\0" * 9), "cover 8 of 9 bytes"),
        (with_header({"a": ENTRY, "b": ENTRY}, b"\0" * 8), "begins at byte 0"),
        (with_header({"a": {**ENTRY, "data_offsets": [4, 12]}}, b"\0" * 12), "expected 0"),
    ],
)
def test_damage_is_named(raw: bytes, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        read(tmp_path, raw)
    assert "model.safetensors" in str(error.value)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="cannot read"):
        read_header(tmp_path)


fuzz = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same_as_the_library(folder: Path, raw: bytes) -> None:
    """Either a CheckpointError, or a header with which the library can read every tensor."""
    try:
        entries = read(folder, raw)
    except CheckpointError:
        return
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {n: e.shape for n, e in entries.items()}


@fuzz
@given(st.data())
def test_flipped_and_cut_bytes(good: bytes, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] = data.draw(st.sampled_from([0, 1, 34, 44, 48, 57, 58, 91, 93, 123, 125, 255]))
    end = data.draw(st.sampled_from([len(raw), data.draw(st.integers(0, len(raw)))]))
    try:
        same_as_the_library(tmp_path, bytes(raw[:end]))
    except Exception as error:  # the library is stricter about duplicate names and metadata: never looser
        assert "SafetensorError" in type(error).__name__, error


@fuzz
@given(st.binary(max_size=80))
def test_any_bytes(tmp_path: Path, raw: bytes) -> None:
    same_as_the_library(tmp_path, raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@fuzz
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "other"]), json_values))
def test_any_entry(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        read(tmp_path, with_header({"a": entry}, b"\0" * 3))
