"""The largest k of each row's scores, exactly, lowest index among equals, as ascending indices; candidate blocks too.

    k largest of scores[row, 0 .. n)           n = what the row has of entries or mapped entries
    out int32 [rows, k], ascending; number int32 [rows] = min(k, n)

One of the k largest lies in one of the k blocks of largest best score (lowest block among equals), and these in the k
best runs of 32 entries: a block with k better ones before it holds nothing that k entries do not beat. So a row takes
three stages of at most 8 k values each, from `best32`, `best` (of blocks of 1 << block_shift) and `scores` of index.py,
however long it is: up to 2^20 entries. A stage that holds no more than is wanted is skipped. Inside a stage the k-th
largest is found by radix selection over eleven bits at a time, until all of a bin are wanted; then indices are written
in order. Scores are compared as the unsigned numbers of the same order.

    entries   candidates 0: n = (position + 1) >> shift, indices are entries
    mapped    n = what number_in blocks of candidates int32 [rows, kept] hold, less what the last has past the visible
              entries; scores stand in the candidates' order, indices are mapped to entries
    blocks    blocks_out not 0: after the entries also the blocks_kept best blocks, the newest forced in, into
              blocks_out int32 [rows, blocks_kept], ascending, and number_blocks int32 [rows] (the candidate source)

Reference: dsuf.ops.index.largest, candidate_mask. Bytes: n / 8 scores' bytes and 8 k; latency decides. A block a row.

    hand-off                       who writes   who waits    reused
    keys, histogram, bin, counts   the block    the block    next pass or stage, after its barrier
    list of a stage                the block    the block    the stage after the next
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.convert import popc
from dsuf.kernels.ptx.memory import (
    atom_add_shared,
    ldg_f32,
    ldg_u32,
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
    shuffle_up_u32,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.route import ordered
from dsuf.ops.index import largest

RUN_SHIFT, RUN = 5, 32  # entries under one value of best32
MOST_RUNS, MOST_WANTED = 32768, 2048  # values of a stage; k and blocks_kept
WARPS, AT_ONCE = 32, 4  # loads of a thread in flight
THREADS = 32 * WARPS
DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of each pass
BINS = 2048
AT_LIST = 4 * MOST_RUNS
AT_BINS = AT_LIST + 8 * MOST_WANTED
AT_COUNTS = AT_BINS + 4 * BINS  # one of each warp and round
AT_WARPS = AT_COUNTS + 4 * THREADS
AT_FOUND = AT_WARPS + 4 * WARPS
SHARED = AT_FOUND + 16


@inline
def scan_warp(value: Any, lane: Any) -> Any:
    """Sum over the lanes up to this one."""
    total = value
    for j in unroll(5):
        other = shuffle_up_u32(total, uint32(1 << j))
        total = uint32(total + (other if lane >= 1 << j else 0))
    return total


@inline
def sum_before(value: Any, sm: Any, lane: Any, warp: Any) -> Any:
    """Sum of a value over the threads before this one; two barriers."""
    upto = scan_warp(value, lane)
    if lane == 31:
        sts_u32(uint32(sm + AT_WARPS + 4 * warp), upto)
    sync_threads()
    whole = lds_u32(uint32(sm + AT_WARPS + 4 * lane))
    warps = scan_warp(whole, lane)
    before = shuffle_u32(uint32(warps - whole), uint32(warp))
    sync_threads()
    return uint32(before + upto - value)


def make() -> Kernel:
    """Nothing of it depends on a width."""

    @kernel(threads=THREADS, grid=(MOST_ROWS,), shared=SHARED, name="select_largest")
    def select(
        scores: s64, best: s64, best32: s64, capacity: s64, sequence: s64, position: s64, shift: s32, block_shift: s32,
        candidates: s64, kept: s32, number_in: s64, out: s64, number: s64, k: s32, blocks_out: s64, blocks_kept: s32,
        number_blocks: s64,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        row = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        active = int32(ldg_u32(sequence + row * 4)) >= 0
        n = int32(0)
        block = int32(int32(1) << block_shift)
        if active:
            n = int32((int32(ldg_u32(position + row * 4)) + 1) >> shift)
            if candidates != 0:
                used = int32(ldg_u32(number_in + row * 4))
                newest = int32(ldg_u32(candidates + (row * kept + max(used - 1, 0)) * 4))
                n = int32(max(used - 1, 0) * block + min(n - newest * block, block) * min(used, 1))
        held = int32(0)  # in the list of the stage before
        for stage in range(5 if blocks_out != 0 else 3):
            # what this stage chooses from: `total` values at `values`, of which the list's runs or blocks hold m
            level = int32(stage if stage < 3 else stage - 3)
            fan = int32(0)
            values = best32 + row * (capacity >> RUN_SHIFT) * 4
            total = int32((n + RUN - 1) >> RUN_SHIFT)
            if level == 1:
                fan = int32(RUN_SHIFT - block_shift)
                values = best + row * (capacity >> block_shift) * 4
                total = int32((n + block - 1) >> block_shift)
            if level == 2:
                fan = int32(block_shift)
                values = scores + row * capacity * 4
                total = n
            wanted = int32(k if stage < 3 else blocks_kept)
            forced = int32(total - 1 if stage >= 3 else -1)
            last = stage == 2 or stage == 4
            before = uint32(sm + AT_LIST + (stage + 1 & 1) * (4 * MOST_WANTED))
            after = uint32(sm + AT_LIST + (stage & 1) * (4 * MOST_WANTED))
            m = total
            if level > 0:
                m = int32(0)
                if held > 0:
                    newest = int32(lds_u32(uint32(before + 4 * (held - 1))))
                    m = int32((held - 1 << fan) + min(total - (newest << fan), int32(1) << fan))
            prefix = uint32(0)
            low = int32(32)  # bits of a key that are not compared: all of them if all are wanted
            equal = int32(0)
            if m > wanted:
                for i in range(tid, BINS, THREADS):
                    sts_u32(uint32(sm + AT_BINS + 4 * i), uint32(0))
                sync_threads()
                for start in range(tid, m, AT_ONCE * THREADS):
                    keys = regs(AT_ONCE)
                    for j in unroll(AT_ONCE):
                        i = int32(min(start + j * THREADS, m - 1))
                        at = i
                        if level > 0:
                            at = int32((int32(lds_u32(uint32(before + 4 * (i >> fan)))) << fan) + (i & (1 << fan) - 1))
                        key = ordered(ldg_f32(values + int64(at) * 4))
                        keys[j] = uint32(0xFFFFFFFF if at == forced else key)
                    for j in unroll(AT_ONCE):
                        i = int32(start + j * THREADS)
                        if i < m:
                            sts_u32(uint32(sm + 4 * i), keys[j])
                            atom_add_shared(uint32(sm + AT_BINS + (keys[j] >> DIGITS[0][0]) * 4), uint32(1))
                equal = wanted
                for step in unroll(3):
                    if low > 0:
                        if step > 0:
                            for i in range(tid, BINS, THREADS):
                                sts_u32(uint32(sm + AT_BINS + 4 * i), uint32(0))
                            sync_threads()
                            for i in range(tid, m, THREADS):
                                key = lds_u32(uint32(sm + 4 * i))
                                if key >> DIGITS[step - 1][0] == prefix:
                                    digit = uint32(key >> DIGITS[step][0] & (1 << DIGITS[step][1]) - 1)
                                    atom_add_shared(uint32(sm + AT_BINS + digit * 4), uint32(1))
                        sync_threads()
                        # thread i holds bins 2047 - 2i and 2046 - 2i: from the top down
                        upper = lds_u32(uint32(sm + AT_BINS + 4 * (BINS - 1 - 2 * tid)))
                        lower = lds_u32(uint32(sm + AT_BINS + 4 * (BINS - 2 - 2 * tid)))
                        above = int32(sum_before(uint32(upper + lower), sm, lane, warp))
                        for j in unroll(2):
                            mine = int32(upper if j == 0 else lower)
                            if above < equal and above + mine >= equal:
                                sts_u32(uint32(sm + AT_FOUND), uint32(BINS - 1 - 2 * tid - j))
                                sts_u32(uint32(sm + AT_FOUND + 4), uint32(equal - above))
                                sts_u32(uint32(sm + AT_FOUND + 8), uint32(mine))
                            above = int32(above + mine)
                        sync_threads()
                        prefix = uint32(prefix << DIGITS[step][1] | lds_u32(uint32(sm + AT_FOUND)))
                        equal = int32(lds_u32(uint32(sm + AT_FOUND + 4)))
                        low = int32(DIGITS[step][0])
                        if int32(lds_u32(uint32(sm + AT_FOUND + 8))) == equal:
                            low = int32(-low)  # all of the bin are wanted
                        sync_threads()
                low = int32(max(low, -low))
                # counts of each warp in each round of 1024: those above, and those that equal it
                for start in range(0, m, THREADS):
                    i = int32(start + tid)
                    key = uint32(0)
                    if i < m:
                        key = uint32(lds_u32(uint32(sm + 4 * i)) >> low)
                    is_above = ballot(uint32(1 if i < m and key > prefix else 0))
                    is_equal = ballot(uint32(1 if i < m and key == prefix else 0))
                    if lane == 0:
                        sts_u32(
                            uint32(sm + AT_COUNTS + ((start >> 5) + warp) * 4),
                            uint32(popc(is_above) << 16 | popc(is_equal)),
                        )
                sync_threads()
                count = uint32(0)
                if tid < (m + THREADS - 1) // THREADS * WARPS:
                    count = lds_u32(uint32(sm + AT_COUNTS + 4 * tid))
                count = sum_before(count, sm, lane, warp)
                sts_u32(uint32(sm + AT_COUNTS + 4 * tid), count)
                sync_threads()
            for start in range(0, m, THREADS):
                i = int32(start + tid)
                taken = i < m
                place = i
                if m > wanted:
                    key = uint32(0)
                    if i < m:
                        key = uint32(lds_u32(uint32(sm + 4 * i)) >> low)
                    is_above = ballot(uint32(1 if i < m and key > prefix else 0))
                    is_equal = ballot(uint32(1 if i < m and key == prefix else 0))
                    count = lds_u32(uint32(sm + AT_COUNTS + ((start >> 5) + warp) * 4))
                    below = uint32((uint32(1) << lane) - 1)
                    equal_before = int32(int32(count & 0xFFFF) + int32(popc(is_equal & below)))
                    above_before = int32(int32(count >> 16) + int32(popc(is_above & below)))
                    place = int32(above_before + min(equal_before, equal))
                    taken = i < m and (key > prefix or (key == prefix and equal_before < equal))
                if taken:
                    at = i
                    if level > 0:
                        at = int32((int32(lds_u32(uint32(before + 4 * (i >> fan)))) << fan) + (i & (1 << fan) - 1))
                    if stage == 4:
                        stg_u32(blocks_out + (row * blocks_kept + place) * 4, uint32(at))
                    if stage == 2:
                        if candidates != 0:
                            entry = int32(ldg_u32(candidates + (row * kept + (at >> block_shift)) * 4))
                            at = int32((entry << block_shift) + (at & block - 1))
                        stg_u32(out + (row * k + place) * 4, uint32(at))
                    if not last:
                        sts_u32(uint32(after + 4 * place), uint32(at))
            held = int32(min(m, wanted))
            if tid == 0 and last:
                if stage == 2:
                    stg_u32(number + row * 4, uint32(held))
                else:
                    stg_u32(number_blocks + row * 4, uint32(held))
            sync_threads()

    return select


def entries(width: Width) -> list[Entry]:
    """One kernel for entries, mapped entries and candidate blocks of every width."""
    if width.label != "v41":
        return []
    ahead = 16384  # scores that the floor is stated for
    return [Entry("select", make, {}, width.chips, largest, 4 * ahead, 5 * ahead)]
