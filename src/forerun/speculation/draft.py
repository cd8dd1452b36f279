"""Draft: what is proposed for one request in one step, from the first guess to the verified tree.

Knows: one tree, who proposed which of its nodes and how likely each is said to be, which nodes will be verified. Does
not know: who drafts, how nodes are drawn (`growth`), acceptance.

Drafters add nodes and take none away. Several add to the same tree, one after the other (`ask`): a node that is there
already belongs to both. Pruning (`keep`) changes no node's number: the KV of node i is in row i after the root's.

**Pending drafts.** A device may still be drawing a tree while the pass that verifies it is already enqueued. Who looks
at drafts earlier must wait: a policy that prunes, a portfolio that asks another drafter, a rule that needs q. Without
any of these a step sets `Draft.may_be_pending`: trees may stay on the device until the choices are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from forerun.core import Request
from forerun.errors import DrafterError
from forerun.kernels.device import to_device
from forerun.speculation.drawn import DrawnTree, PendingTrees
from forerun.speculation.tree import MAX_NODES, ROOT, DraftTree


class Proposal(NamedTuple):
    """The nodes one drafter proposed for a request, in the order it did, the root first."""

    member: str
    nodes: tuple[int, ...]  # numbers in the draft's tree
    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # indices into this proposal; -1 for the root
    depths: tuple[int, ...]
    log_chances: tuple[float, ...]  # of whole paths: the drafter's own estimates


class DraftPlan(Protocol):
    """How much drafters should add to the drafts of a step. Queries only."""

    def sizes(self, member: str, drafts: Sequence[Draft]) -> Sequence[int]:
        """Nodes a drafter should add to each draft at most; 0: it is not asked."""

    def least_chance(self, member: str) -> float:
        """See `Draft.least`."""

    def gained_s(self, member: str) -> float:
        """Seconds that its drafts have saved so far."""

    def log_chances(self, request: Request, proposal: Proposal) -> Sequence[float]:
        """Log chance of the whole path to each node of a proposal, from the drafter's estimates and their record."""


class Unlimited:
    """Every drafter adds as much as there is room for, and its own estimates count."""

    def sizes(self, member: str, drafts: Sequence[Draft]) -> Sequence[int]:
        """All the room."""
        return [draft.room for draft in drafts]

    def least_chance(self, member: str) -> float:
        """Every level is drawn."""
        return 0.0

    def gained_s(self, member: str) -> float:
        """Not known."""
        return 0.0

    def log_chances(self, request: Request, proposal: Proposal) -> Sequence[float]:
        """The drafter's own estimates."""
        return proposal.log_chances


_UNLIMITED = Unlimited()
_ROOT_ALONE = {ROOT: 0.0}  # what a drafter has proposed that has proposed nothing


class TreeRows(NamedTuple):
    """What a pass over the nodes to be verified computes, the root first."""

    tokens: Sequence[int]
    nodes: Sequence[int]  # ascending: node i is i rows after the root
    masks: Sequence[int]
    depths: Sequence[int]


NO_ROWS = TreeRows((), (), (), ())  # of a request whose root is not reached
_ROUNDING = 1e-3  # by which a log chance may be above 0
_CHAIN_PARENTS = list(range(-1, MAX_NODES - 1))
_CHAIN_MASKS = tuple((2 << node) - 1 for node in range(MAX_NODES))


@dataclass(slots=True)
class Draft:
    """A draft tree of at most `max_nodes` nodes, the root included."""

    request: Request
    max_nodes: int
    may_be_pending: bool = False  # nobody looks at the tree before it is verified, see above
    plan: DraftPlan = _UNLIMITED  # of the step: how much each member of a portfolio should add
    least: float = 0.0  # a level is worth its pass if the summed chances of its leaves, over all drafts, reach this
    member: str = ""  # the drafter that was asked last, in whose name nodes are added
    num_caught_up: int = 0  # known tokens the drafter had to compute before it could draft
    num_wanted: int = field(init=False)  # nodes the drafter was asked for
    pending: PendingDrafts | None = None  # set while the tree is still on a device; there is no tree until it is read
    survival: list[float] = field(init=False)  # log chance of each node's whole path
    proposals: list[Proposal] = field(default_factory=list)  # those that were believed, in the drafters' order
    _tree: DraftTree = field(init=False)
    _own: dict[str, dict[int, float]] = field(default_factory=dict)  # node -> log chance, by drafter, as proposed
    _kept: Sequence[int] | None = None
    _num_before: int = 1  # number of nodes when the drafter was asked

    def __post_init__(self) -> None:
        self._tree = DraftTree(self.request.token_ids[-1])
        self.survival, self.num_wanted = [0.0], self.max_nodes - 1

    @property
    def tree(self) -> DraftTree:
        """The tree so far. A pending draft has none."""
        assert self.pending is None, "a draft was looked at before it was read"
        return self._tree

    @property
    def num_nodes(self) -> int:
        """Nodes to verify, the root included; of a pending draft how many it may have at most."""
        if self.pending is not None:
            return 1 + self.num_wanted
        return len(self._tree) if self._kept is None else len(self._kept)

    # -- proposing ----------------------------------------------------------------------------------------------

    def ask(self, member: str, num_wanted: int, least: float, may_be_pending: bool) -> None:
        """Let the next drafter propose `num_wanted` nodes, or as many as fit: a plan may be older than the tree."""
        self.num_wanted, self.least, self.may_be_pending = min(num_wanted, self.room), least, may_be_pending
        self.member, self.num_caught_up, self._num_before = member, 0, len(self._tree)

    @property
    def room(self) -> int:
        """Nodes the tree may still take."""
        return self.max_nodes - len(self._tree)

    @property
    def num_free(self) -> int:
        """Nodes the drafter may still propose."""
        return self.num_wanted - (len(self._own.get(self.member, _ROOT_ALONE)) - 1)

    def add(self, parent: int, token: int, log_survival: float) -> int:
        """Guess `token` below `parent`, chosen without randomness -> its node.

        `parent`: the root, or a node of this drafter's. `log_survival`: the log chance of its whole path, at most 0, by
        the drafter's own estimate. Raises DrafterError for others, and where `num_free` is 0.
        """
        if self.num_free == 0:
            raise DrafterError(f"more than the {self.num_wanted} nodes asked for: add while draft.num_free is above 0")
        return self.add_drawn(parent, [token], [log_survival], None)[0]

    def add_chain(self, tokens: Sequence[int], log_survival: Sequence[float] = ()) -> None:
        """Guess `tokens` one after the other below the root, as many as fit, chosen without randomness.

        `log_survival`: the log chances of their paths, as for `add`; 0 by default. Tokens without one are left out.
        """
        _check_chances(log_survival)
        kept = tokens[: min(self.num_free, len(log_survival or tokens))]
        if kept:
            self._hang_chain(kept, log_survival or [0.0] * len(kept))

    def _hang_chain(self, tokens: Sequence[int], log_survival: Sequence[float]) -> list[int]:
        """Add a chain below the root that fits -> its nodes."""
        own = self._own.setdefault(self.member, {ROOT: 0.0})
        nodes = self.tree.add_chain(ROOT, tokens, self.member)
        for node, said in zip(nodes, log_survival, strict=False):
            self._note(node, said, own)
        return nodes

    def add_drawn(
        self, parent: int, tokens: Sequence[int], log_survival: Sequence[float], q: Tensor | None
    ) -> list[int]:
        """Add children in the order they were drawn from q [vocab_size], as many as fit -> their nodes.

        `parent`, `log_survival`: as for `add`. q None: they were chosen without randomness.
        """
        if parent not in self._own.get(self.member, _ROOT_ALONE):
            raise DrafterError(f"node {parent} is not this drafter's: a parent is the root, or what draft.add returned")
        nodes = self._hang(parent, tokens, log_survival, q)
        _check_chances(log_survival)
        return nodes

    def add_tree(self, tree: DrawnTree) -> set[int]:
        """Add a tree below the root, as far as it fits -> the new nodes whose KV is in their own row."""
        nodes, room = [ROOT], self.num_free
        if room > 0 and tree.tokens and tree.parents == range(len(tree.tokens)) and not tree.drawn_from:
            nodes += self._hang_chain(tree.tokens[:room], tree.log_chances)
            return {node for node, place in zip(nodes[1:], tree.places, strict=True) if node == place}
        own = self._own.setdefault(self.member, {ROOT: 0.0}) if tree.tokens else {}
        for token, above, said in zip(tree.tokens[:room], tree.parents, tree.log_chances, strict=False):
            parent = nodes[above]
            if above in tree.drawn_from and not self.tree.children(parent):
                self.tree.draw_children(parent, (), tree.drawn_from[above], self.member)
            nodes.append(self.tree.add(parent, token, self.member))
            self._note(nodes[-1], said, own)
        return {node for node, place in zip(nodes[1:], tree.places, strict=True) if node == place}

    def _hang(self, parent: int, tokens: Sequence[int], log_survival: Sequence[float], q: Tensor | None) -> list[int]:
        """Add children, as many as fit, some of which may be another drafter's already -> their nodes."""
        kept = tokens[: self.num_free]
        if not kept:
            return []
        own = self._own.setdefault(self.member, {ROOT: 0.0})
        nodes = self.tree.draw_children(parent, kept, q, self.member)
        for node, said in zip(nodes, log_survival, strict=False):
            self._note(node, said, own)
        return nodes

    def _note(self, node: int, said: float, own: dict[int, float]) -> None:
        """The drafter gave a node, new or not, this log chance."""
        chance = said if said <= 0.0 else 0.0  # NaN, too
        own.setdefault(node, chance)
        if node == len(self.survival):
            self.survival.append(chance)

    def take_back(self) -> None:
        """Undo what was proposed since the drafter was asked; the root stays."""
        self.pending = None
        self._tree.truncate(self._num_before)
        self.survival = self.survival[: self._num_before]
        self._own.pop(self.member, None)

    # -- what was proposed --------------------------------------------------------------------------------------

    def proposal_of(self, member: str) -> Proposal:
        """What one drafter proposed; the root alone where that is nothing."""
        own, tree = self._own.get(member, _ROOT_ALONE), self.tree
        nodes = tuple(own)
        if nodes == tuple(range(len(tree))):  # the only drafter
            return Proposal(
                member, nodes, tuple(tree.tokens), tuple(tree.parents), tuple(tree.depths), tuple(own.values())
            )
        places = {node: place for place, node in enumerate(nodes)}
        return Proposal(
            member,
            nodes,
            tuple([tree.tokens[node] for node in nodes]),
            tuple([places.get(tree.parents[node], -1) for node in nodes]),
            tuple([tree.depths[node] for node in nodes]),
            tuple(own.values()),
        )

    def believe(self, proposal: Proposal, log_survival: Sequence[float]) -> None:
        """Replace a proposal's log chances by these; a node that others proposed, too, keeps its best one."""
        self.proposals.append(proposal)
        for node, chance in zip(proposal.nodes, log_survival, strict=True):
            is_new = node >= self._num_before
            self.survival[node] = chance if is_new else max(self.survival[node], chance)

    # -- verifying ----------------------------------------------------------------------------------------------

    def keep(self, nodes: Sequence[int]) -> None:
        """Verify only these nodes: ascending, the root first, every one with its parent.

        Exact only if no q was recorded: children drawn from q must not be selected afterwards.
        """
        tree = self.tree
        assert nodes[0] == ROOT and not any(tree.proposal(node) is not None for node in range(len(tree)))
        self._kept = nodes

    @property
    def verified(self) -> Sequence[int]:
        """The nodes to verify, ascending."""
        return range(len(self.tree)) if self._kept is None else self._kept

    @property
    def chain(self) -> Sequence[int] | None:
        """The tokens to verify, the root's first, if their nodes are the first of the tree, one below the other."""
        tree, num = self.tree, self.num_nodes
        is_first = self._kept is None or self._kept[-1] == num - 1
        return tree.tokens[:num] if is_first and tree.parents[:num] == _CHAIN_PARENTS[:num] else None

    def row_of(self, node: int) -> int:
        """The index of a verified node among the draft's rows."""
        return node if self._kept is None else bisect_left(self._kept, node)

    def rows(self) -> TreeRows:
        """The rows of the pass that verifies the draft.

        For a pending draft they are a chain of token 0, which the device replaces by the real content.
        """
        if self.pending is not None:
            nodes = range(self.num_nodes)
            tokens = [self._tree.tokens[ROOT], *([0] * self.num_wanted)]
            return TreeRows(tokens, nodes, _CHAIN_MASKS[: self.num_nodes], nodes)
        tree = self._tree
        if self._kept is None:
            return TreeRows(tree.tokens, range(len(tree)), tree.masks, tree.depths)
        columns = ([column[node] for node in self._kept] for column in (tree.tokens, tree.masks, tree.depths))
        tokens, masks, depths = columns
        return TreeRows(tokens, self._kept, masks, depths)


class PendingRows(NamedTuple):
    """Rows of a batch whose contents are only on the device."""

    rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    depths: Tensor  # [n] int64, below the roots
    tree_masks: Tensor  # [n] int64: ancestors and self by bits


class PendingDrafts:
    """Trees of several drafts; everything by columns of [number of drafts, most nodes] on the device."""

    def __init__(
        self, drafts: Sequence[Draft], unread: Tensor, finish: Callable[[Tensor], None], tokens: Tensor,
        depths: Tensor, masks: Tensor,
    ) -> None:  # fmt: skip
        """`finish` adds the nodes to the drafts, given `unread` on the host. tokens: -1 for none."""
        self.unread = unread
        self.drafts = list(drafts)
        self._finish = finish
        self._columns = (tokens.clamp(min=0), depths, masks)
        self._then: list[Callable[[], None]] = []
        for draft in drafts:
            assert len(draft.tree) == 1, "only the first drafts of a request may be pending"
            draft.pending = self

    def when_read(self, then: Callable[[], None]) -> None:
        """Call this once the drafts have their trees."""
        self._then.append(then)

    def rows(self, firsts: Sequence[tuple[Draft, int]]) -> PendingRows:
        """The rows of these drafts' nodes, given the row of each root."""
        width, rows, places = self._columns[0].shape[1], list[int](), list[int]()
        index_of = {id(draft): index for index, draft in enumerate(self.drafts)}
        for draft, first in firsts:
            num, index = draft.num_nodes - 1, index_of[id(draft)]
            rows += range(first + 1, first + 1 + num)
            places += range(index * width, index * width + num)
        both = to_device(torch.tensor([rows, places], dtype=torch.int64), self.unread.device)  # [2, n]
        tokens, depths, masks = (column.flatten().index_select(0, both[1]) for column in self._columns)
        return PendingRows(both[0], tokens, depths, masks)

    def finish(self, host: Tensor) -> None:
        """`unread` has been copied to the host: the drafts get their trees."""
        for draft in self.drafts:
            draft.pending = None
        self._finish(host)
        for then in self._then:
            then()


def pending_of(drafts: Sequence[Draft]) -> PendingDrafts | None:
    """The pending trees among these drafts, if any: all those of a step are one object."""
    for draft in drafts:
        if draft.pending is not None:
            return draft.pending
    return None


def _check_chances(log_survival: Sequence[float]) -> None:
    if strange := [chance for chance in log_survival if not chance <= _ROUNDING]:
        raise DrafterError(f"{strange[0]} is no log chance: give the logarithm of a path's chance, at most 0")


def hand_over(drafts: Sequence[Draft], drawn: Sequence[DrawnTree] | PendingTrees) -> list[set[int]]:
    """Add what was drawn for these drafts, now or when it is read.

    -> of each draft the nodes whose KV lies in their own row, including the root; the set of a draft that stays
    pending is filled in when its tree is read.
    """
    computed = [{ROOT} for _ in drafts]

    def add(trees: Sequence[DrawnTree]) -> None:
        for nodes, draft, tree in zip(computed, drafts, trees, strict=True):
            nodes |= draft.add_tree(tree)

    if not isinstance(drawn, PendingTrees):
        add(drawn)
    elif _may_be_pending(drafts):
        reading = drawn.reading
        PendingDrafts(drafts, drawn.unread, lambda host: add(reading(host)), drawn.tokens, drawn.depths, drawn.masks)
    else:
        add(drawn.read())
    return computed


def _may_be_pending(drafts: Sequence[Draft]) -> bool:
    """Whether these drafts may be read with the target's choices.

    Not after a drafter has caught up, mostly with a prompt: the time that takes decides whether drafting pays off, and
    it could not be told apart from the target's pass. It happens once per request.
    """
    return all(draft.may_be_pending and draft.num_caught_up == 0 for draft in drafts)
