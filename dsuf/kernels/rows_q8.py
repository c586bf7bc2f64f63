"""Normed rows as codes where no other kernel makes them: the drafter's features after main_proj.

    codes, scales = q8(bf16(x g / sqrt(mean(x^2) + eps)))

x bf16 [rows, K], K a multiple of 32 and an argument; codes e4m3 [rows, K], scales ue8m0 [rows, scale_stride(K)].
Reference: dsuf.ops.qdq.q8_encode, dsuf.ops.norm.rms_norm. Bytes: 3 K a row: latency decides.

A thread makes four columns at a time, eight threads share a scale. One block a row: the order of the sum depends on K
alone.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, float32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, div, e4m3x2, fabs, fma, fmax, round_bf16, rsqrt_approx
from dsuf.kernels.ptx.memory import ldg_u32x2, lds_f32, ldw_u32x2, shared_base, stg_u8, stg_u32, sts_f32
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, sum_over
from dsuf.ops.qdq import q8_encode

THREADS, WARPS = 256, 8
SPAN = 4 * THREADS  # columns that a block holds at a time
WARP, SCALE_LANES = (1, 2, 4, 8, 16), (1, 2, 4)


@inline
def store_codes(v: Any, codes: Any, scales: Any, row: Any, column: Any, k: Any) -> None:
    """Codes of four columns and, by one thread of eight, their scale; every lane calls."""
    amax = max_over(fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3]))), SCALE_LANES)
    e = q8_exponent(amax)
    f = inverse_scale(e)
    if column < k:
        word = uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16)
        stg_u32(codes + row * k + column, word)
        if thread_index() & 7 == 0:
            stg_u8(scales + row * (((k >> 5) + 3) // 4 * 4) + (column >> 5), e)


def make_norm(*, eps: float) -> Kernel:
    """A block a row; x is read twice, the second time from the L1."""

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=4 * WARPS, name="q8_norm")
    def quantise_norm(x: s64, g: s64, codes: s64, scales: s64, k: s32) -> None:
        tid = int32(thread_index())
        row = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        s = 0.0
        for column in range(4 * tid, k, SPAN):
            word = ldg_u32x2(x + (row * k + column) * 2)
            for i in unroll(2):
                s = fma(bf16_low(word[i]), bf16_low(word[i]), s)
                s = fma(bf16_high(word[i]), bf16_high(word[i]), s)
        s = sum_over(s, WARP)
        if tid & 31 == 0:
            sts_f32(uint32(sm + (tid >> 5) * 4), s)
        sync_threads()
        s = lds_f32(sm)
        for w in unroll(1, WARPS):
            s = s + lds_f32(uint32(sm + 4 * w))
        inverse = rsqrt_approx(div(s, float32(k)) + eps)
        for start in range(0, k, SPAN):
            column = int32(start + 4 * tid)
            v = regs(4, 0.0)
            if column < k:
                word = ldg_u32x2(x + (row * k + column) * 2)
                weight = ldw_u32x2(g + 2 * int64(column))
                for i in unroll(2):
                    v[2 * i] = round_bf16(bf16_low(word[i]) * inverse * bf16_low(weight[i]))
                    v[2 * i + 1] = round_bf16(bf16_high(word[i]) * inverse * bf16_high(weight[i]))
            store_codes(v, codes, scales, row, column, k)

    return quantise_norm


def entries(width: Width) -> list[Entry]:
    """K is an argument, so one kernel serves every checkpoint."""
    if width.label != "v41":
        return []
    spec = width.spec
    rows = MOST_ROWS * spec.hidden_size
    return [Entry("q8.norm", make_norm, {"eps": spec.rms_norm_eps}, width.chips, q8_encode, 3 * rows, 12 * rows)]
