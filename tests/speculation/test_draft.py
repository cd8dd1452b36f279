"""One draft for several drafters: who proposed what, what can be taken back, what is verified."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core import Request, SamplingParams
from forerun.errors import DrafterError
from forerun.speculation.draft import Draft, PendingDrafts
from forerun.speculation.tree import ROOT

MOST = 12
guesses = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=20)


def new_draft(max_nodes: int = MOST) -> Draft:
    return Draft(Request("r", (1, 2), SamplingParams(), seed=0), max_nodes)


def guess(draft: Draft, member: str, wanted: list[tuple[int, int]], num_wanted: int = MOST) -> None:
    """Ask the member, which proposes as many nodes as it may, below nodes of its own."""
    draft.ask(member, num_wanted, 0.0, may_be_pending=False)
    own = [ROOT]
    for place, token in wanted:
        if draft.num_free:
            own.append(draft.add(own[place % len(own)], token, -float(len(own))))


@given(st.lists(guesses, min_size=1, max_size=3))
def test_members_share_one_tree_and_each_is_told_what_it_proposed(wanted: list[list[tuple[int, int]]]) -> None:
    draft, alone = new_draft(), {}
    for index, of_member in enumerate(wanted):
        room, member = draft.room, f"m{index}"
        guess(draft, member, of_member)
        single = new_draft(1 + room)
        guess(single, member, of_member)
        alone[member] = single.proposal_of(member)
    assert len(draft.tree) <= MOST and len(draft.survival) == len(draft.tree)
    for member, expected in alone.items():
        found = draft.proposal_of(member)
        assert found[2:] == expected[2:], "as if it had a tree of its own"
        assert [draft.tree.tokens[node] for node in found.nodes] == list(found.tokens)
        draft.believe(found, found.log_chances)
    assert {node for proposal in draft.proposals for node in proposal.nodes} | {ROOT} == set(range(len(draft.tree)))


@given(guesses, guesses)
def test_what_a_member_proposed_can_be_taken_back(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    draft, expected = new_draft(), new_draft()
    for each in (draft, expected):
        guess(each, "first", first)
    guess(draft, "second", second)
    draft.take_back()
    assert list(draft.tree.tokens) == list(expected.tree.tokens) and draft.survival == expected.survival
    assert draft.proposal_of("first") == expected.proposal_of("first") and draft.num_free == draft.num_wanted
    assert draft.proposal_of("second") == expected.proposal_of("second"), "nor of the nodes it shared"
    for node in range(len(draft.tree)):
        assert list(draft.tree.children(node)) == list(expected.tree.children(node))


def test_children_that_were_drawn_go_with_what_they_were_drawn_from() -> None:
    draft, q = new_draft(), torch.full((4,), 0.25, dtype=torch.float64)
    draft.add_drawn(ROOT, [3, 1], [-0.1, -0.2], q)
    assert draft.tree.proposal(ROOT) is q
    with pytest.raises(AssertionError, match="drawn once"):
        draft.add_drawn(ROOT, [2], [-0.1], q)
    draft.take_back()
    assert draft.tree.proposal(ROOT) is None and len(draft.tree) == 1


@given(guesses, st.randoms(use_true_random=False))
def test_the_rows_of_kept_nodes_are_theirs(wanted: list[tuple[int, int]], dice) -> None:  # type: ignore[no-untyped-def]
    draft = new_draft()
    guess(draft, "m", wanted)
    kept = [ROOT]
    for node in range(1, len(draft.tree)):
        if draft.tree.parents[node] in kept and dice.random() < 0.7:
            kept.append(node)
    whole = draft.rows()
    draft.keep(kept)
    rows = draft.rows()
    assert list(rows.nodes) == kept == list(draft.verified) and draft.num_nodes == len(kept)
    for row, node in enumerate(kept):
        assert draft.row_of(node) == row
        assert (rows.tokens[row], rows.masks[row], rows.depths[row]) == (
            whole.tokens[node], whole.masks[node], whole.depths[node],
        )  # fmt: skip


def test_tokens_of_a_chain_without_a_chance_are_left_out() -> None:
    draft = new_draft()
    draft.ask("first", 4, 0.0, may_be_pending=False)
    draft.add_chain([5, 6, 7], [-0.5, -1.0])
    assert draft.tree.tokens[1:] == [5, 6] and draft.survival == [0.0, -0.5, -1.0]
    assert draft.proposal_of("first").nodes == (0, 1, 2)


def test_what_is_believed_of_a_shared_node_is_the_best_that_was_said() -> None:
    draft = new_draft()
    draft.ask("first", 4, 0.0, may_be_pending=False)
    draft.add_chain([5, 6])
    draft.believe(draft.proposal_of("first"), [0.0, -1.0, -2.0])
    draft.ask("second", 4, 0.0, may_be_pending=False)
    draft.add_chain([5, 7])
    draft.believe(draft.proposal_of("second"), [0.0, -0.5, -3.0])
    assert draft.survival == [0.0, -0.5, -2.0, -3.0]


def test_a_pending_draft_has_no_tree_but_rows() -> None:
    draft, told = new_draft(4), list[int]()
    unread = torch.tensor([[8, 9, -1]])
    pending = PendingDrafts([draft], unread, lambda host: draft.add_chain(host[0, :2].tolist()), unread, unread, unread)
    pending.when_read(lambda: told.append(len(draft.tree)))
    assert draft.num_nodes == 4 and [len(column) for column in draft.rows()] == [4] * 4
    with pytest.raises(AssertionError, match="before it was read"):
        assert draft.tree
    pending.finish(unread)
    assert list(draft.tree.tokens) == [2, 8, 9] and told == [3] and draft.num_nodes == 3


def test_what_is_asked_for_is_cut_to_the_room_that_others_left() -> None:
    draft = new_draft(4)
    guess(draft, "first", [(0, 1), (1, 2)], num_wanted=3)
    guess(draft, "second", [], num_wanted=3)
    assert draft.room == draft.num_free == 1
    draft.add(ROOT, 3, 0.0)
    assert len(draft.tree) == 4 and draft.num_free == 0


def test_more_than_was_asked_for_is_refused() -> None:
    draft = new_draft()
    draft.ask("m", 1, 0.0, may_be_pending=False)
    draft.add(ROOT, 3, 0.0)
    with pytest.raises(DrafterError, match=r"more than the 1 nodes asked for: add while draft\.num_free is above 0"):
        draft.add(ROOT, 4, 0.0)
    assert draft.add_drawn(ROOT, [5], [0.0], None) == [] and len(draft.tree) == 2, "what is drawn is cut"


def test_a_node_of_another_member_is_no_parent() -> None:
    draft = new_draft()
    guess(draft, "first", [(0, 1)])
    draft.ask("second", 4, 0.0, may_be_pending=False)
    with pytest.raises(DrafterError, match="node 1 is not this drafter's"):
        draft.add(1, 2, 0.0)
    assert draft.add(ROOT, 1, 0.0) == 1, "it may propose the same node"
    draft.add(1, 2, 0.0)


@pytest.mark.parametrize("said", [0.3, 800.0, math.inf, math.nan])
def test_a_probability_is_no_log_chance(said: float) -> None:
    """What is drawn stays even so: the tree may be kept, and what it says must not spoil anything."""
    draft = new_draft()
    with pytest.raises(DrafterError, match="give the logarithm of a path's chance, at most 0"):
        draft.add_drawn(ROOT, [3, 4], [-0.5, said], None)
    assert draft.survival == [0.0, -0.5, 0.0] and draft.proposal_of(draft.member).log_chances == (0.0, -0.5, 0.0)
