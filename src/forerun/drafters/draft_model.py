"""A small model that guesses for a large one: chains, or best-first trees.

Knows: which model. Does not know: the target, how a model drafts (`drafters.autoregressive`). Its KV lies in extra
layers of the target's pool under the same block table, so commits move it along. One with another tokenizer than the
target's is handed over to `drafters.translated`.

Sources: Leviathan et al., arXiv 2211.17192; PARD, arXiv 2504.18583.
"""

from __future__ import annotations

from forerun.drafters.autoregressive import AutoregressiveDrafter, Bind, binder, block_binder
from forerun.drafters.base import Drafter, DrafterContext, DrafterSpec
from forerun.drafters.following import TokenFollower
from forerun.drafters.translated import build_translated
from forerun.errors import UnsupportedError
from forerun.models.base import (
    BlockPasses,
    BlockShape,
    Model,
    mask_token_of,
    passes_of,
    state_specs_of,
    with_own_state,
)
from forerun.models.trimmed import trimmed_decoder


def build(context: DrafterContext) -> Drafter:
    """The draft model the options name. Raises UnsupportedError for one with recurrent layers."""
    assert context.options.model is not None  # checked by registry.check
    model = with_own_state(context.load_draft(context.options.model))
    if state_specs_of(model):
        raise UnsupportedError(
            f"the draft model {context.options.model} has recurrent layers, whose state is kept for targets only; "
            "choose a draft model whose layers all attend"
        )
    translation = context.translation(context.options.model)
    if translation is not None:
        return build_translated(context, model, translation)
    if context.options.draft_vocabulary is not None:
        model = trimmed_decoder(model, context.options.model, context.options.draft_vocabulary, context.kernels)
    return AutoregressiveDrafter(
        context, TokenFollower(model), _bind(model, context), model.max_position, model.weight_bytes, model.kv_specs
    )


def _bind(model: Model, context: DrafterContext) -> Bind:
    """Token by token; a model that was trained to guess several tokens at once (PARD) does so."""
    mask_token_id, passes = mask_token_of(model), passes_of(model)
    if mask_token_id is None:
        return binder(passes, context)
    shape = BlockShape(context.options.max_draft_tokens, mask_token_id, first_slot=0, is_causal=True)
    return block_binder(BlockPasses(passes, shape), context)


SPEC = DrafterSpec(
    name="draft",
    build=build,
    help="a small model",
    options=("model", "tree_width", "draft_vocabulary"),
    max_draft_tokens=8,
    tree_width=3,
    chains_if_quick=True,
    model="a small model, best one with the same tokenizer",
    auto=3,
    vllm_names=("draft_model",),
)
