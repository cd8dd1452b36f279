"""Gemma 4's assistant gives the logits of transformers' own on the target's keys and values, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from forerun import LLM, SamplingParams
from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import CheckpointError, ConfigError, ModelError, UnsupportedError, VocabularyError
from forerun.llm import engine_config
from forerun.models.decoder import Decoder
from forerun.models.heads.mtp import open_mtp, read_mtp
from forerun.models.heads.vocabulary import DraftVocabulary
from forerun.models.loader import load_model
from forerun.models.trimmed import KeptTokens
from tests.models import factory
from tests.support import tiny
from tests.support.drafting import assert_as_computed, overhear

WEIGHTS = "model.safetensors"
SLIDING, FULL = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": factory.VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 128,
}
# of each target: what its assistant says of heads and windows
LIKE = {
    "gemma4": {"sliding_window": 7, "global_head_dim": 24},
    "gemma4-experts": {
        "sliding_window": 5, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
}  # fmt: skip
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}


def _sharing(config: Gemma4TextConfig) -> list[str | None]:
    """The last layer of each type with keys lends them; transformers 5.23 says it of targets and asks it of assistants,
    and does not do so where no layer reads another's, or all do."""
    num, num_own = config.num_hidden_layers, config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(config.layer_types[:num_own])}
    lending = set(last.values())
    return ["reuse" if index >= num_own else "store" if index in lending else None for index in range(num)]


@pytest.fixture(autouse=True)
def lent_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(_sharing))


@dataclass
class Pair:
    """A random target and an assistant of it, as transformers has them and in folders."""

    target: Any
    assistant: Any
    folder: Path
    head: Path

    @torch.no_grad()
    def after(self, known: Sequence[int], drafted: Sequence[int], states: Any = None) -> Tensor:
        """Logits [V] after known and then drafted tokens, as transformers' candidate generator asks for them."""
        given = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": False}
        seen = self.target.model(torch.tensor([list(known[:-1])]), **given)
        feature, table = seen.hidden_states[-1][:, -1:], self.target.get_input_embeddings()
        for token in (known[-1], *drafted):
            pair = torch.cat([table(torch.tensor([[token]])), feature], dim=-1)
            out = self.assistant(
                inputs_embeds=pair,
                position_ids=torch.tensor([[len(known) - 1]]),
                shared_kv_states=dict(seen.shared_kv_states),
            )
            feature, logits = out.last_hidden_state, out.logits[0, 0]
        if self.assistant.config.use_ordered_embeddings:  # tokens of other clusters are 1 below all of these
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        return logits


def make(folder: Path, case: str = "gemma4", dtype: torch.dtype = torch.float32, **fields: Any) -> Pair:
    model_type, own = factory.CASES[case]
    target = factory.random_hf_model(model_type, {**own, "max_position_embeddings": 128})
    factory.save_checkpoint(target, folder / "target", dtype)
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config={"model_type": "gemma4_text", **SMALL, **LIKE[case]}, backbone_hidden_size=32,
        **fields,
    )  # fmt: skip
    assistant = factory.random_model_of(config, seed=5)
    assistant.model.embed_tokens.weight.data.mul_(3)  # sure enough of itself to be accepted now and then
    if fields.get("use_ordered_embeddings"):
        order = torch.randperm(factory.VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        assistant.masked_embedding.token_ordering.copy_(order)
    assistant.to(dtype).save_pretrained(folder / "assistant")
    return Pair(target, assistant, folder / "target", folder / "assistant")


def engine(model: Any, head: Path, width: int, **options: Any) -> Engine:
    config = EngineConfig(
        model="tiny",
        drafter=DrafterConfig(name="mtp", model=str(head), max_draft_tokens=5, tree_width=width, adaptive=False),
        **{"block_size": 4, "max_model_len": tiny.MAX_LEN, **options},
    )
    return assemble(config, model, tiny.kernels(), lambda name: model, None)


@pytest.mark.parametrize(
    ("case", "fields", "width"),
    [("gemma4", {}, 1), ("gemma4-experts", {}, 3), ("gemma4", ORDERED, 3)],
    ids=["chains", "trees", "clusters"],
)
def test_it_computes_what_transformers_computes(case: str, fields: dict[str, Any], width: int, tmp_path: Path) -> None:
    pair = make(tmp_path, case, **fields)
    model = load_model(pair.folder, tiny.kernels()).model
    made = engine(model, pair.head, width, max_num_batched_tokens=24)
    ear, wanted = overhear(made, stride=3), tiny.groups(3, temperature=1.0, max_tokens=12)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.run(tiny.engine(model), wanted)[0]  # type: ignore[arg-type]
    assert_as_computed(ear, pair, pair.after)  # type: ignore[arg-type]
    assert max(len(known) for known, _, _ in ear.heard) > 20  # beyond its windows
    assert tiny.num_accepted(stats) > 0
    assert tiny.inner(made).runner.replays == (not fields)  # type: ignore[attr-defined]


ENGINES: dict[str, dict[str, object]] = {
    "plain": {},
    "without a prefix cache": {"prefix_caching": False},
    "chunks": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 16, "block_size": 4, "max_model_len": 64},
}
PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11, 9, 10, 11, 9], list(range(20, 43)), [5])


@pytest.mark.parametrize(
    ("case", "fields", "dtype", "engines"),
    [
        ("gemma4", ORDERED, torch.float32, ("preempted",)),
        ("gemma4-experts", {}, torch.bfloat16, ("plain", "without a prefix cache", "chunks", "preempted")),
    ],
    ids=["clusters", "bfloat16"],
)
def test_it_changes_nothing_but_speed(
    case: str, fields: dict[str, Any], dtype: torch.dtype, engines: tuple[str, ...], tmp_path: Path
) -> None:
    pair, drafted = make(tmp_path, case, dtype, **fields), 0
    llm = LLM(str(pair.folder), threads=1)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=12, seed=1, ignore_eos=True)
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        for name in engines:
            made = llm.with_drafter(f"mtp={pair.head}", adaptive=False, **ENGINES[name])
            for _ in range(2):  # the second time prompts are in the prefix cache
                found = [output.outputs[0] for output in made.generate(PROMPTS, params)]
                assert [answer.token_ids for answer in found] == expected, (temperature, name)
            assert any(answer.stats.num_preemptions for answer in found) == (name == "preempted"), name
            drafted += sum(count.drafted for answer in found for count in answer.stats.drafters.values())
    assert drafted > 0


def test_auto_takes_the_assistant_in_the_targets_folder(tmp_path: Path) -> None:
    pair = make(tmp_path)
    members = engine_config(str(pair.folder), {"drafter": "auto"}).drafter.members
    assert [member.name for member in members] == ["suffix", "recycling"]
    own = pair.head.rename(pair.folder / "mtp")
    members = engine_config(str(pair.folder), {"drafter": "auto"}).drafter.members
    assert [(member.name, member.model) for member in members][2:] == [("mtp", str(own))]
    llm = LLM(str(pair.folder), drafter="mtp", adaptive=False, threads=1)
    [output] = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert output.outputs[0].stats.drafters["mtp"].drafted > 0


def test_it_is_no_model(tmp_path: Path) -> None:
    head = make(tmp_path).head
    factory.write_tokenizer(head)
    with pytest.raises(ConfigError, match="is a draft head, not a model: .* drafter 'mtp="):
        LLM(str(head), threads=1)


def _loaded(pair: Pair, target: str = "") -> None:
    folder = factory.make_checkpoint(target, pair.folder.parent / "other") if target else pair.folder
    model = load_model(folder, tiny.kernels()).model
    assert isinstance(model, Decoder)
    read_mtp(open_mtp(pair.head), model, tiny.kernels())


@pytest.mark.parametrize(
    ("changed", "in_text", "error", "message"),
    [
        ({"backbone_hidden_size": 40}, {}, UnsupportedError, "hidden size 40 .backbone_hidden_size"),
        ({}, {"vocab_size": 50}, VocabularyError, "trained for 50 tokens"),
        ({}, {"num_key_value_heads": 1}, UnsupportedError, "1 heads and 16 entries .* has 2 and 16"),
        ({}, {"per_layer_config": {"2": {"head_dim": 16}}}, UnsupportedError, "without a window, which has 2 and 24"),
        ({}, {"num_kv_shared_layers": 1}, UnsupportedError, "num_kv_shared_layers of the assistant is 1"),
        ({}, {"hidden_size_per_layer_input": 4}, UnsupportedError, "hidden_size_per_layer_input"),
        ({}, {"attention_sink_size": 4}, UnsupportedError, "attention_sink_size"),
        ({"text_config": None}, {}, CheckpointError, "no text_config"),
        ({**ORDERED, "num_centroids": 7}, {}, CheckpointError, "7 clusters"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: dict[str, Any], in_text: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    pair = make(tmp_path, **ORDERED)
    path = pair.head / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["text_config"] |= in_text
    path.write_text(json.dumps(config | changed), encoding="utf-8")
    with pytest.raises(error, match=message):
        _loaded(pair)


def test_targets_without_such_keys_and_damaged_tensors_are_refused(tmp_path: Path) -> None:
    pair = make(tmp_path, **ORDERED)
    _loaded(pair)
    with pytest.raises(UnsupportedError, match="last layer with a window, which is not there"):
        _loaded(pair, "llama")
    tensors, ordering = load_file(pair.head / WEIGHTS), "masked_embedding.token_ordering"
    twice = tensors[ordering].clone()
    twice[0] = twice[1]
    save_file({**tensors, ordering: twice}, pair.head / WEIGHTS)
    with pytest.raises(CheckpointError, match="every one of 96 tokens once"):
        _loaded(pair)
    save_file({**tensors, "model.layers.0.self_attn.extra.weight": torch.ones(2)}, pair.head / WEIGHTS)
    with pytest.raises(UnsupportedError, match="1 tensors that this layout does not ask for"):
        _loaded(pair)
    keys = {f"model.layers.0.self_attn.{name}_proj.weight": torch.ones(2) for name in "kv"}
    save_file({**tensors, **keys}, pair.head / WEIGHTS)  # as published files of targets have them
    _loaded(pair)


def test_a_draft_vocabulary_leaves_some_rows_and_no_clusters(tmp_path: Path) -> None:
    pair, clustered = make(tmp_path / "plain"), make(tmp_path / "clusters", **ORDERED)
    target = load_model(pair.folder, tiny.kernels()).model
    assert isinstance(target, Decoder)
    kept = KeptTokens(DraftVocabulary(torch.arange(10, 40), target.vocab_size), target, None)
    whole, some = (read_mtp(open_mtp(pair.head), target, tiny.kernels(), kept=given) for given in (None, kept))
    x = torch.randn(3, whole.parts.exit.lm_head.weight.shape[1])
    assert torch.equal(some.parts.exit.lm_head(x), whole.parts.exit.lm_head(x)[:, 10:40])
    assert some.vocab_size == whole.vocab_size and some.weight_bytes < whole.weight_bytes
    with pytest.raises(UnsupportedError, match="a few clusters of tokens already"):
        read_mtp(open_mtp(clustered.head), target, tiny.kernels(), kept=kept)
