"""guidance: a chat with an OpenAI server."""

from guidance import assistant, gen, user
from guidance.models import OpenAI
from tour import FOX, KEY, MODEL, V1, check


@check("chat")
def _():
    model = OpenAI(MODEL, base_url=V1, api_key=KEY, echo=False)
    with user():
        model += FOX
    with assistant():
        model += gen("answer", max_tokens=20)
    return model["answer"]
