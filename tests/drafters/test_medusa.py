"""Medusa: heads give the logits of the formula in both published layouts; what they draft changes no token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.config import DrafterConfig
from forerun.core import Request, SamplingParams
from forerun.drafters.base import Observed
from forerun.drafters.medusa import MedusaDrafter
from forerun.errors import CheckpointError, ForerunError, ModelNotFoundError, UnsupportedError
from forerun.models.medusa_heads import load_medusa
from forerun.runtime.bind import bind_rows
from forerun.runtime.rows import RowRunner
from forerun.speculation.draft import Draft
from forerun.speculation.growth import TreeGrower
from tests.models import factory
from tests.support import harness, tiny
from tests.support.drafting import reachable_strings
from tests.support.toy import ToyModel

HIDDEN, VOCAB = factory.SIZES["hidden_size"], factory.VOCAB_SIZE
TARGET_LAYERS = 2


@dataclass
class Heads:
    """Random heads as plain tensors, and what the formula makes of them."""

    weights: list[list[Tensor]]  # head, layer: [H, H]
    biases: list[list[Tensor | None]]
    outputs: list[Tensor]  # a head: [rows, H]
    token_map: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """States x [R, H] -> [R, heads, V]: arXiv 2401.10774, section 2.1, with as many blocks as there are layers."""
        found = []
        for weights, biases, output in zip(self.weights, self.biases, self.outputs, strict=True):
            state = x
            for weight, bias in zip(weights, biases, strict=True):
                inner = state @ weight.T + (0.0 if bias is None else bias)
                state = state + inner * torch.sigmoid(inner)
            rows = state @ output.T
            if self.token_map is not None:
                rows = torch.full((len(x), VOCAB), -torch.inf).index_copy(1, self.token_map, rows)
            found.append(rows)
        return torch.stack(found, dim=1)


def random_heads(num_heads: int, num_layers: int, bias: bool = True, rows: int = VOCAB, shared: bool = False) -> Heads:
    generator = torch.Generator().manual_seed(num_heads * 10 + num_layers)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    outputs = [draw(rows, HIDDEN) for _ in range(num_heads)]
    return Heads(
        weights=[[draw(HIDDEN, HIDDEN) for _ in range(num_layers)] for _ in range(num_heads)],
        biases=[[draw(HIDDEN) if bias else None for _ in range(num_layers)] for _ in range(num_heads)],
        outputs=[outputs[0]] * num_heads if shared else outputs,
        token_map=torch.randperm(VOCAB, generator=generator)[:rows] if rows < VOCAB else None,
    )


def vllm_tensors(heads: Heads, shared: bool = False) -> dict[str, Tensor]:
    found = {}
    for head, (weights, biases) in enumerate(zip(heads.weights, heads.biases, strict=True)):
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            found[f"blocks.{head}.layers.{layer}.weight"] = weight
            if bias is not None:
                found[f"blocks.{head}.layers.{layer}.bias"] = bias
        if not shared:
            found[f"lm_heads.{head}.weight"] = heads.outputs[head]
    if shared:
        found["lm_head.weight"] = heads.outputs[0]
    if heads.token_map is not None:
        found["token_map"] = heads.token_map
    return found


def vllm_config(heads: Heads, shared: bool = False, **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": len(heads.outputs[0]),
        "num_heads": len(heads.weights),
        "num_hidden_layers": len(heads.weights[0]),
        "medusa_fc_bias": heads.biases[0][0] is not None,
        "original_lm_head": shared,
        **fields,
    }


def faster_tensors(heads: Heads, prefix: str = "") -> dict[str, Tensor]:
    found = {}
    for head, (weights, biases) in enumerate(zip(heads.weights, heads.biases, strict=True)):
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            found[f"{prefix}{head}.{layer}.linear.weight"] = weight
            assert bias is not None
            found[f"{prefix}{head}.{layer}.linear.bias"] = bias
        found[f"{prefix}{head}.{len(weights)}.weight"] = heads.outputs[head]
    return found


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name.endswith(".pt"):
        torch.save(tensors, folder / name)
    else:
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)
    return folder


def write_vllm(folder: Path, heads: Heads, shared: bool = False, **fields: Any) -> Path:
    return write(folder, vllm_tensors(heads, shared), vllm_config(heads, shared, **fields))


def check_parity(folder: Path, heads: Heads, factor: float = 1.0) -> None:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    loaded = load_medusa(folder, tiny.target(TARGET_LAYERS), tiny.kernels())
    assert loaded.num_heads == len(heads.weights)
    run = RowRunner(loaded.passes, loaded.compute).logits
    torch.testing.assert_close(run(x, loaded.num_heads), factor * heads.logits(x), rtol=1e-4, atol=1e-4)
    fewer = run(x[:1], 1)
    assert fewer.shape == (1, 1, VOCAB)
    assert torch.equal(fewer[0, 0], run(x, loaded.num_heads)[0, 0]), "a row depends on itself alone"


@pytest.mark.parametrize("rows", [VOCAB, 40])
@pytest.mark.parametrize("shared", [True, False])
def test_a_replayed_pass_has_the_bits_of_the_heads_own(tmp_path: Path, shared: bool, rows: int) -> None:
    pytest.importorskip("forerun.kernels.cpu._native")
    folder = write_vllm(tmp_path, random_heads(3, 2, rows=rows, shared=shared), shared)
    heads = load_medusa(folder, tiny.target(TARGET_LAYERS), tiny.kernels())
    states = torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(2))
    given = [(states[:num_rows], num_heads) for num_rows in (1, 5, 64, 70) for num_heads in (1, 2, 3)]
    own, replayed = RowRunner(heads.passes, heads.compute), bind_rows(heads.passes, tiny.kernels())
    assert all(torch.equal(replayed.logits(*each), own.logits(*each)) for each in given)


def test_heads_that_cannot_be_recorded_stay_as_they_are(tmp_path: Path) -> None:
    folder = write_vllm(tmp_path, random_heads(2, 1), logit_scale=2.0)
    heads = load_medusa(folder, tiny.target(TARGET_LAYERS), tiny.kernels())
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))
    own, bound = RowRunner(heads.passes, heads.compute), bind_rows(heads.passes, tiny.kernels())
    assert torch.equal(bound.logits(x, 2), own.logits(x, 2))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(3, 1), (2, 3)])
def test_vllm_layout(tmp_path: Path, num_heads: int, num_layers: int, bias: bool) -> None:
    heads = random_heads(num_heads, num_layers, bias)
    check_parity(write_vllm(tmp_path, heads), heads)


@pytest.mark.parametrize("shared", [True, False])
def test_truncated_vocabulary(tmp_path: Path, shared: bool) -> None:
    heads = random_heads(3, 1, rows=40, shared=shared)
    check_parity(write_vllm(tmp_path, heads, shared), heads)
    whole = random_heads(3, 1, shared=shared)  # whole matrices beside a map are cut by it
    whole.token_map = heads.token_map
    assert heads.token_map is not None
    cut = Heads(whole.weights, whole.biases, [out[heads.token_map] for out in whole.outputs], heads.token_map)
    check_parity(write_vllm(tmp_path, whole, shared, truncated_vocab_size=40), cut)


def test_shared_output_layer(tmp_path: Path) -> None:
    heads = random_heads(3, 1, shared=True)
    check_parity(write_vllm(tmp_path, heads, shared=True), heads)
    every = {**vllm_tensors(heads), "lm_heads.0.weight": heads.outputs[0]}
    check_parity(write(tmp_path, every, vllm_config(heads, shared=True)), heads)


@pytest.mark.parametrize("stored", [True, False])
def test_the_targets_own_output_layer_is_not_held_twice(tmp_path: Path, stored: bool) -> None:
    model = tiny.target(TARGET_LAYERS)
    heads = random_heads(2, 1)
    heads.outputs = [model.parts.lm_head.weight.dequantize()] * 2
    tensors = vllm_tensors(heads, shared=True)
    if not stored:
        del tensors["lm_head.weight"]
    check_parity(write(tmp_path, tensors, vllm_config(heads, shared=True)), heads)
    assert load_medusa(tmp_path, model, tiny.kernels()).linears[-1] is model.parts.lm_head


def test_rows_of_the_targets_own_output_layer(tmp_path: Path) -> None:
    heads = random_heads(2, 1, rows=30, shared=True)
    tensors = vllm_tensors(heads, shared=True)
    del tensors["lm_head.weight"]
    heads.outputs = [tiny.target(TARGET_LAYERS).parts.lm_head.weight.dequantize()[heads.token_map]] * 2
    check_parity(write(tmp_path, tensors, vllm_config(heads, shared=True)), heads)


def test_logit_scale(tmp_path: Path) -> None:
    heads = random_heads(2, 1)
    check_parity(write_vllm(tmp_path, heads, logit_scale=0.25), heads, factor=0.25)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_faster_decoding_layout(tmp_path: Path, name: str, num_layers: int) -> None:
    heads = random_heads(4, num_layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, "base_model_name_or_path": "x"}
    check_parity(write(tmp_path, faster_tensors(heads), config, name), heads)


def test_heads_inside_a_whole_model(tmp_path: Path) -> None:
    """As Medusa-2 saves them: only what stands behind the prefix is theirs."""
    heads = random_heads(3, 1)
    tensors = {**faster_tensors(heads, "medusa_head."), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.zeros(HIDDEN)
    check_parity(write(tmp_path, tensors, {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2}), heads)


def test_prefixed_vllm_names(tmp_path: Path) -> None:
    heads = random_heads(2, 1, rows=50)
    tensors = {f"medusa_heads.{name}" if "." in name else name: t for name, t in vllm_tensors(heads).items()}
    check_parity(write(tmp_path, tensors, vllm_config(heads)), heads)


def refused(folder: Path, error: type[ForerunError], *words: str) -> None:
    with pytest.raises(error) as caught:
        load_medusa(folder, tiny.target(TARGET_LAYERS), tiny.kernels())
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 48}, ("hidden_size 48", "32")),
        ({"vocab_size": 97}, ("vocab_size 97", "96")),
        ({"num_heads": 3}, ("2 Medusa heads", "num_heads 3")),
        ({"num_heads": 1}, ("2 Medusa heads", "num_heads 1")),
        ({"num_hidden_layers": 2}, ("1 layers", "num_hidden_layers 2")),
        ({"truncated_vocab_size": 50}, ("no token_map", "50")),
        ({"medusa_fc_bias": False}, ("2 tensors", "blocks.0.layers.0.bias")),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, fields: dict[str, Any], words: Sequence[str]) -> None:
    refused(write_vllm(tmp_path, random_heads(2, 1), **fields), CheckpointError, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_heads.1.weight": None}, ("no tensor lm_heads.1.weight",)),
        ({"blocks.1.layers.0.bias": None}, ("no tensor blocks.1.layers.0.bias",)),
        ({"lm_heads.0.weight": torch.zeros(VOCAB, 48)}, ("lm_heads.0.weight", "[96, 48]", "[96, 32]")),
        ({"blocks.0.layers.0.weight": torch.zeros(48, 48)}, ("blocks.0.layers.0.weight", "[48, 48]", "[32, 32]")),
        ({"extra.weight": torch.zeros(3)}, ("1 tensors", "extra.weight")),
        ({"lm_heads.0.weight": torch.zeros(VOCAB, HIDDEN, dtype=torch.int32)}, ()),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, change: dict[str, Tensor | None], words: Sequence[str]) -> None:
    heads = random_heads(2, 1)
    tensors = {name: t for name, t in {**vllm_tensors(heads), **change}.items() if t is not None}
    folder = write(tmp_path, tensors, vllm_config(heads))
    refused(folder, CheckpointError if words else UnsupportedError, *words)


@pytest.mark.parametrize(
    "token_map", [torch.arange(39), torch.arange(40) + 60, torch.zeros(40, dtype=torch.int64), torch.arange(-1, 39)]
)
def test_a_token_map_that_does_not_fit(tmp_path: Path, token_map: Tensor) -> None:
    heads = random_heads(2, 1, rows=40)
    heads.token_map = token_map
    refused(write_vllm(tmp_path, heads), CheckpointError, "token_map", "40 different tokens")


def test_folders_without_heads(tmp_path: Path) -> None:
    refused(tmp_path, CheckpointError, "medusa_lm_head.safetensors", "model.safetensors")
    refused(tmp_path / "nothing", ModelNotFoundError)
    refused(write(tmp_path / "a", {"fc.weight": torch.zeros(2, 2)}, {}), UnsupportedError, "layout", "fc.weight")
    heads = random_heads(2, 1)
    quantized = write_vllm(tmp_path / "b", heads, quantization_config={"quant_method": "gptq"})
    refused(quantized, UnsupportedError, "quantized")


@pytest.mark.parametrize("content", [b"", b"no pickle", b"PK\x03\x04"])
def test_a_broken_pickle(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    refused(tmp_path, CheckpointError, "medusa_lm_head.pt")


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": Path("/")}, tmp_path / "medusa_lm_head.pt")
    refused(tmp_path, CheckpointError, "medusa_lm_head.pt")


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_fitted(tmp_path_factory.mktemp("heads")))


def write_fitted(folder: Path) -> Path:
    """Heads whose output matrices are fitted to the target's greedy text, so that some drafts are right."""
    model, texts = tiny.target(TARGET_LAYERS), tiny.groups(24, temperature=0.0, max_tokens=50)
    known = [
        [*g.samples[0].request.prompt_token_ids, *made[0]]
        for g, made in zip(texts, tiny.plain(model, texts), strict=True)
    ]
    states, wanted = [], [list[int]() for _ in range(4)]
    for tokens in known:
        runner = factory.Runner(model, len(tokens))
        states.append(runner.span(tokens, hidden=(TARGET_LAYERS + 1,)).hidden[TARGET_LAYERS + 1][:-5])
        for head in range(4):
            wanted[head] += tokens[2 + head : len(tokens) - 3 + head]
    x = torch.cat(states)
    ridge = torch.linalg.solve(x.T @ x + 0.1 * torch.eye(HIDDEN), x.T)  # [H, rows]
    zeros = [[torch.zeros(HIDDEN, HIDDEN)] for _ in range(4)]
    outputs = [8 * (ridge @ torch.nn.functional.one_hot(torch.tensor(ids), VOCAB).float()).T for ids in wanted]
    heads = Heads(zeros, [[None] for _ in range(4)], outputs)
    return write_vllm(folder, heads)


def config(folder: str, max_draft_tokens: int = 4, tree_width: int = 1, adaptive: bool = False) -> DrafterConfig:
    return DrafterConfig(
        name="medusa", model=folder, max_draft_tokens=max_draft_tokens, tree_width=tree_width, adaptive=adaptive
    )


SHAPES = {"chain": (4, 1), "tree": (20, 4), "short": (2, 1), "wide": (7, 16)}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_plain_decoding(fitted: str, shape: str, temperature: float) -> None:
    model, wanted = tiny.target(TARGET_LAYERS), tiny.groups(6, temperature=temperature)
    tokens, stats = tiny.run(tiny.engine(model, config(fitted, *SHAPES[shape])), wanted)
    assert tokens == tiny.expected(TARGET_LAYERS, 6, temperature=temperature)
    assert tiny.num_accepted(stats) > 0, "nothing was accepted, so nothing was tested"


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 7}, {"num_kv_blocks": 26}, {"max_num_seqs": 2}, {"block_size": 16}]
)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_chunks_preemption_and_queues(fitted: str, shape: str, options: dict[str, int]) -> None:
    model, wanted = tiny.target(TARGET_LAYERS), tiny.groups(7, n=2)
    made = tiny.engine(model, config(fitted, *SHAPES[shape]), **options)
    tokens, stats = tiny.run(made, wanted)
    assert tokens == tiny.expected(TARGET_LAYERS, 7, n=2)
    assert sum(stat.num_preemptions for stat in stats) > 0 or "num_kv_blocks" not in options
    assert tiny.num_accepted(stats) > 0
    assert tiny.run(made, wanted)[0] == tokens, "with what the prefix cache kept"


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("params", [{"top_k": 6}, {"repetition_penalty": 1.3}, {"logit_bias": {5: 3.0}}])
def test_sampling_parameters(fitted: str, shape: str, params: dict[str, Any]) -> None:
    model, wanted = tiny.target(TARGET_LAYERS), tiny.groups(4, **params)
    tokens, stats = tiny.run(tiny.engine(model, config(fitted, *SHAPES[shape])), wanted)
    assert tokens == tiny.plain(model, wanted)
    assert sum(count.drafted for stat in stats for count in stat.drafters.values()) > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_rejection_rule(fitted: str, shape: str) -> None:
    model = tiny.target(TARGET_LAYERS)
    sampled, options = tiny.groups(5), {"verification": "rejection", "max_num_batched_tokens": 19}
    first, stats = tiny.run(tiny.engine(model, config(fitted, *SHAPES[shape]), **options), sampled)
    assert first == tiny.run(tiny.engine(model, config(fitted, *SHAPES[shape]), **options), sampled)[0]
    assert tiny.num_accepted(stats) > 0 and all(len(sample) == 20 for group in first for sample in group)
    greedy = tiny.groups(4, temperature=0.0)
    assert tiny.run(tiny.engine(model, config(fitted, *SHAPES[shape]), **options), greedy)[0] == tiny.plain(
        model, greedy
    )


def test_the_first_step_drafts_where_the_state_is_known(fitted: str) -> None:
    """Alone after a chunk that ends before the root, or after a prefix hit, the state is there; else it is not."""
    model = tiny.target(TARGET_LAYERS)
    made = tiny.engine(model, config(fitted))
    drafter, proposed = made.drafter, []
    propose = drafter.propose
    made.drafter.propose = lambda drafts: (propose(drafts), proposed.append(len(drafts[0].tree)))[0]  # type: ignore[method-assign]
    [group] = tiny.groups(1, max_tokens=3)
    prompt = tuple(range(10, 10 + 13))  # the root begins a block
    for hit in (False, True):
        proposed.clear()
        request = harness.request(int(hit), prompt, group.samples[0].request.params, tiny.MAX_LEN)
        harness.run(made, [request])
        assert (proposed[0] > 1) == hit, "twelve tokens with their last state are in the prefix cache"
        assert all(size > 1 for size in proposed[1:])


def test_trees_are_the_best_products(fitted: str) -> None:
    """At temperature 0 a tree holds the likeliest paths of all, by the product of the heads' probabilities."""
    heads = load_medusa(fitted, tiny.target(TARGET_LAYERS), tiny.kernels())
    drafter = MedusaDrafter(heads, tiny.kernels(), TreeGrower(tiny.kernels(), coupled=True), 3, 15, 3, 0)
    drafter.attach((), ())
    request = Request("r", (5, 6, 7), SamplingParams(temperature=0.0), seed=1, num_computed=2)
    states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(3))
    drafter.observe([Observed(request, range(1, 3), (), ())], {3: states})
    draft = Draft(request, 16)
    drafter.propose([draft])
    best = heads.compute(states[2:3], 4).log_softmax(-1).topk(3)  # the last span row is row 1 + 2 - 1
    paths = {(): 0.0}
    for depth in range(4):
        for path, chance in list(paths.items()):
            if len(path) == depth:
                pairs = zip(best.indices[depth].tolist(), best.values[depth].tolist(), strict=True)
                paths |= {(*path, token): chance + more for token, more in pairs}
    likeliest = sorted(paths, key=lambda path: -paths[path])[: 15 + 1]
    tree = draft.tree
    assert {tuple(tree.path_tokens(node)) for node in range(len(tree))} == set(likeliest)
    for node in range(1, len(tree)):
        assert draft.survival[node] == pytest.approx(paths[tuple(tree.path_tokens(node))], abs=1e-4)


def test_budgets_follow_the_policy(fitted: str) -> None:
    model, wanted = tiny.target(TARGET_LAYERS), tiny.groups(4)
    tokens, _ = tiny.run(tiny.engine(model, config(fitted, adaptive=True)), wanted)
    assert tokens == tiny.plain(model, wanted)


def test_nothing_is_kept_of_ended_requests(fitted: str) -> None:
    made = tiny.engine(tiny.target(TARGET_LAYERS), config(fitted), num_kv_blocks=26)
    again = [harness.fresh(group) for group in tiny.groups(5)]
    for group in again:
        made.add(group)
    for _ in range(4):
        made.step()
    made.abort(again[1].request_id)
    harness.run(made, [])
    assert not reachable_strings(made.drafter) & {group.samples[0].request.request_id for group in again}


def test_a_target_without_such_states_is_refused(fitted: str) -> None:
    with pytest.raises(UnsupportedError, match="transformers"):
        harness.engine(config(fitted), model=ToyModel())
