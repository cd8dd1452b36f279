"""The playground in a headless Chromium, against the embedded model on a real port. Skips where there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from forerun import LLM
from forerun.server.app import create_app
from tests.server.conftest import running, settings

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PROMPT = "The cat sat on the mat. The cat sat on the mat. The cat sat on the"
EVIL = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 2</script>"
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(create_app(llm, settings())) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A phone's page in a dark room; the page's own errors fail the test."""
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark")
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    yield page
    context.close()
    assert not troubles


def ask(page: Any, text: str, mode: str, max_tokens: int = 64) -> None:
    """Send a message by keyboard and wait for the whole answer."""
    page.locator("#mode").select_option(mode)
    page.locator("#max").fill(str(max_tokens))
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#stepinfo")).to_contain_text(re.compile("^Step"), timeout=PATIENCE_MS)


def no_sideways_scrolling(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_a_conversation_side_by_side(page: Any, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    ask(page, PROMPT, "both")
    fast, plain = page.locator(".answer .text").all_text_contents()
    assert fast == plain and fast
    assert page.locator("#verdict").text_content().startswith("The same tokens")
    assert page.locator(".tok.s0").count() > 1  # the legend's, and accepted drafts
    assert page.locator("#depths tbody tr").count() > 0
    assert page.locator("#error").is_hidden() and no_sideways_scrolling(page)
    assert all(url.startswith((address, "data:")) for url in asked)
    _look_at_tokens(page)
    _walk_through_trees(page)
    _change_theme(page)


def _look_at_tokens(page: Any) -> None:
    """Hovering shows what was rejected; arrow keys move on, Enter opens the tree."""
    page.locator("#messages .tok.wasted").first.hover()
    assert page.locator("#tip del").count() > 0 and page.locator("#tip").is_visible()
    first = page.locator("#messages .tok").first
    first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('#messages .tok')[1]")
    page.keyboard.press("Enter")
    number = page.evaluate("document.activeElement.index + 1")
    assert page.locator("#stepinfo").text_content().startswith(f"Step {number} of")


def _walk_through_trees(page: Any) -> None:
    """Every step's tree has its nodes, and one of the model's own where it chose one."""
    num_steps = int(page.locator("#step").get_attribute("max"))
    page.locator("#step").focus()
    page.keyboard.press("Home")
    for index in range(num_steps):
        step = page.evaluate("state.run.steps[state.step]")
        assert page.evaluate("state.step") == index
        own = len(step["tokens"]) - len(step["accepted"])
        assert page.locator("#tree .node").count() == len(step["nodes"]) + own
        assert page.locator("#tree .rejected").count() == len(step["nodes"]) - 1 - len(step["accepted"])
        page.keyboard.press("ArrowRight")
    assert page.locator("#next").is_disabled()


def _change_theme(page: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != dark


def test_text_is_never_markup(page: Any, address: str) -> None:
    node = {"id": 7, "text": EVIL, "source": EVIL}
    step = {
        "nodes": [{**node, "parent": -1, "source": ""}, {**node, "parent": 0}, {**node, "parent": 1}],
        "accepted": [1],
        "tokens": [{**node, "name": EVIL}, {**node, "name": EVIL, "source": ""}],
        "time_s": 0.1,
    }
    usual = {"model": EVIL, "drafter": EVIL, "prompt_tokens": 1, "seed": "1"}
    events = [{"start": usual}, {"step": step, "speedup": None}, {"error": {"message": EVIL}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route("**/playground/stream", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.goto(address)
    ask(page, EVIL, "auto")
    page.locator("#messages .tok").first.hover()
    assert page.locator(".text").text_content() == EVIL * 2
    assert page.locator("#error").text_content() == EVIL
    assert page.locator("#tip del").count() == 1
    assert page.locator("main img, #tip img, main script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert no_sideways_scrolling(page)
