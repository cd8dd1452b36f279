"""Multi-token prediction: a module trained with the target, or later for it, that drafts several tokens in a row.

Knows: where the module is. Does not know: its layout (`models.heads.mtp`), how it drafts (`drafters.autoregressive`).
"""

from __future__ import annotations

from pathlib import Path

from forerun.drafters.autoregressive import head_drafter
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec
from forerun.errors import ConfigError
from forerun.models.heads.mtp import holds_mtp, num_modules, open_mtp, read_mtp
from forerun.models.heads.reading import native_target
from forerun.models.trimmed import kept_tokens


def build(context: DrafterContext) -> Drafter:
    """The module the options name, else the target's own; raises ModelErrors where there is none that fits."""
    target = native_target(context.model)
    kept = kept_tokens(context.options.draft_vocabulary, target, context.folder)
    head = read_mtp(open_mtp(_folder(context)), target, context.kernels, context.options.head_weights, kept)
    return head_drafter(head, context)


def _folder(context: DrafterContext) -> str | Path:
    if context.options.model is not None:
        return context.options.model
    if context.folder is None or not context.folder.exists():
        raise ConfigError(
            "drafter 'mtp' looks for a module in the target's own folder, and this target was not read from one: give "
            "the module's folder with --draft-model"
        )
    return context.folder


SPEC = DrafterSpec(
    name="mtp",
    build=build,
    help="a module trained with the target",
    options=("model", "tree_width", "head_weights", "draft_vocabulary"),
    max_draft_tokens=8,
    tree_width=3,
    chains_if_quick=True,
    model="a module trained for this model",
    own_modules=num_modules,
    holds_heads=holds_mtp,
    needs_layers=True,
    auto=5,
    vllm_names=("mtp",),
)
