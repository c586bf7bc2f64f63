"""The plan of a decode step's experts: pairs grouped by expert, up to eight a group, made in one block by the router.

int32: [0] = number of groups, [PLAN_ARRIVED] = blocks of the router that have ended (0 between launches, so a plan is
zeroed once), then from PLAN_HEAD on records of PLAN_RECORD: expert, pairs in it, its pairs. Groups
ascend by expert, pairs inside a group by number; a pair whose expert is negative (inactive row) is left out. A row
chooses an expert once, so the rows of an expert are a mask of bits, and a pair's place is the number of bits before its
own: the plan depends on the routing alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.lang import inline, int32, int64, uint32, unroll
from dsuf.kernels.ptx.convert import popc
from dsuf.kernels.ptx.memory import atom_add_shared, count_up, lds_u32, stg_u32, sts_u32
from dsuf.kernels.ptx.sync import ballot, shuffle_u32, sync_threads

PLAN_ARRIVED, PLAN_HEAD, PLAN_RECORD = 1, 4, 12  # int32s
GROUP_PAIRS = 8


def plan_bytes(pairs: int) -> int:
    """Size of a plan buffer."""
    return 4 * (PLAN_HEAD + PLAN_RECORD * pairs)


def plan_of(chosen: np.ndarray, pairs: int) -> np.ndarray:
    """The plan that the router makes of experts int32 [rows, k] (negative: none), as int32, for tests and benches."""
    out, flat, used = np.zeros(plan_bytes(pairs) // 4, np.int32), chosen.ravel(), 0
    records = out[PLAN_HEAD:].reshape(-1, PLAN_RECORD)
    for expert in sorted(set(flat.tolist()) - {-1}):
        mine = np.flatnonzero(flat == expert)
        for at in range(0, len(mine), GROUP_PAIRS):
            group = mine[at : at + GROUP_PAIRS]
            records[used, : 2 + len(group)] = [expert, len(group), *group]
            used += 1
    out[0] = used
    return out


def scratch_bytes(experts: int) -> int:
    """Shared memory that make_groups needs: two words of rows and the first group of each expert, sums of warps."""
    return 12 * experts + 4 * 32


@inline
def make_groups(
    pair_experts: Any, scratch: Any, out: Any, counter: Any, tid: Any, threads: Any, live: Any, experts: Any, topk: Any
) -> None:  # fmt: skip
    """Write the plan of `live` pairs, whose experts stand in shared memory; a thread a pair and one an expert.

    The number of distinct experts is added to the u32 at `counter`, unless that is 0. All threads call.
    """
    for i in range(tid, 2 * experts, threads):
        sts_u32(uint32(scratch + 4 * i), uint32(0))
    sync_threads()
    mine = int32(-1)
    row = int32(uint32(tid) // uint32(topk))
    bit = uint32(uint32(1) << (row & 31))
    if tid < live:
        mine = int32(lds_u32(uint32(pair_experts + tid * 4)))
        if mine >= 0:
            atom_add_shared(uint32(scratch + (2 * mine + (row >> 5)) * 4), bit)  # no bit is added twice
    sync_threads()
    count = int32(0)
    if tid < experts:
        count = int32(popc(lds_u32(uint32(scratch + 8 * tid))) + popc(lds_u32(uint32(scratch + 8 * tid + 4))))
    own = int32((count + GROUP_PAIRS - 1) // GROUP_PAIRS)
    sum_ = own  # groups up to and including mine, in my warp
    for j in unroll(5):
        other = int32(shuffle_u32(uint32(sum_), uint32(max((tid & 31) - (1 << j), 0))))
        sum_ = int32(sum_ + (other if tid & 31 >= 1 << j else 0))
    hit = popc(ballot(uint32(1 if count > 0 else 0)))
    if tid & 31 == 31:
        sts_u32(uint32(scratch + 12 * experts + (tid >> 5) * 4), uint32(sum_))
        if counter != 0 and hit > 0:
            count_up(counter, hit)
    sync_threads()
    for w in range(min(tid >> 5, (experts + 31) >> 5)):
        sum_ = int32(sum_ + int32(lds_u32(uint32(scratch + 12 * experts + 4 * w))))
    if tid < experts:
        sts_u32(uint32(scratch + 8 * experts + 4 * tid), uint32(sum_ - own))
    if tid == experts - 1:
        stg_u32(out, uint32(sum_))
    sync_threads()
    if mine >= 0:
        low = lds_u32(uint32(scratch + 8 * mine))
        high = lds_u32(uint32(scratch + 8 * mine + 4))
        rank = int32(popc(uint32((low if row < 32 else high) & (bit - 1))) + (0 if row < 32 else popc(low)))
        total = int32(popc(low) + popc(high))
        group = int64(int32(lds_u32(uint32(scratch + 8 * experts + 4 * mine))) + rank // GROUP_PAIRS)
        record = out + (PLAN_HEAD + group * PLAN_RECORD) * 4
        place = int32(rank & (GROUP_PAIRS - 1))
        stg_u32(record + (2 + int64(place)) * 4, uint32(tid))
        if place == 0:
            stg_u32(record, uint32(mine))
            stg_u32(record + 4, uint32(min(total - rank, GROUP_PAIRS)))
