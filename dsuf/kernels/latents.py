"""Query and window latents of a layer, from one projection wq_a + wkv: norm, rope, quantise, insert into the window.

    c = rms(y[:Q]; q_norm)                       codes, scales = q8(c)         input of wq_b and of the indexer's wq_b
    k = rope(rms(y[Q:]; kv_norm), position)      row = q8(k)                   into slot position mod ring of the window

y bf16 [rows, Q + d]. A window row is d e4m3 codes, then d / 32 ue8m0 scales, as in a snapshot (layout.py), padded to 16
bytes (the real 528 need none); the ring of a layer starts at windows + sequence * pitch. Row table: sequence int32
[rows] (negative: inactive, writes no window row), position int32 [rows].
Reference: dsuf.ops.norm.rms_norm, ops.rope.rotate, ops.qdq.q8_encode. Bytes: 2 (Q + d) + Q + d a row: latency decides.

A warp makes a row: a lane holds eight neighbouring columns of every 256, four lanes a scale. In a decode step that is
part of queries.py; the launch of its own, grid (rows, 2), block y = 0 for k and 1 for c, serves prompt chunks, and with
one block a row the drafter's windows.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, e4m3x2, fabs, fma, fmax, opaque, round_bf16, rsqrt_approx
from dsuf.kernels.ptx.memory import ldg_u32, ldg_u32x4, stg_u8, stg_u32x2, sts_u8, sts_u32x2
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent, sum_over
from dsuf.kernels.rope import phase, rotated
from dsuf.kernels.stream import scale_stride
from dsuf.ops.qdq import q8_encode

WARP, SCALE_LANES = (1, 2, 4, 8, 16), (1, 2)
SPAN = 256  # columns that a warp holds at a time, eight a lane
MOST_ROWS = 48


def window_row_bytes(d: int) -> int:
    """Bytes between window rows on the device."""
    return -(-(d + d // 32) // 16) * 16


def pieces(width: int) -> int:
    """Times eight columns that a lane holds of a row."""
    return -(-width // SPAN)


@inline
def load_pieces(word: Any, at: Any, width: Any, lane: Any) -> None:
    """A lane's columns of bf16 [width] as pairs; lanes past the end repeat its last piece."""
    for i in unroll(-(-width // SPAN)):
        word[4 * i : 4 * i + 4] = ldg_u32x4(at + 16 * int64(min(lane + 32 * i, width // 8 - 1)))


@inline
def inverse_rms(y: Any, width: Any, eps: Any, lane: Any) -> Any:
    """1 / sqrt(mean(y^2) + eps) of a row (a warp); its loads are asked for at once."""
    word = regs(4 * -(-width // SPAN))
    load_pieces(word, y, width, lane)
    s = 0.0
    for i in unroll(4 * -(-width // SPAN)):
        pair = word[i] if 8 * lane + i // 4 * SPAN < width else uint32(0)
        s = fma(bf16_high(pair), bf16_high(pair), fma(bf16_low(pair), bf16_low(pair), s))
    return rsqrt_approx(sum_over(s, WARP) * (1.0 / width) + eps)


@inline
def norm_piece(v: Any, y: Any, g: Any, piece: Any, inverse: Any) -> None:
    """v = bf16(y g / rms) of the eight columns of a piece, read again, from the L1."""
    word = regs(4)
    weight = regs(4)
    word = ldg_u32x4(y + 16 * int64(piece))
    weight = ldg_u32x4(g + 16 * int64(piece))
    for i in unroll(4):
        v[2 * i] = round_bf16(bf16_low(word[i]) * inverse * bf16_low(weight[i]))
        v[2 * i + 1] = round_bf16(bf16_high(word[i]) * inverse * bf16_high(weight[i]))


@inline
def codes_of(v: Any) -> Any:
    """Two words of codes of a lane's eight columns, and the exponent byte of their scale (a warp)."""
    largest = fabs(v[0])
    for i in unroll(1, 8):
        largest = fmax(largest, fabs(v[i]))
    e = q8_exponent(max_over(largest, SCALE_LANES))
    f = inverse_scale(e)
    low = uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16)
    high = uint32(e4m3x2(v[5] * f, v[4] * f) | e4m3x2(v[7] * f, v[6] * f) << 16)
    return low, high, e


@inline
def query_row(y: Any, g: Any, width: Any, eps: Any, codes: Any, scales: Any, shared: Any, lane: Any) -> None:
    """Codes and scales of a row's c, to shared or global memory (a warp). A loop: unrolled, its code takes longer to
    come than to run.
    """
    inverse = inverse_rms(y, width, eps, lane)
    v = regs(8)
    for i in range(opaque(int32(-(-width // SPAN)))):
        piece = int32(lane + 32 * i)
        norm_piece(v, y, g, min(piece, width // 8 - 1), inverse)
        low, high, e = codes_of(v)
        if piece < width // 8:
            if shared:
                sts_u32x2(uint32(codes + 8 * piece), (low, high))
                if lane & 3 == 0:
                    sts_u8(uint32(scales + (piece >> 2)), e)
            else:
                stg_u32x2(codes + 8 * int64(piece), (low, high))
                if lane & 3 == 0:
                    stg_u8(scales + int64(piece >> 2), e)


@inline
def window_row(
    y: Any, g: Any, table: Any, sequence: Any, position: Any, windows: Any, pitch: Any, ring: Any, d: Any, rope: Any,
    eps: Any, lane: Any,
) -> None:  # fmt: skip
    """A row's k into its ring; y bf16 [d], sequence and position are addresses of the row's own (a warp)."""
    owner = int32(ldg_u32(sequence))
    place = int32(ldg_u32(position))
    place = int32(place if owner >= 0 else 0)
    inverse = inverse_rms(y, d, eps, lane)
    row = windows + int64(owner) * pitch + int64(uint32(place) % uint32(ring)) * (-(-(d + d // 32) // 16) * 16)
    v = regs(8)
    for i in range(opaque(int32(-(-d // SPAN)))):
        piece = int32(lane + 32 * i)
        norm_piece(v, y, g, min(piece, d // 8 - 1), inverse)
        pair = int32(4 * piece - (d - rope) // 2)  # of the rotated tail
        if pair >= 0 and pair < rope // 2:
            for j in unroll(4):
                c, sn = phase(table, place, int32(pair + j), rope // 2)
                a, b = rotated(v[2 * j], v[2 * j + 1], c, sn)
                v[2 * j] = round_bf16(a)
                v[2 * j + 1] = round_bf16(b)
        low, high, e = codes_of(v)
        if owner >= 0 and piece < d // 8:
            stg_u32x2(row + 8 * int64(piece), (low, high))
            if lane & 3 == 0:
                stg_u8(row + d + int64(piece >> 2), e)


def make(*, q: int, d: int, rope: int, eps: float) -> Kernel:
    """q and d multiples of 32; rope, a multiple of 8, the rotated tail of d; `ring` is a window's slots."""
    PIECES, SSTRIDE = pieces(max(q, d)), scale_stride(q)

    @kernel(threads=32, grid=(MOST_ROWS, 2), name=f"latents_{q}_{d}")
    def latents(
        y: s64, q_norm: s64, kv_norm: s64, table: s64, sequence: s64, position: s64, codes: s64, scales: s64,
        windows: s64, pitch: s64, ring: s32,
    ) -> None:  # fmt: skip
        lane = int32(thread_index())
        row = int64(block_index())
        at = y + row * (2 * (q + d))
        near = regs(4 * PIECES)  # asked for so that they are near when they are wanted
        if block_index_y() == 1:
            load_pieces(near, q_norm, q, lane)
            wait_for_previous_kernel()
            let_next_kernel_start()
            query_row(at, q_norm, q, eps, codes + row * q, scales + row * SSTRIDE, False, lane)
        else:
            load_pieces(near, kv_norm, d, lane)
            wait_for_previous_kernel()
            let_next_kernel_start()
            window_row(at + 2 * q, kv_norm, table, sequence + row * 4, position + row * 4, windows, pitch, ring, d,
                       rope, eps, lane)  # fmt: skip

    return latents


RING_EXTRA = 64  # slots beyond sliding_window: a rewind, a step that is queued behind it, and a block


def entries(width: Width) -> list[Entry]:
    """One kernel for the backbone and the drafter (their tables differ, not their shapes)."""
    spec = width.spec
    shape = {"q": spec.q_lora_rank, "d": spec.head_dim, "rope": spec.qk_rope_head_dim, "eps": spec.rms_norm_eps}
    values = spec.q_lora_rank + spec.head_dim
    label = f"latents/{width.label}"
    return [Entry(label, make, shape, width.chips, q8_encode, MOST_ROWS * 3 * values, MOST_ROWS * 8 * values)]
