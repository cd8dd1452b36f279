"""`forerun bench drafters`, `--explain`, and the drafter that the documentation shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM
from forerun.cli.explain import explain_lines
from forerun.core import DepthCount, DrafterCount, RequestStats
from forerun.policy.policy import AdaptivePolicy

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "bigram.py"
BIGRAM = f"{EXAMPLE}:Bigram"
PROMPT = "Repeat after me: the cat sat on the mat, the cat sat on the mat, the cat"
SHORT = ("--max-tokens", "6", "--repeats", "1")
EXPLAIN = {
    "estimated_speedup", "acceptance_length", "num_steps", "num_plain_steps", "wasted_nodes", "draft_s", "verify_s",
    "draft_errors", "failed_drafters", "why_plain", "drafters",
}  # fmt: skip


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "question.jsonl"
    lines = [{"category": "writing", "turns": ["Hello."]}, {"category": "rag", "turns": ["Tell me of a cat."]}]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return str(path)


def test_a_report_is_written(run_json: Any, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "new"
    options = ("--suite", "spec-bench", "--prompts", questions, "--drafters", "ngram,portfolio=ngram+draft")
    report = run_json("bench", "drafters", "mini", *options, *SHORT, "--fixed", "2", "--out", str(folder))
    assert json.loads((folder / "report.json").read_text("utf-8")) == report
    names = ["none", "ngram", "portfolio=ngram+draft", "ngram fixed 2"]
    assert [run["temperature"] for run in report["runs"]] == [0.0, 1.0]
    for run in report["runs"]:
        assert [row["drafter"] for row in run["rows"]] == names
        assert all(row["identical"] is True for row in run["rows"])
        assert list(run["categories"]) == ["multi-turn conversation", "rag"]
        assert {row["drafter"] for row in run["against_fixed"]} == set(names[1:3])
    assert "2 prompts of spec-bench" in (folder / "report.md").read_text("utf-8") and report["pass_ms"]["1"] > 0
    assert {"report.html", "report.md"} <= {path.name for path in folder.iterdir()}
    sure = {row["drafter"] for run in report["runs"] for row in run["rows"] if not row["within_noise"]}
    best = {name: gain for name, gain in report["gains"].items() if gain > 1.0 and name in sure}
    assert set(report["gains"]) == set(names[1:3])
    assert report["recommended"] == (max(best, key=best.__getitem__) if best else "none")
    shown = run_json("inspect", "mini")["profile"]
    assert (shown["recommended"], shown["gains"]) == (report["recommended"], report["gains"])
    learned = run_json("learned")
    assert len(learned) == 2 and all("across_requests=True" in each["about"]["options"] for each in learned)


def test_a_profile_is_where_policies_that_know_nothing_start(
    run: Any, run_json: Any, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    options = ("--suite", questions, "--drafters", "ngram", "--temperature", "0", *SHORT, "--out", str(tmp_path / "r"))
    run("bench", "drafters", "mini", *options, "--no-keep-profile")
    assert not (tmp_path / "cache").exists() and run_json("inspect", "mini")["profile"] is None
    assert "recommended: --drafter" in run("bench", "drafters", "mini", *options).stdout
    said = " ".join(run("inspect", "mini").stdout.split())
    assert "with ngram (of 1 drafters, 2 prompts of " in said or "no drafter gains (of 1 drafters, 2 prompts" in said
    [before] = (tmp_path / "cache" / "learned").iterdir()
    known = before.read_text("utf-8")
    with_drafter = LLM("mini", drafter="ngram")
    policy = with_drafter.engine.policy
    assert isinstance(policy, AdaptivePolicy) and policy.costs.knows_plain, "it starts from the profile"
    run("bench", "drafters", "mini", *options)
    assert before.read_text("utf-8") == known, "what was learned before stays"


@pytest.mark.parametrize("columns", [80, 40])
def test_tables_fit_narrow_terminals(
    run: Any, questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long = ("--drafters", "portfolio=suffix+draft+recycling", *SHORT)
    for command in (("speed", "--prompts", questions), ("drafters", "--suite", questions, "--out", str(tmp_path))):
        shown = run("bench", *command, *long).stdout.partition("report:")[0]
        assert "…" not in shown and max(map(len, shown.splitlines())) <= columns
        assert "~" in shown or "0." in shown


def test_rules_are_compared(run: Any, questions: str, tmp_path: Path) -> None:
    options = ("--suite", questions, "--drafters", "draft", "--rules", "--limit", "1", "--temperature", "1")
    lines = run("bench", "drafters", *options, *SHORT, "--out", str(tmp_path)).stdout.splitlines()
    shown = [line.split() for line in lines if line.startswith(("none", "draft "))]
    assert [words[1] for words in shown[1:]] == ["coupled", "token", "block", "tree"]
    assert [words[-1] for words in shown] == ["yes", "yes", "-", "-", "-"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--suite", "spec-bench"), "Spec-Bench does not come with forerun"),
        (("--suite", "mt-bench"), "--suite must be own, spec-bench or a .jsonl file; got 'mt-bench'"),
        (("--prompts", "x.jsonl"), "--prompts goes with --suite spec-bench"),
        (("--drafters", "magic"), "there is no drafter magic"),
        (("--drafters", "none"), "there is no drafter to compare"),
        (("--fixed", "two"), "--fixed must be whole numbers"),
        (("--rules", "--verification", "rejection"), "leave --verification out"),
        (("--temperature", "hot"), "error: --temperature must be numbers"),
        (("--out", __file__), "cannot write into --out"),
    ],
)
def test_what_cannot_be_is_refused(run: Any, options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    out = () if "--out" in options else ("--out", str(tmp_path))
    assert said in " ".join(run("bench", "drafters", *options, *out, status=2).stderr.split())


def test_explain_adds_its_field_to_json(run_json: Any) -> None:
    options = ("--max-tokens", "32", "--temperature", "0", "--drafter", "draft", "--ignore-eos")
    answer, plain = (run_json("generate", PROMPT, *options, *more) for more in (("--explain",), ()))
    assert set(answer) - set(plain) == {"explain"} and set(answer["explain"]) == EXPLAIN
    explained, [count] = answer["explain"], answer["explain"]["drafters"].values()
    assert explained["wasted_nodes"] == count["drafted"] - count["accepted"] >= 0
    assert sum(depth["drafted"] for depth in count["by_depth"]) == count["drafted"] > 0
    assert sum(depth["accepted"] for depth in count["by_depth"]) == count["accepted"]
    assert explained["draft_s"] > 0 and explained["verify_s"] > 0 and explained["estimated_speedup"] > 0


def test_explain_says_why_there_were_no_drafts(run: Any) -> None:
    options = ("--max-tokens", "12", "--temperature", "0", "--drafter", "none", "--explain")
    assert "most steps had no drafts: there is no drafter" in run("generate", PROMPT, *options).stderr
    talked = run("chat", "mini", "--max-tokens", "6", "--drafter", "ngram", "--explain", stdin="Hello\n")
    assert "steps had drafts" in talked.stderr


def test_explanations_in_words() -> None:
    count = DrafterCount(5, 3, [DepthCount(3, 3, 3), DepthCount(2, 2, 0)])
    stats = RequestStats(num_steps=10, num_plain_steps=7, drafters={"x": count}, trees=count, step_s=1.0, draft_s=0.25)
    stats.failed_drafters, stats.why_plain = ("y",), "drafts are right 12% of the time; it takes 45%"
    assert list(explain_lines(stats)) == [
        "3 of 10 steps had drafts; 2 drafted tokens were verified in vain",
        "x: 3 of 5 drafts accepted (100%, 0% by depth)",
        "drafting took 250.0 ms, verifying 0.0 ms",
        "drafter y failed; the text is the same without it",
        "most steps had no drafts: drafts are right 12% of the time; it takes 45%",
    ]


def test_the_documented_drafter_works(run_json: Any, questions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})  # slow
    options = ("--drafters", BIGRAM, "--prompts", questions, "--max-tokens", "16")
    checked = run_json("verify", "mini", *options, "--temperature", "0,1")
    assert checked["identical"] and [check["drafter"] for check in checked["checks"]] == [BIGRAM] * 2
    measured = run_json("bench", "speed", "mini", *options, "--repeats", "1", "--no-adaptive")
    assert [row["identical"] for row in measured["rows"]] == [True, True]
    assert measured["details"][BIGRAM]["drafted"] > 0


def test_the_documented_drafter_is_short_and_in_the_documentation() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 60
    text = (EXAMPLE.parents[1] / "writing-a-drafter.md").read_text("utf-8")
    assert "examples/bigram.py" in text
