"""LlamaIndex: OpenAILike, complete and chat, streamed."""

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from tour import FOX, KEY, MODEL, V1, check

llm = OpenAILike(model=MODEL, api_base=V1, api_key=KEY, is_chat_model=True, max_tokens=30, max_retries=0)
plain = OpenAILike(model=MODEL, api_base=V1, api_key=KEY, is_chat_model=False, max_tokens=30, max_retries=0)


@check("complete")
def _():
    return plain.complete("Once upon a time").text


@check("chat, streams")
def _():
    asked = [ChatMessage(role="user", content=FOX)]
    return llm.chat(asked).message.content and [chunk.delta for chunk in llm.stream_chat(asked)]
