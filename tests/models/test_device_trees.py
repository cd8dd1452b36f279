"""Trees grown without the host's looking: node for node those of growth on the host, ties and all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.core import Request, SamplingParams
from forerun.kernels.ops import LayerKV
from forerun.kernels.select import select_kernels
from forerun.models.base import Passes, PassOutput
from forerun.models.batch import ForwardBatch
from forerun.runtime.bind import bind
from forerun.runtime.runner import Runner
from forerun.runtime.trees import MOST_LEVELS
from forerun.speculation.draft import Draft, hand_over
from forerun.speculation.growth import TreeGrower
from tests.support.drafting import root_rows
from tests.support.enqueued import Enqueued

VOCAB, BLOCK = 11, 4
KERNELS = select_kernels("reference")


class Fake:
    """Logits of few values, so that many are equal, of all tokens on the way: features carry what came before.

    Beside them a memory as a KV cache is one: a row must see exactly its ancestors, each with what it wrote.
    """

    def __init__(self, seed: int, num_slots: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self._table = torch.randint(-3, 4, (97, VOCAB), generator=noise).float() / 2
        self._table[torch.rand(97, generator=noise) < 0.05] = float("nan")  # rows without an answer
        self.slots = torch.zeros(num_slots, dtype=torch.int64)
        self.num_rows: list[int] = []

    def run(self, batch: ForwardBatch, fed: Tensor | None, _: Sequence[LayerKV] = ()) -> PassOutput:
        assert fed is not None
        features = fed[:, 0]
        self.num_rows.append(batch.num_rows)
        self.slots[batch.slots.long()] = batch.token_ids + VOCAB * features.long()
        seen = torch.tensor([self._seen(batch, row) for row in range(batch.num_rows)])
        state = (features.long() * 31 + batch.token_ids * 7 + seen + batch.positions) % 97  # [M]
        rows = state.index_select(0, batch.logit_rows)
        return PassOutput(self._table[rows], features=rows[:, None].float())

    def _seen(self, batch: ForwardBatch, row: int) -> int:
        """What the row reads of its tree, in order."""
        rows, sum_ = batch.rows, 0
        own = int(rows.seq_ids[row])
        mask, table = int(rows.tree_masks[row]) & (1 << 64) - 1, rows.block_tables[own]
        for place in (place for place in range(64) if mask >> place & 1):
            logical = int(rows.tree_starts[own]) + place
            sum_ = sum_ * 13 + int(self.slots[int(table[logical // BLOCK]) * BLOCK + logical % BLOCK])
        return sum_ % 1009


def drafts_of(sizes: Sequence[int], temperatures: Sequence[float], seed: int) -> list[Draft]:
    """Requests of different lengths with blocks of their own, the largest tree first."""
    made = []
    for index, size in enumerate(sorted(sizes, reverse=True)):
        params = SamplingParams(temperature=temperatures[index % len(temperatures)], seed=seed + index)
        request = Request(str(index), list(range(1, 4 + index % 3)), params, seed=seed + index, max_len=200)
        request.block_ids = list(range(index * 20, index * 20 + 20))
        made.append(Draft(request, size + 1))
    return made


def start(drafts: Sequence[Draft]) -> Tensor:
    """What roots are fed."""
    return torch.arange(len(drafts))[:, None].float() % 2


def draw(runner: Runner, drafts: Sequence[Draft], width: int) -> list[set[int]]:
    """Grow them -> of each, the nodes whose rows were computed in their own places."""
    roots = [root_rows(draft.request) for draft in drafts]
    noise = TreeGrower(KERNELS, True).noise(drafts)
    return hand_over(drafts, runner.draw(roots, start(drafts), noise, width))


def runner(fake: Fake, capture: Enqueued | None = None) -> Runner:
    """On a device if something captures, else level by level on the host."""
    kvs = [LayerKV.zeros(1, 1, 1, BLOCK, torch.float32)]
    return bind(Passes(fake.run, fake.run, VOCAB, feature_size=1, fed_size=1), KERNELS, kvs, BLOCK, capture)


def told(drafts: Sequence[Draft]) -> list[object]:
    return [(list(d.tree.tokens), list(d.tree.parents), list(d.survival)) for d in drafts]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=1, max_size=5),
    width=st.integers(1, 5),
    temperatures=st.lists(st.sampled_from([0.0, 1.0, 0.6]), min_size=1, max_size=3),
    seed=st.integers(0, 1 << 20),
)
def test_a_tree_is_the_hosts(sizes: list[int], width: int, temperatures: list[float], seed: int) -> None:
    fakes = [Fake(seed, 20 * BLOCK * len(sizes)) for _ in range(2)]
    ours, theirs = (drafts_of(sizes, temperatures, seed) for _ in range(2))
    computed = draw(runner(fakes[0], Enqueued()), ours, width)
    expected = draw(runner(fakes[1]), theirs, width)
    assume(width == 1 or len(fakes[1].num_rows) <= MOST_LEVELS)  # a device draws no deeper trees
    assert told(ours) == told(theirs) and computed == expected
    for draft, nodes in zip(ours, computed, strict=True):  # what is said to be computed lies there
        table, root = draft.request.block_ids, draft.request.root_position
        slots = [table[(root + node) // BLOCK] * BLOCK + (root + node) % BLOCK for node in nodes]
        assert [int(fakes[0].slots[slot]) % VOCAB for slot in slots] == [draft.tree.tokens[node] for node in nodes]
        assert all(fakes[0].slots[slot] == fakes[1].slots[slot] for slot in slots)


def test_levels_are_as_many_whatever_comes_of_them_and_captured_once() -> None:
    capture, fake = Enqueued(), Fake(1, 80)
    trees = runner(fake, capture)
    for seed in range(3):
        drafts = drafts_of([6], [1.0], seed)
        before = len(fake.num_rows)
        draw(trees, drafts, 3)
        assert fake.num_rows[before:] == [1, 3, 3, 3, 3, 3]
    assert (capture.num_captures, capture.num_runs) == (1, 3)


def test_trees_of_several_sizes_share_a_program() -> None:
    capture, fake = Enqueued(), Fake(1, 80)
    trees = runner(fake, capture)
    for num_nodes in (9, 12, 10, 5, 6):
        ours, theirs = (drafts_of([num_nodes], [1.0], 3) for _ in range(2))
        draw(trees, ours, 3)
        draw(runner(Fake(1, 80)), theirs, 3)
        assert told(ours) == told(theirs)
    assert (capture.num_captures, capture.num_runs) == (2, 5)


@pytest.mark.parametrize("num_nodes", [1, 40])
def test_the_number_of_levels_is_bounded(num_nodes: int) -> None:
    fake = Fake(2, 80)
    drafts = drafts_of([num_nodes], [0.0], 0)
    draw(runner(fake, Enqueued()), drafts, 4)
    assert len(fake.num_rows) == min(num_nodes, MOST_LEVELS)
    assert max(drafts[0].tree.depths) <= MOST_LEVELS
