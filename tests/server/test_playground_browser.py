"""The playground in a headless Chromium, against the embedded model on a real port. Skips where there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
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
# Whose answer `mini` never ends at temperature 0.
ENDLESS = "Tell me a story about a little bird who wanted to see the sea."


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


def open_page(page: Any, address: str, view: str = "chat") -> None:
    page.goto(address)
    playwright.expect(page.locator("#model")).not_to_be_empty(timeout=PATIENCE_MS)
    page.locator(f"#{view}view").click()


def settle(page: Any) -> None:
    """Wait for the end of an answer."""
    playwright.expect(page.locator("#talk")).to_have_attribute("aria-busy", "false", timeout=PATIENCE_MS)


def ask(page: Any, text: str) -> None:
    """Send a message by keyboard and wait for the whole answer."""
    page.locator("#prompt").fill(text)
    page.locator("#prompt").press("Enter")
    settle(page)


def edit(page: Any, text: str) -> None:
    """Ask something else instead of the first message and wait for the whole answer."""
    page.get_by_label("Edit this message and ask again").first.click()
    page.get_by_label("Edit the message").fill(text)
    page.get_by_label("Edit the message").press("Enter")
    settle(page)


def open_first(page: Any) -> None:
    """Open the conversation that was changed last."""
    page.locator("#menu").click()
    page.locator("#list button").first.click()


def choose(page: Any, **settings: str) -> None:
    """Fill in the settings."""
    page.locator("#settings").click()
    for name, value in settings.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#done").click()
    page.evaluate("new Promise(done => setTimeout(done, 50))")  # a dialog tells a little later that it was closed


def serve_trace(page: Any, *events: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer the page with these events instead of the model's; the bodies that it sends are collected."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/playground/stream", answer)
    return asked


def start(**fields: Any) -> dict[str, Any]:
    return {"start": {"model": "m", "drafter": "d", "prompt_tokens": 1, "seed": "1", "same_tokens": True, **fields}}


def step(text: str, token_id: int = 7, time_s: float = 0.1) -> dict[str, Any]:
    """A step that draws one token without drafts."""
    token = {"id": token_id, "text": text, "name": text, "source": ""}
    root = {"id": 6, "text": "", "parent": -1, "source": ""}
    return {"step": {"nodes": [root], "accepted": [], "tokens": [token], "time_s": time_s}, "speedup": None}


def delta(content: str = "", **more: str) -> dict[str, Any]:
    return {"delta": {**({"content": content} if content else {}), **more}}


def said(text: str, token_id: int = 7) -> list[dict[str, Any]]:
    """A step of one token and its text."""
    return [step(text, token_id), delta(text)]


def end(reason: str = "stop") -> dict[str, Any]:
    return {"end": {"finish_reason": reason, "usage": {}, "forerun": {}}}


def no_sideways_scrolling(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


# -- chat -------------------------------------------------------------------------------------------------------


def test_a_conversation_is_kept(page: Any, address: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    open_page(page, address)
    choose(page, max_tokens="24", temperature="0", system="Be brief.")
    ask(page, PROMPT)
    answer = page.locator(".answer > .md").text_content()
    assert answer and page.locator("#status").text_content().strip()
    assert "tokens a pass" in page.locator(".note").text_content()
    assert page.locator("#error").is_hidden() and no_sideways_scrolling(page)
    assert all(url.startswith((address, "data:")) for url in asked)
    page.reload()
    open_first(page)
    assert page.locator(".said").text_content() == PROMPT
    assert page.locator(".answer > .md").text_content() == answer
    page.locator("#settings").click()
    assert page.locator("#system").input_value() == "Be brief."
    page.keyboard.press("Escape")
    page.locator("#menu").click()
    page.locator("#list button").last.click()
    assert page.locator("#list li").count() == 0 and page.locator("#welcome").is_visible()


def test_what_is_asked_goes_out_with_the_settings(page: Any, address: str) -> None:
    asked = serve_trace(page, start(), *said("Yes."), end())
    open_page(page, address)
    choose(page, system="Be brief.", temperature="0.5", top_k="4", seed="11", max_tokens="")
    ask(page, "Really?")
    ask(page, "Again?")
    first, second = asked
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "Yes."
    fields = {name: value for name, value in first.items() if name != "messages"}
    assert fields == {"temperature": 0.5, "top_k": 4, "seed": 11, "speculation": "auto", "model": "mini"}


def test_edit_and_regenerate_go_back(page: Any, address: str) -> None:
    asked = serve_trace(page, start(), *said("An answer."), end())
    open_page(page, address)
    ask(page, "One")
    ask(page, "Two")
    edit(page, "Other")
    assert page.locator(".said").all_text_contents() == ["Other"]
    page.get_by_label("Write this answer again").click()
    settle(page)
    assert [len(body["messages"]) for body in asked] == [1, 3, 1, 1]
    assert page.locator("#messages > li").count() == 2


def test_a_cut_answer_replaces_no_later_turns(page: Any, address: str) -> None:
    open_page(page, address)
    serve_trace(page, start(), *said("An answer."), end())
    ask(page, "One")
    ask(page, "Two")
    asked = serve_trace(page, start(), *said("Cut"))
    page.get_by_label("Write this answer again").first.click()
    settle(page)
    edit(page, "Other")
    assert page.locator(".said").all_text_contents() == ["One", "Two"] and len(asked) == 2
    assert page.locator(".answer > .md").all_text_contents() == ["An answer."] * 2
    assert page.locator("#prompt").input_value() == "Other"
    assert "broke off" in page.locator("#error").text_content()
    page.get_by_label("Write this answer again").last.click()
    settle(page)
    assert page.locator(".answer > .md").all_text_contents() == ["An answer.", "Cut"]
    assert "broken off" in page.locator(".note").last.text_content()


def test_an_edited_question_that_fails_is_not_lost(page: Any, address: str) -> None:
    open_page(page, address)
    serve_trace(page, start(), *said("An answer."), end())
    ask(page, "One")
    serve_trace(page, {"error": {"message": "no room"}})
    edit(page, "Other")
    assert page.locator("#error").text_content() == "no room"
    assert page.locator("#prompt").input_value() == "Other" and page.locator(".said").text_content() == "One"
    page.locator("#prompt").fill("typed meanwhile")
    edit(page, "Another")
    assert page.locator("#prompt").input_value() == "Another\n\ntyped meanwhile"


def two_tabs(page: Any, address: str) -> Any:
    """Ask "One" in `page`; a second tab of the same browser, which lists that conversation and has opened none."""
    open_page(page, address)
    serve_trace(page, start(), *said("An answer."), end())
    ask(page, "One")
    other = page.context.new_page()
    open_page(other, address)
    serve_trace(other, start(), *said("An answer."), end())
    return other


def test_two_tabs_that_go_on_at_once_keep_both(page: Any, address: str) -> None:
    other = two_tabs(page, address)
    open_first(other)
    ask(other, "Two")
    page.bring_to_front()
    ask(page, "Three")
    page.reload()
    questions = []
    for number in range(2):
        page.locator("#menu").click()
        page.locator("#list li").nth(number).locator("button").first.click()
        questions.append(page.locator(".said").all_text_contents())
    assert sorted(questions) == [["One", "Three"], ["One", "Two"]]


def test_a_conversation_without_room_lasts_until_there_is_some(page: Any, address: str) -> None:
    open_page(page, address)
    serve_trace(page, start(), *said("An answer."), end())
    page.evaluate(
        """() => {
          const chat = { id: "large", changed: 1, settings: {}, messages: [{ role: "user", content: "Large" }] };
          for (let size = 1 << 22; size > 10; size >>= 1) {
            const more = { ...chat, filling: (chat.filling ?? "") + "x".repeat(size) };
            try {
              localStorage.setItem("forerun.chat.large", JSON.stringify(more));
              chat.filling = more.filling;
            } catch {}
          }
        }"""
    )
    ask(page, "One")
    assert "no room" in page.locator("#error").text_content()
    page.locator("#menu").click()
    page.locator("#fresh").click()
    page.locator("#menu").click()
    page.get_by_role("button", name="One", exact=True).click()
    assert page.locator(".said").text_content() == "One" and page.locator("#error").is_visible()
    page.locator("#menu").click()
    page.get_by_label("Delete Large").click()
    assert page.locator("#error").is_hidden()
    page.reload()
    open_first(page)
    assert page.locator(".said").text_content() == "One"


def test_enter_that_ends_a_composition_sends_nothing(page: Any, address: str) -> None:
    asked = serve_trace(page, start(), *said("Yes."), end())
    open_page(page, address)
    page.locator("#prompt").fill("にほん")
    composed = "new KeyboardEvent('keydown', {key: 'Enter', keyCode: 229, bubbles: true, cancelable: true})"
    page.locator("#prompt").evaluate(f"field => field.dispatchEvent({composed})")  # Safari's
    assert page.locator("#prompt").input_value() == "にほん" and not asked
    page.locator("#prompt").press("Enter")
    settle(page)
    assert len(asked) == 1


def test_screen_readers_hear_an_answer_once(page: Any, address: str) -> None:
    serve_trace(page, start(), *said("Yes."), end())
    open_page(page, address)
    ask(page, "Really?")
    assert page.locator("#status").text_content() == "Yes." and page.locator("output").count() == 0
    assert not page.evaluate("document.querySelector('#talk').contains(document.querySelector('#status'))")


class Stripping:
    """A proxy that serves an application under /x and strips that from what it passes on."""

    def __init__(self, app: Any) -> None:
        self.app, self.state = app, app.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith("/x/")
            scope = {**scope, "path": scope["path"].removeprefix("/x")}
        await self.app(scope, receive, send)


def test_under_a_prefix(page: Any, llm: LLM) -> None:
    outer: Any = Stripping(create_app(llm, settings()))
    with running(outer) as address:
        open_page(page, f"{address}/x/")
        choose(page, max_tokens="8")
        ask(page, PROMPT)
        assert page.locator(".answer > .md").text_content() and page.locator("#error").is_hidden()
        page.goto(f"{address}/x/docs")
        playwright.expect(page.locator("#version")).not_to_be_empty()


def test_two_tabs_keep_what_the_other_wrote(page: Any, address: str) -> None:
    other = two_tabs(page, address)
    page.bring_to_front()
    ask(page, "Two")  # after the other tab drew its list
    other.bring_to_front()
    open_first(other)
    assert other.locator(".said").all_text_contents() == ["One", "Two"]
    ask(other, "Three")
    page.bring_to_front()
    choose(page, system="Be brief.")  # the first tab knows nothing of the third question
    page.reload()
    open_first(page)
    assert page.locator(".said").all_text_contents() == ["One", "Two", "Three"]
    page.locator("#menu").click()
    page.locator("#list button").last.click()
    other.bring_to_front()
    choose(other, system="Be long.")
    other.reload()
    assert other.locator("#list li").count() == 0


def test_what_is_no_conversation_is_not_listed(page: Any, address: str) -> None:
    open_page(page, address)
    for number, messages in enumerate([[None], [{"role": "user", "content": 1}], [{"role": "user", "content": "One"}]]):
        chat = json.dumps({"id": str(number), "changed": 1, "settings": {}, "messages": messages})
        page.evaluate("([id, chat]) => localStorage.setItem(`forerun.chat.${id}`, chat)", [str(number), chat])
    page.reload()
    open_first(page)
    assert page.locator("#list li").count() == 1 and page.locator(".said").text_content() == "One"


def test_stop_keeps_what_is_there(page: Any, address: str) -> None:
    open_page(page, address)
    page.locator("#settings").click()
    page.locator("#speculation").select_option("off")
    page.locator("#done").click()
    choose(page, max_tokens="1500", temperature="0")
    page.locator("#prompt").fill(ENDLESS)
    page.locator("#prompt").press("Enter")
    playwright.expect(page.locator("#live")).to_contain_text("tokens", timeout=PATIENCE_MS)
    playwright.expect(page.locator("#messages .md").last).not_to_be_empty(timeout=PATIENCE_MS)
    page.keyboard.press("Escape")
    settle(page)
    assert "stopped" in page.locator(".note").text_content() and page.locator("#error").is_hidden()
    assert page.locator("#send").is_visible() and page.locator("#stop").is_hidden()


def test_a_refused_question_comes_back(page: Any, address: str) -> None:
    open_page(page, address)
    choose(page, top_p="0")
    ask(page, "Hello")
    playwright.expect(page.locator("#error")).to_contain_text("top_p", timeout=PATIENCE_MS)
    assert page.locator("#prompt").input_value() == "Hello" and page.locator("#messages > li").count() == 0


def test_an_example_is_a_click_away(page: Any, address: str) -> None:
    open_page(page, address)
    choose(page, max_tokens="8")
    text = page.locator(".example span").first.text_content()
    page.locator(".example").first.click()
    settle(page)
    assert page.locator(".said").text_content() == text and page.locator("#welcome").is_hidden()


def test_thinking_is_folded_away(page: Any, address: str) -> None:
    thought = [step("Hm."), delta(reasoning_content="H"), delta(reasoning_content="m.")]
    asked = serve_trace(page, start(), *thought, *said("Yes, **so**."), end())
    open_page(page, address)
    ask(page, "Really?")
    assert page.locator(".thought .md").text_content() == "Hm." and page.locator(".thought .md").is_hidden()
    assert page.locator(".answer > .md").text_content() == "Yes, so." and page.locator(".md strong").count() == 1
    ask(page, "Sure?")
    assert asked[1]["messages"][1]["content"] == "Yes, **so**."


def test_code_is_copied(page: Any, address: str) -> None:
    serve_trace(page, start(), *said("```py\nx = 1\n```"), end())
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_page(page, address)
    ask(page, "Code?")
    page.locator(".copy-code").click()
    playwright.expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"


def test_a_server_with_keys_asks_for_one(page: Any, llm: LLM) -> None:
    with running(create_app(llm, settings(api_keys=("secret",), served_names=("one", "two")))) as address:
        page.goto(address)
        page.locator("#key").fill("secret")
        page.locator("#key").press("Enter")
        playwright.expect(page.locator("#model")).to_have_text("one")
        choose(page, max_tokens="4")
        page.locator("#settings").click()
        page.locator("#served").select_option("two")
        page.locator("#done").click()
        ask(page, "Hello")
        assert page.locator("#error").is_hidden() and page.locator("#messages > li").count() == 2
        assert page.locator("#model").text_content() == "two"


# -- steps ------------------------------------------------------------------------------------------------------


def test_a_conversation_side_by_side(page: Any, address: str) -> None:
    open_page(page, address, "steps")
    choose(page, max_tokens="64", temperature="0")
    page.locator("#compare").check()
    ask(page, PROMPT)
    fast, plain = page.locator(".tokens").all_text_contents()
    assert fast == plain and fast
    assert page.locator("#verdict").text_content().startswith("The same tokens")
    assert page.locator(".tok.s0").count() > 1  # the legend's, and accepted drafts
    assert page.locator("#depths tbody tr").count() > 0
    assert page.locator("#error").is_hidden() and no_sideways_scrolling(page)
    _look_at_tokens(page)
    _walk_through_trees(page)
    _look_at_the_chart(page)
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
    """Every step's tree has the nodes that its words count, and one of the model's own where it chose one."""
    num_steps = int(page.locator("#step").get_attribute("max"))
    page.locator("#step").focus()
    page.keyboard.press("Home")
    for index in range(num_steps):
        words = page.locator("#stepinfo").text_content()
        assert words.startswith(f"Step {index + 1} of {num_steps}")
        found = re.search(r"(\d+) of (\d+) drafts accepted, (\d+) token", words)
        accepted, drafted, emitted = map(int, found.groups()) if found else (0, 0, 1)
        assert page.locator("#tree .node").count() == 1 + drafted + emitted - accepted
        assert page.locator("#tree .rejected").count() == drafted - accepted
        assert page.locator("#chart .here rect").count() == emitted
        page.keyboard.press("ArrowRight")
    assert page.locator("#next").is_disabled()


def _look_at_the_chart(page: Any) -> None:
    """A bar a step, a box a token; a click on one shows its step."""
    assert page.locator("#chart .bar").count() == int(page.locator("#step").get_attribute("max"))
    assert page.locator("#chart rect").count() == page.locator(".tokens").first.locator(".tok").count()
    page.locator("#chart .bar").first.locator("rect").first.click()
    assert page.locator("#stepinfo").text_content().startswith("Step 1 of")


def _change_theme(page: Any) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#settings").click()
    page.locator("#theme").select_option("light")
    assert page.evaluate(background) != dark


def test_runs_that_differ_are_an_error_only_where_they_must_not(page: Any, address: str) -> None:
    open_page(page, address, "steps")
    page.locator("#compare").check()
    for same_tokens, words in ((True, "DIFFER"), (False, "Another sample")):
        asked = serve_trace(page, start(same_tokens=same_tokens), *said("a", 7), end())
        page.route("**/playground/stream", plain_differs(same_tokens, asked))
        page.locator("#settings").click()
        page.locator("#seed").fill("-1")
        page.keyboard.press("Escape")  # no form checks it then
        ask(page, "One")
        assert words in page.locator("#verdict").text_content()
        fast, plain = asked[-2:]
        assert {**fast, "speculation": "off"} == plain and plain["seed"] >= 0


def plain_differs(same_tokens: bool, asked: list[dict[str, Any]]) -> Callable[[Any], None]:
    """A server whose plain run chooses another token."""

    def answer(route: Any) -> None:
        asked.append(body := route.request.post_data_json)
        events = [start(same_tokens=same_tokens), *said("a", 7 if body["speculation"] == "auto" else 8), end()]
        route.fulfill(
            body="".join(f"data: {json.dumps(event)}\n\n" for event in events), content_type="text/event-stream"
        )

    return answer


def test_charts_are_drawn_where_they_are_seen(page: Any, address: str) -> None:
    serve_trace(page, start(), *(step("a ", time_s=0.1 * n) for n in range(60)), delta("a " * 60), end())
    open_page(page, address)
    ask(page, "Really?")
    assert page.locator("#chart rect").count() == 0
    page.locator("#stepsview").click()
    assert page.locator("#chart rect").count() == page.locator(".tokens .tok").count() == 60
    assert page.locator("#stepinfo").text_content().startswith("Step 60 of 60")


def test_steps_of_saved_answers_are_said_to_be_gone(page: Any, address: str) -> None:
    serve_trace(page, start(), *said("Yes."), end())
    open_page(page, address, "steps")
    ask(page, "Really?")
    assert page.locator(".untraced").count() == 0
    page.reload()
    open_first(page)
    assert page.locator(".untraced").is_visible() and page.locator(".answer .md").last.is_visible()


# -- the API's document -----------------------------------------------------------------------------------------


def test_the_document_names_every_path_and_field(page: Any, llm: LLM) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    app = create_app(llm, settings(api_keys=("secret",)))
    with running(app) as address:
        page.goto(f"{address}/docs")
        page.locator("#key").fill("secret")
        page.locator("#key").press("Enter")
        playwright.expect(page.locator("#version")).not_to_be_empty()
        api = app.openapi()
        named = page.locator("#paths h3").all_text_contents()
        assert named == [f"{kind.upper()} {path}" for path, kinds in api["paths"].items() for kind in kinds]
        for name, schema in api["components"]["schemas"].items():
            fields = page.locator(f'section[id="{name}"] th').all_text_contents()
            assert fields == list(schema.get("properties", {})), name
        assert page.locator("#locked").is_hidden() and no_sideways_scrolling(page)
        assert all(url.startswith((address, "data:")) for url in asked)


# -- safety -----------------------------------------------------------------------------------------------------


def test_text_is_never_markup(page: Any, address: str) -> None:
    node = {"id": 7, "text": EVIL, "source": EVIL}
    evil = {
        "nodes": [{**node, "parent": -1, "source": ""}, {**node, "parent": 0}, {**node, "parent": 1}],
        "accepted": [1],
        "tokens": [{**node, "name": EVIL}, {**node, "name": EVIL, "source": ""}],
        "time_s": 0.1,
    }
    usual = start(model=EVIL, drafter=EVIL)
    serve_trace(page, usual, {"step": evil, "speedup": None}, delta(EVIL * 2), {"error": {"message": EVIL}})
    open_page(page, address, "steps")
    choose(page, system=EVIL)
    ask(page, EVIL)
    page.locator("#messages .tok").first.hover()
    assert page.locator(".tokens").text_content() == EVIL * 2
    assert page.locator(".answer > .md").text_content() == EVIL * 2
    assert page.locator("#error").text_content() == EVIL
    assert page.locator("#tip del").count() == 1
    page.locator("#chatview").click()
    page.locator("#menu").click()
    assert page.locator("main img, #tip img, main script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert no_sideways_scrolling(page)
