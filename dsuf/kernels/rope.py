"""Rope inside kernels: phases of any position from two small tables, and the rotation of a pair.

    e^{i p w} = coarse[p / 1024] * fine[p mod 1024],  float32 (cos, sin) pairs made from float64

Two tables of 1,024 rows reach a million positions in 512 KB; their product is exact to 2^-22, where a float32 product
p * w would be off by up to 0.06 rad there. Reference: dsuf.ops.rope.phases.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.lang import inline, int64
from dsuf.kernels.ptx.convert import as_float, fma
from dsuf.kernels.ptx.memory import ldw_u32x2

FINE = 1024  # positions of the fine table
FINE_SHIFT = 10


def tables(w: np.ndarray, positions: int) -> np.ndarray:
    """float32 [FINE + ceil(positions / FINE), r_d / 2, 2] for frequencies w float64: fine rows, then coarse rows."""
    at = np.concatenate([np.arange(FINE), np.arange(-(-positions // FINE)) * FINE]).astype(np.float64)
    angle = np.multiply.outer(at, w)
    return np.ascontiguousarray(np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32))


@inline
def phase(table: Any, position: Any, pair: Any, pairs: Any) -> Any:
    """(cos, sin) of a position and a pair; `pairs` is r_d / 2."""
    f = ldw_u32x2(table + (int64(position & (FINE - 1)) * pairs + pair) * 8)
    c = ldw_u32x2(table + (int64(FINE + (position >> FINE_SHIFT)) * pairs + pair) * 8)
    fc = as_float(f[0])
    fs = as_float(f[1])
    cc = as_float(c[0])
    cs = as_float(c[1])
    return fma(fc, cc, -(fs * cs)), fma(fc, cs, fs * cc)


@inline
def rotated(a: Any, b: Any, c: Any, s: Any) -> Any:
    """(a + ib)(c + is)."""
    return fma(a, c, -(b * s)), fma(a, s, b * c)
