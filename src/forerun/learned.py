"""What policies and drafters have learned, kept in the user's cache folder: the first request of a process starts well.

Knows: files, and which of a policy's tables are worth keeping. Does not know: what they mean, engines.

One small JSON file for each model, drafter and machine. Beside it lies what drafters learned from answers (for `suffix`
token ids of the answers), but for what requests with a salt of their own have taught; only the user can read it. All
this changes speed, never tokens under the coupled rule. A file that is damaged or of another version counts as none;
where nothing can be written nothing is kept. Of several processes the last one to write wins: a file is replaced whole.

A profile is what a benchmark found for a model on this machine: which drafter gains most, and how much each gains.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from time import perf_counter, time
from typing import IO, Any, Final, TypeVar

import numpy as np

from forerun.drafters.base import Lessons
from forerun.policy.acceptance import Tally
from forerun.policy.costs import CallCosts, Costs, Mean, PassCosts
from forerun.policy.policy import AdaptivePolicy

VERSION: Final = 1  # of the files
EVERY_S: Final = 2.0  # at least between two writes, each of which takes a millisecond
LESSONS_EVERY_S: Final = 60.0  # between two writes of drafters' lessons, 10 ms for a table of 150,000 tokens
MAX_BYTES: Final = 32 << 20  # of them
MAX_AGE_S: Final = 86400.0  # of measured passes: the machine may have been busy then, or have changed
_TALLIES: Final = ("ranks", "bands", "depths", "calls")
_DAMAGED: Final = (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
_Entry = TypeVar("_Entry")


@dataclass(slots=True)
class Kept:
    """The file of one policy, read when this is made. `about`: what it holds for; files are told apart by it."""

    folder: Path
    about: Mapping[str, str]
    shown: str = ""  # the drafter as on the command line, for whoever reads the file
    _learned: Any = field(init=False, default=None)  # what the file said, unchecked
    _saved: Any = field(init=False, default=None)  # what was written last
    _written_s: float = field(default=-math.inf)
    _measured_s: float = field(default_factory=time)  # when passes were

    def __post_init__(self) -> None:
        with suppress(*_DAMAGED):
            self._learned = _contents(self.path)["learned"]

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{_key(self.about)}.json"

    def costs(self, rows: Sequence[int], calls: Mapping[str, CallCosts]) -> Costs | None:
        """Costs of passes at exactly these row counts and of these drafters; None where they must be measured."""
        kept = self._learned
        try:
            passes = {_count(num_rows): _seconds(seconds) for num_rows, seconds in kept["passes"]}
            measured_s = _number(kept["measured_s"])
            known = {name: _call(unknown, kept, name) for name, unknown in calls.items()}
        except _DAMAGED:
            return None
        if set(passes) != set(rows) or not 0.0 <= time() - measured_s < MAX_AGE_S:
            return None
        self._measured_s = measured_s
        return Costs(PassCosts(passes), calls=known)

    def load(self, policy: AdaptivePolicy) -> bool:
        """Let a new policy begin where another one ended; False, and nothing changed, where there is no such file."""
        try:
            _restore(policy, self._learned)
        except _DAMAGED:
            return False
        return True

    @property
    def is_new(self) -> bool:
        """Whether there was no file, or none of use."""
        return self._learned is None

    def save(self, policy: AdaptivePolicy, at_end: bool = False) -> None:
        """Write what the policy knows, unless that was done just now or cannot be done.

        at_end: write what was learned since, but nothing if that is nothing (another process may have written) or if
        this has never been called before.
        """
        now = perf_counter()
        if self._written_s == -math.inf if at_end else now - self._written_s < EVERY_S:
            return
        learned = _plain(policy, self._measured_s)
        if at_end and learned == self._saved:
            return
        self._written_s, self._saved = now, learned
        _write(self.path, {"version": VERSION, "about": self.about, "shown": self.shown, "learned": learned})


@dataclass(slots=True)
class KeptLessons:
    """The file of what drafters have learned, by their names; read when this is made."""

    path: Path
    lessons: Mapping[str, Lessons[Any]]
    _written_s: float = field(init=False, default_factory=perf_counter)

    def __post_init__(self) -> None:
        with suppress(Exception):  # damaged archives raise whatever zlib, zipfile and NumPy do
            with self.path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                found = {name: file[name].astype(np.int32) for name in file.files}
            for member, lessons in self.lessons.items():
                own = {
                    name.partition("\n")[2]: state for name, state in found.items() if name.startswith(f"{member}\n")
                }
                lessons.recall(own)

    def save(self, at_once: bool = False) -> None:
        """Write what fits into MAX_BYTES, unless that was done lately; where it cannot be done nothing is kept."""
        if not self.lessons or not (at_once or perf_counter() - self._written_s >= LESSONS_EVERY_S):
            return
        self._written_s = perf_counter()
        kept, left = {}, MAX_BYTES
        for member, lessons in self.lessons.items():
            for path, state in lessons.state().items():
                if state.nbytes <= left:
                    kept[f"{member}\n{path}"] = state
                    left -= state.nbytes
        _replace(self.path, lambda file: np.savez(file, **kept))


@dataclass(frozen=True, slots=True)
class Profile:
    """What `forerun bench drafters` found for a model on a machine."""

    model: str  # its folder or file
    machine: str
    suite: str  # such as: 12 built-in prompts
    made_s: float  # since 1970
    recommended: str  # a drafter as on the command line
    gains: Mapping[str, float]  # speed over plain decoding, by drafter, over all temperatures

    def save(self, folder: Path) -> bool:
        """Write it in place of an earlier one; False where that cannot be done."""
        return _write(_profile_path(folder, self.model, self.machine), {"version": VERSION, **asdict(self)})


def read_profile(folder: Path, model: str, machine: str) -> Profile | None:
    """The profile of a model on this machine; None where there is no usable one."""
    with suppress(*_DAMAGED):
        kept = _contents(_profile_path(folder, model, machine))
        gains = {str(name): float(_number(gain)) for name, gain in kept["gains"].items()}
        return Profile(model, machine, str(kept["suite"]), _number(kept["made_s"]), str(kept["recommended"]), gains)
    return None


def _profile_path(folder: Path, model: str, machine: str) -> Path:
    return folder / f"{_key([model, machine])}.json"


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _write(path: Path, content: Mapping[str, Any]) -> bool:
    return _replace(path, lambda file: file.write(json.dumps(content).encode()))


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> bool:
    """Replace a file whole, readable by the user alone; False where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with open(handle, "wb") as file:
                write(file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except (OSError, ValueError):  # ValueError: a name that cannot be encoded
        return False
    return True


@dataclass(frozen=True, slots=True)
class KeptFile:
    """What one file says, and how large the file of drafters' lessons beside it is.

    `about` is empty where the file cannot be read, and where there are lessons alone: `path` is theirs then.
    """

    path: Path
    size_bytes: int
    written_s: float  # since 1970
    about: Mapping[str, str] = field(default_factory=dict)
    plain_step_s: float | None = None  # of one request
    # member -> how often its n-th likeliest node was right
    acceptance_by_rank: Mapping[str, list[float]] = field(default_factory=dict)
    shown: str = ""  # the drafter; "" where an older version wrote the file
    lessons_bytes: int = 0


def kept_files(folder: Path) -> list[KeptFile]:
    """Every file, by its name."""
    stems = {path.stem for path in (*folder.glob("*.json"), *folder.glob("*.npz"))}
    return [_read(folder / f"{stem}.json") for stem in sorted(stems)]


def _read(path: Path) -> KeptFile:
    lessons = path.with_suffix(".npz")
    lessons_bytes = lessons.stat().st_size if lessons.is_file() else 0
    if not path.is_file():
        return KeptFile(lessons, 0, lessons.stat().st_mtime, lessons_bytes=lessons_bytes)
    stat = path.stat()
    try:
        kept = _contents(path)
        about = {str(name): str(value) for name, value in kept["about"].items()}
        plain = _table(kept["learned"]["steps"], Mean).get((False, 1))
        ranks = _table(kept["learned"]["ranks"], Tally)
        members = {
            str(name): list(accumulate((ranks[who, rank].rate for who, rank in sorted(ranks) if who == name), mul))
            for name in sorted({member for member, _ in ranks})
        }
        shown = str(kept.get("shown", ""))
    except _DAMAGED:
        return KeptFile(path, stat.st_size, stat.st_mtime, lessons_bytes=lessons_bytes)
    plain_s = None if plain is None else plain.value
    return KeptFile(path, stat.st_size, stat.st_mtime, about, plain_s, members, shown, lessons_bytes)


def _contents(path: Path) -> Any:
    """What is in a file of this version, unchecked. Raises whatever is wrong with it."""
    kept = json.loads(path.read_text("utf-8"))
    if kept["version"] != VERSION:
        raise ValueError(f"version {kept['version']}")
    return kept


def _plain(policy: AdaptivePolicy, measured_s: float) -> dict[str, Any]:
    """Tables as lists of rows: key, then what is known. Steps in seconds, since passes may be measured anew."""
    costs = policy.costs
    return {
        "measured_s": measured_s,
        "passes": list(costs.passes.points.items()),
        "steps": [[*key, mean.value * costs.passes(key[1]), mean.num] for key, mean in costs.slowness.items()],
        "plain": [[rows, mean.value * costs.passes(rows), mean.num] for rows, mean in costs.plain.items()],
        "by_size": {name: _rows(call.by_size) for name, call in costs.calls.items()},
        "by_depth": {name: _rows(call.by_depth) for name, call in costs.calls.items()},
        "reading": {name: astuple(call.reading) for name, call in costs.calls.items() if call.reading is not None},
        "usual_output": policy.usual_output,
        **{name: _rows(getattr(policy.acceptance, name)) for name in _TALLIES},
    }


def _rows(table: Mapping[Any, Mean | Tally]) -> list[list[Any]]:
    return [[*(key if isinstance(key, tuple) else (key,)), *astuple(entry)] for key, entry in table.items()]


def _restore(policy: AdaptivePolicy, kept: Mapping[str, Any]) -> None:
    """Read all of it, then take it over: what is damaged changes nothing. Raises whatever is wrong with it."""
    passes = policy.costs.passes
    calls = {name: _call(call, kept, name) for name, call in policy.costs.calls.items() if name in kept["by_size"]}
    tallies = {name: _table(kept[name], Tally) for name in _TALLIES}
    usual_output = _number(kept["usual_output"])
    steps = {(bool(drafts), int(rows)): mean for (drafts, rows), mean in _steps(kept["steps"], passes).items()}
    plain = {int(rows): mean for (rows,), mean in _steps(kept.get("plain", ()), passes).items()}
    now = {id(mean) for call in policy.costs.calls.values() for mean in call.means}
    kept_calls = [mean for call in calls.values() for mean in call.means if id(mean) not in now]
    policy.costs = Costs(passes, steps, policy.costs.calls | calls, plain)
    policy.costs.pace.keep([*steps.values(), *plain.values(), *kept_calls])
    for name, table in tallies.items():
        setattr(policy.acceptance, name, {key[0] if len(key) == 1 else key: entry for key, entry in table.items()})
    policy.usual_output = usual_output


def _steps(rows: Any, passes: PassCosts) -> dict[tuple[Any, ...], Mean]:
    """Slowness, believed until it is measured, by keys that end in a measured number of rows."""
    table = _table(rows, _mean).items()
    return {key: Mean(mean.value / passes(key[-1])) for key, mean in table if key[-1] in passes.points}


def _call(now: CallCosts, kept: Mapping[str, Any], name: str) -> CallCosts:
    """What is known of a drafter's calls, over what was measured of it just now."""
    reading = kept["reading"].get(name)
    by_size, by_depth = (_table(kept[table][name], _mean).items() for table in ("by_size", "by_depth"))
    return CallCosts(
        now.by_size | {(_count(requests), _count(size)): mean for (requests, size), mean in by_size},
        now.by_depth | {_count(depth): mean for (depth,), mean in by_depth},
        now.reading if reading is None else _mean(*reading),
        now.draws_levels,
    )


def _mean(value: Any, num: Any) -> Mean:
    if type(num) is not int or num < 0:
        raise ValueError(f"no number of measurements: {num!r}")
    return Mean(_number(value), num)


def _table(rows: Any, make: Callable[[Any, Any], _Entry]) -> dict[tuple[Any, ...], _Entry]:
    return {tuple(key): make(_number(first), _number(second)) for *key, first, second in rows}


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"no number of requests, drafts or levels: {value!r}")
    return value


def _seconds(value: Any) -> float:
    if (seconds := _number(value)) == 0:
        raise ValueError("a pass takes time")
    return float(seconds)


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"no number that could have been learned: {value!r}")
    return value
