"""Finds tool calls in a model's text and takes them out, piece by piece.

Knows: the styles models were trained on, and their marks. Does not know: HTTP, tokens, sampling. Text that looks like a
call but is not one is passed on as text: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from forerun.errors import ConfigError
from forerun.server.call_readers import (
    CallPiece,
    CallReader,
    JsonCalls,
    KimiCalls,
    MistralCalls,
    NoCalls,
    Parsed,
    ToolParser,
)
from forerun.server.harmony import Harmony
from forerun.server.json_schema import moved
from forerun.server.reasoning import held_back
from forerun.server.tagged_calls import DSML, GEMMA, GLM, LONGCAT, MINIMAX, QWEN, CallForm, Functions, TaggedCalls


@dataclass(slots=True)
class BetweenMarks:
    """Calls are between two marks, text is outside (Hermes, Qwen)."""

    start: str
    end: str
    make: Callable[[], CallReader]
    _held: str = ""
    _reader: CallReader | None = None  # between the marks
    _after_call: bool = False

    def feed(self, text: str) -> Parsed:
        """Text outside calls, and what is certain of calls."""
        self._held += text
        content: list[str] = []
        calls: list[CallPiece] = []
        while self._pass_mark(content, calls):
            pass
        mark = self.start if self._reader is None else self.end
        keep = held_back(self._held, mark)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if self._reader is None:
            content.append(self._outside(certain))
        else:
            calls += self._reader.feed(certain)
        return Parsed("".join(content), tuple(calls))

    def _pass_mark(self, content: list[str], calls: list[CallPiece]) -> bool:
        """Read up to the next mark, if it is there."""
        before, found, after = self._held.partition(self.start if self._reader is None else self.end)
        if not found:
            return False
        self._held = after
        if self._reader is None:
            content.append(self._outside(before))
            self._reader = self.make()
        else:
            calls += [*self._reader.feed(before), *self._reader.finish()]
            self._after_call = self._reader.num_calls > 0 and self._reader.rest is None
            content.append(_no_calls(self._reader, self.start, self.end))
            self._reader = None
        return True

    def _outside(self, text: str) -> str:
        """Blank lines between calls are not content."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def finish(self) -> Parsed:
        """A call without its end mark counts, too."""
        text, self._held = self._held, ""
        if self._reader is None:
            return Parsed(text)
        calls = (*self._reader.feed(text), *self._reader.finish())
        return Parsed(_no_calls(self._reader, self.start, ""), calls)


@dataclass(slots=True)
class ToTheEnd:
    """After a mark, everything is calls (Mistral, Llama 3); with `bare`, also when the output begins with "{"."""

    start: str
    make: Callable[[], CallReader]
    bare: bool = False
    _held: str = ""
    _reader: CallReader | None = None
    _opening: str = ""  # what the calls began with
    _begun: bool = False

    def feed(self, text: str) -> Parsed:
        """Text before the calls, then what is certain of them."""
        if self._reader is not None:
            return Parsed(calls=tuple(self._reader.feed(text)))
        self._held += text
        if self.bare and not self._begun and self._held.lstrip()[:1] == "{":
            return self._begin("", "", self._held)
        before, found, after = self._held.partition(self.start)
        if found:
            return self._begin(before, self.start, after)
        if self.bare and not self._begun and not self._held.strip():
            return Parsed()
        keep = held_back(self._held, self.start)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._begun = self._begun or bool(shown)
        return Parsed(shown)

    def _begin(self, content: str, opening: str, text: str) -> Parsed:
        self._held, self._opening, self._reader = "", opening, self.make()
        return Parsed(content, tuple(self._reader.feed(text)))

    def finish(self) -> Parsed:
        """The text if it is no call."""
        if self._reader is None:
            text, self._held = self._held, ""
            return Parsed(text)
        calls = tuple(self._reader.finish())
        return Parsed(_no_calls(self._reader, self._opening, ""), calls)


def _no_calls(reader: CallReader, start: str, end: str) -> str:
    """Text that a reader found no call in, with its marks unless a call used them."""
    return "" if reader.rest is None else ("" if reader.num_calls else start) + reader.rest + end


@dataclass(slots=True)
class ForcedCalls:
    """The whole output is a JSON list of calls, enforced by a grammar."""

    _reader: JsonCalls = field(default_factory=JsonCalls)

    def feed(self, text: str) -> Parsed:
        """What is certain of the calls."""
        return Parsed(calls=tuple(self._reader.feed(text)))

    def finish(self) -> Parsed:
        """A call that was cut off before its name was complete is text."""
        return Parsed()


@dataclass(slots=True)
class ForcedArguments:
    """The whole output is the arguments of one function, enforced by a grammar."""

    name: str
    _begun: bool = False

    def feed(self, text: str) -> Parsed:
        """The arguments as they come."""
        name, self._begun = (None if self._begun else self.name), True
        return Parsed(calls=(CallPiece(name, text),))

    def finish(self) -> Parsed:
        """The call, cut off or not: the finish reason says which."""
        return Parsed() if self._begun else self.feed("")


# -- styles -----------------------------------------------------------------------------------------------------


MISTRAL_MARK = "[TOOL_CALLS]"
KIMI = "kimi_k2"
HARMONY = "openai"


def _tagged(start: str, end: str, form: CallForm) -> Callable[[Functions], ToolParser]:
    return lambda functions: BetweenMarks(start, end, lambda: TaggedCalls(form, functions))


STYLES: dict[str, Callable[[Functions], ToolParser]] = {  # vLLM's names
    "hermes": lambda _: BetweenMarks("<tool_call>", "</tool_call>", JsonCalls),
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", QWEN),
    "glm45": _tagged("<tool_call>", "</tool_call>", GLM),
    "longcat": lambda _: BetweenMarks("<longcat_tool_call>", "</longcat_tool_call>", JsonCalls),
    "longcat_keyed": _tagged("<longcat_tool_call>", "</longcat_tool_call>", LONGCAT),
    "minimax_m2": _tagged("<minimax:tool_call>", "</minimax:tool_call>", MINIMAX),
    "deepseek_v32": _tagged("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", DSML),
    "gemma4": _tagged("<|tool_call>", "<tool_call|>", GEMMA),
    KIMI: lambda _: BetweenMarks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", KimiCalls),
    "llama3_json": lambda _: ToTheEnd("<|python_tag|>", JsonCalls, bare=True),
    "mistral": lambda _: ToTheEnd(MISTRAL_MARK, partial(MistralCalls, MISTRAL_MARK)),
    HARMONY: lambda _: Harmony(NoCalls(), reads_calls=True),
    "none": lambda _: NoCalls(),
}
ALIASES = {"qwen": "hermes", "qwen2": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "llama": "llama3_json",
           "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder", "glm47": "glm45"}  # fmt: skip
NAMES = ("auto", *STYLES, *ALIASES)
# Texts usually omit these.
MARKED_BY_SPECIAL_TOKENS = ("mistral", "llama3_json", "gemma4", "minimax_m2", "deepseek_v32", KIMI)
_SIGNS = (("<function=", "qwen3_coder"), ("<arg_key>", "glm45"), ("<longcat_arg_key>", "longcat_keyed"),
          ("<longcat_tool_call>", "longcat"), ("<minimax:tool_call>", "minimax_m2"),
          ("<｜DSML｜", "deepseek_v32"), ("<|tool_call>call:", "gemma4"), ("<|channel|>", HARMONY),
          ("<|tool_calls_section_begin|>", KIMI),
          ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"),
          ("<|python_tag|>", "llama3_json"), ('"parameters":', "llama3_json"))  # fmt: skip


def tool_style(parser: str, template: str | None) -> str:
    """The style a model writes calls in, by option or found in its chat template. Raises ConfigError."""
    if parser not in NAMES:
        raise ConfigError(f"tool-parser must be one of {', '.join(NAMES)}; got {parser!r}")
    if parser != "auto":
        return ALIASES.get(parser, parser)
    return next((style for sign, style in _SIGNS if sign in (template or "")), "hermes")


def takes_tools(template: str) -> bool:
    """Whether a chat template writes the tools of a request."""
    return "tools" in template


def call_id(style: str, name: str, number: int) -> str:
    """The id of a new call, of which the conversation has `number` before.

    Mistral's templates insist on nine letters and digits; Kimi's show the model ids alone, as it writes them itself.
    """
    if style == KIMI:
        return f"functions.{name}:{number}"
    return uuid4().hex[:9] if style == "mistral" else f"call_{uuid4().hex[:24]}"


# -- for templates that know no tools ---------------------------------------------------------------------------


def describe_tools(tools: list[dict[str, Any]]) -> str:
    """A system message that tells any model about its tools, in the Hermes style."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n{listed}\n"
        'To call one, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.'
    )


def calls_schema(functions: list[tuple[str, dict[str, Any] | None]], max_calls: int | None) -> dict[str, Any]:
    """The JSON schema of a list of at least one call of these (name, parameters)."""
    kinds, definitions = [], {}
    for name, parameters in functions:
        place = f"#/$defs/{name}"  # each function's definitions are below it, and its references point there
        definitions[name] = moved(parameters or {"type": "object"}, place)
        members = {"name": {"const": name}, "arguments": {"$ref": place}}
        kinds.append({"type": "object", "properties": members, "required": list(members)})
    bound = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, **bound, "$defs": definitions}
