"""What activations of 8 bits cost: perplexity of the embedded model on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.models.decoder import Decoder
from forerun.quantize.perplexity import measure_perplexity
from forerun.quantize.stream import PlainWeight
from forerun.weights.resolve import resolve_model
from tests.quantize import models


@pytest.mark.parametrize("bits", [8, 4])
def test_activations_of_8_bits_cost_less_than_half_a_percent(bits: int, tmp_path: Path) -> None:
    text = models.prose(256)[:6]
    loaded = models.quantized(resolve_model("mini"), tmp_path, text, method="rtn", bits=bits, group_size=128)
    model = loaded.model
    assert isinstance(model, Decoder)
    whole = measure_perplexity(model, text, lambda token: 1).perplexity
    for layer in model.parts.layers:
        for linear in (*layer.attention.linears, *layer.mlp.linears):
            linear.weight = PlainWeight(linear.weight.dequantize())
    exact = measure_perplexity(model, text, lambda token: 1).perplexity
    assert whole != exact
    assert abs(whole / exact - 1) < 0.005
