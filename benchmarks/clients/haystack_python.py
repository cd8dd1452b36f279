"""Haystack: the chat generator, whole and streamed."""

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from tour import FOX, KEY, MODEL, V1, check

KEYS = {"model": MODEL, "api_base_url": V1, "api_key": Secret.from_token(KEY), "generation_kwargs": {"max_tokens": 20}}


@check("chat")
def _():
    return OpenAIChatGenerator(**KEYS).run([ChatMessage.from_user(FOX)])["replies"][0].text


@check("streams")
def _():
    pieces = []
    OpenAIChatGenerator(**KEYS, streaming_callback=pieces.append).run([ChatMessage.from_user(FOX)])
    return len(pieces) > 2
