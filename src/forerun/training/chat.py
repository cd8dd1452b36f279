"""The chat template of the `mini` family: as jinja for the tokenizer files and as a function for training.

Knows how turns become text. Knows nothing of tokens or of where the turns come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


def render_chat(turns: Sequence[ChatTurn], add_generation_prompt: bool = False) -> str:
    """Renders turns exactly as `CHAT_TEMPLATE` does."""
    text = "".join(f"{TURN_START}{turn.role}\n{turn.content}{TURN_END}\n" for turn in turns)
    return text + (f"{TURN_START}assistant\n" if add_generation_prompt else "")


def ask(question: str, answer: str) -> str:
    """Renders a single question and its answer."""
    return render_chat((ChatTurn("user", question.strip()), ChatTurn("assistant", answer.strip())))
