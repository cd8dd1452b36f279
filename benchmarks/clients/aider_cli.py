"""aider, the command: a message without a repository."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tour import FOX, KEY, MODEL, V1, check

HOME = tempfile.mkdtemp()


@check("message")
def _():
    command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{MODEL}", "--no-git", "--yes-always",
               "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-stream", "--chat-mode",
               "ask", "--no-show-release-notes", "--message", FOX]  # fmt: skip
    keys = {"HOME": HOME, "OPENAI_API_KEY": KEY, "OPENAI_API_BASE": V1}
    said = subprocess.run(command, env={**os.environ, **keys}, cwd=HOME, capture_output=True, text=True, check=True,
                          stdin=subprocess.DEVNULL).stdout  # fmt: skip
    return "Tokens:" in said
