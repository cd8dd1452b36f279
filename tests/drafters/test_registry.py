"""A drafter is named in one place, its own module, and everything else reads it from there."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import LLM, SamplingParams, drafters
from forerun.bench.drafters import auto_drafters, entrants
from forerun.cli.app import app
from forerun.config import DrafterConfig, option_names
from forerun.drafters.base import DrafterSpec
from forerun.drafters.named import engine_config, only_read
from forerun.drafters.registry import all_specs, check, spec_of
from forerun.errors import ConfigError
from forerun.server.speculative import parse_speculative_config
from tests.support import mini

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/bigram.py"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The drafter of the documentation as one more module of the package, in which nothing else is changed."""
    module = Path(shutil.copy(EXAMPLE, tmp_path / "bigram.py"))
    module.write_text(module.read_text("utf-8").replace("max_draft_tokens=4)", 'vllm_names=("pairs",), auto=0)'))
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    all_specs.cache_clear()
    yield module
    del sys.modules["forerun.drafters.bigram"]
    all_specs.cache_clear()


def test_a_new_drafter_is_named_in_its_module_only(added: Path) -> None:
    assert engine_config("m", {"drafter": "auto"}).drafter.members[0].name == "bigram"
    assert "bigram" in auto_drafters("m", None)
    assert "bigram fixed 2" in [entrant.name for entrant in entrants(["bigram"], [2], False)]
    assert parse_speculative_config('{"method": "pairs"}') == {"drafter": "bigram"}
    shown = CliRunner().invoke(app, ["inspect", "mini", "--json"])
    assert json.loads(shown.stdout)["drafters"]["bigram"] == "always"
    with pytest.raises(ConfigError, match="choose from bigram, dflash, draft"):
        engine_config("m", {"drafter": "nobody"})
    params = SamplingParams(seed=1, max_tokens=24)
    expected = mini.plain().generate(mini.PROMPTS[:2], params)
    drafted = mini.drafting("bigram", adaptive=False).generate(mini.PROMPTS[:2], params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in expected]
    assert any(output.outputs[0].stats.drafters["bigram"].drafted for output in drafted)


def test_no_other_file_of_the_product_lists_the_drafters() -> None:
    """A file that names four of them is a table of its own; what can be trained is such a table."""
    names = [name for name, spec in all_specs().items() if spec.is_single]
    for path in (ROOT / "src/forerun").rglob("*.py"):
        text = path.read_text("utf-8")
        named = [name for name in names if re.search(rf'"{name}"', text)]
        assert len(named) < 4 or {"training", "train.py"} & set(path.parts), f"{path} lists {named}"


def test_a_file_of_the_users_may_state_its_own_spec(tmp_path: Path) -> None:
    path = Path(shutil.copy(EXAMPLE, tmp_path / "mine.py"))
    stated = spec_of(f"{path}:Bigram")
    assert stated.name == "bigram" and engine_config("m", {"drafter": f"{path}:Bigram"}).drafter.max_draft_tokens == 4
    path.write_text("class Mine: ...\nclass Other: ...\n", "utf-8")
    assert spec_of(f"{path}:Mine").max_draft_tokens == 5, "the file was changed, and is read again"
    with pytest.raises(ConfigError, match="has no class 'Yours'; it defines Mine, Other"):
        spec_of(f"{path}:Yours")
    with pytest.raises(ConfigError, match="there is no file"):
        spec_of("nowhere.py:Mine")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DrafterConfig(name="ngrm"), "there is no drafter ngrm; choose from .*; did you mean ngram"),
        (DrafterConfig(name="eagle"), "needs an EAGLE head"),
        (
            DrafterConfig(name="suffix", model="m"),
            "a draft model was given .* choose one of dflash, draft, eagle, medusa, mtp",
        ),
        (DrafterConfig(name="suffix", layers=(1,)), "layers were given .* choose one of layer_skip"),
        (DrafterConfig(name="suffix", members=(DrafterConfig(name="ngram"),)), "choose one of portfolio"),
        (DrafterConfig(name="portfolio"), "at least one"),
        (DrafterConfig(name="portfolio", members=(DrafterConfig(),)), "members are single drafters"),
        (DrafterConfig(name="portfolio", members=(DrafterConfig(name="draft"),)), "needs a small model"),
        (
            DrafterConfig(name="portfolio", members=(DrafterConfig(name="suffix"), DrafterConfig(name="suffix"))),
            "2 members named suffix: name each drafter once",
        ),
    ],
)
def test_options_that_do_not_fit_the_drafter(options: DrafterConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(options)


@pytest.mark.parametrize(
    ("drafter", "options", "said"),
    [
        ("suffix", {"tree_width": 3}, "tree_width 3 was given, but suffix would ignore it: .* one of dflash, draft,"),
        ("none", {"head_weights": "int8"}, "head_weights int8 was given, but none would ignore it"),
        ("portfolio=suffix+ngram", {"draft_vocabulary": "f"}, "but suffix and ngram would ignore it: .* draft, eagle"),
        ("mini", {}, "there is no drafter mini"),
    ],
)
def test_options_that_nobody_would_read_are_refused(drafter: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_config("mini", {"drafter": drafter, **options})


def test_options_that_some_member_or_a_file_reads_are_taken() -> None:
    taken = engine_config("mini", {"drafter": "portfolio=suffix+eagle", "tree_width": 3, "head_weights": "int8"})
    assert [member.tree_width for member in taken.drafter.members] == [3, 3]
    assert engine_config("somewhere", {"drafter": "auto", "tree_width": 3}), "it takes what there is"
    assert engine_config("mini", {"drafter": "suffix", "across_requests": False, "head_weights": "stored"})
    assert engine_config("mini", {"drafter": f"{EXAMPLE}:Bigram", "ngram_max": 7}).drafter.ngram_max == 7
    assert only_read("mini", "ngram", {"tree_width": 3, "ngram_max": 7, "adaptive": False, "max_num_seqs": 4}) == {
        "ngram_max": 7, "adaptive": False, "max_num_seqs": 4,
    }  # fmt: skip


@pytest.mark.parametrize(("drafter", "model", "theirs"), [("mtp", "mini-eagle", "eagle"), ("eagle", "mini-mtp", "mtp")])
def test_a_head_given_to_another_drafter(drafter: str, model: str, theirs: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{model} holds a head for the drafter {theirs}, not {drafter}: use {theirs}="
    ):
        LLM("mini", drafter=f"portfolio=suffix+{drafter}={model}")
    with pytest.raises(ConfigError, match=f"not {drafter}: use {theirs}={model}"):
        mini.plain().with_drafter(drafter, draft_model=model)


@pytest.mark.parametrize("spec", all_specs().values(), ids=lambda spec: spec.name)
def test_a_spec_is_in_itself_consistent(spec: DrafterSpec) -> None:
    assert set(spec.options) <= set(option_names()["DrafterConfig"])
    assert ("model" in spec.options) == bool(spec.model) and ("tree_width" in spec.options) == bool(spec.tree_width)


def test_the_documentation_says_what_the_specs_say() -> None:
    text = (ROOT / "docs/drafters.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == set(all_specs())
    for name, spec in all_specs().items():
        columns = rows[name].split(" | ")
        assert columns[0] == spec.help and re.split(r"\D", columns[-1])[0] == str(spec.max_draft_tokens)
        assert re.search(rf"^### .*\b{name}\b", text, re.MULTILINE), "a section tells when to use it"
        assert all(f"`{option}`" in text for option in spec.options)
