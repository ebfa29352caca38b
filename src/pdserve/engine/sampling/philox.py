"""Counter-based random numbers: Philox 4x32-10, vectorised. Equal keys and counters give equal numbers anywhere.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). No state, so a token sampled
by any worker, in any batch, after any retry is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_NUM_ROUNDS = 10

Words = NDArray[np.uint64]
"""32-bit words in 64-bit lanes."""


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random 32-bit words for each counter (four words) and key (two words)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bit products fit into 64
        c0, c1, c2, c3 = (right >> _SHIFT) ^ c1 ^ k0, right & _LOW, (left >> _SHIFT) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], choices: list[int], indices: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1), of 53 random bits, for each (64-bit seed of any sign, choice, output index)."""
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    choice = np.array(choices, dtype=np.uint64)
    counter = (index & _LOW, index >> _SHIFT, choice & _LOW, np.zeros_like(index))
    high, low, _, _ = philox(counter, (seed & _LOW, seed >> _SHIFT))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) / 2.0**53
