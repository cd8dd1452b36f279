"""lab/average.py: the mean of models, and what cannot be averaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import average
from forerun.errors import ConfigError


def model(folder: Path, value: float, name: str = "w", size: int = 3) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"from": "{folder.name}"}}')
    save_file({name: torch.full((size,), value, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder


def test_weights_are_the_weighted_mean_and_other_files_the_first_model_s(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one", 1.0), model(tmp_path / "two", 3.0)
    average.average(tmp_path / "out", [f"{one}=0.75", f"{two}=0.25"])
    mean = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert mean.dtype == torch.bfloat16 and mean.tolist() == [1.5, 1.5, 1.5]
    assert "one" in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    "name,size,share,out,message",
    [
        ("v", 3, "0.25", "out", "has other tensors"),
        ("w", 4, "0.25", "out", r"is \[4\], that of"),
        ("w", 3, "0.5", "out", "must come to 1"),
        ("w", 3, "half", "out", "FOLDER=SHARE"),
        ("w", 3, "0.25", "two", "write to another folder"),
    ],
)
def test_what_cannot_be_averaged_is_refused(
    tmp_path: Path, name: str, size: int, share: str, out: str, message: str
) -> None:
    one, two = model(tmp_path / "one", 1.0), model(tmp_path / "two", 3.0, name, size)
    with pytest.raises(ConfigError, match=message):
        average.average(tmp_path / out, [f"{one}=0.75", f"{two}={share}"])


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model.safetensors"):
        average.average(tmp_path / "out", [f"{tmp_path}=1"])
