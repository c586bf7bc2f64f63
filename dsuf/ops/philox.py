"""Philox4x32-10, the counter-based generator: random numbers as a function of (seed, position, purpose).

    key = seed (64 bit, low word first); counter = (position low, position high, purpose, draw / 4)
    ten rounds: (c0, c1, c2, c3) <- (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), then key += W
    uniform = word * 2^-32 in [0, 1)

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC11); Random123 known answers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10


class Purpose(IntEnum):
    """What a number decides; one counter word, so that two decisions at a position never share a number."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds on four 32-bit words under a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: Purpose, count: int = 1) -> np.ndarray:
    """`count` numbers in [0, 1), float64 [count]; seed is taken modulo 2^64."""
    key = (seed & _MASK, (seed >> 32) & _MASK)
    words: list[int] = []
    for block in range(-(-count // 4)):
        words += philox4x32((position & _MASK, (position >> 32) & _MASK, int(purpose), block), key)
    return np.array(words[:count], np.float64) * 2.0**-32
