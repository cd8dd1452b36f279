"""Tokenizer folders against transformers, settings, chat templates, vocabulary checks."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from forerun.errors import CheckpointError, PromptError, VocabularyError
from forerun.weights.chat import render
from forerun.weights.tokenizer import LONG_TEXT, Tokenizer, check_vocabulary
from tests.support.processes import end, own_processes
from tests.support.shared import shared_data
from tests.weights import makers

TEXT = "Once upon a time,\n  there was a café 日本 😀 </s>x"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{{ m.content | trim }}{% generation %}.{% endgeneration %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ extra | default({}) | tojson }}"
)
MESSAGES = [{"role": "user", "content": " hi ü "}]


@pytest.fixture(params=["byte_level", "sentencepiece", "wordpiece"])
def made(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = getattr(makers, request.param)()
    return tokenizer


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize(
    "settings",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}],
)
def test_encoding_is_that_of_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for index, maker in enumerate((makers.byte_level, makers.sentencepiece)):
        (tmp_path / str(index)).mkdir()
        folder = makers.save(maker(), tmp_path / str(index), **names, **settings)
        ours, theirs = Tokenizer.from_folder(folder), transformers_tokenizer(folder)
        for special in (True, False):
            assert ours.encode(TEXT, special) == theirs.encode(TEXT, add_special_tokens=special)
        ids = ours.encode(TEXT)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_identity_of_tokens(made: Tokenizer) -> None:
    for token_id in (0, 1, made.vocab_size - 1):
        name = made.token_text(token_id)
        assert name is not None and made.token_id(name) == token_id
    assert made.token_text(made.vocab_size) is None and made.token_bytes(made.vocab_size + 5) == b""
    assert made.bos_token_id is not None and made.decode([made.bos_token_id]) == ""
    assert made.vocab_size == max(made.vocabulary().values()) + 1


def test_end_tokens_come_from_every_file(tmp_path: Path) -> None:
    folder = makers.save(makers.byte_level(), tmp_path, eos_token="</s>", bos_token=None)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_folder(folder).eos_token_ids == (7, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 1]}')
    assert Tokenizer.from_folder(folder).eos_token_ids == (9, 1)
    assert Tokenizer.from_folder(folder).bos_token_id is None


def test_special_tokens_map(tmp_path: Path) -> None:
    folder = makers.save(makers.byte_level(), tmp_path)
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    assert Tokenizer.from_folder(folder).bos_token_id == 0


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(makers.byte_level().to_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=99)
    folder = makers.save(Tokenizer(backend, {}), tmp_path)
    assert 2 < len(Tokenizer.from_folder(folder).encode("Once upon a time")) < 99


@pytest.mark.parametrize("place", ["config", "file", "named", "json"])
def test_chat_templates_wherever_they_are(place: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"bos_token": "<s>"}
    if place == "config":
        settings["chat_template"] = TEMPLATE
    elif place == "named":
        settings["chat_template"] = [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    elif place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    else:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, **settings))
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text == "<s>[user]hi ü.\n[assistant]{}"
    assert tokenizer.apply_chat_template(MESSAGES, False, extra={"ü": 1}) == '<s>[user]hi ü.\n{"ü": 1}'
    assert tokenizer.encode_chat(MESSAGES) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("place", ["config", "folder"])
def test_templates_for_tools(place: str, tmp_path: Path) -> None:
    templates, settings = {"default": TEMPLATE, "tool_use": "{{ tools }}", "rag": "{{ documents }}"}, {}
    if place == "config":
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    else:
        settings["chat_template"] = "files stand above it"
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(templates[name])
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, **settings))
    assert (tokenizer.chat_template, tokenizer.tool_template) == (TEMPLATE, "{{ tools }}")
    other = transformers_tokenizer(tmp_path)
    assert other.get_chat_template(tools=[{}]) == tokenizer.tool_template
    assert other.get_chat_template() == tokenizer.chat_template


def test_other_templates_in_files_leave_the_usual_one_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, chat_template=TEMPLATE))
    assert tokenizer.chat_template == tokenizer.tool_template == TEMPLATE


def test_a_template_alone_is_for_tools_as_well(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, chat_template=TEMPLATE))
    assert tokenizer.tool_template == TEMPLATE and makers.byte_level().tool_template is None


def test_chat_templates_that_refuse(tmp_path: Path) -> None:
    folder = makers.save(makers.byte_level(), tmp_path, chat_template=TEMPLATE)
    tokenizer = Tokenizer.from_folder(folder)
    with pytest.raises(PromptError, match="no system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])
    with pytest.raises(PromptError, match="conversation is empty"):
        tokenizer.apply_chat_template([])
    with pytest.raises(PromptError, match="no chat template"):
        makers.byte_level().apply_chat_template(MESSAGES)


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ messages[0].content.nope.deeper }}"])
def test_chat_templates_are_confined(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, chat_template=template))
    with pytest.raises(PromptError):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
        "{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ [[]] * 10**9 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 1 / 0 }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ raise_exception('x' * 10**6) }}",
    ],
)
def test_templates_that_loop_or_allocate_or_break(template: str) -> None:
    """Only the process that renders them suffers; usual conversations go on."""
    with pytest.raises(PromptError) as caught:
        render(template, MESSAGES, {})
    assert len(str(caught.value)) < 1000
    assert render("{{ messages[0].content }}", MESSAGES, {}) == " hi ü "


def test_templates_see_what_they_are_given() -> None:
    """Through a pipe and back: types, text beyond Unicode's own, and objects that cannot travel."""
    variables = {"pair": (1, 2.5, None, True), "half": "\ud800"}
    text = "{{ pair | list }}{{ pair is mapping }}{{ half }}{{ messages[0].content is string }}"
    assert render(text, MESSAGES, variables) == "[1, 2.5, None, True]False\ud800True"
    with pytest.raises(PromptError, match="plain values"):
        render(text, MESSAGES, {"pair": lambda: 1})


def test_conversations_are_rendered_side_by_side() -> None:
    """A template that takes its whole time holds up no other, and a process that was ended is replaced."""
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with ThreadPoolExecutor(8) as pool:
        late = pool.submit(render, slow, MESSAGES, {})
        texts = list(pool.map(lambda n: render("{{ n }}", MESSAGES, {"n": n}), range(40)))
        assert not late.done() and texts == [str(n) for n in range(40)]
        with pytest.raises(PromptError, match="takes more than"):
            late.result()
    renderers = own_processes("template_worker")
    assert renderers
    end(renderers)
    assert render("{{ 1 }}", MESSAGES, {}) == "1"


def test_broken_templates(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, chat_template="{% for %}"))
    with pytest.raises(CheckpointError, match="not valid jinja"):
        tokenizer.apply_chat_template(MESSAGES)
    with pytest.raises(CheckpointError, match="must be a string"):
        Tokenizer.from_folder(makers.save(makers.byte_level(), tmp_path, chat_template=3))


def test_published_templates_render_as_in_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [*MESSAGES, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And now?"}]
    variables = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
    files = sorted(shared_data("tokenizers/chat_templates").glob("*.jinja"))
    assert len(files) > 10
    for path in files:
        template = path.read_text(encoding="utf-8")
        given = {**variables, **({"functions": "[]", "datetime": "now"} if "firefunction" in path.name else {})}
        try:
            (text,), _ = render_jinja_template([talk], chat_template=template, add_generation_prompt=True, **given)
        except TypeError:  # a template that needs tools
            with pytest.raises(PromptError):
                render(template, talk, {**given, "add_generation_prompt": True, "tools": None, "documents": None})
            continue
        found = render(template, talk, {**given, "add_generation_prompt": True, "tools": None, "documents": None})
        assert found == text, path.name


def test_damaged_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model and in code .* copy a tokenizer\.json beside it"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tiktoken.model").rename(tmp_path / "tekken.json")
    with pytest.raises(CheckpointError, match=r"tekken\.json, which forerun does not read: copy a tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("when", ["it is read", "it encodes"])
def test_tokenizers_that_panic_are_damaged(when: str, tmp_path: Path) -> None:
    """The library's panics are no Exceptions."""
    content = json.loads(makers.byte_level().to_json())
    if when == "it is read":
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    else:
        start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": [start, text],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"x": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is damaged; download or copy"):
        Tokenizer.from_folder(tmp_path)


def test_texts_without_tokens_are_prompt_errors() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(PromptError, match="fails on this text"):
        Tokenizer(backend, {}).encode("b")


def test_long_texts_have_the_tokens_of_short_ones(made: Tokenizer) -> None:
    """They go another way through the library."""
    words = ["the", "there", "a café", "</s>", "  b", "\n日本", "e" * 9, "<tool call>"]
    text = " ".join(words[i * i % len(words)] for i in range(3000))
    assert len(text) > LONG_TEXT
    library = tokenizers.Tokenizer.from_str(made.to_json())
    for special in (True, False):
        assert made.encode(text, special) == library.encode(text, add_special_tokens=special).ids
    longest = max((made.token_text(i) or "" for i in range(made.vocab_size)), key=lambda name: len(name.encode()))
    assert made.max_token_bytes == len(longest.encode())


def test_other_threads_run_while_a_long_text_is_tokenized(made: Tokenizer) -> None:
    beats, done = [time.perf_counter()], threading.Event()

    def beat() -> None:
        while not done.wait(0.001):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    started = time.perf_counter()
    made.encode("the other there " * 60_000)
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert sum(started < beat < ended for beat in beats) >= 5  # else none, or one at either end


def test_folders_only_transformers_can_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("abab") == [2, 2] and tokenizer.eos_token_ids == (3,)


def test_vocabulary_checks() -> None:
    tokenizer = makers.byte_level()
    check_vocabulary(tokenizer, tokenizer.vocab_size)
    check_vocabulary(tokenizer, tokenizer.vocab_size + 100)
    with pytest.raises(VocabularyError, match="do not belong together"):
        check_vocabulary(tokenizer, tokenizer.vocab_size - 1)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.add_special_tokens(["<image>"])  # an id the model has no row for, as in Gemma 3
    check_vocabulary(Tokenizer(backend, {}), tokenizer.vocab_size)


def test_texts_are_cut_as_behind_the_tokens_before_them(made: Tokenizer) -> None:
    ids = made.encode("Once upon a time there was a little café", add_special_tokens=False)
    for start in range(1, len(ids)):
        raw = b"".join(map(made.token_bytes, ids[start:]))
        try:
            text = raw.decode()
        except UnicodeDecodeError:  # cut inside a character
            continue
        found = made.encode_behind(ids[:start], text)
        assert found == (ids[start:] if made.has_token_bytes else []), text
