"""The playground's markdown in node, with a document that only remembers elements. Skips where there is no node."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")

PROGRAM = """
class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [] }); }
  setAttribute(name, value) { this.attributes[name] = value; }
  append(...children) {
    this.children.push(...children);
    for (const child of children) if (child instanceof Element) child.parent = this;
  }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  toString() {
    const attributes = Object.entries(this.attributes).filter(([, value]) => value !== "");
    const head = [this.tag, ...attributes.map(([name, value]) => `${name}=${value}`)].join(" ");
    return `{${head}|${this.children.join("")}}`;
  }
}
const below = (box) => box.children.flatMap((child) => (child instanceof Element ? [child, ...below(child)] : []));
globalThis.document = { createElement: (tag) => new Element(tag) };
const { showMarkdown } = await import("./markdown.js");
const box = new Element("box"), results = [];
for (const text of JSON.parse(process.argv[2])) {
  const before = [...box.children];
  showMarkdown(box, text);
  const kept = box.children.filter((child, i) => child === before[i]).length;
  const elements = below(box).map(({ tag, attributes }) => [tag, attributes]);
  results.push({ shown: box.children.join(""), kept, elements });
}
console.log(JSON.stringify(results));
"""
LINK = "target=_blank rel=noopener noreferrer nofollow"
RENDERED = [
    ("plain & *some* **strong** ~~old~~ `x<y`", "{p|plain & {em|some} {strong|strong} {del|old} {code|x<y}}"),
    ("one\ntwo", "{p|one{br|}two}"),
    ("## Title", "{h4|Title}"),
    ("- a\n- b\n  1. c", "{ul|{li|{span|a}}{li|{span|b}{ol start=1|{li|{span|c}}}}}"),
    ("> quoted", "{blockquote|{p|quoted}}"),
    ("&lt;b&gt; &#65; &bogus;", "{p|<b> A &bogus;}"),
    ("see https://a.org/x?y=1", f"{{p|see {{a href=https://a.org/x?y=1 {LINK}|https://a.org/x?y=1}}}}"),
    ("[mail](mailto:a@b.org)", f"{{p|{{a href=mailto:a@b.org {LINK}|mail}}}}"),
    (
        "|a|b|\n|-|-:|\n|1|2<br>3|",
        "{div class=wide|{table|{thead|{tr|{th|a}{th class=right|b}}}{tbody|{tr|{td|1}{td class=right|2{br|}3}}}}}",
    ),
    (
        "```html\n<script>x</script>\n```",
        "{div class=code|{div class=bar|html{button type=button class=copy-code|Copy}}"
        "{pre|{code|<script>x</script>}}}",
    ),
]  # fmt: skip
EVIL = [
    "<script>alert(1)</script>",
    "text <img src=x onerror=alert(1)> text",
    "<iframe src=https://evil.org></iframe>",
    "<a href='javascript:alert(1)'>x</a>",
    "<svg><style><img src=x onerror=alert(1)></style></svg>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&#58;alert(1))",
    "[x](<java\tscript:alert(1)>)",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:x)",
    "[x](//evil.org)",
    "[x](/v1/models)",
    "[x]: javascript:alert(1)\n\n[x]",
    "<javascript:alert(1)>",
    "![x](https://evil.org/x.png)",
    '![x](https://evil.org/x.png "onerror=alert(1)")',
    "![x](javascript:alert(1))",
    "```<img onerror=alert(1)>\nx\n```",
    "|<script>|\n|-|\n|<img src=x>|",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "[x](https://a.org 'a\" onclick=\"alert(1)')",
    ">" * 20000 + "<script>",
]
KNOWN_TAGS = {
    "p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "div", "button", "pre", "code", "table", "thead",
    "tbody", "tr", "th", "td", "strong", "em", "del", "br", "span", "a",
}  # fmt: skip
KNOWN_ATTRIBUTES = {"class", "type", "href", "target", "rel", "title", "start"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("markdown")
    for name in ("dom.js", "markdown.js", "marked.js"):
        (folder / name).write_bytes(files("forerun.server").joinpath("playground", name).read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "main.js").write_text(PROGRAM)
    return folder


def shown(folder: Path, *texts: str) -> list[dict[str, Any]]:
    """After each text: what is `shown`, all `elements` with their attributes, how many blocks were `kept`."""
    assert NODE is not None
    command = [NODE, "main.js", json.dumps(texts)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_markdown_becomes_elements(folder: Path) -> None:
    results = shown(folder, *(text for text, _ in RENDERED))
    assert [result["shown"] for result in results] == [expected for _, expected in RENDERED]


def test_nothing_in_a_text_loads_or_runs(folder: Path) -> None:
    for text, result in zip(EVIL, shown(folder, *EVIL), strict=True):
        assert result["shown"], text
        for tag, attributes in result["elements"]:
            assert tag in KNOWN_TAGS and set(attributes) <= KNOWN_ATTRIBUTES, (text, tag, attributes)
            assert attributes.get("href", "https://").startswith(("https://", "http://", "mailto:")), (text, attributes)


def test_markup_is_shown_as_text(folder: Path) -> None:
    first, second = shown(folder, "<script>alert(1)</script>", "a <b>c</b>")
    assert first["shown"] == "{p|<script>alert(1)</script>}" and second["shown"] == "{p|a <b>c</b>}"


def test_blocks_that_did_not_change_stay(folder: Path) -> None:
    results = shown(folder, "one\n\ntwo", "one\n\ntwo and\n\nthree", "one\n\ntwo and\n\nthree", "none")
    assert [result["kept"] for result in results] == [0, 1, 3, 0]
    assert results[-1]["shown"] == "{p|none}"
