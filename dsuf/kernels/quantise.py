"""Quantisation points inside kernels: the power-of-two scale of a group and its codes, bit for bit those of ops/qdq.py.

    q8   e = exponent byte of 2^ceil(log2(max(amax, 1e-4) * f32(1/448))),  code = e4m3(x * 2^(127 - e))
    q4p  the same with 6 * 2^-126 and f32(1/6),                            code = e2m1(...)
    q4e  s = e4m3(max(amax, 6 * 2^-9) / 6),                                code = e2m1(clamp(x / s, +-6))

Scaling by a power of two is exact, so codes depend on x alone. Reference: dsuf.ops.qdq.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.lang import inline, int32, uint32, unroll
from dsuf.kernels.ptx.convert import as_bits, as_float, e4m3x2, f16x2, fabs, fmax, round_bf16
from dsuf.kernels.ptx.memory import lds_f32, stg_u8, sts_f32
from dsuf.kernels.ptx.sync import shuffle_xor_f32, sync_named

INVERSE_448 = float(np.float32(1 / 448))
INVERSE_6 = float(np.float32(1 / 6))
WIDE_SHIFT = 4  # quantised rows as f16: 2^4 times the value, exact for all but the smallest
COLUMN_LANES = (4, 8, 16)  # lanes that hold outputs of the same rows
SMALLEST_Q8 = float(np.float32(1e-4))
SMALLEST_Q4P = float(np.float32(6 * 2.0**-126))


@inline
def q8_exponent(amax: Any) -> Any:
    """Exponent byte of the scale of a group with this largest magnitude."""
    return uint32((as_bits(fmax(amax, SMALLEST_Q8) * INVERSE_448) + 0x7FFFFF) >> 23)


@inline
def q4p_exponent(amax: Any) -> Any:
    """The same for index keys and queries."""
    return uint32((as_bits(fmax(amax, SMALLEST_Q4P) * INVERSE_6) + 0x7FFFFF) >> 23)


@inline
def inverse_scale(exponent: Any) -> Any:
    """2^(127 - e), exact."""
    return as_float(uint32((254 - exponent) << 23))


@inline
def wide_scale(exponent: Any) -> Any:
    """2^(e - 127 + WIDE_SHIFT) as a pair of f16: what turns e4m3 codes into a wide row."""
    m = as_float(uint32((exponent + WIDE_SHIFT) << 23))
    return f16x2(m, m)


@inline
def max_over(value: Any, masks: Any) -> Any:
    """Largest value over the lanes that the exclusive-or masks connect, e.g. (4, 8, 16)."""
    v = value
    for i in unroll(len(masks)):
        v = fmax(v, shuffle_xor_f32(v, uint32(masks[i])))
    return v


@inline
def sum_over(value: Any, masks: Any) -> Any:
    """Sum over the same lanes, in the same order on each of them."""
    v = value
    for i in unroll(len(masks)):
        v = v + shuffle_xor_f32(v, uint32(masks[i]))
    return v


@inline
def store_q8(
    acc: Any, columns: Any, own: Any, other: Any, barrier: Any, lane: Any, codes: Any, scales: Any, width: Any,
    first: Any,
) -> None:  # fmt: skip
    """Codes of the 16 outputs of a product's tile, rounded to bf16, from column `first` of `width` on. The
    tile beside it, which another warp stores at the same time, has the other half of a scale's columns: they meet over
    shared memory `own` and `other`. acc[i] as in stream.py.
    """
    g = int32(lane >> 2)
    t = int32(lane & 3)
    for i in unroll(columns):
        for j in unroll(2):
            largest = fmax(fabs(round_bf16(acc[i][j])), fabs(round_bf16(acc[i][2 + j])))
            largest = max_over(largest, COLUMN_LANES)
            if g == 0:
                sts_f32(uint32(own + (8 * i + 2 * t + j) * 4), largest)
    sync_named(barrier, uint32(64))
    for i in unroll(columns):
        for j in unroll(2):
            row = int32(8 * i + 2 * t + j)
            e = q8_exponent(fmax(lds_f32(uint32(own + row * 4)), lds_f32(uint32(other + row * 4))))
            f = inverse_scale(e)
            two = e4m3x2(round_bf16(acc[i][2 + j]) * f, round_bf16(acc[i][j]) * f)
            to = codes + int32(row * width + first + g)
            stg_u8(to, two)
            stg_u8(to + 8, uint32(two >> 8))
            if g == 0 and first & 16 == 0:
                stg_u8(scales + (row * (((width >> 5) + 3) >> 2 << 2) + (first >> 5)), e)
