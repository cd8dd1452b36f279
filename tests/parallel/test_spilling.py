"""How ranks agree on what was read: a leader's and a follower's pool in one process; and with recurrent states."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.block_identity import about_part
from forerun.cache.boundaries import BoundaryStates
from forerun.cache.disk import DiskTier
from forerun.cache.kv_cache import KVCache
from forerun.cache.lower import state_key
from forerun.cache.prefix_cache import Node
from forerun.cache.spill import Loaded, RecordName, Spill
from forerun.cache.states import RecurrentStates
from forerun.cache.tiers import HostTier, Tier
from forerun.errors import RankLost
from forerun.kernels.device import CPU
from forerun.models.base import LayerSpec, StateSpec
from forerun.models.loader import load_model
from forerun.runtime.parallel import follower, spilling
from forerun.runtime.parallel.crew import Crew
from forerun.runtime.parallel.exchange import RankLayout
from forerun.runtime.parallel.follower import RankFollower
from forerun.runtime.parallel.links import LinkClosed
from forerun.runtime.parallel.messages import Kind, NamedBlock, RankMessage, TierCall, TierOrder
from forerun.runtime.parallel.spilling import RankedSpill, RankTiers, open_tier, place_of
from tests.models import factory
from tests.parallel.test_ranks import open_llm
from tests.parallel.test_tiers import PREFIX, again, lower_of
from tests.support import tiny

NAMES = [RecordName(bytes([index]) * 32, index, (index, 1, 2, 3)) for index in range(4)]
SIZE = 4


class Rank:
    """A pool of random rows, slots of random states, and tiers for them."""

    def __init__(self, seed: int, tiers: Sequence[Tier]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv = KVCache(
            tiny.kernels(), [LayerSpec(2, 8, torch.bfloat16), LayerSpec(1 + seed, 8, torch.int8)], 12, SIZE
        )
        self.states = RecurrentStates([StateSpec((2, 3), (1, 2, 2))], 3, CPU)
        for tensor in self.parts():
            tensor.copy_(torch.randint(-90, 90, tensor.shape, generator=generator))
        for tensor in self.states.tensors:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        self.states.begin("r", 0)
        for tensor in self.states.tensors:
            tensor[:] = torch.rand(tensor.shape, generator=generator)
        self.states.end("r", 16)
        self.states.keep("r", 3, in_answer=False)
        self.tiers = tiers

    def parts(self) -> list[torch.Tensor]:
        return [
            part
            for layer in self.kv.layers
            for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales)
            if part is not None and part.numel()
        ]

    def bits(self, block: int) -> list[bytes]:
        return [part[block].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in self.parts()]

    def state(self, block: int) -> list[list[float]]:
        kept = self.states.kept(block)
        return [] if kept is None else [part.flatten().tolist() for part in kept]


class OneFollower:
    """A link to another rank, which does at once what it is told."""

    def __init__(self) -> None:
        exchange: Any = SimpleNamespace(layout=RankLayout(2, 1), abort=lambda: None)
        link: Any = self
        self.crew = Crew(exchange, {1: link}, {0: "here", 1: "there"}, [], 1.0)
        self.tiers: RankTiers | None = None
        self.told = list[RankMessage]()
        self.is_lost = False

    def send(self, kind: Kind, body: bytes) -> None:
        if self.is_lost:
            raise LinkClosed("its process ended")
        self.told.append(RankMessage.decode(kind, body))
        if self.tiers is not None:
            self.tiers.do(TierOrder.read(self.told[-1]))

    def send_if_room(self, message: RankMessage) -> None:
        raise LinkClosed("its process ended")

    def answer(self, numbers: Sequence[int]) -> None:
        self.crew._arrived(1, RankMessage(Kind.ANSWER, numbers))

    def num_told(self, call: TierCall) -> int:
        return sum(TierOrder.read(message).call == call for message in self.told)


def nodes_of(names: Sequence[RecordName]) -> list[Node]:
    return [Node(index, name.tokens, None, key=name.key, depth=name.depth) for index, name in enumerate(names)]


def all_have(spill: RankedSpill) -> bool:
    return not spill.lacking([(name.key, name is NAMES[-1]) for name in NAMES])


def make(kind: str, tmp_path: Path) -> tuple[Rank, Rank, RankedSpill, RankTiers, OneFollower]:
    def tier(name: str) -> Tier:
        return HostTier(1 << 20, pinned=False) if kind == "host" else DiskTier(tmp_path, 1 << 20, {"rank": name})

    follower = OneFollower()
    leader, other = Rank(0, [tier("0")]), Rank(1, [tier("1")])
    own = Spill(other.tiers, other.kv, other.states, BoundaryStates(SIZE))
    follower.tiers = RankTiers(own, {"rank": "1"}, follower.answer)
    spill = RankedSpill(leader.tiers, leader.kv, leader.states, BoundaryStates(SIZE), follower.crew, 1)
    nodes = nodes_of(NAMES)
    assert spill.save(nodes) == 4
    spill.save_state(nodes[3])
    spill.flush()
    return leader, other, spill, follower.tiers, follower


def read(spill: RankedSpill) -> Loaded:
    return spill.read(NAMES, RecordName(state_key(NAMES[3].key), 3, ())).result(20)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_parts_come_back_where_they_were_computed(kind: str, tmp_path: Path) -> None:
    leader, other, spill, tiers, _ = make(kind, tmp_path)
    wanted = [[rank.bits(block) for block in range(4)] for rank in (leader, other)]
    states = [rank.state(3) for rank in (leader, other)]
    for rank in (leader, other):
        for part in rank.parts():
            part[:4] = 0
        rank.states.forget(3)
    loaded = read(spill)
    assert len(loaded.blocks) == 4 and loaded.state is not None
    spill.fill([9, 6, 7], loaded, 1)  # the first was computed meanwhile
    spill.fill_state(7, 16, loaded)
    spill.drop(loaded)
    for rank, bits, state in zip((leader, other), wanted, states, strict=True):
        assert [rank.bits(block) for block in (9, 6, 7)] == bits[1:]
        assert rank.state(7) == state != []
    assert not tiers._readings
    assert all(tier.stats.stored_blocks == 5 for rank in (leader, other) for tier in rank.tiers)


@pytest.mark.parametrize("lost", ["block", "state", "leader's block", "pool"])
def test_what_one_rank_lacks_all_lack(lost: str, tmp_path: Path) -> None:
    leader, other, spill, tiers, _ = make("host", tmp_path)
    wanted = [rank.bits(1) for rank in (leader, other)]
    kept: Any = (leader if lost == "leader's block" else other).tiers[0]
    own = tiers._node(NamedBlock(NAMES[2].key, 2, ())).key if lost == "block" else NAMES[2].key
    if lost == "state":
        own = state_key(tiers._node(NamedBlock(NAMES[3].key, 3, ())).key)
    if lost == "pool":
        kept._records.clear()
    else:
        del kept._records[own]
    assert not all_have(spill)
    loaded = read(spill)
    assert len(loaded.blocks) == {"state": 4, "pool": 0}.get(lost, 2) and loaded.state is None
    if loaded.blocks:
        spill.fill([8, 9], loaded, 0)
        assert [rank.bits(9) for rank in (leader, other)] == wanted


def test_nothing_is_stored_under_the_name_of_another_rank(tmp_path: Path) -> None:
    leader, other, _, _, _ = make("host", tmp_path)
    tiers: list[Any] = [leader.tiers[0], other.tiers[0]]
    assert len(tiers[0]._records) == len(tiers[1]._records) == 5
    assert not tiers[0]._records.keys() & tiers[1]._records.keys()
    again = RankTiers(Spill(other.tiers, other.kv, None, BoundaryStates(SIZE)), {"rank": "1", "x": ""}, print)
    assert again._node(NamedBlock(NAMES[0].key, 0, ())).key not in tiers[1]._records
    places = [place_of(rank, RankLayout(*sizes)) for sizes in ((2, 1), (1, 2), (2, 2)) for rank in range(2)]
    assert len(set(places)) == 6


def test_a_reading_ends_with_the_last_rank_or_with_a_lost_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, spill, tiers, follower = make("host", tmp_path)
    release = Event()
    tiers._spill._reader.submit(release.wait, 60)
    slow = spill.read(NAMES, None)
    assert not spill.read([], None).done() and not slow.done()
    release.set()
    assert len(slow.result(20).blocks) == 4
    tiers._spill._writer.submit((held := Event()).wait, 60)
    with monkeypatch.context() as patched:
        patched.setattr(spilling, "FLUSH_LIMIT_S", 0.05)
        spill.flush()  # does not wait for long
        num_asked = follower.num_told(TierCall.FLUSH)
        assert not all_have(spill), "nobody knows"
        assert follower.num_told(TierCall.FLUSH) == num_asked, "asked again before it has answered"
    held.set()
    assert spill._flushing is not None and spill._flushing.result(20) == [[]]
    assert all_have(spill)
    assert not follower.crew._awaited, "answered questions are kept"
    tiers._spill._reader.submit((held := Event()).wait, 60)
    lost = spill.read(NAMES, None)
    follower.crew.fail("rank 1 is lost")
    assert not lost.result(20).blocks and not spill.read(NAMES, None).result(20).blocks
    held.set()
    spill.drop(slow.result(0))
    with pytest.raises(RankLost):
        spill.flush()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_nothing_is_stored_when_a_rank_is_lost(is_noticed: bool, tmp_path: Path) -> None:
    """Nor is that an error: who ends a request after the loss frees what it has."""
    leader, _, spill, _, follower = make("host", tmp_path)
    leader.tiers[0]._records.clear()  # type: ignore[attr-defined]
    follower.is_lost = True
    if is_noticed:
        follower.crew.fail("rank 1 is lost")
    nodes = nodes_of(NAMES)
    assert spill.save(nodes) == 4
    spill.save_state(nodes[3])
    spill.touch(nodes)
    assert [node.saved for node in nodes] == [-1] * 4
    assert not spill.when_written(lambda: spill.has(NAMES[0].key)).result(20)


@pytest.mark.parametrize("why", ["closed", "full", "lost since"])
def test_what_another_rank_does_not_have_is_stored_again(why: str, tmp_path: Path) -> None:
    _, other, spill, _, follower = make("host", tmp_path)
    kept: Any = other.tiers[0]
    kept._records.clear()
    nodes = nodes_of(NAMES)
    if why == "lost since":
        for node in nodes:
            node.saved = 0
        spill.touch(nodes)
    else:
        kept.is_open, kept.max_bytes = why != "closed", 1
        spill.save(nodes)
        spill.save_state(nodes[3])
    assert not all_have(spill) and [node.saved for node in nodes] == [-1] * 4 and not nodes[3].has_saved_state
    kept.is_open, kept.max_bytes = True, 1 << 20
    spill.save(nodes)
    spill.save_state(nodes[3])
    assert all_have(spill) and [node.saved for node in nodes] == [0] * 4 and nodes[3].has_saved_state
    assert not follower.crew._awaited


def test_all_ranks_have_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follower, tier = OneFollower(), DiskTier(Path("kv"), 1 << 20, {})
    follower.crew._answers = {1: ("", "")}
    open_tier(follower.crew, 1, tier, b"")
    assert follower.told[-1].texts[0] == str(tmp_path / "kv")


def test_the_used_blocks_of_all_ranks_are_kept(tmp_path: Path) -> None:
    """The least recently used go first, on each rank."""
    _, other, spill, tiers, _ = make("host", tmp_path)
    host: Any = other.tiers[0]
    first = tiers._node(NamedBlock(NAMES[0].key, 0, ())).key
    assert next(iter(host._records)) == first
    spill.touch([Node(0, (), None, key=NAMES[0].key, depth=0)])
    spill.flush()
    assert list(host._records)[-1] == first


def test_calls_arrive_as_they_were_made() -> None:
    rng = random.Random(0)
    for number in range(100):
        blocks = [
            NamedBlock(rng.randbytes(32), rng.randrange(9), tuple(range(rng.randrange(5))), rng.randrange(-1, 9), True)
            for _ in range(rng.randrange(4))
        ]
        order = TierOrder(3, rng.choice(list(TierCall)), number, list(range(rng.randrange(4))), blocks)
        message = order.message()
        assert TierOrder.read(RankMessage.decode(message.kind, message.encode())) == order


def test_a_follower_says_what_its_part_depends_on_or_why_it_cannot_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, answers = tiny.write_llama(tmp_path, tiny.random_layers(2)), list[RankMessage]()
    loaded = load_model(checkpoint, tiny.kernels())
    exchange: Any = SimpleNamespace(rank=1, layout=RankLayout(2, 1))
    inbox: Any = SimpleNamespace(tell=answers.append)
    rank = RankFollower(loaded, tiny.kernels(), exchange, inbox)
    rank._do(RankMessage(Kind.OPEN, [1, 8, SIZE, 0, 0]))
    about = about_part(loaded.model, tiny.kernels(), loaded.folder, rank._engines[1].kv_cache)
    rank._do(TierOrder(1, TierCall.DESCRIBE).message())
    assert answers[-1].texts[0] == "" and all(
        text in answers[-1].texts[1] for text in (about["weights"], "1 of tensor")
    )
    opening = TierOrder(1, TierCall.OPEN, 0, [1 << 20]).message()
    rank._do(opening._replace(texts=[str(checkpoint / "config.json"), "00"]))
    assert answers[-1].texts[0].startswith("kv_disk: cannot write") and not rank._engines[1].tiers
    rank._do(opening._replace(texts=[str(tmp_path / "kv"), "00"]))
    assert answers[-1].texts == ["", ""] and len(rank._engines[1].tiers) == 1
    with monkeypatch.context() as patched:
        patched.setattr(follower, "stamps_of", lambda folder: ())
        rank._do(TierOrder(1, TierCall.DESCRIBE).message())
    assert "have changed since its weights were read" in answers[-1].texts[0]
    rank._do(RankMessage(Kind.CLOSE, [1]))


def test_answers_reach_who_asked_and_a_lost_rank_ends_the_waiting() -> None:
    exchange: Any = SimpleNamespace(layout=RankLayout(3, 1), abort=lambda: None)
    crew = Crew(exchange, {}, {0: "here"}, [], 1.0)
    number, answers = crew.ask(lambda number: RankMessage(Kind.TIERS, [number]))
    crew._arrived(1, RankMessage(Kind.ANSWER, [number, 4, 1]))
    crew._arrived(1, RankMessage(Kind.ANSWER, [number + 1, 4, 1]))  # to nothing
    assert not answers.done()
    crew._arrived(2, RankMessage(Kind.ANSWER, [number, 3, 1]))
    assert answers.result(0) == [[4, 1], [3, 1]] and not crew._awaited
    crew._arrived(1, RankMessage(Kind.ANSWER, [number, 4, 1]))  # too late
    lost = crew.ask(lambda number: RankMessage(Kind.TIERS, [number]))[1]
    crew.fail("rank 1 is lost")
    for each in (lost, crew.ask(lambda number: RankMessage(Kind.TIERS, [number]))[1]):
        with pytest.raises(RankLost, match="rank 1 is lost"):
            each.result(0)
    assert not crew._awaited


def test_recurrent_states_come_back_on_all_ranks(tmp_path: Path) -> None:
    (path := tmp_path / "model").mkdir()
    factory.make_checkpoint("lfm2", path)
    prompts = [[*PREFIX[:21]], [*PREFIX[:20], 7, 8, 9, 10, 11]]
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, temperature=1.0)

    def answers(llm: LLM) -> list[tuple[tuple[int, ...], int]]:
        outputs = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
        return [(output.token_ids, output.stats.num_cached_tokens) for output in outputs]

    expected = answers(open_llm(path))
    with closing(open_llm(path, tensor_parallel=2, rank_timeout_s=60, rank_start_s=600)) as llm:
        first = again(llm, tmp_path / "kv")
        assert answers(first) == expected
        lower_of(first).spill.flush()
        found = answers(again(llm, tmp_path / "kv"))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [cached for _, cached in found] == [20, 24]
