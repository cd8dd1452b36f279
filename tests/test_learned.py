"""What a policy learned is there in the next process, and nothing that is wrong with a file matters."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import pytest

from forerun import LLM, SamplingParams, assemble, learned
from forerun.core import Request
from forerun.drafters.base import NUM_APART, Lessons
from forerun.drafters.named import drafter_config, written
from forerun.drafters.registry import file_stamp
from forerun.drafters.suffix import SuffixDrafter
from forerun.kernels.suffix import select_suffix
from forerun.learned import Kept, KeptLessons, Profile, kept_files, read_profile
from forerun.policy.costs import CallCosts, Costs, PassCosts
from forerun.policy.policy import AdaptivePolicy
from forerun.speculation.draft import Draft
from tests.support import mini
from tests.support.hopeful import show_right

ABOUT = {"model": "m", "drafter": "d", "machine": "here"}


def policy(pass_s: float = 1.0) -> AdaptivePolicy:
    costs = Costs(PassCosts({1: pass_s, 8: 2 * pass_s}))
    costs.calls["m"] = CallCosts(draws_levels=True)
    return AdaptivePolicy(9, costs, may_prune=True)


def taught() -> AdaptivePolicy:
    made = policy()
    for _ in range(5):
        made.costs.learn_step(1, drafts=False, seconds=1.5)
        made.costs.learn_step(8, drafts=True, seconds=3.0)
        made.costs.learn_call("m", 1, 4, 4, 0, 0.25)
        made.costs.learn_call("m", 1, 4, 4, 100, 1.25)
    show_right(made, "m", 4, 3)
    made.usual_output = 30.0
    return made


def test_a_new_policy_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    known, new = taught(), policy(pass_s=2.0)
    Kept(tmp_path / "deep", ABOUT).save(known)
    assert Kept(tmp_path / "deep", ABOUT).load(new)
    assert new.costs.knows_plain and new.usual_output == 30.0
    for rows, drafts in ((1, False), (8, True)):
        assert new.costs.step_s(rows, drafts) == pytest.approx(known.costs.step_s(rows, drafts)), "in seconds"
    assert new.costs.calls["m"].call_s(4, 1) == 0.25 and new.costs.calls["m"].reading_s(100) == pytest.approx(1.0)
    assert new.costs.calls["m"].draws_levels
    assert new.acceptance == known.acceptance or new.acceptance.ranks == known.acceptance.ranks
    assert new.acceptance.bands == known.acceptance.bands


def test_what_was_measured_within_a_day_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"m": CallCosts(draws_levels=True)}
    assert Kept(tmp_path, ABOUT).costs([1, 8], wanted) is None
    Kept(tmp_path, ABOUT).save(taught())
    later = Kept(tmp_path, ABOUT)
    costs = later.costs([1, 8], wanted)
    assert costs is not None and costs.passes.points == policy().costs.passes.points
    assert costs.calls["m"].call_s(4, 1) == 0.25 and costs.calls["m"].draws_levels
    assert later.costs([1, 2, 8], wanted) is None and later.costs([1, 8], {**wanted, "other": CallCosts()}) is None
    now = time()
    monkeypatch.setattr(learned, "time", lambda: now + learned.MAX_AGE_S)
    later.save(taught())  # the same measurements, which do not get younger by it
    assert Kept(tmp_path, ABOUT).costs([1, 8], wanted) is None


@pytest.mark.parametrize("seconds", [0, -1.0, None])
def test_passes_that_take_no_time_are_measured_again(tmp_path: Path, seconds: Any) -> None:
    kept = Kept(tmp_path, ABOUT)
    kept.save(taught())
    content = json.loads(kept.path.read_text("utf-8"))
    content["learned"]["passes"][0][1] = seconds
    kept.path.write_text(json.dumps(content), "utf-8")
    assert Kept(tmp_path, ABOUT).costs([1, 8], {"m": CallCosts()}) is None


def test_others_have_files_of_their_own(tmp_path: Path) -> None:
    Kept(tmp_path, ABOUT).save(taught())
    assert not Kept(tmp_path, {**ABOUT, "machine": "there"}).load(policy())
    assert [kept.about for kept in kept_files(tmp_path)] == [ABOUT]


def damaged() -> dict[str, Any]:
    text = json.dumps({"version": 1, "about": ABOUT, "learned": {}})
    return {"empty": "", "cut": text[:-9], "no JSON": "\x00\xff", "old": '{"version": 0}', "a list": "[]", "bare": text}


@pytest.mark.parametrize("kind", damaged())
def test_damaged_files_change_nothing(tmp_path: Path, kind: str) -> None:
    kept, made = Kept(tmp_path, ABOUT), policy()
    kept.path.write_text(damaged()[kind], "utf-8")
    assert not Kept(tmp_path, ABOUT).load(made)
    assert not made.costs.slowness and not made.acceptance.ranks
    kept.save(taught())
    assert Kept(tmp_path, ABOUT).load(made)


@pytest.mark.parametrize("value", [-1.0, "NaN", None, "1", [], True])
def test_numbers_nobody_can_have_learned_change_nothing(tmp_path: Path, value: Any) -> None:
    kept, made = Kept(tmp_path, ABOUT), policy()
    kept.save(taught())
    content = json.loads(kept.path.read_text("utf-8"))
    content["learned"]["ranks"][0][-1] = float("nan") if value == "NaN" else value
    kept.path.write_text(json.dumps(content), "utf-8")
    assert not Kept(tmp_path, ABOUT).load(made) and not made.costs.slowness and not made.acceptance.bands


@pytest.mark.parametrize("table", ["by_size", "by_depth"])
@pytest.mark.parametrize("key", [0, -1, 1.5, "1", None, True])
def test_calls_of_sizes_that_do_not_exist_change_nothing(tmp_path: Path, table: str, key: Any) -> None:
    kept, made = Kept(tmp_path, ABOUT), policy()
    kept.save(taught())
    content = json.loads(kept.path.read_text("utf-8"))
    content["learned"][table]["m"][0][0] = key
    kept.path.write_text(json.dumps(content), "utf-8")
    assert not Kept(tmp_path, ABOUT).load(made) and not made.costs.slowness
    assert made.costs.calls["m"].call_s(4, 1) == 0.0


@pytest.mark.parametrize("table", ["by_size", "by_depth", "steps"])
@pytest.mark.parametrize("num", [1.5, 3.0, -1, True, "3", None])
def test_means_of_a_number_of_measurements_that_is_none_change_nothing(tmp_path: Path, table: str, num: Any) -> None:
    kept, made = Kept(tmp_path, ABOUT), policy()
    kept.save(taught())
    content = json.loads(kept.path.read_text("utf-8"))
    found = content["learned"][table]
    (found if table == "steps" else found["m"])[0][-1] = num
    kept.path.write_text(json.dumps(content), "utf-8")
    assert not Kept(tmp_path, ABOUT).load(made) and not made.costs.slowness


def learn_plain(made: AdaptivePolicy, rows: int, seconds: float) -> None:
    """A plain step long after drafts."""
    made.costs.learn_plain(rows, seconds)
    made.costs.learn_step(rows, False, seconds)


def test_what_was_kept_follows_the_plain_steps_of_this_process(tmp_path: Path) -> None:
    """The other process shared the machine: all its times are four times those of this one."""
    busy, made = policy(), policy()
    for _ in range(8):
        learn_plain(busy, 1, 4.0)
        busy.costs.learn_step(8, True, 8.0)
        busy.costs.learn_call("m", 1, 4, 4, 0, 1.0)
        busy.costs.learn_call("m", 1, 8, 8, 0, 2.0)
    Kept(tmp_path, ABOUT).save(busy)
    assert Kept(tmp_path, ABOUT).load(made)
    assert made.costs.step_s(8) == pytest.approx(8.0) and made.costs.calls["m"].call_s(4, 1) == pytest.approx(1.0)
    made.costs.learn_call("m", 1, 8, 8, 0, 1.0)
    measured = made.costs.calls["m"].call_s(8, 1)
    learn_plain(made, 1, 2.0)  # the first one is slow
    assert made.costs.step_s(8) == pytest.approx(4.0) and made.costs.calls["m"].call_s(4, 1) == pytest.approx(0.5)
    for _ in range(30):
        learn_plain(made, 1, 1.0)
    assert made.costs.step_s(8) == pytest.approx(2.0) and made.costs.calls["m"].call_s(4, 1) == pytest.approx(0.25)
    assert made.plain_step_s(1) == pytest.approx(1.0)
    assert made.costs.calls["m"].call_s(8, 1) == measured, "it was measured here"
    made.costs.learn_step(8, True, 3.0)
    for _ in range(8):
        learn_plain(made, 1, 1.0)
    assert made.costs.step_s(8) == pytest.approx(3.0), "it was measured here, and nothing became faster since"
    for _ in range(30):
        learn_plain(made, 1, 0.5)
    assert made.costs.step_s(8) == pytest.approx(1.5, rel=0.25), "something did"


def test_a_file_that_does_not_say_what_plain_steps_take_long_after_drafts_is_read_all_the_same(tmp_path: Path) -> None:
    kept = Kept(tmp_path, ABOUT)
    kept.save(taught())
    content = json.loads(kept.path.read_text("utf-8"))
    del content["learned"]["plain"]
    kept.path.write_text(json.dumps(content), "utf-8")
    made = policy()
    assert Kept(tmp_path, ABOUT).load(made) and made.usual_output == 30.0


def test_plain_steps_of_more_requests_tell_as_well_and_slower_ones_nothing(tmp_path: Path) -> None:
    busy, other, slower = policy(), policy(), policy()
    for _ in range(8):
        learn_plain(busy, 1, 4.0)
        busy.costs.learn_call("m", 1, 4, 4, 0, 1.0)
    Kept(tmp_path, ABOUT).save(busy)
    assert Kept(tmp_path, ABOUT).load(other) and Kept(tmp_path, ABOUT).load(slower)
    for _ in range(8):
        learn_plain(other, 8, 2.0)  # as long as the pass alone; one of a request took four times as long
        learn_plain(slower, 1, 8.0)
    assert other.costs.calls["m"].call_s(4, 1) == pytest.approx(0.25)
    assert other.plain_step_s(1) == pytest.approx(1.0)
    assert slower.costs.calls["m"].call_s(4, 1) == pytest.approx(1.0)


def test_where_nothing_can_be_written_nothing_is(tmp_path: Path) -> None:
    file = tmp_path / "a file"
    file.touch()
    Kept(file, ABOUT).save(taught())
    assert not Kept(file, ABOUT).load(policy()) and not kept_files(file)


def test_what_was_learned_last_is_written_at_the_end(tmp_path: Path) -> None:
    """Also where the last request ends just after another one; a process that has learned nothing writes nothing."""
    kept, known, new = Kept(tmp_path, ABOUT), policy(), policy()
    kept.save(known, at_end=True)
    assert not kept_files(tmp_path)
    kept.save(known)
    known.usual_output = 77.0
    kept.save(known)
    kept.save(known, at_end=True)
    assert Kept(tmp_path, ABOUT).load(new) and new.usual_output == 77.0


def test_the_end_of_a_process_leaves_what_another_one_has_learned_since(tmp_path: Path) -> None:
    kept, known, later, new = Kept(tmp_path, ABOUT), taught(), taught(), policy()
    kept.save(known)
    later.usual_output = 77.0
    Kept(tmp_path, ABOUT).save(later)
    kept.save(known, at_end=True)
    assert Kept(tmp_path, ABOUT).load(new) and new.usual_output == 77.0


def test_writes_are_apart_and_leave_no_other_file(tmp_path: Path) -> None:
    kept = Kept(tmp_path, ABOUT)
    kept.save(taught())
    written = kept.path.read_text("utf-8")
    kept.save(policy())
    assert kept.path.read_text("utf-8") == written and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_engines_keep_what_they_learn_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    llm = LLM("mini", drafter="suffix", keep_learned=keeps, max_model_len=256)
    before = llm.generate("One two one two", SamplingParams(max_tokens=12, seed=1))[0].outputs[0].token_ids
    assert len(kept_files(tmp_path / "learned")) == keeps
    read, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: read.append(text) or loads(text))
    if keeps:
        monkeypatch.setattr(assemble, "measure_passes", None)  # is not called
    again = llm.with_drafter("suffix")
    assert sum('"learned"' in text for text in read) == keeps, "once"
    policy = again.engine.policy
    assert isinstance(policy, AdaptivePolicy) and policy.costs.knows_plain == keeps
    assert again.generate("One two one two", SamplingParams(max_tokens=12, seed=1))[0].outputs[0].token_ids == before


def test_drafters_of_ones_own_are_told_apart_by_file_and_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    example = Path(__file__).resolve().parents[1] / "docs/examples/bigram.py"
    stamps = []
    for folder, added in (("a", ""), ("b", ""), ("b", "# changed"), ("b", "# changed")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "mine.py").write_text(example.read_text("utf-8") + added, "utf-8")
        monkeypatch.chdir(tmp_path / folder)
        stamps.append(file_stamp("mine.py:Bigram"))
    assert len(set(stamps)) == 3 and stamps[2] == stamps[3] and file_stamp("suffix") == ""
    LLM("mini", drafter="mine.py:Bigram", max_model_len=256).generate("One two", SamplingParams(max_tokens=4))
    [kept] = kept_files(tmp_path / "learned")
    assert stamps[3] in kept.about["options"] and kept.shown == "mine.py:Bigram"


def test_the_command_lists_and_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from forerun.cli.app import app

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    about = {**ABOUT, "model": "/models/Llama-3.2-1B (5 bytes, auto)", "drafter": "portfolio=suffix+draft (7 bytes)"}
    Kept(tmp_path / "learned", about).save(taught())
    (tmp_path / "learned" / "other.json").write_text("{")
    (tmp_path / "learned" / "cut.new").touch()
    said = json.loads(CliRunner().invoke(app, ["learned", "--json"]).stdout)
    [damaged, known] = sorted(said, key=lambda each: len(each["about"]))
    assert known["about"] == about and known["size_bytes"] > 0 and damaged["about"] == {}
    assert known["plain_step_s"] == pytest.approx(1.5)
    shares = known["acceptance_by_rank"]["m"]
    assert shares == sorted(shares, reverse=True) and 0.0 < shares[-1] < shares[0] <= 1.0
    lines = CliRunner().invoke(app, ["learned"]).stdout.splitlines()
    assert max(map(len, lines)) <= 80 and any(line.endswith("damaged, counts as none") for line in lines)
    start = lines.index("  on here")
    assert re.match(r"Llama-3.2-1B with portfolio=suffix\+draft: \d+ seconds? old, ", lines[start - 1])
    by_rank = " ".join(f"{share:.0%}" for share in shares)
    assert lines[start + 1 : start + 3] == ["  a plain step takes 1500.00 ms", f"  m: acceptance by rank {by_rank}"]
    assert CliRunner().invoke(app, ["learned", "--delete"]).exit_code == 0
    assert not list((tmp_path / "learned").iterdir())


def test_the_command_tells_drafters_apart_and_counts_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from forerun.cli.app import app

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    folder = tmp_path / "learned"
    for drafter in ("ngram+suffix", "ngram+recycling"):
        config = drafter_config("mini", f"portfolio={drafter}", None, {})
        kept = Kept(folder, {**ABOUT, "options": drafter}, written(config))
        kept.save(taught())
    kept.path.with_suffix(".npz").write_bytes(b"x" * 3000)
    (folder / "alone.npz").write_bytes(b"x" * 2000)
    Profile("m", "here", "own", 5.0, "suffix", {}).save(tmp_path / "profiles")
    ran = CliRunner().invoke(app, ["learned"])
    shown = ran.stdout
    for drafter, more in (("ngram+suffix", ""), ("ngram+recycling", " and 3.0 kB of answers")):
        assert re.search(rf"^m with portfolio={re.escape(drafter)}: .* old, [\d.]+ kB{more}$", shown, re.MULTILINE)
    assert re.search(r"^alone\.npz: .* old, 2\.0 kB of answers$", shown, re.MULTILINE)
    assert ran.stderr.startswith(f"4 files in {folder}")
    ran = CliRunner().invoke(app, ["learned", "--delete"])
    assert ran.stderr.startswith(f"5 files deleted in {folder} and {tmp_path / 'profiles'}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    "text",
    ["none", "draft=mini-draft", "portfolio=ngram+suffix", "portfolio=suffix+draft=mini-draft", "suffix=x.corpus"],
)
def test_a_drafter_is_written_as_it_was_read(text: str) -> None:
    assert written(drafter_config("mini", text, None, {})) == text


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile("/models/m", "here", "own", 5.0, "suffix", {"suffix": 1.5, "ngram": 0.9})
    assert profile.save(tmp_path / "deep") and read_profile(tmp_path / "deep", "/models/m", "here") == profile
    assert read_profile(tmp_path / "deep", "/models/m", "there") is None
    assert read_profile(tmp_path / "deep", "/models/other", "here") is None
    [path] = (tmp_path / "deep").iterdir()
    for damaged in (
        "",
        "[]",
        path.read_text("utf-8").replace("1.5", '"x"'),
        path.read_text("utf-8").replace("gains", "g"),
    ):
        path.write_text(damaged, "utf-8")
        assert read_profile(tmp_path / "deep", "/models/m", "here") is None
    (tmp_path / "file").touch()
    assert not profile.save(tmp_path / "file")


@pytest.mark.parametrize("drafter", ["suffix", "recycling"])
def test_what_drafters_learned_helps_the_next_process(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def run(**options: Any) -> Any:
        llm = mini.drafting(drafter, adaptive=False, **options)
        out = llm.generate([mini.PROMPTS[0]], params)[0].outputs[0]
        del llm
        gc.collect()  # the end of a process writes, too
        return out

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    off = run(keep_learned=False)
    assert not any(tmp_path.iterdir())
    first, second, apart = run(), run(), run(keep_learned=False)
    assert first.token_ids == second.token_ids == off.token_ids
    assert first.stats.num_steps == off.stats.num_steps == apart.stats.num_steps > 1.4 * second.stats.num_steps
    [path] = (tmp_path / "learned").iterdir()
    assert path.stat().st_mode & 0o077 == 0 and path.suffix == ".npz"
    path.write_bytes(path.read_bytes()[:-30])
    assert run().stats.num_steps == first.stats.num_steps, "a damaged file counts as none"


def test_damaged_lessons_count_as_none(tmp_path: Path) -> None:
    path, asked = tmp_path / "x.npz", Request("", (1,), SamplingParams(), 0)
    taught = listed()
    taught.of(asked).extend(range(20))
    KeptLessons(path, {"a": taught}).save(at_once=True)
    whole, refused = path.read_bytes(), 0
    flips = [(place, 1 << place % 8) for place in range(len(whole))] + [(place, 0xFF) for place in range(len(whole))]
    for place, flip in flips:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        other = listed()
        KeptLessons(path, {"a": other})
        refused += not other.of(asked)
    assert refused > len(whole), "most damage is noticed"


@pytest.mark.parametrize("error", [ValueError, UnicodeEncodeError("utf-8", "\udc80", 0, 1, ""), OSError])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, error: Any) -> None:
    def write(file: Any) -> None:
        raise error

    assert not learned._replace(tmp_path / "deep" / "x", write) and not list((tmp_path / "deep").iterdir())


class SomeAdapter:
    """What is known of an adapter here."""

    def __init__(self, path: str) -> None:
        self.path = path


def listed() -> Lessons[list[int]]:
    """Lessons that are lists of numbers below 100."""

    def read(lesson: list[int], state: Any) -> None:
        if (state >= 100).any():
            raise ValueError
        lesson += state.tolist()

    return Lessons(lambda is_apart: [], lambda lesson: np.array(lesson, np.int32), read)


def test_lessons_go_to_the_next_process_by_adapter_and_never_with_a_salt(tmp_path: Path) -> None:
    one, two = SomeAdapter("/adapters/one"), SomeAdapter("/adapters/two")
    kinds: list[dict[str, Any]] = [{}, {"adapter": one}, {"adapter": two}, {"cache_salt": "s"}]
    kinds += [{"adapter": one, "cache_salt": "s"}]
    requests = [Request("", (1,), SamplingParams(), 0, **kind) for kind in kinds]
    first, path = listed(), tmp_path / "deep" / "x.npz"
    for number, each in enumerate(requests, 1):
        first.of(each).append(number)
    kept = KeptLessons(path, {"a": first})
    kept.save()
    assert not path.exists(), "not so soon"
    kept.save(at_once=True)
    for _ in range(2):  # what nobody used in between stays
        second, other = listed(), listed()
        KeptLessons(path, {"a": second, "b": other}).save(at_once=True)
    same = [Request("", (1,), SamplingParams(), 0, adapter=SomeAdapter("/adapters/one")), requests[0], requests[3]]
    assert [second.of(each) for each in same] == [[2], [1], []] and other.of(requests[0]) == []
    first.of(requests[0]).append(100)
    kept.save(at_once=True)
    third = listed()
    KeptLessons(path, {"a": third})
    assert third.of(requests[0]) == [] and third.of(requests[1]) == [2], "what is refused is left out alone"


def test_what_an_adapter_learned_outlives_many_salts_and_its_unloading() -> None:
    def of(**kind: Any) -> list[int]:
        return lessons.of(Request("", (1,), SamplingParams(), 0, **kind))

    lessons, adapter = listed(), SomeAdapter("/adapters/one")
    of(adapter=adapter).append(1)
    of(cache_salt="0").append(5)
    for salt in range(NUM_APART + 1):
        of(cache_salt=str(salt))
    assert lessons.state()["/adapters/one"].tolist() == [1] and of(adapter=adapter) == [1]
    assert of(cache_salt="0") == [] and len(lessons._apart) == NUM_APART
    of(adapter=adapter).append(2)
    del adapter
    gc.collect()
    assert lessons.state()["/adapters/one"].tolist() == [1, 2]
    again = SomeAdapter("/adapters/one")
    assert of(adapter=again) == [1, 2] and len(lessons.state()) == 2
    many = [SomeAdapter(f"/adapters/{number}") for number in range(3 * NUM_APART)]
    for each in many:
        of(adapter=each)
    assert len(lessons.state()) == 1 + 2 * NUM_APART, "what waits is bounded, too"
    of().append(3)
    lessons.clear()
    assert of() == of(adapter=again) == of(adapter=many[0]) == of(adapter=many[-1]) == []


def test_lessons_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_BYTES", 40)
    large, small = listed(), listed()
    large.of(Request("", (1,), SamplingParams(), 0)).extend(range(11))
    small.of(Request("", (1,), SamplingParams(), 0)).extend(range(9))
    KeptLessons(tmp_path / "x.npz", {"large": large, "small": small}).save(at_once=True)
    again = listed(), listed()
    KeptLessons(tmp_path / "x.npz", {"large": again[0], "small": again[1]})
    assert [len(each.of(Request("", (1,), SamplingParams(), 0))) for each in again] == [0, 9]


def test_answers_that_are_kept_are_the_newest() -> None:
    def asked(drafter: SuffixDrafter, *tail: int) -> list[int]:
        request = Request("asking", (2, *tail), SamplingParams(), seed=0, max_len=99)
        draft = Draft(request, 2)
        drafter.begin(request)
        drafter.propose([draft])
        drafter.end("asking")
        return list(draft.tree.tokens[1:])

    said, later = (SuffixDrafter(4, select_suffix(), corpus_tokens=64) for _ in range(2))
    for number in range(12):
        request = Request(str(number), (1,), SamplingParams(), seed=0, max_len=99)
        said.begin(request)
        request.token_ids += [100 + number, 200 + number, 300 + number, 400, 401, 402, 403]
        request.finish_reason = "stop"
        said.end(request.request_id)
    assert said.lessons is not None and later.lessons is not None
    [state] = said.lessons.state().values()
    assert len(state) <= 64
    later.lessons.recall({"": state})
    assert asked(later, 110, 210) == asked(said, 110, 210) == [310]
    assert asked(later, 100, 200) == [] and SuffixDrafter(4, select_suffix(), corpus_tokens=0).lessons is None
    for wrong in (state[:-1], state.reshape(1, -1), state - 5):
        fresh = SuffixDrafter(4, select_suffix(), corpus_tokens=64)
        assert fresh.lessons is not None
        fresh.lessons.recall({"": wrong})
        assert asked(fresh, 110, 210) == []
