"""`forerun serve`: options, vLLM's --speculative-config, and the real process."""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.errors import ConfigError
from forerun.server.logs import JsonFormatter, TextFormatter
from forerun.server.speculative import parse_speculative_config
from tests.server.conftest import settings
from tests.support.serving import serving


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
    with pytest.raises(ConfigError, match="speculative_config"):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("given", "name"),
    [("/models/deep/tiny.Q4_K_M.gguf", "tiny.Q4_K_M.gguf"), ("mini", "mini"), ("org/name", "org/name")],
)
def test_a_gguf_file_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch, given: str, name: str) -> None:
    from forerun.cli import serve
    from forerun.cli.app import app

    served: list[tuple[str, ...]] = []
    monkeypatch.setattr(serve, "open_llm", lambda *_, **__: None)
    monkeypatch.setattr(serve, "_run", lambda llm, settings, listen: served.append(settings.served_names))
    result = CliRunner().invoke(app, ["serve", given, "--port", "0"])
    assert served == [(name,)], result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tool-parser", "gpt"], "error: --tool-parser must be one of auto,"),
        (["--unknown-fields", "drop"], "error: --unknown-fields must be refuse or ignore"),
        (["--log-format", "xml"], "error: --log-format must be one of"),
        (["--log-level", "loud"], "error: --log-level must be one of debug, info, warning, error; got 'loud'"),
        (["--allowed-origins", "page.example"], "an allowed origin must be"),
        (["--allowed-hosts", "http://box"], "an allowed host must be"),
        (["--ssl-certfile", "here.pem"], "ssl-keyfile"),
        (["--api-key-file", "/nowhere/keys"], "API keys"),
        (["--speculative-config", "{"], "error: --speculative-config is not JSON"),
        (["--speculative-config", '{"method": "ngram", "draft_model": ""}'], "config: 'draft_model' not supported"),
        (["--speculative-config", '{"method": "ngram"}', "--drafter", "ngram"], "give one"),
        (["--timeout", "-1"], "error: --timeout must be above 0"),
        (["--port", "70000"], "--port must be from 0 (takes a free one) to 65535; got 70000"),
        (["--host", "203.0.113.7", "--port", "0"], "cannot listen on 203.0.113.7 port 0"),
    ],
)
def test_options_that_contradict(arguments: list[str], says: str) -> None:
    from forerun.cli.app import app

    result = CliRunner().invoke(app, ["serve", "mini", "--port", "0", *arguments])
    assert result.exit_code == 2 and says in result.output, result.output


def test_keys_from_windows_are_the_same_keys(tmp_path: Path) -> None:
    from forerun.cli.serve import _read_keys

    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")
    assert _read_keys(tmp_path / "keys") == ["first", "second"]


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


def test_a_certificate_that_is_none_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli.app import app

    monkeypatch.setattr("forerun.cli.serve.open_llm", lambda *_, **__: pytest.fail("the model was loaded"))
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no PEM", "utf-8")
    options = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    result = CliRunner().invoke(app, ["serve", "mini", "--port", "0", *options])
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and f"--ssl-certfile {options[1]} and --ssl-keyfile {options[3]} are no" in said, said


def ask(address: str, headers: dict[str, str], **fields: Any) -> Any:
    data = json.dumps({"prompt": "Once", **fields}).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{address}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=200)


def test_the_real_process_serves_and_says_what(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n", "utf-8")
    options = ["--max-model-len", "256", "--max-num-seqs", "2", "--api-key-file", str(keys), "--drafter", "ngram",
               "--max-queue", "7"]  # fmt: skip
    with serving(*options) as (process, address, logged):
        events = {entry["event"]: entry for entry in logged}
        assert (events["model"]["source"], events["model"]["drafter"]) == ("mini", "ngram")
        limits = events["limits"]
        assert (limits["max_model_len"], limits["max_num_seqs"], limits["max_queue"]) == (256, 2, 7)
        assert limits["api_keys"] == 2
        with urllib.request.urlopen(events["listening"]["playground"], timeout=60) as page:
            assert b"<html" in page.read()
        with ask(address, {"Authorization": "Bearer second", "X-Request-Id": "my-id"}, max_tokens=3) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
        assert process.stderr is not None
        line = next(json.loads(line) for line in process.stderr if "my-id" in line)
        assert line["status"] == 200 and line["path"] == "/v1/completions" and line["duration_s"] > 0


def test_a_stop_lets_requests_end_and_then_ends_them() -> None:
    """Streams get an error event and their end mark, others a body that says so; the log holds no traceback."""
    options = ["--drafter", "none", "--drain-seconds", "0.5", "--max-num-seqs", "16"]
    with serving(*options) as (process, address, _), ThreadPoolExecutor(2) as pool:
        long: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "n": 7}
        stream = ask(address, {}, stream=True, **long)
        first = stream.readline()
        whole = pool.submit(ask, address, {}, **long)
        with ask(address, {}, max_tokens=1):  # the one before it has begun by now
            pass
        process.terminate()
        events = [line for line in [first, *stream] if line.strip()]
        assert len(events) > 2 and events[-1] == b"data: [DONE]\n"
        assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        with pytest.raises(urllib.error.HTTPError) as caught:
            whole.result()
        assert caught.value.code == 503 and json.load(caught.value)["error"]["code"] == "shutting_down"
        assert process.stderr is not None
        said = process.stderr.read()
        assert "stopping" in said and "Traceback" not in said and '"level": "error"' not in said, said
        assert '"level": "warning"' not in said, said


def test_a_stop_ends_other_ranks_and_waits_for_a_folder_that_hangs_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the threads that write blocks of KV do not end, `leave` does; uvicorn raises the signal at its end."""
    from forerun.cli import serve
    from forerun.runtime.parallel import crew, start

    done: list[Any] = []

    def leave(limit_s: float) -> None:
        done.append(limit_s)
        sys.exit(0)

    server = SimpleNamespace(run=lambda: signal.raise_signal(signal.SIGTERM), lost=None)
    monkeypatch.setattr("forerun.server.app.create_app", lambda llm, settings: None)
    monkeypatch.setattr("forerun.server.run.Server", lambda app: server)
    monkeypatch.setattr(start, "leave", leave)
    llm: Any = SimpleNamespace(close=lambda: done.append("closed"))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        serve._run(llm, settings(), {})
    assert done == ["closed", crew.FLUSH_LIMIT_S] and signal.getsignal(signal.SIGTERM) == before


def test_a_server_that_is_interrupted_at_once_raises_no_alarm() -> None:
    """Its grammar compiler is still starting then. Its key comes from the environment here."""
    options = ["--max-model-len", "64", "--max-num-seqs", "1", "--drafter", "none"]
    with serving(*options, FORERUN_API_KEY="from outside") as (process, _, logged):
        assert next(entry for entry in logged if entry["event"] == "limits")["api_keys"] == 1
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert "structured output" not in said and "Traceback" not in said and "leaked" not in said, said
        assert process.wait(timeout=60) == 0


def test_an_empty_key_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.cli.app import app

    monkeypatch.setenv("FORERUN_API_KEY", " ")
    result = CliRunner().invoke(app, ["serve", "mini"])
    assert result.exit_code == 2 and "FORERUN_API_KEY is set but empty" in result.output


def test_log_lines() -> None:
    fields = {"msg": "request", "levelname": "INFO", "request_id": "a", "status": 200, "x": None, "_ray": "Ray's own"}
    record = logging.makeLogRecord(fields)
    assert (
        json.loads(JsonFormatter().format(record)).items()
        >= {"event": "request", "request_id": "a", "status": 200}.items()
    )
    assert TextFormatter().format(record).endswith("info request request_id=a status=200")
