"""The modules: unrolled attention against one chain at a time, layouts, initial values, the loss, the acceptance."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import factory
from torch import Tensor
from torch.nn import functional as F

from forerun.errors import ConfigError
from forerun.models.decoder import Decoder
from forerun.models.heads.dflash import read_dflash
from forerun.models.heads.head import DraftHead
from forerun.models.heads.mtp import open_mtp, read_mtp
from forerun.models.heads.source import open_head
from forerun.models.loader import load_model
from forerun.models.medusa_heads import load_medusa
from forerun.training.heads.acceptance import AcceptanceTally, guess, matches_of, walk
from forerun.training.heads.base import Features, Head, States
from forerun.training.heads.config import DFlashConfig, DraftConfig, Eagle3Config, HeadConfig, MedusaConfig, MtpConfig
from forerun.training.heads.cross_entropy import capped, weighted_cross_entropy
from forerun.training.heads.dflash import DFlashHead, fused_layers
from forerun.training.heads.draft import DraftModelTraining
from forerun.training.heads.eagle3 import Eagle3Head
from forerun.training.heads.engine_target import EngineTarget
from forerun.training.heads.export import export_head
from forerun.training.heads.feed import OnlineFeed, captured_layers
from forerun.training.heads.loss import HeadLoss, step_weights
from forerun.training.heads.medusa import MedusaHead
from forerun.training.heads.mtp import MtpHead
from forerun.training.heads.rows import Rows
from forerun.training.heads.target import NetTarget
from forerun.training.heads.train import measure
from forerun.training.heads.unrolled import UnrolledAttention, UnrolledKV
from forerun.training.heads.vocabulary import LearnedVocabulary, frequent_tokens, whole_vocabulary
from forerun.training.net import Net, NetConfig, rotate

SHAPE = NetConfig(
    vocab_size=40, hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=24, max_positions=64
)
SOME = LearnedVocabulary(torch.tensor([1, 4, 5, 9, 17, 30, 31, 39]), 40)
NUM_TOKENS = 9


@pytest.fixture
def target() -> NetTarget:
    """A tiny random target."""
    torch.manual_seed(1)
    net = Net(SHAPE)
    for weight in net.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
        else:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return NetTarget(net, 2, torch.device("cpu"))


def shaken(head: Head) -> Head:
    """The head with every weight moved, so that zeros and ones hide nothing."""
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return head.requires_grad_(False)


def inputs(target: NetTarget, head: Head) -> tuple[States, Tensor]:
    """States and tokens of two random windows."""
    ids = torch.randint(0, SHAPE.vocab_size, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(3))
    return target.states(ids, captured_layers(head, target)), ids


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm from its formula."""
    return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt() * weight


def attend(weights: dict[str, Tensor], rows: Tensor, positions: list[int], tables: tuple[Tensor, Tensor]) -> Tensor:
    """Plain causal attention of the last of `rows` [n, size], which stand at `positions`, one head at a time."""
    cos, sin = tables[0][positions], tables[1][positions]
    query = rotate((rows @ weights["q_proj"].T).view(len(rows), SHAPE.num_heads, -1).transpose(0, 1), cos, sin)
    keys = rotate((rows @ weights["k_proj"].T).view(len(rows), SHAPE.num_kv_heads, -1).transpose(0, 1), cos, sin)
    values = (rows @ weights["v_proj"].T).view(len(rows), SHAPE.num_kv_heads, -1).transpose(0, 1)
    heads = []
    for number in range(SHAPE.num_heads):
        group = number // (SHAPE.num_heads // SHAPE.num_kv_heads)
        scores = keys[group] @ query[number, -1] / SHAPE.head_dim**0.5
        heads.append(scores.softmax(0) @ values[group])
    return torch.cat(heads) @ weights["o_proj"].T


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The matrices below a name."""
    return {
        name.removeprefix(prefix).removesuffix(".weight"): x for name, x in tensors.items() if name.startswith(prefix)
    }


def swiglu(x: Tensor, mlp: dict[str, Tensor]) -> Tensor:
    """The feed-forward from its formula."""
    return (F.silu(x @ mlp["gate_proj"].T) * (x @ mlp["up_proj"].T)) @ mlp["down_proj"].T


def eagle_chain(head: Eagle3Head, target: NetTarget, states: States, ids: Tensor, anchor: int) -> list[Tensor]:
    """Drafts after position `anchor` as an engine does, row by row, fed with the true tokens; logits of every step."""
    tensors, tables = head.tensors(), (head.tables.cos, head.tables.sin)
    layer = part(tensors, "midlayer.")
    attention, mlp = part(tensors, "midlayer.self_attn."), part(tensors, "midlayer.mlp.")
    parts = [states[i][0] for i in head.layers]
    if head.settings.fc_norm:
        parts = [rms(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
    known = torch.cat(parts, -1) @ tensors["fc.weight"].T
    features, logits = [known[t] for t in range(anchor + 1)], []
    for _ in range(head.num_steps):
        embedded = target.embedding[ids[0, 1 : len(features) + 1]]
        both = [
            torch.cat((rms(e, layer["input_layernorm"]), rms(f, layer["hidden_norm"])))
            for e, f in zip(embedded, features, strict=True)
        ]
        x = features[-1] + attend(attention, torch.stack(both), list(range(len(features))), tables)
        x = x + swiglu(rms(x, layer["post_attention_layernorm"]), mlp)
        logits.append(rms(x, tensors["norm.weight"]) @ tensors["lm_head.weight"].T)
        features.append(rms(x, tensors["norm.weight"]) if head.settings.norm_output else x)
    return logits


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["EAGLE-3", "EAGLE-3.1"])
def test_eagle3_unrolled_equals_drafting_row_by_row(target: NetTarget, flags: dict[str, bool]) -> None:
    head = shaken(Eagle3Head(target, Eagle3Config(num_steps=3, **flags), SOME))
    states, ids = inputs(target, head)
    unrolled = head.unroll(states, ids)
    assert [x.shape for x in unrolled] == [(2, NUM_TOKENS - 2 - j, 8) for j in range(3)]
    for anchor in range(NUM_TOKENS - 4):
        for step, logits in enumerate(eagle_chain(head, target, states, ids, anchor)):
            torch.testing.assert_close(unrolled[step][0, anchor], logits, rtol=1e-4, atol=1e-4)


def mtp_chain(head: MtpHead, target: NetTarget, states: States, ids: Tensor, anchor: int) -> list[Tensor]:
    """The same for an MTP module."""
    tensors = {name.removeprefix("model.mtp_layers.0."): x for name, x in head.tensors().items()}
    attention, mlp = part(tensors, "self_attn."), part(tensors, "mlp.")
    norms = {name.removesuffix(".weight"): x for name, x in tensors.items() if x.ndim == 1}
    features, logits = [states[SHAPE.num_layers][0, t] for t in range(anchor + 1)], []
    for _ in range(head.num_steps):
        embedded = target.embedding[ids[0, 1 : len(features) + 1]]
        both = [
            torch.cat((rms(f, norms["hidden_layernorm"]), rms(e, norms["token_layernorm"])))
            for e, f in zip(embedded, features, strict=True)
        ]
        rows = torch.stack(both) @ tensors["input_proj.weight"].T
        normed = rms(rows, norms["input_layernorm"])
        x = rows[-1] + attend(attention, normed, list(range(len(rows))), (head.tables.cos, head.tables.sin))
        x = x + swiglu(rms(x, norms["post_attention_layernorm"]), mlp)
        logits.append(rms(x, norms["final_layernorm"]) @ target.head.T)
        features.append(x)
    return logits


def test_mtp_unrolled_equals_drafting_row_by_row(target: NetTarget) -> None:
    head = shaken(MtpHead(target, MtpConfig(num_steps=3)))
    states, ids = inputs(target, head)
    unrolled = head.unroll(states, ids)
    for anchor in range(NUM_TOKENS - 4):
        for step, logits in enumerate(mtp_chain(head, target, states, ids, anchor)):
            torch.testing.assert_close(unrolled[step][0, anchor], logits, rtol=1e-4, atol=1e-4)


def dflash_block(head: DFlashHead, target: NetTarget, states: States, ids: Tensor, entry: int) -> Tensor:
    """Logits [slots, vocab] of one block, as an engine computes it; slot 0 is the root."""
    tensors, tables, size = head.tensors(), (head.tables.cos, head.tables.sin), head.num_steps + 1
    known = torch.cat([states[layer][0] for layer in head.layers], -1)[: entry + 1] @ tensors["fc.weight"].T
    context = rms(known, tensors["hidden_norm.weight"])
    x = target.embedding[[int(ids[0, entry + 1]), *[head.mask_token_id] * (size - 1)]]
    for index in range(head.shape.num_layers):
        layer = part(tensors, f"layers.{index}.")
        attention, mlp = part(tensors, f"layers.{index}.self_attn."), part(tensors, f"layers.{index}.mlp.")
        normed = rms(x, layer["input_layernorm"])
        rows, places = torch.cat([context, normed]), list(range(entry + 1 + size))
        x = x + torch.stack([attend_in_block(attention, rows, place, places, tables) for place in places[-size:]])
        x = x + swiglu(rms(x, layer["post_attention_layernorm"]), mlp)
    return rms(x, tensors["norm.weight"]) @ target.head.T


def attend_in_block(
    weights: dict[str, Tensor], rows: Tensor, place: int, places: list[int], tables: tuple[Tensor, Tensor]
) -> Tensor:
    """What the row at one place [size] attends to: all rows, those behind it too, one head at a time."""
    cos, sin = tables[0][places], tables[1][places]
    query = rms((rows[place] @ weights["q_proj"].T).view(SHAPE.num_heads, -1), weights["q_norm"])
    keys = rms((rows @ weights["k_proj"].T).view(len(rows), SHAPE.num_kv_heads, -1), weights["k_norm"]).transpose(0, 1)
    query, keys = rotate(query[:, None], cos[place : place + 1], sin[place : place + 1])[:, 0], rotate(keys, cos, sin)
    values, found = (rows @ weights["v_proj"].T).view(len(rows), SHAPE.num_kv_heads, -1).transpose(0, 1), []
    for number in range(SHAPE.num_heads):
        group = number // (SHAPE.num_heads // SHAPE.num_kv_heads)
        found.append((keys[group] @ query[number] / SHAPE.head_dim**0.5).softmax(0) @ values[group])
    return torch.cat(found) @ weights["o_proj"].T


def test_dflash_blocks_are_those_of_an_engine(target: NetTarget) -> None:
    head = shaken(DFlashHead(target, DFlashConfig(block_size=4, num_layers=2, aux_layers=(1, 3))))
    states, ids = inputs(target, head)
    unrolled = head.unroll(states, ids)
    assert [x.shape for x in unrolled] == [(2, NUM_TOKENS - 2 - j, 40) for j in range(3)]
    for entry in range(NUM_TOKENS - 2):
        logits = dflash_block(head, target, states, ids, entry)
        for step in range(min(3, NUM_TOKENS - 2 - entry)):
            torch.testing.assert_close(unrolled[step][0, entry], logits[step + 1], rtol=1e-4, atol=1e-4)


def test_dflash_learns_from_some_blocks_of_a_window(target: NetTarget) -> None:
    """The same ones for the same tokens, all slots of which lie in the window; measuring looks at all."""
    whole = shaken(DFlashHead(target, DFlashConfig(block_size=4, num_layers=1, aux_layers=(3,))))
    few = DFlashHead(target, DFlashConfig(block_size=4, num_layers=1, aux_layers=(3,), num_blocks=2))
    few.load_state_dict(whole.state_dict())
    few.requires_grad_(False)
    states, ids = inputs(target, whole)
    wanted, found, again = (head.features(states, ids) for head in (whole, few, few))
    for step, (of_all, of_some, same) in enumerate(zip(wanted, found, again, strict=True)):
        assert of_all.learned is None and of_some.learned is not None and same.learned is not None
        assert of_some.learned.equal(same.learned) and len(of_some.learned) == NUM_TOKENS - 2 - step
        entries = of_some.learned.nonzero()[:, 0]
        assert len(entries) == 2 and int(entries.max()) <= NUM_TOKENS - 2 - few.num_steps
        torch.testing.assert_close(of_some.rows[:, entries], of_all.rows[:, entries])
    other = few.features(states, ids.flip(1).contiguous() + 1 - ids.flip(1).contiguous().eq(39).long())
    assert any(not a.learned.equal(b.learned) for a, b in zip(found, other, strict=True) if a.learned is not None)
    with torch.no_grad():
        assert all(features.learned is None for features in few.features(states, ids))
    answer = torch.ones_like(ids, dtype=torch.bool)
    final = target.states(ids, ())[SHAPE.num_layers + 1]
    losses = [HeadLoss(head, target, "target", [1.0])(ids, answer, states, final) for head in (whole, few)]
    assert float(losses[0]) != float(losses[1])


@pytest.mark.parametrize(("answered", "wanted"), [([5, 6], {3, 4}), ([2, 3, 4], {0, 1, 2}), ([5], {3})])
def test_dflash_learns_from_blocks_in_answers_first(answered: list[int], wanted: set[int], target: NetTarget) -> None:
    """Whatever the tokens: a block of entry t first guesses token t + 2; others come where answers have too few."""
    head = DFlashHead(target, DFlashConfig(block_size=4, num_layers=1, aux_layers=(3,), num_blocks=2))
    states, ids = inputs(target, head)
    answer = torch.zeros_like(ids, dtype=torch.bool)
    answer[0, answered] = True
    for shift in range(4):
        given = (ids + shift) % SHAPE.vocab_size
        learned = head.features(states, given, answer)[0].learned
        assert learned is not None
        found = set(learned.nonzero()[:, 0].tolist())
        assert len(found) == 2 and (found <= wanted if len(wanted) > 1 else found > wanted)


def test_dflashs_loss_says_where_answers_are(target: NetTarget) -> None:
    """One token of an answer is learned from wherever it is, as if all blocks were."""
    whole = shaken(DFlashHead(target, DFlashConfig(block_size=4, num_layers=1, aux_layers=(3,))))
    few = DFlashHead(target, DFlashConfig(block_size=4, num_layers=1, aux_layers=(3,), num_blocks=2))
    few.load_state_dict(whole.state_dict())
    states, ids = inputs(target, whole)
    final = target.states(ids, ())[SHAPE.num_layers + 1]
    for token in range(2, NUM_TOKENS - 2):
        answer = torch.zeros_like(ids, dtype=torch.bool)
        answer[0, token] = True
        found, wanted = (HeadLoss(head, target, "text", [1.0])(ids, answer, states, final) for head in (few, whole))
        torch.testing.assert_close(found, wanted)


def test_dflash_reads_the_published_states() -> None:
    assert fused_layers((), 36) == (2, 10, 18, 26, 34)
    assert fused_layers((), 8) == (2, 3, 4, 5, 6)
    assert fused_layers((), 2) == (2,)
    with pytest.raises(ConfigError, match="states 1"):
        fused_layers((0, 3), 8)
    with pytest.raises(ConfigError, match="block_size = 1"):
        DFlashConfig(block_size=1)


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_follows_its_formula(target: NetTarget, shared: bool) -> None:
    head = shaken(MedusaHead(target, MedusaConfig(num_heads=3, num_layers=2, shared_head=shared), SOME))
    states, ids = inputs(target, head)
    tensors = head.tensors()
    for step, logits in enumerate(head.unroll(states, ids)):
        x = states[SHAPE.num_layers + 1]
        for layer in range(2):
            name = f"blocks.{step}.layers.{layer}"
            x = x + F.silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        output = tensors["lm_head.weight" if shared else f"lm_heads.{step}.weight"]
        torch.testing.assert_close(logits, (x @ output.T)[:, : NUM_TOKENS - 2 - step])


def test_new_medusa_heads_repeat_the_target(target: NetTarget) -> None:
    head = MedusaHead(target, MedusaConfig(num_heads=2), whole_vocabulary(40))
    states, ids = inputs(target, head)
    for step, logits in enumerate(head.unroll(states, ids)):
        torch.testing.assert_close(logits, target.net(ids)[:, : NUM_TOKENS - 2 - step])


def test_draft_guesses_are_those_of_its_network(target: NetTarget) -> None:
    sizes = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "ffn_size": 8}
    head = DraftModelTraining(target, DraftConfig(num_steps=2, **sizes))
    states, ids = inputs(target, head)
    first, second = head.unroll(states, ids)
    logits = head.net(ids)
    torch.testing.assert_close(first, logits[:, 1:-1])
    torch.testing.assert_close(second, logits[:, 2:-1])


HEADS: list[tuple[type, HeadConfig, set[str]]] = [
    (
        MedusaHead,
        MedusaConfig(num_heads=1, shared_head=True),
        {"blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "lm_head.weight", "token_map"},
    ),
    (
        MedusaHead,
        MedusaConfig(num_heads=1),
        {"blocks.0.layers.0.weight", "blocks.0.layers.0.bias", "lm_heads.0.weight", "token_map"},
    ),
    (
        Eagle3Head,
        Eagle3Config(),
        {
            *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
            *(f"midlayer.{x}.weight" for x in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
            *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
            *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        },
    ),
]


@pytest.mark.parametrize(("kind", "config", "names"), HEADS, ids=["Medusa shared", "Medusa own", "EAGLE-3"])
def test_tensors_have_the_published_names(target: NetTarget, kind: type, config: HeadConfig, names: set[str]) -> None:
    assert set(kind(target, config, SOME).tensors()) == names


def test_dflash_tensors_have_the_published_names(target: NetTarget) -> None:
    found = DFlashHead(target, DFlashConfig(num_layers=1)).tensors()
    projections = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    of_layer = {f"layers.0.{name}.weight" for name in (*projections, *norms)}
    assert set(found) == {"fc.weight", "hidden_norm.weight", "norm.weight"} | of_layer


def test_mtp_tensors_have_the_published_names(target: NetTarget) -> None:
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    blocks = (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        "input_proj",
    )
    found = MtpHead(target, MtpConfig()).tensors()
    assert set(found) == {f"model.mtp_layers.0.{name}.weight" for name in (*norms, *blocks)}
    assert found["model.mtp_layers.0.input_proj.weight"].shape == (16, 32)


def test_vocabulary_maps_say_the_same() -> None:
    ids = torch.tensor([1, 4, 5, 9, 17, 30, 31, 39])
    assert (torch.arange(8) + SOME.offsets()).equal(ids)
    assert SOME.member().nonzero().flatten().equal(ids)
    assert SOME.draft_ids()[ids].equal(torch.arange(8))


def test_frequent_tokens_are_taken_lower_ids_first() -> None:
    counts = torch.tensor([5, 1, 7, 1, 0, 7])
    assert frequent_tokens(counts, 4).token_ids.tolist() == [0, 1, 2, 5]
    assert frequent_tokens(counts, 0).is_whole
    with pytest.raises(ConfigError, match="the target has 6"):
        frequent_tokens(counts, 7)


def test_loss_is_the_restricted_cross_entropy(target: NetTarget) -> None:
    """Against sums over single entries, with the target's distribution renormalised over the draft vocabulary."""
    head = shaken(Eagle3Head(target, Eagle3Config(num_steps=2), SOME))
    states, ids = inputs(target, head)
    answer = torch.arange(NUM_TOKENS).expand(2, -1) >= 3
    final = states[SHAPE.num_layers + 1]
    loss = HeadLoss(head, target, "target", step_weights(2, 0.5))(ids, answer, states, final)
    wanted, expected = target.net(ids), 0.0
    for step, logits in enumerate(head.unroll(states, ids)):
        losses = []
        for row in range(2):
            for t in range(NUM_TOKENS - 2 - step):
                aim = wanted[row, t + 1 + step]
                if t + 2 + step >= 3 and int(aim.argmax()) in SOME.token_ids:
                    p = aim[SOME.token_ids].softmax(-1)
                    losses.append(-(p * logits[row, t].log_softmax(-1)).sum())
        assert losses, "the example has no entry that counts"
        expected += (2 / 3, 1 / 3)[step] * float(torch.stack(losses).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_text_labels_are_the_tokens_themselves(target: NetTarget) -> None:
    head = shaken(MedusaHead(target, MedusaConfig(num_heads=2), SOME))
    states, ids = inputs(target, head)
    answer = torch.ones_like(ids, dtype=torch.bool)
    ids[:, 4:7] = torch.tensor([4, 39, 9])
    loss = HeadLoss(head, target, "text", [0.0, 1.0])(ids, answer, states, states[SHAPE.num_layers + 1])
    logits, losses = head.unroll(states, ids)[1], []
    for row in range(2):
        for t in range(NUM_TOKENS - 3):
            place = (SOME.token_ids == ids[row, t + 3]).nonzero()
            if len(place):
                losses.append(-logits[row, t].log_softmax(-1)[int(place)])
    assert float(loss) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_walk_counts_passes_by_hand() -> None:
    """An answer x_3 .. x_9. Roots: x_3 (2 right: emits 3), x_6 (0: 1), x_7 (5, but the answer ends: 2)."""
    accepted = [9, 9, 2, 9, 9, 0, 5, 9]
    assert walk(accepted, start=3, end=10) == (6, 3)
    assert walk(accepted, start=9, end=10) == (0, 0)


class Fixed(Head):
    """A head whose guesses are given."""

    kind = "fixed"
    layers = ()

    def __init__(self, guesses: list[Tensor]) -> None:
        super().__init__()
        self.num_steps, self.vocabulary = len(guesses), SOME
        self.guesses = guesses

    def features(self, states: States, ids: Tensor) -> list[Features]:
        return [Features(F.one_hot(x, 8).float(), torch.eye(8)) for x in self.guesses]

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def config(self) -> dict[str, object]:
        return {}


def test_acceptance_of_a_hand_made_case() -> None:
    """One prompt token and an answer 1 4 5 9 17 1; the first guesses are right but for 17, the second only for 5, 1."""
    ids = torch.tensor([[30, 1, 4, 5, 9, 17, 1]])
    answer = torch.tensor([[False, True, True, True, True, True, True]])
    draft_ids = SOME.draft_ids()
    first = draft_ids[torch.tensor([[4, 5, 9, 39, 1]])]  # of x_2 .. x_6
    second = draft_ids[torch.tensor([[5, 4, 4, 1]])]  # of x_3 .. x_6
    matches, possible = matches_of(guess(Fixed([first, second]), {}, ids), ids, answer)
    tally = AcceptanceTally()
    tally.add(matches, possible, [1], [7])
    found = tally.result()
    # Passes: root x_1 accepts 4 5, emits 9 too; root x_4 accepts nothing, emits 17; root x_5 accepts 1, the end.
    assert (tally.num_tokens, tally.num_passes) == (5, 3)
    assert found.length == pytest.approx(5 / 3)
    # The second guess is tried at entries 0, 1 and 2, whose first guess was right, and right at entry 0.
    assert found.by_depth == pytest.approx((4 / 5, 1 / 3))


def test_answers_shorter_than_a_chain_are_measured(target: NetTarget) -> None:
    head = DFlashHead(target, DFlashConfig(block_size=8, num_layers=1))
    feed = OnlineFeed(Rows.of([[5, 6, 7, 8, 9]], [2]), target, captured_layers(head, target))
    found = measure(HeadLoss(head, target, "target", step_weights(7, 0.5)), feed)
    assert 1 <= found.length <= 2 and len(found.by_depth) == 7
    assert found.by_depth[2:] == (0,) * 5, "of the root x_2 there are two tokens to guess"


SCALED: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 3.0},
    "cohere2": {"logit_scale": 0.3},
    "gemma2": {"final_logit_softcapping": 2.0},
}


def scaled(model_type: str, folder: Path) -> tuple[Decoder, EngineTarget]:
    """A random model whose logits are not those of its output layer, and the same for training."""
    model = factory.random_hf_model(model_type, SCALED[model_type])
    model = model.to(torch.bfloat16).float()  # which exports of heads keep
    loaded = load_model(factory.save_checkpoint(model, folder), factory.make_kernels())
    assert isinstance(loaded.model, Decoder)
    return loaded.model, EngineTarget(loaded)


@pytest.mark.parametrize("model_type", SCALED)
def test_aims_are_the_distributions_that_the_engine_draws_from(model_type: str, tmp_path: Path) -> None:
    model, target = scaled(model_type, tmp_path)
    head, depth = MedusaHead(target, MedusaConfig(), whole_vocabulary(model.vocab_size)), target.shape.num_layers
    found = factory.Runner(model, NUM_TOKENS).span(range(3, 3 + NUM_TOKENS), hidden=(depth + 1,))
    aims, _ = HeadLoss(head, target, "target", [1.0]).aims(found.hidden[depth + 1])
    torch.testing.assert_close(aims, found.logits.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", SCALED)
def test_heads_are_served_with_the_tables_they_were_trained_with(model_type: str, tmp_path: Path) -> None:
    """What they borrow of a target that scales its embeddings, and scales or caps its logits."""
    model, target = scaled(model_type, tmp_path / "target")
    kernels, ids = factory.make_kernels(), torch.arange(5)
    x = torch.randn(3, target.shape.hidden_size, generator=torch.Generator().manual_seed(1))
    logits, cap = x @ target.head.T, target.logit_cap
    medusa = MedusaHead(target, MedusaConfig(num_heads=1, shared_head=True), whole_vocabulary(model.vocab_size))
    export_head(medusa, tmp_path, tmp_path / "medusa")
    heads = load_medusa(tmp_path / "medusa", model, kernels)
    assert heads.linears[-1] is model.parts.lm_head
    torch.testing.assert_close(heads.compute(x, 1), logits)  # new blocks change nothing
    export_head(DFlashHead(target, DFlashConfig(block_size=4, num_layers=1)), tmp_path, tmp_path / "dflash")
    parts = read_dflash(open_head(tmp_path / "dflash"), model, kernels).decoder.parts
    found = parts.lm_head(x) if parts.after_head is None else parts.after_head(parts.lm_head(x))
    torch.testing.assert_close(found, logits)
    torch.testing.assert_close(parts.embedding(ids), target.embedding[ids])
    mtp = MtpHead(target, MtpConfig(num_steps=1))
    export_head(mtp, tmp_path, tmp_path / "mtp")
    module = read_mtp(open_mtp(tmp_path / "mtp"), model, kernels)
    assert isinstance(module, DraftHead)
    torch.testing.assert_close(module.parts.exit.logits(x), capped(logits, cap))
    torch.testing.assert_close(module.parts.embedding(ids), target.embedding[ids])
    window = torch.arange(3, 3 + NUM_TOKENS)[None]
    learned = mtp.features(target.states(window, mtp.layers), window)[0]
    assert learned.table.equal(target.head) and learned.cap == cap


def test_blockwise_attention_equals_the_table_of_scores() -> None:
    """Outputs and gradients, in a third step with two keys of later steps."""
    torch.manual_seed(4)
    layer = UnrolledAttention(SHAPE, 16)
    found = []
    for mix in (layer.mix, layer.mix_blockwise):
        generator = torch.Generator().manual_seed(5)
        query = torch.randn(2, 4, 6, 8, generator=generator).requires_grad_()
        pairs = [torch.randn(2, 2, rows, 8, generator=generator).requires_grad_() for rows in (8, 8, 7, 7, 6, 6)]
        mixed = mix(query, UnrolledKV(pairs[::2], pairs[1::2]))
        (mixed * torch.randn(mixed.shape, generator=generator)).sum().backward()
        found.append([mixed, query.grad, *(x.grad for x in pairs)])
    for plain, fast in zip(*found, strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_fused_cross_entropy_equals_the_plain_one(cap: float) -> None:
    torch.manual_seed(6)
    rows, table = torch.randn(300, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    aims, places, weights = torch.randn(40, 11).softmax(-1), torch.randint(0, 40, (300,)), torch.rand(300)
    logits = rows @ table.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    plain = -(weights * (aims[places] * logits.log_softmax(-1)).sum(-1)).sum()
    fast = weighted_cross_entropy(rows, table, aims, places, weights, cap)
    torch.testing.assert_close(plain, fast)
    for expected, found in zip(*(torch.autograd.grad(3 * x, (rows, table)) for x in (plain, fast)), strict=True):
        torch.testing.assert_close(expected, found)


@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_the_traced_loss_equals_the_plain_one(cap: float, target: NetTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile traces, forwards and backwards; generating code for it would take a test too long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    target.logit_cap = cap
    head = shaken(MtpHead(target, MtpConfig(num_steps=2))).requires_grad_()
    states, ids = inputs(target, head)
    answer, final = torch.ones_like(ids, dtype=torch.bool), target.states(ids, ())[SHAPE.num_layers + 1]
    found = []
    for compiled in (False, True):
        head.zero_grad()
        loss = HeadLoss(head, target, "target", [0.6, 0.4], compiled)(ids, answer, states, final)
        loss.backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in head.parameters())])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-6)
