"""Semantic Kernel: OpenAI's chat completion connector with another client."""

from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from tour import FOX, KEY, MODEL, V1, check

service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=V1, api_key=KEY))
SHORT = OpenAIChatPromptExecutionSettings(max_tokens=20)


def asked():
    history = ChatHistory()
    history.add_user_message(FOX)
    return history


@check("chat")
async def _():
    return str(await service.get_chat_message_content(asked(), SHORT))


@check("streams")
async def _():
    return [str(piece) async for piece in service.get_streaming_chat_message_content(asked(), SHORT)]
