"""Renders the Helm chart without Helm, and writes the manifests of the documentation's sizes: python lab/chart.py

`-f VALUES -o FILE` writes those of other values.

Knows: the part of Go's template language, and those of Helm's functions, that the chart uses; anything else is an
error, so that the chart cannot come to need more unnoticed. Does not know: what the manifests mean. `helm template`
writes the same objects.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "forerun"
SIZES, MANIFESTS = ROOT / "deploy" / "sizes", ROOT / "deploy" / "kubernetes"
ACTION = re.compile(r"\{\{(-\s)?\s*(/\*.*?\*/|.*?)\s*(\s-)?\}\}", re.DOTALL)
TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|-?\d+|:=|[=|(),]|\$?\w*(?:\.\w+)+|\$\w*|\w+|\.)')


class TemplateError(Exception):
    """The chart is wrong, its values are, or it needs what is not understood here."""


def rendered(values: Mapping[str, Any], name: str = "forerun", namespace: str = "default") -> list[dict[str, Any]]:
    """The manifests with these values over the chart's own. Raises TemplateError, and jsonschema's for the schema."""
    texts = _texts(values, name, namespace)
    del texts["NOTES.txt"]
    return [each for text in texts.values() for each in yaml.safe_load_all(text) if each is not None]


def notes(values: Mapping[str, Any], name: str = "forerun", namespace: str = "default") -> str:
    """What Helm says after installing."""
    return _texts(values, name, namespace)["NOTES.txt"]


def _texts(given: Mapping[str, Any], name: str, namespace: str) -> dict[str, str]:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text("utf-8")), given)
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text("utf-8")))
    release = {"Name": name, "Namespace": namespace, "Service": "Helm"}
    top = {"Values": values, "Release": release, "Chart": {key[0].upper() + key[1:]: v for key, v in chart.items()}}
    renderer, bodies = ChartTemplates(), {}
    for path in sorted((CHART / "templates").iterdir()):
        bodies[path.name] = renderer.parse(path.read_text("utf-8"))
    return {file: renderer.run(body, top, {"$": top}) for file, body in bodies.items() if not file.startswith("_")}


def merged(old: Any, new: Any) -> Any:
    """Values over values, as Helm merges them: objects by their keys, all else replaced; null removes a key."""
    if not (isinstance(old, dict) and isinstance(new, Mapping)):
        return deepcopy(new)
    kept = {key: merged(old.get(key), value) for key, value in new.items() if value is not None}
    return {key: deepcopy(value) for key, value in old.items() if key not in new} | kept


# -- functions --------------------------------------------------------------------------------------------------


def _default(other: Any, value: Any = None) -> Any:
    return value or other


def _fail(message: str) -> Any:
    raise TemplateError(message)


def _shown(value: Any) -> str:
    """As Go prints it: a number of a million or more in a way that no program reads."""
    if value is None or isinstance(value, bool):
        return {None: "", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 1_000_000:
        raise TemplateError(f"Helm would print {value} with an exponent: use toJson")
    return str(value)


def _printf(form: str, *values: Any) -> str:
    return form.replace("%v", "%s") % tuple(_shown(value) for value in values)


def _set(target: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    target[key] = value
    return target


def _dict(*pairs: Any) -> dict[str, Any]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _kind_is(kind: str, value: Any) -> bool:
    kinds = {"slice": list, "map": dict, "string": str, "bool": bool}
    return isinstance(value, kinds[kind])


def _nindent(width: int, text: str) -> str:
    return "".join("\n" + " " * width + line for line in text.split("\n"))


def _to_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=False)).removesuffix("\n")


def _to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(map(int, numbers)),
    "append": lambda values, value: [*values, value],
    "concat": lambda *lists: [each for values in lists for each in values],
    "contains": lambda part, text: part in text,
    "default": _default,
    "dict": _dict,
    "div": lambda a, b: int(a) // int(b),
    "eq": lambda first, *others: any(first == other for other in others),
    "fail": _fail,
    "first": lambda values: values[0],
    "gt": lambda a, b: a > b,
    "hasKey": lambda values, key: key in values,
    "int": int,
    "join": lambda mark, values: mark.join(map(_shown, values)),
    "kindIs": _kind_is,
    "list": lambda *values: list(values),
    "lt": lambda a, b: a < b,
    "max": max,
    "mul": lambda a, b: int(a) * int(b),
    "ne": lambda a, b: a != b,
    "nindent": _nindent,
    "not": lambda value: not value,
    "printf": _printf,
    "required": lambda message, value: value if value not in (None, "") else _fail(message),
    "quote": lambda value: json.dumps(_shown(value)),
    "set": _set,
    "sha256sum": lambda text: sha256(text.encode()).hexdigest(),
    "ternary": lambda yes, no, which: yes if which else no,
    "toJson": _to_json,
    "toYaml": _to_yaml,
    "trimSuffix": lambda end, text: text.removesuffix(end),
    "trunc": lambda most, text: text[:most],
}


# -- the language -----------------------------------------------------------------------------------------------

Node = tuple[Any, ...]  # ("text", text), ("do", words), or (kind, words, body, other) of a block


class ChartTemplates:
    """Templates that are parsed, and those that they define."""

    def __init__(self) -> None:
        self._defined: dict[str, list[Node]] = {}

    # -- reading

    def parse(self, text: str) -> list[Node]:
        """The nodes of a file."""
        pieces = list(_pieces(text))
        body, ended_by = self._body(pieces)
        if ended_by is not None or pieces:
            raise TemplateError(f"{ended_by} ends nothing")
        return body

    def _body(self, pieces: list[tuple[str, str]]) -> tuple[list[Node], str | None]:
        """Nodes up to what ends their block, and that."""
        nodes: list[Node] = []
        while pieces:
            kind, text = pieces.pop(0)
            first = text.split(None, 1)[0] if kind == "do" and text else ""
            if kind == "text":
                nodes.append(("text", text))
            elif first in ("end", "else"):
                return nodes, text
            elif first in ("if", "with", "range", "define"):
                nodes += self._block(first, text.removeprefix(first), pieces)
            else:
                nodes.append(("do", _words(text)))
        return nodes, None

    def _block(self, kind: str, head: str, pieces: list[tuple[str, str]]) -> list[Node]:
        body, ended_by = self._body(pieces)
        other: list[Node] = []
        if ended_by is not None and ended_by.startswith("else if"):
            other = self._block("if", ended_by.removeprefix("else if"), pieces)
        elif ended_by == "else":
            other, ended_by = self._body(pieces)
        if ended_by is None:
            raise TemplateError(f"no end of {kind}{head}")
        if kind == "define":
            self._defined[json.loads(head)] = body
            return []
        return [(kind, _words(head), body, other)]

    # -- running

    def run(self, nodes: list[Node], dot: Any, names: dict[str, Any]) -> str:
        """The text of nodes; `dot` is the current value, `names` are variables."""
        return "".join(self._one(node, dot, names) for node in nodes)

    def _one(self, node: Node, dot: Any, names: dict[str, Any]) -> str:
        kind = node[0]
        if kind == "text":
            return str(node[1])
        words = node[1]
        if kind == "do":
            if len(words) > 1 and words[1] in (":=", "="):
                if words[1] == "=" and words[0] not in names:
                    raise TemplateError(f"{words[0]} is not declared")
                _assign(names, words[0], self._value(words[2:], dot, names), new=words[1] == ":=")
                return ""
            return _shown(self._value(words, dot, names))
        _, _, body, other = node
        if kind == "range":
            return self._range(words, body, other, dot, names)
        found = self._value(words, dot, names)
        inner = found if kind == "with" else dot
        return self.run(body, inner, _Variables(names)) if found else self.run(other, dot, _Variables(names))

    def _range(self, words: list[str], body: list[Node], other: list[Node], dot: Any, names: dict[str, Any]) -> str:
        variables: list[str] = []
        if ":=" in words:
            cut = words.index(":=")
            variables, words = [word for word in words[:cut] if word != ","], words[cut + 1 :]
        found = self._value(words, dot, names)
        entries = sorted(found.items()) if isinstance(found, dict) else list(enumerate(found or ()))
        texts = []
        for entry in entries:
            scope = _Variables(names)
            for variable, value in zip(variables, entry[-len(variables) :] if variables else (), strict=True):
                scope[variable] = value
            texts.append(self.run(body, entry[1], scope))
        return "".join(texts) if entries else self.run(other, dot, _Variables(names))

    def _value(self, words: list[str], dot: Any, names: dict[str, Any]) -> Any:
        """A pipeline's value."""
        left = list(words)
        value = self._pipeline(left, dot, names)
        if left:
            raise TemplateError(f"not understood: {' '.join(left)}")
        return value

    def _pipeline(self, left: list[str], dot: Any, names: dict[str, Any]) -> Any:
        value = self._command(left, dot, names, ())
        while left and left[0] == "|":
            left.pop(0)
            value = self._command(left, dot, names, (value,))
        return value

    def _command(self, left: list[str], dot: Any, names: dict[str, Any], piped: tuple[Any, ...]) -> Any:
        function = left.pop(0) if left and re.fullmatch(r"[a-zA-Z]\w*", left[0]) and left[0] not in _CONSTANTS else None
        values = []
        while left and left[0] not in ("|", ")"):
            values.append(self._operand(left, dot, names))
        if function is None:
            if len(values) != 1 or piped:
                raise TemplateError("a value is called like a function")
            return values[0]
        return self._call(function, (*values, *piped))

    def _call(self, function: str, values: tuple[Any, ...]) -> Any:
        if function == "include":
            name, dot = values
            if name not in self._defined:
                raise TemplateError(f"no template {name!r} is defined")
            return self.run(self._defined[name], dot, {"$": dot})
        if function in ("and", "or"):
            stop = function == "or"
            return next((value for value in values if bool(value) == stop), values[-1])
        if function not in FUNCTIONS:
            raise TemplateError(f"lab/chart.py does not know the function {function!r}")
        return FUNCTIONS[function](*values)

    def _operand(self, left: list[str], dot: Any, names: dict[str, Any]) -> Any:
        word = left.pop(0)
        if word == "(":
            value = self._pipeline(left, dot, names)
            if not left or left.pop(0) != ")":
                raise TemplateError("a parenthesis is not closed")
            return value
        if word.startswith('"') or re.fullmatch(r"-?\d+", word):
            return json.loads(word)
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if word[0] not in ".$":
            return self._call(word, ())
        start, *fields = word.split(".")
        value = dot if start == "" else names[start]
        for field in filter(None, fields):
            if not isinstance(value, dict):
                raise TemplateError(f"{word}: there is no {field} in {value!r}")
            value = value.get(field)
        return value


_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "nil": None}


class _Variables(dict[str, Any]):
    """Variables of a block, over those around it."""

    def __init__(self, outer: dict[str, Any]) -> None:
        super().__init__()
        self.outer = outer

    def __missing__(self, name: str) -> Any:
        return self.outer[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.outer


def _assign(names: dict[str, Any], name: str, value: Any, new: bool) -> None:
    """Where a variable is declared, for `=`; else in the block itself."""
    while not new and isinstance(names, _Variables) and not dict.__contains__(names, name):
        names = names.outer
    names[name] = value


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Texts, and what stands in braces; a dash takes the blanks on its side."""
    place, trim = 0, False
    for found in ACTION.finditer(text):
        before = text[place : found.start()]
        before = before.lstrip() if trim else before
        yield "text", before.rstrip() if found[1] else before
        if not found[2].startswith("/*"):
            yield "do", found[2]
        place, trim = found.end(), found[3] is not None
    yield "text", text[place:].lstrip() if trim else text[place:]


def _words(text: str) -> list[str]:
    words, place = [], 0
    text = text.strip()
    while place < len(text):
        found = TOKEN.match(text, place)
        if found is None:
            raise TemplateError(f"not understood: {text[place:]}")
        words.append(found[1])
        place = found.end()
    return words


# -- the sizes --------------------------------------------------------------------------------------------------


def manifests(values_file: Path) -> str:
    """The manifests of a size as a file for kubectl."""
    said = values_file.read_text("utf-8").split("\n\n", 1)[0]
    values = yaml.safe_load(values_file.read_text("utf-8"))
    made = f"# Made by lab/chart.py of deploy/sizes/{values_file.name} and the chart: change those, not this file."
    return f"{said}\n{made}\n" + yaml.safe_dump_all(rendered(values), sort_keys=False, width=120)


def of_values(files: Sequence[Path]) -> str:
    """The manifests of these values, of which a later file's stand over those before. Raises OSError, as `rendered`."""
    values: Any = {}
    for file in files:
        values = merged(values, yaml.safe_load(file.read_text("utf-8")) or {})
    return str(yaml.safe_dump_all(rendered(values), sort_keys=False, width=120))


def main(given: Sequence[str] | None = None) -> None:
    """Write the manifests of every size, or those of other values."""
    parser = ArgumentParser(description="Renders the Helm chart without Helm. Without options: deploy/kubernetes anew.")
    parser.add_argument("-f", "--values", metavar="VALUES", type=Path, action="append",
                        help="values over the chart's own; repeatable, later ones stand over earlier ones")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to write them; printed unless given")
    options = parser.parse_args(given)
    if options.values is None:
        if options.output is not None:
            parser.error("-o goes together with -f VALUES: give both, or neither")
        for path in sorted(SIZES.glob("*.yaml")):
            (MANIFESTS / path.name).write_text(manifests(path), "utf-8")
            print(MANIFESTS / path.name, file=sys.stderr)
        return
    try:
        text = of_values(options.values)
        sys.stdout.write(text) if options.output is None else options.output.write_text(text, "utf-8")
    except (OSError, TemplateError, yaml.YAMLError, jsonschema.ValidationError) as error:
        parser.error(str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
