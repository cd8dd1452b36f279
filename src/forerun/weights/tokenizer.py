"""Tokenizer: text to token ids and back, for one model folder.

Knows: tokenizer.json, sentencepiece models, and the settings beside them; any other kind is read through
transformers, imported only then (it takes seconds). Does not know: models or requests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from forerun.errors import CheckpointError, ForerunError, PromptError, VocabularyError
from forerun.weights.chat import read_templates, render
from forerun.weights.checkpoint import read_optional_json
from forerun.weights.decoders import piece_rule
from forerun.weights.detokenizer import IncrementalDetokenizer, TokenTexts
from forerun.weights.generation import GenerationConfig, end_ids
from forerun.weights.sentencepiece import PieceType, build_tokenizer, read_sentencepiece, with_added

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "tokenizer.model.v3", "tokenizer.model.v1")
OTHER_FILES = ("vocab.json", "vocab.txt")  # read through transformers
UNREAD_FILES = {
    "tiktoken.model": " and in code of its own, which forerun does not run",  # how texts are cut
    "tekken.json": ", which forerun does not read",
}
ADDED_FILE = "added_tokens.json"
MAX_TOKEN_ID = 1 << 20  # far more than any vocabulary has
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
LONG_TEXT = 4096  # characters; shorter ones are tokenized within a few milliseconds
NUM_BEHIND = 4  # tokens that decide how the text behind them is cut: words are cut apart from each other


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what forerun adds: exact streaming, chat templates, end tokens."""

    def __init__(
        self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Sequence[int] = (),
        templates: Mapping[str, str] | None = None, plain_ids: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`settings` is the content of tokenizer_config.json; `eos_token_ids` are those the model's files name.

        `templates` are as `read_templates` gives them. Tokens in `plain_ids` decode to their names unchanged, not
        through the decoder.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = {role: _token_text(settings.get(role)) for role in SPECIAL_ROLES}
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._rule = piece_rule(json.loads(backend.to_str()).get("decoder"))
        self._bytes = {token_id: (self.token_text(token_id) or "").encode() for token_id in plain_ids}
        named = templates or {}
        self.chat_template = named.get("default")
        self.tool_template = named.get("tool_use", self.chat_template)  # of conversations with tools
        self.bos_token_id = self._special_id("bos_token")
        self.end_at(eos_token_ids)

    @staticmethod
    def from_folder(folder: Path) -> Tokenizer:
        """Read a model folder's tokenizer; raises CheckpointError if there is none or it is damaged."""
        settings = read_optional_json(folder / "tokenizer_config.json")
        for role, text in read_optional_json(folder / "special_tokens_map.json").items():
            settings.setdefault(role, text)
        backend, converted = _read_backend(folder, settings)
        settings = {**converted, **settings}
        ends = end_ids(folder, GenerationConfig.beside(folder))
        with _no_panic(CheckpointError, f"the tokenizer of {folder} is damaged; download or copy its files again"):
            tokenizer = Tokenizer(backend, settings, ends, read_templates(folder, settings))
            backend.encode_batch(["a"])
        return tokenizer

    def end_at(self, token_ids: Sequence[int]) -> None:
        """Let texts end at these tokens, and at the tokenizer's own end token."""
        own_end = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*token_ids, *([] if own_end is None else [own_end])]))

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, so that ids can index a table."""
        return max(self._backend.get_vocab().values(), default=-1) + 1

    @property
    def ordinary_vocab_size(self) -> int:
        """One more than the largest id of a token that is not special."""
        ids = set(self._backend.get_vocab().values()) - self._special_ids
        return max(ids, default=-1) + 1

    @property
    def strips_leading_space(self) -> bool:
        """Whether a space at the very start of a text is dropped (sentencepiece)."""
        return self._rule is not None and self._rule.strip_leading

    @property
    def has_token_bytes(self) -> bool:
        """Whether every token has bytes of its own; if not, decoding looks at neighbours."""
        return self._rule is not None

    @cached_property
    def max_token_bytes(self) -> int:
        """The most bytes of text that any token stands for."""
        return max((len(name.encode()) for name in self._backend.get_vocab()), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; unless `add_special_tokens` is false, after a start token if the model has one.

        Raises PromptError for a text the tokenizer has no tokens for. Long texts do not block other threads.
        """
        with _no_panic(PromptError, "the tokenizer fails on this text", Exception):
            if len(text) <= LONG_TEXT:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # only batch calls release the GIL
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_behind(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Token ids of `text` behind these tokens, as if both had been one text where that is cut between them.

        [] where no tokens spell exactly `text`.
        """
        before = b"".join(map(self.token_bytes, token_ids[-NUM_BEHIND:])).decode(errors="ignore")
        wanted = text.encode()
        for context in dict.fromkeys((before, "\n", "")):
            with suppress(PromptError):
                ids = self.encode(context + text, add_special_tokens=False)
                num_bytes, start = 0, len(ids)
                while start > 0 and num_bytes < len(wanted):
                    start -= 1
                    num_bytes += len(self.token_bytes(ids[start]))
                if b"".join(map(self.token_bytes, ids[start:])) == wanted:
                    return ids[start:]
        return []

    def encode_with_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text` without a start token, and the first character of each and the one after its last.

        Tokens that are parts of one character all have that character's. Raises PromptError as `encode` does.
        """
        with _no_panic(PromptError, "the tokenizer fails on this text", Exception):
            if len(text) <= LONG_TEXT:
                encoding = self._placing.encode(text, add_special_tokens=False)
            else:
                (encoding,) = self._placing.encode_batch([text], add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @cached_property
    def _placing(self) -> tokenizers.Tokenizer:
        """The same tokenizer, for places that count a token's spaces to it."""
        backend = tokenizers.Tokenizer.from_str(self.to_json())
        backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        return backend

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """The tokens that `encode` puts before every text."""
        plain, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        starts = range(len(whole) - len(plain) + 1)
        return next((tuple(whole[:at]) for at in starts if whole[at : at + len(plain)] == plain), ())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; equal to what an IncrementalDetokenizer gives piece by piece.

        Bytes that are not UTF-8 become U+FFFD. Spaces before punctuation stay as the model wrote them
        (`clean_up_tokenization_spaces` is not applied: it cannot be streamed and loses text).
        """
        if not skip_special_tokens:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=False))
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.feed(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; b"" for special tokens and ids without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def decode_window(self, token_ids: Sequence[int]) -> str:
        """The library's own text of a few tokens, special tokens left out."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str | None:
        """The token's name in the vocabulary, None for an id without a token."""
        name: str | None = self._backend.id_to_token(token_id)
        return name

    def token_id(self, text: str) -> int | None:
        """The id of the token called `text`, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def to_json(self) -> str:
        """The tokenizer.json that makes the same tokens."""
        return str(self._backend.to_str())

    def vocabulary(self) -> dict[str, int]:
        """Token name -> id, added tokens included."""
        return dict(self._backend.get_vocab())

    def with_special_tokens(self) -> TokenTexts:
        """The same tokens for an IncrementalDetokenizer, special ones shown by their names."""
        return _Unskipped(self)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""
        return frozenset(self._special_ids)

    def special_text(self, token_id: int) -> str:
        """A special token's name, "" for any other token."""
        return (self.token_text(token_id) or "") if token_id in self._special_ids else ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, ready for `encode(text, add_special_tokens=False)`.

        Messages are objects with "role" and "content". `template`: the model's own unless given. `variables` reach the
        template. Raises PromptError.
        """
        template = template or self.chat_template
        if template is None:
            raise PromptError("this model has no chat template; use plain prompts (`generate`) instead of chat")
        names = {role: text for role, text in self.special_tokens.items() if text is not None}
        given = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        return render(template, messages, {**names, **given, **variables})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt), add_special_tokens=False)

    def _make_bytes(self, token_id: int) -> bytes:
        name = self.token_text(token_id)
        if name is None or token_id in self._special_ids or self._rule is None:
            return b""
        return self._rule.to_bytes(name)

    def _special_id(self, role: str) -> int | None:
        text = self.special_tokens[role]
        return None if text is None else self.token_id(text)


class _Unskipped:
    """A tokenizer whose special tokens have texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.strips_leading_space = tokenizer.strips_leading_space
        self.has_token_bytes = tokenizer.has_token_bytes

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.special_text(token_id).encode() or self._tokenizer.token_bytes(token_id)

    def decode_window(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Refuse a tokenizer with ids the model has no row for; raises VocabularyError.

    A model may have more rows than the tokenizer has tokens: tables are often padded. Special tokens may have none:
    Gemma 3 of text alone has its multimodal relatives' token for images.
    """
    largest = tokenizer.ordinary_vocab_size - 1
    if largest >= model_vocab_size:
        raise VocabularyError(
            f"the tokenizer has token ids up to {largest} but the model only {model_vocab_size} rows; tokenizer files "
            "and weights do not belong together: use those the model was published with"
        )


def _read_backend(folder: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The library's tokenizer, and special tokens that only the tokenizer's own file names."""
    path = folder / TOKENIZER_FILE
    if not path.exists():
        pieces = next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).exists()), None)
        return _through_transformers(folder) if pieces is None else _from_sentencepiece(pieces, settings)
    with _no_panic(CheckpointError, f"{path} is damaged; download or copy the file again", Exception):
        return tokenizers.Tokenizer.from_file(str(path)), {}


@contextmanager
def _no_panic(kind: type[ForerunError], message: str, *others: type[Exception]) -> Iterator[None]:
    """Raise `kind` if the library panics (PanicException is not an Exception) or raises one of `others`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, others) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{message} ({error})") from error


def _from_sentencepiece(path: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Texts begin with a start token unless `add_bos_token` is false.

    Beside a tokenizer.json, whose own rule says how they begin, that setting means nothing, as in transformers 5.
    """
    vocabulary = with_added(read_sentencepiece(path), _added_tokens(path.parent, settings))
    types = dict(zip(vocabulary.pieces, vocabulary.types, strict=True))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special = (PieceType.CONTROL, PieceType.UNKNOWN)  # in Gemma's models <s> is a tag of HTML
    found = {role: name for role, name in roles.items() if types.get(name) in special}
    start = _token_text({**found, **settings}.get("bos_token"))
    has_start = start in vocabulary.pieces and settings.get("add_bos_token", True)
    return build_tokenizer(vocabulary, start if has_start else None), found


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens that files beside a sentencepiece model add to it, by id; raises CheckpointError."""
    texts = read_optional_json(folder / ADDED_FILE)
    try:
        named = [*(settings.get(role) for role in SPECIAL_ROLES), *(settings.get("additional_special_tokens") or ())]
        special = {_token_text(value) for value in named}
        told: list[tuple[Any, Any]] = [
            (token_id, {"content": text, "special": text in special}) for text, token_id in texts.items()
        ]
        told += (settings.get("added_tokens_decoder") or {}).items()
        return {_added_id(token_id): _added_token(**token) for token_id, token in told}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: {ADDED_FILE} or added_tokens_decoder of tokenizer_config.json is damaged ({error}); copy the "
            "files again from where the model came from"
        ) from error


def _added_id(value: Any) -> int:
    token_id = int(value)
    if not 0 <= token_id < MAX_TOKEN_ID:
        raise ValueError(f"token ids are from 0 to {MAX_TOKEN_ID - 1}, got {token_id}")
    return token_id


def _added_token(
    content: str, special: bool = False, lstrip: bool = False, rstrip: bool = False, **_: Any
) -> AddedToken:
    """A token as settings write it; how texts are normalised around it is the vocabulary's own affair."""
    return AddedToken(content, special=special, lstrip=lstrip, rstrip=rstrip)


def _through_transformers(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Let transformers convert whatever tokenizer the folder has."""
    unread = next((name for name in UNREAD_FILES if (folder / name).exists()), None)
    if unread is not None:
        raise CheckpointError(
            f"{folder} has its tokenizer in {unread}{UNREAD_FILES[unread]}: copy a {TOKENIZER_FILE} beside it, which "
            "repositories of converted copies of the model have, or load a GGUF file"
        )
    if not any((folder / name).exists() for name in OTHER_FILES):
        known = ", ".join((TOKENIZER_FILE, *SENTENCEPIECE_FILES, *OTHER_FILES))
        raise CheckpointError(f"{folder} has no tokenizer ({known}); copy it from where the model came from")
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # anything from a missing library to a damaged file
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers cannot read the tokenizer of {folder} ({reason}); supply a {TOKENIZER_FILE}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise CheckpointError(
            f"the tokenizer of {folder} ({type(converted).__name__}) cannot be converted; supply a {TOKENIZER_FILE}"
        )
    return backend, {role: getattr(converted, role, None) for role in SPECIAL_ROLES}


def _token_text(value: Any) -> str | None:
    """A special token as settings write it: text, or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None
