"""Which blocks already hold the KV of a prefix, so that it is not computed twice.

Knows: the token ids of every full block that was computed, the order of blocks, how far drafters' KV in a block is
valid. Does not know: tensors, who is scheduled when.

A tree of blocks: a node is a full block, and its path from the top spells the whole prefix. Token ids themselves
are compared, not hashes of them, so that prefixes can never collide. Every adapter has a tree of its own: the same
tokens give other KV with it. So has every salt: who shares nothing learns nothing of others by the clock. The owner of
a block owns all blocks above it, and a request releases its last block first; so the pool, which evicts the least
recently released block, never takes a block that other nodes still follow.

Sources: blocks shared by prefix as in Kwon et al., arXiv 2309.06180; the tree as in Zheng et al., arXiv 2312.07104.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from forerun.cache.block_pool import BlockPool
from forerun.cache.lower import Listener, LowerTiers, chained
from forerun.core import Request

Tokens = tuple[int, ...]
_TOP = -1  # "block" of nodes above all first blocks


@dataclass(slots=True, eq=False, weakref_slot=True)
class Node:
    """A full block of known tokens and what has followed it."""

    block: int
    tokens: Tokens
    parent: Node | None
    children: dict[Tokens, Node] = field(default_factory=dict)
    order: list[Tokens] = field(default_factory=list)  # keys of `children`, sorted: neighbours share the most tokens
    ready: list[int] = field(default_factory=list)  # rows with valid drafter KV, one number per kind of drafter KV
    key: bytes = b""  # names the whole prefix outside this process; b"" where nobody needs that
    depth: int = -1  # blocks in front of it
    saved: int = -1  # valid drafter rows with which the tiers have the block; -1: they lack it
    has_saved_state: bool = False  # so with the recurrent state after it
    touched_s: float = 0.0  # when the tiers last heard that it was used


Place = tuple[Node, Tokens]  # a block to be added: the node it would follow, and its tokens


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache has of a request's known tokens: full blocks to share, then rows of one block to copy."""

    node: Node  # of the last full block
    blocks: tuple[int, ...] = ()
    copy_from: int | None = None  # a block whose first num_copied rows continue `blocks`
    num_copied: int = 0
    num_ready: tuple[int, ...] = ()  # leading positions with valid drafter KV, by kind

    def without_copy(self) -> Hit:
        """The same hit, full blocks only."""
        full = len(self.blocks) * len(self.node.tokens)
        return replace(self, copy_from=None, num_copied=0, num_ready=tuple(min(n, full) for n in self.num_ready))


NO_HIT = Hit(Node(_TOP, (), None))  # if there is no cache


@dataclass(slots=True)
class _Tail:
    """How far a running request's blocks are part of the tree."""

    node: Node
    num_blocks: int
    marked: list[int] = field(default_factory=list)  # leading blocks known to be ready, by kind
    closed: bool = False  # no further blocks are added to the tree
    num_saved: int = 0  # leading blocks that were given to the tiers
    num_computed: int = 0  # rows that the request did not have to compute
    opened_s: float | None = field(default_factory=perf_counter)  # None: its prompt has been computed


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens of admitted requests, and how many of them the cache had."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0

    def add(self, queried: int, hit: int) -> None:
        """A request was admitted."""
        self.queried_tokens += queried
        self.hit_tokens += hit


class KeptStates(Protocol):
    """Recurrent states at the ends of some blocks, without which a model cannot go on after them."""

    def has(self, block: int) -> bool:
        """Whether the state after the block is kept."""

    def forget(self, block: int) -> None:
        """The block is evicted, and so is the state after it, if one is kept."""

    def keep(self, request_id: str, block: int, in_answer: bool) -> None:
        """Keep the request's state, which is that after `block`; in its answer only the latest is kept."""

    def restore(self, request_id: str, block: int) -> None:
        """Let the request go on from the state after `block`."""


class PrefixCache:
    """The tree of computed blocks over one pool."""

    def __init__(self, pool: BlockPool, block_size: int, states: KeptStates | None = None) -> None:
        """`states`: of a model with recurrent layers, whose hits end where a state is kept."""
        self.states = states
        self.stats = PrefixCacheStats()
        self.block_size = block_size
        self.lower: LowerTiers | None = None
        self.listener: Listener | None = None
        self.names: Callable[[object | None, str], bytes] | None = None  # adapter, salt -> key that all others begin at
        self._pool = pool
        self._bare = Node(_TOP, (), None)  # stands for the model without an adapter
        self._tops: WeakKeyDictionary[object, WeakValueDictionary[str, Node]] = WeakKeyDictionary()  # by adapter, salt
        self._nodes: dict[int, Node] = {}  # by block
        self._tails: dict[str, _Tail] = {}  # by running request
        pool.on_evict = self._forget

    # -- looking up ---------------------------------------------------------------------------------------------

    def nothing(self, adapter: object | None = None, salt: str = "") -> Hit:
        """The hit of a request that must compute everything."""
        return Hit(self.top_of(adapter, salt))

    def lookup(self, token_ids: Sequence[int], adapter: object | None = None, salt: str = "") -> Hit:
        """The longest prefix of `token_ids` that is known with this adapter and salt.

        The block of the last token is never shared, only copied from.
        """
        top = node = self.top_of(adapter, salt)
        path: list[Node] = []
        for tokens in self.full_blocks(token_ids, (len(token_ids) - 1) // self.block_size):
            child = node.children.get(tokens)
            if child is None:
                break
            node = child
            path.append(child)
        if self.states is not None:
            return self._hit_with_state(path, top)
        start = len(path) * self.block_size
        partial, num_copied = _longest_common(node, tuple(token_ids[start : start + self.block_size]))
        ready = self._ready_of([*path, partial] if partial else path, start + num_copied)
        return Hit(node, tuple(n.block for n in path), partial.block if partial else None, num_copied, ready)

    def top_of(self, adapter: object | None, salt: str) -> Node:
        """The top of a tree; it lives as long as somebody's blocks follow it."""
        owner = self._bare if adapter is None else adapter
        tops = self._tops.setdefault(owner, WeakValueDictionary())
        top = tops.get(salt)
        if top is None:
            key = b"" if self.names is None else self.names(adapter, salt)
            tops[salt] = top = Node(_TOP, (), None, key=key)
        return top

    def _hit_with_state(self, path: list[Node], top: Node) -> Hit:
        """As much of the path as ends with a kept state."""
        assert self.states is not None
        while path and not self.states.has(path[-1].block):
            path.pop()
        ready = self._ready_of(path, len(path) * self.block_size)
        return Hit(path[-1] if path else top, tuple(node.block for node in path), num_ready=ready)

    def last_end(self, request: Request) -> int:
        """The last row in a prompt at which a block ends and others may go on."""
        return (len(request.prompt_token_ids) - 1) // self.block_size * self.block_size

    def next_place(self, request: Request) -> Place | None:
        """The block that this running request will add next; None if its tokens are not all known, or it adds none."""
        tail = self._tails[request.request_id]
        return None if tail.closed else self.place_after(tail.node, tail.num_blocks, request.token_ids)

    def place_after(self, node: Node, num_blocks: int, token_ids: Sequence[int]) -> Place | None:
        """The block of `token_ids` that follows its first `num_blocks`, which `node` ends; None if it is not full."""
        start = num_blocks * self.block_size
        if start + self.block_size > len(token_ids):
            return None
        return node, tuple(token_ids[start : start + self.block_size])

    def full_blocks(self, token_ids: Sequence[int], num: int) -> Iterator[Tokens]:
        """The first `num` blocks of these tokens."""
        size = self.block_size
        return (tuple(token_ids[start : start + size]) for start in range(0, num * size, size))

    def _ready_of(self, path: Sequence[Node], num_rows: int) -> tuple[int, ...]:
        """Leading rows of the path's blocks that are ready, by kind, at most num_rows."""
        num_kinds = max((len(node.ready) for node in path), default=0)
        return tuple(min(self._leading(path, kind), num_rows) for kind in range(num_kinds))

    def _leading(self, path: Sequence[Node], kind: int) -> int:
        total = 0
        for node in path:
            rows = node.ready[kind] if kind < len(node.ready) else 0
            total += rows
            if rows < self.block_size:
                break
        return total

    # -- running requests ---------------------------------------------------------------------------------------

    def open(self, request: Request, hit: Hit) -> None:
        """The request runs from here on; it already owns the hit's blocks, and they begin its block table."""
        marked = [min(rows // self.block_size, len(hit.blocks)) for rows in hit.num_ready]
        self._tails[request.request_id] = _Tail(hit.node, len(hit.blocks), marked, num_computed=request.num_computed)
        if self.states is not None and hit.blocks:
            self.states.restore(request.request_id, hit.blocks[-1])

    def publish(self, request: Request, num_ready: Sequence[int]) -> None:
        """Add the request's blocks that are now full of computed tokens; record how far drafters' KV is valid.

        If the tree already has an equal block, the request uses the tree's block instead. `num_ready` are leading
        positions, one number per kind of drafter KV. Call it between steps: only committed rows count.
        """
        tail = self._tails[request.request_id]
        while not tail.closed and (tail.num_blocks + 1) * self.block_size <= request.num_computed:
            self._add(request, tail, num_ready)
        for kind, num_rows in enumerate(num_ready):
            self._mark(request, tail, kind, num_rows)
        if self.states is not None and request.num_computed == tail.num_blocks * self.block_size:
            self._keep_state(request, self.states, tail)
        if self.lower is not None:
            self._save(request, tail, self.lower, len(num_ready))

    def _keep_state(self, request: Request, states: KeptStates, tail: _Tail) -> None:
        """Keep the state at the last block end of a prompt, and at the latest one in an answer."""
        beyond = request.num_computed - self.last_end(request)
        if beyond >= 0 and request.num_computed > 0:
            block = request.block_ids[request.num_computed // self.block_size - 1]
            states.keep(request.request_id, block, in_answer=beyond > 0)
            if self.lower is not None and beyond == 0:
                self.lower.save_state(tail.node)

    def _save(self, request: Request, tail: _Tail, lower: LowerTiers, num_kinds: int | None) -> None:
        """Give blocks to the tiers when drafters have all their rows of them; None: the request ends, give all."""
        if tail.opened_s is not None and request.num_computed >= len(request.prompt_token_ids) - 1:
            lower.computed(request.num_computed - tail.num_computed, perf_counter() - tail.opened_s)
            tail.opened_s = None
        nodes = [self._nodes[block] for block in request.block_ids[tail.num_saved : tail.num_blocks]]
        if num_kinds is not None:
            nodes = list(takewhile(lambda node: sum(node.ready) == num_kinds * self.block_size, nodes))
        if nodes:
            tail.num_saved += lower.save(nodes)

    def close(self, request: Request) -> None:
        """The request has ended; its blocks are returned to the pool by the caller."""
        tail = self._tails.pop(request.request_id)
        if self.lower is None:
            return
        self._save(request, tail, self.lower, None)
        node: Node | None = tail.node
        while node is not None and self.states is not None and not self.states.has(node.block):
            node = node.parent
        if node is not None and self.states is not None:
            self.lower.save_state(node)

    def _add(self, request: Request, tail: _Tail, num_ready: Sequence[int]) -> None:
        place = self.place_after(tail.node, tail.num_blocks, request.token_ids)
        assert place is not None, "a computed block is not full of known tokens"
        known = tail.node.children.get(place[1])
        if known is None:
            known = self.insert(tail.node, place[1], request.block_ids[tail.num_blocks], request)
        elif not self._exchange(request, tail.num_blocks, known, num_ready):
            tail.closed = True
            return
        tail.node = known
        tail.num_blocks += 1

    def insert(self, parent: Node, tokens: Tokens, block: int, request: Request) -> Node:
        """Add an owned block, whose rows are those of the request's adapter and salt."""
        key = chained(parent.key, tokens) if self.names is not None else b""
        node = Node(block, tokens, parent, key=key, depth=parent.depth + 1)
        self._pool.keep(block)
        self._nodes[block] = parent.children[tokens] = node
        insort(parent.order, tokens)
        if self.listener is not None:
            self.listener.stored(node, request)
        return node

    def _exchange(self, request: Request, index: int, known: Node, num_ready: Sequence[int]) -> bool:
        """Use the tree's block in place of the request's equal one, unless a drafter would lose valid rows."""
        for kind, num_rows in enumerate(num_ready):
            own = min(num_rows - index * self.block_size, self.block_size)
            if own > (known.ready[kind] if kind < len(known.ready) else 0):
                return False
        self._pool.share([known.block])
        self._pool.release([request.block_ids[index]])
        request.block_ids[index] = known.block
        return True

    def _mark(self, request: Request, tail: _Tail, kind: int, num_rows: int) -> None:
        """Mark the request's blocks as ready up to `num_rows` positions."""
        tail.marked += [0] * (kind + 1 - len(tail.marked))
        while tail.marked[kind] < tail.num_blocks:
            index = tail.marked[kind]
            rows = min(num_rows - index * self.block_size, self.block_size)
            if rows <= 0:
                return
            ready = self._nodes[request.block_ids[index]].ready
            ready += [0] * (kind + 1 - len(ready))
            ready[kind] = max(ready[kind], rows)
            if rows < self.block_size:
                return
            tail.marked[kind] += 1

    # -- evicting -----------------------------------------------------------------------------------------------

    def _forget(self, block: int) -> None:
        """The pool evicts the block."""
        node = self._nodes.pop(block)
        assert not node.children, f"block {block} is evicted before what follows it"
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del node.parent.order[bisect_left(node.parent.order, node.tokens)]
        self.stats.evicted_blocks += 1
        if self.listener is not None:
            self.listener.removed(node)
        if self.states is not None:
            self.states.forget(block)

    def check_integrity(self) -> None:
        """Raise AssertionError if tree, pool and running requests disagree."""
        for block, node in self._nodes.items():
            parent = node.parent
            assert node.block == block and len(node.tokens) == self.block_size, f"block {block} is not a full block"
            assert parent is not None and parent.children.get(node.tokens) is node, f"block {block} hangs loose"
            assert self._pool.is_kept(block), f"block {block} is in the tree but not kept"
            assert node.order == sorted(node.children), f"the order below block {block} is wrong"
            assert all(0 <= rows <= self.block_size for rows in node.ready), f"block {block} is ready beyond its rows"
            if parent.block != _TOP and self._pool.num_owners(block):
                assert self._pool.num_owners(parent.block), f"block {block} is owned, what it follows is not"
        kept = sum(self._pool.is_kept(block) for block in range(self._pool.num_blocks))
        assert kept == len(self._nodes), "the pool keeps blocks that are not in the tree"


def _longest_common(node: Node, tokens: Tokens) -> tuple[Node | None, int]:
    """The child that shares the most leading tokens with `tokens`, and how many; (None, 0) if none shares any."""
    place = bisect_left(node.order, tokens)
    neighbours = node.order[max(place - 1, 0) : place + 1]
    best = max(neighbours, key=lambda key: num_common(key, tokens), default=())
    shared = num_common(best, tokens)
    return (node.children[best], shared) if shared else (None, 0)


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens with which both begin."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
