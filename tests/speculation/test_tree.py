"""Draft trees: what is derived agrees with the parents, for any tree."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from forerun.speculation.tree import MAX_NODES, DraftTree

growth = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 5)), max_size=MAX_NODES - 1)


def build(steps: list[tuple[int, int]]) -> DraftTree:
    tree = DraftTree(9)
    for place, token in steps:
        tree.add(place % len(tree), token, "t")
    return tree


@given(growth)
def test_derived_columns(steps: list[tuple[int, int]]) -> None:
    tree = build(steps)
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[0] == 0 and path[-1] == node
        assert all(tree.parents[b] == a for a, b in pairwise(path))
        assert tree.depths[node] == len(path) - 1
        assert tree.masks[node] == sum(1 << n for n in path)
        assert tree.path_tokens(node) == [tree.tokens[n] for n in path[1:]]
        for child in tree.children(node):
            assert tree.child_with(node, tree.tokens[child]) == child


@given(growth)
def test_siblings_differ(steps: list[tuple[int, int]]) -> None:
    tree = build(steps)
    for node in range(len(tree)):
        tokens = [tree.tokens[c] for c in tree.children(node)]
        assert len(tokens) == len(set(tokens))


def test_chain() -> None:
    tree = DraftTree(1)
    assert tree.is_chain and len(tree) == 1
    *_, last = tree.add_chain(0, [2, 3, 4], "t")
    assert tree.is_chain and tree.path_tokens(last) == [2, 3, 4]
    tree.add(0, 7, "t")
    assert not tree.is_chain
    assert tree.child_with(0, 8) is None


@given(growth, st.integers(0, 30), st.lists(st.integers(0, 4), max_size=12))
def test_a_chain_is_its_nodes_one_by_one(steps: list[tuple[int, int]], place: int, tokens: list[int]) -> None:
    """Nodes that are there already are found again."""
    at_once, one_by_one = build(steps), build(steps)
    tokens = tokens[: MAX_NODES - len(at_once)]
    parent = place % len(at_once)
    nodes = at_once.add_chain(parent, tokens, "t")
    expected = list[int]()
    for token in tokens:
        expected.append(one_by_one.add(expected[-1] if expected else parent, token, "t"))
    assert nodes == expected
    for name in DraftTree.__slots__:
        assert getattr(at_once, name) == getattr(one_by_one, name), name
