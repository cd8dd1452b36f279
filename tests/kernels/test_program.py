"""The recorded program: a replay gives the bits of the eager ops, for every number of rows, and frees Python of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tests.kernels.cases import KV_DTYPES, cpu_kernels, pool_of, tensors_of
from torch import Tensor

from forerun.errors import KernelError
from forerun.kernels.ops import HeadLayout, Kernels, LayerKV, NoiseKeys, PackedLinear
from forerun.kernels.select import recording, select_kernels
from forerun.models.batch import ForwardBatch, SequenceRows

HEADS = HeadLayout(4, 2, 16, 16)
HIDDEN, FEED_FORWARD, VOCAB, LAYERS = 48, 80, 100, 3
TEMPERATURES, NOISE = torch.zeros(8, dtype=torch.float64), NoiseKeys(*torch.zeros(3, 8, dtype=torch.int64))

program_module = pytest.importorskip("forerun.kernels.cpu.program")


@dataclass
class Toy:
    """A decoder in miniature: every op of a forward pass, in functional style."""

    kernels: Kernels
    matrices: list[list[PackedLinear]]
    norm: Tensor
    table: Tensor
    rope: Tensor
    head: PackedLinear

    @staticmethod
    def make(kernels: Kernels) -> Toy:
        generator = torch.Generator().manual_seed(0)
        q_size = HEADS.num_q * HEADS.head_dim
        shapes = ((HEADS.row_size, HIDDEN), (HIDDEN, q_size), (2 * FEED_FORWARD, HIDDEN), (HIDDEN, FEED_FORWARD))
        matrices = [
            [kernels.pack_linear(torch.randn(shape, generator=generator).bfloat16() * 0.2) for shape in shapes]
            for _ in range(LAYERS)
        ]
        return Toy(
            kernels,
            matrices,
            torch.rand(HIDDEN, generator=generator) + 0.5,
            torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
            torch.randn(1000, HEADS.rotary_dim, generator=generator),
            kernels.pack_linear(torch.randn(VOCAB, HIDDEN, generator=generator)),
        )

    def forward(self, inputs: ForwardBatch | program_module.Inputs, kvs: list[LayerKV]) -> list[Tensor]:
        """Logits at the logit rows, the middle residual stream."""
        k = self.kernels
        residual = k.embedding(inputs.token_ids, self.table)
        x = k.rms_norm(residual, self.norm, 1e-6)
        middle = residual.clone()
        for (qkv, out, gate_up, down), kv in zip(self.matrices, kvs, strict=True):
            fused = k.linear(x, qkv)
            k.rope_and_cache(fused, HEADS, self.rope, inputs.positions, inputs.slots, kv, eps=1e-6)
            x = k.linear(k.attention(fused, HEADS, kv, inputs.rows, 0.25), out)
            x = k.add_rms_norm(x, residual, self.norm, 1e-6)
            x = k.linear(k.gated_act(k.linear(x, gate_up), "silu"), down)
            x = k.add_rms_norm(x, residual, self.norm, 1e-6)
            if kv is kvs[1]:
                middle = residual.clone()
        return [k.linear(x.index_select(0, inputs.logit_rows), self.head), middle]


def _kvs(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    shape = (100, HEADS.num_kv, HEADS.head_dim, 16)
    return [
        pool_of(torch.randn(shape, generator=generator), torch.randn(100, 2, 16, 16, generator=generator), dtype)
        for _ in range(LAYERS)
    ]


def _batch(
    prefixes: list[int], num_nodes: int, span: int = 0, span_logits: bool = False, shift: int = 0
) -> ForwardBatch:
    """Random trees behind prefixes of these lengths, of which the last `span` tokens are computed, too."""
    dice, free = random.Random(len(prefixes) + num_nodes), list(range(100))
    dice.shuffle(free)
    sequences = []
    for prefix in prefixes:
        table = [free.pop() for _ in range(-(-(prefix + num_nodes) // 16))]
        masks, depths = [1], [0]
        for node in range(1, num_nodes):
            parent = dice.randrange(node)
            masks.append(masks[parent] | 1 << node)
            depths.append(depths[parent] + 1)
        tokens = [dice.randrange(VOCAB) for _ in range(span + num_nodes)]
        tree = (tokens[span:], range(num_nodes), masks[:num_nodes], depths[:num_nodes])
        sequences.append(SequenceRows("", table, prefix - span, tokens[:span], prefix, *tree, span_logits))
    return ForwardBatch.build(sequences, 16, shift)


def _record(toy: Toy, kvs: list[LayerKV], max_rows: int) -> program_module.Program:
    with recording(toy.kernels, max_rows) as recorder:
        assert recorder is not None
        return recorder.finish(toy.forward(recorder.inputs, kvs))


@pytest.fixture(scope="module")
def toy() -> Toy:
    cpu_kernels()
    return Toy.make(select_kernels("cpu", threads=2))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_replay_has_the_bits_of_the_eager_ops(toy: Toy, dtype: torch.dtype) -> None:
    recorded, eager = _kvs(dtype=dtype), _kvs(dtype=dtype)
    program = _record(toy, recorded, 64)
    assert program.num_steps == 3 + LAYERS * 9 + 1 + 2
    batches = [
        _batch([5], 1),
        _batch([40], 8),
        _batch([3, 300, 17], 6),
        _batch([9] * 8, 8),
        _batch([30], 6, 2),
        _batch([20, 40], 5, 7, span_logits=True),
        _batch([3], 50, 1, shift=-1),
        _batch([2, 60], 3, 2, shift=-3),
    ]
    for batch in [*batches, *reversed(batches), _batch([30], 0, 5)]:
        results = zip(program.run(batch), toy.forward(batch, eager), strict=True)
        assert all(torch.equal(replayed, expected) for replayed, expected in results)
        for one, other in zip(recorded, eager, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_outputs_are_fresh(toy: Toy) -> None:
    kvs = _kvs()
    program = _record(toy, kvs, 32)
    first = program.run(_batch([5], 4))
    kept = [tensor.clone() for tensor in first]
    program.run(_batch([50], 9))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(first, kept, strict=True))


def test_an_activation_gets_the_memory_of_one_that_is_no_longer_read(toy: Toy) -> None:
    with recording(toy.kernels, 8) as recorder:
        assert recorder is not None
        first, second = recorder.buffer(8, 48), recorder.buffer(8, 48)
        addresses = [first.data_ptr(), second.data_ptr()]
        del first
        third = recorder.buffer(8, 32)
        assert addresses[0] != addresses[1] and third.data_ptr() == addresses[0]


def test_the_ops_are_the_eager_ones_again_afterwards(toy: Toy) -> None:
    x = torch.randn(3, HIDDEN)
    expected = toy.kernels.rms_norm(x, toy.norm, 1e-6)
    with pytest.raises(KernelError), recording(toy.kernels, 8) as recorder:
        assert recorder is not None
        toy.kernels.embedding(recorder.inputs.token_ids, toy.table).add_(1)
    assert torch.equal(toy.kernels.rms_norm(x, toy.norm, 1e-6), expected)


def test_columns_sums_and_scattered_columns_are_those_of_torch(toy: Toy) -> None:
    """What heads do beside kernel ops, on features that come from outside, with two rows of logits a row."""
    places = torch.tensor([7, 0, 3, 5])

    def forward(x: Tensor) -> list[Tensor]:
        first, second, third = (part.contiguous() for part in x.chunk(3, dim=1))  # [M, 4] each
        joined = torch.cat([third, first + second, torch.ones_like(first)], dim=1)  # [M, 12]
        kept = first.clone()
        first.add_(third)
        wide = torch.stack([first, kept], dim=1).flatten(0, 1)  # [2 M, 4]
        return [wide.new_full((wide.shape[0], 9), -torch.inf).index_copy_(1, places, wide), joined]

    with recording(toy.kernels, 8, feature_size=12, logits_a_row=2) as recorder:
        assert recorder is not None
        program = recorder.finish(forward(recorder.inputs.features))
    for num_rows in (1, 3, 8):
        x = torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(num_rows))
        assert all(map(torch.equal, program.run_on(x, 2 * num_rows), forward(x.clone())))
    with pytest.raises(KernelError, match="12 columns"):
        program.run_on(torch.zeros(2, 11), 4)
    with pytest.raises(KernelError, match="at most 8"):
        program.run_on(torch.zeros(9, 12), 18)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda x, k: torch.softmax(x, 0),
        lambda x, k: x + 1,
        lambda x, k: torch.cat([x, x]),
        lambda x, k: x.flatten(),
        lambda x, k: x.add_(x[:1]),
        lambda x, k: x.new_full((3,), 0.0),
        lambda x, k: x[0],
        lambda x, k: x.sum().item(),
        lambda x, k: k.pack_linear(x),
        lambda x, k: k.pack_linear(torch.ones(2, 2)),
        lambda x, k: k.gumbel_argmax(x, TEMPERATURES, NOISE),
        lambda x, k: k.gumbel_chances(x, TEMPERATURES, NOISE, 2),
        lambda x, k: k.move_rows(_kvs()[:1], *torch.zeros(2, 1, dtype=torch.int32)),
    ],
)
def test_what_cannot_be_replayed_is_refused(toy: Toy, misuse: Callable[[Tensor, Kernels], object]) -> None:
    with recording(toy.kernels, 8) as recorder:
        assert recorder is not None
        activation = toy.kernels.embedding(recorder.inputs.token_ids, toy.table)
        with pytest.raises(KernelError):
            misuse(activation, toy.kernels)
        with pytest.raises(KernelError):
            recorder.finish([activation, torch.zeros(8, 4)])


def test_nothing_may_be_computed_from_a_placeholder_and_weights_are_kept(toy: Toy) -> None:
    with recording(toy.kernels, 8) as recorder:
        assert recorder is not None
        with pytest.raises(KernelError):
            recorder.inputs.positions + 1
        activation = toy.kernels.embedding(recorder.inputs.token_ids, toy.table)
        out = toy.kernels.rms_norm(activation, toy.norm * 2, 1e-6)  # a weight nobody else holds
        program = recorder.finish([out])
    batch = _batch([5], 3)
    expected = toy.kernels.rms_norm(toy.kernels.embedding(batch.token_ids, toy.table), toy.norm * 2, 1e-6)
    assert torch.equal(program.run(batch)[0], expected)


def test_bad_batches_are_refused(toy: Toy) -> None:
    program = _record(toy, _kvs(), 8)
    with pytest.raises(KernelError, match="at most 8"):
        program.run(_batch([5], 9))
    strange = SequenceRows("", [0], 0, (VOCAB,), 1)
    with pytest.raises(IndexError):
        program.run(ForwardBatch.build([strange], 16))
    with pytest.raises(IndexError):  # its block table is too short
        program.run(ForwardBatch.build([strange._replace(span=(0,), start=16)], 16))
    with pytest.raises(TypeError):
        program.run(ForwardBatch.build([strange._replace(span=("a",))], 16))


def test_the_reference_does_not_record() -> None:
    with recording(select_kernels("reference"), 8) as recorder:
        assert recorder is None
