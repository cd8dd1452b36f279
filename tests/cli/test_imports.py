"""What a command imports: heavy libraries only where they are used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "pydantic", "fastapi", "uvicorn", "asyncio")
UNUSED = (
    "transformers", "sentencepiece", "fastapi", "uvicorn", "ray", "xgrammar", "triton", "torch._dynamo",
    "huggingface_hub.file_download",
)  # fmt: skip
HELP = "import forerun.cli.app"
OF_EXTRAS = (  # what a plain install does not have; pydantic comes with typer
    "interegular", "fastapi", "starlette", "uvicorn", "xgrammar", "aiohttp", "ray",
)  # fmt: skip
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS}))"
GENERATE = (
    "from typer.testing import CliRunner; from forerun.cli.app import app; "
    "result = CliRunner().invoke(app, ['generate', 'hi', '-n', '1', '--model', 'mini', '--max-tokens', '1']); "
    "assert result.exit_code == 0, result.output"
)


def said(program: str, *expressions: str) -> list[str]:
    """What expressions are worth after a program."""
    tell = f"{program}; import gc, sys; print('found:', {', '.join(expressions)})"
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr, "at its end the process leaves its objects, on purpose"
    return done.stdout.splitlines()[-1].split()


def test_help_imports_nothing_heavy() -> None:
    assert said(HELP, f"*set({HEAVY}) & set(sys.modules)") == ["found:"]


def test_generate_imports_what_it_uses_and_does_not_look_for_garbage() -> None:
    """Among the objects of torch that takes a tenth of the time."""
    frozen = "gc.isenabled() and gc.get_freeze_count() > 100_000"
    assert said(GENERATE, f"*set({UNUSED}) & set(sys.modules)", frozen) == ["found:", "True"]


def test_inspect_runs_without_extras() -> None:
    ran = "from typer.testing import CliRunner; from forerun.cli.app import app; ran = CliRunner().invoke(app, {})"
    done = said(f"{WITHOUT}; {ran.format(['inspect', 'mini'])}", "ran.exit_code", "'mini' in ran.output")
    assert done == ["found:", "0", "True"]


@pytest.mark.parametrize(
    ("command", "extra"), [("serve", "server"), ("batch", "server"), ("bench serve", "server"), ("deploy", "ray")]
)
def test_commands_of_an_extra_say_which(command: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "deployment.yaml").write_text("model: mini\n")
    given = {
        "serve": ["mini"],
        "batch": [str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl"), "--model", "mini"],
        "bench serve": [],
        "deploy": [str(tmp_path / "deployment.yaml")],
    }[command]
    argv = ["forerun", *command.split(), *given]
    program = f"{WITHOUT}; sys.argv = {argv}; from forerun.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f'`forerun {command}` needs `pip install ".[{extra}]"`' in " ".join(done.stderr.split()), done.stderr
    assert done.returncode and "Traceback" not in done.stderr
