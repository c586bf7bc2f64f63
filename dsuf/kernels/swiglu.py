"""Activation of the shared expert: gate and up rows to quantised hidden rows.

    h = silu(min(g, limit)) clamp(u, -limit, limit), bf16;  codes, scales = q8(h)

y bf16 [rows, 2 I] = (g, u) from one projection; codes e4m3 [rows, I], scales ue8m0 [rows, scale_stride(I)]. I, a
multiple of 32, and limit are arguments; grid (ceil I / 512, rows).
Reference: dsuf.ops.expert.swiglu, ops.qdq.q8_encode. Bytes: 5 I a row: latency decides. A thread makes four channels.
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.experts import silu
from dsuf.kernels.lang import Kernel, f32, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, e4m3x2, fabs, fmax, fmin, round_bf16
from dsuf.kernels.ptx.memory import ldg_u32x2, stg_u8, stg_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent
from dsuf.ops.expert import swiglu

THREADS = 128
SPAN = 4 * THREADS  # channels of a block
SCALE_LANES = (1, 2, 4)


def make() -> Kernel:
    """A thread four channels."""

    @kernel(threads=THREADS, grid=(1, MOST_ROWS), name="swiglu")
    def activate(y: s64, codes: s64, scales: s64, i: s32, limit: f32) -> None:
        channel = int32(4 * (block_index() * THREADS + thread_index()))
        row = int64(block_index_y())
        wait_for_previous_kernel()
        let_next_kernel_start()
        v = regs(4, 0.0)
        if channel < i:
            g = ldg_u32x2(y + (row * (2 * i) + channel) * 2)
            u = ldg_u32x2(y + (row * (2 * i) + i + channel) * 2)
            for j in unroll(2):
                a = fmin(bf16_low(g[j]), limit)
                b = fmin(bf16_high(g[j]), limit)
                v[2 * j] = round_bf16(silu(a) * fmax(fmin(bf16_low(u[j]), limit), -limit))
                v[2 * j + 1] = round_bf16(silu(b) * fmax(fmin(bf16_high(u[j]), limit), -limit))
        amax = max_over(fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3]))), SCALE_LANES)
        e = q8_exponent(amax)
        f = inverse_scale(e)
        if channel < i:
            stg_u32(codes + row * i + channel, uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16))
            if thread_index() & 7 == 0:
                stg_u8(scales + row * (((i >> 5) + 3) // 4 * 4) + (channel >> 5), e)

    return activate


def entries(width: Width) -> list[Entry]:
    """The shared expert's activation, of any width."""
    if width.label != "v41":
        return []
    size = MOST_ROWS * width.spec.moe_intermediate_size
    return [Entry("swiglu", make, {}, width.chips, swiglu, 5 * size, 12 * size)]
