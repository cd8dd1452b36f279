"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`), sentencepiece (`llama`), its pieces with merges of their own
(`gemma4`), with special tokens.

Knows: the keys below `tokenizer.` and what llama.cpp does where they are absent. Does not know: tensors or models.
Source: llama.cpp src/llama-vocab.cpp (llama_vocab::impl::load), and transformers for what it leaves out.
"""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from forerun.errors import CheckpointError, UnsupportedError
from forerun.weights.gguf_metadata import GGUFMetadata
from forerun.weights.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer, build_pre_tokenizer
from forerun.weights.sentencepiece import PieceType, PieceVocabulary, build_tokenizer, unique_ids
from forerun.weights.tokenizer import Tokenizer

# Tokens that end an answer wherever they occur in a vocabulary: files often name only one end token of several.
END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<turn|>",
             "<|tool_response>", "[e~[", "<|return|>", "<|call|>")  # fmt: skip
HARMONY_NAMES = {"<|return|>", "<|call|>", "<|end|>"}  # in a vocabulary with all three, <|end|> ends only a message
_END_KEYS = ("eos", "eot", "eom")
TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEPT_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other special tokens remove the spaces after them


def read_tokenizer(metadata: GGUFMetadata) -> Tokenizer:
    """The tokenizer of a GGUF file; raises CheckpointError or UnsupportedError naming the key."""
    model = metadata.text("tokenizer.ggml.model")
    if model not in _BUILDERS:
        raise UnsupportedError(
            f"{metadata.path} has a tokenizer of the kind {model!r}; supported are {', '.join(_BUILDERS)}; load the "
            "model from its safetensors"
        )
    names = _token_names(metadata)
    backend, add_bos = _BUILDERS[model](metadata, names)
    _set_frame(backend, metadata, names, add_bos)
    settings = {role: _role_name(metadata, key, names) for role, key in _ROLES.items()}
    # llama.cpp's converter stores user-defined tokens as text, not as the bytes' visible characters.
    users = [i for i, kind in enumerate(_types(metadata, names)) if kind == PieceType.USER_DEFINED]
    plain_ids = users if model == "gpt2" else ()
    return Tokenizer(backend, settings, end_token_ids(metadata), _chat_templates(metadata), plain_ids)


def end_token_ids(metadata: GGUFMetadata) -> tuple[int, ...]:
    """Token ids that end an answer: those the file names, then those known by their names."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    names = tokens if isinstance(tokens, list) else []
    named = [special_token_id(metadata, key, len(names)) for key in _END_KEYS]
    wanted = set(END_NAMES)
    known = [token_id for token_id, name in enumerate(names) if isinstance(name, str) and name in wanted]
    ends = dict.fromkeys([*(token_id for token_id in named if token_id is not None), *known])
    is_harmony = {names[token_id] for token_id in ends} >= HARMONY_NAMES
    return tuple(token_id for token_id in ends if not (is_harmony and names[token_id] == "<|end|>"))


def special_token_id(metadata: GGUFMetadata, key: str, num_tokens: int) -> int | None:
    """A token id the file names; None if it names none, or one beyond the vocabulary (-1 written as unsigned)."""
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise metadata.wrong(f"tokenizer.ggml.{key}_token_id", "a token id")
    return value if value is not None and 0 <= value < num_tokens else None


def _role_name(metadata: GGUFMetadata, key: str, names: list[str]) -> str | None:
    token_id = special_token_id(metadata, key, len(names))
    return None if token_id is None else names[token_id]


def _token_names(metadata: GGUFMetadata) -> list[str]:
    """Names by token id, empty and repeated ones replaced by names that nothing encodes to."""
    found = metadata.texts("tokenizer.ggml.tokens")
    if not found:
        raise CheckpointError(f"{metadata.path}: tokenizer.ggml.tokens is empty; convert the model again")
    names = list(unique_ids([name or f"[EMPTY_{token_id}]" for token_id, name in enumerate(found)]))
    if len(names) != len(found):
        raise CheckpointError(
            f"{metadata.path}: tokenizer.ggml.tokens holds names made up by other programs; convert again"
        )
    return names


def _types(metadata: GGUFMetadata, names: list[str]) -> tuple[PieceType, ...]:
    found = metadata.numbers("tokenizer.ggml.token_type", len(names), default=int(PieceType.NORMAL))
    known = set(PieceType)
    return tuple(PieceType(kind) if kind in known else PieceType.NORMAL for kind in found)


# -- byte-level BPE -----------------------------------------------------------------------------------------------


def _byte_level(metadata: GGUFMetadata, names: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether a start token comes first unless the file says otherwise."""
    cutting, types = _pre_tokenizer(metadata), _types(metadata, names)
    merges = _merges(metadata, [name for name, kind in zip(names, types, strict=True) if kind == PieceType.NORMAL])
    vocab = {name: token_id for token_id, name in enumerate(names)}
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=cutting.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{metadata.path}: tokens and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if cutting.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(cutting.patterns)
    backend.decoder = decoders.ByteLevel()
    special = [name for name, kind in zip(names, types, strict=True) if kind in (PieceType.CONTROL, PieceType.UNKNOWN)]
    users = [name for name, kind in zip(names, types, strict=True) if kind == PieceType.USER_DEFINED]
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    backend.add_tokens([AddedToken(name, normalized=False, special=False) for name in users])
    return backend, cutting.add_bos


def _pre_tokenizer(metadata: GGUFMetadata) -> PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", "")
    if name not in PRE_TOKENIZERS:
        what = f"the pre-tokenizer {name!r}" if name else "no tokenizer.ggml.pre (an old file)"
        raise UnsupportedError(
            f"{metadata.path} has {what}; forerun knows {', '.join(PRE_TOKENIZERS)}; texts would be cut into other "
            "tokens than the model was trained on: convert the model again with a current llama.cpp"
        )
    return PRE_TOKENIZERS[name]


def _merges(metadata: GGUFMetadata, normal: list[str]) -> list[tuple[str, str]]:
    """The merges, best first; files of vocabularies without any (single bytes) leave the key out."""
    if metadata.get("tokenizer.ggml.merges") is None and all(len(name) == 1 for name in normal):
        return []
    return [_merge(metadata, line) for line in metadata.texts("tokenizer.ggml.merges")]


def _merge(metadata: GGUFMetadata, line: str) -> tuple[str, str]:
    cut = line.find(" ", 1)  # the first piece may itself be a space in old files
    if cut < 1 or cut == len(line) - 1:
        raise CheckpointError(f"{metadata.path}: {line[:60]!r} in tokenizer.ggml.merges is not two pieces")
    return line[:cut], line[cut + 1 :]


# -- sentencepiece ------------------------------------------------------------------------------------------------


def _sentencepiece(metadata: GGUFMetadata, names: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    vocabulary = PieceVocabulary(
        pieces=tuple(names),
        scores=tuple(float(score) for score in metadata.numbers("tokenizer.ggml.scores", len(names))),
        types=_types(metadata, names),
        add_dummy_prefix=metadata.flag("tokenizer.ggml.add_space_prefix", True),
        remove_extra_whitespaces=metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False),
    )
    backend = build_tokenizer(vocabulary, start=None)
    swallows = metadata.text("general.architecture", "") == "phi3"
    return _with_swallowed_spaces(backend) if swallows else backend, True


def _with_swallowed_spaces(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer whose special tokens remove the spaces after them (GGUF does not store that)."""
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["rstrip"] = token["special"] and token["content"] not in _KEPT_SPACES
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def _merged_pieces(metadata: GGUFMetadata, names: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Pieces that are joined by the file's merges; a start token comes first."""
    vocabulary = PieceVocabulary(
        pieces=tuple(names),
        scores=(0.0,) * len(names),
        types=_types(metadata, names),
        add_dummy_prefix=False,
        merges=tuple(_merge(metadata, line) for line in metadata.texts("tokenizer.ggml.merges")),
    )
    try:
        return build_tokenizer(vocabulary, start=None), True
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{metadata.path}: tokens and merges do not fit together: {error}") from error


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _merged_pieces}

# -- around a text ------------------------------------------------------------------------------------------------


def _set_frame(backend: tokenizers.Tokenizer, metadata: GGUFMetadata, names: list[str], add_bos: bool) -> None:
    """Put the start and end tokens the file asks for around every text."""
    start = _framing(metadata, "bos", names, add_bos)
    end = _framing(metadata, "eos", names, False)
    if not start and not end:
        return
    frame = [(names[token_id], token_id) for token_id in (*start, *end)]
    before, after = [names[token_id] for token_id in start], [names[token_id] for token_id in end]
    single = [*before, "$A", *after]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *before, "$B", *after], special_tokens=list(dict.fromkeys(frame))
    )


def _framing(metadata: GGUFMetadata, key: str, names: list[str], default: bool) -> list[int]:
    if not metadata.flag(f"tokenizer.ggml.add_{key}_token", default):
        return []
    token_id = special_token_id(metadata, key, len(names))
    if token_id is None:
        raise CheckpointError(
            f"{metadata.path} asks for a {key} token around texts but names none (tokenizer.ggml.{key}_token_id)"
        )
    return [token_id]


def _chat_templates(metadata: GGUFMetadata) -> dict[str, str]:
    """As `read_templates` gives them."""
    keys = {"default": "tokenizer.chat_template", "tool_use": TOOL_TEMPLATE}
    return {name: metadata.text(key) for name, key in keys.items() if metadata.get(key) is not None}
