"""pack.py on the device: raw rows of a matrix into tensor core order, bit for bit what NumPy makes.

    fp8    codes [n, k] e4m3, scales [ceil n/32, k/32]      pack.pack_fp8
    bf16   [n, k]; rows beyond n are zero                   pack.pack_bf16
    fp4    [n, k/2], scales [n, k/32]                       pack.pack_fp4, placed among `runs` (pack.interleave)

`chunk` is the columns of a packed chunk, `first` the tile that row 0 goes to, so that a matrix may come in pieces of
whole tiles (fp8: of 32 rows). fp4: tile i of matrix `which` of `matrices` goes where interleave by runs of `run` tiles
puts it; run 1 of 1 matrix is the plain order. A warp makes 32 columns (fp4: 64) of a tile: 512 bytes at once.

Reference: dsuf.kernels.pack. Bytes: read once, written once.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels import pack
from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.memory import ldg_u8, ldg_u32, ldg_u32x2, stg_u8, stg_u32x4
from dsuf.kernels.ptx.op import BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)

WARPS = 8
BLOCKS = 132 * 8
SIGN, MAGNITUDE = (15, 7, 8, 0), (9, 1, 12, 4)  # bit of each register's code in a word, where sm_90a wants it


def make_fp8() -> Kernel:
    """A warp 32 columns; the first of a chunk its scales too."""

    @kernel(threads=32 * WARPS, grid=(BLOCKS,), name="pack_fp8")
    def pack_rows(source: s64, scales: s64, target: s64, n: s32, k: s32, chunk: s32, first: s32) -> None:
        lane = int32(thread_index() & 31)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        wait_for_previous_kernel()
        let_next_kernel_start()
        groups = int32(k >> 5)
        per_chunk = int32(chunk >> 5)
        size = int32(chunk * 16 + 16)
        work = int64(n >> 4) * groups
        item = int64(block_index() * WARPS + (thread_index() >> 5))
        while item < work:
            tile = int32(item // groups)
            group = int32(item % groups)
            c = int32(group // per_chunk)
            inside = int32(group % per_chunk)
            upper = source + (int64(tile) * 16 + g) * k + group * 32 + 8 * t
            a = ldg_u32x2(upper)
            b = ldg_u32x2(upper + int64(k) * 8)
            at = target + ((int64(first) + tile) * (groups // per_chunk) + c) * size
            stg_u32x4(at + inside * 512 + lane * 16, (a[0], b[0], a[1], b[1]))
            if inside == 0 and lane < 16:
                value = uint32(0)
                if lane < per_chunk:
                    value = ldg_u8(scales + int64(tile >> 1) * groups + c * per_chunk + lane)
                stg_u8(at + chunk * 16 + lane, value)
            item = int64(item + block_count() * WARPS)

    return pack_rows


def make_bf16() -> Kernel:
    """A warp 32 columns, both halves of its groups of eight."""

    @kernel(threads=32 * WARPS, grid=(BLOCKS,), name="pack_bf16")
    def pack_rows(source: s64, target: s64, n: s32, k: s32, chunk: s32, first: s32) -> None:
        lane = int32(thread_index() & 31)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        wait_for_previous_kernel()
        let_next_kernel_start()
        groups = int32(k >> 5)
        work = int64((n + 15) >> 4) * groups
        item = int64(block_index() * WARPS + (thread_index() >> 5))
        while item < work:
            tile = int32(item // groups)
            group = int32(item % groups)
            row = int32(tile * 16 + g)
            at = target + ((int64(first) + tile) * groups + group) * 1024 + lane * 16
            for m in unroll(2):
                upper = source + (int64(row) * k + group * 32 + 8 * t + 4 * m) * 2
                a = regs(2, uint32(0))
                b = regs(2, uint32(0))
                if row < n:
                    a[0:2] = ldg_u32x2(upper)
                if row + 8 < n:
                    b[0:2] = ldg_u32x2(upper + int64(k) * 16)
                stg_u32x4(at + 512 * m, (a[0], b[0], a[1], b[1]))
            item = int64(item + block_count() * WARPS)

    return pack_rows


@inline
def word_of(upper: Any, lower: Any, m: Any, native: Any) -> Any:
    """Codes 4m .. 4m + 3 of two rows (eight nibbles each) as the word of a product's registers."""
    word = uint32(0)
    for register in unroll(4):
        for column in unroll(2):
            row = upper if register % 2 == 0 else lower
            code = uint32((row >> (4 * (4 * m + 2 * (register // 2) + column))) & 15)
            if native:
                word = uint32(word | code << (8 * register + 4 * column))
            else:
                word = uint32(word | (code >> 3) << (SIGN[register] + 16 * column))
                word = uint32(word | (code & 7) << (MAGNITUDE[register] + 16 * column))
    return word


def make_fp4(*, chip: str) -> Kernel:
    """A warp 64 columns; the first of a chunk its scales too."""
    NATIVE = chip in BLACKWELL

    @kernel(threads=32 * WARPS, grid=(BLOCKS,), name="pack_fp4")
    def pack_rows(
        source: s64, scales: s64, target: s64, n: s32, k: s32, chunk: s32, first: s32, run: s32, matrices: s32,
        which: s32,
    ) -> None:  # fmt: skip
        lane = int32(thread_index() & 31)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        wait_for_previous_kernel()
        let_next_kernel_start()
        pairs = int32(k >> 6)
        per_chunk = int32(chunk >> 6)
        chunks = int32(pairs // per_chunk)
        tail = int32(chunk >> 1)
        size = int32(chunk * 8 + tail)
        work = int64(n >> 4) * pairs
        item = int64(block_index() * WARPS + (thread_index() >> 5))
        while item < work:
            local = int32(item // pairs)
            pair = int32(item % pairs)
            c = int32(pair // per_chunk)
            inside = int32(pair % per_chunk)
            tile = int32(first + local)
            place = (int64(tile // run) * chunks + c) * (run * matrices) + which * run + tile % run
            at = target + place * size
            words = regs(4)
            for half in unroll(2):
                upper = source + ((int64(local) * 16 + g) * k + pair * 64 + half * 32 + 8 * t) // 2
                a = ldg_u32(upper)
                b = ldg_u32(upper + int64(k) * 4)
                for m in unroll(2):
                    words[2 * half + m] = word_of(a, b, m, NATIVE)
            stg_u32x4(at + inside * 512 + lane * 16, words)
            if inside == 0:
                groups = int32(chunk >> 5)  # scales of a row in the chunk
                i = int32(lane)
                while i < tail:
                    row = int32(local * 16 + i // (2 * groups) + 8 * (i // groups % 2))
                    value = ldg_u8(scales + int64(row) * (k >> 5) + c * groups + i % groups)
                    stg_u8(at + chunk * 8 + i, value)
                    i = int32(i + 32)
            item = int64(item + block_count() * WARPS)

    return pack_rows


def entries(width: Width) -> list[Entry]:
    """One kernel a format, of no width; the floor is that of a gigabyte."""
    if width.label != "v41":
        return []
    size = 2 << 30
    return [
        Entry("pack.fp8", make_fp8, {}, width.chips, pack.pack_fp8, size, 0),
        Entry("pack.bf16", make_bf16, {}, width.chips, pack.pack_bf16, size, 0),
        Entry("pack.fp4", make_fp4, {}, width.chips, pack.pack_fp4, size, 0),
    ]
