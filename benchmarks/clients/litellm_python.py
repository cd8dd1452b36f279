"""litellm: chat, responses, Anthropic's messages."""

import litellm
from tour import ADD, BASE, FOX, KEY, MODEL, V1, check

litellm.suppress_debug_info = True
OPENAI = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": KEY}
ASKED = [{"role": "user", "content": FOX}]


@check("chat, streams, tools")
def _():
    text = litellm.completion(messages=ASKED, max_tokens=20, **OPENAI).choices[0].message.content
    stream = litellm.completion(messages=ASKED, max_tokens=20, stream=True, **OPENAI)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    called = litellm.completion(messages=ASKED, tools=[ADD], tool_choice="required", max_tokens=200, **OPENAI)
    return text and streamed and called.choices[0].message.tool_calls


@check("responses, previous_response_id")
def _():
    first = litellm.responses(input=FOX, max_output_tokens=20, **OPENAI)
    return litellm.responses(input="And?", previous_response_id=first.id, max_output_tokens=9, **OPENAI).output


@check("Anthropic's messages, streams, tools")
def _():
    text = litellm.completion(messages=ASKED, max_tokens=20, **ANTHROPIC).choices[0].message.content
    stream = litellm.completion(messages=ASKED, max_tokens=20, stream=True, **ANTHROPIC)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    called = litellm.completion(messages=ASKED, tools=[ADD], tool_choice="required", max_tokens=200, **ANTHROPIC)
    return text and streamed and called.choices[0].message.tool_calls


@check("text completion")
def _():
    return litellm.text_completion(prompt="Once upon a time", max_tokens=9, model=f"text-completion-openai/{MODEL}",
                                   api_base=V1, api_key=KEY).choices[0].text  # fmt: skip
