"""Losses: what counts in a chat, and how much."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from forerun.training.chat import END_OF_TEXT, ChatTurn, render_chat
from forerun.training.losses import PromptWeights, next_token_loss
from forerun.training.net import Net, NetConfig
from forerun.training.recipe import RunConfig
from forerun.weights.resolve import resolve_model

SHAPE = NetConfig(vocab_size=16, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=16)
START, END, ASSISTANT, USER = 1, 0, 2, 3
WEIGH = PromptWeights(0.25, START, END, ASSISTANT)


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        ([5, 6, 7], []),  # within a turn: nobody knows whose
        ([5, START, USER, 6, START, ASSISTANT, 7, 8], [1, 2, 3]),
        ([START, ASSISTANT, 7, START, USER, 6], [3, 4, 5]),
        ([START, 9, 6, START, ASSISTANT, 7], [0, 1, 2]),  # the system speaks
        ([START, USER, 6, END, 7, 8], [0, 1, 2]),  # plain text behind a chat
        ([START, ASSISTANT, 7, START], [3]),
    ],
)
def test_what_others_say_counts_less(tokens: list[int], prompt: list[int]) -> None:
    wanted = [0.25 if place in prompt else 1.0 for place in range(len(tokens))]
    assert WEIGH(torch.tensor([tokens, tokens])).tolist() == [wanted, wanted]


def test_the_loss_is_the_mean_by_weight() -> None:
    torch.manual_seed(3)
    net = Net(SHAPE)
    windows = torch.tensor(
        [[4, START, USER, 6, 7, START, ASSISTANT, 7, 8], [START, USER, 4, 4, START, ASSISTANT, 9, END, 4]]
    )
    losses = F.cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(2, -1)
    weights = torch.ones(2, 8)
    weights[0, :4] = weights[1, :3] = 0.25  # of the tokens that are foretold: all but the first
    found = next_token_loss(net, RunConfig(), WEIGH)(windows)
    torch.testing.assert_close(found, (losses * weights).sum() / weights.sum())
    equal = next_token_loss(net, RunConfig(), PromptWeights(1.0, START, END, ASSISTANT))(windows)
    torch.testing.assert_close(equal, next_token_loss(net, RunConfig())(windows))


def test_a_batch_in_which_nothing_counts_teaches_nothing() -> None:
    found = next_token_loss(Net(SHAPE), RunConfig(), PromptWeights(0.0, START, END, ASSISTANT))
    assert found(torch.tensor([[START, USER, 4, 5, 6]])).item() == 0.0


def test_the_tokens_of_the_chat_template_are_found() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model("mini") / "tokenizer.json"))
    chat = render_chat((ChatTurn("user", "What is two?"), ChatTurn("assistant", "Two.")))
    encoded = tokenizer.encode(chat + END_OF_TEXT)
    weights = PromptWeights.of(tokenizer, 0.0)(torch.tensor([encoded.ids]))[0].tolist()
    counted = tokenizer.decode([token for token, weight in zip(encoded.ids, weights, strict=True) if weight])
    assert counted.strip() == "assistant\nTwo." and weights.count(0.0) > 5
