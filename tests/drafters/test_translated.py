"""Draft models with another tokenizer: the same text at every temperature, drafts worth as much, KV that is right."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers

from forerun import LLM, SamplingParams
from forerun.assemble import assemble
from forerun.config import DrafterConfig, EngineConfig
from forerun.core import Request, RequestOutput
from forerun.drafters.translated import TranslatedDrafter
from forerun.engine.engine import Engine
from forerun.errors import CheckpointError, ConfigError, PromptError, UnsupportedError, VocabularyError
from forerun.kernels.ops import LayerKV
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.speculation.draft import Draft
from forerun.weights.resolve import resolve_model
from forerun.weights.translation import Transcript
from tests.models import factory
from tests.support import harness, mini, other_tokens, tiny
from tests.weights import makers
from tests.weights.test_translation import trained

STRANGE = (
    "A",
    "日本語 😀 é",
)  # the target's answers are bytes that are no text, or cut as no tokenizer would
CHAINS: dict[str, Any] = {"tree_width": 1, "max_draft_tokens": 5, "adaptive": False}


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The embedded draft model under other ids."""
    folder = tmp_path_factory.mktemp("renumbered") / "draft"
    return str(other_tokens.write_renumbered(resolve_model("mini-draft"), folder))


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with a tokenizer of its own."""
    return str(other_tokens.write_small(tmp_path_factory.mktemp("random"), trained()))


def inner(made: Engine) -> TranslatedDrafter:
    drafter = tiny.inner(made)
    assert isinstance(drafter, TranslatedDrafter)
    return drafter


def says(llm: LLM, **params: Any) -> list[RequestOutput]:
    chat = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    prompts = [*(prompt for prompt in mini.PROMPTS if prompt != "A"), "\n\n\t  x", chat, *STRANGE]
    sampling = [SamplingParams(seed=seed, max_tokens=32, **params) for seed in range(len(prompts))]
    return llm.generate(prompts, sampling)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def accepted(outputs: Sequence[RequestOutput]) -> int:
    """Drafts that were right, in texts that the tokenizer cuts into the same tokens: others read otherwise."""
    return sum(output.outputs[0].stats.trees.accepted for output in outputs if is_cut_as_usual(output))


def is_cut_as_usual(output: RequestOutput) -> bool:
    tokenizer = mini.plain().tokenizer
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return tokenizer.encode(tokenizer.decode(tokens, skip_special_tokens=False)) == tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_other_ids_cost_no_acceptance(renumbered: str, temperature: float) -> None:
    """Noise is the target's where a token is one of the target's: drafts are those of the same model with its ids."""
    usual = says(mini.drafting("draft", **CHAINS), temperature=temperature)
    other = says(mini.drafting("draft", draft_model=renumbered, **CHAINS), temperature=temperature)
    assert tokens_of(other) == tokens_of(usual) == tokens_of(says(mini.plain(), temperature=temperature))
    assert accepted(other) >= 0.97 * accepted(usual) > 40


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 0.6, "min_tokens": 20},
        {"temperature": 0.8, "bad_words": ["the", "fox"], "logit_bias": {261: 3.0}},
    ],
)
def test_parameters_shape_drafts_as_the_target(renumbered: str, params: dict[str, Any]) -> None:
    usual = says(mini.drafting("draft", **CHAINS), **params)
    other = says(mini.drafting("draft", draft_model=renumbered, **CHAINS), **params)
    assert tokens_of(other) == tokens_of(usual)
    assert accepted(other) >= 0.9 * accepted(usual) > 20


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_model_with_other_merges_changes_nothing(random_draft: str, temperature: float) -> None:
    llm = mini.drafting("draft", draft_model=random_draft, **CHAINS)
    outputs = says(llm, temperature=temperature)
    assert tokens_of(outputs) == tokens_of(says(mini.plain(), temperature=temperature))
    assert all(not output.outputs[0].stats.failed_drafters for output in outputs)
    assert sum(output.outputs[0].stats.trees.drafted for output in outputs) > 100


def test_the_rejection_rule_takes_the_likeliest_tokens(renumbered: str) -> None:
    """Drafts have no distribution there, and are as good as any can be: the same in every run."""
    llm = mini.drafting("draft", draft_model=renumbered, verification="rejection", **CHAINS)
    first, again = says(llm, temperature=0.8), says(llm, temperature=0.8)
    assert tokens_of(first) == tokens_of(again) and accepted(first) > 20
    assert tokens_of(says(llm, temperature=0.0)) == tokens_of(says(mini.plain(), temperature=0.0))


def first_rows(layers: Sequence[LayerKV], blocks: Sequence[int], num_rows: int) -> Iterator[torch.Tensor]:
    """Keys and values of the first rows under a block table."""
    for layer in layers:
        yield layer.keys[list(blocks)].permute(1, 2, 0, 3).flatten(2)[..., :num_rows]  # [G, D, rows]
        yield layer.values[list(blocks)].permute(1, 0, 2, 3).flatten(1, 2)[:, :num_rows]  # [G, rows, D]


class Checked:
    """Lets a drafter propose, and then computes every row anew that it takes to be computed."""

    def __init__(self, made: Engine) -> None:
        self.drafter, self.num_rows = inner(made), 0
        self._propose, self._model = self.drafter.propose, other_tokens.pair()[1]
        self.drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, drafts: Sequence[Draft]) -> None:
        self._propose(drafts)
        for stand_in in self.drafter.stand_ins.values():
            rows, blocks = stand_in.rows, stand_in.request.block_ids
            if rows:
                kvs = factory.new_kvs(self._model, len(blocks))
                sequence = SequenceRows("", range(len(blocks)), 0, rows, len(rows))
                self._model.forward(ForwardBatch.build([sequence], 4), kvs)
                anew = first_rows(kvs, range(len(blocks)), len(rows))
                for kept, computed in zip(first_rows(self.drafter.layers, blocks, len(rows)), anew, strict=True):
                    assert torch.equal(kept, computed)
                self.num_rows += len(rows)


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 30, "max_num_seqs": 4}, {"max_num_batched_tokens": 9}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_hold_what_they_are_said_to_hold(options: dict[str, int], temperature: float) -> None:
    """After accepted and rejected drafts, merges, preemption, and with blocks that other requests computed."""
    made = other_tokens.engine(**options)
    checked = Checked(made)
    wanted = [*tiny.groups(5, temperature=temperature), *tiny.groups(5, temperature=temperature)[:2]]
    groups = [harness.request(i, g.samples[0].request.prompt_token_ids, g.samples[0].request.params, tiny.MAX_LEN)
              for i, g in enumerate(wanted)]  # fmt: skip
    assert harness.run(made, [harness.fresh(group) for group in groups]) == tiny.plain(tiny.target(2), groups)
    assert checked.num_rows > 500 and not checked.drafter.stand_ins


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of KV are shared by requests of one salt that begin alike, as the target's are."""
    made, spans = other_tokens.engine(), list[int]()
    runner = inner(made).inner.runner
    draw = runner.draw
    monkeypatch.setattr(
        runner, "draw", lambda rows, *given: (spans.extend(len(r.span) for r in rows), draw(rows, *given))[1]
    )
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    for index, salt in enumerate(["", "", "of another", "of another"]):
        group = harness.request(index, [3 + i % 60 for i in range(64)], params, tiny.MAX_LEN)
        group.samples[0].request.cache_salt = salt
        harness.run(made, [group])
    reread = [num for num in spans if num >= 16]
    assert len(reread) == 2 and min(reread) >= 50


def test_blocks_that_further_text_may_change_are_not_shared(random_draft: str) -> None:
    """A block holds what the tree says of it, also where a request's text goes on and merges with its last tokens."""
    llm = mini.drafting("draft", draft_model=random_draft, **CHAINS)
    drafter, text, more = inner(llm.engine), "the cat " * 8 + "x togeth", "er and"

    def ids(words: str) -> list[int]:
        return llm.tokenizer.encode(words, add_special_tokens=False)

    def read(request: Request, words: str) -> None:
        request.token_ids += ids(words)
        drafter.propose([Draft(request, 6)])

    first, second = (Request(name, tuple(ids(text)), SamplingParams(), 1, max_len=4000) for name in "ab")
    for words in (" and so the cat " + "sat on the mat " * 6, " and then"):
        read(first, words)
    read(second, "")
    stand_in, size = drafter.stand_ins["b"], llm.config.block_size
    before = list(stand_in.rows)
    read(second, more)
    changed = next(at for at, (old, new) in enumerate(zip(before, stand_in.rows, strict=False)) if old != new)
    assert changed < (len(before) - 1) // size * size, "the text no longer shows it: choose another"
    shared = 0
    for start, block in zip(range(0, changed // size * size + size, size), stand_in.request.block_ids, strict=False):
        if (node := drafter._prefixes._nodes.get(block)) is not None:
            shared += 1
            assert list(node.tokens) == stand_in.rows[start : start + size]
    assert shared == changed // size > 0


def test_it_is_said_once(renumbered: str, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("mini", max_model_len=64)
    with caplog.at_level(logging.WARNING, "forerun.drafters"):
        for _ in range(2):
            llm.with_drafter("draft", draft_model=renumbered, adaptive=False)
        llm.with_drafter("draft", draft_model="mini-draft", adaptive=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "another tokenizer" in said[0] and "8192 of its 8192 tokens" in said[0]


def test_what_cannot_work_is_refused_before_weights_are_read(tmp_path: Path, renumbered: str) -> None:
    def folder(name: str, tokenizer: Any) -> str:
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(factory.SIZES | {"model_type": "llama"}), "utf-8")
        if tokenizer is not None:
            makers.save(tokenizer, made)
        return str(made)

    target = folder("target", trained())  # no folder has weights: reading them would be another error
    lower = folder("lower", trained(normalizer=normalizers.Lowercase()))
    words, bare = folder("words", makers.wordpiece()), folder("bare", None)
    with pytest.raises(VocabularyError, match="draft model .*lower makes 'the quick brown fox'"):
        LLM(target, drafter="draft", draft_model=lower)
    with pytest.raises(VocabularyError, match="target .*words has tokens without a text"):
        LLM(words, drafter="draft", draft_model=target)
    with pytest.raises(CheckpointError, match="bare has no tokenizer .*copy it"):
        LLM(target, drafter="draft", draft_model=bare)
    with pytest.raises(VocabularyError, match="draft model .*lower"):
        mini.drafting("portfolio=suffix+draft=" + lower)
    with pytest.raises(ConfigError, match="drafts are chains: leave tree_width out"):
        mini.drafting("draft", draft_model=renumbered, tree_width=3)
    listed = tmp_path / "tokens.txt"
    listed.write_text("\n".join(map(str, range(300))))
    with pytest.raises(ConfigError, match="has tokens of its own: leave draft_vocabulary out"):
        mini.drafting("draft", draft_model=renumbered, draft_vocabulary=str(listed))


def test_a_model_that_cannot_go_back_is_refused() -> None:
    class KeepsState:
        """As a model that runs through transformers row by row."""

        kv_specs = ()
        max_position = 64

    target, _, translation = other_tokens.pair()
    config = EngineConfig(model="tiny", drafter=other_tokens.CHAIN, block_size=4, max_model_len=64)
    with pytest.raises(UnsupportedError, match="row by row"):
        assemble(config, target, tiny.kernels(), lambda _: KeepsState(), translation=lambda _: translation)  # type: ignore


def test_too_little_memory_means_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that find no block are decoded plainly."""
    monkeypatch.setattr("forerun.drafters.translated.memory_of", lambda device: 1 << 14)
    made = other_tokens.engine()
    wanted = tiny.groups(4, temperature=0.0)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.plain(tiny.target(2), wanted)
    assert any(not stat.trees.drafted for stat in stats)


def test_a_text_the_draft_s_tokenizer_fails_on_costs_no_other_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, wanted, extend = other_tokens.engine(), tiny.groups(3, temperature=0.0), Transcript.extend
    num_asked = 0

    def failing(transcript: Transcript, token_ids: Sequence[int]) -> int:
        nonlocal num_asked
        known = [each.transcript for name, each in inner(made).stand_ins.items() if name.startswith("1")]
        if transcript in known:
            num_asked += 1
            raise PromptError("no tokens for this text")
        return extend(transcript, token_ids)

    monkeypatch.setattr(Transcript, "extend", failing)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.plain(tiny.target(2), wanted) and num_asked == 1
    assert stats[0].trees.drafted and stats[2].trees.drafted and not any(stat.failed_drafters for stat in stats)
    assert sum("is decoded without drafts" in record.getMessage() for record in caplog.records) == 1
    assert not inner(made).stand_ins and not inner(made)._unreadable


def test_in_a_portfolio_and_adaptive(renumbered: str) -> None:
    members = (DrafterConfig(name="ngram"), DrafterConfig(name="draft", model=renumbered, max_draft_tokens=5))
    llm = mini.drafting(DrafterConfig(name="portfolio", members=members, max_draft_tokens=10))  # type: ignore[arg-type]
    assert tokens_of(says(llm, temperature=0.7)) == tokens_of(says(mini.plain(), temperature=0.7))
