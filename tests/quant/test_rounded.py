"""Float matrices rounded as they are read: how near values stay, and that heads made of them change no text."""

from __future__ import annotations

import pytest
import torch

from forerun import LLM, DrafterConfig, SamplingParams
from forerun.errors import ConfigError
from forerun.kernels.reference import ReferenceKernels
from forerun.quant.dense import DenseWeight
from forerun.quant.rounded import pack_as, rounded


@pytest.mark.parametrize(("bits", "group_size"), [(8, 128), (8, 16), (4, 64), (4, 32)])
def test_every_value_is_within_half_a_step(bits: int, group_size: int) -> None:
    matrix = torch.randn(24, 256, generator=torch.Generator().manual_seed(bits))
    matrix[3, :group_size] = 0
    grouped = rounded(matrix, bits, group_size)
    steps = matrix.view(24, -1, group_size).abs().amax(dim=2) / ((1 << (bits - 1)) - 1)  # [N, groups]
    error = (grouped.dequantize() - matrix).view(24, -1, group_size).abs().amax(dim=2)
    assert bool((error <= steps * 0.501).all())
    assert bool((grouped.dequantize()[3, :group_size] == 0).all())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rows_that_no_group_divides_stay_as_they_are(weights: str) -> None:
    kernels = ReferenceKernels()
    assert isinstance(pack_as(weights)(kernels, torch.randn(8, 24)), DenseWeight)
    assert not isinstance(pack_as(weights)(kernels, torch.randn(8, 48)), DenseWeight)


def test_other_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        DrafterConfig(name="eagle", model="mini-eagle", head_weights="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eagle", "mtp", "medusa"])
def test_rounded_heads_are_smaller_and_change_no_text(name: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    plain = LLM("mini", drafter="none", max_model_len=128)
    wanted = plain.generate(["Once upon a time"], params)[0].outputs[0].token_ids
    sizes = []
    for weights in ("stored", "int4"):
        llm = plain.with_drafter(name, adaptive=False, head_weights=weights)
        output = llm.generate(["Once upon a time"], params)[0].outputs[0]
        assert output.token_ids == wanted
        assert output.stats.drafters[name].accepted > 0
        sizes.append(llm.engine.drafter.weight_bytes)
    assert sizes[1] < 0.7 * sizes[0]
