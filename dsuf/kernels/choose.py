"""Greedy choice: the token with the largest logit of each row, lowest token among equals, in two launches.

    parts   largest of each of SPLITS stretches of a row      -> (ordered score, token) uint32 [rows, SPLITS, 2]
    finish  largest of the parts                              -> token int32 [rows]

logits float32 [rows, V]; mask uint32 [rows, ceil V/32], bit t of word w allows token 32 w + t (address 0: all allowed);
sequence int32 [rows] (negative: inactive, nothing is read or written). Scores are compared as unsigned numbers of the
same order, so a NaN with a clear sign bit would win: logits are finite. Reference: numpy.argmax. Bytes: 4 V a row, from
L2 right after the head; 129,280 logits of 6 rows are 3.1 MB.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_u32, shared_base, stg_u32, sts_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
)
from dsuf.kernels.route import ordered

SPLITS, WARPS = 32, 8
THREADS = 32 * WARPS
NONE = 0x7FFFFFFF


def make_parts() -> Kernel:
    """grid (SPLITS, rows); every SPLITS-th run of THREADS tokens belongs to one block."""

    @kernel(threads=THREADS, grid=(SPLITS, MOST_ROWS), shared=8 * WARPS, name="argmax_parts")
    def parts(logits: s64, mask: s64, sequence: s64, out: s64, vocabulary: s32) -> None:
        tid = int32(thread_index())
        row = int64(block_index_y())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        best = uint32(0)
        token = int32(NONE)
        if int32(ldg_u32(sequence + row * 4)) >= 0:
            for i in range(int32(block_index() * THREADS + tid), vocabulary, SPLITS * THREADS):
                key = ordered(ldg_f32(logits + (row * vocabulary + i) * 4))
                allowed = uint32(1)
                if mask != 0:
                    allowed = uint32(ldg_u32(mask + (row * ((vocabulary + 31) >> 5) + (i >> 5)) * 4) >> (i & 31) & 1)
                better = allowed == 1 and (key > best or token == NONE)
                best = uint32(key if better else best)
                token = int32(i if better else token)
        top = warp_max_u32(best)
        first = warp_min_u32(uint32(token if best == top else NONE))
        if tid & 31 == 0:
            sts_u32(uint32(sm + (tid >> 5) * 8), top)
            sts_u32(uint32(sm + (tid >> 5) * 8 + 4), first)
        sync_threads()
        if tid == 0:
            held = regs(2)
            held[0] = lds_u32(sm)
            held[1] = lds_u32(uint32(sm + 4))
            for w in unroll(1, WARPS):
                key = lds_u32(uint32(sm + 8 * w))
                other = lds_u32(uint32(sm + 8 * w + 4))
                better = key > held[0] or (key == held[0] and other < held[1])
                held[0] = uint32(key if better else held[0])
                held[1] = uint32(other if better else held[1])
            stg_u32(out + (row * SPLITS + block_index()) * 8, held[0])
            stg_u32(out + (row * SPLITS + block_index()) * 8 + 4, held[1])

    return parts


def make_finish() -> Kernel:
    """A warp a row."""

    @kernel(threads=32, grid=(MOST_ROWS,), name="argmax_finish")
    def finish(parts: s64, sequence: s64, out: s64) -> None:
        lane = int32(thread_index())
        row = int64(block_index())
        wait_for_previous_kernel()
        let_next_kernel_start()
        at = parts + (row * SPLITS + lane) * 8
        key = ldg_u32(at)
        top = warp_max_u32(key)
        token = warp_min_u32(uint32(ldg_u32(at + 4) if key == top else NONE))
        if lane == 0 and int32(ldg_u32(sequence + row * 4)) >= 0:
            stg_u32(out + row * 4, token)

    return finish


def entries(width: Width) -> list[Entry]:
    """Both launches; the vocabulary is an argument, so one pair serves every checkpoint."""
    if width.label != "v41":
        return []
    size, small = 4 * MOST_ROWS * width.spec.vocab_size, 8 * MOST_ROWS * SPLITS
    return [
        Entry("argmax.parts", make_parts, {}, width.chips, np.argmax, size, size // 4),
        Entry("argmax.finish", make_finish, {}, width.chips, np.argmax, small, small // 8),
    ]
