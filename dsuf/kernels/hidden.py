"""Hidden values of experts from the sums of gate and up: SwiGLU, quantised in groups of 32, as f16.

    h = f16(2^SHIFT q8(bf16(bf16(silu(min(gate, limit)) clamp(up, -limit, limit)) w_e)))      of bf16 gate and up

A quantised value is code * 2^e with e >= -22, so that f16 of 2^SHIFT times it is exact but for codes under 2^-28, and
overflows from 4,094 on: hidden rows stay far below. Reference: dsuf.ops.expert.swiglu, dsuf.ops.qdq.q8.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, regs, uint32, unroll
from dsuf.kernels.ptx.convert import (
    e4m3x2,
    e4m3x4_f16,
    exp2_approx,
    fabs,
    fmax,
    fmin,
    mul_f16x2,
    rcp_approx,
    round_bf16,
)
from dsuf.kernels.ptx.memory import stg_u16
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, wide_scale

CHANNELS = 32  # that a quantisation group has, and two tiles of weight rows
LOG2_E = 1.4426950408889634
QUAD_ROWS = (4, 8, 16)  # lanes that hold the same column


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return x * rcp_approx(1.0 + exp2_approx(x * -LOG2_E))


@inline
def store_hidden(acc: Any, column: Any, unit: Any, limit: Any, share: Any, to: Any, wanted: Any) -> None:
    """Column 2t + `column` of sums acc (two gate tiles, two up tiles, in `unit`), times `share`, if `wanted`.

    to: address of channel g of the group; a lane has channels g, g + 8, g + 16, g + 24. All lanes call.
    """
    v = regs(4)
    for j in unroll(2):
        for r in unroll(2):
            gate = fmin(round_bf16(acc[j][2 * r + column] * unit), limit)
            up = fmax(fmin(round_bf16(acc[2 + j][2 * r + column] * unit), limit), -limit)
            a = silu(gate)
            v[2 * j + r] = round_bf16(a * up * share)
    amax = fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3])))
    e = q8_exponent(max_over(amax, QUAD_ROWS))
    f = inverse_scale(e)
    code = uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16)
    two = e4m3x4_f16(code)
    m = wide_scale(e)
    if wanted:
        for j in unroll(2):
            z = mul_f16x2(two[j], m)
            stg_u16(to + 32 * j, z)
            stg_u16(to + 32 * j + 16, uint32(z >> 16))
