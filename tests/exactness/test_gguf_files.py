"""Quantized files of the embedded model: every drafter writes the tokens of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.models.gguf_export import export_gguf
from forerun.weights.resolve import resolve_model
from tests.support import mini

pytest.importorskip("gguf")
from tests.weights import gguf_makers as makers

TYPES: dict[str, dict[str, str] | None] = {
    "Q4_K_M": None,
    "small": {"ffn_down": "IQ2_XS", "token_embd": "Q8_0", "": "MXFP4"},  # rows of 1024 are whole blocks of 256
}
CASES = (("Q4_K_M", "auto"), ("Q4_K_M", "float32"), ("small", "auto"))  # and what becomes of activations
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_min": 1},
    "suffix": {},
    "recycling": {},
    "draft": {"draft_model": "mini-draft", "tree_width": 3, "max_draft_tokens": 12},
    "layer_skip": {"layers": (0, 1, 2, 4)},
    "medusa": {"draft_model": "mini-medusa"},
    "eagle": {"draft_model": "mini-eagle"},
    "mtp": {"draft_model": "mini-mtp", "tree_width": 3},
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    mix, activations = request.param
    types = TYPES[mix]
    path = tmp_path_factory.mktemp("files") / "mini.gguf"
    export_gguf(resolve_model("mini"), path, "F32" if types else mix)
    if types:
        makers.write_again(path, types=types)
    return LLM(str(path), max_num_seqs=6, max_model_len=256, activations=activations)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_tokens_of_plain_decoding(drafter: str, plain: LLM) -> None:
    llm = plain.with_drafter(drafter, adaptive=False, **DRAFTERS[drafter])
    params = [SamplingParams(temperature=i % 2, max_tokens=24, seed=5, ignore_eos=True) for i in range(6)]
    drafted = llm.generate(mini.PROMPTS, params)
    assert [o.outputs[0].token_ids for o in drafted] == mini.alone(plain, mini.PROMPTS, params)
    num_accepted = sum(c.accepted for o in drafted for c in o.outputs[0].stats.drafters.values())
    assert num_accepted > 0, "nothing was accepted, so nothing was tested"
