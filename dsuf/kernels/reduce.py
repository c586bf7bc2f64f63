"""What several ranks make together, in two launches: push one's part to every rank, then join what all have pushed.

    push          inbox of rank p [parity, own rank] = part, for every p;  then its flag = epoch, released to the system
    push_experts  the same with part = bf16(sum of a row's slots whose expert is the rank's own, ascending, float32)
    join          waits for the flags of all ranks;  out = bf16(sum of the parts in rank order, float32), alike on all
    join_rows     waits too;  out[row] = the parts' rows beside each other in rank order

part, out of join bf16 [elements], a multiple of 8 up to `room`. push_experts: parts bf16 [rows * k, D], experts int32
[rows, k], own first .. first + own - 1. join_rows: parts float32 [rows, mine], out float32 [rows, ranks * mine], mine a
multiple of 4; to push and join_rows a float32 is two elements.

An inbox (inbox_bytes) holds flags uint32 [2, ranks, MOST_BLOCKS], then parts [2, ranks, room]; it lies in its rank's
memory, mapped by the others, zeroed once. epochs uint32 [MOST_BLOCKS] is local and zeroed once: each block counts its
own joins, so that a captured graph needs no number from the host. Block b of every launch moves the same stretch, so
only blocks b of the ranks wait for each other; the grid must be the same everywhere and always, so that all blocks
agree about the parity. Two parities suffice: a rank pushes epoch e + 2 after it joined e + 1, for which every other
rank has pushed e + 1, that is, has joined e.

A join that waits longer than bound_us writes (code << 8 | rank + 1) of the rank it misses to the fault word and ends;
its output then means nothing. Reference: numpy.sum over ranks. Bytes: 2 elements out and in for every rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
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

THREADS, MOST_BLOCKS, MOST_RANKS = 256, 264, 8
FEW_BLOCKS = 64  # as measured for up to 48 rows of 5,120: 7.5 us with them between two H200
PIECE = 8  # elements of 16 bytes
MOST_SLOTS = 8  # routed experts of a row


def flag_bytes(ranks: int) -> int:
    """Bytes of the flags at the start of an inbox."""
    return 2 * ranks * MOST_BLOCKS * 4


def inbox_bytes(ranks: int, room: int) -> int:
    """Bytes of a rank's inbox for parts of up to `room` elements."""
    return flag_bytes(ranks) + 2 * ranks * room * 2


@inline
def stretch_of(pieces: Any) -> Any:
    """(first, end) of what this block moves."""
    share = int32((pieces + block_count() - 1) // block_count())
    first = int32(block_index() * share)
    return first, int32(min(first + share, pieces))


@inline
def next_part(epochs: Any, block: Any, rank: Any, ranks: Any, room: Any) -> Any:
    """A block's next exchange: its epoch, the place of a rank's flags, and where in an inbox the rank's part begins."""
    epoch = uint32(ldg_u32(epochs + block * 4) + 1)
    place = int64(epoch & 1) * ranks + rank
    return epoch, place, int64(ranks) * (2 * MOST_BLOCKS * 4) + place * room * 2


@inline
def send(inbox: Any, at: Any, ranks: Any, piece: Any) -> None:
    """16 bytes to every rank."""
    for r in unroll(MOST_RANKS):
        if r < ranks:
            stg_u32x4(inbox[r] + at, piece)


@inline
def raise_flags(inbox: Any, flag: Any, ranks: Any, epoch: Any, tid: Any) -> None:
    """Tell every rank that this block's stretch is there; the whole block has sent it."""
    sync_threads()
    for r in unroll(MOST_RANKS):
        if tid == r and r < ranks:
            st_release_sys(inbox[r] + flag, epoch)


@inline
def wait_for_flags(
    inbox: Any, place: Any, ranks: Any, epoch: Any, bound_us: Any, fault: Any, code: Any, tid: Any
) -> None:
    """Until this block's stretch has come from every rank, or too late; place: parity * ranks."""
    if tid < 32:  # lane r watches rank r; lanes without a rank watch the first
        watched = int32(tid if tid < ranks else 0)
        flag = inbox + ((place + watched) * MOST_BLOCKS + block_index()) * 4
        started = int64(global_timer())
        bound = int64(bound_us) * 1000
        while ld_acquire_sys(flag) != epoch and int64(global_timer()) - started < bound:
            pass
        sync_warp()
        if tid < ranks and ld_acquire_sys(flag) != epoch:
            stg_u32(fault, uint32(code << 8 | (tid + 1)))
    sync_threads()


def blocks_of(room: int) -> int:
    """Grid of an exchange of up to `room` elements: a piece a thread while that takes few blocks, four where it takes
    many more.
    """
    few, many = (-(-room // (pieces * PIECE * THREADS)) for pieces in (1, 4))
    return min(few, max(FEW_BLOCKS, min(many, MOST_BLOCKS)))


def make_push() -> Kernel:
    """grid (blocks,), up to MOST_BLOCKS; inboxes of ranks that do not exist are 0."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_push")
    def push(
        part: s64, epochs: s64, rank: s32, ranks: s32, elements: s32, room: s32, inbox0: s64, inbox1: s64, inbox2: s64,
        inbox3: s64, inbox4: s64, inbox5: s64, inbox6: s64, inbox7: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        first, end = stretch_of(int32(elements // PIECE))
        inbox = regs(MOST_RANKS)
        inbox[0:MOST_RANKS] = (inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7)
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch, place, data = next_part(epochs, block, rank, ranks, room)
        for i in range(first + tid, end, THREADS):
            piece = ldg_u32x4(part + int64(i) * 16)
            send(inbox, data + int64(i) * 16, ranks, piece)
        raise_flags(inbox, (place * MOST_BLOCKS + block) * 4, ranks, epoch, tid)

    return push


def make_push_experts() -> Kernel:
    """The same grid as the joins; k up to MOST_SLOTS."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_push_experts")
    def push_experts(
        parts: s64, experts: s64, first_own: s32, own: s32, k: s32, d: s32, epochs: s64, rank: s32, ranks: s32,
        elements: s32, room: s32, inbox0: s64, inbox1: s64, inbox2: s64, inbox3: s64, inbox4: s64, inbox5: s64,
        inbox6: s64, inbox7: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        first, end = stretch_of(int32(elements // PIECE))
        inbox = regs(MOST_RANKS)
        inbox[0:MOST_RANKS] = (inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7)
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch, place, data = next_part(epochs, block, rank, ranks, room)
        of_row = int32(d // PIECE)
        for i in range(first + tid, end, THREADS):
            row = int32(i // of_row)
            column = int64(i - row * of_row) * PIECE
            number = regs(MOST_SLOTS)
            for j in unroll(MOST_SLOTS):
                number[j] = int32(ldg_u32(experts + (int64(row) * k + min(j, k - 1)) * 4)) - first_own
            s = regs(PIECE, 0.0)
            for j in unroll(MOST_SLOTS):
                if j < k and number[j] >= 0 and number[j] < own:
                    w = ldg_u32x4(parts + ((int64(row) * k + j) * d + column) * 2)
                    add_piece(s, w)
            word = regs(4)
            pack_piece(word, s)
            send(inbox, data + int64(i) * 16, ranks, word[0:4])
        raise_flags(inbox, (place * MOST_BLOCKS + block) * 4, ranks, epoch, tid)

    return push_experts


@inline
def add_piece(s: Any, w: Any) -> None:
    """Eight sums += eight bf16 in four words."""
    for j in unroll(4):
        s[2 * j] = s[2 * j] + bf16_low(w[j])
        s[2 * j + 1] = s[2 * j + 1] + bf16_high(w[j])


@inline
def pack_piece(word: Any, s: Any) -> None:
    """Eight sums as bf16 in four words."""
    for j in unroll(4):
        word[j] = bf16x2(s[2 * j + 1], s[2 * j])


def make_join() -> Kernel:
    """The same grid as the pushes."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_join")
    def join(
        inbox: s64, epochs: s64, out: s64, fault: s64, ranks: s32, elements: s32, room: s32, bound_us: s32, code: s32
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        first, end = stretch_of(int32(elements // PIECE))
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch, place, data = next_part(epochs, block, 0, ranks, room)
        wait_for_flags(inbox, place, ranks, epoch, bound_us, fault, code, tid)
        data = inbox + data
        for i in range(first + tid, end, THREADS):
            s = regs(PIECE, 0.0)
            for r in range(ranks):
                w = ldg_u32x4(data + (int64(r) * room + int64(i) * PIECE) * 2)
                add_piece(s, w)
            word = regs(4)
            pack_piece(word, s)
            stg_u32x4(out + int64(i) * 16, word)
        if tid == 0:
            stg_u32(epochs + block * 4, epoch)

    return join


def make_join_rows() -> Kernel:
    """The same grid as the pushes."""

    @kernel(threads=THREADS, grid=(MOST_BLOCKS,), name="reduce_join_rows")
    def join_rows(
        inbox: s64, epochs: s64, out: s64, fault: s64, ranks: s32, elements: s32, room: s32, mine: s32, bound_us: s32,
        code: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        block = int64(block_index())
        first, end = stretch_of(int32(elements // PIECE))
        of_row = int32(mine // 4)
        wait_for_previous_kernel()
        let_next_kernel_start()
        epoch, place, data = next_part(epochs, block, 0, ranks, room)
        wait_for_flags(inbox, place, ranks, epoch, bound_us, fault, code, tid)
        data = inbox + data
        for i in range(first + tid, end, THREADS):
            row = int32(i // of_row)
            column = int64(i - row * of_row) * 4
            for r in range(ranks):
                w = ldg_u32x4(data + (int64(r) * room + int64(i) * PIECE) * 2)
                stg_u32x4(out + ((int64(row) * ranks + r) * mine + column) * 4, w)
        if tid == 0:
            stg_u32(epochs + block * 4, epoch)

    return join_rows


def entries(width: Width) -> list[Entry]:
    """One of each for every size and number of ranks; the floors are those of six rows of two ranks."""
    if width.label != "v41":
        return []
    spec, k = width.spec, width.spec.num_experts_per_tok
    size, logits = 2 * 6 * spec.hidden_size, 4 * 6 * spec.vocab_size
    return [
        Entry("reduce.push", make_push, {}, width.chips, np.copyto, 2 * size, 0),
        Entry("reduce.push_experts", make_push_experts, {}, width.chips, np.sum, (k // 2 + 1) * size, k * size),
        Entry("reduce.join", make_join, {}, width.chips, np.sum, 2 * size, size),
        Entry("reduce.join_rows", make_join_rows, {}, width.chips, np.concatenate, 2 * logits, 0),
    ]
