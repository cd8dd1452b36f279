"""Keyed noise: published Philox vectors, independence of keys, the Gumbel law."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.speculation.noise import Purpose, gumbel, philox, step_position, stream_id, uniform, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0xA4093822 | 0x299F31D0 << 32,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words) -> None:  # type: ignore[no-untyped-def]
    """From the reference implementation's kat_vectors (Random123)."""
    assert tuple(philox(np.array([counter], dtype=np.uint32), key)[0]) == words


def test_a_number_does_not_depend_on_how_many_are_drawn() -> None:
    for seed, position, stream in ((7, 3, 1), (2**64 - 1, step_position(5, 2**31), stream_id(200, Purpose.RECOVER))):
        assert [uniform(seed, position, stream, index) for index in range(40)] == uniforms(
            seed, position, stream, 200
        ).tolist()[:40]


def test_keys_do_not_collide() -> None:
    seen = {
        uniform(seed, position, stream_id(sample, purpose))
        for seed in (0, 1, 2**63)
        for position in (0, 1, 2**32 - 1, step_position(0, 0), step_position(1, 0), step_position(0, 1))
        for sample in (0, 1, 200)
        for purpose in Purpose
    }
    assert len(seen) == 3 * 6 * 3 * len(Purpose)


def test_gumbel_law() -> None:
    draws = gumbel(1, 5, 0, 200_000)
    assert draws.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert draws.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert np.isfinite(draws).all() and draws.max() < 23.0


def test_argmax_follows_softmax() -> None:
    """The Gumbel-max trick on the keyed noise, by chi-square."""
    logits = np.array([1.0, 0.0, -1.0, 2.0])
    law = np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount([int(np.argmax(logits + gumbel(seed, 9, 0, 4))) for seed in range(4000)], minlength=4)
    assert (((counts - 4000 * law) ** 2) / (4000 * law)).sum() < 25
