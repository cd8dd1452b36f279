"""The network, its optimizer, and the exported files against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import CheckpointError
from forerun.training.chat import ChatTurn, render_chat
from forerun.training.export import export_model, load_model
from forerun.training.muon import Muon, orthogonalize
from forerun.training.net import Net, NetConfig
from forerun.training.tokenizer import save_tokenizer, train_tokenizer

CONFIG = NetConfig(300, 32, 2, 4, 2, 16, 48, max_positions=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An exported random network."""
    torch.manual_seed(0)
    save_tokenizer(train_tokenizer(["some text with words " * 9, "héé"], CONFIG.vocab_size), tmp_path, 64)
    net = Net(CONFIG)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_((weight * (5 if weight.ndim == 2 else 1) + 0.01 * torch.randn_like(weight)).bfloat16())
    export_model(net, tmp_path, tmp_path / "export")
    return tmp_path / "export"


def test_exported_folder_loads_in_transformers_with_equal_logits(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(load_model(folder)(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert theirs.generation_config.eos_token_id == [2, 0]


def test_exported_tokenizer_renders_the_chat_template(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "words \n"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == render_chat([ChatTurn("user", "words \n")], add_generation_prompt=True)
    assert theirs.decode(theirs("  some  words").input_ids) == "  some  words"


def test_cached_steps_equal_one_pass(folder: Path) -> None:
    net = load_model(folder)
    ids = torch.randint(0, CONFIG.vocab_size, (3, 12))
    with torch.no_grad():
        caches = net.new_caches(3, 12)
        parts = [net.hidden(ids[:, :7], caches)] + [net.hidden(ids[:, at : at + 1], caches) for at in range(7, 12)]
        torch.testing.assert_close(net.head(torch.cat(parts, dim=1)), net(ids), rtol=1e-4, atol=1e-5)


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no model exported by"):
        load_model(tmp_path)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_orthogonalize_evens_out_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3


def test_muon_agrees_with_torch() -> None:
    torch.manual_seed(2)
    start, gradients = torch.randn(8, 24), torch.randn(3, 8, 24)
    mine, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizers = [Muon([mine], 0.02, 0.95, 0.1), torch.optim.Muon([theirs], 0.02, 0.1, 0.95)]
    for gradient in gradients:
        mine.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-3)  # theirs computes in bfloat16
