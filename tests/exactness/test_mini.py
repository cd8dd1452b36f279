"""Losslessness on real weights and real kernels: obligations A, B and C together, by comparing tokens.

The toy engine tests cover the engine's logic in every combination; these cover what only real arithmetic can break.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.weights.resolve import resolve_model
from tests.support import mini

DRAFTERS = {
    "ngram": {"ngram_min": 1, "adaptive": False},
    "draft": {"adaptive": False, "max_draft_tokens": 6},
    "draft-adaptive": {},
    "draft-tree": {"tree_width": 3, "max_draft_tokens": 15, "adaptive": False},
}


def drafting(name: str, **options):  # type: ignore[no-untyped-def]
    return mini.drafting(name.split("-")[0], **{**DRAFTERS[name], **options})


def params(temperature: float, **options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(temperature=temperature, **{"max_tokens": 40, "seed": 5, "ignore_eos": True, **options})


def tokens(outputs) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [sample.token_ids for output in outputs for sample in output.outputs]


def alone(prompts, sampling) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    """Plain decoding, one request at a time."""
    return mini.alone(mini.plain(), prompts, sampling)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters(drafter: str) -> None:
    llm, sampling = drafting(drafter), [params(i % 2) for i in range(len(mini.PROMPTS))]
    outputs = llm.generate(mini.PROMPTS, sampling)
    assert tokens(outputs) == alone(mini.PROMPTS, sampling)
    accepted = sum(c.accepted for o in outputs for c in o.outputs[0].stats.drafters.values())
    may_rest = DRAFTERS[drafter].get("adaptive", True)  # a policy on a busy machine may find that no draft pays
    assert accepted > 0 or may_rest, "nothing was accepted, so nothing was tested"


def test_a_batch_of_long_and_short() -> None:
    rng = random.Random(16)
    vocab_size = mini.plain().tokenizer.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 15, 16, 17, 60, 280]))] for _ in range(16)]
    llm = drafting("draft")
    assert tokens(llm.generate(prompts, params(1.0, max_tokens=12))) == alone(prompts, params(1.0, max_tokens=12))


@pytest.mark.parametrize("rows", [5, 100])
def test_chunks(rows: int) -> None:
    prompts = [" ".join([text] * 9) for text in mini.PROMPTS[:3]]
    llm = drafting("draft", max_num_batched_tokens=rows)
    sampling = params(0.7, max_tokens=8, prompt_logprobs=0, logprobs=2)
    chunked, whole = llm.generate(prompts, sampling), [mini.plain().generate(p, sampling)[0] for p in prompts]
    assert tokens(chunked) == tokens(whole)
    assert [o.prompt_logprobs for o in chunked] == [o.prompt_logprobs for o in whole]
    assert [o.outputs[0].logprobs for o in chunked] == [o.outputs[0].logprobs for o in whole]


@pytest.mark.parametrize("drafter", ["ngram", "draft", "draft-tree"])
def test_preemption(drafter: str) -> None:
    prompts = [text * 4 for text in mini.PROMPTS]
    llm = drafting(drafter, num_kv_blocks=16, max_model_len=256)
    outputs = llm.generate(prompts, params(1.0, max_tokens=32))
    assert tokens(outputs) == alone(prompts, params(1.0, max_tokens=32))
    assert sum(o.outputs[0].stats.num_preemptions for o in outputs) > 0, "nothing was preempted"


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "logit_bias": {5: 4.0}, "bad_words": (" the",)},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "n": 2},
        {"stop": (" the", "."), "include_stop_str_in_output": True},
    ],
)
def test_sampling_parameters(sampling) -> None:  # type: ignore[no-untyped-def]
    wanted = params(0.9, max_tokens=24, **sampling)
    outputs = drafting("draft").generate(mini.PROMPTS, wanted)
    plain = mini.plain().generate(mini.PROMPTS, wanted)
    assert tokens(outputs) == tokens(plain)
    assert [s.text for o in outputs for s in o.outputs] == [s.text for o in plain for s in o.outputs]


def test_block_size_does_not_matter() -> None:
    wanted = alone(mini.PROMPTS, params(1.0))
    for block_size in (4, 32):
        assert tokens(drafting("draft", block_size=block_size).generate(mini.PROMPTS, params(1.0))) == wanted


def test_threads_do_not_matter() -> None:
    from forerun import LLM

    wanted = alone(mini.PROMPTS[:2], params(1.0))
    assert tokens(LLM("mini", threads=1, max_model_len=512).generate(mini.PROMPTS[:2], params(1.0))) == wanted


def test_streaming_gives_the_same_text() -> None:
    llm, sampling = drafting("draft"), params(0.7)
    [whole] = mini.plain().generate(mini.PROMPTS[0], sampling)
    parts = list(llm.stream(mini.PROMPTS[0], sampling))
    assert parts[-1].outputs[0].text == whole.outputs[0].text and parts[-1].finished
    texts = [part.outputs[0].text for part in parts]
    assert all(whole.outputs[0].text.startswith(text) for text in texts)


def test_streams_in_turns_and_beside_generate_are_complete() -> None:
    llm, sampling = drafting("draft"), params(0.7)
    expected = alone(mini.PROMPTS, sampling)
    streams = {i: llm.stream(mini.PROMPTS[i], sampling) for i in range(3)}
    shown = {i: [next(stream)] for i, stream in streams.items()}
    assert tokens(llm.generate(mini.PROMPTS[3:5], sampling)) == expected[3:5]  # steps for the streams too
    late = llm.stream(mini.PROMPTS[5], sampling)
    while streams:
        for i in list(streams):
            output = next(streams[i], None)
            if output is None:
                del streams[i]
            else:
                shown[i].append(output)
    assert tokens(list(late)[-1:]) == expected[5:6]
    for i, seen in shown.items():
        assert seen[-1].finished and tokens(seen[-1:]) == [expected[i]]
        lengths = [len(output.outputs[0].token_ids) for output in seen]
        assert lengths == sorted(set(lengths)) and lengths[0] > 0, "every output has more than the one before"
    assert not llm.engine.has_work


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_a_closed_stream_frees_everything(num_read: int) -> None:
    llm = drafting("draft")
    stream = llm.stream(mini.PROMPTS[0], params(0.7))
    for _ in range(num_read):
        next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work and not llm.engine.groups
    llm.engine.scheduler.check_integrity()


def test_a_checkpoint_in_float16(tmp_path: Path) -> None:
    """The embedded model rounded to float16: asked for by name it writes what it writes anyway, with every drafter."""
    source = resolve_model("mini")
    folder = Path(shutil.copytree(source, tmp_path / "f16"))
    tensors = {name: tensor.half() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = LLM(str(folder), drafter="none", max_model_len=512)
    expected = tokens(plain.generate(mini.PROMPTS[:3], params(1.0)))
    for drafter in ("none", "ngram", "draft=mini-draft"):
        llm = LLM(str(folder), dtype="float16", drafter=drafter, adaptive=False, max_model_len=512)
        assert tokens(llm.generate(mini.PROMPTS[:3], params(1.0))) == expected
    with pytest.raises(ConfigError, match="dtype float16 was asked for, but .* is stored in BF16"):
        LLM("mini", dtype="float16")
