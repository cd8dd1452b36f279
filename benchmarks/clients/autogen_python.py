"""AutoGen: the model client and an agent."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from tour import FOX, KEY, MODEL, V1, check

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def client():
    return OpenAIChatCompletionClient(model=MODEL, base_url=V1, api_key=KEY, model_info=INFO, max_tokens=30)


@check("chat")
async def _():
    return (await client().create([UserMessage(content=FOX, source="user")])).content


@check("an agent")
async def _():
    return (await AssistantAgent("a", client()).run(task=FOX)).messages[-1].content
