"""Every block type against gguf's reference: decoding bit by bit, encoding by bytes or by error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun.errors import CheckpointError, ConfigError
from forerun.quant.gguf_decode import BLOCK_TYPES, decode_rows, join_matrices
from forerun.quant.gguf_encode import choose_type, encode_rows
from forerun.quant.gguf_grids import GRID_TYPES
from forerun.quant.grouped import GroupedWeight
from forerun.weights.gguf_types import TENSOR_TYPES, TYPE_CODES
from tests.kernels.cases import BYTE_ISAS, cpu_kernels

gguf = pytest.importorskip("gguf")
ROWS, COLUMNS = 6, 512
HALVES: dict[str, tuple[int, ...]] = {  # where blocks hold float16 numbers, if not only at their start
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (48,),
    "MXFP4": (),
    "NVFP4": (),
}
WRITABLE = ("Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K")


def reference(name: str, rows: Tensor) -> Tensor:
    if name in ("Q1_0", "Q2_0"):  # which gguf.quants does not read
        return torch.stack([torch.cat([multiples(name, block) for block in row.split(18)]) for row in rows])
    found = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(np.ascontiguousarray(found))


def multiples(name: str, block: Tensor) -> Tensor:
    """A block of 18 bytes: a float16, then which multiple of it each entry is, the lowest bits of a byte first."""
    width, values = {"Q1_0": (1, (-1, 1)), "Q2_0": (2, (-1, 0, 1, 2))}[name]
    number = int.from_bytes(bytes(block[2:].tolist()), "little")
    codes = [number >> place & (1 << width) - 1 for place in range(0, 128, width)]
    return torch.tensor([values[code] for code in codes]).float() * block[:2].view(torch.float16).float()


def put_half(name: str, blocks: Tensor, at: int, scales: Tensor) -> None:
    """Write scales [b, 1] float16 into blocks [b, nbytes] uint8."""
    if name != "IQ1_M":
        blocks[:, at : at + 2] = scales.view(torch.uint8)
        return
    words = scales.view(torch.uint8)  # four bits in the upper half of every second byte, the lowest first
    for quarter in range(4):
        nibble = words[:, quarter // 2] >> quarter % 2 * 4 & 15
        blocks[:, 49 + 2 * quarter] = blocks[:, 49 + 2 * quarter] & 15 | nibble << 4


def valid_blocks(name: str, seed: int = 0, shape: tuple[int, int] = (ROWS, COLUMNS), size: float = 1) -> Tensor:
    """Random bytes, but for the float16 scales, which are finite and about as large as `size`."""
    kind = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(seed)
    num_blocks = shape[0] * shape[1] // kind.size
    blocks = torch.randint(0, 256, (num_blocks, kind.nbytes), dtype=torch.uint8, generator=generator)
    for at in HALVES.get(name, (0,)):
        put_half(name, blocks, at, torch.randn(len(blocks), 1, generator=generator).half() * size)
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 28 + 104  # exponents that float16 has too
    return blocks.reshape(shape[0], -1)


def matrix(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x[0, :256] = 0  # a block of nothing
    x[1, 64:96] = 0.25  # a group without a spread
    x[2] *= 1e-4
    x[3, 7] = 30.0
    return x


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def test_sizes_are_those_of_the_container() -> None:
    for name, kind in BLOCK_TYPES.items():
        assert (kind.size, kind.nbytes) == TENSOR_TYPES[TYPE_CODES[name]][1:]
    assert TYPE_CODES.keys() == {"F32", "F16", "BF16", *BLOCK_TYPES}
    for code, layout in TENSOR_TYPES.items():
        if layout.name == "Q2_0":  # newer than the package
            continue
        known = gguf.GGMLQuantizationType(code)
        assert known.name == layout.name and gguf.GGML_QUANT_SIZES[known] == (layout.size, layout.nbytes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_decode_to_the_bits_of_the_reference(name: str, seed: int) -> None:
    rows = valid_blocks(name, seed)
    decoded = decode_rows(name, rows)
    assert decoded.shape == (ROWS, COLUMNS) and int(decoded.codes.max()) < 1 << decoded.bits
    assert torch.equal(bits(decoded.dequantize()), bits(reference(name, rows)))


@pytest.mark.parametrize("name", GRID_TYPES)
def test_fractions_of_tiny_scales_are_not_rounded(name: str) -> None:
    rows = valid_blocks(name, size=1e-5)
    assert torch.equal(bits(decode_rows(name, rows).dequantize()), bits(reference(name, rows)))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0", "MXFP4"])
def test_blocks_of_the_reference_quantizer_decode_to_its_bits(name: str) -> None:
    rows = torch.from_numpy(gguf.quants.quantize(matrix().numpy(), gguf.GGMLQuantizationType[name]))
    decoded = decode_rows(name, rows).dequantize()
    assert torch.equal(decoded, reference(name, rows))
    assert (decoded - matrix()).abs().mean() < (0.6 if name[0] == "T" else 0.2)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0"])
def test_simple_encoders_write_the_bytes_of_the_reference(name: str) -> None:
    theirs = torch.from_numpy(gguf.quants.quantize(matrix().numpy(), gguf.GGMLQuantizationType[name]))
    assert torch.equal(encode_rows(name, matrix()), theirs)


# relative error of a normal matrix: what the formats are known for (uniform rounding of b bits over a group's range)
LIMITS = {"Q8_0": 0.006, "Q6_K": 0.02, "Q5_0": 0.05, "Q4_K": 0.075, "Q4_0": 0.095}


@pytest.mark.parametrize("name", WRITABLE)
def test_encoders_keep_to_the_error_of_their_bits(name: str) -> None:
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(3))
    found = reference(name, encode_rows(name, x))
    assert float((found - x).norm() / x.norm()) < LIMITS[name]


@pytest.mark.parametrize("name", WRITABLE)
def test_encoders_survive_zeros_outliers_and_constant_groups(name: str) -> None:
    rows = encode_rows(name, matrix())
    found = decode_rows(name, rows).dequantize()
    assert torch.equal(found, reference(name, rows)) and found.isfinite().all()
    assert torch.equal(found[0, :256], torch.zeros(256))
    group = matrix()[:, 256:].abs().amax(dim=1)
    assert ((found[:, 256:] - matrix()[:, 256:]).abs().amax(dim=1) <= group * 0.15).all()


def test_searched_scales_beat_the_plain_ones() -> None:
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(5))

    def error(name: str) -> float:
        return float((decode_rows(name, encode_rows(name, x)).dequantize() - x).square().mean())

    low, high = x.reshape(-1, 32).amin(1, True).clamp(max=0), x.reshape(-1, 32).amax(1, True)
    step = (high - low) / 15
    plain = ((x.reshape(-1, 32) - low) / step).round() * step + low
    assert error("Q4_K") < float((plain - x.reshape(-1, 32)).square().mean()) and error("Q6_K") < error("Q5_0") / 3


@pytest.mark.parametrize(
    "pair",
    [
        ("Q4_K", "Q6_K"),
        ("Q5_0", "Q4_1"),
        ("Q8_0", "Q2_K"),
        ("IQ4_XS", "Q3_K", "Q5_1"),
        ("IQ2_XS", "IQ2_XS"),
        ("IQ1_S", "IQ1_S", "IQ3_S"),
    ],
)
def test_joining_different_types_keeps_every_value(pair: tuple[str, ...]) -> None:
    rows = [valid_blocks(name, index) for index, name in enumerate(pair)]
    joined = join_matrices([decode_rows(name, part) for name, part in zip(pair, rows, strict=True)])
    expected = torch.cat([reference(name, part) for name, part in zip(pair, rows, strict=True)])
    assert joined.shape == (len(pair) * ROWS, COLUMNS) and int(joined.codes.max()) < 1 << joined.bits <= 256
    assert torch.equal(joined.dequantize(), expected)


def test_types_that_count_units_for_as_many_inputs_are_joined_with_their_units() -> None:
    joined = join_matrices([decode_rows(name, valid_blocks(name)) for name in ("Q4_K", "Q6_K")])
    assert joined.units is not None and joined.groups_a_unit * joined.group_size == 256
    assert join_matrices([decode_rows("IQ4_NL", valid_blocks("IQ4_NL", seed)) for seed in (0, 1)]).table is not None
    assert join_matrices([decode_rows(name, valid_blocks(name)) for name in ("IQ4_XS", "Q8_0")]).table is None
    same = join_matrices([decode_rows("IQ2_XS", valid_blocks("IQ2_XS", seed)) for seed in (0, 1)])
    assert same.grid is not None and same.rows(torch.tensor([9])).points is not None
    assert join_matrices([decode_rows(name, valid_blocks(name)) for name in ("IQ2_XS", "IQ2_S")]).grid is None


def test_every_exponent_of_mxfp4_decodes_to_the_bits_of_the_reference() -> None:
    rows = torch.arange(17).byte().repeat(256, 1) * 13  # [256, 17]
    rows[:, 0] = torch.arange(256)
    with np.errstate(over="ignore"):
        assert torch.equal(bits(decode_rows("MXFP4", rows).dequantize()), bits(reference("MXFP4", rows)))


@pytest.mark.parametrize("isa", BYTE_ISAS)
@pytest.mark.parametrize(("name", "step", "scales"), [("MXFP4", 256, 1), ("NVFP4", 128, 4)])
def test_every_scale_of_a_byte_multiplies_as_in_float32(name: str, step: int, scales: int, isa: str) -> None:
    kernels, kind = cpu_kernels(isa), BLOCK_TYPES[name]
    rows = torch.randint(0, 256, (step, kind.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    rows[:, :scales] = torch.arange(step)[:, None]
    matrix = decode_rows(name, rows)
    packed = kernels.pack_grouped(matrix)
    assert torch.equal(bits(kernels.embedding(torch.arange(step), packed)), bits(matrix.dequantize()))
    wide = replace(matrix, offsets=torch.zeros_like(matrix.scales))  # with offsets scales are float32 or float16
    for num_rows in (1, 4, 9):
        x = torch.randn(num_rows, kind.size)
        found, expected = (kernels.linear(x, own, None) for own in (packed, kernels.pack_grouped(wide)))
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("isa", BYTE_ISAS)
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_products_have_the_bits_of_plain_integers_and_scales(name: str, isa: str) -> None:
    kernels, matrix = cpu_kernels(isa), decode_rows(name, valid_blocks(name, shape=(37, 768)))
    packed, plain = kernels.pack_grouped(matrix), kernels.pack_grouped(matrix.plain())
    assert packed.nbytes < plain.nbytes or name[0] == "Q" or name == "TQ2_0"
    for num_rows in (1, 5, 33):
        x = torch.randn(num_rows, 768, generator=torch.Generator().manual_seed(num_rows))
        assert torch.equal(kernels.linear(x, packed, None), kernels.linear(x, plain, None))
    assert torch.equal(bits(kernels.embedding(torch.arange(37), packed)), bits(matrix.dequantize()))


def test_a_table_of_which_few_values_occur_is_packed_and_multiplied_with() -> None:
    rows = valid_blocks("IQ4_NL", shape=(16, 64))
    rows.view(-1, 18)[:, 2:] &= 0x33  # codes below 4
    matrix = decode_rows("IQ4_NL", rows)
    found = GroupedWeight(cpu_kernels(), matrix).dequantize()
    assert torch.allclose(found, reference("IQ4_NL", rows), rtol=1e-6)


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES.keys() - {"MXFP4", "NVFP4"}))  # whose bytes are all finite scales
def test_scales_that_are_not_finite_are_refused(name: str) -> None:
    rows = valid_blocks(name)
    last = rows[ROWS - 1 :, -BLOCK_TYPES[name].nbytes :]
    put_half(name, last, HALVES.get(name, (0,))[0], torch.tensor([[torch.inf]]).half())
    with pytest.raises(CheckpointError, match=f"its {name} blocks have scales that are not finite"):
        decode_rows(name, rows)


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot write tensors of type Q3_K"):
        encode_rows("Q3_K", torch.zeros(1, 256))
    with pytest.raises(ConfigError, match="multiple of 256, not 96"):
        encode_rows("Q4_K", torch.zeros(1, 96))
    with pytest.raises(ConfigError, match="no mix of types 'Q9'"):
        choose_type("Q9", "output.weight", 256, 0, 1, False)


@pytest.mark.parametrize(
    ("mix", "name", "columns", "layer", "tied", "expected"),
    [
        ("Q4_K_M", "blk.0.attn_q.weight", 512, 0, False, "Q4_K"),
        ("Q4_K_M", "blk.0.attn_v.weight", 512, 0, False, "Q6_K"),
        ("Q4_K_M", "blk.4.ffn_down.weight", 512, 4, False, "Q4_K"),
        ("Q4_K_M", "blk.5.ffn_down.weight", 512, 5, False, "Q6_K"),
        ("Q4_K_S", "blk.0.attn_v.weight", 512, 0, False, "Q4_K"),
        ("Q4_K_M", "output.weight", 512, -1, False, "Q6_K"),
        ("Q4_K_M", "token_embd.weight", 512, -1, False, "Q4_K"),
        ("Q4_0", "token_embd.weight", 512, -1, True, "Q6_K"),
        ("Q4_K_M", "blk.0.attn_q.weight", 96, 0, False, "Q5_0"),
        ("Q4_K_M", "blk.0.attn_v.weight", 96, 0, False, "Q8_0"),
        ("Q8_0", "output.weight", 96, -1, False, "Q8_0"),
        ("Q8_0", "output.weight", 100, -1, False, "F16"),
        ("F16", "output.weight", 100, -1, False, "F16"),
    ],
)
def test_mixes(mix: str, name: str, columns: int, layer: int, tied: bool, expected: str) -> None:
    assert choose_type(mix, name, columns, layer, 24, tied) == expected
