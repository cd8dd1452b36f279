"""Downloading a model of a Hugging Face hub into the cache; interrupted downloads are resumed.

Knows: huggingface_hub, how it fails. Does not know: names on the command line, terminals.

Weights are downloaded here, file by file, because huggingface_hub restarts a file in every process; all else,
including the layout of the cache, is left to it.
"""

from __future__ import annotations

import errno
import glob
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from filelock import FileLock

from forerun.errors import ForerunError, ModelError, ModelNotFoundError, ResourceError
from forerun.weights.hub import HubName, choose_files, find_cached
from forerun.weights.identity import hash_of_file

Progress = Callable[
    [str, int], AbstractContextManager[Callable[[int], None]]
]  # (what, bytes) -> a function that is told bytes done

RESUMED_BYTES = 8 << 20  # files of at least this size are resumed; smaller ones take a moment
LARGEST_BYTES = 50 * 10**9  # the hub serves larger files only by a protocol that huggingface_hub implements
NUM_CONNECTIONS = 4
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class NoRepositoryError(ModelNotFoundError):
    """The hub knows no repository of this name, or cannot be reached."""


class _Interrupted(Exception):
    """Ends the other threads of a download once one has failed."""


def download(name: HubName, progress: Progress | None = None) -> Path:
    """Bring the hub's latest revision of a model into the cache -> its folder, or its GGUF file.

    progress(what, bytes) is entered once and told of bytes as they arrive; without it huggingface_hub shows its own
    bars. If the hub cannot be reached, a cached copy is used. Raises NoRepositoryError, ModelNotFoundError for a
    repository without such a model, ModelError if the hub refuses access, ResourceError for a full disk.
    """
    try:
        with _explained(name):
            return _download(name, progress)
    except NoRepositoryError:
        cached = find_cached(name, complete=False)
        if cached is None:
            raise
        return cached


def _download(name: HubName, progress: Progress | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    found = HfApi().model_info(name.repository, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    files = choose_files(name, sizes)
    large = [file for file in files if RESUMED_BYTES <= sizes[file] <= LARGEST_BYTES]
    small = [glob.escape(file) for file in files if file not in large]
    bars: dict[str, Any] = {} if progress is None else {"tqdm_class": _bar(lambda num: None, is_shown=False)}
    folder = Path(snapshot_download(name.repository, allow_patterns=[*small, "README.md"], **bars))
    _Weights(name, folder, {file: sizes[file] for file in large}).fetch(progress)
    wanted = [glob.escape(file) for file in files]
    snapshot_download(name.repository, revision=folder.name, allow_patterns=wanted, **bars)
    return folder / files[0] if files[0].lower().endswith(".gguf") else folder


class _Weights:
    """The large files of one revision."""

    def __init__(self, name: HubName, folder: Path, sizes: Mapping[str, int]) -> None:
        """`folder` is the snapshot they belong to, `sizes` are their bytes."""
        self._name = name
        self._revision = folder.name
        self._storage = folder.parent.parent
        self._sizes = {file: size for file, size in sizes.items() if not (folder / file).exists()}
        self._stopped = threading.Event()

    def fetch(self, progress: Progress | None) -> None:
        """Download what is missing. Raises ResourceError beforehand if it does not fit on the disk."""
        total = sum(self._sizes.values())
        self._check_room(total)
        if not total:
            return
        with nullcontext(lambda num: None) if progress is None else progress(str(self._name), total) as advance:
            bar = _bar(self._told(advance), is_shown=progress is None)
            results: SimpleQueue[BaseException | None] = SimpleQueue()
            files = iter(list(self._sizes))
            try:
                for _ in range(min(NUM_CONNECTIONS, len(self._sizes))):
                    threading.Thread(target=self._work, args=(files, bar, results), daemon=True).start()
                for _ in self._sizes:
                    if (error := results.get()) is not None:
                        raise error
            finally:
                self._stopped.set()

    def _work(self, files: Iterator[str], bar: Any, results: SimpleQueue[BaseException | None]) -> None:
        """The loop of a download thread: a daemon, since waiting for a silent server must not keep a process alive."""
        for file in files:
            try:
                self._fetch(file, bar)
            except BaseException as error:
                results.put(error)
                return
            results.put(None)

    def _check_room(self, total: int) -> None:
        free = shutil.disk_usage(self._storage).free
        begun = sum(path.stat().st_size for path in (self._storage / "blobs").glob("*.incomplete"))
        if total - begun > free:
            raise ResourceError(
                f"{self._name} needs {total / 1e9:.1f} GB in {self._storage.parent}, where {free / 1e9:.1f} GB are "
                "free: remove models with `forerun rm`, or set HF_HOME to another disk"
            )

    def _told(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """What a download thread calls with the bytes received; it ends the thread once another one has failed."""

        def told(num: int) -> None:
            if self._stopped.is_set():
                raise _Interrupted
            advance(num)

        return told

    def _fetch(self, file: str, bar: Any) -> None:
        """Download one file into the cache's blobs, under huggingface_hub's own lock for it."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._name.repository, file, revision=self._revision)
        about = get_hf_file_metadata(url)
        if about.etag is None or about.size is None:
            return  # huggingface_hub will report what is wrong
        if Path(about.etag).name != about.etag:  # it becomes the name of a file
            raise ModelError(
                f"the hub {url} calls its contents {about.etag[:80]!r}, which is no digest: nothing is written"
            )
        blob = self._storage / "blobs" / about.etag
        lock = self._storage.parent / ".locks" / self._storage.name / f"{about.etag}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if not blob.exists():
                _complete(url, blob, about.size, file, bar)


def _complete(url: str, blob: Path, size: int, file: str, bar: Any) -> None:
    """Download the rest of a file of `size` bytes; a resumed one is checked against its SHA-256."""
    from huggingface_hub.file_download import http_get

    headers = import_module("huggingface_hub.utils").build_hf_headers()
    partial = blob.with_name(f"{blob.name}.incomplete")
    begun = partial.stat().st_size if partial.exists() else 0
    if begun > size:
        partial.unlink()
        begun = 0
    with partial.open("ab") as out:
        http_get(url, out, resume_size=begun, headers=headers, expected_size=size, tqdm_class=bar,
                 displayed_filename=file)  # fmt: skip
    if begun and len(blob.name) == 64 and hash_of_file(partial) != blob.name:
        partial.unlink()
        raise ModelError(f"{file} came damaged, its beginning from an earlier download: download it again")
    partial.replace(blob)


def _bar(advance: Callable[[int], None], is_shown: bool) -> Any:
    """A progress bar class for huggingface_hub that reports bytes to `advance`, shown on the terminal or not."""
    base: Any = import_module("huggingface_hub.utils").tqdm

    def begin(self: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, *args, **options if is_shown else {**options, "disable": True})
        advance(int(options.get("initial") or 0))

    def update(self: Any, n: float | None = 1) -> Any:
        advance(int(n or 0))
        return base.update(self, n)

    return type("Bar", (base,), {"__init__": begin, "update": update})


@contextmanager
def _explained(name: HubName) -> Iterator[None]:
    """Turn the hub library's exceptions into errors that say what to do."""
    try:
        yield
    except (ForerunError, _Interrupted):
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk is full: make room, for example with `forerun rm`; `forerun pull {name}` then resumes"
            ) from error
        raise _as_ours(name, error) from error
    except Exception as error:  # the library raises dozens of kinds
        raise _as_ours(name, error) from error


def _as_ours(name: HubName, error: Exception) -> ModelError:
    from huggingface_hub import constants, errors

    hub, repository = constants.ENDPOINT, name.repository
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{repository} is gated: accept its terms at {hub}/{repository}, then {LOGIN} (the hub answered {status})"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NoRepositoryError(f"the hub {hub} (it has no {repository}, or it is private: then {LOGIN})")
    if status in (401, 403):
        return ModelError(f"the hub {hub} refuses {repository} ({status}): {LOGIN}; a token may have expired")
    if status is not None:
        return NoRepositoryError(f"the hub {hub} (it answered {status} for {repository}: try again later)")
    lines = str(error).strip().splitlines() or [""]
    return NoRepositoryError(f"the hub {hub} could not be asked ({type(error).__name__}: {lines[0][:160]})")
