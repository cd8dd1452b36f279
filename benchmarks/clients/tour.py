"""What the scripts of the client tour share: the server's address, and a line for each thing tried.

A script runs in its client's own environment, which has no forerun. `check` runs a function at once and prints
`ok<TAB>what` or `FAIL<TAB>what<TAB>why`; `clients.py` reads these lines.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

BASE = os.environ["TOUR_URL"]
V1 = f"{BASE}/v1"
KEY = os.environ["TOUR_KEY"]
MODEL = os.environ["TOUR_MODEL"]
FOX = "Tell me about a fox."
LOOP = asyncio.Runner()  # one for all: clients keep connections between calls
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
NUMBERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"],
           "additionalProperties": False}  # fmt: skip
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}


def check(what: str) -> Callable[[Callable[[], Any]], None]:
    """Run the decorated function now; what it returns must be true."""

    def run(function: Callable[[], Any]) -> None:
        try:
            result = function()
            if inspect.isawaitable(result):
                result = LOOP.run(_awaited(result))
            print(f"ok\t{what}" if result else f"FAIL\t{what}\tthe answer is {result!r}", flush=True)
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            print(f"FAIL\t{what}\t{type(error).__name__}: {reason}", flush=True)
            traceback.print_exc()

    return run


async def _awaited(result: Any) -> Any:
    return await result
