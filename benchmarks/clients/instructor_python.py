"""instructor: typed answers by tools and by JSON schema."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from tour import KEY, MODEL, V1, check


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)


ASKED = [{"role": "user", "content": "Anna is 7 years old."}]


def typed(mode):
    api = instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)
    return api.chat.completions.create(
        model=MODEL, response_model=Person, messages=ASKED, max_tokens=200, max_retries=0
    )


@check("tools")
def _():
    return isinstance(typed(instructor.Mode.TOOLS), Person)


@check("JSON schema")
def _():
    return isinstance(typed(instructor.Mode.JSON_SCHEMA), Person)
