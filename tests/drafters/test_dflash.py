"""DFlash heads: in every layout they give the logits of the formulas, and what they draft changes no token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM
from forerun.config import DrafterConfig
from forerun.drafters.named import engine_config
from forerun.engine.engine import Engine
from forerun.engine.outputs import RequestGroup
from forerun.errors import CheckpointError, ConfigError, ModelError, UnsupportedError, VocabularyError
from forerun.models.heads import dflash
from forerun.models.heads.dflash import read_dflash
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from forerun.quant.formats import find_format
from forerun.runtime.depths import SlotPairs, draw_depths
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.drafters import test_eagle
from tests.models import factory
from tests.support import harness, heads, tiny
from tests.support.heads import CONFIG, DRAFT_VOCAB, HEADS, HIDDEN, KV_HEADS, THETA, VOCAB, Draw, Truth, rms
from tests.support.shared import shared_data

LAYERS = 7
BLOCK, MASK, HEAD_DIM = 6, 91, 16
SLIDING, FULL = "sliding_attention", "full_attention"


def truth() -> Truth:
    return heads.truth(LAYERS)


# -- checkpoints and their formulas --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Fields of config.json, and what they mean."""

    fields: dict[str, Any]
    states: tuple[int, ...]
    windows: tuple[int, int] = (0, 0)
    causal: tuple[bool, bool] = (False, False)
    windows_before_block: bool = False  # a window is counted from the root of a whole block; else from each slot
    first_slot: int = 1
    scale: float = 1.0
    factor: float = 1.0
    cap: float = 0.0
    drafted: int = VOCAB
    is_speculators: bool = False
    is_second: bool = False


TAPS, GROUP, RANK, CANDIDATES = 3, 8, 4, 5
SECOND = {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}
ZLAB = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}, "block_size": BLOCK}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [2, 6],
    "block_size": BLOCK,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9}
LAYOUTS: dict[str, Layout] = {
    "z-lab": Layout(ZLAB, (2, 4, 6)),
    "z-lab-windows": Layout(
        {**ZLAB, **WINDOWS, "layer_types": [SLIDING, FULL]}, (2, 4, 6), windows=(9, 0), causal=(True, False)
    ),
    "z-lab-unused-windows": Layout(
        {**ZLAB, "sliding_window": 9, "layer_types": [SLIDING, SLIDING]}, (2, 4, 6), causal=(True, True)
    ),
    "jetspec": Layout(
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], "causal_head": True}}, (2, 4, 6), causal=(True, True)
    ),
    "flat": Layout(
        {
            "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 6], "num_target_layers": LAYERS,
            "input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 2.0,
        },
        (1, 7), scale=1.5, factor=0.7, cap=2.0,
    ),
    "speculators": Layout(
        {**SPECULATORS, "draft_vocab_size": DRAFT_VOCAB}, (2, 6), drafted=DRAFT_VOCAB, is_speculators=True
    ),
    "speculators-windows": Layout(
        {**SPECULATORS, "sliding_window_non_causal": True, "layers": {**WINDOWS, "layer_types": [FULL, SLIDING]}},
        (2, 6), windows=(0, 9), windows_before_block=True, is_speculators=True,
    ),
    "dflash-2": Layout(
        {**ZLAB, "dflash_config": {**ZLAB["dflash_config"], **SECOND}, "is_causal": False}, (2, 4, 6), is_second=True
    ),
    "from-anchor": Layout({**SPECULATORS, "sample_from_anchor": True}, (2, 6), first_slot=0, is_speculators=True),
}  # fmt: skip


def make(name: str, folder: Path) -> tuple[Path, Reference]:
    """A checkpoint of a layout, and the head it holds."""
    layout = LAYOUTS[name]
    tensors = tensors_of(layout, Draw(len(name)))
    return heads.write(folder, tensors, config_of(layout)), Reference(layout, tensors)


def tensors_of(layout: Layout, draw: Draw) -> dict[str, Tensor]:
    tensors = {"fc.weight": draw.matrix(HIDDEN, len(layout.states) * HIDDEN)}
    tensors |= {"hidden_norm.weight": draw.norm(), "norm.weight": draw.norm()}
    for index in range(2):
        prefix = f"layers.{index}"
        tensors |= draw.block(prefix, HIDDEN, HEAD_DIM) | {f"{prefix}.input_layernorm.weight": draw.norm()}
        tensors |= {f"{prefix}.self_attn.{part}_norm.weight": draw.norm(HEAD_DIM) for part in "qk"}
    if layout.is_second:
        tensors |= second_tensors(draw)
    if layout.drafted < VOCAB:
        known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[: layout.drafted].sort().values
        tensors |= {"d2t": known - torch.arange(layout.drafted), "t2d": torch.isin(torch.arange(VOCAB), known)}
        tensors["lm_head.weight"] = draw.matrix(layout.drafted, HIDDEN)
    return tensors


def second_tensors(draw: Draw) -> dict[str, Tensor]:
    """What DFlash-2 has beside DFlash's layers."""
    found = {"candidate_selector.hidden_projection.weight": draw.matrix(RANK, HIDDEN)}
    found |= {
        f"candidate_selector.{name}_codebook": 4 * draw.matrix(VOCAB, RANK) for name in ("predecessor", "successor")
    }
    for index in range(2):
        for name in (f"layers.{index}.attention_conv", f"layers.{index}.mlp_conv"):
            found[f"{name}.base_kernel"] = draw.matrix(2 * TAPS, HIDDEN).view(2, TAPS, HIDDEN) + 0.3
            found[f"{name}.kernel_projection.weight"] = draw.matrix(2 * TAPS * HIDDEN // GROUP, HIDDEN)
    return found


def config_of(layout: Layout) -> dict[str, Any]:
    fields = dict(layout.fields)
    layers = {**CONFIG, "model_type": "qwen3", "head_dim": HEAD_DIM, "num_hidden_layers": 2, **fields.pop("layers", {})}
    return {**fields, "transformer_layer_config": layers} if layout.is_speculators else {**layers, **fields}


@dataclass(frozen=True)
class Reference:
    """A head by its formulas, in plain float32 torch."""

    layout: Layout
    tensors: dict[str, Tensor]
    target: Truth = field(default_factory=truth)

    @property
    def first_slot(self) -> int:
        return self.layout.first_slot

    def after(self, known: Sequence[int], num_slots: int) -> Tensor:
        """Logits [drafts, V] of a block whose root is the last known token."""
        return self.logits(self.hidden(known, num_slots))[self.first_slot :]

    def hidden(self, known: Sequence[int], num_slots: int) -> Tensor:
        """What the output layer reads [slots, H]."""
        layout, tensors = self.layout, self.tensors
        by_layer = self.target.states(known)
        states = torch.cat([by_layer[layer] for layer in layout.states], dim=1)[: len(known) - 1]
        context = rms(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
        x = self.target.embedding[[known[-1], *[MASK] * (num_slots - 1)]] * layout.scale
        for index in range(2):
            prefix = f"layers.{index}"
            normed = rms(x, tensors[f"{prefix}.input_layernorm.weight"])
            seen = self._seen(index, len(known) - 1, num_slots)
            entered = self._convolved(f"{prefix}.attention_conv", 0, normed, normed)
            mixed = attend(entered, context, seen, tensors, f"{prefix}.self_attn")
            x = x + self._convolved(f"{prefix}.attention_conv", 1, mixed, normed)
            normed = rms(x, tensors[f"{prefix}.post_attention_layernorm.weight"])
            made = heads.feed_forward(
                self._convolved(f"{prefix}.mlp_conv", 0, normed, normed), tensors, f"{prefix}.mlp"
            )
            x = x + self._convolved(f"{prefix}.mlp_conv", 1, made, normed)
        return rms(x, tensors["norm.weight"])

    def _convolved(self, module: str, side: int, x: Tensor, entered: Tensor) -> Tensor:
        """One convolution of DFlash-2, entry by entry; x itself in other heads."""
        if not self.layout.is_second:
            return x
        base = self.tensors[f"{module}.base_kernel"][side]
        changing = (entered @ self.tensors[f"{module}.kernel_projection.weight"].T).view(len(x), 2, TAPS, -1)[:, side]
        found = torch.zeros_like(x)
        for slot in range(len(x)):
            for tap in range(min(TAPS, slot + 1)):
                found[slot] += (base[tap] + changing[slot, tap].repeat_interleave(GROUP)) * x[slot - tap]
        return found

    def added(self, hidden: Tensor, above: int, ids: Tensor) -> Tensor:
        """What DFlash-2 adds to logits of `ids` [n] in a slot of this hidden state [H] behind a token."""
        selector = {name: self.tensors[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")}
        slot = self.tensors["candidate_selector.hidden_projection.weight"] @ hidden
        return selector["successor"][ids] @ (selector["predecessor"][above] * slot)

    def _seen(self, layer: int, root: int, num_slots: int) -> Tensor:
        """Which positions each slot sees [num_slots, root + num_slots]."""
        layout = self.layout
        slots, keys = torch.arange(root, root + num_slots)[:, None], torch.arange(root + num_slots)
        seen = keys <= slots if layout.causal[layer] else torch.ones(num_slots, root + num_slots, dtype=torch.bool)
        if window := layout.windows[layer]:
            first = root + num_slots - BLOCK - window
            seen = seen & (keys >= first if layout.windows_before_block else slots - keys < window)
        return seen

    def logits(self, x: Tensor) -> Tensor:
        """Of hidden states [slots, H]."""
        own, layout = self.tensors.get("lm_head.weight"), self.layout
        logits = x @ (self.target.lm_head if own is None else own).T * layout.factor
        logits = layout.cap * torch.tanh(logits / layout.cap) if layout.cap else logits
        if own is None:
            return logits
        wide = torch.full((len(x), VOCAB), -torch.inf)
        wide[:, torch.arange(layout.drafted) + self.tensors["d2t"]] = logits
        return wide


def attend(x: Tensor, context: Tensor, seen: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    """Attention of a block's rows x [slots, H] over known tokens [known, H] and itself -> [slots, H]."""

    def project(rows: Tensor, name: str, num_heads: int) -> Tensor:
        split = (rows @ tensors[f"{prefix}.{name}_proj.weight"].T).view(len(rows), num_heads, HEAD_DIM)
        norm = tensors.get(f"{prefix}.{name}_norm.weight")
        return split if norm is None else rms(split, norm)

    all_rows, known = torch.cat([context, x]), len(context)
    padded = torch.cat([torch.zeros(known, HEADS, HEAD_DIM), project(x, "q", HEADS)])
    q, k = heads.rotate(padded, THETA)[known:], heads.rotate(project(all_rows, "k", KV_HEADS), THETA)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, project(all_rows, "v", KV_HEADS)))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return mixed.reshape(len(x), -1) @ tensors[f"{prefix}.o_proj.weight"].T


# -- tests ---------------------------------------------------------------------------------------------------------


def options(folder: Path, width: int = 3, **others: Any) -> DrafterConfig:
    given = {"max_draft_tokens": 9 if width > 1 else 5, "tree_width": width, "adaptive": False, **others}
    return DrafterConfig(name="dflash", model=str(folder), **given)


Heard = list[tuple[list[int], Tensor]]  # known tokens, logits [depths, V]


def overhear(made: Engine, stride: int) -> Heard:
    """Note every `stride`-th block's logits with the known tokens before it."""
    drafter, heard, count = tiny.inner(made), list[tuple[list[int], Tensor]](), [0]
    propose, guess = drafter.propose, drafter.runner.guess
    known: dict[str, list[int]] = {}

    def proposing(drafts: Any) -> None:
        known.update({draft.request.request_id: list(draft.request.token_ids) for draft in drafts})
        propose(drafts)

    def listening(roots: Any, features: Any, sizes: Any) -> tuple[Tensor, Tensor | None]:
        found, states = guess(roots, features, sizes)
        for root, of_block, size in zip(roots, found, sizes, strict=True):
            count[0] += 1
            if count[0] % stride == 0:
                heard.append((known[root.request_id], of_block[:size].clone()))
        return found, states

    drafter.propose, drafter.runner.guess = proposing, listening
    return heard


def assert_as_computed(heard: Heard, reference: Reference) -> None:
    assert heard
    for known, found in heard[:: max(1, len(heard) // 30)]:
        wanted = reference.after(known, len(found) + reference.first_slot)
        assert torch.equal(found == -torch.inf, wanted == -torch.inf)
        finite = wanted > -torch.inf
        error = float((found[finite] - wanted[finite]).abs().max() / wanted[finite].abs().max())
        assert error < 1e-4, (error, len(known), len(found))
    assert len({len(known) for known, _ in heard}) > 3


@lru_cache
def plain(num: int, temperature: float) -> list[list[list[int]]]:
    return tiny.run(tiny.engine(heads.target(LAYERS)), requests(num, temperature))[0]


def requests(num: int, temperature: float = 1.0) -> list[RequestGroup]:
    return tiny.groups(num, temperature=temperature, max_tokens=14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_formulas(layout: str, tmp_path: Path) -> None:
    """While drafting trees in an engine: several requests, chunked prompts, accepted and refused drafts."""
    folder, reference = make(layout, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder), max_num_batched_tokens=40)
    heard = overhear(made, stride=2)
    tokens, stats = tiny.run(made, requests(3))
    assert tokens == plain(3, 1.0)
    assert_as_computed(heard, reference)
    most = BLOCK - reference.layout.first_slot
    assert {len(found) for _, found in heard} <= set(range(1, most + 1)) and tiny.num_accepted(stats) > 0


@pytest.mark.parametrize(("layout", "scale"), [("z-lab", 3.0), ("flat", 1.5), ("speculators-windows", 1.0)])
def test_a_targets_scaled_embedding_is_borrowed_by_z_labs_heads_alone(
    layout: str, scale: float, tmp_path: Path
) -> None:
    fields = {"embedding_multiplier": 3.0, "num_hidden_layers": LAYERS, "max_position_embeddings": 128}
    granite = Truth(factory.random_hf_model("granite", fields))
    target = load_model(factory.save_checkpoint(granite.model, tmp_path / "target"), tiny.kernels()).model
    folder, reference = make(layout, tmp_path / "head")
    made = tiny.engine(target, options(folder))
    heard, wanted = overhear(made, stride=2), requests(2)
    assert tiny.run(made, wanted)[0] == tiny.run(tiny.engine(target), wanted)[0]
    assert_as_computed(heard, Reference(replace(reference.layout, scale=scale), reference.tensors, granite))


LIMITS = [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("temperature", "limits"), [(0.0, LIMITS[0]), (0.7, LIMITS[1]), (1.0, LIMITS[2]), (1.0, LIMITS[3])]
)
def test_nothing_changes_but_speed(width: int, temperature: float, limits: dict[str, int], tmp_path: Path) -> None:
    folder, _ = make("z-lab-windows", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), **limits)
    tokens, stats = tiny.run(made, requests(4, temperature))
    assert tokens == plain(4, temperature)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0
    assert ("num_kv_blocks" in limits) == any(stat.num_preemptions for stat in stats)


@pytest.mark.parametrize(("width", "layout"), [(1, "z-lab"), (3, "z-lab"), (1, "dflash-2"), (3, "dflash-2")])
def test_the_rejection_rule_draws_from_every_slot(width: int, layout: str, tmp_path: Path) -> None:
    folder, _ = make(layout, tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, width), verification="rejection")
    assert tiny.run(made, requests(4, 0.0))[0] == plain(4, 0.0)
    wanted, runs = tiny.groups(3, temperature=0.9, top_k=8, max_tokens=10), []
    for _ in range(2):
        runs.append(
            tiny.run(tiny.engine(heads.target(LAYERS), options(folder, width), verification="rejection"), wanted)
        )
    assert runs[0][0] == runs[1][0]
    assert all(len(sample) == 10 for group in runs[0][0] for sample in group)


def test_a_chain_takes_the_best_of_every_slot(tmp_path: Path) -> None:
    """At temperature 0, in one pass: a chain of as many drafts as the block has slots behind the root."""
    folder, _ = make("z-lab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1, max_draft_tokens=40))
    heard, chains, propose = overhear(made, stride=1), list[list[int]](), made.drafter.propose
    assert made.drafter.max_nodes == BLOCK

    def watch(drafts: Any) -> None:
        propose(drafts)
        chains.extend(draft.tree.tokens[1:] for draft in drafts if len(draft.tree) > 1)

    made.drafter.propose = watch  # type: ignore[method-assign]
    tiny.run(made, requests(1, 0.0))
    assert chains == [found.argmax(1).tolist() for _, found in heard]
    assert max(map(len, chains)) == BLOCK - 1


def test_a_tree_holds_the_likeliest_paths(tmp_path: Path) -> None:
    """At temperature 0 a path's chance is the product of its slots' probabilities: the best nine of all paths."""
    folder, _ = make("z-lab", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 4))
    heard, trees, propose = overhear(made, stride=1), list[set[tuple[int, ...]]](), made.drafter.propose

    def watch(drafts: Any) -> None:
        propose(drafts)
        trees.extend({tuple(path_of(draft, node)) for node in range(1, len(draft.tree))} for draft in drafts)

    made.drafter.propose = watch  # type: ignore[method-assign]
    tiny.run(made, requests(1, 0.0))
    whole = [(found, tree) for (_, found), tree in zip(heard, (t for t in trees if t), strict=True) if len(tree) == 9]
    assert len(whole) > 3
    for found, tree in whole:
        assert tree == best_paths(found.log_softmax(1), 9, 4)


def test_the_selector_chooses_each_token_by_the_one_above(tmp_path: Path) -> None:
    """At temperature 0 a chain is DFlash-2's own choice, slot by slot among the best by their logits."""
    folder, reference = make("dflash-2", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    heard, chains, propose = overhear(made, stride=1), list[list[int]](), made.drafter.propose

    def watch(drafts: Any) -> None:
        propose(drafts)
        chains.extend(draft.tree.tokens[1:] for draft in drafts if len(draft.tree) > 1)

    made.drafter.propose = watch  # type: ignore[method-assign]
    tiny.run(made, requests(1, 0.0))
    differs = 0
    for chain, (known, found) in zip(chains, heard, strict=True):
        hidden, above, wanted = reference.hidden(known, len(found) + 1), known[-1], []
        for slot, logits in enumerate(found, 1):
            best = logits.topk(CANDIDATES)
            scores = best.values + reference.added(hidden[slot], above, best.indices)
            above = int(best.indices[scores.argmax()])
            wanted.append(above)
        assert chain == wanted
        differs += wanted != found.argmax(1).tolist()
    assert differs > 3, "the selector must matter"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lattice_trees_hold_the_likeliest_paths(temperature: float) -> None:
    """Trees over pairwise scores, noise included, against all paths one by one."""
    generator = torch.Generator().manual_seed(3)
    states, logits = torch.randn(2, 3, 6, generator=generator), 2 * torch.randn(2, 3, 40, generator=generator)
    tables = [torch.randn(40, 6, generator=generator) for _ in range(2)]

    class Scores:
        num_candidates = 4

        def __call__(self, states: Tensor, above: Tensor, ids: Tensor) -> Tensor:
            return torch.einsum("nar,nr,nbr->nab", tables[0][above], states, tables[1][ids])

    grower = TreeGrower(tiny.kernels(), coupled=True)
    drafts = [Draft(group.samples[0].request, 8) for group in tiny.groups(2, temperature=temperature)]
    noise = grower.noise(drafts)
    roots = torch.tensor([5, 9])
    trees = draw_depths(noise, logits, 3, SlotPairs(Scores(), states, roots))
    ids, scores = noise.rank_depths(logits, 4)
    for index, tree in enumerate(trees):
        paths, found = [(0.0, (int(roots[index]),))], list[tuple[float, tuple[int, ...]]]()
        for depth in range(3):
            longer = []
            for chance, path in paths:
                above, known = torch.tensor([[path[-1]]]), ids[index, depth]
                joint = scores[index, depth] + Scores()(states[index, depth][None], above, known[None])[0, 0]
                longer += [
                    (chance + float(step), (*path, int(token)))
                    for step, token in zip(joint.log_softmax(0), known, strict=True)
                ]
            paths = longer
            found += longer
        best = sorted(found, reverse=True)[:7]
        nodes = {0: (int(roots[index]),)}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1):
            nodes[node] = (*nodes[parent], token)
        got = sorted(zip(tree.log_chances, list(nodes.values())[1:], strict=True), reverse=True)
        assert [path for _, path in got] == [path for _, path in best]
        assert [chance for chance, _ in got] == pytest.approx([chance for chance, _ in best], abs=1e-4)


def path_of(draft: Any, node: int) -> list[int]:
    path = []
    while node:
        path.append(draft.tree.tokens[node])
        node = draft.tree.parents[node]
    return path[::-1]


def best_paths(log_q: Tensor, num: int, width: int) -> set[tuple[int, ...]]:
    """By trying all paths that can be among the best `num`."""
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found = list[tuple[float, tuple[int, ...]]]()
    for of_slot in log_q:
        best = of_slot.topk(width)
        steps = list(zip(best.values.tolist(), best.indices.tolist(), strict=True))
        paths = sorted(((c + s, (*p, t)) for c, p in paths for s, t in steps), reverse=True)[:num]
        found += paths
    return {path for _, path in sorted(found, reverse=True)[:num]}


def test_a_prefix_hit_goes_on_from_shared_rows(tmp_path: Path) -> None:
    """A request that begins on blocks of another drafts at once, with the logits of the formulas."""
    folder, reference = make("speculators-windows", tmp_path)
    made = tiny.engine(heads.target(LAYERS), options(folder, 1))
    prompt = [3 + i * 7 % 90 for i in range(30)]
    params = requests(1)[0].samples[0].request.params
    heard = overhear(made, stride=1)
    tiny.run(made, [harness.request(0, prompt, params, tiny.MAX_LEN)])
    heard.clear()
    texts = [prompt[:29], [*prompt[:29], 5, 41], [*prompt[:26], 7]]
    others = [harness.request(i, text, params, tiny.MAX_LEN) for i, text in enumerate(texts, 1)]
    tokens, stats = tiny.run(made, others)
    assert tokens == tiny.run(tiny.engine(heads.target(LAYERS)), others)[0]
    assert all(stat.num_cached_tokens >= 24 for stat in stats)
    assert_as_computed(heard, reference)


def test_beside_another_head_in_a_portfolio(tmp_path: Path) -> None:
    """Each of two heads finds its own states among those both ask for, and rows of trees that both grew."""
    folder, reference = make("z-lab", tmp_path / "dflash")
    eagle, _ = test_eagle.make("safeailab", tmp_path / "eagle")
    members = (
        DrafterConfig(name="dflash", model=str(folder), max_draft_tokens=6, tree_width=2),
        DrafterConfig(name="eagle", model=str(eagle), max_draft_tokens=4),
    )
    both = DrafterConfig(name="portfolio", members=members, max_draft_tokens=12, adaptive=False)
    made = tiny.engine(heads.target(LAYERS), both, num_kv_blocks=30)
    heard = overhear(made, stride=4)
    tokens, stats = tiny.run(made, requests(4))
    assert tokens == plain(4, 1.0)
    assert_as_computed(heard, reference)
    assert {name for stat in stats for name, count in stat.drafters.items() if count.drafted} == {"dflash", "eagle"}


def test_rounded_weights_draft_too(tmp_path: Path) -> None:
    folder, _ = make("z-lab", tmp_path)
    sizes = []
    for stored in ("stored", "int8"):
        made = tiny.engine(heads.target(LAYERS), options(folder, head_weights=stored))
        assert tiny.run(made, requests(2))[0] == plain(2, 1.0)
        sizes.append(made.drafter.weight_bytes)
    assert sizes[1] < sizes[0] / 2


def test_the_drafter_is_told_by_the_tensors(tmp_path: Path) -> None:
    """`auto` given a folder of heads, and a model that is such a folder."""
    own, _ = make("z-lab", tmp_path / "dflash")
    eagle, _ = test_eagle.make("safeailab", tmp_path / "heads")
    for folder, name in ((own, "dflash"), (eagle, "eagle")):
        config = engine_config("m", {"drafter": "auto", "draft_model": str(folder)}).drafter
        assert (config.members[-1].name, config.members[-1].model) == (name, str(folder))
        with pytest.raises(ConfigError, match=f"is a draft head, not a model: .* drafter '{name}="):
            LLM(str(folder))
    offered = engine_config(str(tmp_path), {"drafter": "auto"}).drafter.members[-1]
    assert (offered.name, offered.model) == ("dflash", str(own))


def test_published_configurations_are_understood() -> None:
    """SpecForge's configurations of DFlash and DSpark heads, for targets of their sizes; Domino's are told apart."""
    paths = sorted(shared_data("configs/draft_specforge").glob("*d[fso]*.json"))
    kinds = {path: path.stem.split("-d")[-1].split("-")[0] for path in paths}
    assert {"flash", "omino", "spark"} <= set(kinds.values())
    for path, kind in kinds.items():
        raw = json.loads(path.read_text(encoding="utf-8"))
        size, num = raw["hidden_size"], raw["num_target_layers"]
        sizes = SimpleNamespace(hidden_size=size, vocab_size=raw["vocab_size"], max_position=64, num_layers=num)
        own = ("markov_head.markov_w1.weight",) if kind == "spark" else ()
        source: Any = Nothing(raw, size * len(raw["dflash_config"]["target_layer_ids"]), own)
        target: Any = sizes
        if kind == "omino":
            with pytest.raises(UnsupportedError, match="gru_hidden_dim"):
                dflash._DFlash(source, target, tiny.kernels(), find_format)
            continue
        head = dflash._DFlash(source, target, tiny.kernels(), find_format)
        assert head.hidden_layers == tuple(i + 1 for i in raw["dflash_config"]["target_layer_ids"])
        drafts = raw["block_size"] - (kind == "flash")
        assert (head.shape.num_slots, head.shape.num_depths, head.shape.is_causal) == (raw["block_size"], drafts, False)
        assert head._causal() == [kind == SLIDING for kind in raw["layer_types"]]
        assert head._window() == (raw.get("sliding_window") or 0)


class Nothing:
    """A checkpoint of a head whose tensors are never read."""

    def __init__(self, config: dict[str, Any], fused: int, own: Sequence[str]) -> None:
        self.config, self.folder, self._fused, self._own = config, Path("published"), fused, own

    def has(self, name: str) -> bool:
        return name == "fc.weight" or name in self._own

    def shape(self, name: str) -> tuple[int, int]:
        return (0, self._fused)


def changed(tmp_path: Path, layout: str, change: Callable[[dict[str, Tensor]], Any] | None, **fields: Any) -> Path:
    folder, reference = make(layout, tmp_path)
    tensors, config = dict(reference.tensors), {**config_of(LAYOUTS[layout]), **fields}
    if change is not None:
        change(tensors)
    return heads.write(folder, tensors, {name: value for name, value in config.items() if value != "absent"})


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def having(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(4, 4)})


NESTED = ZLAB["dflash_config"]
TWO = {**NESTED, **SECOND}


@pytest.mark.parametrize(
    ("layout", "change", "fields", "error", "says"),
    [
        ("z-lab", None, {"vocab_size": 50}, VocabularyError, "50 tokens"),
        ("z-lab", None, {"hidden_size": 64}, UnsupportedError, "hidden size 64"),
        ("z-lab", None, {"num_target_layers": 36}, UnsupportedError, "36 layers"),
        ("z-lab", None, {"block_size": 1}, CheckpointError, "block_size must be a whole number from 2"),
        ("z-lab", None, {"block_size": "absent"}, CheckpointError, "lacks 'block_size'"),
        ("z-lab", None, {"dflash_config": {**NESTED, "mask_token_id": 96}}, VocabularyError, "mask_token_id 96"),
        ("z-lab", None, {"dflash_config": {**NESTED, "mask_token_id": None}}, CheckpointError, "mask_token_id"),
        ("z-lab", None, {"dflash_config": {**NESTED, "target_layer_ids": [1, 3, 7]}}, UnsupportedError, "from 0 to 6"),
        ("z-lab", None, {"dflash_config": {**NESTED, "target_layer_ids": [1, 3]}}, CheckpointError, "fc.weight has 96"),
        ("z-lab", None, {"dflash_config": {**NESTED, "target_layer_ids": []}}, UnsupportedError, "target_layer_ids"),
        ("z-lab", None, {"dflash_config": {**NESTED, "projector_type": "domino"}}, UnsupportedError, "projector_type"),
        ("z-lab", None, {"dflash_config": 3}, CheckpointError, "dflash_config"),
        ("z-lab", None, {"is_neox_style": False}, UnsupportedError, "is_neox_style is false"),
        ("z-lab", None, {"dflash_config": {**NESTED, "is_neox_style": False}}, UnsupportedError, "is_neox_style is"),
        ("speculators", None, {"rope_is_neox_style": False}, UnsupportedError, "rope_is_neox_style is false"),
        ("z-lab", None, {"layer_types": [FULL]}, UnsupportedError, "layer_types"),
        ("z-lab", None, {"residual_scaling": 0.5}, UnsupportedError, "residual_scaling"),
        ("speculators", None, {"speculators_model_type": "dspark"}, UnsupportedError, "dspark"),
        ("speculators", None, {"aux_hidden_state_layer_ids": [2, 8]}, UnsupportedError, "2, 8"),
        ("speculators", None, {"draft_vocab_size": 400}, VocabularyError, "draft_vocab_size 400"),
        ("speculators", None, {"target_hidden_size": 48}, UnsupportedError, "target_hidden_size"),
        ("speculators", without("d2t"), {}, CheckpointError, "d2t"),
        ("speculators", without("lm_head.weight"), {}, CheckpointError, "lm_head.weight"),
        ("z-lab", having("prefix_gru.weight_ih_l0"), {}, UnsupportedError, "Domino"),
        ("z-lab", having("refiner.weight"), {}, UnsupportedError, "refiner.weight"),
        ("dflash-2", None, {"dflash_config": {**TWO, "conv_group_size": 5}}, CheckpointError, "group_size 5"),
        ("dflash-2", None, {"dflash_config": {**TWO, "selector_top_k": 97}}, CheckpointError, "top_k must"),
        ("dflash-2", without("candidate_selector.successor_codebook"), {}, CheckpointError, "successor_codebook"),
        ("dflash-2", without("layers.1.mlp_conv.base_kernel"), {}, CheckpointError, "mlp_conv.base_kernel"),
        ("z-lab", having("layers.0.attention_conv.base_kernel"), {}, UnsupportedError, "attention_conv"),
        ("z-lab", without("hidden_norm.weight"), {}, UnsupportedError, "lacks fc.weight or hidden_norm.weight"),
        ("z-lab", without("layers.1.self_attn.o_proj.weight"), {}, CheckpointError, "o_proj"),
        ("z-lab", without("norm.weight"), {}, CheckpointError, "norm.weight"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    layout: str, change: Any, fields: dict[str, Any], error: type[ModelError], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says.replace(".", r"\.")):
        read_dflash(open_head(changed(tmp_path, layout, change, **fields)), heads.target(LAYERS), tiny.kernels())
