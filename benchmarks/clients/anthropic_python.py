"""anthropic: messages, streams, tools, counting."""

from anthropic import Anthropic
from tour import ADD, BASE, FOX, KEY, MODEL, check

api = Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": FOX}]
TOOL = {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}


@check("messages")
def _():
    return api.messages.create(model=MODEL, messages=ASKED, max_tokens=20, system="Be kind.").content[0].text


@check("streams")
def _():
    with api.messages.stream(model=MODEL, messages=ASKED, max_tokens=20) as stream:
        text = "".join(stream.text_stream)
        return text and stream.get_final_message().usage.output_tokens


@check("tools")
def _():
    made = api.messages.create(model=MODEL, messages=ASKED, max_tokens=200, tools=[TOOL], tool_choice={"type": "any"})
    call = made.content[-1]
    answered = [*ASKED, {"role": "assistant", "content": made.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "3"}]}]  # fmt: skip
    calls = [part for part in made.content if part.type == "tool_use"]
    if len(calls) > 1:
        return {"a", "b"} == set(call.input)
    return {"a", "b"} == set(call.input) and api.messages.create(
        model=MODEL, messages=answered, max_tokens=9, tools=[TOOL]
    )


@check("count_tokens")
def _():
    return api.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens > 3
