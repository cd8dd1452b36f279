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
    OutputPiece,
    ToolParser,
    prose,
)
from forerun.server.harmony import Harmony
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

    def feed(self, text: str) -> list[OutputPiece]:
        """Text outside calls, and what is certain of calls."""
        self._held += text
        pieces: list[OutputPiece] = []
        while self._pass_mark(pieces):
            pass
        mark = self.start if self._reader is None else self.end
        keep = held_back(self._held, mark)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        pieces += prose(self._outside(certain)) if self._reader is None else self._reader.feed(certain)
        return pieces

    def _pass_mark(self, pieces: list[OutputPiece]) -> bool:
        """Read up to the next mark, if it is there."""
        before, found, after = self._held.partition(self.start if self._reader is None else self.end)
        if not found:
            return False
        self._held = after
        if self._reader is None:
            pieces += prose(self._outside(before))
            self._reader = self.make()
        else:
            pieces += [*self._reader.feed(before), *self._reader.finish()]
            self._after_call = self._reader.num_calls > 0 and self._reader.rest is None
            pieces += _no_calls(self._reader, self.start, self.end)
            self._reader = None
        return True

    def _outside(self, text: str) -> str:
        """Blank lines between calls are not content."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def finish(self) -> list[OutputPiece]:
        """A call without its end mark counts, too."""
        text, self._held = self._held, ""
        if self._reader is None:
            return prose(text)
        return [*self._reader.feed(text), *self._reader.finish(), *_no_calls(self._reader, self.start, "")]


@dataclass(slots=True)
class ToTheEnd:
    """After a mark, everything is calls (Mistral, Llama 3); with `make_bare`, also when the output begins with "{"."""

    start: str
    make: Callable[[], CallReader]
    make_bare: Callable[[], CallReader] | None = None
    _held: str = ""
    _reader: CallReader | None = None
    _opening: str = ""  # what the calls began with
    _begun: bool = False

    def feed(self, text: str) -> list[OutputPiece]:
        """Text before the calls, then what is certain of them."""
        if self._reader is not None:
            return [*self._reader.feed(text)]
        self._held += text
        if self.make_bare is not None and not self._begun and self._held.lstrip()[:1] == "{":
            return self._begin("", self.make_bare(), self._held)
        before, found, after = self._held.partition(self.start)
        if found:
            return [*prose(before), *self._begin(self.start, self.make(), after)]
        if self.make_bare is not None and not self._begun and not self._held.strip():
            return []
        keep = held_back(self._held, self.start)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._begun = self._begun or bool(shown)
        return prose(shown)

    def _begin(self, opening: str, reader: CallReader, text: str) -> list[OutputPiece]:
        self._held, self._opening, self._reader = "", opening, reader
        return [*reader.feed(text)]

    def finish(self) -> list[OutputPiece]:
        """The text if it is no call."""
        if self._reader is None:
            text, self._held = self._held, ""
            return prose(text)
        return [*self._reader.finish(), *_no_calls(self._reader, self._opening, "")]


def _no_calls(reader: CallReader, start: str, end: str) -> list[OutputPiece]:
    """Text that a reader found no call in, with its marks unless a call used them."""
    return [] if reader.rest is None else prose(("" if reader.num_calls else start) + reader.rest + end)


@dataclass(slots=True)
class ForcedCalls:
    """The whole output is a JSON list of calls, enforced by a grammar."""

    _reader: JsonCalls = field(default_factory=JsonCalls)

    def feed(self, text: str) -> list[OutputPiece]:
        """What is certain of the calls."""
        return [*self._reader.feed(text)]

    def finish(self) -> list[OutputPiece]:
        """A call that was cut off before its arguments had begun is text."""
        return [*self._reader.finish(), *_no_calls(self._reader, "", "")]


@dataclass(slots=True)
class ForcedArguments:
    """The whole output is the arguments of one function, enforced by a grammar."""

    name: str
    _begun: bool = False

    def feed(self, text: str) -> list[OutputPiece]:
        """The arguments as they come."""
        name, self._begun = (None if self._begun else self.name), True
        return [CallPiece(name, text)]

    def finish(self) -> list[OutputPiece]:
        """The call, cut off or not: the finish reason says which."""
        return [] if self._begun else self.feed("")


# -- styles -----------------------------------------------------------------------------------------------------


KIMI = "kimi_k2"
HARMONY = "openai"


# What a style writes around its calls and inside of them: first what begins calls, then what ends them. Texts usually
# omit those that are special tokens.
MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "longcat_keyed": ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>",
                      "<longcat_arg_value>", "</longcat_arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    KIMI: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
           "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}  # fmt: skip
BARE = ("llama3_json",)  # whose calls may begin without their mark


def _between(style: str, make: Callable[[], CallReader]) -> ToolParser:
    start, end, *_ = MARKS[style]
    return BetweenMarks(start, end, make)


def _tagged(style: str, form: CallForm) -> Callable[[Functions], ToolParser]:
    return lambda functions: _between(style, lambda: TaggedCalls(form, functions))


def _llama(functions: Functions) -> ToolParser:
    """Without the mark only calls of the request's own functions are told from an answer in JSON."""
    return ToTheEnd(MARKS["llama3_json"][0], JsonCalls, partial(JsonCalls, frozenset(functions)))


def _mistral(_: Functions) -> ToolParser:
    mark = MARKS["mistral"][0]
    return ToTheEnd(mark, partial(MistralCalls, mark))


STYLES: dict[str, Callable[[Functions], ToolParser]] = {  # vLLM's names
    "hermes": lambda _: _between("hermes", JsonCalls),
    "qwen3_coder": _tagged("qwen3_coder", QWEN),
    "glm45": _tagged("glm45", GLM),
    "longcat": lambda _: _between("longcat", JsonCalls),
    "longcat_keyed": _tagged("longcat_keyed", LONGCAT),
    "minimax_m2": _tagged("minimax_m2", MINIMAX),
    "deepseek_v32": _tagged("deepseek_v32", DSML),
    "gemma4": _tagged("gemma4", GEMMA),
    KIMI: lambda _: _between(KIMI, KimiCalls),
    "command": lambda _: _between("command", JsonCalls),
    "llama3_json": _llama,
    "mistral": _mistral,
    HARMONY: lambda _: Harmony(NoCalls(), reads_calls=True),
    "none": lambda _: NoCalls(),
}
ALIASES = {"qwen": "hermes", "qwen2": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "llama": "llama3_json",
           "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder", "glm47": "glm45"}  # fmt: skip
NAMES = ("auto", *STYLES, *ALIASES)
_SIGNS = (("<function=", "qwen3_coder"), ("<arg_key>", "glm45"), ("<longcat_arg_key>", "longcat_keyed"),
          ("<longcat_tool_call>", "longcat"), ("<minimax:tool_call>", "minimax_m2"),
          ("<｜DSML｜", "deepseek_v32"), ("<|tool_call>call:", "gemma4"), ("<|channel|>", HARMONY),
          ("<|tool_calls_section_begin|>", KIMI), ("<|START_ACTION|>", "command"),
          ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"),
          ("<|python_tag|>", "llama3_json"), ('"parameters":', "llama3_json"))  # fmt: skip


def tool_style(parser: str, template: str | None) -> str:
    """The style a model writes calls in, by option or found in its chat template. Raises ConfigError."""
    if parser not in NAMES:
        raise ConfigError(f"tool_parser must be one of {', '.join(NAMES)}; got {parser!r}")
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
    from forerun.server.json_schema import moved  # which needs what only the extra `server` installs

    kinds, definitions = [], {}
    for name, parameters in functions:
        place = f"#/$defs/{name}"  # each function's definitions are below it, and its references point there
        definitions[name] = moved(parameters or {"type": "object"}, place)
        members = {"name": {"const": name}, "arguments": {"$ref": place}}
        kinds.append({"type": "object", "properties": members, "required": list(members)})
    bound = {} if max_calls is None else {"maxItems": max_calls}
    return {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, **bound, "$defs": definitions}
