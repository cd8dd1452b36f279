"""EAGLE heads, versions 1 to 3.1, and P-EAGLE: a few layers that guess from the target's hidden states.

Knows: where the head is. Does not know: its layout (`models.heads.eagle`), how it drafts (`drafters.autoregressive`).
"""

from __future__ import annotations

from forerun.drafters.autoregressive import head_drafter
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec
from forerun.models.heads.eagle import holds_eagle, read_eagle
from forerun.models.heads.reading import native_target
from forerun.models.heads.source import open_head
from forerun.models.trimmed import kept_tokens


def build(context: DrafterContext) -> Drafter:
    """The head the options name; raises ModelErrors where it does not fit the target."""
    assert context.options.model is not None  # checked by registry.check
    target = native_target(context.model)
    source = open_head(context.options.model)
    kept = kept_tokens(context.options.draft_vocabulary, target, context.folder)
    head = read_eagle(source, target, context.kernels, context.options.head_weights, kept)
    return head_drafter(head, context)


SPEC = DrafterSpec(
    name="eagle",
    build=build,
    help="a layer fed with the target's states",
    options=("model", "tree_width", "head_weights", "draft_vocabulary"),
    max_draft_tokens=8,
    tree_width=3,
    model="an EAGLE head trained for this model",
    holds_heads=holds_eagle,
    needs_layers=True,
    auto=6,
    vllm_names=("eagle", "eagle3"),
)
