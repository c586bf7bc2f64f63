"""Router of a prefill chunk: the experts of many rows, without the plan that decode's router makes beside them.

    s_e = sqrt(softplus(z_e));  chosen = the k largest s_e + bias_e, lowest number among equals, ascending
    w_e = scaling s_e / (sum over the chosen, in ascending order, + 1e-20)

z float32 [rows, E], bias float32 [2, E] (text, image), image int32 [rows] (0 or 1); chosen int32 [rows, k], weights
float32 [rows, k]. The same bits as route.py from the same z. Reference: dsuf.ops.route.route. Bytes 4 E a row. A warp
a row: lane l holds experts l, l + 32, ...
"""

from __future__ import annotations

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.lang import Kernel, f32, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import div, sqrt
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, ldw_f32, stg_f32, stg_u32
from dsuf.kernels.ptx.sync import (
    block_index,
    let_next_kernel_start,
    shuffle_f32,
    shuffle_u32,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
)
from dsuf.kernels.route import LOWEST, ordered, softplus
from dsuf.ops.route import route

WARPS = 8  # rows of a block
MOST_EXPERTS, NOBODY = 384, 0x7FFFFFFF


def make() -> Kernel:
    """Up to 384 experts, up to 32 of them a row."""
    PER_LANE = MOST_EXPERTS // 32

    @kernel(threads=32 * WARPS, grid=(512,), name="chunk_route")
    def route_rows(
        z: s64, bias: s64, image: s64, chosen: s64, weights: s64, rows: s32, experts: s32, k: s32, scaling: f32
    ) -> None:
        lane = int32(thread_index() & 31)
        row = int64(block_index() * WARPS + (thread_index() >> 5))
        wait_for_previous_kernel()
        let_next_kernel_start()
        if row < rows:
            table = bias + int64(ldg_u32(image + row * 4)) * (4 * int64(experts))
            s = regs(PER_LANE, 0.0)
            key = regs(PER_LANE, LOWEST)
            for i in unroll(PER_LANE):
                e = int32(i * 32 + lane)
                if e < experts:
                    s[i] = sqrt(softplus(ldg_f32(z + (row * experts + e) * 4)))
                    key[i] = s[i] + ldw_f32(table + int64(e) * 4)
            mine = int32(NOBODY)  # lane j keeps the j-th choice
            mine_s = 0.0
            for j in range(k):
                best = LOWEST
                best_s = 0.0
                at = int32(NOBODY)
                for i in unroll(PER_LANE):
                    better = key[i] > best
                    best = key[i] if better else best
                    best_s = s[i] if better else best_s
                    at = int32(i * 32 + lane if better else at)
                top = warp_max_u32(ordered(best))
                winner = int32(warp_min_u32(uint32(at if ordered(best) == top else NOBODY)))
                winner_s = shuffle_f32(best_s, uint32(winner & 31))
                for i in unroll(PER_LANE):
                    key[i] = LOWEST if i * 32 + lane == winner else key[i]
                mine = int32(winner if lane == j else mine)
                mine_s = winner_s if lane == j else mine_s
            # sorted by number: lane r takes the choice of rank r
            rank = int32(0)
            for j in range(k):
                rank = int32(rank + (1 if int32(shuffle_u32(uint32(mine), uint32(j))) < mine else 0))
            holder = int32(0)
            for j in range(k):
                holder = int32(j if int32(shuffle_u32(uint32(rank), uint32(j))) == lane else holder)
            number = int32(shuffle_u32(uint32(mine), uint32(holder)))
            share = shuffle_f32(mine_s, uint32(holder))
            total = shuffle_f32(share, uint32(0))
            for j in range(1, k):
                total = total + shuffle_f32(share, uint32(j))
            if lane < k:
                stg_u32(chosen + (row * k + lane) * 4, uint32(number))
                stg_f32(weights + (row * k + lane) * 4, share * div(scaling, total + 1e-20))

    return route_rows


def entries(width: Width) -> list[Entry]:
    """One router for every width."""
    if width.label != "v41":
        return []
    scores = 1024 * width.spec.n_routed_experts  # of the rows that the floor is stated for
    return [Entry("chunk.route", make, {}, width.chips, route, 4 * scores, 30 * scores)]
