"""Pieces of memory moved by one launch, between the device and host memory that it sees: scattered pages and the like.

    piece i: words[i] of 16 bytes from sources[i] to targets[i]

lists int64 [3, pitch], of which `count` pieces count: targets, sources (addresses, multiples of 16), words. Pieces do
not overlap. The lists may lie in page-locked host memory. A copy engine takes a call of the driver of 0.5 to 3 us for
what the link carries in 2, and more the more memory is registered; a launch takes none.

Reference: numpy's assignment. Bytes: 16 a word, once each way; the link decides the time. A block a piece, and where
its next one lies is asked for before. A few blocks fill a link: each thread has UNROLL words under way.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, unroll
from dsuf.kernels.ptx.memory import ldg_s64, ldg_u32x4, stg_u32x4
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    thread_index,
    wait_for_previous_kernel,
)

THREADS, BLOCKS, UNROLL = 256, 16, 8


def make() -> Kernel:
    """One kernel for every length; the grid may be any."""

    @kernel(threads=THREADS, grid=(BLOCKS,), name="pieces_move")
    def move(lists: s64, pitch: s32, count: s32) -> None:
        piece = int32(block_index())
        sources = lists + 8 * int64(pitch)
        sizes = sources + 8 * int64(pitch)
        wait_for_previous_kernel()
        let_next_kernel_start()
        target = int64(0)
        source = int64(0)
        words = int32(0)
        if piece < count:
            target = ldg_s64(lists + 8 * int64(piece))
            source = ldg_s64(sources + 8 * int64(piece))
            words = int32(ldg_s64(sizes + 8 * int64(piece)))
        while piece < count:
            piece = int32(piece + block_count())
            following = int64(0)
            behind = int64(0)
            many = int32(0)
            if piece < count:
                following = ldg_s64(lists + 8 * int64(piece))
                behind = ldg_s64(sources + 8 * int64(piece))
                many = int32(ldg_s64(sizes + 8 * int64(piece)))
            v = regs(4 * UNROLL)
            at = int32(thread_index())
            while at + (UNROLL - 1) * THREADS < words:
                for i in unroll(UNROLL):
                    v[4 * i : 4 * i + 4] = ldg_u32x4(source + 16 * int64(at + i * THREADS))
                for i in unroll(UNROLL):
                    stg_u32x4(target + 16 * int64(at + i * THREADS), v[4 * i : 4 * i + 4])
                at = int32(at + UNROLL * THREADS)
            while at < words:
                v[0:4] = ldg_u32x4(source + 16 * int64(at))
                stg_u32x4(target + 16 * int64(at), v[0:4])
                at = int32(at + THREADS)
            target = following
            source = behind
            words = many

    return move


def entries(width: Width) -> list[Entry]:
    """No width; what it moves is its caller's."""
    if width.label != "v41":
        return []
    return [Entry("pieces.move", make, {}, width.chips, np.copyto, 0, 0)]
