"""What tells the weights of two models apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forerun.weights import identity
from forerun.weights.identity import code_digest, digest_of, stamps_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content)
    return path


def test_every_byte_counts_and_the_place_does_not(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 40
    one = folder(tmp_path / "one", model_safetensors=weights, config_json=b"{}", README_md=b"a")
    same = folder(tmp_path / "same", model_safetensors=weights, config_json=b"{}", README_md=b"b")
    assert digest_of(one) == digest_of(same)
    digests = {digest_of(one)}
    for place in (0, 5000, len(weights) - 1):
        (same / "model.safetensors").write_bytes(weights[:place] + b"!" + weights[place + 1 :])
        digests.add(digest_of(same))
    (same / "model.safetensors").rename(same / "other.safetensors")
    digests.add(digest_of(same))
    (one / "config.json").write_bytes(b"[]")
    digests.add(digest_of(one))
    assert len(digests) == 6


def test_all_files_of_a_divided_model_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    (tmp_path / "m-00001-of-00003.gguf").write_bytes(b"another")
    before, stamps = digest_of(parts[0]), stamps_of(parts[0])
    assert len(stamps) == 2
    parts[1].write_bytes(b"GGUG")
    assert digest_of(parts[0]) != before and stamps_of(parts[0]) != stamps


def test_a_large_file_is_read_once_for_each_state_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "KEPT_FROM", 1000)
    path, hashed, usual = tmp_path / "m.gguf", list[Path](), identity.hash_of_file
    monkeypatch.setattr(identity, "hash_of_file", lambda file: (hashed.append(file), usual(file))[1])
    path.write_bytes(b"a" * 2000)
    first = digest_of(path)
    assert digest_of(path) == first and len(hashed) == 1
    path.write_bytes(b"b" * 2000)
    os.utime(path, ns=(1, 1))
    assert digest_of(path) != first and len(hashed) == 2
    (tmp_path / "cache" / "digests.json").write_text("damaged")
    digest_of(path)
    assert len(hashed) == 3


def test_code_counts(tmp_path: Path) -> None:
    package = folder(tmp_path / "package", a_py=b"1", kernels_so=b"2", notes_md=b"3")
    digests = [code_digest(package)]
    for name, content in (("notes.md", b"4"), ("a.py", b"5"), ("kernels.so", b"6"), ("new.py", b"")):
        (package / name).write_bytes(content)
        digests.append(code_digest(package))
    assert digests[0] == digests[1] and len(set(digests)) == 4
