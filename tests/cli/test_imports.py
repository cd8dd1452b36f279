"""What a command imports: heavy libraries only where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "pydantic", "fastapi", "uvicorn", "asyncio")
UNUSED = ("transformers", "fastapi", "uvicorn", "ray", "xgrammar", "triton", "huggingface_hub.file_download")
HELP = "import forerun.cli.app"
GENERATE = (
    "from typer.testing import CliRunner; from forerun.cli.app import app; "
    "result = CliRunner().invoke(app, ['generate', 'hi', '-n', '1', '--model', 'mini', '--max-tokens', '1']); "
    "assert result.exit_code == 0, result.output"
)


@pytest.mark.parametrize(("program", "heavy"), [(HELP, HEAVY), (GENERATE, UNUSED)], ids=["help", "generate"])
def test_nothing_heavy_is_imported(program: str, heavy: tuple[str, ...]) -> None:
    said = f"{program}; import sys; print('found:', *sorted(set({heavy!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["found:"]


def test_importing_does_not_look_for_garbage() -> None:
    """Among the objects of torch that takes a tenth of the time."""
    program = f"import gc; {GENERATE}; print('found:', gc.isenabled() and gc.get_freeze_count() > 100_000)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "found: True", done.stderr
    assert "leaked" not in done.stderr, "at its end the process leaves its objects, on purpose"
