"""Walking down trees in C++ gives what the reference gives, for trees of all shapes."""

from __future__ import annotations

import random

import pytest
import torch
from tests.kernels.cases import ISAS, cpu_kernels, kernels_named

from forerun.kernels.draws import PlainTree

REFERENCE = kernels_named("reference")


def random_tree(dice: random.Random, first_row: int, vocab_size: int) -> PlainTree:
    """Of up to 12 nodes, siblings with tokens of their own; in half the cases only a part is verified."""
    parents, tokens = [-1], [dice.randrange(vocab_size)]
    for _ in range(dice.randrange(12)):
        parent, token = dice.randrange(len(parents)), dice.randrange(vocab_size)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    verified = [0]
    for node in range(1, len(parents)):
        if parents[node] in verified and dice.random() < dice.choice((0.7, 1.0)):
            verified.append(node)
    whole = len(verified) == len(parents)
    heat = dice.choice((0.0, 0.3, 1.0))
    seed, position = dice.getrandbits(64), dice.choice((1, 500, 2**31 + 5))
    nodes = range(len(parents)) if whole else verified
    return PlainTree(first_row, tokens, parents, nodes, heat, seed, position, dice.randrange(64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(30))
def test_equal_to_the_reference(isa: str, seed: int) -> None:
    dice = random.Random(seed)
    vocab_size = dice.choice((2, 3, 5))  # small, so that walks go deep
    trees, num_rows = [], 1  # row 0 belongs to nobody
    for _ in range(dice.randrange(5)):
        trees.append(random_tree(dice, num_rows, vocab_size))
        num_rows += len(trees[-1].verified)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    logits[dice.randrange(num_rows)] = dice.choice((torch.nan, -torch.inf))
    assert cpu_kernels(isa).walk_trees(logits, trees) == REFERENCE.walk_trees(logits, trees)


def test_a_chain_is_followed_as_far_as_it_is_right_and_no_token_is_minus_one() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 1]), 7).float()
    tree = PlainTree(0, (0, 3, 1, 5), (-1, 0, 1, 2), range(4), 0.0, 0, 1, 0)
    for kernels in (REFERENCE, cpu_kernels()):
        assert kernels.walk_trees(logits, [tree]) == [((0, 1, 2), 4)]
        assert kernels.walk_trees(logits.index_fill(0, torch.tensor([1]), torch.nan), [tree]) == [((0, 1), -1)]
        assert kernels.walk_trees(logits, []) == []
