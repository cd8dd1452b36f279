"""`forerun run`, `pull`, `list`, `rm` against a hub on this machine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from huggingface_hub import constants

from forerun import LLM
from forerun.cli.options import Drafting
from forerun.models.gguf_export import export_gguf
from forerun.weights import hub_download
from forerun.weights.resolve import EMBEDDED, find_local, resolve_model
from tests.support.fake_hub import LFS_BYTES, FakeHub, pretended

PROMPT = "What is the capital of France?"
SHORT = ("--max-tokens", "12", "--temperature", "0")
CHUNK = constants.DOWNLOAD_CHUNK_SIZE


@pytest.fixture(scope="module")
def mini_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    return export_gguf(resolve_model("mini-draft"), path, "Q8_0").read_bytes()


@pytest.fixture
def hub(mini_gguf: bytes, tmp_path: Path) -> Iterator[FakeHub]:
    folder = resolve_model("mini-draft")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    gguf = {"mini-Q8_0.gguf": mini_gguf, "mini-Q4_K_M.gguf": b"x"}
    with pretended(FakeHub({"org/mini": files, "org/mini-gguf": gguf}), tmp_path / "hub") as fake:
        yield fake


def test_a_model_from_the_hub_to_an_answer_and_away(hub: FakeHub, run: Any, run_json: Any) -> None:
    expected = run_json("generate", "mini-draft", PROMPT, *SHORT, "--drafter", "none")["text"]
    answer = run("run", "org/mini", PROMPT, *SHORT)
    assert answer.stdout == f"{expected}\n"
    assert run("run", "org/mini", *SHORT, stdin=PROMPT).stdout == f"{expected}\n"
    assert run("generate", "org/mini", *SHORT, stdin=PROMPT).stdout == f"{expected}\n"
    drafting = ("--drafter", "draft=org/mini-gguf:Q8_0")
    assert run("generate", "--model", "org/mini", PROMPT, *SHORT, *drafting).stdout == f"{expected}\n"
    pulled = run_json("pull", "org/mini-gguf:Q8_0")
    assert pulled[0]["model"] == "org/mini-gguf:Q8_0" and pulled[0]["path"].endswith("/mini-Q8_0.gguf")
    assert run_json("inspect", "org/mini-gguf:q8_0")["folder"] == pulled[0]["path"]
    assert [model["name"] for model in run_json("list")] == ["org/mini", "org/mini-gguf:Q8_0", *EMBEDDED]
    assert "org/mini-gguf:Q8_0" in run("list").stdout
    assert "is deleted" in run("rm", "org/mini", "org/mini-gguf:Q8_0").stdout
    assert (
        run_json("list")
        == [{"name": name, "kind": "embedded", "num_bytes": None, "last_used": None} for name in EMBEDDED]
        and "no model of the hub was downloaded" in run("list").stderr
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "org/mini-gguf:Q2_K", PROMPT), "org/mini-gguf has no Q2_K, it has Q4_K_M, Q8_0"),
        (("chat", "org/nothing"), "it has no org/nothing, or it is private: then log in with `hf auth login`"),
        (("serve", "org/nothing", "--port", "0"), "it has no org/nothing, or it is private"),
        (("generate", "mini", PROMPT, "--drafter", "draft=org/nothing"), "it has no org/nothing, or it is private"),
        (("pull", "org/closed"), "org/closed is gated: accept its terms at"),
        (("pull", "mini"), "mini is embedded"),
        (("pull", "a b"), "is called ORGANISATION/NAME"),
        (("rm", "org/mini"), "org/mini is not in the cache; `forerun list` says what is"),
        (("run", "mini", PROMPT, "--system", "x"), "--system begins a conversation, but a prompt was given"),
    ],
)
def test_refusals_are_one_line(hub: FakeHub, run: Any, arguments: tuple[str, ...], said: str) -> None:
    hub.repositories["org/closed"], hub.gated = hub.repositories["org/mini"], {"org/closed"}
    result = run(*arguments, status=2)
    assert said in result.stderr and result.stderr.count("error:") == 1


def test_a_draft_model_is_downloaded_in_sight_once_the_options_are_checked(
    hub: FakeHub, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub_download, "RESUMED_BYTES", LFS_BYTES)
    drafting = ("--port", "0", "--draft-model", "org/mini")
    for wrong, said in ((("--speculative-config", '{"method": "ngram"}'), "give one"), (("--port", "70000"), "--port")):
        assert said in run("serve", "mini", *drafting, *wrong, status=2).stderr
    assert hub.requests == []
    assert Drafting(draft_model="org/mini").of("mini")["drafter"] == "draft"
    assert "downloading org/mini, " in capsys.readouterr().err


@pytest.mark.parametrize(
    "drafting", [("--drafter", "draft", "--draft-model", "org/mini"), ("--drafter", "draft=org/mini")]
)
def test_the_demo_downloads_its_draft_model_in_sight(
    hub: FakeHub, run: Any, monkeypatch: pytest.MonkeyPatch, drafting: tuple[str, ...]
) -> None:
    monkeypatch.setattr(hub_download, "RESUMED_BYTES", LFS_BYTES)
    ran = run("demo", "Hi", *drafting, "--max-tokens", "4", "--repeats", "1")
    assert "downloading org/mini, " in ran.stderr and "the same 4 tokens" in ran.stdout


def test_auto_looks_into_a_model_only_once_it_is_here(hub: FakeHub, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong option is told before anything is downloaded, and what is downloaded is told, too."""
    monkeypatch.setattr(hub_download, "RESUMED_BYTES", LFS_BYTES)
    given = ("generate", "org/mini", "Hi", "--drafter", "auto", "--max-tokens", "4")
    assert "int3" in run(*given, "--dtype", "int3", status=2).stderr
    assert hub.requests == []
    assert "downloading org/mini, " in run(*given).stderr


def test_auto_finds_what_a_downloaded_model_offers(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("forerun.drafters.named.has_own", lambda target, spec: asked.append(find_local(target)))
    LLM("org/mini", drafter="auto")
    assert asked[0] is None and asked[-1] is not None


def heed_interrupts() -> None:
    """Shells let what they start in the background ignore Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_while_downloading_and_once_more(hub: FakeHub, tmp_path: Path, run: Any) -> None:
    data = random.Random(0).randbytes(2 * CHUNK + 4000)
    hub.repositories["org/large"] = {"config.json": b"{}", "large-Q8_0.gguf": data}
    hub.hold_after = 2 * CHUNK
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    command = [sys.executable, "-m", "forerun.cli", "pull", "org/large:Q8_0"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    partials = tmp_path / "hub" / "models--org--large" / "blobs"
    while not any(path.stat().st_size >= CHUNK for path in partials.glob("*.incomplete")):
        assert process.poll() is None
        sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in said and "downloading org/large:Q8_0, 0.02 GB" in said
    hub.hold_after = 0
    [path] = [Path(report["path"]) for report in json.loads(run("pull", "org/large:Q8_0", "--json").stdout)]
    assert path.read_bytes() == data
    first, second = hub.ranges("large-Q8_0.gguf")
    assert first == "" and int(second.removeprefix("bytes=").removesuffix("-")) in (CHUNK, 2 * CHUNK)
