"""Which of a command's arguments is the model, and where its prompt comes from.

Knows: arguments, files, standard input. Does not know: what is done with a prompt.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from forerun.cli import options as opt
from forerun.cli.console import print_note
from forerun.errors import ConfigError, DataError, PromptError, suggestion


def model_and_prompt(arguments: Sequence[str], model: str | None, file: Path | None) -> tuple[str, str]:
    """Sort out `[MODEL] [PROMPT]`, --model, --file and standard input. Raises ConfigError, DataError or PromptError.

    A single argument is the model if it names one, else the prompt. Two prompts are an error.
    """
    if len(arguments) > 2:
        raise ConfigError(f"{len(arguments)} arguments were given: put the prompt in quotes")
    if file is not None and len(arguments) == 2:
        raise ConfigError("the prompt was given twice, as an argument and with --file: give one")
    rest = list(arguments)
    if rest and file is not None and "/" not in rest[0] and not _is_model(rest[0]):
        raise ConfigError(
            f"{rest[0]!r} names no model that is here, and would be a second prompt beside --file: give one of them"
        )
    named = rest.pop(0) if len(rest) == 2 or (rest and (file is not None or _is_model(rest[0]))) else None
    name = opt.chosen_model(named, model)
    if named is not None and named.startswith((".", "/", "~")):
        _check_path(named)
    if rest and len(arguments) == 1:
        _warn_of_mistyped(rest[0], name)
    prompt = rest[0] if rest else _read_prompt(file, name if named or model else None)
    if (rest or file is not None) and is_piped():
        raise ConfigError(
            f"the prompt was given twice, {'as an argument' if rest else 'with --file'} and on standard input: give "
            "one (add </dev/null to the command if the input is meant for something else)"
        )
    if not prompt.strip():
        raise PromptError(f"the prompt is empty: give some text{f' (the model is {name})' if named else ''}")
    return name, prompt


def _check_path(model: str) -> None:
    """Raise for a missing model before asking for a prompt."""
    from forerun.weights.resolve import resolve_model

    resolve_model(model)


def _warn_of_mistyped(prompt: str, model: str) -> None:
    """A single word that is nearly the name of a model is the prompt all the same, but that may surprise."""
    from forerun.weights.resolve import EMBEDDED

    if " " not in prompt and (meant := suggestion(prompt, EMBEDDED)):
        print_note(f"{prompt!r} is the prompt, for {model}{meant}")


def _is_model(text: str) -> bool:
    from forerun.weights.resolve import is_model

    return is_model(text)


def is_piped() -> bool:
    """Whether text is waiting on standard input; does not block."""
    stream = sys.stdin
    if stream is None or stream.isatty():
        return False
    try:
        is_ready = bool(select.select([stream], [], [], 0)[0])
    except (OSError, ValueError):  # not a real file, as in tests
        is_ready = True
    return is_ready and bool(getattr(stream.buffer, "peek", stream.buffer.read)(1))


def _read_prompt(file: Path | None, model: str | None) -> str:
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        missing = f"there is no prompt for the model {model}" if model else "there is no prompt"
        raise ConfigError(f"{missing}: give it as an argument after the model, with --file, or on standard input")
    return read_file(file, "the prompt").removesuffix("\n")  # which `echo` and editors add


def read_file(file: Path | None, what: str) -> str:
    """The text of a file, or of standard input.

    Lines end in newlines alone, whatever system wrote them. Raises DataError, which names `what` it is for.
    """
    try:
        raw = file.read_bytes() if file is not None else sys.stdin.buffer.read()
        return StringIO(raw.decode("utf-8-sig"), newline=None).read()
    except OSError as error:
        raise DataError(f"cannot read {what} from {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{what} is not UTF-8 text (byte {error.start})") from error
