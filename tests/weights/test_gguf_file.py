"""The container: every kind of value there and back, damaged and hostile files."""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import CheckpointError, ForerunError, UnsupportedError
from forerun.weights.gguf_checkpoint import GgufCheckpoint
from forerun.weights.gguf_file import MAX_HEADER_BYTES, GgufFile
from forerun.weights.gguf_write import TensorToWrite, Typed, tensor_bytes, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.wide": Typed("uint64", 2**63),
    "a.negative": -5,
    "a.small": Typed("int8", -3),
    "a.half": Typed("uint16", 65535),
    "a.float": 0.5,
    "a.double": Typed("float64", 0.1),
    "a.flag": True,
    "a.text": "Füße \u2581",
    "some.flags": [True, False],
    "some.texts": ["a", "", "日本"],
    "some.integers": Typed("int32", [-1, 0, 2**31 - 1]),
    "some.floats": [0.25, -1.0],
}


def floats(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def tensor(name: str, values: torch.Tensor, kind: str = "F32") -> TensorToWrite:
    return TensorToWrite(name, kind, tuple(values.shape), lambda: tensor_bytes(values))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = [tensor("a", floats(3, 5)), tensor("b", floats(7)), tensor("c", floats(2, 4).bfloat16(), "BF16")]
    return write_gguf(tmp_path / "x.gguf", METADATA, tensors)


def test_what_is_written_is_read(path: Path) -> None:
    file = GgufFile.open(path)
    for key, value in METADATA.items():
        plain = value.value if isinstance(value, Typed) else value
        found = file.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == plain
    assert file.tensors["a"].shape == (3, 5) and file.tensors["b"].layout.name == "F32"
    assert all(entry.begin % 32 == 0 for entry in file.tensors.values())
    assert torch.equal(file.rows("a").view(torch.float32), floats(3, 5))
    assert torch.equal(file.rows("c").view(torch.bfloat16), floats(2, 4).bfloat16())


def test_what_is_written_is_read_by_the_gguf_package(path: Path) -> None:
    reader = pytest.importorskip("gguf").GGUFReader(path)
    for key, value in METADATA.items():
        assert reader.fields[key].contents() == (value.value if isinstance(value, Typed) else value)
    assert {entry.name: tuple(reversed(entry.shape.tolist())) for entry in reader.tensors} == {
        "a": (3, 5), "b": (7,), "c": (2, 4)
    }  # fmt: skip
    assert np.array_equal(reader.tensors[0].data, floats(3, 5).numpy())


def test_nested_arrays(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 1, 2)
    pairs = struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 2) + inner + inner
    (tmp_path / "n.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pairs)
    assert [list(entry) for entry in GgufFile.open(tmp_path / "n.gguf").metadata["k"]] == [[1, 2], [1, 2]]


def test_writing_refuses_what_does_not_fit(tmp_path: Path) -> None:
    short = TensorToWrite("t", "F32", (4,), lambda: torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="tensor t came as 3 entries of torch.uint8; F32 of shape .4. has 16"):
        write_gguf(tmp_path / "x.gguf", {}, [short])
    with pytest.raises(CheckpointError, match="rows must be a multiple of 32"):
        write_gguf(tmp_path / "x.gguf", {}, [TensorToWrite("t", "Q8_0", (2, 33), floats)])
    with pytest.raises(CheckpointError, match="there is no type Q9"):
        write_gguf(tmp_path / "x.gguf", {}, [TensorToWrite("t", "Q9", (2, 32), floats)])
    with pytest.raises(CheckpointError, match="metadata cannot hold"):
        write_gguf(tmp_path / "x.gguf", {"k": [1, "a"]}, [])
    assert not (tmp_path / "x.gguf").exists()


def header(version: int = 3, tensors: int = 0, pairs: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest


def info(name: bytes = b"t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


HUGE = 2**62
DATA = b"\0" * 256
DAMAGED = {
    "no header": (b"GGUF", "only 4 bytes"),
    "another file": (b"PK\3\4" + DATA, r"is not a GGUF file: it begins with b'PK.*not with GGUF; download it again"),
    "version 1": (header(version=1) + DATA, "is GGUF version 1; supported are little-endian files of version 2 and 3"),
    "big-endian": (header(version=0x03000000) + DATA, "is a big-endian GGUF file"),
    "too many tensors": (header(tensors=HUGE) + DATA, "it is cut off"),
    "too many pairs": (header(pairs=HUGE) + DATA, "it is cut off"),
    "a long key": (header(pairs=1, rest=struct.pack("<Q", HUGE)) + DATA, "it is cut off"),
    "a long array": (header(pairs=1, rest=pair(b"k", 9, struct.pack("<IQ", 10, HUGE))) + DATA, "it is cut off"),
    "many texts": (header(pairs=1, rest=pair(b"k", 9, struct.pack("<IQ", 8, HUGE))) + DATA, "it is cut off"),
    "deep arrays": (header(pairs=1, rest=pair(b"k", 9, struct.pack("<IQ", 9, 1) * 5)) + DATA, "more than 3 deep"),
    "an unknown kind": (header(pairs=1, rest=pair(b"k", 13, b"")) + DATA, "unknown type 13"),
    "a wrong flag": (header(pairs=1, rest=pair(b"k", 7, b"\2")) + DATA, "neither 0 nor 1"),
    "a key twice": (header(pairs=2, rest=pair(b"k", 0, b"\1") * 2) + DATA, "key 'k' occurs twice"),
    "no UTF-8": (header(pairs=1, rest=pair(b"\xff", 0, b"\1")) + DATA, "not UTF-8"),
    "an odd alignment": (
        header(pairs=1, rest=pair(b"general.alignment", 4, struct.pack("<I", 24))) + DATA, "not a power of two"
    ),
    "no dimensions": (header(tensors=1, rest=info(dims=())) + DATA, "has 0 dimensions"),
    "an empty dimension": (header(tensors=1, rest=info(dims=(4, 0))) + DATA, "must be positive"),
    "part of a block": (header(tensors=1, rest=info(dims=(33,), kind=8)) + DATA, "Q8_0 rows a multiple of 32"),
    "part of 256": (header(tensors=1, rest=info(dims=(288,), kind=17)) + DATA, "IQ2_XS rows a multiple of 256"),
    "blocks that are cut off": (header(tensors=1, rest=info(dims=(256, 9), kind=19)) + DATA, "it is cut off"),
    "intermediate results": (header(tensors=1, rest=info(dims=(256,), kind=15)) + DATA, "'t' is of type 15"),
    "a huge tensor": (header(tensors=1, rest=info(dims=(2**31 - 1,) * 4)) + DATA, "it is cut off"),
    "beyond the end": (header(tensors=1, rest=info(dims=(4096,))) + DATA, "it is cut off"),
    "not aligned": (header(tensors=1, rest=info(offset=8)) + DATA, "begins at a wrong place, byte 8"),
    "overlapping": (header(tensors=2, rest=info(dims=(16,)) + info(b"u", offset=32)) + DATA, "a wrong place, byte 32"),
    "a tensor twice": (header(tensors=2, rest=info() + info(offset=32)) + DATA, "tensor 't' occurs twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(case: str, tmp_path: Path) -> None:
    raw, message = DAMAGED[case]
    (tmp_path / "x.gguf").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, UnsupportedError), match=message) as caught:
            GgufFile.open(tmp_path / "x.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "x.gguf" in str(caught.value)


def test_unknown_tensor_types_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(header(tensors=1, rest=info(kind=4)) + DATA)
    with pytest.raises(UnsupportedError, match="'t' is of type 4, which forerun does not know; known are F32, F16"):
        GgufFile.open(tmp_path / "x.gguf")


def test_headers_have_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(header(pairs=1, rest=pair(b"k", 8, struct.pack("<Q", MAX_HEADER_BYTES))))
        file.truncate(2 * MAX_HEADER_BYTES)  # sparse: takes no room
    with pytest.raises(CheckpointError, match="its header is longer than"):
        GgufFile.open(tmp_path / "x.gguf")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read .*none.gguf: No such file"):
        GgufFile.open(tmp_path / "none.gguf")


# -- hostile files ------------------------------------------------------------------------------------------------


def small_model(path: Path) -> bytes:
    """A file with everything a model has."""
    size = {"embedding_length": 4, "block_count": 1, "feed_forward_length": 4, "context_length": 8}
    metadata: dict[str, Any] = {"general.architecture": "llama", **{f"llama.{key}": n for key, n in size.items()}}
    metadata |= {"llama.attention.head_count": 1, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    names = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"], "eos_token_id": 2}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in names.items()}
    metadata |= {"tokenizer.ggml.token_type": Typed("int32", [1, 1, 1]), "tokenizer.chat_template": "{{ messages }}"}
    tensors = [tensor("token_embd.weight", floats(3, 4)), tensor("blk.0.attn_q.weight", floats(4, 4)),
               tensor("rope_freqs.weight", floats(2) + 1)]  # fmt: skip
    return write_gguf(path, metadata, tensors).read_bytes()


def contents(path: Path) -> tuple[object, ...]:
    """All that a file says: its config, the bytes of its tensors, and what its tokenizer makes of a text."""
    checkpoint = GgufCheckpoint.open(path)
    blocks = [checkpoint.blocks(name) for name in checkpoint.unread]
    return checkpoint.config, [(b.shape, b.numpy().tobytes()) for b in blocks], checkpoint.tokenizer().encode("abc")


def test_the_small_model_is_whole(tmp_path: Path) -> None:
    small_model(tmp_path / "x.gguf")
    checkpoint = GgufCheckpoint.open(tmp_path / "x.gguf")
    assert checkpoint.unread == ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(checkpoint.tensor("model.embed_tokens.weight"), floats(3, 4))
    rows = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(rows, floats(4, 4)[[0, 2, 1, 3]])  # one head: pairs of neighbours there, halves here
    assert checkpoint.unread == [] and checkpoint.config["rope_scaling"]["rope_type"] == "longrope"
    assert checkpoint.tokenizer().encode("abba") == [2, 1, 0]


@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0xFF])
def test_a_changed_byte_is_refused_by_the_files_name_or_changes_what_is_read(tmp_path: Path, value: int) -> None:
    path, outcomes = tmp_path / "x.gguf", Counter[str]()
    whole = small_model(path)
    known = contents(path)
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            outcomes["as it was" if contents(path) == known else "another"] += 1
        except ForerunError as error:
            assert "x.gguf" in str(error), error
            outcomes["refused"] += 1
    assert min(outcomes[outcome] for outcome in ("as it was", "another", "refused")) > 5


@pytest.mark.parametrize("num_bytes", [0, 3, 23, 200, 700, 1000])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small_model(path)[:num_bytes])
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        contents(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=400), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_files_never_crash(tmp_path: Path, raw: bytes, counts: tuple[int, int]) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(3, *counts) + raw)
    with pytest.raises((CheckpointError, UnsupportedError)):
        contents(path)
