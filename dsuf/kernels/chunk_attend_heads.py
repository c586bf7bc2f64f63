"""The heads of a row in chunk_attend.py: queries into shared memory, scores to probabilities, sums to results.

Thread (g, t) of a warp, g = lane / 4 and t = lane mod 4, holds scores and sums as the tensor core leaves them: rows g
and g + 8, columns 8 n + 2 t and the next. Probabilities are rounded to bf16 relative to the largest score so far, and
with them goes the factor that brings older sums to that.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.chunk_attend_keys import HEADS, PANEL, SHRINK, STAGES, put_chunk
from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import as_bits, as_float, bf16_high, bf16_low, bf16x2, div, exp2_approx, fmax
from dsuf.kernels.ptx.copy import async_commit, async_load16, async_wait, mbarrier_wait
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x4,
    lds_u32x2,
    ldw_f32,
    stg_u32x4,
    sts_f32,
    sts_u32,
    sts_u32x2,
    sts_u32x4,
)
from dsuf.kernels.quantise import max_over, sum_over
from dsuf.kernels.rope import phase, rotated

LOG2_E = 1.4426950408889634
MASKED, LEAST = -3.0e38, -1.0e30
QUAD = (1, 2)  # lanes that hold the same rows of a product


@inline
def fetch_queries(
    room: Any, h: Any, sm: Any, lane: Any, warp: Any, q: Any, row: Any, position: Any, table: Any
) -> None:  # fmt: skip
    """A row's heads, rotated, and zeros for those that are not there, to shared memory.

    128 threads, four heads and 16 bytes of each panel a thread.
    """
    chunk = int32((lane >> 3) + 4 * (warp & 1))
    head0 = int32(8 * (warp >> 1) + (lane & 7))
    for b in unroll(4):
        head = int32(head0 + 16 * b)
        line = q + ((int64(row) * h + head) * room.d + chunk * 8) * 2
        to = uint32(sm + head * 128 + ((chunk ^ head) & 7) * 16)
        if head < h:
            for panel in unroll((room.d - 2 * room.half) // 64):
                async_load16(uint32(to + panel * PANEL), line + panel * 128)
        else:
            for panel in unroll((room.d - 2 * room.half) // 64 if h < HEADS else 0):
                sts_u32x4(uint32(to + panel * PANEL), (uint32(0), uint32(0), uint32(0), uint32(0)))
    async_commit()
    place = int32(ldg_u32(position + int64(row) * 4))
    for panel in unroll((room.d - 2 * room.half) // 64, room.d // 64):
        w = regs(16, uint32(0))
        for b in unroll(4):
            head = int32(head0 + 16 * b)
            if head < h:
                line = q + ((int64(row) * h + head) * room.d + panel * 64 + chunk * 8) * 2
                w[4 * b : 4 * b + 4] = ldg_u32x4(line)
        if panel * 64 + chunk * 8 >= room.d - 2 * room.half:
            for j in unroll(4):
                pair = int32(panel * 32 + chunk * 4 + j - (room.d // 2 - room.half))
                c, s = phase(table, place, int32(max(pair, 0)), room.half)
                for b in unroll(4):
                    x, y = rotated(bf16_low(w[4 * b + j]), bf16_high(w[4 * b + j]), c, s)
                    w[4 * b + j] = bf16x2(y, x)
        for b in unroll(4):
            put_chunk(sm, int32(head0 + 16 * b), int32(panel * 8 + chunk), w[4 * b : 4 * b + 4])
    async_wait[0]()


@inline
def probabilities(
    room: Any, h: Any, sm: Any, v: Any, scale: Any, keys: Any, finish: Any, top: Any, total: Any, head: Any, t: Any,
    sink: Any, turn: Any,
) -> None:  # fmt: skip
    """64 scores of heads `head` and head + 8, of which `keys` count, to a tile of probabilities and its factors.

    top, total: largest score and sum so far of both heads, brought up to date. finish: the row ends here, so the
    factor of its results goes along.
    """
    old0 = top[0]
    old1 = top[1]
    for n in unroll(8):
        for j in unroll(4):
            live = 8 * n + 2 * t + j % 2 < keys
            v[4 * n + j] = v[4 * n + j] * scale if live else MASKED
        top[0] = fmax(top[0], fmax(v[4 * n], v[4 * n + 1]))
        top[1] = fmax(top[1], fmax(v[4 * n + 2], v[4 * n + 3]))
    top[0] = max_over(top[0], QUAD)
    top[1] = max_over(top[1], QUAD)
    down0 = exp2_approx(old0 - top[0])
    down1 = exp2_approx(old1 - top[1])
    total[0] = total[0] * down0
    total[1] = total[1] * down1
    mbarrier_wait(uint32(sm + room.taken + 8 * (turn % STAGES)), uint32((turn // STAGES & 1) ^ 1))
    to = uint32(sm + room.p + (turn % STAGES) * PANEL + head * 128 + t * 4)
    for n in unroll(8):
        e0 = exp2_approx(v[4 * n] - top[0])
        e1 = exp2_approx(v[4 * n + 1] - top[0])
        e2 = exp2_approx(v[4 * n + 2] - top[1])
        e3 = exp2_approx(v[4 * n + 3] - top[1])
        total[0] = total[0] + (e0 + e1)
        total[1] = total[1] + (e2 + e3)
        at_chunk = ((n ^ head) & 7) * 16  # the same in row head + 8
        sts_u32(uint32(to + at_chunk), bf16x2(e1, e0))
        sts_u32(uint32(to + at_chunk + 1024), bf16x2(e3, e2))
    at_factor = uint32(sm + room.factors + (turn % STAGES) * (8 * HEADS) + head * 4)
    if t == 0:
        sts_f32(at_factor, down0)
        sts_f32(uint32(at_factor + 32), down1)
    if finish == 1:
        total0 = sum_over(total[0], QUAD)
        total1 = sum_over(total[1], QUAD)
        sink0 = ldw_f32(sink + int64(min(head, h - 1)) * 4)  # pure: a branch would not keep it from being read
        sink1 = ldw_f32(sink + int64(min(head + 8, h - 1)) * 4)
        total0 = total0 + exp2_approx(sink0 * LOG2_E - top[0])
        total1 = total1 + exp2_approx(sink1 * LOG2_E - top[1])
        if t == 0:
            sts_f32(uint32(at_factor + 4 * HEADS), div(SHRINK, total0))
            sts_f32(uint32(at_factor + 4 * HEADS + 32), div(SHRINK, total1))


@inline
def keep_phases(room: Any, at: Any, thread: Any, position: Any, row: Any, table: Any) -> None:
    """A row's phases to shared memory: 128 threads."""
    for p in range(thread, room.half, 128):
        c, s = phase(table, int32(ldg_u32(position + int64(row) * 4)), p, room.half)
        sts_u32x2(uint32(at + p * 8), (as_bits(c), as_bits(s)))


@inline
def put_sums(
    room: Any, h: Any, o: Any, columns: Any, first: Any, most: Any, head: Any, t: Any, phases: Any, to: Any
) -> None:  # fmt: skip
    """Sums of `columns` columns of heads `head` and head + 8 to the result `to` (of head, from column first + 8 t on).

    In product order the pairs of four neighbouring tiles of 8 columns are 16 bytes of one lane. `most`, constant: the
    largest that `first` can be.
    """
    for j in unroll(columns // 32):
        word = regs(8)  # of row head, then of row head + 8
        for i in unroll(4):
            word[i] = bf16x2(o[16 * j + 4 * i + 1], o[16 * j + 4 * i])
            word[4 + i] = bf16x2(o[16 * j + 4 * i + 3], o[16 * j + 4 * i + 2])
            if most + 32 * j + 8 * i + 7 >= room.d - 2 * room.half:
                column = int32(first + 2 * t + 32 * j + 8 * i)
                if column >= room.d - 2 * room.half:
                    cs = lds_u32x2(uint32(phases + (column - (room.d - 2 * room.half)) * 4))
                    for m in unroll(2):
                        low = bf16_low(word[4 * m + i])
                        high = bf16_high(word[4 * m + i])
                        x, y = rotated(low, high, as_float(cs[0]), -as_float(cs[1]))
                        word[4 * m + i] = bf16x2(y, x)
        if head < h:
            stg_u32x4(to + 64 * j, word[0:4])
        if head + 8 < h:
            stg_u32x4(to + 64 * j + 16 * room.d, word[4:8])
