"""LLM: what users call, and what they get told when they ask for something that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, DrafterConfig, SamplingParams
from forerun.core import MIN_TEMPERATURE
from forerun.drafters.named import default_drafter
from forerun.errors import CheckpointError, ConfigError, ModelNotFoundError, PromptError, ResourceError, SamplingError
from forerun.llm import engine_config
from tests.support import mini


def params(**options) -> SamplingParams:  # type: ignore[no-untyped-def]
    return SamplingParams(**{"max_tokens": 5, "seed": 1, **options})


def test_outputs_come_in_order_and_complete() -> None:
    outputs = mini.plain().generate(mini.PROMPTS, params(ignore_eos=True))
    assert [o.prompt for o in outputs] == list(mini.PROMPTS)
    for output in outputs:
        [sample] = output.outputs
        assert output.finished and sample.finish_reason == "length" and len(sample.token_ids) == 5
        assert (
            sample.text
            == mini.plain().tokenizer.decode([*output.prompt_token_ids, *sample.token_ids])[
                len(mini.plain().tokenizer.decode(output.prompt_token_ids)) :
            ]
        )


def test_parameters_by_prompt_and_token_prompts() -> None:
    llm = mini.plain()
    outputs = llm.generate([[5, 6, 7], "A"], [params(max_tokens=2, ignore_eos=True), params(ignore_eos=True)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    assert llm.generate([5, 6, 7], params())[0].prompt_token_ids == (5, 6, 7)


def test_chat_uses_the_template() -> None:
    llm = mini.plain()
    messages = [{"role": "user", "content": "Hello"}]
    [output] = llm.chat(messages, params())
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert "Hello" in text and text != "Hello"
    assert output.outputs[0].token_ids == llm.chat([messages], params())[0].outputs[0].token_ids


def test_special_tokens_are_shown_on_request() -> None:
    llm = mini.plain()
    end = llm.tokenizer.token_id("<|im_end|>")
    assert end is not None
    forced = {"allowed_token_ids": (end,), "ignore_eos": True, "max_tokens": 2}
    assert llm.generate("A", params(**forced))[0].outputs[0].text == ""
    assert llm.generate("A", params(**forced, skip_special_tokens=False))[0].outputs[0].text == "<|im_end|>" * 2


def test_implementation_can_be_insisted_on() -> None:
    from forerun.errors import ForerunError

    llm = LLM("mini", implementation="transformers", max_model_len=64)
    assert llm.loaded.implementation == "transformers"
    assert llm.generate("A", params(temperature=0.0))[0].outputs[0].token_ids
    with pytest.raises(ForerunError):
        LLM("mini", implementation="other")


def test_an_option_that_does_not_exist_and_a_block_that_closes() -> None:
    with pytest.raises(ConfigError, match="unknown option tensor_parallel_size; did you mean tensor_parallel"):
        LLM("mini", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="what vLLM calls speculative_config is drafter and draft_model here"):
        LLM("mini", speculative_config={"method": "ngram"})
    with pytest.raises(ZeroDivisionError), LLM("mini", max_model_len=64) as llm:
        closed = list[bool]()
        llm.close = lambda: closed.append(True)  # type: ignore[method-assign]
        raise ZeroDivisionError
    assert closed == [True]


def test_prompts_in_vllms_forms() -> None:
    llm = mini.plain()
    text, ids = "The fox", llm.tokenizer.encode("The fox")
    given: list[Any] = [{"prompt": text}, {"prompt_token_ids": ids}, text]
    assert len({output.outputs[0].token_ids for output in llm.generate(given, params(temperature=0.0))}) == 1
    wrong: Any
    for wrong in ({"text": text}, {"prompt": text, "prompt_token_ids": ids}):
        with pytest.raises(PromptError, match="a prompt is text or a list of token ids, not dict"):
            llm.generate(wrong)
    with pytest.raises(PromptError, match="not of 'Hello'"):
        llm.chat("Hello")


def test_unseeded_requests_differ_and_report_their_seed() -> None:
    llm = mini.plain()
    a, b = llm.generate(["A", "A"], SamplingParams(max_tokens=12, ignore_eos=True))
    assert a.outputs[0].token_ids != b.outputs[0].token_ids
    assert 0 < max(a.outputs[0].seed, b.outputs[0].seed) < 2**53, "exact as a JSON number"
    [again] = llm.generate("A", SamplingParams(max_tokens=12, ignore_eos=True, seed=b.outputs[0].seed))
    assert again.outputs[0].token_ids == b.outputs[0].token_ids


def test_a_prompt_fills_the_context_but_for_one_token() -> None:
    llm = mini.plain()
    [output] = llm.generate([[5] * (llm.max_model_len - 1)], params(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1 and output.outputs[0].finish_reason == "length"


def test_what_is_no_prompt_conversation_or_parameters_is_said() -> None:
    llm = mini.plain()
    prompt: Any
    messages: Any
    no_params: Any = {"temperature": 0}
    for prompt, said in (
        (5, r"not int \(5\)"),
        (["A", None], "not NoneType"),
        ({"text": "A"}, "not dict"),
        (b"A", "not bytes"),
    ):
        with pytest.raises(PromptError, match=f"a prompt is text or a list of token ids, {said}"):
            llm.generate(prompt)
    with pytest.raises(
        SamplingError, match=r"sampling parameters are SamplingParams, .*not dict \(\{'temperature': 0\}\)"
    ):
        llm.generate("A", no_params)
    with pytest.raises(SamplingError, match="sampling parameters are SamplingParams, not dict"):
        llm.stream("A", no_params)
    for messages in ("Hello", {"role": "user", "content": "A"}, [{"role": "user"}], [[{"content": "Hello"}]]):
        with pytest.raises(PromptError, match="a conversation is a list of messages such as"):
            llm.chat(messages)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "empty"), ([5] * 512, "512 tokens"), ([5, 9999], "token id 9999"), ([-1], "token id -1")],
)
def test_bad_prompts(prompt, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PromptError, match=message):
        mini.plain().generate([prompt, "fine"], params())
    assert not mini.plain().engine.has_work, "nothing was started"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e-31},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 2.5},
        {"min_p": -1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": float("inf")},
        {"max_tokens": 0},
        {"min_tokens": 6, "max_tokens": 5},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"logprobs": 1000},
        {"allowed_token_ids": ()},
        {"stop": ("",)},
        {"stop": 7},
        {"stop": (7,)},
        {"stop": (["a"],)},
        {"stop_token_ids": ("a",)},
        {"allowed_token_ids": (1, 2.5, 3)},
        {"allowed_token_ids": (1, "a")},
        {"allowed_token_ids": (1, True)},
        {"bad_words": {"a": 1}},
        {"logit_bias": {1: 1e9}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": [(1, 2.0)]},
        {"logit_bias": 5},
    ],
)
def test_bad_sampling_values(options) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SamplingError) as caught:
        SamplingParams(**options)
    assert any(name in str(caught.value) for name in options)


def test_no_biases_may_be_none() -> None:
    """As vLLM has it."""
    assert SamplingParams(logit_bias=None) == SamplingParams()  # type: ignore[arg-type]


def test_tokens_without_a_row_are_never_banned(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mini.plain()
    beyond = llm.tokenizer.vocab_size + 100_000  # as Gemma 3's token for images
    monkeypatch.setattr(llm.tokenizer, "eos_token_ids", (beyond,))
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_, **__: [beyond])
    [output] = llm.generate([[1, 2, 3]], params(min_tokens=2, bad_words=("x",)))
    assert len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_least_temperature_is_greedy(more) -> None:  # type: ignore[no-untyped-def]
    def tokens(temperature: float) -> tuple[int, ...]:
        options = params(temperature=temperature, max_tokens=8, seed=1, **more)
        return tuple(mini.plain().generate(["Once upon a time"], options)[0].outputs[0].token_ids)

    assert tokens(MIN_TEMPERATURE) == tokens(0.0)


@pytest.mark.parametrize(
    "options", [{"logit_bias": {8192: 1.0}}, {"allowed_token_ids": [9000]}, {"stop_token_ids": [8192]}]
)
def test_sampling_values_outside_the_vocabulary(options) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SamplingError, match="8191"):
        mini.plain().generate("A", params(**options))


def test_number_of_parameters_must_match() -> None:
    with pytest.raises(SamplingError, match="2 sampling parameters"):
        mini.plain().generate(["A"], [params(), params()])


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no_such_option.*block_size"):
        LLM("mini", no_such_option=1)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 7},
        {"max_num_seqs": 0},
        {"kernels": "gpu"},
        {"dtype": "int3"},
        {"verification": "typical"},
        {"drafter": "medium"},
        {"drafter": "ngram", "draft_model": "mini-draft"},
        {"drafter": "ngram", "ngram_min": 5, "ngram_max": 2},
        {"drafter": "ngram", "max_draft_tokens": 64},
        {"max_model_len": 10**6},
    ],
)
def test_bad_options(options) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError):
        LLM("mini", **options)


def test_draft_without_a_model() -> None:
    with pytest.raises(ConfigError, match="small model"):
        engine_config("somewhere", {"drafter": DrafterConfig(name="draft")})


@pytest.mark.parametrize("beside", [{"max_draft_tokens": 2}, {"draft_model": "mini-draft"}])
def test_options_beside_a_drafter_config_are_refused(beside: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="beside a DrafterConfig"):
        engine_config("mini", {"drafter": DrafterConfig(name="ngram"), **beside})
    assert engine_config("mini", {"drafter": DrafterConfig(name="ngram"), "max_draft_tokens": None})


def test_behind_the_largest_seed_comes_the_first() -> None:
    params = SamplingParams()
    assert params.with_seed(2**64 - 1).seed == 2**64 - 1 and params.with_seed(2**64).seed == 0
    with pytest.raises(SamplingError):
        params.with_seed(-1)


def test_unknown_model() -> None:
    with pytest.raises(ModelNotFoundError, match="mini"):
        LLM("no/such-model-anywhere")


def test_a_pool_too_small_for_one_request() -> None:
    with pytest.raises(ResourceError, match="3 blocks"):
        mini.plain().with_drafter("none", num_kv_blocks=3)


def test_a_context_nobody_asked_for_is_cut_to_the_pool() -> None:
    llm = mini.plain().with_drafter("none", max_model_len=None, num_kv_blocks=3)
    assert llm.max_model_len == 48
    assert mini.plain().with_drafter("none", max_model_len=None).max_model_len == 512


def test_more_memory_than_the_machine_has() -> None:
    with pytest.raises(ResourceError, match="GB"):
        mini.plain().with_drafter("none", num_kv_blocks=10**9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"), ("implementation", "transformers"), ("device", "cuda"), ("kernels", "reference"),
        ("threads", 1), ("generation_config", "none"),
    ],
)  # fmt: skip
def test_with_drafter_refuses_what_was_decided_when_the_weights_were_loaded(name: str, value: object) -> None:
    assert getattr(mini.plain().config, name) != value
    with pytest.raises(ConfigError, match=f"{name} is .* make another LLM"):
        mini.plain().with_drafter("none", **{name: value})
    same = {name: getattr(mini.plain().config, name)}
    assert mini.plain().with_drafter("none", **same).config.drafter.name == "none"


def test_with_drafter_keeps_other_options() -> None:
    llm = mini.plain().with_drafter("draft", max_draft_tokens=2)
    assert llm.max_model_len == 512 and llm.config.max_num_seqs == 16
    assert llm.config.drafter == DrafterConfig(name="draft", model="mini-draft", max_draft_tokens=2)
    assert llm.loaded is mini.plain().loaded


def test_a_tiny_pool_can_be_drafted_for() -> None:
    made = mini.drafting("draft", max_model_len=20, num_kv_blocks=2)
    assert len(made.generate("A", params(max_tokens=None, ignore_eos=True))[0].outputs[0].token_ids) == 19


def test_progress_bar_changes_nothing() -> None:
    sampling = params(ignore_eos=True)
    shown = mini.plain().generate(mini.PROMPTS, sampling, progress=True)
    assert [o.outputs[0].text for o in shown] == [
        o.outputs[0].text for o in mini.plain().generate(mini.PROMPTS, sampling)
    ]


def test_keyboard_interrupt_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = mini.drafting("draft")
    step, calls = type(llm).step, []

    def interrupted(self):  # type: ignore[no-untyped-def]
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(type(llm), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(mini.PROMPTS, params(max_tokens=30))
    assert not llm.engine.has_work and not llm.engine.groups
    llm.engine.scheduler.check_integrity()


def members(model: str, drafter: str, draft_model: str | None = None) -> list[tuple[str, str | None]]:
    config = engine_config(model, {"drafter": drafter, "draft_model": draft_model}).drafter
    return [(member.name, member.model) for member in config.members]


def test_auto_takes_the_draft_it_is_given_or_finds_in_the_folder(tmp_path: Path) -> None:
    lookups = [("suffix", None), ("recycling", None)]
    assert members("mini", "auto", "small") == [*lookups, ("draft", "small")]
    assert members(str(tmp_path), "auto") == lookups
    for name in ("medusa", "mtp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    assert members(str(tmp_path), "auto") == [*lookups, ("mtp", str(tmp_path / "mtp"))]
    for name in ("eagle", "mtp"):
        assert members("mini", "auto", f"mini-{name}") == [*lookups, (name, f"mini-{name}")]


def test_commands_take_a_draft_model_or_ngram(tmp_path: Path) -> None:
    assert default_drafter("mini", None) == "draft" and default_drafter("mini", "mini-eagle") == "eagle"
    assert default_drafter(str(tmp_path), None) == "ngram"
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    assert default_drafter(str(tmp_path), None) == "draft"


def test_a_draft_model_alone_says_who_drafts() -> None:
    """A model, or heads, whose tensors say which drafter they are for; nothing given decodes plainly."""
    named = {
        given: engine_config("mini", {"draft_model": given}).drafter.name for given in ("mini-draft", "mini-eagle")
    }
    assert named == {"mini-draft": "draft", "mini-eagle": "eagle"} and engine_config("mini", {}).drafter.name == "none"


def test_a_draft_model_goes_to_the_member_that_needs_it() -> None:
    assert members("m", "portfolio=suffix+draft", "small") == [("suffix", None), ("draft", "small")]
    with pytest.raises(ConfigError, match="none of suffix, ngram takes it"):
        members("m", "portfolio=suffix+ngram", "small")


@pytest.mark.parametrize("name", ["mtp", "eagle", "medusa"])
def test_a_head_given_as_a_model_is_called_what_it_is(name: str) -> None:
    said = f"mini-{name} is a draft head, not a model: .* drafter '{name}=mini-{name}'"
    with pytest.raises(ConfigError, match=said):
        mini.plain().with_drafter("draft", draft_model=f"mini-{name}")
    with pytest.raises(ConfigError, match=said):
        LLM(f"mini-{name}")


def test_what_is_no_head_either_is_called_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        mini.plain().with_drafter("draft", draft_model=str(tmp_path))
