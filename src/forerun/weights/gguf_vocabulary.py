"""A folder's tokenizer as GGUF metadata.

Knows: tokenizer.json of byte-level and sentencepiece-like BPE, and llama.cpp's names of pre-tokenizers. Does not know:
models. What GGUF cannot express is refused: a tokenizer that cuts differently would give the model other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import UnsupportedError
from forerun.weights.gguf_pretokenizers import DIGIT, GPT2, PRE_TOKENIZERS
from forerun.weights.gguf_tokenizer import TOOL_TEMPLATE
from forerun.weights.gguf_write import Typed
from forerun.weights.sentencepiece import META, PieceType
from forerun.weights.tokenizer import Tokenizer

_BYTE_NAMES = {f"<0x{byte:02X}>" for byte in range(256)}


def tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The keys below `tokenizer.`; raises UnsupportedError or CheckpointError naming the folder.

    Ids up to vocab_size that have no token get names of their own.
    """
    tokenizer = Tokenizer.from_folder(folder)
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(f"{folder} has a {model.get('type')} tokenizer; forerun writes BPE tokenizers as GGUF")
    names, types = _tokens(content, vocab_size)
    if model.get("byte_fallback"):
        values, names = _sentencepiece(content, names), _spelled(names, types)
    else:
        values = _byte_level(folder, content)
    values |= {"tokens": names, "token_type": Typed("int32", types)}
    for key, token_id in _special_ids(tokenizer).items():
        values[f"{key}_token_id"] = token_id
    framed = tokenizer.encode("")
    values["add_bos_token"] = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in framed[:1]
    values["add_eos_token"] = bool(framed) and framed[-1] in tokenizer.eos_token_ids and framed[-1] != framed[0]
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    if tokenizer.chat_template is not None:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    if tokenizer.tool_template is not None and tokenizer.tool_template != tokenizer.chat_template:
        named |= {"tokenizer.chat_templates": ["tool_use"], TOOL_TEMPLATE: tokenizer.tool_template}
    return named


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The start token, and up to three end tokens as eos, eot and eom."""
    ids = {} if tokenizer.bos_token_id is None else {"bos": tokenizer.bos_token_id}
    ends = tokenizer.eos_token_ids
    return ids | dict(zip(("eos", "eot", "eom"), ends, strict=False))


def _tokens(content: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Names and types by token id."""
    names = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [int(PieceType.UNUSED)] * vocab_size
    for name, token_id in content["model"]["vocab"].items():
        is_byte = content["model"].get("byte_fallback") and name in _BYTE_NAMES
        names[token_id], types[token_id] = name, int(PieceType.BYTE if is_byte else PieceType.NORMAL)
    for token in content["added_tokens"]:
        kind = PieceType.CONTROL if token["special"] else PieceType.USER_DEFINED
        unknown = token["content"] == content["model"].get("unk_token")
        names[token["id"]], types[token["id"]] = token["content"], int(PieceType.UNKNOWN if unknown else kind)
    return names, types


def _byte_level(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    merges = content["model"]["merges"]
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    values: dict[str, Any] = {"model": "gpt2", "pre": _pre_tokenizer(folder, content)}
    return {**values, "merges": joined} if joined else values


def _pre_tokenizer(folder: Path, content: Mapping[str, Any]) -> str:
    """llama.cpp's name for the way this tokenizer cuts a text."""
    patterns = _patterns(content.get("pre_tokenizer") or {})
    ignores = bool(content["model"].get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if known.patterns == patterns and known.ignore_merges == ignores:
            return name
    raise UnsupportedError(
        f"{folder}: the tokenizer cuts texts by {patterns}, for which llama.cpp has no name; such a model cannot be "
        "written as GGUF"
    )


def _patterns(step: Mapping[str, Any]) -> tuple[str, ...]:
    """The expressions of a tokenizer.json's pre_tokenizer, in order; an empty one for a step without any."""
    if step.get("type") == "Sequence":
        return tuple(pattern for inner in step["pretokenizers"] for pattern in _patterns(inner))
    if step.get("type") == "ByteLevel" and not step.get("add_prefix_space"):
        return (GPT2,) if step.get("use_regex", True) else ()
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return (DIGIT,)
    if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return (step["pattern"].get("Regex", ""),)
    return ("",)


def _sentencepiece(content: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Scores that join pieces in the order of the merges: the earlier a piece is made, the higher."""
    scores = dict.fromkeys(names, 0.0)
    for rank, merge in enumerate(content["model"]["merges"]):
        piece = merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        if not scores.get(piece):
            scores[piece] = -float(rank + 1)
    ordered = [scores[name] for name in names]
    return {"model": "llama", "pre": "default", "scores": ordered, "add_space_prefix": _adds_space(content)}


def _adds_space(content: Mapping[str, Any]) -> bool:
    """Whether a space is put before every text."""
    normalizer, cutting = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" for step in steps) or cutting.get("prepend_scheme", "never") != "never"


def _spelled(names: list[str], types: list[int]) -> list[str]:
    """Spell spaces in pieces as sentencepiece's visible one, which llama.cpp expects (llama2.c has plain ones)."""
    normal = int(PieceType.NORMAL)
    return [name.replace(" ", META) if kind == normal else name for name, kind in zip(names, types, strict=True)]
