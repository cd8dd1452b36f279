"""Chat templates: a conversation becomes the text the model was trained on.

Knows: where a folder keeps its templates, and the processes that render one (see `template_worker`). Does not know:
tokens.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from forerun.errors import CheckpointError, PromptError
from forerun.weights import template_worker
from forerun.weights.checkpoint import read_optional_json

TEMPLATE_FILE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates/*.jinja"  # by their names
NUM_RENDERERS = 4  # conversations rendered at the same time
MAX_WAIT_S = 60.0  # wall time, generous for a busy machine; the process itself stops after MAX_CPU_S of CPU time


def read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name; the usual one is "default", and "tool_use" is for conversations with tools.

    They are in files of their own; where the usual one is not, it is in tokenizer_config.json (`settings`), else in
    chat_template.json, and others may be beside it.
    """
    files = {"default": folder / TEMPLATE_FILE} | {path.stem: path for path in folder.glob(OTHER_TEMPLATES)}
    named: dict[str, Any] = {name: path.read_text("utf-8") for name, path in files.items() if path.exists()}
    if "default" not in named:
        found = settings.get("chat_template") or read_optional_json(folder / "chat_template.json").get("chat_template")
        told = {"default": found}
        if isinstance(found, list):
            told = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        named = {**told, **named}
    wrong = next((value for value in named.values() if not isinstance(value, str | None)), None)
    if wrong is not None:
        raise CheckpointError(f"{folder}: chat_template must be a string, got {type(wrong).__name__}")
    return {name: value for name, value in named.items() if value is not None}


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of a conversation; raises PromptError if the template refuses it, fails, or takes too much."""
    if not messages:
        raise PromptError("the conversation is empty; give at least one message with 'role' and 'content'")
    for message in [messages] if isinstance(messages, str) else messages:
        if not isinstance(message, Mapping) or "role" not in message or len(message) < 2:
            raise PromptError(
                'a conversation is a list of messages such as {"role": "user", "content": "Hello!"}, '
                f"not of {message!r:.80}"
            )
    try:
        asked = pickle.dumps((template, list(messages), dict(variables)))
    except Exception as error:  # whatever an object's own pickling raises
        raise PromptError(f"messages and variables of a chat template are plain values: {error!r}") from error
    answer = _RENDERERS.answer(asked)
    kind, text = answer[0], answer[1:].decode("utf-8", "surrogatepass")
    match kind:
        case template_worker.DONE:
            return text
        case template_worker.REFUSED:
            raise PromptError(f"the chat template refuses these messages: {text}")
        case template_worker.FAILED:
            raise PromptError(f"the chat template cannot render these messages: {text}; check their fields")
        case template_worker.INVALID:
            raise CheckpointError(f"the chat template is not valid jinja ({text})")
    limits = f"{template_worker.MAX_CPU_S:g} s or {template_worker.MEMORY_BYTES >> 20} MiB"
    raise PromptError(
        f"the chat template takes more than {limits} for these messages: make the conversation shorter, or see whether "
        "the template is what it should be"
    )


class _Renderers:
    """Processes that render templates, kept for the next conversation. Safe from several threads."""

    def __init__(self) -> None:
        self._seats = BoundedSemaphore(NUM_RENDERERS)
        self._idle: list[_Renderer] = []
        os.register_at_fork(after_in_child=self._idle.clear)
        atexit.register(self._close)

    def answer(self, asked: bytes) -> bytes:
        """The worker's answer; TOO_MUCH if its process died or did not answer in time."""
        with self._seats:
            renderer = self._take()
            answer = renderer.answer(asked)
            if answer is None:
                renderer.close()
                return bytes([template_worker.TOO_MUCH])
            self._idle.append(renderer)
            return answer

    def _take(self) -> _Renderer:
        try:
            renderer = self._idle.pop()
        except IndexError:
            return _Renderer()
        if renderer.alive:
            return renderer
        renderer.close()
        return self._take()

    def _close(self) -> None:
        for renderer in self._idle:
            renderer.close()


class _Renderer:
    """One process that renders templates."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-P", template_worker.__file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def answer(self, asked: bytes) -> bytes | None:
        """The process's answer; None if it ended, or took longer than MAX_WAIT_S."""
        try:
            self._connection.send_bytes(asked)
            return self._connection.recv_bytes() if self._connection.poll(MAX_WAIT_S) else None
        except (OSError, EOFError):
            return None

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


_RENDERERS = _Renderers()
