"""outlines: text and a typed answer from an OpenAI server."""

import openai
import outlines
from pydantic import BaseModel
from tour import FOX, KEY, MODEL, V1, check


class Answer(BaseModel):
    yes: bool


model = outlines.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), MODEL)


@check("text")
def _():
    return model(FOX, max_tokens=20)


@check("structured output")
def _():
    return Answer.model_validate_json(model("Yes?", Answer, max_tokens=50))
