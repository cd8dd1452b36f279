"""Pipeline stages: where a model is cut, and that its stages give the bits of the whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.cache.states import RecurrentStates
from forerun.errors import ConfigError, UnsupportedError
from forerun.models.base import CommittedPath, KeepsSlots, Model, PassOutput, state_specs_of
from forerun.models.batch import ForwardBatch, SequenceRows
from forerun.models.loader import load_adapter, load_model
from forerun.models.parts import check_division
from forerun.models.stages import StagedDecoder, cut
from tests.models import factory
from tests.support.adapters import write_adapter

TABLES = [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]


class Handed:
    """What one stage hands to the next, in one process."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def send(self, tensor: Tensor) -> None:
        self.tensors.append(tensor.clone())

    def receive(self, shape: Sequence[int]) -> Tensor:
        tensor = self.tensors.pop(0)
        assert tuple(tensor.shape) == tuple(shape)
        return tensor


def rows(index: int, start: int, span: Sequence[int], tree: Sequence[int] = (), depth: int = 1) -> SequenceRows:
    """A span, then a root whose children and their children are `tree`."""
    parents = [-1, *(0 if node <= depth else node - depth for node in range(1, len(tree)))][: len(tree)]
    masks, depths = factory.tree_masks(parents) if tree else ([], [])
    nodes = list(range(len(tree)))
    return SequenceRows(
        f"r{index}", TABLES[index], start, span, start + len(span), tree, nodes, masks, depths, index == 1
    )  # fmt: skip


PASSES: tuple[tuple[list[SequenceRows], tuple[int, ...], list[CommittedPath]], ...] = (
    ([rows(0, 0, [5, 6, 7])], (), []),  # a prompt's chunk, whose logits nobody wants
    ([rows(0, 3, [8, 9], [10, 11, 12, 13, 14]), rows(1, 0, [3, 4, 5])], (), [CommittedPath("r0", (0, 1, 2))]),
    ([rows(0, 8, [], [20, 21]), rows(1, 3, [6], [7, 8, 9])], (0, 1, 2, 3), []),
)


def run(models: Sequence[Model], adapters: Sequence[object | None] = ()) -> list[PassOutput]:
    """All passes through these stages; the second sequence has this adapter. The states that any of them has."""
    adapters = adapters or [None] * len(models)
    slots = [RecurrentStates(specs, 4, m.device) if (specs := state_specs_of(m)) else None for m in models]
    models = [
        m.with_states(slot) if slot is not None and isinstance(m, KeepsSlots) else m
        for m, slot in zip(models, slots, strict=True)
    ]
    kvs = [factory.new_kvs(model, 12) for model in models]
    outputs = []
    for sequences, hidden_layers, paths in PASSES:
        found = [
            m.forward(ForwardBatch.build(sequences, 4, adapters=[None, own][: len(sequences)]), kv, hidden_layers)
            for m, kv, own in zip(models, kvs, adapters, strict=True)
        ]
        outputs.append(PassOutput(found[-1].logits, {i: state for out in found for i, state in out.hidden.items()}))
        for model in models:
            model.commit(paths)
    return outputs


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3-moe", "deepseek", "falcon-h1"])
def test_stages_give_the_bits_of_the_whole(case: str, tmp_path: Path) -> None:
    folder, kernels = factory.make_checkpoint(case, tmp_path), factory.make_kernels()
    whole = load_model(folder, kernels).model
    stages = [load_model(folder, kernels, stage=(index, 2)).model for index in range(2)]
    handed = Handed()
    for stage in stages:
        assert isinstance(stage, StagedDecoder) and stage.weight_bytes < whole.weight_bytes
        stage.neighbours = handed
    assert sum(len(stage.kv_specs) for stage in stages) == len(whole.kv_specs)
    for got, expected in zip(run(stages), run([whole]), strict=True):
        assert torch.equal(got.logits, expected.logits)
        assert got.hidden.keys() == expected.hidden.keys()
        assert all(torch.equal(got.hidden[layer], state) for layer, state in expected.hidden.items())
    assert not handed.tensors


def test_adapters_change_every_stage(tmp_path: Path) -> None:
    folder, kernels = factory.make_checkpoint("llama", tmp_path / "model"), factory.make_kernels()
    adapter = write_adapter(tmp_path / "a", folder, ["v_proj", "o_proj", "up_proj", "embed_tokens", "lm_head"])
    whole, stages = load_model(folder, kernels), [load_model(folder, kernels, stage=(index, 2)) for index in range(2)]
    handed = Handed()
    for each in stages:
        assert isinstance(each.model, StagedDecoder)
        each.model.neighbours = handed
    found = run([each.model for each in stages], [load_adapter("a", adapter, each, kernels) for each in stages])
    expected = run([whole.model], [load_adapter("a", adapter, whole, kernels)])
    assert all(torch.equal(got.logits, own.logits) for got, own in zip(found, expected, strict=True))
    assert not torch.equal(expected[1].logits, run([whole.model])[1].logits)
    router = write_adapter(tmp_path / "b", folder, ["v_proj"], ranks={})
    tensors = load_file(router / "adapter_model.safetensors")
    renamed = {name.replace("self_attn.v_proj", "mlp.gate"): tensor for name, tensor in tensors.items()}
    save_file(renamed, router / "adapter_model.safetensors")
    for each in stages:
        with pytest.raises(UnsupportedError, match=r"adapts model.layers.\d.mlp.gate \(1 such modules\)"):
            load_adapter("b", router, each, kernels)


def test_cutting_makes_the_largest_stage_as_small_as_it_can() -> None:
    rng = random.Random(0)
    for _ in range(30):
        num, count = rng.randint(1, 7), rng.randint(1, 4)
        sizes = [rng.randint(1, 9) for _ in range(num)]
        cuts = [rng.random() < 0.8 for _ in range(num)]
        keeps = [(rng.random() < 0.7, rng.random() < 0.5) for _ in range(num)]
        needed = tuple(any(kinds) for kinds in zip(*keeps, strict=True))
        best = None
        for inner in combinations(range(1, num), count - 1):
            ends = [*inner, num]
            parts = list(zip([0, *inner], ends, strict=True))
            kinds = [tuple(any(k) for k in zip(*keeps[a:b], strict=True)) for a, b in parts]
            if all(cuts[a] for a in inner) and all(kind == needed for kind in kinds):
                largest = max(sum(sizes[a:b]) for a, b in parts)
                best = largest if best is None else min(best, largest)
        found = cut(sizes, cuts, keeps, count)
        if found is None:
            assert best is None
        else:
            assert max(sum(sizes[a:b]) for a, b in zip([0, *found[:-1]], found, strict=True)) == best


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    folder = factory.make_checkpoint("llama", tmp_path / "llama")
    check_division(folder, 1, 2)
    with pytest.raises(ConfigError, match=r"pipeline_parallel 3 was given, but 2 layers .* at most 2"):
        check_division(folder, 1, 3)
    with pytest.raises(UnsupportedError, match="gemma4_text models are given a part of each token"):
        check_division(factory.make_checkpoint("gemma4", tmp_path / "gemma"), 1, 2)
