"""EAGLE heads, versions 1 to 3.1: a layer or two that guess from the target's hidden states.

Knows: where the head is. Does not know: its layout (`models.heads.eagle`), how it drafts (`drafters.features`).
"""

from __future__ import annotations

from forerun.drafters.base import Drafter, DrafterContext
from forerun.drafters.features import FeatureDrafter
from forerun.models.heads.eagle import read_eagle
from forerun.models.heads.reading import native_target
from forerun.models.heads.source import open_head


def build(context: DrafterContext) -> Drafter:
    """The head the options name; raises ModelErrors where it does not fit the target."""
    assert context.options.model is not None  # DrafterConfig makes sure
    target = native_target(context.model)
    source = open_head(context.options.model)
    head = read_eagle(source, target, context.kernels, context.options.head_weights)
    return FeatureDrafter(head, "eagle", context)
