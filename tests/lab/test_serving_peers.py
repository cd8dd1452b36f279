"""The comparison of servers: what all engines are asked, what is missing, the table. No server is run here."""

from __future__ import annotations

import argparse
from typing import Any

import serving_peers


def asked(**given: Any) -> argparse.Namespace:
    usual = {"shape": "qwen2.5-0.5b", "concurrency": 4, "num_requests": 8, "num_alone": 2, "input_len": 16,
             "max_tokens": 32, "llama_server": None, "threads": 2}  # fmt: skip
    return argparse.Namespace(**{**usual, **given})


def test_all_engines_get_the_same_prompts_and_none_twice() -> None:
    loads = serving_peers.loads(asked())
    assert {name: (len(some), at_once) for name, (some, at_once) in loads.items()} == {
        "warm-up": (4, 4), "alone": (2, 1), "together": (8, 4),
    }  # fmt: skip
    everything = [prompt.ids for some, _ in loads.values() for prompt in some]
    assert len(set(everything)) == 14 and all(len(ids) == 16 for ids in everything)
    assert loads == serving_peers.loads(asked())
    ask = loads["alone"][0][0].ask([], {"max_tokens": 3})
    assert ask.path == "/completions" and ask.body == {"prompt": list(everything[4]), "max_tokens": 3}


def test_what_is_missing_is_said() -> None:
    assert serving_peers.missing("forerun", asked(), "Q8_0") is None
    assert "--llama-server" in serving_peers.missing("llama-server", asked(), "Q8_0")
    assert "Q2_K" in serving_peers.missing("openvino", asked(), "Q2_K")


def test_the_table() -> None:
    own = {"tokens_per_s": 30.0, "ttft_p50_ms": 5.0, "tpot_p50_ms": 20.0, "tpot_p99_ms": 30.0}
    run = {
        "forerun": {"alone": own, "together": {**own, "tokens_per_s": 150.0}},
        "openvino": {"alone": {"tokens_per_s": 20.0}, "together": {"tokens_per_s": 100.0}},
        "llama-server": {"left_out": "no program"},
    }
    rows = serving_peers.table(run).splitlines()[2:]
    assert rows[0] == "| forerun | 30.0 | 150.0 | 5.00 | 5.0 | 20.0 | 30.0 | 1.00x |"
    assert rows[1] == "| openvino | 20.0 | 100.0 | 5.00 | - | - | - | 1.50x |"
    assert "left out: no program" in rows[2]
