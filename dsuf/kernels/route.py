"""Router of a decode step: chooses each row's experts from the gate's scores, and groups the pairs by expert.

    s_e = sqrt(softplus(z_e));  chosen = the k largest s_e + bias_e, lowest number among equals, ascending
    w_e = scaling s_e / (sum over the chosen, in ascending order, + 1e-20)

z float32 [rows, E] (project.bf16 of the gate), bias float32 [2, E] (text, image), image int32 [rows] (0 or 1), sequence
int32 [rows] (negative: inactive row, its experts are -1). experts int32 [rows, k], weights float32 [rows, k], plan as
expert_plan.py describes. E, k and scaling are arguments. counter: address of a u32 that grows by the number of distinct
experts chosen (0: not counted). Reference: dsuf.ops.route.route. One block, because the plan needs every row; latency
decides.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.expert_plan import make_groups, scratch_bytes
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.convert import as_bits, div, exp2_approx, fabs, fma, fmax, sqrt
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_f32, ldw_f32, shared_base, stg_f32, stg_u32, sts_f32, sts_u32
from dsuf.kernels.ptx.sync import (
    let_next_kernel_start,
    shuffle_f32,
    shuffle_u32,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
    warp_max_u32,
    warp_min_u32,
)
from dsuf.ops.route import route

LOG2_E = 1.4426950408889634
LOWEST = -3.0e38
WARPS = 16
MOST_EXPERTS, MOST_CHOSEN, MOST_ROWS = 384, 6, 48


@inline
def softplus(z: Any) -> Any:
    """log(1 + e^z) = max(z, 0) + log1p(e^-|z|), by the series of 2 artanh(e / (2 + e)); that argument is up to 1/3."""
    e = exp2_approx(fabs(z) * -LOG2_E)
    t = div(e, e + 2.0)
    t2 = t * t
    s = fma(t2, 1.0 / 15, 1.0 / 13)
    s = fma(t2, s, 1.0 / 11)
    s = fma(t2, s, 1.0 / 9)
    s = fma(t2, s, 1.0 / 7)
    s = fma(t2, s, 1.0 / 5)
    s = fma(t2, s, 1.0 / 3)
    s = fma(t2, s, 1.0)
    return fmax(z, 0.0) + 2.0 * t * s


@inline
def ordered(x: Any) -> Any:
    """float32 bits as an unsigned number with the same order."""
    b = as_bits(x)
    return uint32(b ^ (0x80000000 if b < 0x80000000 else 0xFFFFFFFF))


def make(*, most_experts: int, most_chosen: int, rows: int) -> Kernel:
    """most_experts and rows * most_chosen up to 512, most_chosen up to 8, rows up to 64."""
    THREADS, PER_LANE, PAIRS = WARPS * 32, -(-most_experts // 32), rows * most_chosen
    AT_SORT = 4 * PAIRS
    AT_PLAN = AT_SORT + WARPS * 8 * most_chosen

    @kernel(threads=THREADS, shared=AT_PLAN + scratch_bytes(most_experts), name=f"route_{most_experts}_r{rows}")
    def route_rows(
        z: s64, bias: s64, image: s64, sequence: s64, chosen: s64, weights: s64, plan: s64, counter: s64, live: s32,
        experts: s32, topk: s32, scaling: f32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        sm = shared_base()
        sort = uint32(sm + AT_SORT + warp * (8 * most_chosen))
        wait_for_previous_kernel()
        let_next_kernel_start()
        for row in range(warp, live, WARPS):
            active = int32(ldg_u32(sequence + int64(row) * 4)) >= 0
            table = bias + int64(ldg_u32(image + int64(row) * 4)) * (4 * experts)
            s = regs(PER_LANE, 0.0)
            key = regs(PER_LANE, LOWEST)
            for i in unroll(PER_LANE):
                e = int32(i * 32 + lane)
                if e < experts and not active:
                    key[i] = 0.0  # so that ranks stay distinct; nothing is read, and -1 is written
                if e < experts and active:
                    s[i] = sqrt(softplus(ldg_f32(z + (int64(row) * experts + e) * 4)))
                    key[i] = s[i] + ldw_f32(table + int64(e) * 4)
            mine = int32(0)  # lane j keeps the j-th choice
            mine_s = 0.0
            for j in range(topk):
                best = LOWEST
                best_s = 0.0
                at = int32(0x7FFFFFFF)
                for i in unroll(PER_LANE):
                    better = key[i] > best
                    best = key[i] if better else best
                    best_s = s[i] if better else best_s
                    at = int32(i * 32 + lane if better else at)
                top = warp_max_u32(ordered(best))
                winner = int32(warp_min_u32(uint32(at if ordered(best) == top else 0x7FFFFFFF)))
                winner_s = shuffle_f32(best_s, uint32(winner & 31))
                for i in unroll(PER_LANE):
                    key[i] = LOWEST if i * 32 + lane == winner else key[i]
                mine = int32(winner if lane == j else mine)
                mine_s = winner_s if lane == j else mine_s
            rank = int32(0)
            for j in range(topk):
                rank = int32(rank + (1 if int32(shuffle_u32(uint32(mine), uint32(j))) < mine else 0))
            sync_warp()
            if lane < topk:
                sts_u32(uint32(sort + 8 * rank), uint32(mine))
                sts_f32(uint32(sort + 8 * rank + 4), mine_s)
            sync_warp()
            if lane < topk:
                total = lds_f32(uint32(sort + 4))
                for j in range(1, topk):
                    total = total + lds_f32(uint32(sort + 8 * j + 4))
                pair = int32(row * topk + rank)
                number = int32(mine if active else -1)
                stg_u32(chosen + int64(pair) * 4, uint32(number))
                stg_f32(weights + int64(pair) * 4, mine_s * div(scaling, total + 1e-20))
                sts_u32(uint32(sm + pair * 4), uint32(number))
        sync_threads()
        make_groups(sm, uint32(sm + AT_PLAN), plan, counter, tid, THREADS, int32(live * topk), experts, topk)

    return route_rows


def entries(width: Width) -> list[Entry]:
    """One router for backbone and drafter of every checkpoint."""
    if width.label != "v41":
        return []
    shape = {"most_experts": MOST_EXPERTS, "most_chosen": MOST_CHOSEN, "rows": MOST_ROWS}
    scores = MOST_ROWS * width.spec.n_routed_experts
    return [Entry("route", make, shape, width.chips, route, 4 * scores, 30 * scores)]
