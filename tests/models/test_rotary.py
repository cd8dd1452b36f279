"""Rope tables against transformers' own, and their independence of the table's length."""

from __future__ import annotations

import pytest
import torch

from forerun.layers.rotary import RopeSpec, rope_table
from forerun.models.config import ModelConfig
from forerun.models.families import FAMILIES
from tests.models import factory
from tests.models.factory import CASES

ROPE_CASES = ["llama", "llama-linear", "llama-yarn", "llama-yarn-mscale", "llama3", "phi3-longrope", "llama-dynamic"]


def spec_of(case: str) -> tuple[RopeSpec, torch.Tensor]:
    """Our spec, and transformers' table for the positions of the original context."""
    model_type, fields = CASES[case]
    module = factory.random_hf_model(model_type, fields)
    config = ModelConfig.read(module.config.to_dict(), FAMILIES[model_type])
    positions = torch.arange(32)[None]
    cos, sin = module.model.rotary_emb(torch.zeros(1, 32, 8), positions)
    half = cos.shape[-1] // 2
    return config.rope, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)


@pytest.mark.parametrize("case", ROPE_CASES)
def test_tables_are_those_of_transformers(case: str) -> None:
    spec, theirs = spec_of(case)
    ours = rope_table(spec, 32)
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, atol=2e-6)


@pytest.mark.parametrize("case", ROPE_CASES)
def test_a_position_does_not_depend_on_the_length_of_the_table(case: str) -> None:
    spec, _ = spec_of(case)
    long = rope_table(spec, 100)
    for length in (1, 3, 17, 64):
        assert torch.equal(rope_table(spec, length), long[:length])


def test_dynamic_grows_by_position() -> None:
    spec = RopeSpec(kind="dynamic", rotary_dim=8, theta=1e4, factor=2.0, original_max_position=16)
    plain = rope_table(RopeSpec(rotary_dim=8, theta=1e4), 40)
    table = rope_table(spec, 40)
    assert torch.equal(table[:16], plain[:16])
    assert not torch.allclose(table[17], plain[17])


def test_yarn_amplitude() -> None:
    assert RopeSpec(kind="yarn", rotary_dim=8, factor=1.0).amplitude == 1.0
    assert RopeSpec(kind="yarn", rotary_dim=8, factor=4.0).amplitude == pytest.approx(1.1386, abs=1e-4)
    assert RopeSpec(kind="yarn", rotary_dim=8, factor=4.0, attention_factor=0.5).amplitude == 0.5
    assert RopeSpec(rotary_dim=8, factor=4.0, attention_factor=0.5).amplitude == 1.0
