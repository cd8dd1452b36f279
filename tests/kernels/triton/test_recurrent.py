"""The ops of recurrent layers in Triton: against their definition in float64, and the same bits however rows lie."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from tests.kernels import test_recurrent as on_cpus
from tests.kernels.cases import kernels_named, rms_error
from tests.kernels.test_recurrent import RULES, Layer, Reference, chain, path_to, random_parents, rows
from torch import Tensor

from forerun.config import MAX_TREE_NODES
from forerun.errors import KernelError
from forerun.kernels.recurrent_ops import DeltaHeads, Walk
from forerun.kernels.recurrent_reference import causal_conv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, under the interpreter


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of values that one program holds: an interpreted kernel costs by its programs."""
    heads = on_cpus.HEADS._replace(value_dim=20)
    monkeypatch.setattr(on_cpus, "HEADS", heads)
    states = ((on_cpus.TAPS - 1, heads.row_size), (heads.num_values, heads.key_dim, heads.value_dim))
    monkeypatch.setattr(on_cpus, "STATES", states)


def layer_on(device: torch.device, rule: str, seed: int = 0) -> Layer:
    layer = Layer(rule, seed)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(layer, name, value.to(device))
    return layer


def run(kernels: Any, layer: Layer, x: Tensor, gates: Tensor, walk: Walk) -> Tensor:
    return layer.run(kernels, x.to(kernels.device), gates.to(kernels.device), walk).cpu()


def kept(layer: Layer) -> tuple[Tensor, Tensor]:
    return layer.tails.cpu(), layer.memory.cpu()


@pytest.mark.parametrize("rule", RULES)
def test_error_is_at_most_twice_torchs(kernels: Any, rule: str) -> None:
    x, gates = rows(rule, 12)
    walk, exact = Walk.build([1], [8], [random_parents(Random(1), 8, 12)]), Layer(rule, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        truth = exact.run(Reference(), x.double(), gates.double(), walk)
    finally:
        torch.set_default_dtype(torch.float32)
    ours, theirs = layer_on(kernels.device, rule), Layer(rule)
    found = run(kernels, ours, x, gates, walk)
    expected = theirs.run(kernels_named("reference"), x, gates, walk)
    assert rms_error(found, truth) <= 2 * rms_error(expected, truth)
    tails, memory = kept(ours)
    assert rms_error(memory[1], exact.memory[1]) <= 2 * rms_error(theirs.memory[1], exact.memory[1])
    assert torch.equal(tails, exact.tails.float()) and torch.equal(memory[0], Layer(rule).memory[0])


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("rule", RULES)
def test_trees_and_chunks_give_the_bits_of_rows_one_by_one(kernels: Any, rule: str) -> None:
    dice = Random(0)
    for case, (num_known, num) in enumerate([(1, 9), (4, 7)]):
        x, gates = rows(rule, num, case)
        parents = random_parents(dice, num_known, num)
        together = layer_on(kernels.device, rule, case)
        found = run(kernels, together, x, gates, Walk.build([2], [num_known], [parents]))
        for row in {dice.randrange(num_known, num) for _ in range(2)}:
            alone = layer_on(kernels.device, rule, case)
            for above in path_to(parents, row):
                last = run(kernels, alone, x[above, None], gates[above, None], chain(2, 1))
            assert torch.equal(last[0], found[row])
        spans, half = layer_on(kernels.device, rule, case), dice.randint(1, num_known)
        for part in (slice(0, half), slice(half, num_known)):
            if len(x[part]):
                run(kernels, spans, x[part], gates[part], chain(2, len(x[part])))
        assert all(map(torch.equal, kept(spans), kept(together)))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("rule", RULES)
def test_sequences_do_not_change_each_others_bits(kernels: Any, rule: str) -> None:
    x, gates = rows(rule, 9)
    given = ([1, 0], [2, 3], [[-1, 0, 1, 1], random_parents(Random(3), 3, 5)])
    together, alone = layer_on(kernels.device, rule), layer_on(kernels.device, rule)
    found, first = run(kernels, together, x, gates, Walk.build(*given)), 0
    for slot, known, parents in zip(*given, strict=True):
        part = slice(first, first + len(parents))
        out = run(kernels, alone, x[part], gates[part], Walk.build([slot], [known], [parents]))
        assert torch.equal(out, found[part])
        first += len(parents)
    assert all(map(torch.equal, kept(together), kept(alone)))
    assert torch.equal(kept(alone)[1][2], Layer(rule).memory[2])  # a slot of nobody's


@pytest.mark.parametrize("taps", [1, 2, 6])
def test_convolutions_of_any_length(kernels: Any, taps: int) -> None:
    """Longer than what a sequence has known rows, and of more channels than a program takes."""
    generator, channels = torch.Generator().manual_seed(taps), 300
    x, weight, tails = (
        torch.randn(*shape, generator=generator) for shape in ((9, channels), (taps, channels), (2, taps - 1, channels))
    )
    walk = Walk.build([1, 0], [2, 1], [[-1, 0, 1, 2, 1], [-1, 0, 0, 2]])
    ours = tails.to(kernels.device, copy=True)
    found = kernels.causal_conv(x.to(kernels.device), weight.to(kernels.device), ours, walk, silu=False)
    expected = causal_conv(x, weight, tails, walk, silu=False)
    assert torch.allclose(found.cpu(), expected, rtol=1e-5, atol=1e-5) and torch.equal(ours.cpu(), tails)


def test_a_walk_is_planned_once_and_never_mistaken_for_another(kernels: Any) -> None:
    walks = [Walk.build([0], [1], [[-1, 0, parent]]) for parent in (0, 1)]
    plans = [kernels._walks.plan(walk, kernels.device) for walk in (walks[0], walks[0], walks[1])]
    assert plans[0] is plans[1] is not plans[2]
    assert plans[0].lengths.tolist() == [1, 1] and plans[2].lengths.tolist() == [0, 2]
    assert plans[2].paths[1, :2].tolist() == [2, 1]


def test_paths_take_no_more_than_a_tree_for_each_draft(kernels: Any) -> None:
    """However many drafts all trees have together; and the longest path there is."""
    from forerun.kernels.triton.recurrent import LONGEST_PATH

    num = MAX_TREE_NODES - 1
    walk = Walk.build([0, 1], [1, 1], [list(range(-1, num)), [-1, *[0] * num]])
    found = kernels._walks.plan(walk, kernels.device)
    assert LONGEST_PATH == MAX_TREE_NODES
    assert found.paths.shape == (2 * num, LONGEST_PATH)
    assert found.lengths.tolist() == [*[0] * (num - 1), num, *[1] * num]
    assert found.paths[num - 1, :num].tolist() == list(range(num, 0, -1))
    assert found.paths[num:, 0].tolist() == list(range(num + 2, 2 * num + 2))


def test_keys_that_no_program_holds_are_refused(kernels: Any) -> None:
    heads, one = DeltaHeads(1, 1, 2048, 1), torch.zeros(1, device=kernels.device)
    with pytest.raises(KernelError, match="keys of 2048 entries"):
        kernels.gated_delta(
            torch.zeros(1, 4097), torch.zeros(1, 2), heads, one, one, torch.zeros(1, 1, 2048, 1), chain(0, 1)
        )
