"""Kernels that sum up, with the arguments of a whole layer, then with those of ranks that have parts of it."""

from __future__ import annotations

from typing import Any

from tests.kernels.triton import attention_list, products_list, recurrent_list

Entry = tuple[Any, dict[str, Any], dict[str, Any]]


def kernels() -> list[Entry]:
    """See `ahead_of_time`."""
    return [entry for group in groups() for entry in group]


def groups() -> list[list[Entry]]:
    """Of every layer the whole, then parts."""
    return [*products(), *attentions(), *recurrent()]


def products() -> list[list[Entry]]:
    import triton.language as tl

    plain = products_list.dense(17, tl.bfloat16, "*bf16", listed=False)
    return [[plain, *(_with(plain, {"NUM_OUTPUTS": width, "OUT_ROW": width}) for width in (1024, 9))]]


def attentions() -> list[list[Entry]]:
    plain, _, latent, combine, with_sinks = attention_list.attentions()
    dim = plain[1]["DIM"]
    rope = attention_list.rotations()[0]  # with norms of heads
    one_head = {"NUM_Q": 4, "NUM_KV": 1, "ROW_SIZE": 6 * dim}
    half_a_head = {"NUM_Q": 2, "NUM_KV": 1, "ROW_SIZE": 4 * dim, "HEADS": 2, "ROWS": 8}  # another rank has it, too
    return [
        [rope, *(_with(rope, {"NUM_Q": 2 * n, "NUM_KV": n}) for n in (3, 1))],
        [plain, _with(plain, one_head), _with(plain, half_a_head)],
        [latent, _with(latent, {"NUM_HEADS": 8, "HEADS": 8, "ROWS": 2})],
        *([entry, *(_with(entry, {"NUM_HEADS": n}) for n in (6, 1))] for entry in (combine, with_sinks)),
    ]


def recurrent() -> list[list[Entry]]:
    delta, per_channel, wide, nemotron = recurrent_list.states()
    gates, gates_of_channels, _ = recurrent_list.gates()
    found = [[delta, *(_with(delta, _delta(n)) for n in (8, 2, 1))], [per_channel]]
    found[1] += [_with(per_channel, _delta(n, channels=128)) for n in (8, 1)]
    found.append([wide, *(_with(wide, _mamba(1, n, 256, 64)) for n in (12, 3, 1))])
    found.append([nemotron, *(_with(nemotron, _mamba(max(1, n // 16), n, 128, 80)) for n in (64, 8, 1))])
    for entry, channels in ((gates, 1), (gates_of_channels, 128)):
        parts = [{"NUM_VECTORS": 2 * n, "ROW_SIZE": 512 * n, **_delta(n, channels)} for n in (8, 1)]
        found.append([entry, *(_with(entry, {k: v for k, v in own.items() if k != "VECTORS"}) for own in parts)])
    return found


def _delta(num_keys: int, channels: int = 1) -> dict[str, int]:
    """So many of 16 heads of keys, each with two of values."""
    num_values = 2 * num_keys
    return {
        "NUM_KEYS": num_keys,
        "NUM_VALUES": num_values,
        "VECTORS": 2 * num_keys * 128,
        "NUM_DECAYS": num_values * channels,
    }


def _mamba(num_keys: int, num_values: int, key_dim: int, value_dim: int) -> dict[str, int]:
    width = 2 * num_keys * key_dim + num_values * value_dim
    return {"NUM_KEYS": num_keys, "NUM_VALUES": num_values, "VECTORS": width, "NUM_DECAYS": num_values}


def _with(entry: Entry, own: dict[str, Any]) -> Entry:
    kernel, arguments, options = entry
    return kernel, {**arguments, **own}, options
