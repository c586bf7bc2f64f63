"""Radix selection of a stage's k-th largest key among values that a block holds in shared memory (select.py).

    keys       float32 bits as unsigned numbers of the same order; 0 past the stage's values, FORCED above all others
    bound      the k-th largest lies in [bound, bound + 2^span_shift), found eleven bits at a time over the span from
               the least to the largest key, until all of a bin are wanted: of that last bin `equal` are

Layout of shared memory: keys of MOST_RUNS values, two lists of MOST_WANTED indices (of the stage before and of this
one), the bins, the spans and sums of the warps, what the last pass found.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import as_float, count_leading_zeros
from dsuf.kernels.ptx.memory import (
    atom_add_shared,
    ldg_u32,
    ldg_u32x4,
    lds_u32,
    lds_u32x4,
    sts_u32,
    sts_u32x4,
)
from dsuf.kernels.ptx.sync import shuffle_up_u32, sync_threads, warp_max_u32, warp_min_u32
from dsuf.kernels.route import ordered

MOST_RUNS, MOST_WANTED = 32768, 2048  # values of a stage; k and blocks_kept
WARPS, QUADS = 8, 4  # QUADS: loads of a thread in flight
THREADS = 32 * WARPS
BINS, DIGIT = 2048, 11
BINS_OF_THREAD = BINS // THREADS
FIRST, FORCED = 0x7FFFFFFF, 0xFFFFFFFF  # bits that are no number, and their key: above all others
AT_LIST = 4 * MOST_RUNS
AT_BINS = AT_LIST + 8 * MOST_WANTED
AT_SPANS = AT_BINS + 4 * BINS
AT_WARPS = AT_SPANS + 8 * WARPS
AT_FOUND = AT_WARPS + 4 * WARPS
SHARED = AT_FOUND + 16


@inline
def sum_before(value: Any, sm: Any, lane: Any, warp: Any) -> Any:
    """Sum of a value over the threads before this one; one barrier, and one before the next call."""
    upto = value
    for j in unroll(5):
        other = shuffle_up_u32(upto, uint32(1 << j))
        upto = uint32(upto + (other if lane >= 1 << j else 0))
    if lane == 31:
        sts_u32(uint32(sm + AT_WARPS + 4 * warp), upto)
    sync_threads()
    before = uint32(upto - value)
    for j in unroll(0, WARPS, 4):
        four = lds_u32x4(uint32(sm + AT_WARPS + 4 * j))
        for i in unroll(4):
            before = uint32(before + (four[i] if i + j < warp else 0))
    return before


@inline
def clear_bins(sm: Any, tid: Any) -> None:
    """Zero the histogram."""
    for i in unroll(0, BINS_OF_THREAD, 4):
        zeros = (uint32(0), uint32(0), uint32(0), uint32(0))
        sts_u32x4(uint32(sm + AT_BINS + (tid + i // 4 * THREADS) * 16), zeros)


@inline
def place_in_list(i: Any, list_before: Any, listed: Any, fan: Any) -> Any:
    """Where a stage's value i lies among all of its level: `fan` bits of it below an index of the list before."""
    at = i
    if listed:
        at = int32((int32(lds_u32(uint32(list_before + 4 * (i >> fan)))) << fan) + (i & (1 << fan) - 1))
    return at


@inline
def load_keys(
    values: Any, m: Any, total: Any, level: Any, listed: Any, list_before: Any, fan: Any, forced: Any, sm: Any, tid: Any
) -> Any:
    """The stage's m values as keys in shared memory; the least and the largest of a thread's, without FORCED."""
    least = uint32(FORCED)
    most = uint32(0)
    for start in range(4 * tid, m, 4 * QUADS * THREADS):
        # quads of neighbours; runs' values need not start at a multiple of 16 bytes
        keys = regs(4 * QUADS)
        for j in unroll(QUADS):
            at = place_in_list(int32(min(start + 4 * j * THREADS, (m - 1) // 4 * 4)), list_before, listed, fan)
            if level > 0:
                keys[4 * j : 4 * j + 4] = ldg_u32x4(values + int64(at) * 4)
            else:
                for e in unroll(4):
                    keys[4 * j + e] = ldg_u32(values + int64(min(at + e, total - 1)) * 4)
            for e in unroll(4):
                keys[4 * j + e] = uint32(FIRST if at + e == forced else keys[4 * j + e])
        for j in unroll(QUADS):
            i = int32(start + 4 * j * THREADS)
            if i < m:
                for e in unroll(4):
                    key = ordered(as_float(keys[4 * j + e]))
                    key = uint32(key if i + e < m else 0)
                    keys[4 * j + e] = key
                    real = i + e < m and key != FORCED
                    least = uint32(min(least, key) if real else least)
                    most = uint32(max(most, key) if real else most)
                sts_u32x4(uint32(sm + 4 * i), keys[4 * j : 4 * j + 4])
    return least, most


@inline
def span_of_block(least: Any, most: Any, sm: Any, lane: Any, warp: Any) -> Any:
    """Least and largest over all threads; one barrier."""
    low = warp_min_u32(least)
    high = warp_max_u32(most)
    if lane == 0:
        sts_u32(uint32(sm + AT_SPANS + 4 * warp), low)
        sts_u32(uint32(sm + AT_SPANS + 4 * (WARPS + warp)), high)
    sync_threads()
    for j in unroll(0, WARPS, 4):
        four = lds_u32x4(uint32(sm + AT_SPANS + 4 * j))
        top = lds_u32x4(uint32(sm + AT_SPANS + 4 * (WARPS + j)))
        for i in unroll(4):
            low = uint32(min(low, four[i]))
            high = uint32(max(high, top[i]))
    return low, high


@inline
def fill_bins(m: Any, bound: Any, span_shift: Any, above_shift: Any, later: Any, sm: Any, tid: Any) -> None:
    """Count the keys from `bound` on by their next digit; in a later pass those of one bin of the pass before."""
    for i in range(4 * tid, m, 4 * THREADS):
        four = lds_u32x4(uint32(sm + 4 * i))
        for e in unroll(4):
            away = uint32(four[e] - bound)
            inside = four[e] >= bound and four[e] != FORCED
            if later:
                inside = inside and away >> above_shift == 0
            if inside:
                atom_add_shared(uint32(sm + AT_BINS + (away >> span_shift) * 4), uint32(1))
    sync_threads()


@inline
def find_bin(equal: Any, sm: Any, tid: Any, lane: Any, warp: Any) -> None:
    """Writes to AT_FOUND the bin that holds the `equal`-th largest, which of its own that is, and how many it has."""
    first_bin = int32(BINS - BINS_OF_THREAD * (tid + 1))  # a thread's bins, from the top down
    bins = regs(BINS_OF_THREAD)
    for j in unroll(0, BINS_OF_THREAD, 4):
        bins[j : j + 4] = lds_u32x4(uint32(sm + AT_BINS + 4 * (first_bin + j)))
    mine = uint32(0)
    for j in unroll(BINS_OF_THREAD):
        mine = uint32(mine + bins[j])
    above = int32(sum_before(mine, sm, lane, warp))
    if above < equal and above + int32(mine) >= equal:
        for j in unroll(BINS_OF_THREAD - 1, -1, -1):
            here = int32(bins[j])
            if above < equal and above + here >= equal:
                sts_u32(uint32(sm + AT_FOUND), uint32(first_bin + j))
                sts_u32(uint32(sm + AT_FOUND + 4), uint32(equal - above))
                sts_u32(uint32(sm + AT_FOUND + 8), uint32(here))
            above = int32(above + here)
    clear_bins(sm, tid)
    sync_threads()


@inline
def kth_largest(
    m: Any, wanted: Any, forced: Any, bound_before: Any, least: Any, most: Any, sm: Any, tid: Any, lane: Any, warp: Any
) -> Any:
    """(bound, equal, span_shift) of the `wanted` largest of m keys; FORCED, if there is one, counts among them."""
    bound = uint32(max(bound_before, least))
    span_shift = int32(max(32 - DIGIT - int32(count_leading_zeros(uint32(most - bound))), 0))
    equal = int32(wanted - 1 if forced >= 0 else wanted)
    above_shift = int32(0)  # of the pass before: this pass is about the keys of one of its bins
    going = int32(1 if equal > 0 else 0)
    bound = uint32(bound if going > 0 else FORCED - 1)  # nothing but the forced one is wanted
    span_shift = int32(span_shift if going > 0 else 0)
    for step in unroll(3):
        if going > 0:
            fill_bins(m, bound, span_shift, above_shift, step > 0, sm, tid)
            find_bin(equal, sm, tid, lane, warp)
            bound = uint32(bound + (lds_u32(uint32(sm + AT_FOUND)) << span_shift))
            equal = int32(lds_u32(uint32(sm + AT_FOUND + 4)))
            going = int32(1 if int32(lds_u32(uint32(sm + AT_FOUND + 8))) > equal and span_shift > 0 else 0)
            above_shift = span_shift
            span_shift = int32(max(span_shift - DIGIT, 0) if going > 0 else span_shift)
            sync_threads()
    return bound, equal, span_shift
