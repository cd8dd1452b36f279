"""pydantic-ai: chat completions, Responses API and Anthropic's messages behind typed agents."""

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tour import BASE, FOX, KEY, MODEL, V1, check


class Answer(BaseModel):
    yes: bool


OPENAI = OpenAIProvider(base_url=V1, api_key=KEY)
SHORT = {"max_tokens": 100, "temperature": 0}


def agent(model, output=str):
    return Agent(model, output_type=output, model_settings=SHORT, retries=0)


@check("chat completions, typed by tool and by schema")
def _():
    model = OpenAIChatModel(MODEL, provider=OPENAI)
    typed = [agent(model, kind(Answer)).run_sync("Yes?").output for kind in (ToolOutput, NativeOutput)]
    return agent(model).run_sync(FOX).output and all(isinstance(answer, Answer) for answer in typed)


@check("Responses API")
def _():
    model = OpenAIResponsesModel(MODEL, provider=OPENAI)
    return agent(model).run_sync(FOX).output and agent(model, NativeOutput(Answer)).run_sync("Yes?").output


@check("Anthropic's messages")
def _():
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key=KEY))
    return agent(model).run_sync(FOX).output and agent(model, ToolOutput(Answer)).run_sync("Yes?").output


@check("streams")
async def _():
    async with agent(OpenAIChatModel(MODEL, provider=OPENAI)).run_stream(FOX) as run:
        return [piece async for piece in run.stream_text(delta=True)]
