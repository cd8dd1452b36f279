"""llm, the command: a model of the configuration's list, whole and streamed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tour import FOX, KEY, MODEL, V1, check

FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: here\n  model_name: {MODEL}\n  api_base: {V1}\n  api_key_name: here\n"
)
(FOLDER / "keys.json").write_text(f'{{"here": "{KEY}"}}')


def llm(*arguments):
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    return subprocess.run(command, env={**os.environ, "LLM_USER_PATH": str(FOLDER)}, capture_output=True, text=True,
                          check=True, stdin=subprocess.DEVNULL).stdout.strip()  # fmt: skip


@check("prompt, streamed and not")
def _():
    return llm("-m", "here", FOX) and llm("-m", "here", "--no-stream", "-s", "Be kind.", FOX)


@check("continue a conversation")
def _():
    return llm("-c", "And a cat?")
