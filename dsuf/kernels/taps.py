"""Taps of three layers beside each other, quantised: the input of the drafter's main_proj.

    codes, scales = q8(a | b | c)

a, b, c bf16 [rows, D], D a multiple of 32 and an argument; codes e4m3 [rows, 3 D], scales ue8m0 [rows, scale_stride(3
D)]. Reference: dsuf.ops.qdq.q8_encode. Bytes: 9 D a row: latency decides.
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, e4m3x2, fabs, fmax
from dsuf.kernels.ptx.memory import ldg_u32x2, stg_u8, stg_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent
from dsuf.kernels.slots import MOST_ROWS
from dsuf.ops.qdq import q8_encode

THREADS, SPAN, TAPS = 256, 1024, 3
SCALE_LANES = (1, 2, 4)


def make_join(*, most_d: int) -> Kernel:
    """grid (D / 1024, 3 rows); a thread four columns, eight threads a scale."""

    @kernel(threads=THREADS, grid=(-(-most_d // SPAN), TAPS * MOST_ROWS), name="taps_join")
    def join(a: s64, b: s64, c: s64, codes: s64, scales: s64, d: s32) -> None:
        column = int32(block_index() * SPAN + 4 * thread_index())
        row = int64(block_index_y() // TAPS)
        tap = int32(block_index_y() % TAPS)
        source = int64(b if tap == 1 else a)
        source = int64(c if tap == 2 else source)
        wait_for_previous_kernel()
        let_next_kernel_start()
        v = regs(4, 0.0)
        if column < d:
            word = ldg_u32x2(source + (row * d + column) * 2)
            for i in unroll(2):
                v[2 * i] = bf16_low(word[i])
                v[2 * i + 1] = bf16_high(word[i])
        e = q8_exponent(max_over(fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3]))), SCALE_LANES))
        f = inverse_scale(e)
        if column < d:
            whole = int64(tap) * d + column
            code = uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16)
            stg_u32(codes + row * TAPS * d + whole, code)
            if thread_index() & 7 == 0:
                stride = int64(((TAPS * d >> 5) + 3) // 4 * 4)
                stg_u8(scales + row * stride + (whole >> 5), e)

    return join


def entries(width: Width) -> list[Entry]:
    """One kernel for every D."""
    if width.label != "v41":
        return []
    d = width.spec.hidden_size
    return [Entry("taps.join", make_join, {"most_d": d}, width.chips, q8_encode, MOST_ROWS * 9 * d, MOST_ROWS * 9 * d)]
