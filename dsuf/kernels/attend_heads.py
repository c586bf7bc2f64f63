"""What attention does head by head: scores and probabilities of a block's keys, and the parts of a result that travel.

A part is a mean of a block's keys, f16 in shared memory by heads, in chunks of 16 bytes; it travels with its block's
largest score and sum of weights, from which follows what it weighs in the sum over the blocks.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int32, regs, uint32, unroll
from dsuf.kernels.ptx.convert import (
    as_bits,
    as_float,
    bf16x2,
    exp2_approx,
    f16_high,
    f16_low,
    f16x2,
    fma,
    fmax,
    rcp_approx,
    round_bf16,
)
from dsuf.kernels.ptx.memory import lds_u32x2, lds_u32x4, sts_u32, sts_u32x2
from dsuf.kernels.ptx.sync import shuffle_f32, sync_warp
from dsuf.kernels.quantise import max_over, sum_over

MASKED, LEAST = -3.0e38, -1.0e30
HEAD_LANES = (1, 2, 4, 8)  # sixteen lanes make one head's probabilities
PART_LANES = (1, 2, 4)  # eight, a block's each, know what the parts of a head weigh


@inline
def store_scores(acc: Any, tiles: Any, base: Any, g: Any, t: Any) -> None:
    """A warp's products of sixteen keys, in lines of 64 bytes a head; half of the heads have their eights exchanged."""
    for half in unroll(2):
        for m in unroll(tiles):
            four = acc[2 * m + half]
            to = uint32(base + (16 * m + g) * 64 + ((8 * half + 2 * t) ^ ((g & 2) << 2)) * 4)
            sts_u32x2(to, (as_bits(four[0]), as_bits(four[1])))
            sts_u32x2(uint32(to + 512), (as_bits(four[2]), as_bits(four[3])))


@inline
def sum_scores(base: Any, parts: Any, heads: Any, to: Any, pitch: Any, tid: Any, threads: Any) -> None:
    """The sums over all warps of what they stored, to lines `pitch` bytes apart: two keys a thread."""
    for i in unroll(-(-heads * 8 // threads)):
        one = int32((tid >> 3) + i * (threads // 8))
        if one < heads:
            pair = 2 * (tid & 7)
            at = uint32(base + one * 64 + (pair ^ ((one & 2) << 2)) * 4)
            summed = regs(2, 0.0)
            for w in unroll(parts):
                both = lds_u32x2(uint32(at + w * (64 * heads)))
                summed[0] = summed[0] + as_float(both[0])
                summed[1] = summed[1] + as_float(both[1])
            sts_u32x2(uint32(to + one * pitch + pair * 4), (as_bits(summed[0]), as_bits(summed[1])))


@inline
def probabilities(line: Any, quads: Any, scale: Any, padded: Any, mine: Any, lane: Any) -> Any:
    """A head's largest score and sum of weights; its probabilities, bf16, take the place of the scores.

    Sixteen lanes a head, quads of keys; of `padded` keys the first `mine` count.
    """
    v = regs(4 * quads, MASKED)
    top = LEAST
    for i in unroll(quads):
        key = int32(4 * ((lane & 15) + 16 * i))
        if key < padded:
            quad = lds_u32x4(uint32(line + key * 4))
            for j in unroll(4):
                v[4 * i + j] = as_float(quad[j]) * scale if key + j < mine else MASKED
                top = fmax(top, v[4 * i + j])
    sync_warp()
    top = max_over(top, HEAD_LANES)
    weight = 0.0
    for i in unroll(quads):
        key = int32(4 * ((lane & 15) + 16 * i))
        e = regs(4)
        for j in unroll(4):
            e[j] = exp2_approx(v[4 * i + j] - top)
        weight = weight + ((e[0] + e[1]) + (e[2] + e[3]))
        if key < padded:
            sts_u32x2(uint32(line + key * 2), (bf16x2(e[1], e[0]), bf16x2(e[3], e[2])))
    sync_warp()
    weight = sum_over(weight, HEAD_LANES)
    return top, weight


@inline
def weight_of_part(stats: Any, sink: Any) -> Any:
    """What the part of a lane's block weighs in a head's sum; stats: its largest score and sum of weights as bits."""
    top = max_over(as_float(stats[0]), PART_LANES)
    amount = as_float(stats[1]) * exp2_approx(as_float(stats[0]) - top)
    return amount * rcp_approx(sum_over(amount, PART_LANES) + exp2_approx(sink - top))


@inline
def add_parts(v: Any, landed: Any, step: Any, blocks: Any, amount: Any, lane: Any) -> None:
    """Eight columns of a head: the parts of all blocks, `step` bytes apart, by what lane r of eight says of block r."""
    for r in unroll(blocks):
        f = shuffle_f32(amount, uint32((lane & 24) + r))
        held = lds_u32x4(uint32(landed + r * step))
        for j in unroll(4):
            v[2 * j] = fma(f16_low(held[j]), f, v[2 * j])
            v[2 * j + 1] = fma(f16_high(held[j]), f, v[2 * j + 1])


@inline
def part_address(base: Any, head: Any, column: Any, pitch: Any) -> Any:
    """Shared address of a column of a head's part: chunks of 16 bytes, so that eight heads fill all banks."""
    return uint32(base + head * pitch + ((column >> 3) ^ (head & 7)) * 16 + (column & 7) * 2)


@inline
def scale_part(o: Any, first: Any, count: Any, f0: Any, f1: Any, alone: Any) -> None:
    """Product tiles from o[first] on times the factors of rows g and g + 8; alone: the result, rounded to bf16."""
    for c in unroll(first, first + count):
        o[c] = (o[c][0] * f0, o[c][1] * f0, o[c][2] * f1, o[c][3] * f1)
    if alone:
        for c in unroll(first, first + count):
            o[c] = (round_bf16(o[c][0]), round_bf16(o[c][1]), round_bf16(o[c][2]), round_bf16(o[c][3]))


@inline
def store_part(
    o: Any, first: Any, count: Any, base: Any, base8: Any, line: Any, chunk: Any, g: Any, pitch: Any
) -> None:  # fmt: skip
    """The same tiles as f16, eight columns each, to the parts of a head (at base) and of the eighth after it (base8).

    line: what lies before the head's part and a lane's pair; chunk: the first of the tiles; g: the head modulo 8.
    """
    for c in unroll(count):
        to = int32(line + (int32(chunk + c) ^ g) * 16)
        four = o[first + c]
        sts_u32(uint32(base + to), f16x2(four[1], four[0]))
        sts_u32(uint32(base8 + to + 8 * pitch), f16x2(four[3], four[2]))
