"""Sentencepiece vocabularies as tokenizers of the `tokenizers` library.

Knows: pieces, scores and types, and the model file they come in (a protocol buffer, of which five fields matter).
Does not know: folders or chat. Source: google/sentencepiece sentencepiece_model.proto; llama2.c and llama.cpp read
the same pieces and scores from files of their own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from forerun.errors import CheckpointError, UnsupportedError

META = "\u2581"  # stands for a space in pieces


class PieceType(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class ModelType(IntEnum):
    """How a text is cut into pieces."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceVocabulary:
    """Pieces by token id."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[PieceType, ...]
    model_type: ModelType = ModelType.BPE
    space: str = META  # how pieces spell a space
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    merges: tuple[tuple[str, str], ...] | None = None  # best first; None: what scores say
    added: Mapping[int, AddedToken] = field(default_factory=dict)  # what other files say of tokens, by id

    def ids_of(self, kind: PieceType) -> list[int]:
        """Token ids of one type."""
        return [token_id for token_id, own in enumerate(self.types) if own == kind]


def build_tokenizer(vocabulary: PieceVocabulary, start: str | None) -> tokenizers.Tokenizer:
    """A tokenizer that encodes as sentencepiece does and puts the piece `start` before every text."""
    build = _bpe if vocabulary.model_type == ModelType.BPE else _unigram
    tokenizer = tokenizers.Tokenizer(build(vocabulary))
    _set_normalizer(tokenizer, vocabulary)
    _set_decoder(tokenizer, vocabulary)
    _add_special(tokenizer, vocabulary)
    if start is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, vocabulary.pieces.index(start))]
        )
    return tokenizer


def with_added(vocabulary: PieceVocabulary, added: Mapping[int, AddedToken]) -> PieceVocabulary:
    """The vocabulary with the tokens that other files add to it or rename; ids between them get names of their own.

    Tokens of users (Gemma's runs of spaces) are looked for in the text itself, where a space is a space, but for
    vocabularies that put a space before every text: they would put one behind each such token, too.
    Source: llama.cpp conversion/base.py, _create_vocab_sentencepiece.
    """
    size = len(vocabulary.pieces)
    missing = range(size, max([size, *(token_id + 1 for token_id in added)]))
    pieces = [*vocabulary.pieces, *(f"[PAD{token_id}]" for token_id in missing)]
    types = [*vocabulary.types, *(PieceType.UNUSED for _ in missing)]
    for token_id, token in added.items():
        if pieces[token_id] != token.content or types[token_id] not in (PieceType.UNKNOWN, PieceType.CONTROL):
            types[token_id] = PieceType.CONTROL if token.special else PieceType.USER_DEFINED
        pieces[token_id] = token.content
    users = [token_id for token_id, kind in enumerate(types) if kind == PieceType.USER_DEFINED]
    for token_id in users if not vocabulary.add_dummy_prefix else ():
        pieces[token_id] = pieces[token_id].replace(vocabulary.space, " ")
    lowest = min(vocabulary.scores, default=0.0)  # lower, and unknown characters, which cost more yet, would be dearer
    scores = (*vocabulary.scores, *(lowest for _ in missing))
    return replace(vocabulary, pieces=tuple(pieces), scores=scores, types=tuple(types), added=added)


def read_sentencepiece(path: Path) -> PieceVocabulary:
    """Read a sentencepiece model file; raises CheckpointError, or UnsupportedError for word and char models."""
    try:
        raw = path.read_bytes()
        fields = list(_fields(raw))
        pieces = [_piece(content) for number, content in fields if number == 1 and isinstance(content, bytes)]
        trainer = _message(fields, 2)
        normalizer = _message(fields, 3)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a sentencepiece model ({error}); supply a tokenizer.json instead"
        ) from error
    if not pieces:
        raise CheckpointError(f"{path} is no sentencepiece model (it has no pieces); supply a tokenizer.json instead")
    return PieceVocabulary(
        pieces=tuple(text for text, _, _ in pieces),
        scores=tuple(score for _, score, _ in pieces),
        types=tuple(kind for _, _, kind in pieces),
        model_type=_model_type(path, trainer.get(3, 1)),
        add_dummy_prefix=normalizer.get(3, 1) != 0,
        remove_extra_whitespaces=normalizer.get(4, 1) != 0,
        charsmap=_bytes(normalizer.get(2, b"")),
    )


# -- building -----------------------------------------------------------------------------------------------------


def _bpe(vocabulary: PieceVocabulary) -> models.BPE:
    """Joining the best-scoring pair first is BPE with merges ranked by the score of their result."""
    return models.BPE(
        vocab=unique_ids(vocabulary.pieces),
        merges=_merges(vocabulary) if vocabulary.merges is None else list(vocabulary.merges),
        unk_token=_unknown(vocabulary),
        fuse_unk=True,
        byte_fallback=_has_bytes(vocabulary),
    )


def _unigram(vocabulary: PieceVocabulary) -> models.Unigram:
    scored = list(zip(vocabulary.pieces, vocabulary.scores, strict=True))
    unknown = vocabulary.ids_of(PieceType.UNKNOWN)
    return models.Unigram(scored, unknown[0] if unknown else 0, _has_bytes(vocabulary))


def _has_bytes(vocabulary: PieceVocabulary) -> bool:
    return len(vocabulary.ids_of(PieceType.BYTE)) == 256


def _unknown(vocabulary: PieceVocabulary) -> str | None:
    ids = vocabulary.ids_of(PieceType.UNKNOWN)
    return vocabulary.pieces[ids[0]] if ids else None


def unique_ids(pieces: Sequence[str]) -> dict[str, int]:
    """Piece -> id; a piece that occurs again gets a name nothing encodes to."""
    ids: dict[str, int] = {}
    for token_id, piece in enumerate(pieces):
        ids[piece if piece not in ids else f"<duplicate {token_id}>"] = token_id
    return ids


def _merges(vocabulary: PieceVocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first, then shortest left part (the leftmost pair)."""
    normal = vocabulary.ids_of(PieceType.NORMAL)
    known = {vocabulary.pieces[token_id] for token_id in normal}
    ranked: list[tuple[float, int, str, str]] = []
    for token_id in normal:
        piece, score = vocabulary.pieces[token_id], vocabulary.scores[token_id]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                ranked.append((-score, cut, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _set_normalizer(tokenizer: tokenizers.Tokenizer, vocabulary: PieceVocabulary) -> None:
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))  # nothing for an empty text
    if vocabulary.space != " ":
        steps.append(normalizers.Replace(" ", vocabulary.space))
    tokenizer.normalizer = normalizers.Sequence(steps)


def _set_decoder(tokenizer: tokenizers.Tokenizer, vocabulary: PieceVocabulary) -> None:
    steps: list[decoders.Decoder] = [decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.space != " ":
        steps.insert(0, decoders.Replace(vocabulary.space, " "))
    if vocabulary.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)


def _add_special(tokenizer: tokenizers.Tokenizer, vocabulary: PieceVocabulary) -> None:
    special = sorted(vocabulary.ids_of(PieceType.CONTROL) + vocabulary.ids_of(PieceType.UNKNOWN))
    tokenizer.add_special_tokens([_added(vocabulary, token_id, True) for token_id in special])
    users = vocabulary.ids_of(PieceType.USER_DEFINED)
    tokenizer.add_tokens([_added(vocabulary, token_id, False) for token_id in users])


def _added(vocabulary: PieceVocabulary, token_id: int, special: bool) -> AddedToken:
    told = vocabulary.added.get(token_id)
    lstrip, rstrip = (False, False) if told is None else (told.lstrip, told.rstrip)
    return AddedToken(vocabulary.pieces[token_id], normalized=False, special=special, lstrip=lstrip, rstrip=rstrip)


# -- reading the protocol buffer ----------------------------------------------------------------------------------

Content = int | bytes


def _fields(raw: bytes) -> Iterator[tuple[int, Content]]:
    """(field number, content) of a message; raises ValueError or IndexError if it is not one."""
    position = 0
    while position < len(raw):
        key, position = _varint(raw, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(raw, position)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(raw, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if size > len(raw) - position:
            raise ValueError(f"a field of {size} bytes at byte {position} runs over the end")
        yield number, raw[position : position + size]
        position += size


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"an overlong number before byte {position}")


def _message(fields: Sequence[tuple[int, Content]], number: int) -> dict[int, Content]:
    """The last submessage of that number, or {}."""
    found = [content for own, content in fields if own == number and isinstance(content, bytes)]
    return dict(_fields(found[-1])) if found else {}


def _piece(raw: bytes) -> tuple[str, float, PieceType]:
    content = dict(_fields(raw))
    (score,) = struct.unpack("<f", _bytes(content.get(2, b"\0\0\0\0")))
    return _bytes(content.get(1, b"")).decode("utf-8"), score, PieceType(int(_number(content.get(3, 1))))


def _bytes(content: Content) -> bytes:
    if not isinstance(content, bytes):
        raise ValueError("a number where bytes belong")
    return content


def _number(content: Content) -> int:
    if not isinstance(content, int):
        raise ValueError("bytes where a number belongs")
    return content


def _model_type(path: Path, code: Content) -> ModelType:
    if code not in (1, 2):
        raise UnsupportedError(
            f"{path} is a sentencepiece model of type {code!r}; supported are unigram (1) and BPE (2); supply a "
            "tokenizer.json instead"
        )
    return ModelType(_number(code))
