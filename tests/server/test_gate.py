"""What requests pass before their endpoint: keys, the names of the server, other sites' pages, lines in the log."""

from __future__ import annotations

import json
import logging
from itertools import product
from typing import Any

import pytest
from fastapi.testclient import TestClient

from forerun import LLM
from forerun.errors import ConfigError
from forerun.server.logs import JsonFormatter, TextFormatter
from forerun.server.settings import names_of
from tests.server.conftest import client_of, settings

PAGE = "https://page.example"
ASKING = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def test_keys_beyond_ascii_match(llm: LLM) -> None:
    keys = ("plain", "Schlüssel", "ключ", "tête à")
    with client_of(llm, api_keys=keys) as client:
        for key, encoding in product(keys, ("utf-8", "latin-1")):
            header = b"Bearer " + key.encode(encoding, "replace")
            can = key.encode(encoding, "ignore").decode(encoding) == key
            answer = client.get("/v1/models", headers=[(b"Authorization", header)])
            assert answer.status_code == (200 if can else 401), (key, encoding)
            wrong = client.get("/v1/models", headers=[(b"Authorization", header[:-1])])
            assert wrong.status_code == 401 and "not one of the server's" in wrong.text
        assert "an API key is needed" in client.get("/v1/models").text


def test_keys_and_salts_share_no_prefixes(llm: LLM) -> None:
    prompt = "One of many sentences of a long text that both ask about. " * 6

    def cached(key: str, pad: int = 0, **fields: Any) -> int:
        body = json.dumps({"prompt": prompt, "max_tokens": 1, **fields}) + " " * pad
        headers = {"x-api-key": key, "Content-Type": "application/json"}
        answer = client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["forerun"]["cached_prompt_tokens"])

    with client_of(llm, api_keys=("one", "two")) as client:
        for key, fields in (("one", {}), ("two", {}), ("one", {"cache_salt": "x"}), ("two", {"cache_salt": "x"})):
            assert cached(key, **fields) == 0 and cached(key, **fields) > 16, (key, fields)
            assert cached(key, 70 << 10, **fields) > 16, "large bodies are turned into requests by other threads"
        assert cached("one", 70 << 10, cache_salt="y") == 0
        for salt in ("", "x" * 257):
            headers = {"x-api-key": "one"}
            answer = client.post("/v1/completions", json={"prompt": "a", "cache_salt": salt}, headers=headers)
            assert answer.status_code == 400 and "1 to 256 characters" in answer.text
    with client_of(llm, api_keys=("only",)) as client:
        assert cached("only", cache_salt="x") == 0 and cached("only", cache_salt="x") > 16
    with client_of(llm, api_keys=("another",)) as client:
        assert cached("another", cache_salt="x") > 16, "one key is no tenant among others"


def test_names_the_server_does_not_go_by(llm: LLM) -> None:
    own = ("localhost:8000", "LOCALHOST", "127.0.0.1:99", "[::1]:8000", "localhost.", "a.inside.example:1")
    others = ("evil.example:8000", "inside.example", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]")
    with client_of(llm, allowed_hosts=("localhost", "127.0.0.1", "::1", "*.inside.example")) as client:
        for host in (*own, *others):
            assert client.get("/health", headers={"Host": host}).status_code == 200  # load balancers ask by address
            for path in ("/", "/v1/models"):
                answer = client.get(path, headers={"Host": host})
                assert answer.status_code == (200 if host in own else 403), host
            if host in others:
                assert answer.json()["error"]["code"] == "unknown_host" and "--allowed-hosts" in answer.text


@pytest.mark.parametrize(
    ("host", "given", "has_keys", "allowed"),
    [
        ("127.0.0.1", None, False, ("localhost", "127.0.0.1", "::1")),
        ("127.0.0.2", None, False, ("localhost", "127.0.0.1", "::1", "127.0.0.2")),
        ("127.0.0.1", ["box.lan"], True, ("localhost", "127.0.0.1", "::1", "box.lan")),
        ("127.0.0.1", None, True, ()),  # whoever has no key gets nothing by any name
        ("0.0.0.0", None, False, ()),  # nobody knows its names
        ("0.0.0.0", ["box.lan"], False, ("box.lan",)),
    ],
)
def test_names_a_server_goes_by_unless_told(host: str, given: Any, has_keys: bool, allowed: tuple[str, ...]) -> None:
    assert names_of(host, given or (), has_keys) == allowed


def test_pages_of_other_sites_are_let_in_by_name(llm: LLM) -> None:
    with client_of(llm, allowed_origins=(PAGE,), api_keys=("key",)) as client:
        answer = client.options("/v1/chat/completions", headers=ASKING)  # without a key, as browsers ask
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == ASKING["Access-Control-Request-Headers"]
        other = client.options("/v1/chat/completions", headers={**ASKING, "Origin": "https://other.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        near = client.options("/v1/models", headers={**ASKING, "Access-Control-Request-Private-Network": "true"})
        assert near.headers["access-control-allow-private-network"] == "true"
        for headers, status in (({"Authorization": "Bearer key"}, 200), ({}, 401)):
            asked = client.get("/v1/models", headers={"Origin": PAGE, **headers})
            assert asked.status_code == status and asked.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in asked.headers["access-control-expose-headers"]
        assert "access-control-allow-origin" not in client.get("/health").headers
    with client_of(llm, allowed_origins=("*",)) as client:
        assert client.options("/v1/models", headers=ASKING).headers["access-control-allow-origin"] == "*"


def test_no_page_of_another_site_is_let_in_unless_told(client: TestClient) -> None:
    assert client.options("/v1/chat/completions", headers=ASKING).status_code == 405
    assert "access-control-allow-origin" not in client.get("/health", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize("option", [
    {"allowed_origins": ("page.example",)}, {"allowed_origins": ("https://page.example/",)},
    {"allowed_origins": ('["*"]',)}, {"allowed_hosts": ("http://a",)}, {"allowed_hosts": ("a:80",)},
    {"allowed_hosts": ("[::1]",)}, {"allowed_hosts": ("a*",)}, {"drain_s": -1.0}, {"max_connections": 0},
])  # fmt: skip
def test_settings_that_mean_nothing(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        settings(**option)
    settings(
        allowed_origins=("null", "chrome-extension://abc", "http://localhost:3000"), allowed_hosts=("*", "fe80::1")
    )


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
@pytest.mark.parametrize("body", [b'{"prompt": "my secret"}', b'"my secret"', b'["my secret"]'])
def test_a_body_that_was_not_read_is_not_repeated(client: TestClient, headers: dict[str, str], body: bytes) -> None:
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400 and "secret" not in answer.text
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_path_cannot_write_lines_of_the_log(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "forerun.server"):
        client.get("/x%0A12:00:00 info request status=200%1B[2J%C2%85y")
    record = next(record for record in caplog.records if record.getMessage() == "request")
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(record)
        assert line.isprintable() and "\\n12:00:00" in line and line.isascii()
    assert " status=404" in TextFormatter().format(record) and ' path="/x\\n' in TextFormatter().format(record)
    assert json.loads(JsonFormatter().format(record))["path"] == "/x\n12:00:00 info request status=200\x1b[2J\x85y"


def test_health_checks_that_go_well_are_not_logged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "forerun.server"):
        client.get("/health")
        client.post("/health")
        client.get("/v1/models")
    logged = [(record.__dict__["path"], record.__dict__["status"]) for record in caplog.records]
    assert logged == [("/health", 405), ("/v1/models", 200)]
