"""The largest k of each row's scores for the many rows of a prefill chunk, exactly, in one reading of the scores.

    k largest of scores[row, 0 .. n), lowest index among equals, n = (position + 1) / ratio
    out int32 [rows, k], ascending; number int32 [rows] = min(k, n)

The same selection as select.py's `entries`. scores float32 [rows, pitch], pitch a multiple of 4. Reference:
dsuf.ops.index.largest. Bytes: 4 a score, from L2 or memory.

A block makes one row. It reads its scores in rounds and keeps those above `threshold`, the k-th largest seen when the
kept ones last filled their room; later equals lose to earlier ones, so they need not be kept. When the next round might
not fit, the k best stay: their smallest is found bit by bit, every thread counting among the eight that it holds in
registers, and among equals of it the lowest indices. k is at most 512; the last k are sorted by index.

    hand-off                 who writes        who waits        reused
    kept keys and indices    the block         the block        compacted in place after a barrier
    counts of warps          each warp         the block        two sets in turn, a barrier between uses
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import popc
from dsuf.kernels.ptx.memory import (
    atom_add_shared,
    ldg_u32,
    ldg_u32x4,
    lds_u32,
    shared_base,
    stg_u32,
    sts_u32,
)
from dsuf.kernels.ptx.sync import (
    ballot,
    block_index,
    let_next_kernel_start,
    shuffle_u32,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
    warp_sum_u32,
)
from dsuf.ops.index import largest

THREADS, WARPS = 512, 16
ROUND = 4 * THREADS  # scores read at once
HELD = 8  # kept scores of a thread
ROOM = HELD * THREADS
MOST = 512  # k
AT_INDICES, AT_COUNTS = 4 * ROOM, 8 * ROOM
AT_NUMBER = AT_COUNTS + 4 * 2 * WARPS
SHARED = AT_NUMBER + 16
LAST = 0xFFFFFFFF


@inline
def ordered_bits(b: Any) -> Any:
    """float32 bits as an unsigned number with the same order."""
    return uint32(b ^ (0x80000000 if b < 0x80000000 else 0xFFFFFFFF))


@inline
def block_sum(mine: Any, at: Any, warp: Any, lane: Any) -> Any:
    """Sum of a number over the block; `at` is a place of WARPS words that nobody reads before the barrier in here."""
    total = warp_sum_u32(uint32(mine))
    if lane == 0:
        sts_u32(uint32(at + 4 * warp), total)
    sync_threads()
    return warp_sum_u32(lds_u32(uint32(at + 4 * (lane & (WARPS - 1))))) >> 1


@inline
def keep(flag: Any, key: Any, index: Any, sm: Any, lane: Any) -> None:
    """Append (key, index) of the lanes whose flag is 1."""
    votes = ballot(uint32(flag))
    if votes != 0:
        base = uint32(0)
        if lane == 0:
            base = atom_add_shared(uint32(sm + AT_NUMBER), popc(votes))
        base = shuffle_u32(base, uint32(0))
        if flag == 1:
            at = uint32(base + popc(uint32(votes & ((uint32(1) << lane) - 1))))
            sts_u32(uint32(sm + 4 * at), key)
            sts_u32(uint32(sm + AT_INDICES + 4 * at), uint32(index))


@inline
def keep_largest(word: Any, index: Any, n: Any, threshold: Any, sm: Any, lane: Any) -> None:
    """Append those of four neighbouring scores that are above the threshold."""
    key = regs(4)
    hits = uint32(0)
    for j in unroll(4):
        key[j] = ordered_bits(word[j])
        good = index + j < n and key[j] > threshold
        hits = uint32(hits | ((1 << j) if good else 0))
    if ballot(hits) != 0:
        for j in unroll(4):
            keep(int32(hits >> j & 1), key[j], int32(index + j), sm, lane)


@inline
def load_kept(mine: Any, at: Any, held: Any, counts: Any, sm: Any, tid: Any, warp: Any, lane: Any) -> Any:
    """A thread's kept keys into `mine`, their indices into `at` (0 and LAST: none); least and largest of all keys."""
    low = uint32(LAST)
    high = uint32(0)
    for i in unroll(HELD):
        place = int32(i * THREADS + tid)
        mine[i] = uint32(0)
        at[i] = uint32(LAST)
        if place < held:
            mine[i] = lds_u32(uint32(sm + 4 * place))
            at[i] = lds_u32(uint32(sm + AT_INDICES + 4 * place))
            low = uint32(min(low, mine[i]))
            high = uint32(max(high, mine[i]))
    low = warp_min_u32(low)
    high = warp_max_u32(high)
    if lane == 0:
        sts_u32(uint32(counts + 4 * warp), low)
        sts_u32(uint32(counts + 4 * (WARPS + warp)), high)
    sync_threads()
    low = warp_min_u32(lds_u32(uint32(counts + 4 * (lane & (WARPS - 1)))))
    high = warp_max_u32(lds_u32(uint32(counts + 4 * (WARPS + (lane & (WARPS - 1))))))
    sync_threads()
    return low, high


@inline
def kth_key(mine: Any, least: Any, largest_key: Any, k: Any, counts: Any, warp: Any, lane: Any) -> Any:
    """The k-th largest kept key, and which set of counts comes next."""
    low = least
    high = largest_key
    turn = int32(0)
    while low < high:  # at least k keys are >= low, fewer than k are >= high + 1
        middle = uint32(low + ((high - low) >> 1) + 1)
        here = int32(0)
        for i in unroll(HELD):
            here = int32(here + (1 if mine[i] >= middle else 0))
        total = block_sum(here, uint32(counts + turn * (4 * WARPS)), warp, lane)
        turn = int32(turn ^ 1)
        low = uint32(middle if total >= k else low)
        high = uint32(high if total >= k else middle - 1)
    return low, turn


@inline
def last_index(mine: Any, at: Any, threshold: Any, k: Any, side: Any, counts: Any, warp: Any, lane: Any) -> Any:
    """The largest index that may stay among the keys equal to the threshold: the lowest that make up k do."""
    above = int32(0)
    equal = int32(0)
    for i in unroll(HELD):
        above = int32(above + (1 if mine[i] > threshold else 0))
        equal = int32(equal + (1 if mine[i] == threshold and at[i] != LAST else 0))
    turn = side
    both = block_sum(int32(above << 16 | equal), uint32(counts + turn * (4 * WARPS)), warp, lane)
    turn = int32(turn ^ 1)
    wanted = int32(k - (both >> 16))  # of the equal ones
    first = uint32(0)
    final = uint32(LAST - 1)
    while int32(both & 0xFFFF) > wanted and first < final:
        middle = uint32(first + ((final - first) >> 1))
        here = int32(0)
        for i in unroll(HELD):
            here = int32(here + (1 if mine[i] == threshold and at[i] <= middle else 0))
        total = block_sum(here, uint32(counts + turn * (4 * WARPS)), warp, lane)
        turn = int32(turn ^ 1)
        final = uint32(middle if total >= wanted else final)
        first = uint32(first if total >= wanted else middle + 1)
    return final


@inline
def keep_only(mine: Any, at: Any, threshold: Any, final: Any, sm: Any, tid: Any, lane: Any) -> None:
    """What is kept is now the keys above the threshold and those equal to it with an index up to `final`."""
    sync_threads()
    if tid == 0:
        sts_u32(uint32(sm + AT_NUMBER), uint32(0))
    sync_threads()
    for i in unroll(HELD):
        stays = mine[i] > threshold or (mine[i] == threshold and at[i] <= final)
        keep(int32(1 if stays and at[i] != LAST else 0), mine[i], at[i], sm, lane)
    sync_threads()


@inline
def write_sorted(out: Any, k: Any, sm: Any, tid: Any) -> None:
    """The k kept indices in ascending order."""
    index = uint32(LAST)
    if tid < k:
        index = lds_u32(uint32(sm + AT_INDICES + 4 * tid))
    place = int32(0)
    for i in range(k):
        place = int32(place + (1 if lds_u32(uint32(sm + AT_INDICES + 4 * i)) < index else 0))
    if tid < k:
        stg_u32(out + int64(place) * 4, index)


def make() -> Kernel:
    """k and the ratio are arguments, so one kernel serves every width."""

    @kernel(threads=THREADS, grid=(4096,), shared=SHARED, name="chunk_select")
    def select(
        scores: s64, pitch: s64, position: s64, ratio: s32, out: s64, number: s64, k: s32
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        row = int64(block_index())
        sm = shared_base()
        counts = uint32(sm + AT_COUNTS)
        wait_for_previous_kernel()
        let_next_kernel_start()
        n = int32((int32(ldg_u32(position + row * 4)) + 1) // ratio)
        line = scores + row * pitch * 4
        if tid == 0:
            stg_u32(number + row * 4, uint32(min(n, k)))
            sts_u32(uint32(sm + AT_NUMBER), uint32(0))
        if n <= k:
            for i in range(tid, n, THREADS):
                stg_u32(out + (row * k + i) * 4, uint32(i))
        else:
            sync_threads()
            threshold = uint32(0)
            rounds = int32((n + ROUND - 1) // ROUND)
            following = regs(4, uint32(0))
            if 4 * tid < n:
                following = ldg_u32x4(line + int64(tid) * 16)
            for r in range(rounds):
                word = regs(4)
                word = following
                index = int32(r * ROUND + 4 * tid)
                if index + ROUND < n:
                    following = ldg_u32x4(line + int64(index + ROUND) * 4)
                keep_largest(word, index, n, threshold, sm, lane)
                sync_threads()
                held = int32(lds_u32(uint32(sm + AT_NUMBER)))
                sync_threads()  # all threads take the same branch: nobody adds before everybody has read
                if held > ROOM - ROUND or r == rounds - 1:
                    mine = regs(HELD)
                    at = regs(HELD)
                    least, most = load_kept(mine, at, held, counts, sm, tid, warp, lane)
                    threshold, turn = kth_key(mine, least, most, k, counts, warp, lane)
                    final = last_index(mine, at, threshold, k, turn, counts, warp, lane)
                    keep_only(mine, at, threshold, final, sm, tid, lane)
            write_sorted(out + row * k * 4, k, sm, tid)

    return select


def entries(width: Width) -> list[Entry]:
    """One kernel for every width."""
    if width.label != "v41":
        return []
    rows, ahead = 1024, 16384  # that the floor is stated for
    return [Entry("chunk.select", make, {}, width.chips, largest, 4 * rows * ahead, rows * ahead)]
