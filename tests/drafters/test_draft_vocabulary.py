"""Drafters with some rows of their output layer: equal logits at the tokens kept, no others drafted, the same text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from forerun import LLM, SamplingParams
from forerun.assemble import assemble
from forerun.cli.train import app
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import ConfigError, ForerunError, UnsupportedError, VocabularyError
from forerun.models.decoder import Decoder
from forerun.models.heads.vocabulary import read_token_list
from forerun.models.loader import load_model
from forerun.models.trimmed import rows_of, trimmed_decoder
from forerun.quant.base import RowPart
from forerun.quant.formats import find_format
from forerun.quant.rows import read_rows
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer
from tests.drafters import test_eagle, test_mtp
from tests.models import factory
from tests.quant import stored
from tests.support import heads, mini, tiny
from tests.support.drafting import assert_as_computed, overhear
from tests.support.heads import VOCAB, Reference
from tests.weights.gguf_makers import write_model

KEPT = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:24].tolist()
KEPT_64 = torch.randperm(64, generator=torch.Generator().manual_seed(5))[:20]


def listed(folder: Path, token_ids: list[int] = KEPT) -> str:
    path = folder / "kept.json"
    path.write_text(json.dumps(token_ids))
    return str(path)


# -- rows of matrices ----------------------------------------------------------------------------------------------

MATRICES: dict[str, tuple[Callable[[], stored.Stored], dict[str, Any]]] = {
    "gptq with an order": (
        lambda: stored.gptq(64, 64, 4, 16, group_ids=(torch.arange(64) // 16)[torch.randperm(64)]),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    ),
    "awq": (lambda: stored.awq(64, 64, 16), {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}),
    "fp8": (lambda: stored.float8(64, 64), {"quant_method": "fp8", "weight_block_size": [16, 32]}),
}


@pytest.mark.parametrize("name", MATRICES)
def test_rows_of_a_quantized_matrix_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    make, section = MATRICES[name]
    source = stored.open_source(tmp_path, {"m": make()}, section)
    form, kernels = find_format(source, "m"), tiny.kernels()
    assert form is not None
    whole = form.read(source, [RowPart("m", 64)], 64, kernels, None)
    some = read_rows(form, source, [RowPart("m", 64)], 64, kernels, None, KEPT_64)
    assert some.shape == (20, 64) and some.nbytes < whole.nbytes
    x = torch.randn(3, 64)
    assert torch.equal(some.matmul(x, None), whole.matmul(x, None)[:, KEPT_64])
    assert torch.equal(some.dequantize(), whole.dequantize()[KEPT_64])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_gguf_files_output_layer(kind: str, tied: bool, tmp_path: Path) -> None:
    hf = factory.random_hf_model("llama", {"tie_word_embeddings": tied})
    folder = factory.save_checkpoint(hf, tmp_path / "hf")
    write_model(tmp_path / "model.gguf", folder, hf, "llama", {"token_embd": kind, "output": kind, "": "F32"})
    check_rows(tmp_path / "model.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_dense_output_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    check_rows(factory.save_checkpoint(factory.random_hf_model("llama"), tmp_path, dtype))


def check_rows(path: Path) -> None:
    model = load_model(path, tiny.kernels()).model
    assert isinstance(model, Decoder)
    ids = torch.tensor(KEPT)
    some, x = rows_of(model, path, tiny.kernels(), ids), torch.randn(3, model.hidden_size)
    assert torch.equal(some(x), model.parts.lm_head(x)[:, ids])


# -- drafts --------------------------------------------------------------------------------------------------------


def masked(reference: Reference) -> Reference:
    """The same head, which knows the tokens kept alone."""
    lost = torch.ones(VOCAB, dtype=torch.bool)
    lost[KEPT] = False

    def outcome(stream: Tensor) -> tuple[Tensor, Tensor]:
        logits, fed = reference.outcome(stream)
        return logits.masked_fill(lost, -torch.inf), fed

    return replace(reference, outcome=outcome)


def engine(name: str, model: Any, folder: Path, kept: str, width: int, head: Path | None = None) -> Engine:
    drafter = DrafterConfig(
        name=name, model=str(head or folder), max_draft_tokens=9 if width > 1 else 4, tree_width=width, adaptive=False,
        draft_vocabulary=kept,
    )  # fmt: skip
    config = EngineConfig(model="tiny", drafter=drafter, block_size=4, max_model_len=tiny.MAX_LEN)
    return assemble(config, model, tiny.kernels(), lambda name: model, folder)


def mimo(folder: Path) -> tuple[str, int, Path, Reference]:
    head = heads.write(folder, test_mtp.mimo_tensors(), test_mtp.mimo_config())
    return "mtp", test_mtp.LAYERS, head, test_mtp.mimo_reference()


def eagle1(folder: Path) -> tuple[str, int, Path, Reference]:
    head, reference = test_eagle.make("eagle1", folder)
    return "eagle", test_eagle.LAYERS, head, reference


def whole_eagle3(folder: Path) -> tuple[str, int, Path, Reference]:
    """Its output layer is its own, of all tokens."""
    head, reference = test_eagle.make("whole-vocabulary", folder)
    return "eagle", test_eagle.LAYERS, head, reference


@pytest.mark.parametrize("make", [mimo, eagle1, whole_eagle3])
@pytest.mark.parametrize("width", [1, 3])
def test_heads_give_the_formulas_logits_at_the_tokens_kept(make: Any, width: int, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    name, layers, head, reference = make(tmp_path / "head")
    folder = factory.save_checkpoint(heads.truth(layers).model, tmp_path / "target")
    made = engine(name, heads.target(layers), folder, listed(tmp_path), width, head)
    ear, wanted = overhear(made, stride=5), tiny.groups(4, temperature=1.0, max_tokens=14)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(heads.target(layers)), wanted)[0]
    assert_as_computed(ear, masked(reference), heads.truth(layers).states)
    assert tiny.num_accepted(stats) > 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_trimmed_model_counts_its_table(tied: bool, tmp_path: Path) -> None:
    """Also where the table was the whole output layer."""
    folder = factory.save_checkpoint(factory.random_hf_model("llama", {"tie_word_embeddings": tied}), tmp_path / "hf")
    model = load_model(folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    trimmed = trimmed_decoder(model, str(folder), listed(tmp_path), tiny.kernels())
    given_up, rows = 0 if tied else model.parts.lm_head.nbytes, trimmed.parts.lm_head
    assert trimmed.weight_bytes == model.weight_bytes - given_up + rows.nbytes
    given_up = 0 if tied else model.parts.lm_head.num_parameters
    assert trimmed.num_parameters == model.num_parameters - given_up + rows.num_parameters


def test_a_draft_model_proposes_the_best_of_the_tokens_kept(tmp_path: Path) -> None:
    folder = tiny.write_llama(tmp_path, tiny.random_layers(2))
    model = load_model(folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    trimmed = trimmed_decoder(model, str(folder), listed(tmp_path), tiny.kernels())
    assert trimmed.weight_bytes <= model.weight_bytes - (VOCAB - 2 * len(KEPT)) * model.hidden_size * 4
    wanted = tiny.groups(4, temperature=0.0, max_tokens=14)
    made = engine("draft", model, folder, listed(tmp_path), 1)
    ear = overhear(made, stride=1)
    tokens, _ = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(model), wanted)[0]
    plain = engine_of_all(model, folder)
    assert tiny.inner(made).runner.replays == tiny.inner(plain).runner.replays  # trimmed passes are recorded, too
    other = overhear(plain, stride=1)
    tiny.run(plain, wanted)
    by_text = {(tuple(known), tuple(path)): row for known, path, row in other.heard}
    compared = 0
    for known, path, row in ear.heard:
        assert sorted(torch.nonzero(row > -torch.inf).flatten().tolist()) == sorted(KEPT)
        if (same := by_text.get((tuple(known), tuple(path)))) is not None:
            assert torch.equal(row[KEPT], same[KEPT])
            compared += 1
    assert compared > 10


def engine_of_all(model: Any, folder: Path) -> Engine:
    drafter = DrafterConfig(name="draft", model=str(folder), max_draft_tokens=1, tree_width=1, adaptive=False)
    config = EngineConfig(model="tiny", drafter=drafter, block_size=4, max_model_len=tiny.MAX_LEN)
    return assemble(config, model, tiny.kernels(), lambda name: model, folder)


# -- lists ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_list_is_read(tmp_path: Path) -> None:
    ids = [5, 3, 90, *range(10, 24)]
    (tmp_path / "a.json").write_text(json.dumps(ids))
    (tmp_path / "b.json").write_text(json.dumps({"vocab_size": 96, "token_ids": ids}))
    (tmp_path / "c.txt").write_text("\n".join(map(str, ids)))
    torch.save(ids, tmp_path / "d.pt")
    torch.save(torch.tensor(ids, dtype=torch.int32), tmp_path / "e.pt")
    known = torch.zeros(96, dtype=torch.bool)
    known[sorted(ids)] = True
    offsets = torch.tensor(sorted(ids)) - torch.arange(len(ids))
    save_file({"d2t": offsets, "t2d": known}, tmp_path / "f.safetensors")
    for path in sorted(tmp_path.iterdir()):
        found = read_token_list(path)
        assert found.token_ids.tolist() == (sorted(ids) if path.suffix == ".safetensors" else ids), path
        assert found.vocab_size == (96 if path.name[0] in "bf" else None), path


BAD: dict[str, tuple[Any, type[ForerunError], str]] = {
    "out of range": ([*range(20), 70000], VocabularyError, "lists token 70000"),
    "below zero": ([*range(20), -1], ConfigError, "lists -1"),
    "twice": ([*range(20), 7], ConfigError, "lists token 7 2 times"),
    "empty": ([], ConfigError, "lists 0 tokens; at least 16"),
    "no list": ({"vocab_size": 5}, ConfigError, "must be a list of token ids"),
    "no numbers": (["a"] * 20, ConfigError, "must be a list of token ids"),
    "another tokenizer": ({"vocab_size": 152064, "token_ids": [*range(20)]}, VocabularyError, "with 152064 of them"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_are_refused_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, kind, said = BAD[name]
    monkeypatch.setattr("forerun.opening.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(kind, match=said):
        LLM("mini", drafter="draft", draft_vocabulary=listed(tmp_path, content))


def test_files_that_are_no_lists(tmp_path: Path) -> None:
    for name, content, said in (
        ("none.json", None, "No such file"),
        ("a.csv", "1,2", "unknown ending"),
        ("b.json", "[1, 2", "cannot read"),
        ("c.txt", "1 two", "cannot read"),
        ("d.pt", "nothing", "cannot read"),
        ("e.safetensors", "nothing", "cannot read"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(ForerunError, match=said):
            read_token_list(path)


def test_a_head_with_a_vocabulary_of_its_own_takes_no_other(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    head, _ = test_eagle.make("safeailab", tmp_path / "head")
    target = heads.target(test_eagle.LAYERS)
    with pytest.raises(UnsupportedError, match=r"vocabulary of its own .* leave draft_vocabulary out"):
        engine("eagle", target, tmp_path, listed(tmp_path), 1, head)


# -- counting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_a_list_is_counted_in_texts_and_drafts_are_the_same_text(ending: str, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("Once upon a time there was a fox. " * 3 + "He saw a dog and a cat, and ran to the house.")
    out = tmp_path / f"kept.{ending}"
    arguments = ["vocabulary", str(text), "--target", "mini", "-o", str(out), "--size", "64"]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert said.exit_code == 0 and "100.00% of the tokens" in said.output
    tokenizer = Tokenizer.from_folder(resolve_model("mini"))
    used = set(tokenizer.encode(text.read_text(), add_special_tokens=False))
    assert used <= set(read_token_list(out).token_ids.tolist())
    llm = mini.drafting("draft", draft_vocabulary=str(out), adaptive=False)
    prompts, params = list(mini.PROMPTS[:2]), SamplingParams(max_tokens=24, temperature=0.0)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == mini.alone(mini.plain(), prompts, params)
    assert sum(c.accepted for output in outputs for c in output.outputs[0].stats.drafters.values()) > 0
