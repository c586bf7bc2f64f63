"""Queries of a decode step's indexer: rope, then q4p, as exact bf16 values.

    qI = q4p(rope(y)), y bf16 [rows, heads, di] from the indexer's wq_b

The products of index.py take them as bf16: four bits and a power of two fit. Inactive rows write nothing. Reference:
dsuf.ops.rope.rotate, ops.qdq.q4p. Bytes: 4 a value.
"""

from __future__ import annotations

from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, e2m1_code, fabs, fmax, fp4x8_bf16, mul_bf16x2, round_bf16
from dsuf.kernels.ptx.memory import ldg_u32, ldg_u32x2, stg_u32x2
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q4p_exponent
from dsuf.kernels.rope import phase, rotated

QUERY_WARPS = 8
GROUP_LANES = (1, 2, 4)


def make_query(*, heads: int, di: int, rope: int) -> Kernel:
    """A warp (or its first di / 4 lanes) a head: four neighbouring columns a lane."""
    HALF, TAIL, SETS = rope // 2, di - rope, -(-heads // QUERY_WARPS)

    @kernel(threads=QUERY_WARPS * 32, grid=(MOST_ROWS * SETS,), name=f"index_query_{heads}x{di}")
    def query(y: s64, sequence: s64, position: s64, table: s64, out: s64) -> None:
        lane = int32(thread_index() & 31)
        row = int64(block_index() // SETS)
        head = int32(block_index() % SETS * QUERY_WARPS + (thread_index() >> 5))
        wait_for_previous_kernel()
        let_next_kernel_start()
        at = ((row * heads + head) * di + 4 * lane) * 2
        inside = head < heads and 4 * lane < di and int32(ldg_u32(sequence + row * 4)) >= 0
        v = regs(4, 0.0)
        if inside:
            word = ldg_u32x2(y + at)
            for i in unroll(2):
                v[2 * i] = bf16_low(word[i])
                v[2 * i + 1] = bf16_high(word[i])
            if 4 * lane >= TAIL:
                place = int32(ldg_u32(position + row * 4))
                for i in unroll(2):
                    c, s = phase(table, place, int32(2 * lane - TAIL // 2 + i), HALF)
                    a, b = rotated(v[2 * i], v[2 * i + 1], c, s)
                    v[2 * i] = round_bf16(a)
                    v[2 * i + 1] = round_bf16(b)
        amax = max_over(fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3]))), GROUP_LANES)
        e = q4p_exponent(amax)
        f = inverse_scale(e)
        codes = uint32(e2m1_code(v[0] * f) | e2m1_code(v[1] * f) << 4)
        codes = uint32(codes | e2m1_code(v[2] * f) << 8 | e2m1_code(v[3] * f) << 12)
        four = fp4x8_bf16(codes)
        both = uint32(e << 7 | e << 23)
        if inside:
            stg_u32x2(out + at, (mul_bf16x2(four[0], both), mul_bf16x2(four[1], both)))

    return query
