"""smolagents: its OpenAI model, whole and with a forced tool."""

from smolagents import OpenAIServerModel, tool
from tour import FOX, KEY, MODEL, V1, check

model = OpenAIServerModel(model_id=MODEL, api_base=V1, api_key=KEY, max_tokens=200)
ASKED = [{"role": "user", "content": [{"type": "text", "text": FOX}]}]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


@check("chat, streams")
def _():
    return model(ASKED).content and [piece.content for piece in model.generate_stream(ASKED)]


@check("tools")
def _():
    return model(ASKED, tools_to_call_from=[add]).tool_calls
