"""Exact sums over a row's weights and numbers from Philox: what sampling and acceptance share.

    mass(x) = floor(2^31 w),  w = 2^((x - top) scale),  scale = log2(e) / temperature

Masses are whole numbers, so sums of them do not depend on their order, and a row gives the same token whatever runs
beside it. A weight under 2^-31 of the largest has mass 0 and is never drawn. A mass travels as two words: the high 14
bits and the low 17, whose sums over 16,384 tokens of a block and over a whole row stay under 2^32.

A cluster holds a row, each block a stretch of it in shared memory, each thread an odd number of neighbouring tokens
(all banks at once). Philox is bit for bit ops/philox.py. Reference: dsuf.ops.sample, dsuf.ops.philox.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import exp2_approx, mul_hi
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_f32, lds_u32x4, sts_f32, sts_u32
from dsuf.kernels.ptx.sync import (
    cluster_address,
    cluster_arrive_relaxed,
    cluster_wait,
    fence_release_shared,
    ld_cluster_u32,
    shuffle_up_u32,
    sync_threads,
    sync_warp,
    warp_sum_u32,
)

LOW = 17  # bits of the low word of a mass
LOW_UNIT, HIGH_UNIT, LOW_MASK = 2.0**17, 2.0**14, 2**17 - 1
MOST_VOCABULARY = 131072
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


@inline
def split_mass(w: Any) -> Any:
    """A weight in 0..1 as (high, low) words of floor(2^31 w)."""
    scaled = w * HIGH_UNIT
    high = int32(scaled)
    return uint32(high), uint32(int32((scaled - high) * LOW_UNIT))


@inline
def weight(x: Any, top: Any, scale: Any) -> Any:
    """2^((x - top) scale)."""
    return exp2_approx((x - top) * scale)


@inline
def joined(high: Any, low: Any) -> Any:
    """Words of a mass, or sums of them, as one number."""
    return (int64(high) << LOW) + int64(low)


@inline
def philox(seed: Any, seed_high: Any, position: Any, purpose: Any) -> Any:
    """First word of Philox4x32-10 at (position, purpose)."""
    c0 = uint32(position)
    c1 = uint32(0)
    c2 = uint32(purpose)
    c3 = uint32(0)
    k0 = uint32(seed)
    k1 = uint32(seed_high)
    for _ in range(ROUNDS):
        high0 = mul_hi(uint32(M0), c0)
        high1 = mul_hi(uint32(M1), c2)
        low0 = uint32(uint32(M0) * c0)
        low1 = uint32(uint32(M1) * c2)
        c0 = uint32(high1 ^ c1 ^ k0)
        c1 = low1
        c2 = uint32(high0 ^ c3 ^ k1)
        c3 = low0
        k0 = uint32(k0 + W0)
        k1 = uint32(k1 + W1)
    return c0


@inline
def share_of(total: Any, number: Any) -> Any:
    """floor(total * number * 2^-32) for a total under 2^62 and a 32-bit number."""
    return int64(number) * (total >> 32) + int64(mul_hi(number, uint32(total & 0xFFFFFFFF)))


@inline
def scan_pair(a: Any, b: Any, scratch: Any, tid: Any, warps: Any) -> Any:
    """Sums of both words over the threads before this one, and over the whole block; scratch: 8 bytes a warp."""
    lane = int32(tid & 31)
    mine = int32(tid >> 5)
    sum_a = uint32(a)
    sum_b = uint32(b)
    for j in unroll(5):
        other_a = shuffle_up_u32(sum_a, uint32(1 << j))
        other_b = shuffle_up_u32(sum_b, uint32(1 << j))
        sum_a = uint32(sum_a + (other_a if lane >= 1 << j else 0))
        sum_b = uint32(sum_b + (other_b if lane >= 1 << j else 0))
    if lane == 31:
        sts_u32(uint32(scratch + 8 * mine), sum_a)
        sts_u32(uint32(scratch + 8 * mine + 4), sum_b)
    sync_threads()
    before_a = uint32(sum_a - a)
    before_b = uint32(sum_b - b)
    all_a = uint32(0)
    all_b = uint32(0)
    for w in unroll(0, warps, 2):
        held = lds_u32x4(uint32(scratch + 8 * w))
        for half in unroll(2):
            before_a = uint32(before_a + (held[2 * half] if w + half < mine else 0))
            before_b = uint32(before_b + (held[2 * half + 1] if w + half < mine else 0))
            all_a = uint32(all_a + held[2 * half])
            all_b = uint32(all_b + held[2 * half + 1])
    sync_threads()
    return before_a, before_b, all_a, all_b


@inline
def meet() -> None:
    """A barrier of the cluster after which each thread sees what others wrote to their shared memory before it.

    The release is of shared memory alone: a fence restricted to it, then a relaxed arrival, is a release pattern on
    those writes, and the wait acquires; stores to global memory are not waited for. It does not order loads from other
    blocks before what is written next. So a word that others read is written once in a launch, before one `meet`, and
    the launch's last barrier, with which they say that they have read it, is a `cluster_arrive`.
    """
    fence_release_shared()
    cluster_arrive_relaxed()
    cluster_wait()


@inline
def over_ranks(share: Any, high: Any, low: Any, rank: Any, tid: Any, blocks: Any) -> Any:
    """Sums of a mass of every block: over the blocks before this one, and over all. share: 8 bytes as `meet` says."""
    if tid == 0:
        sts_u32(share, uint32(high + (low >> LOW)))
        sts_u32(uint32(share + 4), uint32(low & LOW_MASK))
    meet()
    other = int32(tid & 31)
    a = uint32(0)
    b = uint32(0)
    if other < blocks:
        a = ld_cluster_u32(cluster_address(share, uint32(other)))
        b = ld_cluster_u32(cluster_address(uint32(share + 4), uint32(other)))
    sync_warp()
    total = joined(warp_sum_u32(a), warp_sum_u32(b))
    a = uint32(a if other < rank else 0)
    b = uint32(b if other < rank else 0)
    before = joined(warp_sum_u32(a), warp_sum_u32(b))
    return before, total


@inline
def stretch_of(vocabulary: Any, rank: Any, tid: Any, blocks: Any, threads: Any) -> Any:
    """A block's stretch of a row (its first token, how many) and a thread's part of the stretch (from, to)."""
    stretch = int32((vocabulary + blocks - 1) // blocks)
    start = int32(rank * stretch)
    held = int32(max(min(stretch, vocabulary - start), 0))
    per = int32((stretch + threads - 1) // threads | 1)
    low_end = int32(min(tid * per, held))
    return start, held, low_end, int32(min(low_end + per, held))


@inline
def allowed_bit(mask: Any, row: Any, words: Any, token: Any) -> Any:
    """1 where a bit mask of rows of `words` words lets a token through."""
    return uint32(ldg_u32(mask + (row * words + (token >> 5)) * 4) >> (token & 31) & 1)


@inline
def load_row(line: Any, source: Any, held: Any, tid: Any, threads: Any) -> None:
    """`held` float32 from global to shared memory, eight loads of a thread in flight; thread i % threads writes i."""
    for first in range(tid, held, 8 * threads):
        x = regs(8, 0.0)
        for j in unroll(8):
            if first + j * threads < held:
                x[j] = ldg_f32(source + int64(first + j * threads) * 4)
        for j in unroll(8):
            if first + j * threads < held:
                sts_f32(uint32(line + 4 * (first + j * threads)), x[j])


@inline
def load_four(x: Any, line: Any, first: Any, end: Any) -> None:
    """Four neighbouring float32 of a row in shared memory; past the end the last one again."""
    for j in unroll(4):
        x[j] = lds_f32(uint32(line + 4 * min(first + j, end - 1)))


@inline
def sum_of_row(row: Any, low_end: Any, high_end: Any) -> Any:
    """Words of the mass of a thread's weights, float32 in shared memory."""
    high = uint32(0)
    low = uint32(0)
    for i in range(low_end, high_end):
        a, b = split_mass(lds_f32(uint32(row + 4 * i)))
        high = uint32(high + a)
        low = uint32(low + b)
    return high, low


@inline
def token_at(row: Any, low_end: Any, high_end: Any, running: Any, target: Any) -> Any:
    """Index in the row of the token over which the running mass passes the target, -1 if no token of this thread."""
    found = int32(-1)
    for i in range(low_end, high_end):
        a, b = split_mass(lds_f32(uint32(row + 4 * i)))
        after = int64(running + joined(a, b))
        found = int32(i if running <= target and target < after else found)
        running = after
    return found
