"""DSpark, xPress and LiLiCorr heads on DFlash's layers: logits of the formulas, and drafts that change no token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.engine.engine import Engine
from forerun.errors import CheckpointError, ModelError, UnsupportedError
from forerun.models.heads.dflash import read_dflash
from forerun.models.heads.lattice import Lattice
from forerun.models.heads.source import open_head
from tests.drafters import test_dflash
from tests.drafters.test_dflash import BLOCK, LAYERS, SECOND, SPECULATORS, ZLAB, Layout, options, plain, requests, truth
from tests.support import heads, tiny
from tests.support.heads import DRAFT_VOCAB, HIDDEN, VOCAB, Draw

RANK = 16
NESTED = ZLAB["dflash_config"]
DSPARK = {
    "architectures": ["Qwen3DSparkModel"], "enable_confidence_head": True, "confidence_head_with_markov": True,
    "num_anchors": 9,
}  # fmt: skip
CONV = {name: value for name, value in SECOND.items() if name.startswith("conv")}
CANDIDATES, LATTICE_HEADS, VECTOR, LATTICE_HIDDEN, SCALE = 4, 2, 6, 24, 5.0
LATTICE = {
    "lilicorr_enabled": True, "lilicorr_candidate_topk": CANDIDATES, "lilicorr_num_layers": 2,
    "lilicorr_num_heads": LATTICE_HEADS, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": VECTOR,
    "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": SCALE,
}  # fmt: skip
XPRESS = {"xpress_rank": RANK, "xpress_block_size": BLOCK, "xpress_num_passes": 3, "sample_from_anchor": False}


class Kind(NamedTuple):
    """A head, how its configuration is laid out, and where its tensors are."""

    head: str
    layout: Layout
    module: str = ""
    width: int = 2 * RANK  # between the matrices of xPress's feed-forward part


def zlab(**fields: Any) -> Layout:
    """z-lab's layout with more fields in dflash_config."""
    return Layout({**ZLAB, "dflash_config": {**NESTED, **fields}}, (2, 4, 6))


KINDS: dict[str, Kind] = {
    "dspark": Kind(  # DeepSpec's: all fields at the top
        "vanilla",
        Layout({**NESTED, **DSPARK, "block_size": BLOCK, "markov_rank": RANK}, (2, 4, 6), first_slot=0),
    ),
    "dspark-gated": Kind(  # SpecForge's
        "gated",
        replace(
            zlab(projector_type="dspark", markov_rank=RANK, markov_head_type="gated", attention_mode="gqa"),
            first_slot=0,
        ),
    ),
    "dspark-rnn": Kind(
        "rnn",
        Layout(
            {
                **SPECULATORS, "speculators_model_type": "dspark", "draft_vocab_size": DRAFT_VOCAB,
                "markov_rank": RANK, "markov_head_type": "rnn", "sample_from_anchor": False,
            },
            (2, 6), drafted=DRAFT_VOCAB, is_speculators=True,
        ),
    ),
    "xpress": Kind(
        "refiner", Layout({**ZLAB, **XPRESS, "xpress_mlp_hidden": 40}, (2, 4, 6)), "xpress_head", 40
    ),
    "xpress-convolved": Kind(
        "refiner",
        replace(zlab(xpress_rank=RANK, xpress_refinement_steps=4, **CONV), is_second=True),
        "xpress_head",
    ),
    "xpress-speculators": Kind(
        "refiner",
        Layout(
            {
                **SPECULATORS, "speculators_model_type": "xpress", "draft_vocab_size": DRAFT_VOCAB,
                "xpress_rank": RANK, "xpress_mlp_ratio": 3, "num_jacobi_passes": 6, "sample_from_anchor": True,
            },
            (2, 6), first_slot=0, drafted=DRAFT_VOCAB, is_speculators=True,
        ),
        "refiner_head",
        3 * RANK,
    ),
    "lilicorr": Kind("lattice", zlab(**LATTICE, lilicorr_hidden_size=LATTICE_HIDDEN)),
    "lilicorr-convolved": Kind(
        "lattice", replace(zlab(**{**LATTICE, "lilicorr_hidden_size": 0}, **CONV), is_second=True)
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> tuple[Path, Reference]:
    """A checkpoint of a kind, and the head it holds."""
    kind, draw = KINDS[name], Draw(len(name))
    tensors = test_dflash.tensors_of(kind.layout, draw)
    tensors = {key: value for key, value in tensors.items() if "candidate_selector" not in key}  # DFlash-2's own
    tensors |= own_tensors(kind, draw)
    return heads.write(folder, tensors, test_dflash.config_of(kind.layout)), Reference(kind, tensors)


def own_tensors(kind: Kind, draw: Draw) -> dict[str, Tensor]:
    """What the head has beside DFlash's layers."""
    if kind.head == "lattice":
        size = kind.layout.fields["dflash_config"]["lilicorr_hidden_size"] or HIDDEN
        return {f"lilicorr.{name}": value for name, value in lattice_tensors(draw, size).items()}
    drafted = kind.layout.drafted
    if kind.head == "refiner":
        return refiner_tensors(draw, kind.module, drafted, kind.width)
    found = {
        "markov_head.markov_w1.weight": 2 * draw.matrix(VOCAB, RANK),
        "markov_head.markov_w2.weight": draw.matrix(drafted, RANK),
        "confidence_head.proj.weight": draw.matrix(1, HIDDEN + RANK),
        "confidence_head.proj.bias": draw.bias(1),
    }
    rows, columns = {"gated": (RANK, HIDDEN + RANK), "rnn": (3 * RANK, 2 * RANK + HIDDEN)}.get(kind.head, (0, 0))
    if rows:
        module = f"markov_head.{'gate' if kind.head == 'gated' else 'joint'}_proj"
        found |= {f"{module}.weight": draw.matrix(rows, columns), f"{module}.bias": draw.bias(rows)}
    return found


REFINERS = {
    "xpress_head": (
        "w1.weight", "mix.L", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "w2.weight",
    ),
    "refiner_head": (
        "token_embed.weight", "mix_l", "mlp_gate.weight", "mlp_up.weight", "mlp_down.weight", "readout.weight",
    ),
}  # fmt: skip


def refiner_tensors(draw: Draw, module: str, drafted: int, width: int) -> dict[str, Tensor]:
    table, mixer, gate, up, down, readout = REFINERS[module]
    found = {
        table: 2 * draw.matrix(VOCAB, RANK),
        "down_h.weight": draw.matrix(RANK, HIDDEN),
        "down_g.weight": draw.matrix(RANK, HIDDEN),
        "in_proj.weight": draw.matrix(RANK, 3 * RANK),
        mixer: draw.matrix(RANK * BLOCK, BLOCK).view(RANK, BLOCK, BLOCK),
        gate: draw.matrix(width, RANK),
        up: draw.matrix(width, RANK),
        down: draw.matrix(RANK, width),
        readout: draw.matrix(drafted, RANK),
    }
    return {f"{module}.{name}": value for name, value in found.items()}


def lattice_tensors(draw: Draw, size: int) -> dict[str, Tensor]:
    slots, inner = BLOCK - 1, int(1.5 * size)
    affine = {
        "pass_hidden_proj": (size, HIDDEN), "context_proj": (size, HIDDEN), "feature_mlp.1": (size, 5),
        "feature_mlp.3": (size, size), "factor_input_proj": (size, 3 * size), "out_head": (VECTOR, size),
        "in_head": (VECTOR, size), "anchor_out_head": (VECTOR, size),
    }  # fmt: skip
    if size != HIDDEN:
        affine["token_proj"] = (size, HIDDEN)
    norms = {"output_norm": size, "anchor_norm": size, "feature_mlp.0": 5}
    found = {
        "slot_embedding": draw.matrix(slots, size).view(1, 1, slots, 1, size),
        "rank_embedding": draw.matrix(CANDIDATES, size).view(1, 1, 1, CANDIDATES, size),
        "relative_slot_bias": 3 * draw.matrix(LATTICE_HEADS, 2 * BLOCK - 1),
        "same_slot_bias": draw.bias(LATTICE_HEADS),
        "feature_mlp.0.bias": draw.bias(5),
    }
    for index in range(2):
        layer = f"layers.{index}"
        norms |= {f"{layer}.attn_norm": size, f"{layer}.mlp_norm": size}
        affine |= {
            f"{layer}.attn.out_proj": (size, size),
            f"{layer}.mlp.0": (inner, size),
            f"{layer}.mlp.2": (size, inner),
        }
        found |= {
            f"{layer}.attn.in_proj_weight": draw.matrix(3 * size, size),
            f"{layer}.attn.in_proj_bias": draw.bias(3 * size),
        }
    found |= {f"{name}.weight": draw.norm(width) for name, width in norms.items()}
    for name, (rows, columns) in affine.items():
        found |= {f"{name}.weight": draw.matrix(rows, columns), f"{name}.bias": draw.bias(rows)}
    return found


# -- the formulas --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A head by its formulas, in plain float32 torch, one slot at a time."""

    kind: Kind
    tensors: dict[str, Tensor]

    @property
    def first_slot(self) -> int:
        return self.kind.layout.first_slot

    def after(self, known: Sequence[int], path: Sequence[int], num_slots: int) -> Tensor:
        """Logits [V] behind known tokens and drafted ones, of a block of so many slots."""
        base = test_dflash.Reference(self.kind.layout, self.tensors)
        hidden = base.hidden(known, num_slots)  # [slots, H]
        logits, slot = base.logits(hidden), len(path) + self.first_slot
        if self.kind.head == "lattice":
            return self._correlated(known, path, hidden[1:], logits[1:])
        seen = [*known[len(known) - 1 - self.first_slot :], *path]  # the token before each slot
        added = self._refined(seen, hidden) if self.kind.head == "refiner" else self._markov(seen, hidden)
        if self.kind.layout.drafted == VOCAB:
            return logits[slot] + added
        wide = torch.zeros(VOCAB)
        wide[torch.arange(len(added)) + self.tensors["d2t"]] = added
        return logits[slot] + wide

    def _markov(self, seen: Sequence[int], hidden: Tensor) -> Tensor:
        """What DSpark adds in the last of some slots; without a state only the last token counts."""
        tensors, state = self.tensors, torch.zeros(RANK)
        before = tensors["markov_head.markov_w1.weight"]
        if self.first_slot and self.kind.head == "rnn":
            seen = [seen[1], *seen[1:]]  # the root's own slot comes first, and reads the root
        for token, state_of_slot in zip(seen, hidden, strict=False):
            latent = before[token]
            if self.kind.head == "gated":
                latent = torch.sigmoid(self._affine("markov_head.gate_proj", [state_of_slot, latent])) * latent
            elif self.kind.head == "rnn":
                gate, new, made = self._affine("markov_head.joint_proj", [state, latent, state_of_slot]).split(RANK)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                latent = torch.tanh(made)
        return tensors["markov_head.markov_w2.weight"] @ latent

    def _refined(self, seen: Sequence[int], hidden: Tensor) -> Tensor:
        """What xPress adds in the last of some slots: one refinement of all of them, by the published formula."""
        own = {key.removeprefix(f"{self.kind.module}."): value for key, value in self.tensors.items()}
        table, mixer, gate, up, down, readout = (own[name] for name in REFINERS[self.kind.module])
        mixer = mixer.tril()
        num = len(seen)
        x = torch.cat(
            [
                hidden[:num] @ own["down_h.weight"].T,
                (hidden.mean(0) @ own["down_g.weight"].T).expand(num, -1),
                table[torch.tensor(seen)],
            ],
            dim=1,
        ) @ own["in_proj.weight"].T  # fmt: skip
        x = x + torch.einsum("ckj,jc->kc", mixer[:, :num, :num], x)
        x = x + (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        return readout @ x[-1]

    def _affine(self, module: str, parts: Sequence[Tensor]) -> Tensor:
        return self.tensors[f"{module}.weight"] @ torch.cat(list(parts)) + self.tensors[f"{module}.bias"]

    def _correlated(self, known: Sequence[int], path: Sequence[int], hidden: Tensor, logits: Tensor) -> Tensor:
        """LiLiCorr's scores of the candidates of the last slot, -inf for other tokens."""
        own = {key.removeprefix("lilicorr."): value for key, value in self.tensors.items() if "lilicorr" in key}
        ids = logits.topk(CANDIDATES).indices  # [slots, candidates]
        x = self._candidates(own, ids, hidden, logits.log_softmax(1).gather(1, ids)).flatten(0, 1)
        slots = torch.arange(len(ids)).repeat_interleave(CANDIDATES)
        apart = slots[:, None] - slots
        bias = own["relative_slot_bias"][:, apart + BLOCK - 1] + (apart == 0) * own["same_slot_bias"][:, None, None]
        for index in range(2):
            x = self._lattice_layer({k.removeprefix(f"layers.{index}."): v for k, v in own.items()}, x, bias)
        x = heads.rms(x, own["output_norm.weight"])
        by_layer = truth().states(known)
        states = torch.cat([by_layer[layer][len(known) - 2] for layer in self.kind.layout.states])
        fused = heads.rms(self.tensors["fc.weight"] @ states, self.tensors["hidden_norm.weight"])
        context = heads.rms(affine(own, "context_proj", fused), own["anchor_norm.weight"])
        beside = context.expand_as(x)
        joined = functional.silu(affine(own, "factor_input_proj", torch.cat([x, beside, x * beside], dim=1)))
        leaving, entering = (
            unit(affine(own, name, joined)).view(*ids.shape, VECTOR) for name in ("out_head", "in_head")
        )
        above = unit(affine(own, "anchor_out_head", context))
        for slot, token in enumerate(path):
            above = leaving[slot, ids[slot].tolist().index(token)]
        wide = torch.full((VOCAB,), -torch.inf)
        wide[ids[len(path)]] = SCALE * entering[len(path)] @ above
        return wide

    def _candidates(self, own: dict[str, Tensor], ids: Tensor, hidden: Tensor, log_q: Tensor) -> Tensor:
        """[slots, candidates, H']."""
        token = truth().embedding[ids]
        token = affine(own, "token_proj", token) if "token_proj.weight" in own else token
        rank = (torch.arange(CANDIDATES) / (CANDIDATES - 1)).expand_as(log_q)
        best = (torch.arange(CANDIDATES) == 0).float().expand_as(log_q)
        seen = torch.stack([log_q, log_q.exp(), log_q - log_q.max(1, keepdim=True).values, rank, best], dim=-1)
        seen = functional.layer_norm(seen, (5,), own["feature_mlp.0.weight"], own["feature_mlp.0.bias"])
        feature = affine(own, "feature_mlp.3", functional.silu(affine(own, "feature_mlp.1", seen)))
        slot = affine(own, "pass_hidden_proj", hidden) + own["slot_embedding"][0, 0, : len(ids), 0]
        return token + feature + slot[:, None] + own["rank_embedding"][0, 0]

    def _lattice_layer(self, own: dict[str, Tensor], x: Tensor, bias: Tensor) -> Tensor:
        """torch's own attention, whose names the checkpoint has."""
        attention = nn.MultiheadAttention(x.shape[1], LATTICE_HEADS, batch_first=True)
        attention.load_state_dict({k.removeprefix("attn."): v for k, v in own.items() if k.startswith("attn.")})
        normed = heads.rms(x, own["attn_norm.weight"])[None]
        with torch.no_grad():
            mixed, _ = attention(normed, normed, normed, attn_mask=bias, need_weights=False)
        x = x + mixed[0]
        normed = heads.rms(x, own["mlp_norm.weight"])
        return x + affine(own, "mlp.2", functional.silu(affine(own, "mlp.0", normed)))


def affine(own: dict[str, Tensor], module: str, x: Tensor) -> Tensor:
    return x @ own[f"{module}.weight"].T + own[f"{module}.bias"]


def unit(x: Tensor) -> Tensor:
    return x / x.pow(2).sum(-1, keepdim=True).sqrt()


# -- tests ---------------------------------------------------------------------------------------------------------

Heard = list[
    tuple[list[int], list[int], int, Tensor]
]  # known tokens, those of a node's path, nodes allowed, logits [V]


def overhear(made: Engine) -> Heard:
    """Note what children of all nodes are drawn from."""
    drafter, heard, sizes = tiny.inner(made), list[tuple[list[int], list[int], int, Tensor]](), dict[str, int]()
    propose, draw = drafter.propose, drafter.grower.draw

    def proposing(drafts: Any) -> None:
        sizes.update({draft.request.request_id: draft.num_free for draft in drafts})
        propose(drafts)

    def drawing(places: Any, logits: Tensor, width: int) -> Any:
        for (request, _, path), row in zip(places, logits, strict=True):
            heard.append((list(request.token_ids), list(path), sizes[request.request_id], row.clone()))
        return draw(places, logits, width)

    drafter.propose, drafter.grower.draw = proposing, drawing
    return heard


def assert_as_computed(heard: Heard, reference: Reference) -> None:
    for known, path, size, found in heard:
        slots = min(BLOCK - reference.first_slot, size) + reference.first_slot
        wanted = reference.after(known, path, slots)
        assert torch.equal(found == -torch.inf, wanted == -torch.inf), (len(known), path)
        finite = wanted > -torch.inf
        error = float((found[finite] - wanted[finite]).abs().max() / wanted[finite].abs().max())
        assert error < 1e-4, (error, len(known), path)


def spread(heard: Heard, num: int) -> Heard:
    """Some of all depths."""
    return sorted(heard, key=lambda one: len(one[1]))[:: max(1, len(heard) // num)]


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    """While drafting trees in an engine: several requests, chunked prompts, accepted and refused drafts."""
    folder, reference = make(name, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder), max_num_batched_tokens=40)
    heard = overhear(made)
    tokens, stats = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0)
    chosen = spread(heard, 40)
    assert_as_computed(chosen, reference)
    assert max(len(path) for _, path, *_ in chosen) >= 3 and len({len(known) for known, *_ in chosen}) > 3
    assert tiny.num_accepted(stats) > 0


LIMITS = [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}]


@pytest.mark.parametrize("name", ["dspark", "xpress", "lilicorr"])
@pytest.mark.parametrize(
    ("temperature", "limits", "width"),
    [(0.0, LIMITS[0], 3), (0.7, LIMITS[1], 1), (1.0, LIMITS[2], 3), (1.0, LIMITS[3], 1)],
)
def test_nothing_changes_but_speed(
    name: str, temperature: float, limits: dict[str, int], width: int, tmp_path: Path
) -> None:
    folder, reference = make(name, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), **limits)
    heard = overhear(made)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0
    assert ("num_kv_blocks" in limits) == any(stat.num_preemptions for stat in stats)
    assert_as_computed(spread(heard, 6), reference)


@pytest.mark.parametrize("name", ["dspark-rnn", "xpress", "lilicorr"])
def test_a_prefix_hit_goes_on_from_shared_rows(name: str, tmp_path: Path) -> None:
    """The token before the root is known to the head whoever computed it."""
    folder, reference = make(name, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    prompt = [3 + i * 7 % 90 for i in range(30)]
    params = requests(1)[0].samples[0].request.params
    heard = overhear(made)
    tiny.run(made, [test_dflash.harness.request(0, prompt, params, tiny.MAX_LEN)])
    heard.clear()
    texts = [prompt[:29], [*prompt[:29], 5, 41], [*prompt[:26], 7]]
    others = [test_dflash.harness.request(i, text, params, tiny.MAX_LEN) for i, text in enumerate(texts, 1)]
    tokens, stats = tiny.run(made, others)
    assert tokens == tiny.run(tiny.engine(heads.target(LAYERS)), others)[0]
    assert all(stat.num_cached_tokens >= 24 for stat in stats)
    assert 29 in {len(known) for known, *_ in heard}
    assert_as_computed(spread(heard, 30), reference)


@pytest.mark.parametrize("name", ["dspark-gated", "xpress", "lilicorr"])
def test_rounded_weights_draft_too(name: str, tmp_path: Path) -> None:
    folder, _ = make(name, tmp_path)
    sizes = []
    for stored in ("stored", "int8"):
        made = tiny.engine(heads.target(LAYERS), options(folder, head_weights=stored))
        tokens, stats = tiny.run(made, requests(2))
        assert tokens == plain(2, 1.0)
        assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0
        sizes.append(made.drafter.weight_bytes)
    assert sizes[1] < sizes[0]


def test_a_lattice_reads_the_table_of_its_head(tmp_path: Path) -> None:
    table = Draw(5).matrix(VOCAB, HIDDEN)
    folder = changed(tmp_path, "lilicorr", lambda tensors: tensors.update({"embed_tokens.weight": table}))
    order = read_dflash(open_head(folder), heads.target(LAYERS), tiny.kernels()).passes.order
    assert isinstance(order, Lattice)
    assert torch.equal(order.embedding(torch.arange(VOCAB)), table)


def test_projector_type_dflash_means_a_plain_head(tmp_path: Path) -> None:
    layout = zlab(projector_type="dflash")
    folder = heads.write(tmp_path, test_dflash.tensors_of(layout, Draw(3)), test_dflash.config_of(layout))
    assert read_dflash(open_head(folder), heads.target(LAYERS), tiny.kernels()).passes.order is None


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], Any] | None, **fields: Any) -> Path:
    folder, reference = make(name, tmp_path)
    tensors, config = dict(reference.tensors), {**test_dflash.config_of(KINDS[name].layout), **fields}
    if change is not None:
        change(tensors)
    return heads.write(folder, tensors, {name: value for name, value in config.items() if value != "absent"})


without, having = test_dflash.without, test_dflash.having
W1, LATTICE_FIELDS = "markov_head.markov_w1.weight", KINDS["lilicorr"].layout.fields["dflash_config"]
GATED = KINDS["dspark-gated"].layout.fields["dflash_config"]


@pytest.mark.parametrize(
    ("name", "change", "fields", "error", "says"),
    [
        ("dspark", without("markov_head.markov_w2.weight"), {}, CheckpointError, "markov_w2"),
        ("dspark", None, {"markov_rank": 8}, CheckpointError, "markov_w"),
        ("dspark", None, {"markov_head_type": "fir"}, UnsupportedError, "'fir'"),
        ("dspark", None, {"markov_head_type": "gated"}, CheckpointError, "gate_proj"),
        ("dspark", None, {"architectures": ["DFlashDraftModel"]}, UnsupportedError, "sample_from_anchor"),
        ("dspark", None, {"output_multiplier": 0.5}, UnsupportedError, "output_multiplier"),
        ("dspark", having("markov_head.lag_transforms.0.weight"), {}, UnsupportedError, "lag_transforms"),
        ("dspark", having("prefix_gru.weight_ih_l0"), {}, UnsupportedError, "Domino"),
        ("dspark-gated", None, {"dflash_config": {**GATED, "projector_type": "domino"}}, UnsupportedError, "'domino'"),
        ("dspark-gated", None, {"dflash_config": {**GATED, "projector_type": "lilicorr"}}, UnsupportedError, "DSpark"),
        ("dspark-gated", None, {"dflash_config": {**GATED, "attention_mode": "mla"}}, UnsupportedError, "'mla'"),
        ("dspark-gated", without(W1), {}, CheckpointError, "markov_w1"),
        ("dspark-rnn", None, {"speculators_model_type": "xpress"}, UnsupportedError, "'xpress'"),
        ("xpress", without("xpress_head.mix.L"), {}, CheckpointError, "mix.L"),
        ("xpress", None, {"xpress_block_size": 7}, CheckpointError, "xpress_block_size 7"),
        ("xpress", None, {"xpress_mlp_hidden": 24}, CheckpointError, "mlp"),
        ("xpress-convolved", without("layers.0.mlp_conv.base_kernel"), {}, CheckpointError, "mlp_conv"),
        ("lilicorr", without("lilicorr.token_proj.weight"), {}, CheckpointError, "token_proj"),
        ("lilicorr", having("lilicorr.gate.weight"), {}, UnsupportedError, "lilicorr.gate"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "lilicorr_num_heads": 5}}, CheckpointError, "divide"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "lilicorr_vector_eps": None}}, CheckpointError, "eps"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "is_causal": True}}, UnsupportedError, "is_causal"),
        ("lilicorr", None, {"causal": True}, UnsupportedError, ": causal in config.json"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "lilicorr_logit_scale": 0}}, CheckpointError, "ale 0"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "lilicorr_vector_eps": 0}}, CheckpointError, "eps 0"),
        ("lilicorr", None, {"dflash_config": {**LATTICE_FIELDS, "lilicorr_vector_eps": 0.5}}, CheckpointError, " 0.5 "),
        ("dspark-gated", None, {"dflash_config": {**GATED, "projector_type": "dflash"}}, UnsupportedError, "DSpark"),
        ("lilicorr", None, {"sample_from_anchor": True}, UnsupportedError, "sample_from_anchor"),
        ("lilicorr", None, {"hidden_size": 64}, UnsupportedError, "hidden size 64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    name: str, change: Any, fields: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says.replace(".", r"\.")):
        read_dflash(open_head(changed(tmp_path, name, change, **fields)), heads.target(LAYERS), tiny.kernels())
