"""Output layers with some of their rows: what a draft vocabulary leaves of a model's.

Knows: that a model's rows are read again from where the model was read, in their own storage. Does not know: which
tokens are kept, or how a head's own layer is read (`heads.reading`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from forerun.config import DrafterConfig
from forerun.errors import ConfigError, UnsupportedError
from forerun.kernels.ops import Kernels
from forerun.layers.linear import Linear
from forerun.models.base import Model
from forerun.models.decoder import Decoder, RowFunction
from forerun.models.heads.vocabulary import DraftVocabulary, read_token_list
from forerun.models.hybrid import HybridDecoder
from forerun.models.loader import open_checkpoint, read_config
from forerun.quant.dense import DenseWeight
from forerun.quant.formats import find_format
from forerun.quant.rows import read_rows
from forerun.weights.gguf_checkpoint import GgufCheckpoint, is_gguf
from forerun.weights.resolve import resolve_model
from forerun.weights.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens a drafter for `target` may propose, and where the target was read from (None: from no file)."""

    vocabulary: DraftVocabulary
    target: Decoder
    folder: Path | None
    _read: list[Linear] = field(default_factory=list, compare=False)  # the target's rows, once they are read

    @property
    def token_ids(self) -> Tensor:
        """The rows of an output layer that stay -> [draft vocabulary] int64 on the host."""
        return self.vocabulary.token_ids

    def target_rows(self, kernels: Kernels) -> Linear:
        """These rows of the target's own output layer; raises ConfigError if it was read from no file."""
        if self.folder is None or not self.folder.exists():
            raise ConfigError(
                "a draft vocabulary leaves this head some rows of the target's output layer, which are read from the "
                "target's files, and this target was read from none: leave draft_vocabulary out"
            )
        if not self._read:  # several modules share them
            self._read.append(rows_of(self.target, self.folder, kernels, self.token_ids))
        return self._read[0]


def kept_tokens(path: str | None, target: Decoder, folder: Path | None) -> KeptTokens | None:
    """The tokens that the file at `path` lists, None without a file; raises ConfigError and VocabularyError."""
    if path is None:
        return None
    return KeptTokens(read_token_list(Path(path)).vocabulary(target.vocab_size), target, folder)


def rows_of(model: Decoder, folder: Path, kernels: Kernels, token_ids: Tensor) -> Linear:
    """Rows `token_ids` [R] int64 of the output layer of a model that was read from `folder`, as stored there."""
    head = model.parts.lm_head
    [part] = head.modules
    source = open_checkpoint(folder)
    form = find_format(source, part.prefix)
    assert form is not None  # it was read before
    dtype = head.weight.dtype if isinstance(head.weight, DenseWeight) else None
    weight = read_rows(form, source, [part], head.weight.shape[1], kernels, dtype, token_ids)
    return Linear(weight, None if head.bias is None else head.bias[token_ids.to(head.bias.device)])


def trimmed_decoder(model: Model, name: str, path: str, kernels: Kernels) -> Decoder:
    """The model `name` with logits for the tokens alone that the file at `path` lists, -inf for all others.

    All but the output layer is shared. Raises UnsupportedError, ConfigError and VocabularyError.
    """
    if not isinstance(model, Decoder) or isinstance(model, HybridDecoder):
        raise UnsupportedError(
            f"a draft vocabulary was given, and the draft model {name} runs through transformers: choose a draft model "
            "of a family that forerun runs itself, or leave draft_vocabulary out"
        )
    vocabulary = read_token_list(Path(path)).vocabulary(model.vocab_size)
    head = rows_of(model, resolve_model(name), kernels, vocabulary.token_ids)
    widened = WidenedLogits(model.parts.after_head, vocabulary.on(model.device))
    parts = replace(model.parts, lm_head=head, after_head=widened, tie_embeddings=False)
    trimmed = Decoder(parts, model.max_position, model.kv_specs[0].dtype)
    if model.parts.embedding.nbytes == 0:  # it counts as the whole output layer, which it is
        trimmed.weight_bytes += model.parts.lm_head.nbytes
    trimmed.mask_token_id = model.mask_token_id
    return trimmed


@dataclass(frozen=True, slots=True)
class WidenedLogits:
    """What becomes of logits of some tokens: `inner` of them, then -inf at all others."""

    inner: RowFunction | None
    vocabulary: DraftVocabulary

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [R, draft vocabulary] -> [R, V]."""
        return self.vocabulary.widen(logits if self.inner is None else self.inner(logits))


def check_draft_vocabularies(options: DrafterConfig, target: str) -> None:
    """Raise ConfigError, VocabularyError or ModelError for a draft vocabulary that is not the target's.

    Files alone are read, and no weights.
    """
    given = dict.fromkeys(each.draft_vocabulary for each in (options, *options.members))
    for path in given:
        if path is not None:
            folder = resolve_model(target)
            config = read_config(folder)
            tokenizer = GgufCheckpoint.open(folder).tokenizer() if is_gguf(folder) else Tokenizer.from_folder(folder)
            num_rows = None if config is None else config.vocab_size
            read_token_list(Path(path)).check(num_rows, tokenizer.vocab_size)
