"""Drafter reports: who takes part, what is compared with what, and the three files that come out."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.bench import report_pictures
from forerun.bench.drafters import (
    CHAT,
    Entrant,
    against_fixed,
    auto_drafters,
    build,
    entrants,
    pass_costs_ms,
    recommended,
    run,
    spec_bench,
)
from forerun.bench.prompts import PromptCase
from forerun.bench.report import Picture, check_folder, write
from forerun.config import DrafterConfig
from forerun.core import DrafterCount, RequestOutput, SamplingParams
from forerun.errors import ConfigError, UnsupportedError
from forerun.policy.costs import Costs, PassCosts
from forerun.policy.fixed import FixedPolicy
from tests.bench.fakes import FakeLLM

CASES = [PromptCase(("one",), True, "chat & talk", "f:1"), PromptCase(("def f",), False, "code", "f:2")]
PARAMS = [SamplingParams(max_tokens=8, temperature=t, seed=3) for t in (0.0, 1.0)]
SVG = "<svg>&</svg>"


class Drafting(FakeLLM):
    """Says that of two drafts a step the first was always right and the second every other time."""

    def __init__(self, seconds_a_token: float = 0.01, verification: str = "coupled", **options: Any) -> None:
        super().__init__(seconds_a_token, **options)
        self.config = SimpleNamespace(model="mini", verification=verification, drafter=DrafterConfig())
        self.engine = SimpleNamespace(policy=FixedPolicy(1))
        self.drafts = seconds_a_token < 0.01

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], lora: Sequence[str | None]
    ) -> list[RequestOutput]:
        outputs = super().generate(prompts, params, lora)
        for stats in (output.outputs[0].stats for output in outputs) if self.drafts else ():
            for step in range(6):
                stats.trees.count([1, 2], [1, 2] if step % 2 else [1])
            stats.drafters["fast|er"] = DrafterCount().add(stats.trees)
            stats.num_steps = stats.num_tokens // 2
            stats.num_first = 2
            stats.draft_s = 0.1 * (stats.ttft_s + stats.decode_s)
        return outputs


def engines(**others: Drafting) -> dict[str, Any]:
    return {"none": Drafting(), **others}


def a_report(**others: Drafting) -> dict[str, Any]:
    runs = run(engines(**others), CASES, PARAMS, repeats=2)
    machine = {"cpu": "<a cpu>", "cores": 2, "kernels": "x", "forerun": "0", "commit": "c", "date": "2026-01-01"}
    given = {"model": "m", "suite": "own", "max_tokens": 8, "repeats": 2, "verification": "coupled"}
    rest = {"num_prompts": 2, "num_too_long": 1, "left_out": {"mtp": "has no module"}, "fixed": ["fixed 2"]}
    wanted = [Entrant("fast|er", "fast|er"), Entrant("fixed 2", "fast|er", num_fixed=2)]
    with_fixed = [{**each, "against_fixed": against_fixed(each, wanted)} for each in runs]
    return {**given, **rest, "runs": with_fixed, "machine": machine, "pass_ms": {1: 2.0, 4: 3.0}}


def test_settings_that_take_part() -> None:
    names = [entrant.name for entrant in entrants(["none", "draft=x", "portfolio"], [2, 4], rules=False)]
    assert names == ["draft=x", "portfolio", "draft=x fixed 2", "draft=x fixed 4"]
    fixed = entrants(["draft"], [3], rules=False)[1]
    assert dict(fixed.options) == {"adaptive": False, "max_draft_tokens": 3} and fixed.num_fixed == 3


def test_every_rule_takes_part() -> None:
    found = {e.name: dict(e.options) for e in entrants(["ngram", "draft"], [], rules=True)}
    assert [*found] == [
        "ngram coupled", "ngram token", "ngram block", "draft coupled", "draft token", "draft block", "draft tree",
    ]  # fmt: skip
    assert found["draft token"] == {"verification": "rejection", "chain_rule": "token", "tree_width": 1}
    assert found["draft tree"]["tree_width"] > 1


def test_auto_is_all_there_is_for_the_model() -> None:
    assert {"ngram", "draft"} <= set(auto_drafters("mini", None)) and auto_drafters("mini", None)[-1] == "portfolio"
    assert "draft" not in auto_drafters("/some/model", None)


def test_a_draft_model_that_was_given_joins_the_portfolio() -> None:
    names = auto_drafters("mini", "small")
    assert "draft=small" in names and "draft" not in names
    assert names[-1].startswith("portfolio=") and names[-1].endswith("+draft=small") and "+draft+" not in names[-1]


def test_spec_bench_has_six_tasks() -> None:
    cases = [PromptCase(("a",), True, name, "f:1") for name in ("writing", "stem", "rag", "qa")]
    assert [case.category for case in spec_bench(cases)] == [CHAT, CHAT, "rag", "qa"]


def test_a_drafter_the_model_has_not_is_left_out_once() -> None:
    class Lacking(Drafting):
        def with_drafter(self, drafter: str, **options: Any) -> Any:
            if drafter == "mtp":
                raise UnsupportedError("it has no module")
            return drafter, options

    wanted = entrants(["ngram", "mtp"], [2], rules=False)
    made, left_out = build(Lacking(), wanted, {"tree_width": 3}, may_lack=True)  # type: ignore[arg-type]
    assert left_out == {"mtp": "it has no module"} and list(made) == ["none", "ngram", "ngram fixed 2"]
    options: Any = {"adaptive": False, "max_draft_tokens": 2}
    assert made["ngram fixed 2"] == ("ngram", options), "n-grams have no trees"
    with pytest.raises(UnsupportedError, match="no module"):
        build(Lacking(), wanted, {}, may_lack=False)  # type: ignore[arg-type]


def test_samples_of_the_rejection_rule_are_not_compared() -> None:
    cold, warm = run(engines(same=Drafting(), other=Drafting(verification="rejection")), CASES, PARAMS, 1)
    assert [row["identical"] for row in cold["rows"]] == [True, True, True]
    assert [row["identical"] for row in warm["rows"]] == [True, True, None]
    assert [row["identical"] for row in warm["categories"]["code"]] == [True, True, None]


def test_figures_by_depth_and_drafting_time() -> None:
    detail = run(engines(fast=Drafting(0.005)), CASES, PARAMS[:1], 2)[0]["details"]["fast"]
    assert detail["acceptance_by_depth"] == (1.0, 0.5) and detail["steps_by_depth"] == (12, 12)
    assert detail["draft_share"] == 0.1 and detail["num_failed"] == 0


def test_the_policy_stands_beside_its_best_fixed_setting() -> None:
    figures = {"ngram": 2.0, "portfolio": 3.0, "ngram fixed 2": 1.0, "ngram fixed 4": 4.0, "draft fixed 2": 5.0}
    rows = [{"drafter": name, "speedup": speedup} for name, speedup in figures.items()]
    wanted = [*entrants(["ngram", "portfolio"], [2, 4], False), Entrant("draft fixed 2", "draft", num_fixed=2)]
    found = against_fixed({"rows": rows, "categories": {"code": rows}}, wanted)
    assert [(row["category"], row["drafter"], row["best_fixed"], row["ratio"]) for row in found] == [
        ("all", "ngram", "ngram fixed 4", 0.5),
        ("all", "portfolio", "draft fixed 2", 0.6),
        ("code", "ngram", "ngram fixed 4", 0.5),
        ("code", "portfolio", "draft fixed 2", 0.6),
    ]


def test_the_drafter_that_gains_most_is_recommended() -> None:
    wanted = entrants(["ngram", "suffix", "draft=d"], [4], rules=False)

    def run(noise: bool = False, identical: bool | None = True, **speedups: float | None) -> dict[str, Any]:
        names = {"draft": "draft=d", "fixed": "ngram fixed 4"}
        rows = [(names.get(name, name), gain) for name, gain in speedups.items()]
        same = {"within_noise": noise, "identical": identical}
        return {"rows": [{"drafter": name, "speedup": gain, **same} for name, gain in rows]}

    runs = [run(none=1.0, ngram=1.2, suffix=1.6, fixed=3.0), run(none=1.0, ngram=1.2, suffix=0.8, fixed=3.0)]
    assert recommended(runs, wanted) == ("ngram", {"ngram": 1.2, "suffix": pytest.approx(1.131, abs=1e-3)})
    assert recommended([run(ngram=0.9, suffix=1.0)], wanted) == ("none", {"ngram": 0.9, "suffix": 1.0})
    assert recommended([run(ngram=None)], wanted) == ("none", {})
    assert recommended([run(noise=True, ngram=1.4)], wanted) == ("none", {"ngram": 1.4})
    assert recommended([run(noise=True, ngram=1.4), run(ngram=1.4)], wanted) == ("ngram", {"ngram": 1.4})
    only_the_loss_is_sure = [run(noise=True, ngram=1.6), run(ngram=0.9)]
    assert recommended(only_the_loss_is_sure, wanted) == ("none", {"ngram": 1.2})
    assert recommended([run(ngram=1.4), run(identical=False, ngram=1.4)], wanted) == ("none", {"ngram": 1.4})
    assert recommended([run(ngram=1.4), run(identical=None, ngram=1.4)], wanted) == ("ngram", {"ngram": 1.4})


def test_costs_come_from_the_engine_that_measured_most() -> None:
    def measured(*rows: int) -> Any:
        costs = Costs(PassCosts({num: num / 1e3 for num in rows}))
        return SimpleNamespace(engine=SimpleNamespace(policy=SimpleNamespace(costs=costs)))

    assert pass_costs_ms({"none": Drafting()}) == {}  # type: ignore[dict-item]
    assert pass_costs_ms({"a": measured(1), "b": measured(1, 2, 8)}) == {1: 1.0, 2: 2.0, 8: 8.0}


def test_json_markdown_and_html_hold_the_figures(tmp_path: Path) -> None:
    report = a_report(**{"fast|er": Drafting(0.005), "fixed 2": Drafting(0.004, wrong_at=2)})
    picture = Picture("A picture", "a.svg", SVG)
    paths = write(tmp_path, report, [picture])
    assert [path.name for path in paths] == ["report.json", "report.md", "report.html", "a.svg"]
    kept = json.loads(paths[0].read_text("utf-8"))
    assert [run["temperature"] for run in kept["runs"]] == [0.0, 1.0] and kept["pass_ms"] == {"1": 2.0, "4": 3.0}
    text = paths[1].read_text("utf-8")
    row = "| fast\\|er | 200.0 | 2.00x | 2.00-2.00 | 1.71x | 2.00 | 100% | 50% | 25% | 10% | yes |"
    assert row in text
    assert "| fixed 2 | 250.0 | 2.50x | 2.50-2.50 | 2.14x | 2.00 | 100% | 50% | 25% | 10% | NO |" in text
    assert "| fast\\|er | 2.00x (1.71x) | 2.00x (1.71x) |" in text
    assert "~: within noise" in text and "tokens/s: the median over prompts" in text
    assert "| all | fast\\|er | 2.00x | fixed 2 | 2.50x | 0.80 |" in text and "| mtp | has no module |" in text
    assert "| 4 | 3.000 | 1.50x |" in text and "![A picture](a.svg)" in text and "1 were longer" in text


def test_the_page_needs_no_other_file_and_escapes_text(tmp_path: Path) -> None:
    report = a_report(**{"fast|er": Drafting(0.005), "fixed 2": Drafting(0.004, wrong_at=2)})
    page = write(tmp_path, report, [Picture("A", "a.svg", SVG)])[2].read_text("utf-8")
    assert "&lt;a cpu&gt;" in page and "<a cpu>" not in page and "chat &amp; talk" in page
    assert page.count("src=") == 1 and "http" not in page and '<td class="no">NO</td>' in page
    assert b64decode(page.partition("base64,")[2].partition('"')[0]).decode() == SVG


def test_pictures_are_drawn_of_what_the_policy_leads() -> None:
    pictures = report_pictures.draw(a_report(**{"fast|er": Drafting(0.005), "fixed 2": Drafting()}))
    files = ["speedup-t0.svg", "depth-t0.svg", "speedup-t1.svg", "depth-t1.svg", "cost.svg"]
    assert [picture.file for picture in pictures] == files
    for picture in pictures:
        assert picture.title in picture.svg and "fixed 2" not in picture.svg
        assert picture.file == "cost.svg" or "http" not in picture.svg.replace("http://www.w3.org/2000/svg", "")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write into --out"):
        check_folder(tmp_path / "file")
