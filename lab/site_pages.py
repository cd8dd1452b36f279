"""Hooks of MkDocs (mkdocs.yml names this file): what the site has beside the files of docs/.

Pages whose source lies elsewhere in the repository, pages written from the code, and links between files of the
repository, which become links between pages. Knows: where each page comes from. Does not know: what pages say.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

from reference import cli_reference, python_reference

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {  # page -> the file it shows
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "mini.md": "src/forerun/mini/MODEL_CARD.md",
    "lab.md": "lab/README.md",
}
PAGES = {source: page for page, source in ELSEWHERE.items()} | {"docs/decisions": "decisions/index.md"}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are no files of docs/."""
    made = {page: (ROOT / source).read_text("utf-8") for page, source in ELSEWHERE.items()}
    made |= {"reference/cli.md": cli_reference(), "reference/python.md": python_reference()}
    made["decisions/index.md"] = decisions()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def decisions() -> str:
    """The list of design decisions, by number."""
    titles = {path.name: path.read_text("utf-8").partition("\n")[0] for path in (ROOT / "docs/decisions").glob("*.md")}
    return "\n".join(["# Design decisions", "", *(f"* [{titles[name][2:]}]({name})" for name in sorted(titles))])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files as links between pages."""
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """The text of a page with its links to files of the repository made links to their pages."""
    folder = dirname(ELSEWHERE.get(page, f"docs/{page}"))

    def link(found: re.Match[str]) -> str:
        target = normpath(join(folder, found[2]))
        return found[1] + relpath(PAGES.get(target, target.removeprefix("docs/")), dirname(page) or ".")

    return LINK.sub(link, markdown)
