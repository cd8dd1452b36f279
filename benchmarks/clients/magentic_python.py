"""magentic: a prompt that returns text, and one that returns a typed answer."""

from magentic import OpenaiChatModel, prompt
from pydantic import BaseModel
from tour import FOX, KEY, MODEL, V1, check

model = OpenaiChatModel(MODEL, base_url=V1, api_key=KEY, max_tokens=100, temperature=0)


class Answer(BaseModel):
    yes: bool


@check("text")
def _():
    @prompt(FOX, model=model)
    def tell() -> str: ...

    return tell()


@check("structured output")
def _():
    @prompt("Yes?", model=model)
    def answer() -> Answer: ...

    return isinstance(answer(), Answer)
