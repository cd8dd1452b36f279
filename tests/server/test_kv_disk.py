"""A server's tiers of KV: what clients and metrics are told, and prompts that one server reads for another."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM
from forerun.server.settings import ServerSettings
from tests.server.conftest import client_of
from tests.server.test_service import values_of
from tests.support import mini

PROMPT = " ".join(mini.PROMPTS)


def served(folder: Path) -> LLM:
    return mini.drafting("ngram", kv_disk=str(folder), kv_disk_gib=0.2)


def test_one_server_reads_prompts_for_another(tmp_path: Path) -> None:
    asked = {"model": "mini", "prompt": PROMPT, "max_tokens": 12, "seed": 5, "temperature": 1.0}
    with client_of(mini.drafting("ngram")) as client:
        alone = client.post("/v1/completions", json=asked).json()
    with client_of(served(tmp_path), prefill_only=True) as client:
        answer = client.post("/v1/completions", json={**asked, "stream": False}).json()
        stored = len(list(tmp_path.rglob("*.kv")))
        assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
        assert stored == answer["usage"]["prompt_tokens"] // 16
        values = values_of(client.get("/metrics").text)
        assert values['forerun_kv_tier_stored_blocks_total{tier="disk"}'] == stored
        assert 0 < values['forerun_kv_tier_used_bytes{tier="disk"}'] < 0.2 * 2**30
    with client_of(served(tmp_path)) as client:
        answer = client.post("/v1/completions", json=asked).json()
        assert answer["choices"] == alone["choices"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * stored
        values = values_of(client.get("/metrics").text)
        assert values['forerun_kv_tier_loaded_blocks_total{tier="disk"}'] == stored
        assert (values["forerun_kv_tier_hits_total"], values["forerun_cached_prompt_tokens_total"]) == (1, 16 * stored)


@pytest.mark.parametrize("prefill_only", [True, False])
def test_without_a_folder_nothing_is_counted(prefill_only: bool) -> None:
    with client_of(mini.drafting("ngram"), prefill_only=prefill_only) as client:
        client.post("/v1/completions", json={"model": "mini", "prompt": "Once", "max_tokens": 2})
        assert "forerun_kv_tier" not in client.get("/metrics").text
    assert not ServerSettings(served_names=("m",)).prefill_only
