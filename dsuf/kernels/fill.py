"""Fills packed weights with reproducible random codes, as fast as memory takes them: checkpoints for benches.

    word(i) = mix(mix(i ^ key0) ^ key1), 32 bits;   mix: x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b;
    x ^= x >> 16

A buffer is runs of `chunk` bytes, of which the first `codes` are random and the rest repeat the word `tail` (scales).
width 0: the random words themselves (all 16 e2m1 codes alike); 1, 2, 4: each byte of the words in turn chooses an
element of that many bytes from a table of 256, so that any distribution can be drawn. The 16 bytes at 16 u take four
words from 4 u on (width 0 and 1), two from 2 u on, or word u. `chunk` and `codes` are multiples of 16.

Reference: numpy.random has the purpose, tests/engine/gpu/test_weights.py the rule. Bytes: those written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int64, kernel, regs, s32, s64, u32, uint32, unroll
from dsuf.kernels.ptx.memory import ldw_u8, ldw_u16, ldw_u32, stg_u32x4
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)

THREADS, BLOCKS = 256, 1056
GIB = 1 << 30


@inline
def mix(x: Any) -> Any:
    """A bijection of 32-bit numbers that spreads every bit."""
    a = uint32(x ^ (x >> 16))
    b = uint32(a * 0x7FEB352D)
    c = uint32(b ^ (b >> 15))
    d = uint32(c * 0x846CA68B)
    return uint32(d ^ (d >> 16))


@inline
def word(i: Any, key0: Any, key1: Any) -> Any:
    """The i-th random word."""
    once = mix(uint32(uint32(i) ^ key0))
    return mix(uint32(once ^ key1))


def make() -> Kernel:
    """One kernel for every layout; a thread makes 16 bytes at a time."""

    @kernel(threads=THREADS, grid=(BLOCKS,), name="fill")
    def fill(
        base: s64, size: s64, chunk: s32, codes: s32, width: s32, table: s64, tail: u32, key0: u32, key1: u32
    ) -> None:  # fmt: skip
        wait_for_previous_kernel()
        let_next_kernel_start()
        unit = int64(int64(block_index()) * THREADS + thread_index())
        step = int64(int64(block_count()) * THREADS)
        units = int64(size >> 4)
        while unit < units:
            out = regs(4, uint32(0))
            if (unit << 4) % chunk >= codes:
                for i in unroll(4):
                    out[i] = uint32(tail)
            elif width == 0:
                for i in unroll(4):
                    out[i] = word(unit * 4 + i, key0, key1)
            elif width == 1:
                for i in unroll(4):
                    w = word(unit * 4 + i, key0, key1)
                    for j in unroll(4):
                        out[i] = uint32(out[i] | ldw_u8(table + int64((w >> (8 * j)) & 255)) << (8 * j))
            elif width == 2:
                for i in unroll(2):
                    w = word(unit * 2 + i, key0, key1)
                    for j in unroll(4):
                        value = ldw_u16(table + int64((w >> (8 * j)) & 255) * 2)
                        out[2 * i + j // 2] = uint32(out[2 * i + j // 2] | value << (16 * (j % 2)))
            else:
                w = word(unit, key0, key1)
                for j in unroll(4):
                    out[j] = uint32(ldw_u32(table + int64((w >> (8 * j)) & 255) * 4))
            stg_u32x4(base + unit * 16, out)
            unit = int64(unit + step)

    return fill


def entries(width: Width) -> list[Entry]:
    """One entry, of no width."""
    if width.label != "v41":
        return []
    return [Entry("fill", make, {}, width.chips, np.random.default_rng, GIB, 0)]
