"""The file that `forerun deploy` reads: what is in it is checked before anything starts."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import yaml

pytest.importorskip("fastapi", reason="the extra 'server' is not installed")

from forerun.drafters.named import whole_paths
from forerun.errors import ConfigError
from forerun.replicas.deployment import Deployment, read_deployment

FULL = """
model: mini
name: story
replicas: 3
resources: {num_cpus: 2, threads: 1}
drafter: draft
draft_model: mini-draft
engine: {max_num_seqs: 8, max_draft_tokens: 3, seed: 4}
server: {max_queue: 5, tool_parser: none}
api_keys: [secret]
http: {port: 9000, allowed_hosts: [example.com]}
health: {stuck_s: 20}
"""

KEPT = {"kv_disk": "kv", "kv_disk_gib": 1.0}


def read(tmp_path: Path, text: str) -> Deployment:
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    return read_deployment(path)


def test_options_reach_the_engine_and_the_server(tmp_path: Path) -> None:
    deployment = read(tmp_path, FULL)
    config, settings = deployment.engine_config(), deployment.settings()
    assert (config.max_num_seqs, config.seed, config.threads) == (8, 4, 1)
    assert (config.drafter.name, config.drafter.model, config.drafter.max_draft_tokens) == ("draft", "mini-draft", 3)
    assert (settings.served_names, settings.api_keys, settings.max_queue) == (("story",), ("secret",), 5)
    assert (
        "example.com" in settings.allowed_hosts and "localhost" in settings.allowed_hosts and deployment.replicas == 3
    )
    usual = read(tmp_path, "model: mini\nresources: {num_cpus: 1.5}").engine_config()
    assert usual.threads == 1 and usual.drafter.name == "draft"  # as `forerun serve` has it


def test_a_models_folder_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read(tmp_path, "model: small").engine_config().model == str(tmp_path / "small")
    drafter = read(tmp_path, "model: mini\ndrafter: draft=small").engine_config().drafter
    assert drafter.model == str(tmp_path / "small")
    (tmp_path / "mini-draft").mkdir()  # a name that stands for what is shipped, wherever one is
    members = read(tmp_path, "model: mini\ndrafter: portfolio=suffix=words+draft=mini-draft").engine_config().drafter
    assert [member.corpus or member.model for member in members.members] == ["words", "mini-draft"]
    (tmp_path / "words").touch()
    members = read(tmp_path, "model: mini\ndrafter: portfolio=suffix=words+draft=small").engine_config().drafter
    assert [member.corpus or member.model for member in members.members] == [
        str(tmp_path / "words"), str(tmp_path / "small"),
    ]  # fmt: skip


def test_options_of_this_machine_are_sent_by_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "mine.py").touch()
    found = whole_paths({"drafter": "mine.py:Mine", "corpus": "~/mine.py", "kv_disk": "~/kv", "lora": {"a": "mine.py"}})
    mine = str(tmp_path / "mine.py")
    assert found == {"drafter": f"{mine}:Mine", "corpus": mine, "kv_disk": str(tmp_path / "kv"), "lora": {"a": mine}}
    kept = {"model": "org/name", "generation_config": "none", "draft_model": None, "drafter": "ngram", "seed": 3}
    assert whole_paths(kept) == kept


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"replica": 3}, "there is no field replica; there are model, name, .*did you mean replicas"),
        ({"http": {"prot": 1}}, "no field http.prot; there are host, port.*did you mean port"),
        ({"autoscaling": {"max_replicas": 2, "min": 1}}, "no field autoscaling.min"),
        ({"engine": {"max_num_seq": 1}}, r"unknown option max_num_seq; did you mean max_num_seqs"),
        ({"server": {"in_batch": True}}, "there is no field server.in_batch"),
        ({"engine": {"max_num_seqs": 0}}, "max_num_seqs must be a whole number from 1"),
        ({"server": {"max_que": 1}}, "no field server.max_que; .*did you mean max_queue"),
        ({"engine": {"drafter": "ngram"}}, "engine.drafter: drafter stands beside engine"),
        ({"engine": {"draft_model": "mini-draft"}}, "engine.draft_model: draft_model stands beside engine"),
        (
            {"replicas": 2, "engine": {"pin_threads": True}},
            "engine.pin_threads: replicas of one machine would all stay on its first",
        ),
        ({"server": {"max_queue": "many"}}, "server.max_queue: .*integer; got 'many'"),
        ({"server": {"warm_grammars": "no"}}, "server.warm_grammars: .*boolean; got 'no'"),
        ({"server": {"timeout_s": [1]}}, "server.timeout_s: .*number"),
        ({"server": {"api_keys": ["a"]}}, "no field server.api_keys"),
        ({"drafter": "nobody"}, "nobody"),
        ({"replicas": 0}, "replicas: .*greater than or equal to 1; got 0"),
        ({"replicas": 2, "autoscaling": {"max_replicas": 2}}, "replicas and autoscaling both"),
        ({"engine": {"verification": "rejection"}}, "verification must be coupled"),
        ({"http": {"port": 70000}}, "http.port"),
        ({"prefill": {}}, "prefill needs engine.kv_disk, a folder that all nodes reach"),
        ({"prefill": {}, "engine": {"kv_disk": "kv"}}, "prefill needs engine.kv_disk_gib, how much"),
        ({"prefill": {"replicas": 0}, "engine": KEPT}, "prefill.replicas: .*greater than or equal to 1; got 0"),
        ({"prefill": {"min_token": 9}, "engine": KEPT}, "no field prefill.min_token; .*did you mean min_tokens"),
        (
            {"prefill": {"resources": {"gpus": 1}}, "engine": KEPT},
            "no field prefill.resources.gpus; .*num_gpus",
        ),
        ({"prefill": {"resources": {"num_gpus": 1}}, "engine": KEPT}, "must both have GPUs, or neither"),
        ({"prefill": {}, "engine": {**KEPT, "prefix_caching": False}}, "prefix_caching is off: turn it on"),
        ({"server": {"batch_dir": 5}}, "server.batch_dir: .*; got 5"),
        ({"server": {"max_batch_bytes": 0}}, "max_batch_bytes must be above 0"),
        ({"server": {"prefill_only": True}}, "no field server.prefill_only"),
        ({"model": None}, "model"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changed: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=f"deploy.yaml: .*{told}"):
        read(tmp_path, yaml.safe_dump({"model": "mini", **changed}))


@pytest.mark.parametrize(
    "keys",
    ["hidden", "[[hidden]]", "{hidden: 1}", "[hidden", "*hidden", "!hidden x", '["hidden", 5]', '["hidden", ""]'],
)
def test_keys_are_never_printed(tmp_path: Path, keys: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, f"model: mini\napi_keys: {keys}\n")
    assert "deploy.yaml" in str(raised.value)
    assert "hidden" not in "".join(traceback.format_exception(raised.value))
    assert "hidden" not in repr(read(tmp_path, "model: mini\napi_keys: [hidden]"))


def test_files_of_this_machine_are_found_by_replicas_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "draft", "adapter"):
        (tmp_path / name).mkdir()
    text = "model: model\ndrafter: draft\ndraft_model: draft\nengine: {lora: {a: adapter, b: of/hub}, kv_disk: kv}"
    text += "\nserver: {batch_dir: batches, max_batch_bytes: 99}"
    deployment = read(tmp_path, text)
    monkeypatch.chdir("/")
    config = deployment.engine_config()
    assert (config.model, config.drafter.model) == (str(tmp_path / "model"), str(tmp_path / "draft"))
    assert config.lora == {"a": str(tmp_path / "adapter"), "b": "of/hub"} and config.kv_disk == str(tmp_path / "kv")
    kept = deployment.settings()
    assert kept.served_names == ("model",)
    assert (kept.batch_dir, kept.max_batch_bytes) == (tmp_path / "batches", 99)


def test_what_a_cluster_must_have(tmp_path: Path) -> None:
    text = "model: mini\nresources: {num_cpus: 2, num_gpus: 1}\nhttp: {ingresses: 2, num_cpus: 0.5}\n"
    assert read(tmp_path, text + "replicas: 3").needed() == {"CPU": 7.0, "GPU": 3.0}
    assert read(tmp_path, text + "autoscaling: {min_replicas: 2, max_replicas: 9}").needed() == {"CPU": 5.0, "GPU": 2.0}
    apart = text + "replicas: 3\nprefill: {replicas: 2, resources: {num_cpus: 1.5, num_gpus: 1}}\n"
    kept = read(tmp_path, apart + "engine: {kv_disk: kv, kv_disk_gib: 1}")
    assert kept.needed() == {"CPU": 10.0, "GPU": 5.0}
    assert kept.reading().engine_config().threads == 1 and kept.engine_config().threads == 2


@pytest.mark.parametrize("text", ["", "- model", "model: [", "replicas: 2"])
def test_files_that_are_no_deployment(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"deploy\.yaml"):
        read(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot read"):
        read_deployment(tmp_path / "nothing.yaml")


def test_links_stay_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of the hub are links to files without an ending, and a link may lead elsewhere on another machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blob").touch()
    (tmp_path / "m.gguf").symlink_to(tmp_path / "blob")
    assert whole_paths({"model": "m.gguf", "drafter": "draft=m.gguf"}) == {
        "model": str(tmp_path / "m.gguf"), "drafter": f"draft={tmp_path / 'm.gguf'}",
    }  # fmt: skip
    (tmp_path / "c++" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "c++")
    with pytest.raises(ConfigError, match="between the members of a portfolio"):
        whole_paths({"drafter": "portfolio=suffix+draft=small"})
