"""Mixtures of experts in Triton: what is chosen, how it is summed, and the same bits for a row in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.cases import kernels_named, rms_error
from tests.kernels.test_experts import DEEPSEEK, LFM2, LONE, MIXTRAL, QWEN, case, pack, published
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import Routing

FEW = Routing(4, 2)
STORAGES = ("float32", "bfloat16", "int4")


def route(kernels: Any, logits: Tensor, correction: Tensor | None, routing: Routing) -> Tensor:
    place = kernels.device
    return kernels.route(logits.to(place), None if correction is None else correction.to(place), routing).cpu()


def experts(kernels: Any, x: Tensor, weights: Tensor, packed: Any, base: Tensor | None = None) -> Tensor:
    place = kernels.device
    return kernels.experts(x.to(place), weights.to(place), packed, None if base is None else base.to(place)).cpu()


@pytest.mark.parametrize("routing", [MIXTRAL, QWEN, DEEPSEEK, LFM2, LONE])
@pytest.mark.parametrize("corrected", [False, True])
def test_weights_are_those_of_the_published_routers(kernels: Any, routing: Routing, corrected: bool) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(8, routing.num_experts)
    correction = 0.5 * torch.randn(routing.num_experts) if corrected else None
    truth = published(logits.double(), None if correction is None else correction.double(), routing)
    found = route(kernels, logits, correction, routing)
    assert torch.equal(found != 0, truth != 0)
    assert rms_error(found, truth) <= 2 * rms_error(published(logits, correction, routing), truth) + 1e-8
    assert torch.equal(route(kernels, logits[4:5].clone(), correction, routing), found[4:5])


def test_ties_go_to_the_lower_index_and_nan_stays_in_its_row(kernels: Any) -> None:
    assert torch.equal(route(kernels, torch.zeros(1, 8), None, MIXTRAL), torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0]]))
    logits = torch.zeros(3, 32)
    logits[1, 5] = torch.nan
    found = route(kernels, logits, None, DEEPSEEK)
    assert [row.nonzero()[:, 0].tolist() for row in found[[0, 2]]] == [list(range(6))] * 2
    assert found[1].isnan().any()


@pytest.mark.parametrize("storage", STORAGES)
def test_agrees_with_the_reference(kernels: Any, storage: str) -> None:
    reference, (x, weights, base) = kernels_named("reference"), case(4, FEW)
    packed, theirs = pack(kernels, 4, storage, "gelu_tanh"), pack(reference, 4, storage, "gelu_tanh")
    for given in (base, None):
        expected = reference.experts(x, weights, theirs, given)
        found = experts(kernels, x, weights, packed, given)
        assert rms_error(found, expected) <= 1e-6 * float(expected.abs().max()) + (1e-3 if storage == "int4" else 0)
    assert packed.num_experts == 4


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_biases_and_the_clipped_gate_agree_with_the_reference(kernels: Any, storage: str) -> None:
    reference, (x, weights, base) = kernels_named("reference"), case(4, FEW)
    given = 4, storage, "clipped_swiglu", True
    expected = reference.experts(x, weights, pack(reference, *given), base)
    found = experts(kernels, x, weights, pack(kernels, *given), base)
    assert rms_error(found, expected) <= 1e-6 * float(expected.abs().max()) + (1e-3 if storage == "int4" else 0)
    assert torch.equal(experts(kernels, x[3:4], weights[3:4], pack(kernels, *given), base[3:4]), found[3:4])


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_the_sum_is_that_of_the_single_experts_in_their_order(kernels: Any, storage: str) -> None:
    (x, weights, base), packed = case(5, FEW), pack(kernels, 4, storage)
    expected = base.clone()
    for index in weights.any(0).nonzero()[:, 0].tolist():
        rows = weights[:, index].nonzero()[:, 0]
        one = torch.zeros(len(rows), 4)
        one[:, index] = 1.0
        expected[rows] += weights[rows, index, None] * experts(kernels, x[rows], one, packed)
    assert torch.equal(experts(kernels, x, weights, packed, base), expected)


@pytest.mark.parametrize("name", ["Q2_K", "IQ4_XS", "IQ1_S"])
def test_a_bank_of_blocks_of_a_file_has_the_bits_of_its_matrices(kernels: Any, name: str) -> None:
    pytest.importorskip("gguf")
    from tests.quant.test_gguf_blocks import valid_blocks

    from forerun.kernels.triton.banks import pack_bank
    from forerun.kernels.triton.experts import list_slots
    from forerun.quant.gguf_decode import decode_rows

    packed = [kernels.pack_grouped(decode_rows(name, valid_blocks(name, seed, (16, 256)))) for seed in range(3)]
    weights, x = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), torch.randn(2, 256).to(kernels.device)
    slots, slot_of = list_slots(weights.to(kernels.device))
    found = pack_bank(packed, (16, 256)).multiply(x, slots, gathered=True)
    for row, expert in weights.nonzero().tolist():
        alone = kernels.linear(x[row : row + 1].clone(), packed[expert])
        assert torch.equal(found[slot_of[expert, row]], alone[0])


@pytest.mark.parametrize("storage", STORAGES[1:])
def test_a_row_has_the_same_bits_in_every_batch(kernels: Any, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (x, weights, base), packed = case(10, FEW), pack(kernels, 4, storage)
    whole = experts(kernels, x, weights, packed, base)
    for rows in (torch.tensor([9]), torch.randperm(10)[:4]):
        assert torch.equal(experts(kernels, x[rows], weights[rows], packed, base[rows]), whole[rows])
    module = pytest.importorskip("forerun.kernels.triton.experts")
    monkeypatch.setattr(module, "WORK_BYTES", 0)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)  # three pieces
    assert torch.equal(experts(kernels, x, weights, packed, base), whole)


def test_an_expert_of_more_rows_than_a_tile_has_the_bits_of_each_alone(kernels: Any) -> None:
    (x, _, base), packed = case(18, FEW), pack(kernels, 4, "bfloat16")
    weights = torch.zeros(18, 4)
    weights[:, 2] = torch.rand(18) + 0.5
    whole = experts(kernels, x, weights, packed, base)
    reference = kernels_named("reference")
    expected = reference.experts(x, weights, pack(reference, 4, "bfloat16"), base)
    assert rms_error(whole, expected) <= 1e-6 * float(expected.abs().max())
    for row in (slice(0, 1), slice(15, 16), slice(16, 17), slice(17, 18)):
        assert torch.equal(experts(kernels, x[row], weights[row], packed, base[row]), whole[row])


def test_what_is_not_chosen_adds_nothing_even_if_it_is_not_finite(kernels: Any) -> None:
    first, second = torch.ones(32, 16), torch.full((32, 16), torch.inf)
    down = [kernels.pack_linear(torch.ones(16, 16))] * 2
    packed = kernels.pack_experts([kernels.pack_linear(first), kernels.pack_linear(second)], down, "silu")
    out = experts(kernels, torch.ones(2, 16), torch.tensor([[0.5, 0.0], [0.0, 0.0]]), packed, torch.ones(2, 16))
    assert out[0].isfinite().all() and torch.equal(out[1], torch.ones(16))


def test_misfits_are_refused(kernels: Any) -> None:
    reference, (x, weights, _) = kernels_named("reference"), case(2)
    with pytest.raises(KernelError, match="ReferenceExperts"):
        kernels.experts(x, weights, pack(reference, 8, "float32"))
    up, down = kernels.pack_linear(torch.ones(12, 8)), kernels.pack_linear(torch.ones(8, 6))
    with pytest.raises(KernelError, match="ask for"):
        kernels.pack_experts([up], [kernels.pack_linear(torch.ones(8, 5))], "silu")
    with pytest.raises(KernelError, match="different ways"):
        kernels.pack_experts([up, kernels.pack_linear(torch.ones(12, 8).half())], [down, down], "silu")
    with pytest.raises(KernelError, match="inputs are scaled"):
        kernels.pack_experts([up], [down], "silu", scales_inputs=True)
