"""Adapters that PEFT itself wrote (lab/adapter_fixtures.py) give the log-probabilities of PEFT's merged model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from tests.models import factory

FIXTURES = Path(__file__).parent / "adapters"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.name != "base")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    base = tmp_path_factory.mktemp("peft") / "base"
    shutil.copytree(FIXTURES / "base", base)
    factory.write_tokenizer(base)
    return LLM(str(base), lora={name: str(FIXTURES / name) for name in NAMES}, threads=1)


@pytest.mark.parametrize("name", NAMES)
def test_as_pefts_merged_model(llm: LLM, name: str) -> None:
    """Within twice float32's own error, of transformers on the merged matrices."""
    expected = json.loads((FIXTURES / name / "expected.json").read_text("utf-8"))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def errors(lora: str | None) -> list[float]:
        found = llm.generate([expected["prompt"]], params, lora=lora)[0].prompt_logprobs
        assert found is not None
        own = [entry.chosen.logprob for entry in found if entry is not None]
        return [abs(a - b) for a, b in zip(own, expected["exact"], strict=True)]

    bound = max(abs(a - b) for a, b in zip(expected["float32"], expected["exact"], strict=True))
    assert max(errors(name)) <= 2 * bound
    assert max(errors(None)) > 1000 * bound, "the adapter changes nothing"
