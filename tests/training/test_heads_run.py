"""Whole runs over a tiny random target: loss falls, resuming is exact, what is refused, what is written."""

from __future__ import annotations

import errno
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.models import factory
from torch import Tensor
from typer.testing import CliRunner

from forerun import LLM, SamplingParams
from forerun.cli.train import app
from forerun.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ForerunError,
    ResourceError,
    TrainingError,
    UnsupportedError,
)
from forerun.kernels.select import select_kernels
from forerun.models.loader import load_model
from forerun.training.chat import END_OF_TEXT
from forerun.training.checkpoint import read_checkpoint, write_atomically
from forerun.training.export import export_model
from forerun.training.heads import answers, capture, plots, sequences
from forerun.training.heads.capture import progress_of
from forerun.training.heads.config import HeadJob, HeadRecipe, load_head_recipe
from forerun.training.heads.console import HeadConsole
from forerun.training.heads.engine_target import EngineTarget
from forerun.training.heads.run import load_target, make_trainer, train_head
from forerun.training.heads.target import NetTarget
from forerun.training.heads.train import HeadReport
from forerun.training.net import Net, NetConfig
from forerun.training.tokenizer import save_tokenizer, train_tokenizer

SHAPE = NetConfig(
    vocab_size=280, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    max_positions=128,
)  # fmt: skip
WORDS = ("the", "a", "dog", "cat", "saw", "ran", "to", "house", "tree", "under", "big", "small", "red", "and", "happy")
RECIPE = """
kind = "{kind}"
name = "tiny"
seed = 5
[head]
{head}
[schedule]
steps = 8
warmup_steps = 1
decay_steps = 3
seq_len = 32
tokens_per_step = 256
micro_tokens = 128
[optimizer]
name = "muon"
adamw_lr = 0.01
[data]
prompt_tokens = 12
answer_tokens = 20
heldout_prompts = 3
heldout_tokens = 16
[run]
log_every = 1
checkpoint_every = 100
heldout_every = 4
precision = "float32"
"""
HEADS = {
    "medusa": "num_heads = 2\nvocab_size = 64",
    "eagle3": "num_steps = 2\nvocab_size = 64",
    "dflash": "block_size = 3\nnum_layers = 1\nnum_blocks = 6",
    "mtp": "num_steps = 2",
    "draft": "num_steps = 2\nhidden_size = 16\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\nhead_dim = 8",
}


class StopAt(HeadConsole):
    """Asks for a stop at a given step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def show(self, report: HeadReport) -> None:
        """Stops once the step is reached."""
        self.stopping = report.step >= self.step


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model folder, and beside it a file of token ids and one of prompts."""
    folder = tmp_path_factory.mktemp("target")
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(40)) for _ in range(60)]
    tokenizer = train_tokenizer(texts, SHAPE.vocab_size)
    (folder / "tokenizer").mkdir()
    save_tokenizer(tokenizer, folder / "tokenizer", SHAPE.max_positions)
    torch.manual_seed(0)
    export_model(Net(replace(SHAPE, vocab_size=tokenizer.get_vocab_size())), folder / "tokenizer", folder / "model")
    ids = [token for text in texts for token in (*tokenizer.encode(text).ids, tokenizer.token_to_id(END_OF_TEXT))]
    np.array(ids, dtype=np.uint16).tofile(folder / "tokens.bin")
    records = [{"turns": [["U", text], ["S", "yes"]]} for text in texts[:20]] + [{"turns": []}, {"prompt": " "}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def recipe_of(kind: str, folder: Path) -> HeadRecipe:
    """A recipe that trains in a second."""
    path = folder / f"{kind}.toml"
    path.write_text(RECIPE.format(kind=kind, head=HEADS[kind]))
    return load_head_recipe(kind, path)


def job_of(target: Path, folder: Path, data: str = "tokens.bin", fresh: bool = False) -> HeadJob:
    """A run in `folder`."""
    return HeadJob(str(target / "model"), (target / data,), folder, fresh)


def head_of(folder: Path) -> dict[str, Tensor]:
    """The weights of the last checkpoint."""
    weights: dict[str, Tensor] = read_checkpoint(folder / "last.pt")["head"]
    return weights


@pytest.mark.parametrize("kind", list(HEADS))
def test_interrupted_equals_uninterrupted_and_the_loss_falls(kind: str, target: Path, tmp_path: Path) -> None:
    recipe = recipe_of(kind, tmp_path)
    assert train_head(recipe, job_of(target, tmp_path / "whole"), HeadConsole())
    assert not train_head(recipe, job_of(target, tmp_path / "parts"), StopAt(3))
    assert read_checkpoint(tmp_path / "parts" / "last.pt")["step"] == 3
    assert train_head(recipe, job_of(target, tmp_path / "parts"), HeadConsole())
    whole, parts = head_of(tmp_path / "whole"), head_of(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(whole[name].equal(parts[name]) for name in whole)
    metrics = json.loads((tmp_path / "whole" / "metrics.json").read_text())
    history = metrics["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    assert [line["step"] for line in history if line["acceptance_length"] is not None] == [4, 8]
    assert metrics["acceptance_length"] >= 1 and len(history[-1]["acceptance_by_depth"]) == 2
    assert load_file(tmp_path / "whole" / "export" / "model.safetensors")
    assert json.loads((tmp_path / "whole" / "export" / "config.json").read_text())["hidden_size"] in (16, 32)


def test_without_matplotlib_a_run_says_that_there_is_no_picture(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    train_head(recipe_of("medusa", tmp_path), job_of(target, tmp_path / "run"), HeadConsole())
    assert "no loss.png: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "run" / "loss.png").exists()


def test_exported_eagle3_says_what_it_is(target: Path, tmp_path: Path) -> None:
    train_head(recipe_of("eagle3", tmp_path), job_of(target, tmp_path / "run"), HeadConsole())
    tensors = load_file(tmp_path / "run" / "export" / "model.safetensors")
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["draft_vocab_size"] == 64 and config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert tensors["lm_head.weight"].shape == (64, 32) and tensors["lm_head.weight"].dtype == torch.bfloat16
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    chosen = tensors["d2t"] + torch.arange(64)
    assert tensors["t2d"].nonzero().flatten().equal(chosen)


def test_an_exported_dflash_head_drafts_for_its_target(target: Path, tmp_path: Path) -> None:
    train_head(recipe_of("dflash", tmp_path), job_of(target, tmp_path / "run"), HeadConsole())
    model, head = str(target / "model"), tmp_path / "run" / "export"
    config = json.loads((head / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1] and config["block_size"] == 3
    params, texts = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True), []
    for drafter in ("none", f"dflash={head}"):
        output = LLM(model, drafter=drafter, adaptive=False).generate(["the dog saw"], params)[0].outputs[0]
        texts.append(output.token_ids)
    assert texts[0] == texts[1]
    assert output.stats.drafters["dflash"].drafted > 0


def test_a_run_of_another_recipe_or_data_is_not_continued(target: Path, tmp_path: Path) -> None:
    recipe, folder = recipe_of("medusa", tmp_path), tmp_path / "run"
    train_head(recipe, job_of(target, folder), HeadConsole())
    wider = replace(recipe, head=replace(recipe.head, num_layers=2))
    with pytest.raises(TrainingError, match=r"head\.num_layers was 1, is 2\. .*--fresh"):
        train_head(wider, job_of(target, folder), HeadConsole())
    with pytest.raises(TrainingError, match="another --out"):
        train_head(recipe.with_sizes(None, None, 640, None), job_of(target, folder), HeadConsole())
    assert train_head(wider, job_of(target, folder, fresh=True), HeadConsole())


def test_fields_that_an_older_run_lacks_do_not_count(target: Path, tmp_path: Path) -> None:
    recipe, folder = recipe_of("medusa", tmp_path), tmp_path / "run"
    train_head(recipe, job_of(target, folder), HeadConsole())
    state = read_checkpoint(folder / "last.pt")
    del state["identity"]["data"]["capture_bytes"]
    write_atomically(folder / "last.pt", state)
    assert train_head(recipe, job_of(target, folder), HeadConsole())
    write_atomically(folder / "last.pt", {**state, "identity": {}})
    with pytest.raises(TrainingError, match="holds another training: .* --fresh"):
        train_head(recipe, job_of(target, folder), HeadConsole())


def test_a_run_is_kept_until_new_data_is_read(target: Path, tmp_path: Path) -> None:
    recipe, run = recipe_of("medusa", tmp_path), tmp_path / "run"
    assert train_head(recipe, job_of(target, run), HeadConsole())
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    fresh = job_of(target, run, fresh=True)
    for data, content in (("gone.jsonl", None), ("bad.answers", "milk"), ("short.bin", "ab"), ("few.txt", "One.")):
        if content is not None:
            (tmp_path / data).write_text(content)
        with pytest.raises(DataError):
            train_head(recipe, replace(fresh, data=(tmp_path / data,)), HeadConsole())
    with pytest.raises(TrainingError, match="in it is to be read; use another --out"):
        train_head(recipe, replace(fresh, data=(run / "data" / "heldout.jsonl",)), HeadConsole())
    with pytest.raises(CheckpointError, match="start_from"):
        train_head(replace(recipe, start_from=str(tmp_path)), fresh, HeadConsole())
    shutil.copytree(run / "export", tmp_path / "export")
    deeper = replace(recipe, head=replace(recipe.head, num_layers=2), start_from=str(tmp_path / "export"))
    with pytest.raises(CheckpointError, match=r"export and \[head\] differ in blocks\.0\.layers\.1\.bias"):
        train_head(deeper, fresh, HeadConsole())
    eagle = recipe_of("eagle3", tmp_path)
    with pytest.raises(ConfigError, match=r"head\.aux_layers = \[0, 1, 9\]"):
        train_head(replace(eagle, head=replace(eagle.head, aux_layers=(0, 1, 9))), fresh, HeadConsole())
    assert kept == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_answers_are_written_once_and_gone_on_with(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "BATCH", 4)
    recipe, calls = recipe_of("mtp", tmp_path), []
    original = sequences.engine_writer

    def counting(*arguments: object) -> answers.Writer:
        write = original(*arguments)  # type: ignore[arg-type]

        def count(
            prompts: Sequence[Sequence[int]], temperatures: Sequence[float], numbers: Sequence[int]
        ) -> list[list[int]]:
            calls.append(list(temperatures))
            return write(prompts, temperatures, numbers)

        return count

    monkeypatch.setattr(sequences, "engine_writer", counting)
    job = job_of(target, tmp_path / "run", "prompts.jsonl")
    assert train_head(recipe, job, HeadConsole())
    assert "20 prompts; 2 empty records left out, 20 overlong ones cut" in capsys.readouterr().out
    assert [len(call) for call in calls] == [3, 4, 4, 4, 4, 1]
    assert set(calls[0]) == {0.0} and sum(map(sum, calls[1:])) == 9  # held out: greedy; else every other one at T = 1
    path = tmp_path / "run" / "data" / "answers.jsonl"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])  # as a crash leaves it
    make_trainer(recipe, job, HeadConsole())
    assert path.read_text() == whole
    with pytest.raises(TrainingError, match="was written for"):
        make_trainer(replace(recipe, seed=6), job, HeadConsole())


def test_capture_within_a_budget_is_gone_on_with(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "ROWS_AT_ONCE", 2)
    budget = 10 * 32 * 3 * 32 * 2 + 1  # ten sequences of 32 tokens with three states of 32 bfloat16
    recipe = recipe_of("eagle3", tmp_path).with_sizes(None, None, None, budget)
    job = job_of(target, tmp_path / "run")
    trainer = make_trainer(recipe, job, HeadConsole())
    assert len(trainer.feed.rows) == 10
    done = tmp_path / "run" / "data" / "states.bin"
    assert done.stat().st_size == budget - 1
    found = load_target(job.target, "cpu").states(trainer.feed.batch([4], 32).ids, [1])[1]
    torch.testing.assert_close(trainer.feed.batch([4], 32).states[1], found, rtol=1e-2, atol=1e-2)
    whole, about = done.read_bytes(), json.loads(progress_of(done).read_text())
    part = done.with_name("states.part")
    part.write_bytes(whole[: 5 * len(whole) // 10])
    progress_of(part).write_text(json.dumps({**about, "done": 4}))
    done.unlink()
    make_trainer(recipe, job, HeadConsole())
    assert done.read_bytes() == whole and not part.exists()
    assert train_head(recipe, job, HeadConsole())


def test_a_full_disk_is_said_and_leaves_nothing(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(capture, "write_pass", full)
    recipe = recipe_of("medusa", tmp_path).with_sizes(None, None, None, 10**6)
    with pytest.raises(ResourceError, match="disk is full.*--capture-bytes"):
        make_trainer(recipe, job_of(target, tmp_path / "run"), HeadConsole())
    assert not list((tmp_path / "run" / "data").glob("states*"))


def test_the_engine_gives_the_states_of_the_network(target: Path) -> None:
    net = load_target(str(target / "model"), "cpu")
    assert isinstance(net, NetTarget)
    engine = EngineTarget(load_model(target / "model", select_kernels("reference")))
    ids = torch.randint(0, net.shape.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    layers = (0, 1, 2, 3)
    expected, found = net.states(ids, layers), engine.states(ids, layers)
    for layer in layers:
        torch.testing.assert_close(found[layer], expected[layer], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(engine.final_norm(found[2]), found[3])
    assert engine.embedding.equal(net.embedding) and engine.head.equal(net.head)
    assert replace(engine.shape, rope_theta=net.shape.rope_theta) == net.shape


def test_the_engine_gives_the_states_of_recurrent_layers_too(tmp_path: Path) -> None:
    """Each sequence begins with an empty state, whatever was read before it."""
    loaded = load_model(factory.make_checkpoint("qwen3-next", tmp_path), select_kernels("reference"))
    ids = torch.randint(0, factory.VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(1))
    layers = (0, 2, 4, 5)
    found = EngineTarget(loaded).states(ids, layers)
    for row, tokens in enumerate(ids.tolist()):
        expected = factory.Runner(loaded.model, len(tokens)).span(tokens, hidden=layers).hidden
        assert all(found[layer][row].equal(expected[layer]) for layer in layers)


@pytest.mark.parametrize("kind", ["dflash", "mtp"])
def test_heads_are_trained_for_a_model_with_recurrent_layers(kind: str, tmp_path: Path) -> None:
    factory.make_checkpoint("qwen3-next", tmp_path / "model")
    words = np.random.default_rng(0).integers(3, factory.VOCAB_SIZE, (12, 7)).astype(np.uint16)
    words[np.random.default_rng(1).integers(0, 12, 300)].tofile(tmp_path / "tokens.bin")
    assert train_head(recipe_of(kind, tmp_path), job_of(tmp_path, tmp_path / "run"), HeadConsole())
    head, params = tmp_path / "run" / "export", SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    plain = LLM(str(tmp_path / "model"), threads=1)
    expected = plain.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    drafted = plain.with_drafter(f"{kind}={head}", adaptive=False).generate([[5, 6, 7]], params)[0].outputs[0]
    assert drafted.token_ids == expected and drafted.stats.drafters[kind].drafted > 0


REFUSED = {
    "too few": ({"max_tokens": 64}, "tokens.bin", DataError, "hold out 3"),
    "no budget": ({"capture_bytes": 100}, "tokens.bin", DataError, "holds no sequence"),
    "no file": ({}, "none.bin", DataError, "no token file"),
    "unknown ending": ({}, "prompts.pdf", DataError, "unknown ending"),
    "long answers": ({"answer_tokens": 30}, "prompts.jsonl", ConfigError, "exceed schedule.seq_len"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_bad_input_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    options, data, kind, words = REFUSED[name]
    recipe = recipe_of("medusa", tmp_path)
    recipe = replace(recipe, data=replace(recipe.data, **options))
    expected: type[ForerunError] = kind
    with pytest.raises(expected, match=words):
        make_trainer(recipe, job_of(target, tmp_path / "run", data), HeadConsole())


def test_a_draft_that_would_have_no_tokenizer_is_refused_before_it_is_trained(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target / "model", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    job = replace(job_of(target, tmp_path / "run"), target=str(tmp_path / "model"))
    with pytest.raises(UnsupportedError, match=r"model has no tokenizer\.json, which a draft model gets"):
        make_trainer(recipe_of("draft", tmp_path), job, HeadConsole())


def test_recipes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "head.toml"
    path.write_text(RECIPE.format(kind="eagle3", head="num_layers = 2"))
    with pytest.raises(ConfigError, match=r"unknown recipe field head\.num_layers"):
        load_head_recipe("eagle3", path)
    with pytest.raises(ConfigError, match="kind = 'eagle3', the command trains mtp"):
        load_head_recipe("mtp", path)
    assert load_head_recipe("mtp", None).head.decay == 0.6


def test_the_command_trains_and_exports(target: Path, tmp_path: Path) -> None:
    recipe_of("mtp", tmp_path)
    words = [
        "mtp",
        "--target",
        str(target / "model"),
        "--data",
        str(target / "tokens.bin"),
        "--out",
        str(tmp_path / "run"),
    ]
    result = CliRunner().invoke(app, [*words, "--recipe", str(tmp_path / "mtp.toml"), "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert "simulated acceptance length" in result.output and "finished" in result.output
    names = set(load_file(tmp_path / "run" / "export" / "model.safetensors"))
    assert "model.mtp_layers.0.input_proj.weight" in names and len(names) == 13


@pytest.mark.parametrize(
    ("kind", "drafter"), [("medusa", "medusa"), ("eagle3", "eagle"), ("mtp", "mtp"), ("draft", "draft")]
)
def test_the_engine_drafts_with_what_was_exported(kind: str, drafter: str, target: Path, tmp_path: Path) -> None:
    """It writes the same text, and about as many tokens a pass as the simulation says (it computes in bfloat16)."""
    recipe = recipe_of(kind, tmp_path)
    recipe = replace(recipe, data=replace(recipe.data, greedy_share=1.0))  # a random target writes like no text
    train_head(recipe, job_of(target, tmp_path / "run", "prompts.jsonl"), HeadConsole())
    simulated = json.loads((tmp_path / "run" / "metrics.json").read_text())["acceptance_length"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "data" / "heldout.jsonl").read_text().splitlines()[1:]]
    options = {"max_draft_tokens": 2, "adaptive": False, "draft_model": str(tmp_path / "run" / "export")}
    llm = LLM(str(target / "model"), drafter=drafter, **options)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    found = [output.outputs[0] for output in llm.generate([line["prompt"] for line in lines], params)]
    assert [list(output.token_ids) for output in found] == [line["answer"] for line in lines]
    num_tokens = sum(output.stats.num_tokens - 1 for output in found)  # behind the first, which the prompt's pass gives
    num_passes = sum(output.stats.num_steps - 1 for output in found)
    assert num_tokens / num_passes == pytest.approx(simulated, rel=0.15)
    assert num_passes < num_tokens, "no draft was ever accepted: the comparison says nothing"
