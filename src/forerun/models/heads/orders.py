"""Heads beside DFlash's layers that look at what is drafted in the slots before: which one a checkpoint has.

Knows: each one's name, tensors and fields of config.json. Does not know: what they compute (`heads.markov`,
`heads.refiner`, `heads.lattice`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.errors import UnsupportedError
from forerun.models.base import SlotOrder
from forerun.models.fields import Fields, words
from forerun.models.heads import lattice, markov, refiner
from forerun.models.heads.reading import HeadReader
from forerun.models.heads.vocabulary import DraftVocabulary
from forerun.weights.checkpoint import Checkpoint

ReadOrder = Callable[[HeadReader, Fields, int, DraftVocabulary | None], SlotOrder]


@dataclass(frozen=True, slots=True)
class OrderKind:
    """One of these heads."""

    name: str  # its authors'
    markers: tuple[str, ...]  # a checkpoint with one of these tensors has such a head
    modules: tuple[str, ...]  # where its tensors are
    read: ReadOrder | None  # None: `heads.dflash` reads it with what it needs besides
    unused: tuple[str, ...] = ()  # modules that only training or other ways of drafting need
    from_anchor: bool = False  # the root's slot gives the first draft, unless config.json says otherwise


MARKOV = OrderKind(
    "DSpark",
    (f"{markov.MODULE}.markov_w1.weight", f"{markov.MODULE}.markov_w2.weight"),
    (markov.MODULE, "confidence_head"),
    markov.read_markov,
    unused=("confidence_head",),  # chances of acceptance, which the policy measures
    from_anchor=True,
)
REFINER = OrderKind(
    "xPress",
    tuple(f"{name}.down_h.weight" for name in refiner.NAMES),
    (*refiner.NAMES, "candidate_selector"),
    refiner.read_refiner,
    unused=("candidate_selector",),  # where refining whole blocks starts
)
LATTICE = OrderKind("LiLiCorr", (f"{lattice.MODULE}.pass_hidden_proj.weight",), (lattice.MODULE,), None)
KINDS = {"dspark": MARKOV, "xpress": REFINER, "lilicorr": LATTICE}  # by `projector_type` and `speculators_model_type`
PLAIN = "dflash"  # `projector_type` of a head without any of these

# how often blocks are refined, how the published programs compute it, what training needed
FIELDS = words(
    "projector_type attention_mode markov_rank markov_head_type enable_confidence_head confidence_head_with_markov "
    "confidence_head_alpha num_anchors "
    "xpress_rank xpress_mlp_hidden xpress_mlp_ratio xpress_block_size xpress_num_passes num_jacobi_passes "
    "xpress_refinement_steps xpress_candidate_topc xpress_fused_kernel xpress_compile_head xpress_selector "
    "lilicorr_enabled lilicorr_candidate_topk lilicorr_hidden_size lilicorr_num_layers lilicorr_num_heads "
    "lilicorr_mlp_ratio lilicorr_factor_dim lilicorr_vector_eps lilicorr_logit_scale"
)
UNPUBLISHED = {"output_multiplier": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}


def find_kind(source: Checkpoint) -> OrderKind | None:
    """Which of these heads a checkpoint has; None: none."""
    return next((kind for kind in KINDS.values() if any(source.has(name) for name in kind.markers)), None)


def check_kind(source: Checkpoint, kind: OrderKind | None, fields: Fields) -> None:
    """Raise UnsupportedError if config.json is that of another head, or leaves open what the head computes."""
    says = fields.text("projector_type", default="") or fields.text("speculators_model_type", default="")
    says_kind = says in KINDS or fields.given("projector_type")
    if says_kind and (KINDS.get(says) is not kind or says not in (*KINDS, PLAIN)):
        field = "projector_type" if fields.given("projector_type") else "speculators_model_type"
        raise UnsupportedError(
            f"{source.folder}: {field} {says!r} in config.json, and the tensors are those of "
            f"{'a DFlash head' if kind is None else kind.name}; weights and config.json do not belong together, or the "
            f"head is of a kind forerun does not know; known are {', '.join(KINDS)}"
        )
    if fields.text("attention_mode", default="gqa") != "gqa":
        raise UnsupportedError(
            f"{source.folder}: attention_mode {fields.get('attention_mode')!r} in config.json; supported are heads "
            "with Qwen3's attention ('gqa')"
        )
    if kind is None:
        return
    for name, value in UNPUBLISHED.items():
        if fields.number(name, default=value) != value:
            raise UnsupportedError(
                f"{source.folder}: {name} {fields.get(name)} in config.json of a {kind.name} head; where such heads "
                f"apply it is not published, supported is {value:g}"
            )
    named = "dspark" in " ".join(fields.texts("architectures") or ()).lower() or KINDS.get(says) is MARKOV
    if kind is MARKOV and not named and not fields.given("sample_from_anchor"):
        raise UnsupportedError(
            f"{source.folder}: a Markov head, and config.json says neither that the head is a DSpark one "
            "(architectures, projector_type) nor whether the root's slot gives the first draft; set sample_from_anchor"
        )
    if kind is LATTICE and fields.flag("sample_from_anchor"):
        raise UnsupportedError(
            f"{source.folder}: sample_from_anchor in config.json of a LiLiCorr head; supported are heads whose root's "
            "slot gives no draft"
        )
