"""The screenshots of docs/playground.md: the chat page, its steps, and the page on a phone.

    forerun serve mini --drafter auto &
    python lab/screens.py [URL] [--out docs/images]

Playwright drives a headless Chromium. Knows: what is clicked. Does not know: the page's scripts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Browser, expect, sync_playwright

from command import run

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
PATIENCE_MS = 120_000
COPY, FACTS, STORY = 0, 2, 3  # examples that the page offers


def opened(browser: Browser, url: str, size: dict[str, int], dark: bool = False) -> Any:
    """A page in a browser that nobody used before."""
    page = browser.new_context(viewport=size, color_scheme="dark" if dark else "light").new_page()
    page.goto(url)
    expect(page.locator("#model")).not_to_be_empty(timeout=PATIENCE_MS)
    page.locator("#settings").click()
    page.locator("#temperature").fill("0")
    page.locator("#max_tokens").fill("160")
    page.locator("#done").click()
    return page


def asked(page: Any, example: int) -> None:
    """Ask one of the page's own questions in the conversation that is open, and wait for the answer."""
    page.locator("#prompt").fill(page.locator(".example span").nth(example).text_content())
    page.locator("#prompt").press("Enter")
    expect(page.locator("#talk")).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)


def chat(browser: Browser, url: str, size: dict[str, int], dark: bool = False) -> bytes:
    """Two conversations, the second of them open, with two questions."""
    page = opened(browser, url, size, dark)
    asked(page, STORY)
    page.locator("#fresh").evaluate("button => button.click()")  # on a phone it is out of sight
    asked(page, FACTS)
    asked(page, COPY)
    return bytes(page.screenshot())


def steps(browser: Browser, url: str, size: dict[str, int]) -> bytes:
    """An answer with and without speculation, and one of its steps."""
    page = opened(browser, url, size)
    page.locator("#stepsview").click()
    page.locator("#compare").check()
    asked(page, COPY)
    page.locator("#messages .tok.s0").first.click()
    page.mouse.move(0, 0)
    return bytes(page.screenshot())


def screens(
    url: Annotated[str, typer.Argument(help="Where forerun serves.")] = "http://127.0.0.1:8000",
    out: Annotated[Path, typer.Option(help="Where the pictures are written.")] = Path("docs/images"),
) -> None:
    """Take all screenshots."""
    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, picture in {
            "chat": chat(browser, url, WIDE),
            "steps": steps(browser, url, {"width": 1280, "height": 1000}),
            "phone": chat(browser, url, PHONE, dark=True),
        }.items():
            (out / f"{name}.png").write_bytes(picture)
            typer.echo(out / f"{name}.png")


if __name__ == "__main__":
    run(screens)
