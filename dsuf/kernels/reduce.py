"""Sums over ranks in two launches: push one's part to every rank, then join what all have pushed, the same on each.

    push    inbox of rank p [parity, own rank] = part, for every p;  then its flag = epoch, release at system scope
    join    waits for the flags of all ranks;  out = bf16(sum of the parts in rank order, float32)

part, out bf16 [elements], elements a multiple of 8. An inbox (inbox_bytes) holds flags uint32 [2, ranks, MOST_BLOCKS],
then parts [2, ranks, elements]; it lies in its rank's memory, mapped by the others, zeroed once. epochs uint32
[MOST_BLOCKS] is local and zeroed once: each block counts its own joins, so that a captured graph needs no number from
the host. Block b of every launch moves the same stretch, so only blocks b of the ranks wait for each other, and the
grid must be the same everywhere. Two parities suffice: a rank pushes epoch e + 2 after it joined e + 1, for which every
other rank has pushed e + 1, that is, has joined e.

A join that waits longer than bound_us writes (code << 8 | rank + 1) of the rank it misses to the fault word and ends;
its output then means nothing. Reference: numpy.sum over ranks. Bytes: 2 elements out and in for every rank.
"""

from __future__ import annotations

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import bf16_high, bf16_low, bf16x2
from dsuf.kernels.ptx.memory import (
    ld_acquire_sys,
    ldg_u32,
    ldg_u32x4,
    st_release_sys,
    stg_u32,
    stg_u32x4,
)
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    global_timer,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)

THREADS, MOST_BLOCKS, MOST_RANKS = 256, 64, 8
PIECE = 8  # elements of 16 bytes


def flag_bytes(ranks: int) -> int:
    """Bytes of the flags at the start of an inbox."""
    return 2 * ranks * MOST_BLOCKS * 4


def inbox_bytes(ranks: int, elements: int) -> int:
    """Bytes of a rank's inbox for sums of up to `elements`."""
    return flag_bytes(ranks) + 2 * ranks * elements * 2


def make_push() -> Kernel:
    """grid (blocks,), up to MOST_BLOCKS; inboxes of ranks that do not exist are 0."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_push")
    def push(
        part: s64, epochs: s64, rank: s32, ranks: s32, elements: s32, inbox0: s64, inbox1: s64, inbox2: s64,
        inbox3: s64, inbox4: s64, inbox5: s64, inbox6: s64, inbox7: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        pieces = int32(elements // PIECE)
        share = int32((pieces + block_count() - 1) // block_count())
        first = int32(block_index() * share)
        end = int32(min(first + share, pieces))
        inbox = regs(MOST_RANKS)
        inbox[0] = inbox0
        inbox[1] = inbox1
        inbox[2] = inbox2
        inbox[3] = inbox3
        inbox[4] = inbox4
        inbox[5] = inbox5
        inbox[6] = inbox6
        inbox[7] = inbox7
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch = uint32(ldg_u32(epochs + block * 4) + 1)
        place = int64(epoch & 1) * ranks + rank
        data = int64(ranks) * (2 * MOST_BLOCKS * 4) + place * elements * 2
        for i in range(first + tid, end, THREADS):
            piece = ldg_u32x4(part + int64(i) * 16)
            for r in unroll(MOST_RANKS):
                if r < ranks:
                    stg_u32x4(inbox[r] + data + int64(i) * 16, piece)
        sync_threads()
        flag = (place * MOST_BLOCKS + block) * 4
        for r in unroll(MOST_RANKS):
            if tid == r and r < ranks:
                st_release_sys(inbox[r] + flag, epoch)

    return push


def make_join() -> Kernel:
    """The same grid as the pushes."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_join")
    def join(
        inbox: s64, epochs: s64, out: s64, fault: s64, ranks: s32, elements: s32, bound_us: s32, code: s32
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        pieces = int32(elements // PIECE)
        share = int32((pieces + block_count() - 1) // block_count())
        first = int32(block_index() * share)
        end = int32(min(first + share, pieces))
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch = uint32(ldg_u32(epochs + block * 4) + 1)
        place = int64(epoch & 1) * ranks
        if tid < 32:  # lane r watches rank r; lanes without a rank watch the first
            watched = int32(tid if tid < ranks else 0)
            flag = inbox + ((place + watched) * MOST_BLOCKS + block) * 4
            started = int64(global_timer())
            bound = int64(bound_us) * 1000
            while ld_acquire_sys(flag) != epoch and int64(global_timer()) - started < bound:
                pass
            sync_warp()
            if tid < ranks and ld_acquire_sys(flag) != epoch:
                stg_u32(fault, uint32(code << 8 | (tid + 1)))
        sync_threads()
        data = inbox + int64(ranks) * (2 * MOST_BLOCKS * 4) + place * elements * 2
        for i in range(first + tid, end, THREADS):
            s = regs(PIECE, 0.0)
            for r in range(ranks):
                piece = ldg_u32x4(data + (int64(r) * elements + int64(i) * PIECE) * 2)
                for j in unroll(4):
                    s[2 * j] = s[2 * j] + bf16_low(piece[j])
                    s[2 * j + 1] = s[2 * j + 1] + bf16_high(piece[j])
            word = regs(4)
            for j in unroll(4):
                word[j] = bf16x2(s[2 * j + 1], s[2 * j])
            stg_u32x4(out + int64(i) * 16, word)
        if tid == 0:
            stg_u32(epochs + block * 4, epoch)

    return join


def entries(width: Width) -> list[Entry]:
    """One pair for every size and number of ranks."""
    if width.label != "v41":
        return []
    size = 2 * 6 * width.spec.hidden_size  # of six rows
    return [
        Entry("reduce.push", make_push, {}, width.chips, np.copyto, 2 * size, 0),
        Entry("reduce.join", make_join, {}, width.chips, np.sum, 2 * size, size),
    ]
