"""A published text, reproduced: stories260K's greedy sample, with every drafter, on both backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.weights.llama2c import convert_llama2c
from tests.support.mini import SHARED

WEIGHTS = SHARED / "weights" / "stories260K"
pytestmark = pytest.mark.skipif(not WEIGHTS.exists(), reason="the folder of small real weights is not here")
CPU = "auto"


def golden() -> str:
    """The first sample of the model's page."""
    page = (WEIGHTS / "stories260K.md").read_text()
    block = page.split("-t 0.0\n")[1]
    return block.split("```")[0].strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stories260K")
    convert_llama2c(WEIGHTS / "stories260K.bin", WEIGHTS / "tok512.bin", out)
    return out


@pytest.mark.parametrize(
    ("backend", "drafter", "num"),
    [(CPU, name, 256) for name in ("none", "ngram", "draft", "draft-tree")]
    + [("reference", "none", 30), ("reference", "draft", 30)],
)
def test_published_sample(folder: Path, backend: str, drafter: str, num: int) -> None:
    name, _, tree = drafter.partition("-")
    options = {"draft_model": str(folder), "tree_width": 2 if tree else 1} if name == "draft" else {}
    llm = LLM(str(folder), kernels=backend, drafter=name, adaptive=False, max_num_seqs=2, **options)
    start = [llm.tokenizer.bos_token_id]
    [output] = llm.generate([start], SamplingParams(temperature=0.0, max_tokens=num, ignore_eos=True))
    text, published = output.outputs[0].text.strip(), golden()
    assert text.startswith(published) if num == 256 else (published.startswith(text) and len(text) > 50)
    assert output.outputs[0].stats.acceptance_length > (1.5 if name == "draft" else 0.9)
