"""Renders chat templates in a process of its own: they are untrusted programs, from a model or a request.

`chat` runs it as `python template_worker.py FD`; FD is its end of a socket pair. Knows: how transformers renders a
template (a sandboxed jinja2 with a few helpers), and its limits: whatever a template does, only this process slows
down, fails or ends. Does not know: tokens, the rest of forerun, which it does not import.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

MAX_CPU_S = 2.0  # CPU time of one conversation; usual ones take a millisecond
MEMORY_BYTES = 256 << 20  # beyond what the process has when it starts
MAX_TEXT_BYTES = 32 << 20
MAX_MESSAGE = 500  # characters of an error
DONE, REFUSED, FAILED, INVALID, TOO_MUCH = b"DRFIT"  # the first byte of an answer, before the text or the error


def main() -> None:
    """Answer conversations until the other side is gone; the system ends the process when one takes too long."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the program that started this one
    _limit_memory()
    with suppress(EOFError, OSError):
        while True:
            asked = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            answer = _answer(asked)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)


def _limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:  # Linux
        most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(asked: bytes) -> bytes:
    try:
        text = _render(*pickle.loads(asked)).encode("utf-8", "surrogatepass")
        return bytes([DONE]) + text if len(text) <= MAX_TEXT_BYTES else bytes([TOO_MUCH])
    except MemoryError:
        return bytes([TOO_MUCH])
    except jinja2.TemplateSyntaxError as error:
        return _error(INVALID, f"line {error.lineno}: {error}")
    except jinja2.TemplateError as error:
        return _error(REFUSED, str(error))
    except Exception as error:  # a template is a program: anything may go wrong in it
        return _error(FAILED, repr(error))


def _error(kind: int, text: str) -> bytes:
    return bytes([kind]) + text[:MAX_MESSAGE].encode("utf-8", "replace")


def _render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    return _compile(template).render(messages=messages, **variables)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    """Compiled as transformers does (utils/chat_template_utils.py)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks mark what the assistant said (for training); here they are plain text."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Any) -> Any:
        return caller()


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


if __name__ == "__main__":
    main()
