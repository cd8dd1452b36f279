"""The ops of recurrent layers: against their definition in float64, and the same bits however rows are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from tests.kernels.cases import ISAS, cpu_kernels, kernels_named, rms_error
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import Kernels
from forerun.kernels.recurrent_ops import DeltaHeads, Walk
from forerun.kernels.recurrent_reference import causal_conv, gated_delta, mamba2

HEADS = DeltaHeads(num_keys=2, num_values=4, key_dim=24, value_dim=70)
TAPS, NUM_SLOTS = 4, 3
RULES = ("delta", "channels", "mamba2")
NUM_DECAYS = {"delta": 4, "channels": 4 * 24, "mamba2": 4}
STATES = ((TAPS - 1, HEADS.row_size), (HEADS.num_values, HEADS.key_dim, HEADS.value_dim))


class Layer:
    """Random weights, and the two ops one after the other as a layer of this rule has them."""

    def __init__(self, rule: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator, self.rule = torch.Generator().manual_seed(seed), rule

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        decays = NUM_DECAYS[rule]
        self.weight, self.decay, self.bias = random(TAPS, HEADS.row_size), -random(decays).exp(), random(decays)
        self.tails, self.memory = (random(NUM_SLOTS, *shape) for shape in STATES)
        self.conv_bias, self.skip = random(HEADS.row_size), random(4)

    def run(self, kernels: Kernels | Reference, x: Tensor, gates: Tensor, walk: Walk) -> Tensor:
        if self.rule != "mamba2":
            qkv = kernels.causal_conv(x, self.weight, self.tails, walk, silu=True)
            return kernels.gated_delta(qkv, gates, HEADS, self.decay, self.bias, self.memory, walk)
        qkv = kernels.causal_conv(x, self.weight, self.tails, walk, True, self.conv_bias)
        return kernels.mamba2(qkv, gates, HEADS, self.decay, self.bias, self.skip, self.memory, walk)


class Reference:
    """The ops in any precision."""

    causal_conv, gated_delta, mamba2 = staticmethod(causal_conv), staticmethod(gated_delta), staticmethod(mamba2)


def rows(rule: str, num: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = HEADS.row_size, NUM_DECAYS[rule] + HEADS.num_values * (rule != "mamba2")
    return tuple(torch.randn(num, size, generator=generator) for size in sizes)  # type: ignore[return-value]


def chain(slot: int, num: int) -> Walk:
    return Walk.build([slot], [num], [range(-1, num - 1)])


def random_parents(dice: Random, num_known: int, num: int) -> list[int]:
    """A chain of known rows, below whose last a random tree hangs."""
    return [*range(-1, num_known - 1), *(dice.randrange(num_known - 1, row) for row in range(num_known, num))]


def path_to(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("isa", ISAS)
def test_error_is_at_most_twice_torchs(isa: str, rule: str) -> None:
    x, gates = rows(rule, 60)
    walk, exact = chain(1, 60), Layer(rule, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        truth = exact.run(Reference(), x.double(), gates.double(), walk)
    finally:
        torch.set_default_dtype(torch.float32)
    ours, theirs = Layer(rule), Layer(rule)
    found = ours.run(cpu_kernels(isa), x, gates, walk)
    expected = theirs.run(kernels_named("reference"), x, gates, walk)
    assert rms_error(found, truth) <= 2 * rms_error(expected, truth)
    assert rms_error(ours.memory[1], exact.memory[1]) <= 2 * rms_error(theirs.memory[1], exact.memory[1])
    assert torch.equal(ours.tails, exact.tails.float()) and torch.equal(ours.memory[0], Layer(rule).memory[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ("reference", *ISAS))
def test_trees_and_chunks_give_the_bits_of_rows_one_by_one(name: str, rule: str) -> None:
    kernels, dice = kernels_named(name), Random(0)
    for case in range(4 if name in ("reference", "portable") else 40):
        num, num_known = dice.randint(2, 40), dice.randint(1, 12)
        num_known, (x, gates) = min(num_known, num), rows(rule, num, case)
        parents = random_parents(dice, num_known, num)
        together = Layer(rule, case)
        found = together.run(kernels, x, gates, Walk.build([2], [num_known], [parents]))
        for row in {dice.randrange(num) for _ in range(4)}:
            alone = Layer(rule, case)
            for above in path_to(parents, row):
                last = alone.run(kernels, x[above, None], gates[above, None], chain(2, 1))
            assert torch.equal(last[0], found[row])
        spans = Layer(rule, case)
        half = dice.randint(1, num_known)
        for part in (slice(0, half), slice(half, num_known)):
            if len(x[part]):
                spans.run(kernels, x[part], gates[part], chain(2, len(x[part])))
        assert torch.equal(spans.memory, together.memory) and torch.equal(spans.tails, together.tails)


@pytest.mark.parametrize("rule", RULES)
def test_sequences_threads_and_instruction_sets_do_not_change_bits(rule: str) -> None:
    x, gates = rows(rule, 30)
    walk = Walk.build([1, 0], [2, 5], [[-1, 0, 1, 1, 2, 3, 3], random_parents(Random(3), 5, 23)])
    found = [Layer(rule) for _ in ISAS]
    outs = [layer.run(cpu_kernels(isa), x, gates, walk) for layer, isa in zip(found, ISAS, strict=True)]
    for layer, out in zip(found, outs, strict=True):
        assert torch.equal(out, outs[0]) and torch.equal(layer.memory, found[0].memory)
    alone = Layer(rule)
    for first, slot, parents, known in ((0, 1, [-1, 0, 1, 1, 2, 3, 3], 2), (7, 0, random_parents(Random(3), 5, 23), 5)):
        part = slice(first, first + len(parents))
        out = alone.run(cpu_kernels(ISAS[0], 1), x[part], gates[part], Walk.build([slot], [known], [parents]))
        assert torch.equal(out, outs[0][part])
    assert torch.equal(alone.memory, found[0].memory) and torch.equal(alone.tails, found[0].tails)


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    x, gates = rows("delta", 3)
    for walk in (
        Walk.build([NUM_SLOTS], [1], [[-1, 0, 0]]),
        Walk.build([0], [3], [[-1, 0, 0]]),
        Walk.build([0], [1], [[-1, 2, 0]]),
    ):
        with pytest.raises(IndexError):
            Layer("delta").run(cpu_kernels(), x, gates, walk)


@pytest.mark.parametrize("isa", ISAS)
def test_equal_gates_of_all_channels_have_the_bits_of_one_gate(isa: str) -> None:
    x, gates = rows("delta", 12)
    one, each, kernels = Layer("delta"), Layer("delta"), cpu_kernels(isa)
    each.decay, each.bias = (of_head.repeat_interleave(HEADS.key_dim) for of_head in (one.decay, one.bias))
    wide = torch.cat([gates[:, :4], gates[:, 4:].repeat_interleave(HEADS.key_dim, dim=1)], dim=1)
    walk = Walk.build([1], [2], [[-1, 0, 1, 1, 2, 3, 3, 1, 7, 8, 8, 4]])
    assert torch.equal(each.run(kernels, x, wide, walk), one.run(kernels, x, gates, walk))
    assert torch.equal(each.memory, one.memory)


@pytest.mark.parametrize("name", ("reference", "portable"))
def test_decays_that_are_neither_of_heads_nor_of_channels_are_refused(name: str) -> None:
    x, gates = rows("channels", 3)
    layer = Layer("channels")
    layer.decay = layer.decay[:8]
    with pytest.raises(KernelError, match="8 decays for 4 heads whose keys have 24 channels"):
        layer.run(kernels_named(name), x, gates, chain(0, 3))
