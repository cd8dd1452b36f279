"""route and experts: what is chosen, how it is summed, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.cases import ISAS, clipped_swiglu, cpu_kernels, kernels_named, rms_error
from torch import Tensor
from torch.nn import functional

from forerun.errors import KernelError
from forerun.kernels.grouped import GroupedMatrix
from forerun.kernels.ops import SQUARED_RELU, ExpertBiases, Kernels, PackedExperts, Routing

BACKENDS = ("reference", *ISAS)
MIXTRAL = Routing(8, 2)
QWEN = Routing(20, 4, normalize=False)
DEEPSEEK = Routing(32, 6, sigmoid=True, scale=2.5, num_groups=8, top_groups=3)
LFM2 = Routing(32, 4, sigmoid=True, smallest_sum=1e-6)
LONE = Routing(1, 1, sigmoid=True, normalize=False)
HIDDEN, FFN = 64, 48


def published(logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
    """The choice as transformers' routers write it, in the precision of the logits."""
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    groups = choice.view(len(logits), routing.num_groups, -1)
    votes = groups.topk(min(2, groups.shape[2]), dim=-1).values.sum(-1)
    kept = torch.zeros_like(votes).scatter(1, votes.topk(routing.top_groups, dim=-1).indices, 1).bool()
    choice = groups.masked_fill(~kept[:, :, None], -torch.inf).view_as(logits)
    ids = choice.topk(routing.top_k, dim=-1).indices
    chosen = scores.gather(1, ids)
    if routing.normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + routing.smallest_sum)
    return torch.zeros_like(logits).scatter(1, ids, chosen * routing.scale)


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("routing", [MIXTRAL, QWEN, DEEPSEEK, LFM2, LONE])
@pytest.mark.parametrize("corrected", [False, True])
def test_weights_are_those_of_the_published_routers(isa: str, routing: Routing, corrected: bool) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(30, routing.num_experts)
    correction = 0.5 * torch.randn(routing.num_experts) if corrected else None
    truth = published(logits.double(), None if correction is None else correction.double(), routing)
    found = kernels_named(isa).route(logits, correction, routing)
    assert torch.equal(found != 0, truth != 0)
    assert bool(((found != 0).sum(1) == routing.top_k).all())
    error = rms_error(published(logits, correction, routing), truth)
    assert rms_error(found, truth) <= 2 * error + 1e-8


@pytest.mark.parametrize("isa", BACKENDS)
def test_ties_go_to_the_lower_index(isa: str) -> None:
    kernels = kernels_named(isa)
    weights = kernels.route(torch.zeros(2, 8), None, MIXTRAL)
    assert torch.equal(weights, torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0]] * 2))
    grouped = kernels.route(torch.zeros(1, 32), None, DEEPSEEK)
    assert grouped[0].nonzero()[:, 0].tolist() == list(range(6))


@pytest.mark.parametrize("isa", BACKENDS)
def test_a_row_without_numbers_spoils_itself_alone(isa: str) -> None:
    logits = torch.randn(3, 32)
    clean = kernels_named(isa).route(logits, None, DEEPSEEK)
    logits[1] = torch.nan
    found = kernels_named(isa).route(logits, None, DEEPSEEK)
    assert torch.equal(found[[0, 2]], clean[[0, 2]]) and bool(found[1].isnan().any())


@pytest.mark.parametrize("isa", BACKENDS)
def test_impossible_choices_are_refused(isa: str) -> None:
    kernels = kernels_named(isa)
    for routing in (Routing(8, 9), Routing(8, 3, num_groups=4), Routing(8, 2, num_groups=3), Routing(7, 2)):
        with pytest.raises(KernelError):
            kernels.route(torch.zeros(1, 8), None, routing)


def matrices(num_experts: int, has_gate: bool = True) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = (((1 + has_gate) * FFN, HIDDEN), (HIDDEN, FFN))
    return [tuple(torch.randn(shape, generator=generator) * 0.2 for shape in shapes) for _ in range(num_experts)]  # type: ignore[misc]


def grouped(weight: Tensor) -> GroupedMatrix:
    """The weight rounded to 4 bits in groups of 16 columns."""
    scales = weight.unflatten(1, (-1, 16)).abs().amax(-1) / 7
    codes = (weight / scales.repeat_interleave(16, 1)).round().clamp(-8, 7) + 8
    return GroupedMatrix(codes.to(torch.uint8), scales, 4, 8, 16, None, None)


def biases_of(num_experts: int) -> ExpertBiases:
    generator = torch.Generator().manual_seed(5)
    return ExpertBiases(*(torch.randn(num_experts, size, generator=generator) for size in (2 * FFN, HIDDEN)))


def pack(
    kernels: Kernels, num_experts: int, storage: str, activation: str = "silu", biased: bool = False,
    scales_inputs: bool = False,
) -> PackedExperts:  # fmt: skip
    def packed(weight: Tensor):  # type: ignore[no-untyped-def]
        if storage == "int4":
            return kernels.pack_grouped(grouped(weight))
        return kernels.pack_linear(weight.to(getattr(torch, storage)))

    pairs = matrices(num_experts, activation != SQUARED_RELU)
    added = ExpertBiases(*(b.to(kernels.device) for b in biases_of(num_experts))) if biased else None
    ups, downs = [packed(up) for up, _ in pairs], [packed(down) for _, down in pairs]
    return kernels.pack_experts(ups, downs, activation, added, scales_inputs)


def plain_sum(x: Tensor, weights: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    total = base.to(dtype)
    for (up, down), weight in zip(matrices(weights.shape[1]), weights.T, strict=True):
        gate, value = (x.to(dtype) @ up.to(dtype).T).chunk(2, dim=1)
        total = total + weight.to(dtype)[:, None] * ((functional.silu(gate) * value) @ down.to(dtype).T)
    return total


def case(num_rows: int, routing: Routing = MIXTRAL) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights, base."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = published(torch.randn(num_rows, routing.num_experts, generator=generator), None, routing)
    return (
        torch.randn(num_rows, HIDDEN, generator=generator),
        weights,
        torch.randn(num_rows, HIDDEN, generator=generator),
    )


@pytest.mark.parametrize("isa", BACKENDS)
def test_error_is_at_most_twice_torchs(isa: str) -> None:
    kernels, (x, weights, base) = kernels_named(isa), case(25)
    experts = pack(kernels, 8, "float32")
    for given, start in ((base, base), (None, torch.zeros_like(base))):
        truth = plain_sum(x, weights, start, torch.float64)
        error = rms_error(plain_sum(x, weights, start, torch.float32), truth)
        assert rms_error(kernels.experts(x, weights, experts, given), truth) <= 2 * error
    assert experts.num_experts == 8


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_sum_is_that_of_the_single_ops_in_the_order_of_the_experts(
    isa: str, storage: str, activation: str
) -> None:  # fmt: skip
    kernels, (x, weights, base) = kernels_named(isa), case(9)
    experts = pack(kernels, 8, storage, activation)
    expected = base.clone()
    for index in range(8):
        rows = weights[:, index].nonzero()[:, 0]
        one = torch.zeros(len(rows), 8)
        one[:, index] = 1.0
        expected[rows] += weights[rows, index, None] * kernels.experts(x[rows], one, experts)
    assert torch.equal(kernels.experts(x, weights, experts, base), expected)


def clipped_sum(x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """With biases and gpt-oss's gate."""
    total, biases = torch.zeros_like(x).to(dtype), biases_of(weights.shape[1])
    for index, (up, down) in enumerate(matrices(weights.shape[1])):
        gate, value = (x.to(dtype) @ up.to(dtype).T + biases.gate_up[index].to(dtype)).chunk(2, dim=1)
        out = clipped_swiglu(gate, value) @ down.to(dtype).T + biases.down[index].to(dtype)
        total = total + weights[:, index, None].to(dtype) * out
    return total


@pytest.mark.parametrize("isa", BACKENDS)
def test_biases_and_the_clipped_gate(isa: str) -> None:
    kernels, (x, weights, _) = kernels_named(isa), case(25)
    truth = clipped_sum(x, weights, torch.float64)
    found = kernels.experts(x, weights, pack(kernels, 8, "float32", "clipped_swiglu", biased=True))
    assert rms_error(found, truth) <= 2 * rms_error(clipped_sum(x, weights, torch.float32), truth)
    small = kernels.experts(x, weights, pack(kernels, 8, "int4", "clipped_swiglu", biased=True))
    assert 0 < rms_error(small, truth) < 0.3 * float(truth.std())


@pytest.mark.parametrize("isa", BACKENDS)
@pytest.mark.parametrize("storage", ["float32", "int4"])
def test_experts_without_a_gate_have_the_bits_of_the_single_ops(isa: str, storage: str) -> None:
    kernels, (x, weights, base) = kernels_named(isa), case(9)
    expected = base.clone()
    for index, pair in enumerate(matrices(8, has_gate=False)):
        pack_one = kernels.pack_linear if storage == "float32" else lambda weight: kernels.pack_grouped(grouped(weight))
        up, down = map(pack_one, pair)
        rows = weights[:, index].nonzero()[:, 0]
        inner = functional.relu(kernels.linear(x[rows], up)).square()
        expected[rows] += weights[rows, index, None] * kernels.linear(inner, down)
    found = kernels.experts(x, weights, pack(kernels, 8, storage, SQUARED_RELU), base)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("isa", BACKENDS)
def test_weights_may_multiply_what_is_read(isa: str) -> None:
    kernels, (x, weights, base) = kernels_named(isa), case(6)
    experts, plain = pack(kernels, 8, "float32", scales_inputs=True), pack(kernels, 8, "float32")
    expected = base.clone()
    for index in range(8):
        rows = weights[:, index].nonzero()[:, 0]
        one = torch.zeros(len(rows), 8)
        one[:, index] = 1.0
        expected[rows] += kernels.experts(weights[rows, index, None] * x[rows], one, plain)
    assert torch.equal(kernels.experts(x, weights, experts, base), expected)


@pytest.mark.parametrize("isa", ("reference", "avx512", "avx2"))
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int4"])
def test_a_row_has_the_same_bits_in_every_batch(isa: str, storage: str) -> None:
    kernels, (x, _, base) = kernels_named(isa), case(24)
    experts, logits = pack(kernels, 8, storage), torch.randn(24, 8)

    def run(rows: Tensor) -> Tensor:
        weights = kernels.route(logits[rows], None, MIXTRAL)
        return kernels.experts(x[rows], weights, experts, base[rows])

    alone = torch.cat([run(torch.tensor([row])) for row in range(24)])
    for num_rows in (1, 2, 3, 7, 16, 24):
        order = torch.randperm(24)[:num_rows]
        assert torch.equal(run(order), alone[order])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int4"])
def test_instruction_sets_and_thread_counts_agree_bit_by_bit(isa: str, storage: str) -> None:
    x, _, base = case(11, DEEPSEEK)
    logits, correction = torch.randn(11, 32), torch.randn(32)
    results = []
    for kernels in (cpu_kernels("portable", 1), cpu_kernels(isa, 1), cpu_kernels(isa, 3)):
        weights = kernels.route(logits, correction, DEEPSEEK)
        packed = pack(kernels, 32, storage, "clipped_swiglu", biased=True)
        results.append((weights, kernels.experts(x, weights, packed, base)))
    for weights, out in results[1:]:
        assert torch.equal(weights, results[0][0]) and torch.equal(out, results[0][1])


def test_what_others_packed_and_misfits_are_refused() -> None:
    cpu, reference = cpu_kernels(), kernels_named("reference")
    x, weights, _ = case(2)
    with pytest.raises(KernelError, match="ReferenceExperts"):
        cpu.experts(x, weights, pack(reference, 8, "float32"))
    with pytest.raises(KernelError, match="CpuExperts"):
        reference.experts(x, weights, pack(cpu, 8, "float32"))
    with pytest.raises(KernelError, match="ask for"):
        cpu.pack_experts([cpu.pack_linear(torch.ones(12, 8))], [cpu.pack_linear(torch.ones(8, 5))], "silu")
