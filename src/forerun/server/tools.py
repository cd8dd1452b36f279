"""Tool calls in a model's text: found, taken out, and turned into calls.

Knows: the styles models were trained on, and text that arrives in pieces. Does not know: HTTP, tokens, sampling. Text
that looks like a call and is none is passed on as text: nothing a model wrote is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from forerun.errors import ConfigError
from forerun.server.reasoning import held_back


class Call(NamedTuple):
    """A call: `arguments` is JSON as text."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What new text turned out to be."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolParser(Protocol):
    """Reads one output piece by piece."""

    def feed(self, text: str) -> Parsed:
        """What is certain now."""

    def finish(self) -> Parsed:
        """What was held back."""


class NoCalls:
    """Everything is content."""

    def feed(self, text: str) -> Parsed:
        """The text as it is."""
        return Parsed(text)

    def finish(self) -> Parsed:
        """Nothing was held back."""
        return Parsed()


ReadBody = Callable[[str], list[Call] | None]


@dataclass(slots=True)
class BetweenMarks:
    """Calls stand between two marks, text around them (Hermes, Qwen)."""

    start: str
    end: str
    read: ReadBody
    _held: str = ""
    _inside: bool = False
    _after_call: bool = False

    def feed(self, text: str) -> Parsed:
        """Text outside calls, and the calls completed."""
        self._held += text
        content, calls = "", []
        while True:
            mark = self.end if self._inside else self.start
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if self._inside:
                read = self.read(before)
                self._after_call = bool(read)
                calls += read or []
                content += "" if read else self.start + before + self.end
            else:
                content += self._outside(before)
            self._inside = not self._inside
        if not self._inside:
            keep = held_back(self._held, self.start)
            shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            content += self._outside(shown)
        return Parsed(content, tuple(calls))

    def _outside(self, text: str) -> str:
        """Blank lines between calls are not content."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def finish(self) -> Parsed:
        """A call whose end mark never came counts if it is whole."""
        text, self._held = self._held, ""
        if not self._inside:
            return Parsed(text)
        calls = self.read(text)
        return Parsed(calls=tuple(calls)) if calls else Parsed(self.start + text)


@dataclass(slots=True)
class ToTheEnd:
    """From a mark on, everything is calls (Mistral, Llama 3); with `bare`, also when the output begins with "{"."""

    start: str
    read: ReadBody
    bare: bool = False
    _held: str = ""
    _inside: str | None = None  # what the calls began with
    _begun: bool = False

    def feed(self, text: str) -> Parsed:
        """Text before the calls."""
        self._held += text
        if self._inside is not None:
            return Parsed()
        if self.bare and not self._begun and self._held.lstrip()[:1] == "{":
            self._inside = ""
            return Parsed()
        before, found, after = self._held.partition(self.start)
        if found:
            self._held, self._inside = after, self.start
            return Parsed(before)
        keep = held_back(self._held, self.start)
        if self.bare and not self._begun and not self._held.strip():
            return Parsed()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._begun = self._begun or bool(shown)
        return Parsed(shown)

    def finish(self) -> Parsed:
        """The calls, or the text if it is none."""
        text, self._held = self._held, ""
        if self._inside is None:
            return Parsed(text)
        calls = self.read(text)
        return Parsed(calls=tuple(calls)) if calls else Parsed(self._inside + text)


@dataclass(slots=True)
class ForcedCalls:
    """The whole output is a JSON list of calls, because a grammar made it so."""

    _held: str = ""
    _place: int = 0
    _decoder: json.JSONDecoder = field(default_factory=json.JSONDecoder)

    def feed(self, text: str) -> Parsed:
        """The calls completed."""
        self._held += text
        calls = []
        while True:
            start = self._held.find("{", self._place)
            try:
                value, self._place = self._decoder.raw_decode(self._held, start) if start >= 0 else (None, self._place)
            except ValueError:
                break
            if value is None:
                break
            calls += [_call(value)]
        return Parsed(calls=tuple(call for call in calls if call))

    def finish(self) -> Parsed:
        """What was cut off is not a call."""
        return Parsed()


@dataclass(slots=True)
class ForcedArguments:
    """The whole output is the arguments of one function, because a grammar made it so."""

    name: str
    _held: str = ""

    def feed(self, text: str) -> Parsed:
        """Held until it is whole."""
        self._held += text
        return Parsed()

    def finish(self) -> Parsed:
        """The call, cut off or not: the finish reason says which."""
        return Parsed(calls=(Call(self.name, self._held),))


# -- styles -----------------------------------------------------------------------------------------------------


def _call(value: Any) -> Call | None:
    """A call from an object with `name` and `arguments` (or `parameters`)."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def read_json_calls(text: str) -> list[Call] | None:
    """JSON objects, or lists of them, one after another, with blanks or ";" between; None if it is anything else."""
    decoder, place, calls = json.JSONDecoder(), 0, []
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            return None
        found = [_call(entry) for entry in (value if isinstance(value, list) else [value])]
        if None in found:
            return None
        calls += [call for call in found if call]
        while place < len(text) and text[place] in " \t\r\n;,":
            place += 1
    return calls or None


def read_mistral_calls(text: str) -> list[Call] | None:
    """A JSON list of calls, or since 2025 NAME[ARGS]{...} after each mark."""
    if "[ARGS]" not in text:
        return read_json_calls(text)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        name, _, arguments = part.partition("[ARGS]")
        try:
            calls.append(Call(name.partition("[CALL_ID]")[0].strip(), json.dumps(json.loads(arguments))))
        except ValueError:
            return None
    return calls


_FUNCTION = re.compile(r"<function=([^>]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_xml_call(text: str) -> list[Call] | None:
    """<function=NAME><parameter=KEY>value</parameter>...</function> (Qwen3-Coder)."""
    found = _FUNCTION.search(text)
    if found is None:
        return None
    values = {key.strip(): _value(value) for key, value in _PARAMETER.findall(found[2])}
    return [Call(found[1].strip(), json.dumps(values, ensure_ascii=False))]


def _value(text: str) -> Any:
    """JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


STYLES: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: BetweenMarks("<tool_call>", "</tool_call>", read_json_calls),
    "qwen3_coder": lambda: BetweenMarks("<tool_call>", "</tool_call>", read_xml_call),
    "llama3_json": lambda: ToTheEnd("<|python_tag|>", read_json_calls, bare=True),
    "mistral": lambda: ToTheEnd("[TOOL_CALLS]", read_mistral_calls),
    "none": NoCalls,
}
ALIASES = {"qwen": "hermes", "qwen2": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "llama": "llama3_json"}
NAMES = ("auto", *STYLES, *ALIASES)
MARKED_BY_SPECIAL_TOKENS = ("mistral", "llama3_json")  # their marks are control tokens, usually left out of texts
_SIGNS = (("<function=", "qwen3_coder"), ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"),
          ("<|python_tag|>", "llama3_json"), ('"parameters":', "llama3_json"))  # fmt: skip


def tool_style(parser: str, template: str | None) -> str:
    """The style a model writes calls in, by option or found in its chat template. Raises ConfigError."""
    if parser not in NAMES:
        raise ConfigError(f"tool-parser must be one of {', '.join(NAMES)}; got {parser!r}")
    if parser != "auto":
        return ALIASES.get(parser, parser)
    return next((style for sign, style in _SIGNS if sign in (template or "")), "hermes")


def call_id(style: str) -> str:
    """A new call's id; Mistral's templates insist on nine letters and digits."""
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
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters or {"type": "object"}},
            "required": ["name", "arguments"],
        }
        for name, parameters in functions
    ]
    bound = {} if max_calls is None else {"maxItems": max_calls}
    definitions = {k: v for _, p in functions for k, v in ((p or {}).get("$defs") or {}).items()}
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, **bound,
            **({"$defs": definitions} if definitions else {})}  # fmt: skip
