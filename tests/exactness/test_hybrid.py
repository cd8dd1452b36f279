"""Drafts change no token of a model with recurrent layers, however requests are grouped, chunked and preempted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.cache.states import bytes_per_slot
from forerun.core import CompletionOutput
from forerun.models.base import state_specs_of
from tests.drafters import test_dflash
from tests.drafters.test_mtp import WithModule
from tests.models import factory
from tests.support import harness, heads
from tests.support.adversary import Adversary

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [3, 3, 3], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43)), [5, 6, 7, 8, 5])
NUM_TOKENS = 20  # of an answer
ENGINES: dict[str, dict[str, object]] = {
    "plain": {},
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 5, "prefix_caching": False},
    "preempted": {"num_kv_blocks": 16, "block_size": 4, "max_model_len": 64},
}
DRAFTERS = ("none", "ngram", "suffix", "recycling", "layer_skip", "portfolio=suffix+ngram")
WITH_MODULE = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
MODELS = (*WITH_MODULE, "kimi-linear", "lfm2", "granite-hybrid", "falcon-h1", "nemotron-h", "nemotron-h-latent")


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("hybrid")
    if family in WITH_MODULE:
        return LLM(str(WithModule(folder, family).folder), max_num_seqs=1, threads=1)
    return LLM(str(factory.make_checkpoint(family, folder)), max_num_seqs=1, threads=1)


def drafters_of(llm: LLM, drafters: tuple[str, ...], with_module: tuple[str, ...]) -> tuple[str, ...]:
    """These drafters, with those that need a module where the checkpoint has one."""
    has_module = llm.loaded.config is not None and llm.loaded.config.model_type.startswith("qwen")
    return (*drafters, *with_module) if has_module else drafters


def answers(llm: LLM, temperature: float) -> list[CompletionOutput]:
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True, top_k=4)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_drafter_changes_a_token(llm: LLM, family: str, temperature: float) -> None:
    """Every drafter in one engine at each temperature, in others with the next models: in all of them over four."""
    expected, accepted = [answer.token_ids for answer in answers(llm, temperature)], 0
    drafters = drafters_of(llm, DRAFTERS, ("mtp", "portfolio=suffix+mtp"))
    first, pairs = MODELS.index(family) + 2 * int(temperature), product(enumerate(drafters), enumerate(ENGINES.items()))
    for drafter, name, options in [(d, *e) for (i, d), (j, e) in pairs if (first + i + j) % len(ENGINES) == 0]:
        own = {} if drafter == "none" else {"adaptive": False}
        made = llm.with_drafter(drafter, **own, **{"max_num_seqs": 4, **options})
        found = answers(made, temperature)
        assert [answer.token_ids for answer in found] == expected, (drafter, options)
        assert any(answer.stats.num_preemptions for answer in found) == (name == "preempted"), (drafter, name)
        accepted += sum(map(bool, (source for answer in found for source in answer.token_sources)))
    assert accepted > 0


@pytest.mark.parametrize("case", ["qwen3.5", "kimi-linear", "falcon-h1", "granite-hybrid"])
def test_layers_that_miss_nothing_draft_what_the_target_says(case: str, tmp_path: Path) -> None:
    """All but a last one that adds nothing: drafts are right only if each goes on from the state of the one before."""
    folder = factory.make_checkpoint(case, tmp_path)
    num_layers = json.loads((folder / "config.json").read_text("utf-8"))["num_hidden_layers"]
    file = folder / "model.safetensors"
    last = re.compile(rf"layers\.{num_layers - 1}\..*(o_proj|out_proj|down_proj|output_linear|w2)(\.weight)?$")
    tensors = {n: torch.zeros_like(t) if last.search(n) else t for n, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    llm = LLM(str(folder), max_num_seqs=4, threads=1)
    layers = tuple(range(num_layers - 1))
    made = llm.with_drafter("layer_skip", layers=layers, adaptive=False, max_draft_tokens=4)
    for temperature in (0.0, 1.0):
        expected, found = answers(llm, temperature), answers(made, temperature)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert all(answer.stats.num_steps <= NUM_TOKENS / 5 + 2 for answer in found), [a.stats.num_steps for a in found]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_with_weights_of_their_own_change_no_token(temperature: float, tmp_path: Path) -> None:
    """The target's recurrent layers add little, so that its one attending layer is a draft model that is often right.

    Alone, as PARD's, and with few tokens to choose from; and a DFlash head that reads states behind recurrent layers.
    """
    folder = factory.make_checkpoint("granite-hybrid", tmp_path / "target")
    twin, pard, kept = attending_part(folder, tmp_path / "draft"), tmp_path / "pard", tmp_path / "kept.json"
    shutil.copytree(twin, pard)
    change_config(pard, pard_token=test_dflash.MASK)
    kept.write_text(json.dumps(list(range(3, 60))))
    # Random layers, which are right now and then beside a table without Granite's factor.
    block = {"mask_token_id": test_dflash.MASK, "target_layer_ids": [0, 2, 3], "input_embedding_scale": 1.0}
    layout = test_dflash.Layout({"dflash_config": block, "block_size": 6}, (1, 3, 4))
    head = heads.write(tmp_path / "head", test_dflash.tensors_of(layout, heads.Draw(1)), test_dflash.config_of(layout))
    llm = LLM(str(folder), max_num_seqs=1, threads=1)
    expected = [answer.token_ids for answer in answers(llm, temperature)]
    asked: list[tuple[str, dict[str, object]]] = [
        (f"draft={twin}", {"tree_width": 3}), (f"draft={twin}", {"draft_vocabulary": str(kept)}), (f"draft={pard}", {}),
        (f"dflash={head}", {"tree_width": 1}), (f"dflash={head}", {}),
    ]  # fmt: skip
    for index, (drafter, own) in enumerate(asked):
        for name in (list(ENGINES)[(index + int(temperature)) % len(ENGINES)], "preempted"):
            made = llm.with_drafter(drafter, adaptive=False, **{"max_num_seqs": 4, **ENGINES[name], **own})
            found = answers(made, temperature)
            assert [answer.token_ids for answer in found] == expected, (drafter, own, name)
            sources = [source for answer in found for source in answer.token_sources]
            assert sum(map(bool, sources)) > (len(sources) / 5 if "draft=" in drafter else 0), (drafter, own, name)
    check_prefixes(llm, f"dflash={head}")


def attending_part(folder: Path, to: Path) -> Path:
    """Makes what the recurrent layers of the hybrid in `folder` add a tenth of what it was -> a model without them."""
    kinds = json.loads((folder / "config.json").read_text("utf-8"))["layer_types"]
    [place] = [place for place, kind in enumerate(kinds) if "full" in kind or kind == "attention"]
    shutil.copytree(folder, to)
    added = re.compile(rf"layers\.(?!{place}\.)\d+\..*(out_proj|output_linear)\.weight$")
    tensors = {n: 0.1 * t if added.search(n) else t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = {n: t for n, t in tensors.items() if f"layers.{place}." in n or "layers." not in n}
    renamed = {n.replace(f"layers.{place}.", "layers.0."): t for n, t in kept.items()}
    save_file(renamed, to / "model.safetensors", {"format": "pt"})
    change_config(to, num_hidden_layers=1, layer_types=["attention"])
    return to


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), encoding="utf-8")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_lies_changes_no_token(llm: LLM, family: str, temperature: float) -> None:
    """In every engine, half of them at each temperature, the other half with the next model."""
    expected = [answer.token_ids for answer in answers(llm, temperature)]
    truth = dict(zip(map(tuple, PROMPTS), expected, strict=True))
    first = MODELS.index(family) + int(temperature)
    for seed, options in [pair for pair in enumerate(ENGINES.values()) if (first + pair[0]) % 2 == 0]:
        made = llm.with_drafter("none", **{"max_num_seqs": 4, **options})
        adversary = Adversary(
            seed, factory.VOCAB_SIZE, max_nodes=12, truth=lambda request: truth[request.prompt_token_ids]
        )
        harness.with_drafter(made.engine, adversary)
        found = answers(made, temperature)
        assert [answer.token_ids for answer in found] == expected, options
        assert any(source for answer in found for source in answer.token_sources), "the adversary was never right"


def test_prefixes_whose_state_is_kept_change_no_token(llm: LLM) -> None:
    """Turns of a chat: each prompt is the last one and its answer, and more. Each is asked twice."""
    for drafter in drafters_of(llm, ("ngram",), ("mtp",)):
        check_prefixes(llm, drafter)


def check_prefixes(llm: LLM, drafter: str) -> None:
    made = llm.with_drafter(drafter, adaptive=False, max_num_seqs=3, block_size=4)
    cold = llm.with_drafter("none", max_num_seqs=3, block_size=4, prefix_caching=False)
    params = SamplingParams(temperature=1.0, max_tokens=11, seed=1, ignore_eos=True, n=2)
    prompts = [list(prompt) for prompt in PROMPTS]
    for _ in range(3):
        for _ in range(2):
            found, expected = made.generate(prompts, params), cold.generate(prompts, params)
            assert [[o.token_ids for o in a.outputs] for a in found] == [
                [o.token_ids for o in a.outputs] for a in expected
            ]
        prompts = [[*p, *answer.outputs[0].token_ids, 7] for p, answer in zip(prompts, found, strict=True)]
    cache = made.engine.scheduler.prefix_cache
    assert cache is not None and cache.stats.hit_tokens > cache.stats.queried_tokens / 3


def test_one_slot_is_enough(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept states give way to requests, and a state that there is no room to copy moves."""
    per_slot = bytes_per_slot(state_specs_of(llm.loaded.model))
    expected = [answer.token_ids for answer in answers(llm, 1.0)]
    for num_slots in (1, 2):
        with monkeypatch.context() as patched:
            patched.setattr("forerun.assemble.memory_of", lambda device, n=num_slots: 4 * per_slot * n)
            made = llm.with_drafter("ngram", adaptive=False, max_num_seqs=4, block_size=4, num_kv_blocks=64)
        for _ in range(2):
            assert [answer.token_ids for answer in answers(made, 1.0)] == expected


def test_only_requests_that_can_go_on_from_a_state_wait_for_it(llm: LLM) -> None:
    common = list(range(20, 40))
    for tails, num_running in (([[3] * 6, [4] * 6, [5] * 6], 3), ([[3], [4, 5, 6, 7, 8], [5]], 1)):
        made = llm.with_drafter("none", max_num_seqs=3, block_size=4)
        groups = [made.prepare([*common, *tail], SamplingParams(max_tokens=2, ignore_eos=True)) for tail in tails]
        for group in groups:
            made.start(group)
        made.step()
        assert len(made.engine.scheduler.running) == num_running
        while made.engine.has_work:
            made.step()
        cached = [group.output().outputs[0].stats.num_cached_tokens for group in groups]
        assert cached == ([0, 0, 0] if num_running == 3 else [0, 20, 20])


@pytest.mark.parametrize("place", ["model.forward", "verifier.verify", "model.commit", "drafter.observe"])
@pytest.mark.parametrize("is_before", [True, False])
def test_an_interrupted_step_changes_no_token(
    llm: LLM, place: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other requests: their states may have advanced, in some layers or all, and their tokens not."""
    made = llm.with_drafter("ngram", adaptive=False, max_num_seqs=3, block_size=4)
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=1, ignore_eos=True, top_k=4)
    streams = [made.stream(prompt, params) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    with monkeypatch.context() as patched:
        owner, name = ARE_CALLED[place](made)
        patched.setattr(owner, name, interrupted(getattr(owner, name), is_before))
        with pytest.raises(KeyboardInterrupt):
            list(streams[0])
    for stream, prompt in zip(streams[1:], PROMPTS[1:], strict=False):
        [*_, last] = stream
        [expected] = llm.generate([prompt], params)
        assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    made.engine.scheduler.check_integrity()


ARE_CALLED: dict[str, Callable[[LLM], tuple[object, str]]] = {
    "model.forward": lambda llm: (llm.kernels, "causal_conv"),
    "verifier.verify": lambda llm: (llm.engine.verifier, "verify"),
    "model.commit": lambda llm: (llm.engine.model, "commit"),
    "drafter.observe": lambda llm: (llm.engine.drafter, "observe"),
}


def interrupted(call: Callable[..., object], is_before: bool) -> Callable[..., object]:
    def raising(*given: object, **named: object) -> object:
        if not is_before:
            call(*given, **named)
        raise KeyboardInterrupt

    return raising
