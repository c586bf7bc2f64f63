"""Steps of an exact selection among a row's logits by count or by mass, for a cluster that holds the row.

    order     largest logit first, lowest token among equals; key = float32 bits as an unsigned number of that order
    digits    eight bits each, largest first: three of the distance from the top, in steps of 2^-19 binades of
              weight, which spread any logits, then the four bytes of the key; a digit looks at the tokens that share
              those before it
    kept      key above the threshold, or equal to it with a token up to `cut`

Counts and masses (draw.py) are whole numbers: the order in which atomics add them changes nothing. Bins lie in shared
memory: BINS counts, then BINS high and BINS low words of masses.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.draw import LOW, LOW_MASK, joined, load_four, meet, over_ranks, scan_pair, split_mass, weight
from dsuf.kernels.lang import float32, inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import fmin
from dsuf.kernels.ptx.memory import atom_add_shared, lds_f32, lds_u32, sts_u32
from dsuf.kernels.ptx.sync import cluster_address, cluster_arrive, cluster_wait, ld_cluster_u32, sync_threads
from dsuf.kernels.route import ordered

BINS = 256
STEPS, FARTHEST = 2.0**19, 2**24 - 1  # of a binade of weight: 32 binades fill 24 bits
FAR_DIGITS, DIGITS = 3, 7
BIN_BYTES = 12 * BINS


@inline
def distance(x: Any, top: Any, scale: Any) -> Any:
    """Steps from the largest logit, 24 bits, the last one open."""
    return int32(fmin((top - x) * scale * STEPS, float32(FARTHEST)))


@inline
def masks_of(digits: Any) -> Any:
    """Bits of the distance and of the key that the first `digits` digits cover."""
    far = int32(FARTHEST << (24 - 8 * min(digits, FAR_DIGITS)) & FARTHEST)
    key = uint32(int64(0xFFFFFFFF) << (32 - 8 * max(digits - FAR_DIGITS, 0)) & 0xFFFFFFFF)
    return far, key


@inline
def fill_bins(
    hist: Any, line: Any, low_end: Any, high_end: Any, start: Any, threshold: Any, cut: Any, top: Any, scale: Any,
    by_mass: Any, digit: Any, near: Any, prefix: Any, tid: Any, threads: Any,
) -> Any:  # fmt: skip
    """Count and mass by the next digit of the kept tokens that share the digits found so far: `near` of the distance,
    `prefix` of the key. Returns the stretch of a thread's tokens that do. Atomics decide the time of the first digit,
    so there only what is selected by is added up: no mass when counting, no count of masses.
    """
    for i in range(tid, 3 * BINS, threads):
        sts_u32(uint32(hist + 4 * i), uint32(0))
    sync_threads()
    far_mask, key_mask = masks_of(digit)
    first = high_end
    last = low_end
    for some in range(low_end, high_end, 4):
        x = regs(4)
        load_four(x, line, some, high_end)
        for j in unroll(4):
            i = int32(some + j)
            key = ordered(x[j])
            far = distance(x[j], top, scale)
            kept = (key > threshold or (key == threshold and start + i <= cut)) and i < high_end
            if kept and ((far ^ near) & far_mask) == 0 and ((key ^ prefix) & key_mask) == 0:
                at = int32(255 - int32(key >> (24 - 8 * max(digit - FAR_DIGITS, 0)) & 255))
                at = int32((far >> (16 - 8 * min(digit, 2))) & 255 if digit < FAR_DIGITS else at)
                if by_mass == 0 or digit > 0:
                    atom_add_shared(uint32(hist + 4 * at), uint32(1))
                if by_mass == 1:
                    w = weight(x[j], top, scale)
                    high, low = split_mass(w)
                    if high > 0:
                        atom_add_shared(uint32(hist + 4 * (BINS + at)), high)
                    if low > 0:
                        atom_add_shared(uint32(hist + 4 * (2 * BINS + at)), low)
                first = int32(min(first, i))
                last = int32(i + 1)
    sync_threads()
    return first, last


@inline
def bins_of_cluster(hist: Any, by_mass: Any, tid: Any, blocks: Any) -> Any:
    """Count and mass of this thread's bin over all blocks (0 for threads without a bin)."""
    count = int64(0)
    high = int64(0)
    low = int64(0)
    if tid < BINS:
        for r in unroll(blocks):
            count = int64(count + ld_cluster_u32(cluster_address(uint32(hist + 4 * tid), uint32(r))))
        if by_mass == 1:
            for r in unroll(blocks):
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
def is_last_kind(x: Any, token: Any, top: Any, scale: Any, digits: Any, near: Any, prefix: Any, threshold: Any,
                 cut: Any) -> Any:  # fmt: skip
    """1 for a kept token that shares all `digits` that were found."""
    key = ordered(x)
    far_mask, key_mask = masks_of(digits)
    far = distance(x, top, scale)
    same = ((far ^ near) & far_mask) == 0 and ((key ^ prefix) & key_mask) == 0
    kept = key > threshold or (key == threshold and token <= cut)
    return int32(1 if same and kept else 0)


@inline
def last_kept(
    line: Any, low_end: Any, high_end: Any, start: Any, top: Any, scale: Any, digits: Any, near: Any, prefix: Any,
    threshold: Any, cut: Any, stay: Any, found: Any, scratch: Any, share: Any, rank: Any, tid: Any, warps: Any,
    blocks: Any,
) -> Any:  # fmt: skip
    """Key and token of the `stay`-th of the tokens that share all digits: equal logits, lowest token first, or one.

    share: two times 8 bytes as `meet` says.
    """
    mine = int32(0)
    for i in range(low_end, high_end):
        x = lds_f32(uint32(line + 4 * i))
        one = is_last_kind(x, int32(start + i), top, scale, digits, near, prefix, threshold, cut)
        mine = int32(mine + one)
    _, ahead, _, held = scan_pair(uint32(0), uint32(mine), scratch, tid, warps)
    before, _ = over_ranks(share, uint32(0), held, rank, tid, blocks)
    place = int64(before + int64(ahead))
    if tid == 0:
        sts_u32(found, uint32(0))
        sts_u32(uint32(found + 4), uint32(0))
    sync_threads()
    if place < stay and stay <= place + mine:
        for i in range(low_end, high_end):
            x = lds_f32(uint32(line + 4 * i))
            one = is_last_kind(x, int32(start + i), top, scale, digits, near, prefix, threshold, cut)
            place = int64(place + one)
            if one == 1 and place == stay:
                sts_u32(found, uint32(start + i))
                sts_u32(uint32(found + 4), ordered(x))
    sync_threads()
    # one block has the answer, the others zeros
    token = uint32(0)
    key = uint32(0)
    if tid == 0:
        put_pair(uint32(share + 8), lds_u32(found), lds_u32(uint32(found + 4)))
    meet()
    for r in unroll(blocks):
        token = uint32(token + ld_cluster_u32(cluster_address(uint32(share + 8), uint32(r))))
        key = uint32(key + ld_cluster_u32(cluster_address(uint32(share + 12), uint32(r))))
    sync_threads()
    return key, int32(token)


@inline
def put_pair(address: Any, first: Any, second: Any) -> None:
    """Two words to shared memory."""
    sts_u32(address, first)
    sts_u32(uint32(address + 4), second)


@inline
def narrowed(
    line: Any, low_end: Any, high_end: Any, start: Any, threshold: Any, cut: Any, top: Any, scale: Any, by_mass: Any,
    wanted: Any, top_p: Any, side: Any, bins: Any, scratch: Any, found: Any, share: Any, rank: Any, tid: Any,
    threads: Any, warps: Any, blocks: Any,
) -> Any:  # fmt: skip
    """Threshold and cut of the `wanted` largest kept tokens (by_mass 0), or of the fewest whose mass reaches top_p of
    theirs; and which of the two sets of bins at `bins` comes next. found: 32 bytes; share: two times 8, as `meet` says.
    """
    goal = int64(wanted)
    near = int32(0)  # digits of the distance, then of the key
    prefix = uint32(0)
    ties = int64(2)
    mass = int64(0)
    digit = int32(0)
    first_one = low_end
    last_one = high_end
    while digit < DIGITS and ties != 1:
        hist = uint32(bins + side * BIN_BYTES)
        first_one, last_one = fill_bins(
            hist, line, first_one, last_one, start, threshold, cut, top, scale, by_mass, digit, near, prefix, tid,
            threads,
        )  # fmt: skip
        cluster_arrive()  # of all: bins are used again, after they have been read
        cluster_wait()
        count, mine = bins_of_cluster(hist, by_mass, tid, blocks)
        measure = int64(mine if by_mass == 1 else count)
        a, b, c, d = scan_pair(uint32(measure >> LOW), uint32(measure & LOW_MASK), scratch, tid, warps)
        above = joined(a, b)
        total = joined(c, d)
        if digit == 0:
            share_wanted = mass_wanted(total, top_p)
            goal = int64(max(min(share_wanted if by_mass == 1 else goal, total), 1))
        if above < goal and goal <= above + measure:
            sts_u32(found, uint32(tid))
            put_wide(uint32(found + 8), goal - above)
            put_wide(uint32(found + 16), count)
            put_wide(uint32(found + 24), mine)
        sync_threads()
        at = int32(lds_u32(found))
        goal = get_wide(uint32(found + 8))
        ties = get_wide(uint32(found + 16))
        mass = get_wide(uint32(found + 24))
        sync_threads()
        near = int32(near | at << (16 - 8 * min(digit, 2)) if digit < FAR_DIGITS else near)
        byte = uint32(uint32(255 - at) << (24 - 8 * max(digit - FAR_DIGITS, 0)))
        prefix = uint32(prefix | byte if digit >= FAR_DIGITS else prefix)
        digit = int32(digit + 1)
        side = int32(side ^ 1)
    # of the `ties` tokens that share them all, as many stay as it takes to reach the goal
    each = int64(max(mass // ties, 1))
    stay = int64((goal + each - 1) // each if by_mass == 1 else goal)
    stay = int64(max(min(stay, ties), 1))
    threshold, cut = last_kept(line, first_one, last_one, start, top, scale, digit, near, prefix, threshold, cut, stay,
                               found, scratch, share, rank, tid, warps, blocks)  # fmt: skip
    return threshold, cut, side
