"""How ranks agree on what was read: a leader's and a follower's pool in one process; and with recurrent states."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
from forerun.cache.prefix_cache import Node
from forerun.cache.spill import Loaded, RecordName, Spill, state_key
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
from forerun.runtime.parallel.messages import Kind, NamedBlock, RankMessage, TierCall, TierOrder
from forerun.runtime.parallel.spilling import AgreedReading, RankedSpill, RankTiers, place_of
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
    """What the leader's tiers need of a crew: the other rank is told at once, through bytes."""

    def __init__(self, size: int = 2) -> None:
        self.exchange = SimpleNamespace(layout=RankLayout(size, 1))
        self.tiers: RankTiers | None = None
        self.asked: dict[int, Callable[[Sequence[int] | None], None]] = {}
        self.is_lost = False

    def ask(self, answered: Callable[[Sequence[int] | None], None]) -> int:
        self.asked[len(self.asked) + 1] = answered
        return len(self.asked)

    def forget_question(self, number: int) -> None:
        assert number in self.asked

    def tell(self, message: RankMessage) -> None:
        if self.is_lost:
            raise RankLost("rank 1")
        assert self.tiers is not None
        self.tiers.do(TierOrder.read(RankMessage.decode(message.kind, message.encode())))

    def answer(self, numbers: Sequence[int]) -> None:
        self.asked[numbers[0]](numbers[1:])


def make(kind: str, tmp_path: Path) -> tuple[Rank, Rank, RankedSpill, RankTiers, OneFollower]:
    def tier(name: str) -> Tier:
        return HostTier(1 << 20, pinned=False) if kind == "host" else DiskTier(tmp_path, 1 << 20, {"rank": name})

    crew: Any = OneFollower()
    leader, other = Rank(0, [tier("0")]), Rank(1, [tier("1")])
    own = Spill(other.tiers, other.kv, other.states, BoundaryStates(SIZE))
    crew.tiers = RankTiers(own, {"rank": "1"}, crew.answer)
    spill = RankedSpill(leader.tiers, leader.kv, leader.states, BoundaryStates(SIZE), crew, 1)
    nodes = [Node(index, name.tokens, None, key=name.key, depth=name.depth) for index, name in enumerate(NAMES)]
    assert spill.save(nodes) == 4
    spill.save_state(nodes[3])
    spill.flush()
    return leader, other, spill, crew.tiers, crew


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
    assert not spill.has_all(NAMES, with_state=True)
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
    _, _, spill, tiers, crew = make("host", tmp_path)
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
        assert not spill.has_all(NAMES, with_state=True), "nobody knows"
    held.set()
    assert spill.has_all(NAMES, with_state=True)
    lost = AgreedReading(3)
    lost.answered([4, 1])
    lost.answered(None)
    assert not lost.loaded.result(0).blocks
    lost.answered([4, 1])  # too late
    crew.is_lost = True
    with pytest.raises(RankLost):
        spill.drop(slow.result(0))


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
    exchange: Any = SimpleNamespace(layout=RankLayout(2, 1), abort=lambda: None)
    crew, heard = Crew(exchange, {}, {0: "here"}, [], 1.0), list[Sequence[int] | None]()
    number = crew.ask(heard.append)
    for asked in (number, number + 1):
        crew._arrived(1, RankMessage(Kind.ANSWER, [asked, 4, 1]))
    crew.forget_question(number)
    crew._arrived(1, RankMessage(Kind.ANSWER, [number, 4, 1]))
    assert [list(each or ()) for each in heard] == [[4, 1]]
    crew.ask(heard.append)
    crew.fail("rank 1 is lost")
    assert heard[1:] == [None]


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
