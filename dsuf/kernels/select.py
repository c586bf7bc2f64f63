"""The largest k of each row's scores, exactly, lowest index among equals, as ascending indices; candidate blocks too.

    k largest of scores[row, 0 .. n)           n = what the row has of entries or mapped entries
    out int32 [rows, k], ascending; number int32 [rows] = min(k, n)

One of the k largest lies in one of the k blocks of largest best score (lowest block among equals), and these in the k
best runs of 32 entries: a block with k better ones before it holds nothing that k entries do not beat. So a long row
takes three stages, over `best32`, `best` (of blocks of 1 << block_shift) and `scores` of index.py, the later ones of
8 k values at most: up to 2^20 entries. A row that is short enough goes to its scores at once.

Inside a stage the k-th largest is found by radix selection, eleven bits at a time, over the span from the least to the
largest value, until all of a bin are wanted; then indices are written in order. No value under the k-th largest of the
stage before can be among the largest of the next, so its span starts there. Values are compared as the unsigned numbers
of the same order.

    entries   candidates 0: n = (position + 1) >> shift, indices are entries
    mapped    n = what number_in blocks of candidates int32 [rows, kept] hold, less what the last has past the visible
              entries; scores stand in the candidates' order, indices are mapped to entries
    blocks    blocks_out not 0: after the entries also the blocks_kept best blocks, the newest forced in, into
              blocks_out int32 [rows, blocks_kept], ascending, and number_blocks int32 [rows] (the candidate source)

Reference: dsuf.ops.index.largest, candidate_mask. Bytes: n / 8 values and 8 k; latency decides, and with it how many
instructions a thread has beside its values: 256 threads a row take less time than 1,024.

    hand-off                       who writes   who waits    reused
    keys, bins, spans, found       the block    the block    next pass or stage, after its barrier
    list of a stage                the block    the block    the stage after the next
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, s32, s64, uint32, unroll
from dsuf.kernels.latents import MOST_ROWS
from dsuf.kernels.ptx.memory import ldg_u32, lds_u32, lds_u32x4, shared_base, stg_u32, sts_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.radix import (
    AT_LIST,
    MOST_WANTED,
    SHARED,
    THREADS,
    clear_bins,
    kth_largest,
    load_keys,
    place_in_list,
    span_of_block,
    sum_before,
)
from dsuf.ops.index import largest

RUN_SHIFT, RUN = 5, 32  # entries under one value of best32
DIRECT = 6144  # values that are looked at without a stage before


@inline
def taken_before(from_here: Any, to_here: Any, bound: Any, span_shift: Any, sm: Any, lane: Any, warp: Any) -> Any:
    """How many keys above the last bin, and how many in it, the threads before this one hold."""
    above = int32(0)
    here = int32(0)
    for i in range(from_here, to_here, 4):
        four = lds_u32x4(uint32(sm + 4 * i))
        for e in unroll(4):
            at_least = four[e] >= bound
            in_bin = at_least and (uint32(four[e] - bound) >> span_shift) == 0
            here = int32(here + (1 if in_bin else 0))
            above = int32(above + (1 if at_least and not in_bin else 0))
    both = sum_before(uint32(above << 16 | here), sm, lane, warp)
    return int32(both >> 16), int32(both & 0xFFFF)


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
        owner = int32(ldg_u32(sequence + row * 4))
        place = int32(ldg_u32(position + row * 4))
        n = int32((place + 1) >> shift if owner >= 0 else 0)
        block = int32(int32(1) << block_shift)
        if candidates != 0 and owner >= 0:
            used = int32(ldg_u32(number_in + row * 4))
            newest = int32(ldg_u32(candidates + (row * kept + max(used - 1, 0)) * 4))
            n = int32(max(used - 1, 0) * block + min(n - newest * block, block) * min(used, 1))
        held = int32(0)  # in the list of the stage before; 0: there was none
        bound = uint32(1)  # no smaller key is among the largest
        runs = int32((n + RUN - 1) >> RUN_SHIFT)
        blocks = int32((n + block - 1) >> block_shift)
        stages = int32(5 if blocks_out != 0 else 3)
        stage = int32(2 if n <= DIRECT else 1)
        stage = int32(0 if n > DIRECT and runs > k else stage)
        while stage < stages:
            # what this stage chooses from: `total` values at `values`, of which the list's runs or blocks hold m
            level = int32(stage if stage < 3 else stage - 3)
            wanted = int32(k if stage < 3 else blocks_kept)
            values = best32 + row * (capacity >> RUN_SHIFT) * 4
            total = runs
            fan = int32(0)
            if level == 1:
                fan = int32(RUN_SHIFT - block_shift)
                values = best + row * (capacity >> block_shift) * 4
                total = blocks
            if level == 2:
                fan = int32(block_shift)
                values = scores + row * capacity * 4
                total = n
            forced = int32(total - 1 if stage >= 3 else -1)
            last = stage == 2 or stage == 4
            listed = held > 0
            before = uint32(sm + AT_LIST + (stage + 1 & 1) * (4 * MOST_WANTED))
            after = uint32(sm + AT_LIST + (stage & 1) * (4 * MOST_WANTED))
            m = total
            if listed:
                newest = int32(lds_u32(uint32(before + 4 * (held - 1))))
                m = int32((held - 1 << fan) + min(total - (newest << fan), int32(1) << fan))
            span_shift = int32(0)
            equal = int32(0)
            if m > wanted:
                clear_bins(sm, tid)
                least, most = load_keys(values, m, total, level, listed, before, fan, forced, sm, tid)
                least, most = span_of_block(least, most, sm, lane, warp)
                bound, equal, span_shift = kth_largest(m, wanted, forced, bound, least, most, sm, tid, lane, warp)
            # a thread writes the indices of a run of neighbours, behind those of the threads before it
            own = int32((m + 4 * THREADS - 1) // (4 * THREADS) * 4)
            above = int32(0)
            here = int32(0)
            if m > wanted:
                above, here = taken_before(own * tid, min(own * tid + own, m), bound, span_shift, sm, lane, warp)
            for i in range(own * tid, min(own * tid + own, m), 4):
                four = (uint32(0), uint32(0), uint32(0), uint32(0))
                if m > wanted:
                    four = lds_u32x4(uint32(sm + 4 * i))
                at = place_in_list(i, before, listed, fan)
                index = at
                if stage == 2 and candidates != 0:
                    entry = int32(ldg_u32(candidates + (row * kept + (at >> block_shift)) * 4))
                    index = int32((entry << block_shift) + (at & block - 1))
                for e in unroll(4):
                    at_least = four[e] >= bound
                    in_bin = at_least and (uint32(four[e] - bound) >> span_shift) == 0
                    is_above = at_least and not in_bin
                    place = int32(above + min(here, equal) if m > wanted else i + e)
                    taken = is_above or (in_bin and here < equal) if m > wanted else i + e < m
                    here = int32(here + (1 if in_bin else 0))
                    above = int32(above + (1 if is_above else 0))
                    if taken:
                        if stage == 4:
                            stg_u32(blocks_out + (row * blocks_kept + place) * 4, uint32(at + e))
                        if stage == 2:
                            stg_u32(out + (row * k + place) * 4, uint32(index + e))
                        if not last:
                            sts_u32(uint32(after + 4 * place), uint32(at + e))
            held = int32(min(m, wanted))
            if tid == 0 and last:
                if stage == 2:
                    stg_u32(number + row * 4, uint32(held))
                else:
                    stg_u32(number_blocks + row * 4, uint32(held))
            sync_threads()
            stage = int32(stage + 1)
            if stage == 3:
                held = int32(0)
                bound = uint32(1)
                stage = int32(4 if blocks <= DIRECT or runs <= blocks_kept else 3)

    return select


def entries(width: Width) -> list[Entry]:
    """One kernel for entries, mapped entries and candidate blocks of every width."""
    if width.label != "v41":
        return []
    ahead = 16384  # scores that the floor is stated for
    return [Entry("select", make, {}, width.chips, largest, 4 * ahead, 5 * ahead)]
