"""The inner loops of the decode products: a warp's ring of weight chunks, and a chunk times up to 48 rows.

A warp computes 16 rows of W at a time against 8 activation rows a tensor core column tile. Per group of 32 columns

    acc[n, r] += (sum_k w[n, k] x[r, k]) * 2^(ew + ex)

with exact products of codes, one float32 sum per group, then one multiplication and one addition: the order of the
official kernels (reference model.md 3.0). Columns do not know of each other, so a row's bits never depend on the rows
beside it. The tuple acc[c] holds (row g of W, row 2t of column tile c of x), (g, 2t+1), (g+8, 2t), (g+8, 2t+1).

Activations arrive quantised, codes e4m3 [rows, K] in natural order and scales ue8m0 [rows, scale_stride(K)]. These are
`@inline` helpers for kernels; layouts of chunks are in pack.py. Every warp feeds its own ring (measured on sm_90a:
ahead of a producer warp for the block, and two stages ahead of deeper rings).
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import add_rows, add_scaled, e4m3x4_f16, opaque, ue8m0
from dsuf.kernels.ptx.copy import bulk_load_hint, mbarrier_expect
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    ldg_u32x2,
    ldg_u32x4,
    lds_u16,
    lds_u32,
    lds_u32x2,
    lds_u32x4,
    sts_u32,
    sts_u32x4,
)
from dsuf.kernels.ptx.mma import mma_bf16, mma_e4m3, mma_f16

FP4_BIAS = 16384.0  # fp4x8_f16_bits gives values times 2^-14


def scale_stride(k: int) -> int:
    """Bytes between rows of activation scales: K / 32, rounded up to whole words."""
    return (k // 32 + 3) // 4 * 4


def shared_stride(width: int) -> int:
    """Bytes between activation rows in shared memory: 32 more than a multiple of 128, so that 4 rows fill all banks."""
    return width + (32 - width) % 128


@inline
def fetch(ring: Any, bar: Any, stage: Any, size: Any, source: Any, policy: Any) -> None:
    """Ask for one ring stage of `size` bytes (one lane calls)."""
    mbarrier_expect(uint32(bar + 8 * stage), uint32(size))
    bulk_load_hint(uint32(ring + stage * size), source, uint32(size), uint32(bar + 8 * stage), policy)


@inline
def stage_rows(
    target: Any, source: Any, live: Any, width: Any, pitch: Any, stride: Any, tid: Any, threads: Any
) -> None:  # fmt: skip
    """Copy [live rows, width bytes], `pitch` bytes apart, to shared memory, `stride` bytes apart; width in 16 bytes."""
    for i in range(tid, live * (width // 16), threads):
        r = int32(i // (width // 16))
        c = int32(i - r * (width // 16))
        sts_u32x4(uint32(target + r * stride + c * 16), ldg_u32x4(source + (int64(r) * pitch + c * 16)))


@inline
def stage_words(target: Any, source: Any, size: Any, tid: Any, threads: Any) -> None:
    """Copy `size` bytes, a multiple of 4, as they are."""
    for i in range(tid, size // 4, threads):
        sts_u32(uint32(target + i * 4), ldg_u32(source + int64(i) * 4))


@inline
def clear_words(first: Any, end: Any, tid: Any, threads: Any) -> None:
    """Zero shared memory from `first` to `end`, multiples of 4."""
    for i in range(first + tid * 4, end, threads * 4):
        sts_u32(uint32(i), uint32(0))


@inline
def scale_words(word: Any, c: Any, address: Any, groups: Any) -> None:
    """The activation scales of a chunk's 2, 4 or 8 groups, as bytes of word[2c] and word[2c + 1]."""
    if groups == 8:
        word[2 * c : 2 * c + 2] = lds_u32x2(address)
    if groups == 4:
        word[2 * c] = lds_u32(address)
    if groups == 2:
        word[2 * c] = lds_u16(address)


@inline
def fp8_chunk(
    acc: Any, at: Any, tiles: Any, groups: Any, lane: Any, xs: Any, x_at: Any, ss: Any, s_at: Any, staged: Any
) -> None:  # fmt: skip
    """acc[c] += the fp8 chunk at `at` times quantised activations, for column tiles c.

    xs[c] + x_at: the lane's address in row g of tile c, at the chunk (shared if staged, else global); ss[2c] and
    ss[2c + 1]: shared addresses of the scales of rows 2t and 2t + 1; s_at: bytes from there to the chunk.
    """
    f = lds_u32x2(uint32(at + groups * 512))
    s0 = regs(2 * tiles, uint32(0))
    s1 = regs(2 * tiles, uint32(0))
    for c in unroll(tiles):
        scale_words(s0, c, uint32(ss[2 * c] + s_at), groups)
        scale_words(s1, c, uint32(ss[2 * c + 1] + s_at), groups)
    for q in unroll(groups):
        a = lds_u32x4(uint32(at + q * 512 + lane * 16))
        w = ue8m0[q % 4](f[q // 4])
        for c in unroll(tiles):
            b = regs(2)
            at_x = xs[c] + (x_at + q * 32)
            b = lds_u32x2(uint32(at_x)) if staged else ldg_u32x2(at_x)
            p = mma_e4m3(a, b, (0.0, 0.0, 0.0, 0.0))
            x0 = ue8m0[q % 4](s0[2 * c + q // 4])
            acc[c] = add_scaled(acc[c], p, w, w, x0, ue8m0[q % 4](s1[2 * c + q // 4]))


@inline
def fp8_chunk_f16(
    acc: Any, at: Any, tiles: Any, groups: Any, lane: Any, xs: Any, x_at: Any, staged: Any
) -> None:  # fmt: skip
    """The same for f16 activations: the weights become f16 (exact), their scale is applied to each group's sum.

    Many tiles take a chunk of eight groups in two rounds of a loop: unrolled, its loads want too many registers.
    """
    f = lds_u32x2(uint32(at + groups * 512))
    if tiles > 3 and groups == 8:
        for half in range(opaque(int32(2))):
            word = f[0] if half == 0 else f[1]
            f16_groups(acc, uint32(at + half * 2048), tiles, 4, lane, xs, x_at + half * 256, (word, word), staged)
    else:
        f16_groups(acc, at, tiles, groups, lane, xs, x_at, f, staged)


@inline
def f16_groups(
    acc: Any, at: Any, tiles: Any, groups: Any, lane: Any, xs: Any, x_at: Any, f: Any, staged: Any
) -> None:  # fmt: skip
    """Groups of an fp8 chunk times f16 activations; f: their scales, four a word."""
    for q in unroll(groups):
        a = lds_u32x4(uint32(at + q * 512 + lane * 16))
        top0 = e4m3x4_f16(a[0])
        low0 = e4m3x4_f16(a[1])
        top1 = e4m3x4_f16(a[2])
        low1 = e4m3x4_f16(a[3])
        w = ue8m0[q % 4](f[q // 4])
        for c in unroll(tiles):
            b = regs(4)
            at_x = xs[c] + (x_at + q * 64)
            b = lds_u32x4(uint32(at_x)) if staged else ldg_u32x4(at_x)
            p = mma_f16((top0[0], low0[0], top0[1], low0[1]), (b[0], b[1]), (0.0, 0.0, 0.0, 0.0))
            p = mma_f16((top1[0], low1[0], top1[1], low1[1]), (b[2], b[3]), p)
            acc[c] = add_rows(acc[c], p, w, w)


@inline
def bf16_chunk(acc: Any, at: Any, tiles: Any, groups: Any, lane: Any, xs: Any, x_at: Any, staged: Any) -> None:
    """acc[c] += the bf16 chunk at `at` times bf16 activations; no scales, so the tensor core keeps the sums."""
    for q in unroll(groups):
        a0 = lds_u32x4(uint32(at + q * 1024 + lane * 16))
        a1 = lds_u32x4(uint32(at + q * 1024 + 512 + lane * 16))
        for c in unroll(tiles):
            b = regs(4)
            at_x = xs[c] + (x_at + q * 64)
            b = lds_u32x4(uint32(at_x)) if staged else ldg_u32x4(at_x)
            acc[c] = mma_bf16(a0, (b[0], b[1]), acc[c])
            acc[c] = mma_bf16(a1, (b[2], b[3]), acc[c])
