"""`forerun bench speed`, `forerun verify` and `forerun inspect`: JSON fields, exit status, bad input."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forerun.llm
import forerun.opening
from forerun.assemble import assemble
from forerun.models.gguf_export import export_gguf
from forerun.quantize.run import open_source, round_model
from forerun.quantize.settings import QuantizeSettings
from forerun.speculation import selfcheck
from forerun.weights.checkpoint import Checkpoint
from forerun.weights.resolve import resolve_model
from tests.drafters.test_mtp import WithModule
from tests.models.factory import CASES, make_checkpoint, random_hf_model, save_checkpoint

ROW = {
    "drafter", "tokens_per_s", "speedup", "speedup_interval", "within_noise", "acceptance_length", "identical",
}  # fmt: skip
CHECK = {
    "drafter", "temperature", "num_prompts", "num_tokens", "num_steps", "acceptance_length", "differences",
    "tensor_parallel", "pipeline_parallel", "num_drafted", "num_failed", "failed",
}  # fmt: skip
INSPECT = {
    "model", "folder", "family", "implementation", "num_parameters", "sizes", "dtype", "context",
    "usable_context", "tokenizer", "parsers", "adapters",
    "chat_template", "drafters", "memory", "backend", "kernels", "storage", "slow", "text_part", "profile",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"category": "chat", "turns": ["Hello, how are you?", "Why is that?"]},
        {"category": "story", "turns": ["Tell me a story about a cat."]},
        {"prompt": "Once upon a time there was"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return str(path)


def test_off_a_terminal_progress_is_lines(
    run: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.progress.SECONDS_A_LINE", 0.0)
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    given = ("--drafters", "ngram", "--max-tokens", "2")
    said = run("bench", "speed", "mini", "--prompts", prompts, *given, "--repeats", "1").stderr
    assert "prompts: 1 of 3, " in said and "prompts: 3 of 3" not in said
    report = ("--repeats", "1", "--out", str(tmp_path / "report"))
    assert "prompts: 1 of " in run("bench", "drafters", "mini", "--suite", prompts, *given, *report).stderr
    verified = run("verify", "mini", "--prompts", prompts, *given, "--json")
    assert "conversations: 1 of " in verified.stderr and json.loads(verified.stdout)["checks"]


def test_without_a_draft_model_its_drafter_is_not_measured(
    run_json: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `verify` and `bench speed` take unless drafters are named works with any model."""
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    (tmp_path / "own").symlink_to(resolve_model("mini"))
    given = ("--prompts", prompts, "--max-tokens", "2", "--limit", "1")
    for model, drafters in ((str(tmp_path / "own"), ["ngram"]), ("mini", ["ngram", "draft"])):
        speed = run_json("bench", "speed", model, *given, "--repeats", "1")
        assert [row["drafter"] for row in speed["rows"]] == ["none", *drafters]
        checks = run_json("verify", model, *given, "--temperature", "0")["checks"]
        assert [check["drafter"] for check in checks] == drafters


def test_bench_json(run_json: Any, prompts: str, tmp_path: Path) -> None:
    chart = tmp_path / "speed.svg"
    options = ("--prompts", prompts, "--max-tokens", "8", "--repeats", "1", "--by-category", "--chart", str(chart))
    report = run_json("bench", "speed", "--model", "mini", "--drafters", "none,ngram,draft", *options)
    assert all(f">{text}<" in chart.read_text("utf-8") for text in ("ngram", "draft", "all", "chat", "story", "other"))
    assert [row["drafter"] for row in report["rows"]] == ["none", "ngram", "draft"]
    assert all(set(row) == ROW and row["identical"] is True for row in report["rows"])
    assert report["rows"][0]["speedup"] == 1.0 and report["rows"][0]["acceptance_length"] == 1.0
    assert {"cpu", "cores", "kernels", "commit", "forerun"} <= set(report["machine"])
    assert list(report["categories"]) == ["chat", "story", "other"] and report["num_prompts"] == 3


def test_a_chart_that_cannot_be_written_costs_no_figures(
    run: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("forerun.cli.bench._drawn", fail)
    options = ("--prompts", prompts, "--limit", "1", "--max-tokens", "2", "--repeats", "1", "--drafters", "ngram")
    said = run("bench", "speed", "mini", *options, "--chart", str(tmp_path / "a.svg"), status=2)
    assert "ngram" in said.stdout and said.stderr.splitlines()[-1].startswith("error: output: No space left")


def test_a_draft_model_reaches_the_portfolio_that_asks_for_one(run_json: Any, prompts: str) -> None:
    options = (
        "--prompts",
        prompts,
        "--limit",
        "1",
        "--max-tokens",
        "4",
        "--repeats",
        "1",
        "--draft-model",
        "mini-draft",
    )
    wanted = "ngram,portfolio=suffix+draft,portfolio=suffix+recycling"
    report = run_json("bench", "speed", "--model", "mini", "--drafters", wanted, *options)
    assert [row["drafter"] for row in report["rows"]][1:] == wanted.split(",")


@pytest.mark.parametrize(
    ("drafters", "said"),
    [
        ("portfolio=suffix+none", "a portfolio's members are single drafters"),
        ("draft=./no-such-model", "there is no model './no-such-model'"),
        ("portfolio=suffix+draft=mini-drft", "did you mean mini-draft"),
        ("ngrm", "there is no drafter ngrm; choose from dflash, draft, eagle"),
    ],
)
def test_what_is_wrong_with_a_drafter_is_said_before_the_model_is_loaded(
    run: Any, prompts: str, drafters: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forerun.opening, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("forerun.weights.resolve.download", lambda name, _: pytest.fail(f"asked the hub for {name}"))
    if "drft" in drafters:
        monkeypatch.setattr("forerun.weights.resolve.HubName.parse", lambda _: None)
    result = run("bench", "speed", "--drafters", drafters, "--prompts", prompts, status=2)
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", [["bench", "speed"], ["verify"]])
def test_the_precision_of_the_cache_reaches_the_engines(
    run: Any, command: list[str], prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    monkeypatch.setattr(forerun.llm, "assemble", lambda *given: made.append(assemble(*given)) or made[-1])
    options = ("--prompts", prompts, "--limit", "1", "--max-tokens", "3", "--drafters", "ngram", "--json")
    run(*command, *options, "--kv-cache-dtype", "int8")
    assert len(made) == 2 and all(engine.kv_cache.layers[0].is_scaled for engine in made)


def test_bench_table(run: Any, prompts: str) -> None:
    options = ("--prompts", prompts, "--max-tokens", "4", "--repeats", "1", "--limit", "1", "-t", "1")
    result = run("bench", "speed", "--drafters", "ngram", *options)
    from forerun.kernels.select import select_kernels

    kernels, lines = select_kernels(), result.stdout.splitlines()
    assert f"cores, kernels {kernels.name} ({kernels.reason}), commit " in result.stderr
    assert [line.split()[0] for line in lines[2:5]] == ["drafter", "none", "ngram"]
    assert [line.split()[3] for line in lines[3:5]] == ["-", "-"]  # a single measurement has no interval
    assert lines[3].split()[2] == "1.00x" and lines[4].split()[2].startswith("~")


def test_a_bad_prompt_file_is_named_with_its_line(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": }\n', "utf-8")
    for command in (["bench", "speed"], ["verify"]):
        assert f"{path}:2: not JSON" in run(*command, "--prompts", str(path), status=2).stderr.replace("\n", "")


@pytest.mark.parametrize("command", [["bench", "speed"], ["verify"]])
def test_an_unknown_drafter_is_refused(run: Any, command: list[str]) -> None:
    assert "there is no drafter magic" in run(*command, "--drafters", "ngram,magic", status=2).stderr


def test_verify_finds_no_difference(run_json: Any, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(selfcheck.check_rejection, num_samples=300)  # tests/exactness/test_rejection_law.py draws more
    monkeypatch.setattr(selfcheck, "check_rejection", few)
    options = ("--prompts", prompts, "--max-tokens", "12", "--temperature", "0,1")
    report = run_json("verify", "mini", "--drafters", "ngram,draft", *options)
    assert report["identical"] and report["passed"] and report["rejection"]["passed"]
    assert [(c["drafter"], c["temperature"]) for c in report["checks"]] == [
        ("ngram", 0.0), ("draft", 0.0), ("ngram", 1.0), ("draft", 1.0),
    ]  # fmt: skip
    assert all(set(check) == CHECK and check["differences"] == [] for check in report["checks"])
    assert not report["failed"] and not any(check["num_failed"] for check in report["checks"])
    assert all(check["num_drafted"] for check in report["checks"] if check["drafter"] == "draft")


FAILING = """
from forerun.drafters.base import DrafterContext, Stateless


class Fails(Stateless):
    name, max_nodes = "fails", 4

    def __init__(self, context: DrafterContext) -> None: ...

    def propose(self, drafts) -> None:
        raise ValueError("broken")


class Silent(Fails):
    def propose(self, drafts) -> None: ...
"""


def test_drafts_that_were_never_checked_are_no_proof(
    run: Any, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    (tmp_path / "mine.py").write_text(FAILING, "utf-8")
    options = ("--prompts", prompts, "--max-tokens", "4", "--temperature", "0", "--drafters")
    said = run("verify", "mini", *options, f"{tmp_path}/mine.py:Fails", status=1).stdout
    assert "failed (answers: 4), so not all drafts were checked" in " ".join(said.split()) and said.endswith("FAILED\n")
    silent = run("verify", "mini", *options, f"{tmp_path}/mine.py:Silent")
    assert "drafted nothing: there were no drafts to check" in " ".join(silent.stderr.split())
    assert "identical" in silent.stdout
    measured = run("bench", "speed", "mini", *options, f"{tmp_path}/mine.py:Fails", "--repeats", "1", "--limit", "1")
    assert "failed)" in measured.stdout


def test_verify_of_plain_decoding_compares_batches_with_single_conversations(
    run_json: Any, run: Any, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    options = ("verify", "mini", "--drafters", "none", "--prompts", prompts, "--max-tokens", "6", "--temperature", "1")
    [check] = run_json(*options)["checks"]
    assert (check["drafter"], check["num_prompts"], check["acceptance_length"]) == ("none", 3, 1.0)
    assert check["num_tokens"] == check["num_steps"] > 0
    monkeypatch.setattr("forerun.bench.equality.first_difference", lambda a, b: 2)
    assert "DIFFERENT" in run(*options, "--limit", "1", status=1).stdout


def test_verify_shows_figures_of_a_rejection_rule_that_fails(
    run: Any, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"rule": "block", "num_samples": 300, "chi_square": 99.5, "degrees": 9, "p_value": 0.0}
    cases = [case | {"passed": False}, case | {"rule": "token", "passed": True}]
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": False, "cases": cases})
    options = ("--drafters", "none", "--prompts", prompts, "--max-tokens", "4", "--limit", "1")
    shown = " ".join(run("verify", "mini", *options, status=1).stdout.split())
    assert "2 cases, 1 FAILED" in shown and "block: chi-square 99.5 over 9 degrees" in shown and "token:" not in shown


def test_verify_exits_1_on_a_difference(run: Any, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.bench.equality.first_difference", lambda a, b: 2)
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": True, "cases": []})
    options = ("--prompts", prompts, "--max-tokens", "4", "--temperature", "0", "--limit", "1")
    said = run("verify", "mini", "--drafters", "ngram", *options, status=1).stdout
    assert "differs first at token 2" in said and "DIFFERENT" in said


def test_verify_exits_1_when_the_rejection_rule_fails(run: Any, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"rule": "token", "num_samples": 9, "chi_square": 99.0, "degrees": 3, "p_value": 0.0, "passed": False}
    monkeypatch.setattr("forerun.cli.verify._check_rejection", lambda llm: {"passed": False, "cases": [case]})
    options = ("--prompts", prompts, "--max-tokens", "4", "--temperature", "0", "--limit", "1")
    said = " ".join(run("verify", "mini", "--drafters", "ngram", *options, status=1).stdout.split())
    assert "FAILED" in said and "on a toy model of three tokens" in said


def test_temperatures_must_be_numbers(run: Any) -> None:
    assert "error: --temperature must be numbers" in run("verify", "mini", "--temperature", "0,warm", status=2).stderr


def test_inspect_json(run_json: Any) -> None:
    report = run_json("inspect", "mini")
    assert set(report) == INSPECT
    drafters = report["drafters"]
    assert drafters["draft"] == "with mini-draft" and drafters["mtp"] == "with mini-mtp"
    free = [drafter for drafter, needs in drafters.items() if needs == "always"]
    assert free == ["layer_skip", "ngram", "recycling", "suffix"]
    assert drafters["medusa"] == "with mini-medusa" and report["chat_template"] is True
    memory = report["memory"]
    assert memory["kv_bytes_at_full_context"] == memory["kv_bytes_per_token"] * report["context"] > 0
    assert {"linear", "attention", "gumbel_argmax"} <= set(report["kernels"])


def test_inspect_tells_what_comes_with_a_checkpoint_and_reads_no_weights(
    run: Any, run_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WithModule(tmp_path, "qwen3.5").folder
    (folder / "polite").mkdir()
    (folder / "polite" / "adapter_config.json").write_text("{}", "utf-8")
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("read"))
    report = run_json("inspect", str(folder))
    assert report["drafters"]["mtp"] == "with the checkpoint's own module" and report["adapters"] == ["polite"]
    assert report["drafters"]["layer_skip"] == "always" and report["storage"]["bits_per_weight"] == 32
    memory, context = report["memory"], report["usable_context"]
    assert memory["state_bytes"] == 3 * 4 * (3 * 88 + 4 * 12 * 10)
    taken = memory["weights_bytes"] + context * memory["kv_bytes_per_token"] + memory["state_bytes"]
    assert memory["bytes_at_usable_context"] == taken
    text = " ".join(run("inspect", str(folder)).stdout.split())
    assert "8.7 KiB a request" in text and "run op by op" in text and "polite" in text
    assert f"for one request of {context} tokens" in text
    found = run_json("inspect", "mini")["parsers"]
    assert found == {"tools": "hermes", "template_takes_tools": False, "reasoning": None}
    assert "yes, without tools (a server describes them" in " ".join(run("inspect", "mini").stdout.split())


@pytest.mark.parametrize("case", ["step3.5", "mimo-v2"])
def test_inspect_names_family_module_and_parsers(case: str, run_json: Any, tmp_path: Path) -> None:
    folder = WithModule(tmp_path, case).folder
    template = "{{ messages }}{{ tools }}<think></think><tool_call>\n<function=name>\n</tool_call>"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    report = run_json("inspect", str(folder))
    assert (report["family"], report["implementation"]) == (CASES[case][0], "forerun")
    assert report["drafters"]["mtp"] == "with the checkpoint's own 3 modules, one behind the other"
    assert report["sizes"]["num_kv_heads"] == 2
    found = {"tools": "qwen3_coder", "template_takes_tools": True, "reasoning": "<think> ... </think>"}
    assert report["parsers"] == found


def test_inspect_names_fields_that_are_left_out(run: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    assert "does not know" not in run("inspect", str(folder)).stderr
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    more = {"foo_bar": 3, "empty": [], "some_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps({**raw, **more}), "utf-8")
    assert "does not know and leaves out: foo_bar" in " ".join(run("inspect", str(folder)).stderr.split())
    (folder / "config.json").write_text(json.dumps({**raw, "foo_scale": 3}), "utf-8")
    said = " ".join(run("inspect", str(folder), status=2).stderr.split())
    assert "foo_scale" in said and 'LLM(MODEL, implementation="transformers")' in said


def test_inspect_tells_keys_and_values_of_every_kind_of_layer(run: Any, run_json: Any, tmp_path: Path) -> None:
    folder = make_checkpoint("gemma4", tmp_path / "shared")
    sizes = run_json("inspect", str(folder))["sizes"]
    assert sizes["num_kv_shared_layers"] == 3
    assert sizes["kv_kinds"] == [
        {"num_kv_heads": 2, "head_dim": 16, "window": 7, "num_layers": 2},
        {"num_kv_heads": 2, "head_dim": 24, "window": 0, "num_layers": 1},
    ]
    folder = make_checkpoint("gemma4-experts", tmp_path / "apart")
    text = " ".join(run("inspect", str(folder)).stdout.split())
    said = "keys and values: 2 of 16 entries in 2 layers with a window of 5, 1 of 32 entries in 2 layers"
    assert said in text and "layers read" not in text


def test_inspect_says_how_weights_are_stored(run: Any, run_json: Any, tmp_path: Path) -> None:
    whole = run_json("inspect", "mini")
    sizes = whole["storage"]["bytes"]
    assert whole["storage"]["method"] == whole["dtype"] == "BF16" and whole["storage"]["bits_per_weight"] == 16
    assert list(sizes) == ["feed-forward", "embedding", "attention", "norms"] and whole["slow"] is None
    assert sum(sum(types.values()) for types in sizes.values()) == 2 * whole["num_parameters"]
    export_gguf(Path(whole["folder"]), tmp_path / "mini.gguf", "Q4_K_M")
    stored = run_json("inspect", str(tmp_path / "mini.gguf"))["storage"]
    assert (stored["method"], stored["bits"]) == ("Q4_K_M", 4) and 5 < stored["bits_per_weight"] < 7
    assert set(stored["bytes"]["feed-forward"]) == {"Q5_0", "Q6_K", "Q4_K"}
    assert "stored as Q4_K_M (GGUF): " in " ".join(run("inspect", str(tmp_path / "mini.gguf")).stdout.split())


def test_inspect_names_a_quantization(run: Any, run_json: Any, tmp_path: Path) -> None:
    folder = tmp_path / "q4"
    settings = QuantizeSettings(method="rtn", bits=4, group_size=128)
    round_model(open_source(resolve_model("mini"), settings), folder, settings, lambda _: None)
    stored = run_json("inspect", str(folder))["storage"]
    assert (stored["method"], stored["bits"], stored["group_size"]) == ("gptq", 4, 128)
    assert {"int4", "F16"} <= set(stored["bytes"]["attention"]) and set(stored["bytes"]["embedding"]) == {"BF16"}
    text = " ".join(run("inspect", str(folder)).stdout.split())
    assert "stored as gptq, 4 bits in groups of 128: " in text and "stored as bfloat16" not in text


@pytest.mark.parametrize(
    ("family", "how", "shape"),
    [
        ("gpt_neox", "with forerun's attention and matrices: as exactly as", "2 layers of 32, 4 heads, 4 for keys"),
        ("bloom", "a token at a time: as exactly as", "2 layers of 32, 4 heads"),
        ("mamba", "a token at a time: as exactly as", "2 layers of 32"),
    ],
)
def test_a_model_that_runs_through_transformers_is_called_slow(
    run: Any, run_json: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, how: str, shape: str
) -> None:
    folder = str(save_checkpoint(random_hf_model(family, {}), tmp_path))
    report = run_json("inspect", folder)
    said = f"{family} models run through transformers, {how}"
    assert report["slow"].startswith(said) and report["slow"].endswith("(docs/models.md lists them)")
    assert report["storage"]["bytes"] and (report["memory"]["kv_bytes_per_token"] > 0) == (family == "gpt_neox")
    shown = run("inspect", folder)
    assert " ".join(f"{shown.stdout} {shown.stderr}".split()).count(said) == 1
    assert shape in " ".join(shown.stdout.split()) and "None" not in shown.stdout
    if family == "gpt_neox":
        monkeypatch.setattr("forerun.cli.serve._run", lambda *_: None)
        logged = run("serve", folder, "--port", "0", "--log-format", "json", "--drafter", "none").stderr.splitlines()
        assert said in json.loads(logged[-1])["event"] and json.loads(logged[-1])["level"] == "warning"
        assert said in " ".join(run("generate", folder, "a b", "--max-tokens", "2").stderr.split())


def test_inspect_tells_experts_and_latents(run: Any, run_json: Any, tmp_path: Path) -> None:
    folder = str(make_checkpoint("deepseek", tmp_path))
    sizes = run_json("inspect", folder)["sizes"]
    assert (sizes["num_experts"], sizes["experts_per_token"], sizes["latent_size"]) == (8, 3, 28)
    expert = 3 * 16 * 32
    assert run_json("inspect", folder)["num_parameters"] - sizes["active_parameters"] == 5 * expert
    text = run("inspect", folder).stdout
    assert "8, 3 a token" in text and "one latent of 28" in text


def test_inspect_shows_square_brackets_as_they_are(run: Any, tmp_path: Path) -> None:
    """They would be colours, and a closing one without an opening one an error."""
    folder = make_checkpoint("llama", tmp_path / "m[v2]")
    (folder / "chat_template.jinja").write_text("{{ messages }}[THINK]x[/THINK]", "utf-8")
    text = run("inspect", str(folder)).stdout
    assert "reasoning in [THINK] ... [/THINK]" in " ".join(text.split())
    assert "m[v2]" in text.split("family")[0].replace("\n", "")


def test_inspect_table(run: Any) -> None:
    text = run("inspect", "mini").stdout
    assert "parameters" in text and "KV cache" in text and "mini-draft" in text
