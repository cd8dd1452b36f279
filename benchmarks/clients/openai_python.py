"""openai: every endpoint it has that is served here."""

from openai import OpenAI
from pydantic import BaseModel
from tour import ADD, FOX, KEY, MODEL, V1, check

api = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": FOX}]


class Answer(BaseModel):
    yes: bool


@check("models")
def _():
    return api.models.list().data[0].id == MODEL and api.models.retrieve(MODEL).id == MODEL


@check("chat")
def _():
    return api.chat.completions.create(model=MODEL, messages=ASKED, seed=1, max_tokens=20).usage.completion_tokens > 0


@check("streams")
def _():
    chunks = list(api.chat.completions.create(model=MODEL, messages=ASKED, seed=1, max_tokens=20, stream=True,
                                              stream_options={"include_usage": True}))  # fmt: skip
    whole = api.chat.completions.create(model=MODEL, messages=ASKED, seed=1, max_tokens=20).choices[0].message.content
    return chunks[-1].usage and "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


@check("tools")
def _():
    made = api.chat.completions.create(model=MODEL, messages=ASKED, tools=[ADD], tool_choice="required", max_tokens=200)
    calls = made.choices[0].message.tool_calls
    answered = [*ASKED, made.choices[0].message,
                *({"role": "tool", "tool_call_id": c.id, "content": "3"} for c in calls)]  # fmt: skip
    return api.chat.completions.create(model=MODEL, messages=answered, tools=[ADD], max_tokens=9).choices[0]


@check("structured output")
def _():
    made = api.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Answer, max_tokens=50)
    return isinstance(made.choices[0].message.parsed, Answer)


@check("completions, logprobs")
def _():
    made = api.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, logprobs=2, echo=True)
    return len(made.choices[0].logprobs.tokens) > 5


@check("responses")
def _():
    first = api.responses.create(model=MODEL, input=FOX, max_output_tokens=20)
    second = api.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=20)
    with api.responses.stream(model=MODEL, input="Yes?", text_format=Answer, max_output_tokens=50) as stream:
        kinds = [event.type for event in stream]
        text = stream.get_final_response().output_text
    parsed = api.responses.parse(model=MODEL, input="Yes?", text_format=Answer, max_output_tokens=50).output_parsed
    return (
        second.id and kinds[-1] in ("response.completed", "response.incomplete") and text and isinstance(parsed, Answer)
    )


@check("embeddings are refused by name")
def _():
    try:
        api.embeddings.create(model=MODEL, input="x")
    except Exception as error:
        return error.status_code == 404 and "embedding" in str(error)
