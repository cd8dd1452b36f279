"""DFlash heads: a few layers that guess a whole block of tokens in one pass.

Knows: where the head is. Does not know: its layout (`models.heads.dflash`), how a block is drafted (`runtime.blocks`).
"""

from __future__ import annotations

from forerun.drafters.autoregressive import block_drafter
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec
from forerun.models.heads.dflash import holds_dflash, read_dflash
from forerun.models.heads.reading import native_target
from forerun.models.heads.source import open_head


def build(context: DrafterContext) -> Drafter:
    """The head the options name; raises ModelErrors where it does not fit the target."""
    assert context.options.model is not None  # checked by registry.check
    target = native_target(context.model)
    source = open_head(context.options.model)
    head = read_dflash(source, target, context.kernels, context.options.head_weights)
    return block_drafter(head, head.passes, context)


SPEC = DrafterSpec(
    name="dflash",
    build=build,
    help="a block of tokens at once, from the target's states",
    options=("model", "tree_width", "head_weights"),
    max_draft_tokens=15,  # a block of 16
    tree_width=8,  # candidates of a slot cost nothing
    model="a DFlash head trained for this model",
    holds_heads=holds_dflash,
    needs_layers=True,
    auto=4,
    vllm_names=("dflash",),
)
