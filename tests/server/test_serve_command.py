"""`forerun serve`: options, vLLM's --speculative-config, and the real process."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.errors import ConfigError
from forerun.server.logs import JsonFormatter, TextFormatter
from forerun.server.speculative import parse_speculative_config


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2},
         {"drafter": "ngram", "max_draft_tokens": 4, "ngram_max": 5, "ngram_min": 2}),
        ({"method": "ngram", "model": "[ngram]", "prompt_lookup_max": 3},
         {"drafter": "ngram", "ngram_max": 3, "ngram_min": 3}),
        ({"model": "small", "num_speculative_tokens": 3}, {"drafter": "draft", "draft_model": "small",
                                                           "max_draft_tokens": 3}),
        ({"method": "eagle3", "model": "heads", "draft_tensor_parallel_size": 1},
         {"drafter": "eagle", "draft_model": "heads"}),
        ({"method": "mtp", "num_speculative_tokens": 1}, {"drafter": "mtp", "max_draft_tokens": 1}),
        ({"method": "suffix"}, {"drafter": "suffix"}),
    ],
)  # fmt: skip
def test_speculative_config_in_vllms_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert parse_speculative_config(json.dumps(given)) == expected


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"method": "magic"}', '{"method": "ngram", "speed": 9}',
     '{"method": "draft_model", "model": "m", "draft_tensor_parallel_size": 2}'],
)  # fmt: skip
def test_speculative_configs_that_mean_nothing_here(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative-config"):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tool-parser", "gpt"], "tool-parser"),
        (["--log-format", "xml"], "log-format"),
        (["--ssl-certfile", "here.pem"], "ssl-keyfile"),
        (["--api-key-file", "/nowhere/keys"], "API keys"),
        (["--speculative-config", "{"], "JSON"),
        (["--speculative-config", '{"method": "ngram"}', "--drafter", "ngram"], "give one"),
        (["--timeout", "-1"], "timeout_s"),
        (["--port", "70000"], "--port must be from 0 (takes a free one) to 65535; got 70000"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot listen on 203.0.113.7 port 0"),
    ],
)
def test_options_that_contradict(arguments: list[str], says: str) -> None:
    from forerun.cli.app import app

    result = CliRunner().invoke(app, ["serve", "mini", *arguments])
    assert result.exit_code == 2 and says in result.output, result.output


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.app import app

    def loaded(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("forerun.cli.serve.open_llm", loaded)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "mini", "--port", str(port)])
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port" in said


def test_the_real_process_serves_and_stops(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n", "utf-8")
    command = [sys.executable, "-m", "forerun.cli", "serve", "mini", "--port", "0", "--log-format", "json",
               "--max-model-len", "256", "--max-num-seqs", "2", "--api-key-file", str(keys)]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        port = next(int(found[1]) for line in process.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)", line)))
        asked = json.dumps({"prompt": "Once", "max_tokens": 3}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer second", "X-Request-Id": "my-id"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", asked, headers)
        with urllib.request.urlopen(request, timeout=200) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        logged = next(json.loads(line) for line in process.stderr if "my-id" in line)
        assert logged["status"] == 200 and logged["path"] == "/v1/completions" and logged["duration_s"] > 0
    finally:
        process.terminate()
        process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=60) in (0, -15)


def test_log_lines() -> None:
    record = logging.makeLogRecord({"msg": "request", "levelname": "INFO", "request_id": "a", "status": 200, "x": None})
    assert (
        json.loads(JsonFormatter().format(record)).items()
        >= {"event": "request", "request_id": "a", "status": 200}.items()
    )
    assert TextFormatter().format(record).endswith("info request request_id=a status=200")
