"""From names to folders, and what is said when there is nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.errors import ModelNotFoundError
from forerun.weights import resolve
from forerun.weights.resolve import resolve_model


def test_a_folder(tmp_path: Path) -> None:
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_an_embedded_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve.forerun, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ModelNotFoundError, match="'mini' is missing from this installation"):
        resolve_model("mini")
    (tmp_path / "mini" / "draft").mkdir(parents=True)
    (tmp_path / "mini" / "draft" / "config.json").write_text("{}")
    assert resolve_model("mini-draft") == tmp_path / "mini" / "draft"


@pytest.mark.parametrize(
    "name", ["/absolute/none", "./none", "~nobody-of-this-name/x", "a/b/c", "", "../x", "a--b", "x" * 97, "a b"]
)
def test_what_cannot_be_a_hub_id_is_not_looked_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "download", lambda *_: pytest.fail("looked up"))
    with pytest.raises(ModelNotFoundError, match="tried"):
        resolve_model(name)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match="it is a file: give the folder, or a .gguf file"):
        resolve_model(tmp_path / "model.safetensors")


def test_a_gguf_file_of_another_name(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelNotFoundError, match="it is a GGUF file without that ending: rename it to model.gguf"):
        resolve_model(tmp_path / "model")


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_a_link_that_leads_nowhere(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "download", lambda *_: pytest.fail("looked up"))
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to("moved/away")
    with pytest.raises(ModelNotFoundError, match=f"{name} is a link to moved/away, where nothing is"):
        resolve_model(name)
