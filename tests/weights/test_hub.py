"""Models of a hub: which files a name selects, resumed downloads, refusals, the cache."""

from __future__ import annotations

import json
import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from forerun.errors import ModelError, ModelNotFoundError, ResourceError
from forerun.weights import hub_download
from forerun.weights.hub import HubName, cached_models, choose_files, find_cached, gguf_models, remove_cached
from forerun.weights.hub_download import download
from forerun.weights.resolve import find_local, is_model, resolve_model
from tests.support import fake_hub
from tests.support.fake_hub import FakeHub, pretended

LARGE = random.Random(0).randbytes(200_000)
FOLDER = {
    "config.json": b"{}", "tokenizer.json": b"{ }", "README.md": b"# A model", "model.safetensors": LARGE,
    "original/consolidated.pth": b"x", "pytorch_model.bin": b"y" * 5000,
}  # fmt: skip
GGUF = {"README.md": b"# GGUF", "m-Q4_K_M.gguf": LARGE, "m-Q8_0.gguf": LARGE[::-1], "mmproj-F16.gguf": b"p"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with three repositories, and an empty cache."""
    fake = FakeHub({"org/model": FOLDER, "org/gguf": GGUF, "org/closed": FOLDER, "org/empty": {"README.md": b"x"}})
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(hub_download, "RESUMED_BYTES", 100_000)
    with pretended(fake, tmp_path / "hub"):
        yield fake


def test_names() -> None:
    assert HubName.parse("org/model:Q4_K_M") == HubName("org/model", "Q4_K_M")
    assert HubName.parse("org/model:sub/file-Q8_0.gguf") == HubName("org/model", "sub/file-Q8_0.gguf")
    assert str(HubName("org/model", "Q8_0")) == "org/model:Q8_0" and HubName.parse("gpt2") == HubName("gpt2")
    for text in ("a/b/c", "a b", "", "/a", "a--b/c", "a/b:", "-a", "a/.b", "x" * 97):
        assert HubName.parse(text) is None


def test_a_gguf_model_is_called_by_its_quantization() -> None:
    files = ["a-q4_k_m.gguf", "a.IQ4_XS.gguf", "a-BF16-00001-of-00002.gguf", "a-BF16-00002-of-00002.gguf", "plain.gguf",
             "b-Q8_0.gguf", "UD/b-Q8_0.gguf", "mmproj-Q8_0.gguf"]  # fmt: skip
    assert gguf_models(files) == {
        "UD/b-Q8_0.gguf": ["UD/b-Q8_0.gguf"],
        "BF16": ["a-BF16-00001-of-00002.gguf", "a-BF16-00002-of-00002.gguf"],
        "Q4_K_M": ["a-q4_k_m.gguf"],
        "IQ4_XS": ["a.IQ4_XS.gguf"],
        "b-Q8_0.gguf": ["b-Q8_0.gguf"],
        "plain.gguf": ["plain.gguf"],
    }


def test_unsloths_names_are_found_with_and_without_their_beginning() -> None:
    files = ["m-IQ2_M.gguf", "m-UD-IQ2_M.gguf", "m-UD-Q4_K_XL.GGUF"]
    for name, file in (("iq2_m", 0), ("UD-IQ2_M", 1), ("UD-Q4_K_XL", 2), ("Q4_K_XL", 2)):
        assert choose_files(HubName("o/m", name), files) == [files[file]]


def test_weights_in_folders_are_no_part_of_a_model() -> None:
    top = ["config.json", "model.safetensors"]
    inside = ["checkpoint-500/model.safetensors", "checkpoint-500/model.safetensors.index.json", "onnx/model.onnx"]
    assert choose_files(HubName("o/m"), [*top, *inside]) == top
    pickled = ["config.json", "pytorch_model.bin"]
    assert choose_files(HubName("o/m"), [*pickled, *inside]) == pickled


def test_what_a_name_picks() -> None:
    both = ["config.json", "model.safetensors", "m-Q8_0.gguf"]
    assert choose_files(HubName("o/m"), both) == ["config.json", "model.safetensors"]
    assert choose_files(HubName("o/m", "q8_0"), both) == ["m-Q8_0.gguf"]
    assert choose_files(HubName("o/m"), ["only.gguf"]) == ["only.gguf"]
    assert choose_files(HubName("o/m"), ["m-Q8_0.gguf", "m-Q4_K_M.gguf"]) == ["m-Q4_K_M.gguf"]
    bin_only = ["config.json", "pytorch_model.bin", "training_args.bin", "vocab.txt"]
    assert choose_files(HubName("o/m"), bin_only) == ["config.json", "pytorch_model.bin", "vocab.txt"]


def test_what_a_name_does_not_pick_is_listed() -> None:
    several = ["m-Q8_0.gguf", "m-Q5_K_M.gguf"]
    with pytest.raises(ModelNotFoundError, match="holds several models, it has Q5_K_M, Q8_0: write o/m:Q5_K_M"):
        choose_files(HubName("o/m"), several)
    with pytest.raises(ModelNotFoundError, match=r"o/m has no Q5_KM, it has Q5_K_M, Q8_0.*did you mean Q5_K_M\?"):
        choose_files(HubName("o/m", "Q5_KM"), several)
    with pytest.raises(ModelNotFoundError, match="o/m holds no GGUF files, only config.json"):
        choose_files(HubName("o/m", "Q8_0"), ["config.json", "model.safetensors"])


def test_a_model_is_downloaded_once(hub: FakeHub) -> None:
    folder = resolve_model("org/model")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "README.md",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == LARGE
    num_requests = len(hub.requests)
    assert resolve_model("org/model") == folder and find_local("org/model") == folder and is_model("org/model")
    assert len(hub.requests) == num_requests


def test_a_quantization_picks_its_file(hub: FakeHub) -> None:
    path = resolve_model("org/gguf:q8_0")
    assert path.name == "m-Q8_0.gguf" and path.read_bytes() == LARGE[::-1]
    assert not hub.ranges("m-Q4_K_M.gguf") and find_local("org/gguf:Q4_K_M") is None
    assert resolve_model("org/gguf").name == "m-Q8_0.gguf"  # the only one here is taken before the hub is asked


def test_what_happened_is_told(hub: FakeHub) -> None:
    told: list[tuple[str, int]] = []
    done: list[int] = []

    class Shown:
        def __init__(self, what: str, num_bytes: int) -> None:
            told.append((what, num_bytes))

        def __enter__(self):  # type: ignore[no-untyped-def]
            return done.append

        def __exit__(self, *_: object) -> None: ...

    download(HubName("org/gguf", "Q8_0"), Shown)
    assert told == [("org/gguf:Q8_0", len(LARGE))] and sum(done) == len(LARGE)


def test_a_cut_connection_is_continued(hub: FakeHub) -> None:
    hub.cut_after = 50_000
    assert resolve_model("org/gguf:Q8_0").read_bytes() == LARGE[::-1]
    assert hub.ranges("m-Q8_0.gguf") == ["", "bytes=50000-"]


def test_a_download_goes_on_where_an_earlier_one_ended(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    hub.cut_after = 50_000
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("huggingface_hub.file_download.time.sleep", stopped)  # before the next try
        resolve_model("org/model")
    assert [(model.name, model.kind) for model in cached_models()] == [("org/model", "incomplete")]
    assert find_local("org/model") is None
    folder = resolve_model("org/model")
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert hub.ranges("model.safetensors") == ["", "bytes=50000-"] and len(hub.ranges("config.json")) == 1


def test_a_damaged_beginning_is_not_kept(hub: FakeHub) -> None:
    blob = next(Path(resolve_model("org/gguf:Q8_0").parent.parent.parent, "blobs").glob("?" * 64))
    remove_cached(HubName("org/gguf"))
    blob.parent.mkdir(parents=True)
    partial = blob.with_name(f"{blob.name}.incomplete")
    partial.write_bytes(b"0" * 60_000)
    with pytest.raises(ModelError, match="came damaged, its beginning from an earlier download: download it again"):
        resolve_model("org/gguf:Q8_0")
    assert not partial.exists() and resolve_model("org/gguf:Q8_0").read_bytes() == LARGE[::-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "org/nothing",
            r"there is no model 'org/nothing'; tried .* \(it has no org/nothing, or it is private",
        ),
        ("org/empty", "org/empty holds no weights, only README.md"),
        ("org/gguf:Q2_K", "org/gguf has no Q2_K, it has Q4_K_M, Q8_0"),
    ],
)
def test_what_is_not_there(hub: FakeHub, name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        resolve_model(name)


def test_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.token = {"org/closed"}, "hf_open"
    with pytest.raises(ModelError, match="org/closed is gated: accept its terms at .*/org/closed, then log in with"):
        resolve_model("org/closed")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ModelError, match=r"org/closed is gated.*the hub answered 403"):
        resolve_model("org/closed")
    monkeypatch.setenv("HF_TOKEN", "hf_open")
    assert resolve_model("org/closed").is_dir()


def test_a_hub_that_is_away(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_model("org/model")
    (folder / "tokenizer.json").unlink()  # as in the folder of a draft head, so that the hub is asked again
    hub.broken = 503
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    assert resolve_model("org/model") == folder
    with pytest.raises(ModelNotFoundError, match=r"it answered 503 for org/other: try again later"):
        resolve_model("org/other")


def test_a_disk_without_room(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**6, 10**6, 1000))
    with pytest.raises(ResourceError, match=r"org/gguf:Q8_0 needs 0.0 GB in .*: remove models with `forerun rm`"):
        resolve_model("org/gguf:Q8_0")
    assert not hub.ranges("m-Q8_0.gguf")


def test_a_disk_that_is_full_meanwhile(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(ResourceError, match="the disk is full: .* `forerun pull org/gguf:Q8_0` then resumes"):
        resolve_model("org/gguf:Q8_0")


def test_the_cache_is_listed_and_emptied(hub: FakeHub) -> None:
    for name in ("org/model", "org/gguf:Q8_0", "org/gguf:Q4_K_M"):
        resolve_model(name)
    assert [(model.name, model.kind, model.num_bytes > 190_000) for model in cached_models()] == [
        ("org/gguf:Q4_K_M", "gguf", True), ("org/gguf:Q8_0", "gguf", True), ("org/model", "safetensors", True),
    ]  # fmt: skip
    assert remove_cached(HubName("org/gguf", "Q8_0")) == len(LARGE)
    assert find_cached(HubName("org/gguf", "Q8_0")) is None and find_cached(HubName("org/gguf", "Q4_K_M")) is not None
    assert remove_cached(HubName("org/gguf", "Q4_K_M")) >= len(LARGE) and remove_cached(HubName("org/model")) >= len(
        LARGE
    )
    assert cached_models() == []
    with pytest.raises(ModelNotFoundError, match="org/model is not in the cache"):
        remove_cached(HubName("org/model"))


def test_a_link_out_of_the_cache_is_removed_and_not_what_it_leads_to(hub: FakeHub, tmp_path: Path) -> None:
    own = tmp_path / "own-Q2_K.gguf"
    own.write_bytes(b"mine")
    link = resolve_model("org/gguf:Q8_0").with_name("own-Q2_K.gguf")
    link.symlink_to(own)
    remove_cached(HubName("org/gguf", "Q2_K"))
    assert own.read_bytes() == b"mine" and not link.is_symlink()


def test_a_digest_is_no_path(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub").mkdir()
    named = fake_hub.etag
    monkeypatch.setattr(fake_hub, "etag", lambda data: "../../../stolen" if data == LARGE else named(data))
    with pytest.raises(ModelError, match=r"'../../../stolen', which is no digest: nothing is written"):
        resolve_model("org/gguf:Q4_K_M")
    assert not list(tmp_path.glob("stolen*"))


@pytest.mark.parametrize("index", [{"weight_map": {"a": ["b"]}}, {"weight_map": {"a": 5}}, [], {"weight_map": []}])
def test_a_damaged_index_in_the_cache_is_an_incomplete_model(hub: FakeHub, index: object) -> None:
    folder = resolve_model("org/model")
    assert find_cached(HubName("org/model")) == folder
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_cached(HubName("org/model")) is None
