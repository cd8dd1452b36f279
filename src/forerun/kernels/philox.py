"""Philox-4x32-10 and what forerun makes of its words: uniforms and Gumbel noise, in numpy.

Knows: the counter-based generator and the exact definition of the noise. Does not know: who draws, or why; purposes
and streams are `forerun.speculation.noise`'s. No state: the same key gives the same numbers for ever.

Definition (every backend implements exactly this):
  key     = (low 32 bits of seed, high 32 bits of seed)
  counter = (index // 4, low 32 bits of position, high 32 bits of position, stream)   word = index % 4
  r       = that word of Philox-4x32-10(counter, key)                     uniform in 0 .. 2^32 - 1
  v       = (r + 0.5) * 2^-32                                             uniform in (0, 1)
  E       = -log1p(-v)                                                    Exp(1); small E where v is small
  G       = -log(E)                                                       Gumbel(0, 1), at most 22.9
all in float64. `index` is the token id for vocabulary noise.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox); Gumbel-max trick.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_NUM_ROUNDS = 10

_Words = TypeVar("_Words", int, npt.NDArray[Any])


def philox(counters: npt.NDArray[np.uint32], seed: int) -> npt.NDArray[np.uint32]:
    """Philox-4x32-10 of counters [n, 4] under the 64-bit key `seed` -> [n, 4] uint32."""
    c0, c1, c2, c3 = (counters[:, i].astype(np.uint64) for i in range(4))
    return np.stack(_rounds(c0, c1, c2, c3, seed), axis=1).astype(np.uint32)


def _rounds(c0: _Words, c1: _Words, c2: _Words, c3: _Words, seed: int) -> tuple[_Words, _Words, _Words, _Words]:
    """Of counters in columns, or of one counter in Python's integers: numpy takes as long for one as for a hundred."""
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def random_words(seed: int, position: int, stream: int, num_words: int) -> npt.NDArray[np.uint32]:
    """Words 0 .. num_words-1 of (seed, position, stream) -> [num_words] uint32."""
    num_blocks = (num_words + 3) // 4
    counters = np.empty((num_blocks, 4), dtype=np.uint32)
    counters[:, 0] = np.arange(num_blocks, dtype=np.uint32)
    counters[:, 1] = position & _MASK32
    counters[:, 2] = (position >> 32) & _MASK32
    counters[:, 3] = stream & _MASK32
    return philox(counters, seed).reshape(-1)[:num_words]


def uniforms(seed: int, position: int, stream: int, num: int) -> npt.NDArray[np.float64]:
    """`num` uniforms in (0, 1) -> [num] float64."""
    words = random_words(seed, position, stream, num).astype(np.float64)
    return (words + 0.5) * 2.0**-32


def uniform(seed: int, position: int, stream: int, index: int = 0) -> float:
    """The single number `index` of `uniforms`."""
    words = _rounds(index // 4, position & _MASK32, (position >> 32) & _MASK32, stream & _MASK32, seed)
    return (words[index % 4] + 0.5) * 2.0**-32


def gumbel(seed: int, position: int, stream: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """The Gumbel vector of a position -> [vocab_size] float64."""
    exponentials = -np.log1p(-uniforms(seed, position, stream, vocab_size))
    return -np.log(exponentials)
