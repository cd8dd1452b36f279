"""Damaged and foreign checkpoints, natively and through transformers: one clear line each, before any text."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ConfigError, ForerunError
from forerun.kernels.ops import Kernels
from forerun.models.loader import load_model
from tests.models import factory
from tests.models.factory import Runner

FAMILIES = ("llama", "mixtral", "gpt2", "mamba")  # the latter two run through transformers
SIZES = {"mamba": {"state_size": 4}}
WEIGHTS = "model.safetensors"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        model = factory.random_hf_model(family, SIZES.get(family))
        made[family] = factory.save_checkpoint(model, tmp_path_factory.mktemp(family))
    return made


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals[request.param], tmp_path / "model")


@pytest.fixture
def gpt2(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["gpt2"], tmp_path / "model")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return factory.make_kernels()


def refused(folder: Path, kernels: Kernels, **options: Any) -> str:
    """The one line that loading ends in."""
    with pytest.raises(ForerunError) as caught:
        load_model(folder, kernels, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700, text
    return text


def cut(name: str, share: float) -> Change:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def write(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def tensors(change: Callable[[dict[str, torch.Tensor], str], object]) -> Change:
    """Change the first matrix of the weights, given by name."""

    def apply(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found, next(name for name, tensor in found.items() if tensor.dim() == 2))
        save_file(found, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def config(**fields: Any) -> Change:
    def apply(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **fields}))

    return apply


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"
DAMAGE: dict[str, Change] = {
    "no config": remove("config.json"),
    "no weights": remove(WEIGHTS),
    "no tokenizer": remove("tokenizer.json"),
    "empty config": write("config.json", ""),
    "config is a list": write("config.json", "[]"),
    "config is deep": write("config.json", "[" * 100_000),
    "config cut off": cut("config.json", 0.7),
    "weights are empty": write(WEIGHTS, ""),
    "weights are a pointer": write(WEIGHTS, LFS),
    "header cut off": cut(WEIGHTS, 0.005),
    "data cut off": cut(WEIGHTS, 0.9),
    "tokenizer cut off": cut("tokenizer.json", 0.5),
    "tokenizer is empty": write("tokenizer.json", "{}"),
    "settings are a list": write("tokenizer_config.json", "[]"),
    "index is empty": lambda folder: ((folder / WEIGHTS).unlink(), write(f"{WEIGHTS}.index.json", "{}")(folder)),
    "index names nothing": lambda folder: (
        (folder / WEIGHTS).unlink(),
        write(f"{WEIGHTS}.index.json", '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')(folder),
    ),
    "a tensor is missing": tensors(lambda found, name: found.pop(name)),
    "a tensor has another name": tensors(lambda found, name: found.update({"x": found.pop(name)})),
    "a tensor is shorter": tensors(lambda found, name: found.update({name: found[name][:-1].clone()})),
    "a tensor is flat": tensors(lambda found, name: found.update({name: found[name].reshape(-1)})),
    "a tensor is empty": tensors(lambda found, name: found.update({name: torch.empty(0)})),
    "a type in words": config(num_hidden_layers="four", n_layer="four"),
    "vocabulary in words": config(vocab_size="many"),
    "a million layers": config(num_hidden_layers=10**6, n_layer=10**6),
    "no size": config(hidden_size=0, n_embd=0),
    "negative layers": config(num_hidden_layers=-1, n_layer=-1),
    "another size": config(hidden_size=64, n_embd=64, intermediate_size=128),
    "unknown dtype": config(dtype="float3", torch_dtype="float3", hidden_size=[1], n_embd=[1]),
    "no such type": config(model_type="no-such-model"),
    "a type that is no text": config(model_type=3),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_in_one_line(folder: Path, damage: str, kernels: Kernels) -> None:
    DAMAGE[damage](folder)
    refused(folder, kernels)


VALUES = ("four", -1, 0, [], {}, None, 1.5, True, 2**40, [1, 2], {"a": 1}, "")


def fields(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Some fields with values that are none of theirs, the same ones in every run."""
    every = [(name, value) for name in sorted(raw) for value in VALUES]
    yield from random.Random(0).sample(every, 40)


def test_any_value_of_any_field_runs_or_is_refused(folder: Path, kernels: Kernels) -> None:
    raw, num_refused = json.loads((folder / "config.json").read_text()), 0
    for name, value in fields(raw):
        (folder / "config.json").write_text(json.dumps({**raw, name: value}))
        try:
            model = load_model(folder, kernels).model
        except ForerunError as error:
            num_refused += 1
            assert "\n" not in str(error) and len(str(error)) < 700
            continue
        assert Runner(model, 4).span([5, 9]).logits.isfinite().all(), (name, value)
    assert num_refused > 5


# -- folders that are something else --------------------------------------------------------------------------------


def test_the_fallback_names_the_field_and_the_tensor(gpt2: Path, kernels: Kernels) -> None:
    config(n_layer="four")(gpt2)
    assert "Field 'n_layer' expected int, got str (value: 'four')" in refused(gpt2, kernels)
    config(n_layer=2, n_inner=77)(gpt2)
    assert "transformer.h.0.mlp.c_fc.bias [128] instead of [77]" in refused(gpt2, kernels)


def test_an_unknown_type_is_not_answered_with_all_types(gpt2: Path, kernels: Kernels) -> None:
    config(model_type="chatglm")(gpt2)
    assert "a chatglm model, which neither forerun nor transformers" in refused(gpt2, kernels)
    config(auto_map={"AutoConfig": "configuration_chatglm.Config", "AutoModel": "modeling_chatglm.Model"})(gpt2)
    said = refused(gpt2, kernels)
    assert "configuration_chatglm.Config" in said and "runs no code of checkpoints (trust_remote_code)" in said


def test_the_code_of_a_tokenizer_is_neither_run_nor_offered(
    folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would ask on the terminal, and run it after a yes."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    mark = folder.parent / "ran"
    (folder / "tokenization_own.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Own: pass\n")
    assert "supply a tokenizer.json" in refused(folder, kernels) and not mark.exists()


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("bert", "is an encoder"),
        ("roberta", "is an encoder"),
        ("bart", "is an encoder-decoder"),
        ("t5", "does not run as a causal language model"),
        ("modernbert", "does not run as a causal language model"),
    ],
)
def test_models_that_do_not_write(model_type: str, says: str, gpt2: Path, kernels: Kernels) -> None:
    (gpt2 / "config.json").write_text(json.dumps({"model_type": model_type}))
    (gpt2 / "tokenizer.json").unlink()  # what it is comes before what it lacks
    assert says in refused(gpt2, kernels)


def test_a_decoder_of_an_encoders_family_runs(tmp_path: Path, kernels: Kernels) -> None:
    model = factory.random_hf_model("bert", {"is_decoder": True})
    loaded = load_model(factory.save_checkpoint(model, tmp_path), kernels).model
    expected = factory.hf_logits(tmp_path, [5, 9, 40], torch.float32)
    assert torch.allclose(Runner(loaded, 4).span([5, 9, 40]).logits.double(), expected, atol=1e-5)


def test_an_adapter_says_what_it_is(folder: Path, kernels: Kernels) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    assert load_model(folder, kernels).model.vocab_size, "a merged model that lies beside its adapter is a model"
    (folder / WEIGHTS).unlink()
    for name in ("config.json", ""):
        said = refused(folder, kernels)
        assert "PEFT adapter for the model org/base" in said
        assert f"`forerun generate org/base --lora NAME={folder}`" in said
        if name:
            (folder / name).unlink()


class Code:
    """Unpickling it would call a function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo this must not run > /dev/stderr",)


def test_a_pickle_with_code_is_refused(folder: Path, kernels: Kernels) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"a": torch.ones(2), "b": Code()}, folder / "pytorch_model.bin")
    assert ".system, which could run code" in refused(folder, kernels)


@pytest.mark.parametrize("implementation", ["forerun", "transformers"])
def test_long_rope_ends_where_its_keys_would_change(implementation: str, tmp_path: Path, kernels: Kernels) -> None:
    """Up to the original context the text is transformers' own; one position more is refused, and says why."""
    folder = factory.make_checkpoint("phi3-longrope", tmp_path)  # original context 32 of 64
    tokens = [3 + index * 7 % 90 for index in range(32)]
    model: Any = load_model(folder, kernels, implementation=implementation).model
    assert model.max_position == 32
    expected = factory.hf_logits(folder, tokens, torch.float64)
    assert torch.allclose(Runner(model, 33).span(tokens).logits.double(), expected, atol=1e-4)
    longer = factory.hf_logits(folder, [*tokens, 5], torch.float64)
    assert not torch.allclose(longer[:32], expected, atol=1e-2)  # transformers changes the factors of all positions
    with pytest.raises(ConfigError, match=r"from 1 to 32, .* got 33 \(past its original context this model"):
        load_model(folder, kernels, implementation=implementation, max_position=33)
