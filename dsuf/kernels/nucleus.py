"""Steps of an exact selection among a row's logits by count or by mass, for a cluster that holds the row.

    order     largest logit first, lowest token among equals; key = float32 bits as an unsigned number of that order
    bins      first 256 of the distance from the top, an eighth of a binade of weight each, then the four
              bytes of the key among the tokens of the bin that the goal falls into
    kept      key above the threshold, or equal to it with a token up to `cut`

Counts and masses (draw.py) are whole numbers: the order in which atomics add them changes nothing. Bins lie in shared
memory: BINS counts, then BINS high and BINS low words of masses.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.draw import LOW, over_ranks, scan_pair, split_mass, weight
from dsuf.kernels.lang import inline, int32, int64, uint32, unroll
from dsuf.kernels.ptx.convert import fmin
from dsuf.kernels.ptx.memory import atom_add_shared, lds_f32, lds_u32, sts_u32
from dsuf.kernels.ptx.sync import cluster_address, ld_cluster_u32, sync_threads
from dsuf.kernels.route import ordered

BINS, PER_BINADE = 256, 8.0
BIN_BYTES = 12 * BINS


@inline
def first_bin(x: Any, top: Any, scale: Any) -> Any:
    """Bin of the distance from the largest logit: an eighth of a binade of weight each, the last one open."""
    return int32(fmin((top - x) * scale * PER_BINADE, 255.0))


@inline
def fill_bins(
    hist: Any, line: Any, low_end: Any, high_end: Any, start: Any, threshold: Any, cut: Any, top: Any, scale: Any,
    digit: Any, shift: Any, bin0: Any, prefix: Any, tid: Any, threads: Any,
) -> None:  # fmt: skip
    """Count and mass of the tokens that are still kept and share the digits found so far, by the next digit."""
    for i in range(tid, 3 * BINS, threads):
        sts_u32(uint32(hist + 4 * i), uint32(0))
    sync_threads()
    for i in range(low_end, high_end):
        x = lds_f32(uint32(line + 4 * i))
        key = ordered(x)
        kept = key > threshold or (key == threshold and start + i <= cut)
        at = first_bin(x, top, scale)
        if digit > 0:
            beyond = int32(shift + 8)
            same = at == bin0 and (digit == 1 or (key >> (beyond & 31)) == (prefix >> (beyond & 31)))
            kept = kept and same
            at = int32(255 - int32((key >> shift) & 255))
        if kept:
            w = weight(x, top, scale)
            high, low = split_mass(w)
            atom_add_shared(uint32(hist + 4 * at), uint32(1))
            atom_add_shared(uint32(hist + 4 * (BINS + at)), high)
            atom_add_shared(uint32(hist + 4 * (2 * BINS + at)), low)
    sync_threads()


@inline
def bins_of_cluster(hist: Any, tid: Any, blocks: Any) -> Any:
    """Count and mass of this thread's bin over all blocks (0 for threads without a bin)."""
    count = int64(0)
    high = int64(0)
    low = int64(0)
    if tid < BINS:
        for r in unroll(blocks):
            count = int64(count + ld_cluster_u32(cluster_address(uint32(hist + 4 * tid), uint32(r))))
            high = int64(high + ld_cluster_u32(cluster_address(uint32(hist + 4 * (BINS + tid)), uint32(r))))
            low = int64(low + ld_cluster_u32(cluster_address(uint32(hist + 4 * (2 * BINS + tid)), uint32(r))))
    return count, int64((high << LOW) + low)


@inline
def mass_wanted(total: Any, top_p: Any) -> Any:
    """ceil(total * top_p), top_p in steps of 2^-24."""
    part = int64(int32(top_p * 16777216.0))
    return int64((total >> 24) * part + (((total & 0xFFFFFF) * part + 0xFFFFFF) >> 24))


@inline
def put_wide(address: Any, value: Any) -> None:
    """A 64-bit number in shared memory."""
    sts_u32(address, uint32(value & 0xFFFFFFFF))
    sts_u32(uint32(address + 4), uint32(value >> 32))


@inline
def get_wide(address: Any) -> Any:
    """The same back."""
    return (int64(lds_u32(uint32(address + 4))) << 32) + int64(lds_u32(address))


@inline
def last_kept(
    line: Any, low_end: Any, high_end: Any, start: Any, prefix: Any, threshold: Any, cut: Any, stay: Any, found: Any,
    scratch: Any, share: Any, rank: Any, tid: Any, warps: Any, blocks: Any,
) -> Any:  # fmt: skip
    """The `stay`-th lowest of the kept tokens whose key is `prefix`. share: two times 8 bytes."""
    mine = int32(0)
    for i in range(low_end, high_end):
        key = ordered(lds_f32(uint32(line + 4 * i)))
        same = key == prefix and (key > threshold or start + i <= cut)
        mine = int32(mine + (1 if same else 0))
    _, ahead, _, held = scan_pair(uint32(0), uint32(mine), scratch, tid, warps)
    before, _ = over_ranks(share, uint32(0), held, rank, tid, blocks)
    place = int64(before + int64(ahead))
    if tid == 0:
        sts_u32(found, uint32(0))
    sync_threads()
    if place < stay and stay <= place + mine:
        for i in range(low_end, high_end):
            key = ordered(lds_f32(uint32(line + 4 * i)))
            same = key == prefix and (key > threshold or start + i <= cut)
            place = int64(place + (1 if same else 0))
            if same and place == stay:
                sts_u32(found, uint32(start + i))
    sync_threads()
    # one block has the answer, the others 0
    _, total = over_ranks(uint32(share + 8), uint32(0), lds_u32(found), rank, tid, blocks)
    sync_threads()
    return int32(total)
