"""Which rows each expert of a prefill chunk multiplies: the (row, slot) pairs sorted by expert, made on the device.

    offsets[e] = number of pairs of experts below e;   order = pairs by expert, ascending inside an expert

experts int32 [pairs], negative where a pair is left out; offsets int32 [E + 1]; order int32 [pairs]. The E experts are
first .. first + E - 1: with several ranks each has its own, and the pairs of the others are left out. A block an expert
reads all pairs twice, first counting, then writing: the plan depends on the routing alone, needs no memory but its
result, and reads 8 E bytes a pair from L2 (98,304 pairs of 384 experts: 0.3 GB, 60 us).

The products cut an expert's rows into equal tiles (`job_of`); `read_plan` gives a block the offsets and the number of
tiles before each expert in shared memory.

Reference: dsuf.ops.expert.Dispatch.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import popc
from dsuf.kernels.ptx.fragments import quotient
from dsuf.kernels.ptx.memory import ldg_u32, lds_u32, shared_base, stg_u32, sts_u32
from dsuf.kernels.ptx.op import ALL_CHIPS
from dsuf.kernels.ptx.sync import (
    ballot,
    block_index,
    let_next_kernel_start,
    shuffle_u32,
    shuffle_up_u32,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
    warp_min_u32,
    warp_sum_u32,
)
from dsuf.ops.expert import Dispatch

MOST_EXPERTS, SEARCH = 512, 9  # and its logarithm
WARPS = 32
STEP = 256  # pairs of a warp's turn


@inline
def read_plan(plan: Any, offsets: Any, experts: Any, most: Any, tid: Any, threads: Any) -> None:
    """Stage offsets [E + 1] at `plan` and behind them, from MOST_EXPERTS + 1 on, the tiles before each expert.

    All threads call; the number of tiles, which have up to `most` rows, stands behind the last expert (`tiles_of`).
    """
    for e in range(tid, experts + 1, threads):
        sts_u32(uint32(plan + e * 4), ldg_u32(offsets + int64(e) * 4))
    sync_threads()
    tiles = uint32(plan + 4 * (MOST_EXPERTS + 1))
    if tid < 32:
        before = int32(0)
        for first in range(0, experts, 32):
            e = int32(min(first + tid, experts - 1))
            count = int32(int32(lds_u32(uint32(plan + e * 4 + 4))) - int32(lds_u32(uint32(plan + e * 4))))
            sum_ = int32(quotient(int32(count + most - 1), most) if first + tid < experts else 0)
            for j in unroll(5):
                other = int32(shuffle_up_u32(uint32(sum_), uint32(1 << j)))
                sum_ = int32(sum_ + (other if tid >= (1 << j) else 0))
            if first + tid < experts:
                sts_u32(uint32(tiles + (first + tid) * 4 + 4), uint32(before + sum_))
            before = int32(before + int32(shuffle_u32(uint32(sum_), uint32(31))))
        if tid == 0:
            sts_u32(tiles, uint32(0))
    sync_threads()


@inline
def tiles_of(plan: Any, experts: Any) -> Any:
    """The number of tiles of activation rows, all experts."""
    return int32(warp_min_u32(lds_u32(uint32(plan + (MOST_EXPERTS + 1 + experts) * 4))))  # for the compiler: uniform


@inline
def job_of(plan: Any, job: Any, experts: Any) -> Any:
    """(expert, position of the first row, rows) of a tile; an expert's tiles have equally many, in steps of 8."""
    tiles = uint32(plan + 4 * (MOST_EXPERTS + 1))
    low = int32(0)  # the last expert whose first tile is not behind this one; no branches, so that control is uniform
    for j in unroll(SEARCH):
        middle = int32(min(low + (MOST_EXPERTS >> (j + 1)), experts - 1))
        low = int32(middle if int32(lds_u32(uint32(tiles + middle * 4))) <= job else low)
    begin = int32(lds_u32(uint32(tiles + low * 4)))
    number = int32(int32(lds_u32(uint32(tiles + low * 4 + 4))) - begin)
    first = int32(lds_u32(uint32(plan + low * 4)))
    count = int32(int32(lds_u32(uint32(plan + low * 4 + 4))) - first)
    each = int32((quotient(int32(count + number - 1), number) + 7) & ~7)
    skipped = int32((job - begin) * each)
    rows = int32(warp_min_u32(uint32(min(each, count - skipped))))  # for the compiler: uniform
    return low, int32(first + skipped), rows


def make() -> Kernel:
    """Grid: the number of experts, up to MOST_EXPERTS."""

    @kernel(threads=32 * WARPS, shared=8 * WARPS, name="plan")
    def plan(experts: s64, offsets: s64, order: s64, pairs: s32, count: s32, first_own: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        mine = int32(first_own + block_index())
        slot = int64(block_index())
        sm = shared_base()
        wait_for_previous_kernel()
        let_next_kernel_start()
        share = int32((pairs + WARPS * STEP - 1) // (WARPS * STEP) * STEP)
        first = int32(min(warp * share, pairs))
        end = int32(min(first + share, pairs))
        same = int32(0)
        lower = int32(0)
        for at in range(first, end, STEP):
            read = regs(STEP // 32, int32(-1))
            for j in unroll(STEP // 32):
                if at + 32 * j + lane < end:
                    read[j] = int32(ldg_u32(experts + int64(at + 32 * j + lane) * 4))
            for j in unroll(STEP // 32):
                same = int32(same + (1 if read[j] == mine else 0))
                lower = int32(lower + (1 if read[j] >= first_own and read[j] < mine else 0))
        same = int32(warp_sum_u32(uint32(same)))
        lower = int32(warp_sum_u32(uint32(lower)))
        if lane == 0:
            sts_u32(uint32(sm + warp * 8), uint32(same))
            sts_u32(uint32(sm + warp * 8 + 4), uint32(lower))
        sync_threads()
        begin = int32(0)
        total = int32(0)
        ahead = int32(0)
        for j in range(WARPS):
            held = int32(lds_u32(uint32(sm + j * 8)))
            begin = int32(begin + int32(lds_u32(uint32(sm + j * 8 + 4))))
            ahead = int32(ahead + (held if j < warp else 0))
            total = int32(total + held)
        if tid == 0:
            stg_u32(offsets + slot * 4, uint32(begin))
            if slot == count - 1:
                stg_u32(offsets + slot * 4 + 4, uint32(begin + total))
        place = int32(begin + ahead)
        for at in range(first, end, STEP):
            found = regs(STEP // 32, int32(-1))
            for j in unroll(STEP // 32):
                if at + 32 * j + lane < end:
                    found[j] = int32(ldg_u32(experts + int64(at + 32 * j + lane) * 4))
            for j in unroll(STEP // 32):
                bits = ballot(uint32(1 if found[j] == mine else 0))
                before = int32(popc(uint32(bits & ((int64(1) << lane) - 1))))
                if found[j] == mine:
                    stg_u32(order + int64(place + before) * 4, uint32(at + 32 * j + lane))
                place = int32(place + int32(popc(bits)))

    return plan


def entries(width: Width) -> list[Entry]:
    """One kernel for all widths; the floor is that of 4,096 rows of the real model."""
    if width.label != "v41":
        return []
    pairs = 4096 * width.spec.num_experts_per_tok
    return [Entry("grouped.plan", make, {}, ALL_CHIPS, Dispatch.of, 8 * pairs, pairs)]
