"""Draft models beside a target: loaded once each, with the way their texts get to the target and back.

Knows: the target's tokenizer and size, when tokenizers differ. Does not know: how drafts are made, engines.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from forerun.kernels.ops import Kernels
from forerun.models.base import Model
from forerun.models.loader import LoadedModel, load_model, load_tokenizer
from forerun.weights.tokenizer import Tokenizer
from forerun.weights.translation import Translation, check_translatable, is_same_vocabulary

log = logging.getLogger("forerun.drafters")


class DraftModels:
    """The draft models of the engines on one target, by name."""

    def __init__(self, target: LoadedModel, kernels: Kernels, dtype: str) -> None:
        """dtype: what the target was loaded with."""
        self._target, self._kernels = target, kernels
        self._dtype = "auto" if dtype == "float16" else dtype  # drafts may be stored otherwise
        self._loaded: dict[str, LoadedModel] = {}
        self._translations: dict[str, Translation | None] = {}

    def load(self, name: str) -> Model:
        """The model. Raises ModelError, for tokenizers that do not go together before its weights are read."""
        if name not in self._loaded:
            check_tokenizers(self._target.tokenizer, str(self._target.folder), load_tokenizer(name), name)
            self._loaded[name] = load_model(name, self._kernels, dtype=self._dtype)
        return self._loaded[name].model

    def among(self, names: Collection[str]) -> list[LoadedModel]:
        """Those of these models that were loaded."""
        return [loaded for name, loaded in self._loaded.items() if name in names]

    def translation(self, name: str) -> Translation | None:
        """How texts get to that draft model and back; None if its tokens are the target's."""
        model = self.load(name)
        if name not in self._translations:
            target, draft = self._target, self._loaded[name]
            if is_same_vocabulary(target.tokenizer, draft.tokenizer):
                self._translations[name] = None
            else:
                made = Translation(target.tokenizer, draft.tokenizer, target.model.vocab_size, model.vocab_size)
                self._translations[name] = made
                log.warning(
                    "the draft model %s has another tokenizer than the target: what it drafts is handed over as text "
                    "(%d of its %d tokens are also tokens of the target's)",
                    name, made.num_common, draft.tokenizer.vocab_size,
                )  # fmt: skip
        return self._translations[name]


def check_draft(target: str, draft: str) -> None:
    """Raise ModelError for a draft model whose tokenizer does not go with the target's. Reads no weights."""
    check_tokenizers(load_tokenizer(target), target, load_tokenizer(draft), draft)


def check_tokenizers(target: Tokenizer, target_name: str, draft: Tokenizer, draft_name: str) -> None:
    """Raise VocabularyError if they have different tokens and one of them does not give texts back."""
    if not is_same_vocabulary(target, draft):
        check_translatable(target, target_name, "target")
        check_translatable(draft, draft_name, "draft model")
