"""shell-gpt, the command."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tour import FOX, KEY, MODEL, V1, check

HOME = tempfile.mkdtemp()
SETTINGS = {"HOME": HOME, "OPENAI_API_KEY": KEY, "API_BASE_URL": V1, "DEFAULT_MODEL": MODEL, "USE_LITELLM": "false",
            "OPENAI_USE_FUNCTIONS": "false", "REQUEST_TIMEOUT": "120"}  # fmt: skip


def sgpt(*arguments):
    command = [str(Path(sys.executable).parent / "sgpt"), *arguments]
    return subprocess.run(command, env={**os.environ, **SETTINGS}, capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL).stdout.strip()  # fmt: skip


@check("prompt")
def _():
    return sgpt("--no-cache", "--no-md", FOX)
