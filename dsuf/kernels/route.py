"""Router of a decode step: the gate's scores, each row's experts chosen from them, and the pairs grouped by expert.

    scores   parts_p = x[:, K_p] gate[:, K_p]^T                          K in parts of PART_CHUNKS chunks
    route    z = sum of the parts, in order;  s_e = sqrt(softplus(z_e))
             chosen = the k largest s_e + bias_e, lowest number among equals, ascending
             w_e = scaling s_e / (sum over the chosen, in ascending order, + 1e-20)

x bf16 [rows, K], gate pack_bf16 of [E, K], parts float32 [parts, rows, E], bias float32 [2, E] (text, image), image
int32 [rows] (0 or 1), sequence int32 [rows] (negative: inactive row, its experts are -1). experts int32 [rows, k],
weights float32 [rows, k], plan as expert_plan.py describes. E, k and scaling are arguments. counter: address of a u32
that grows by the number of distinct experts of the plan (0: not counted). The plan has the pairs of experts first ..
first + own - 1 alone, as 0 .. own - 1: with several ranks each has its own. Reference: dsuf.ops.product.product and
ops.route.route. Latency decides both: scores loads its weights into registers before it waits, and is spread over K so
that a warp has one chunk; route is one block, because the plan needs every row.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.expert_plan import make_groups, scratch_bytes
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import BF16_CHUNK, bf16_chunk_bytes, chunk_width
from dsuf.kernels.ptx.convert import as_bits, div, exp2_approx, fabs, fma, fmax, sqrt
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    ldg_u32x4,
    lds_f32,
    ldw_f32,
    ldw_u32x4,
    shared_base,
    stg_f32,
    stg_u32,
    sts_f32,
    sts_f32x4,
    sts_u32,
)
from dsuf.kernels.ptx.mma import mma_bf16
from dsuf.kernels.ptx.sync import (
    block_index,
    block_index_y,
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
from dsuf.ops.product import product
from dsuf.ops.route import route

LOG2_E = 1.4426950408889634
LOWEST = -3.0e38
WARPS = 16
MOST_EXPERTS, MOST_CHOSEN, MOST_ROWS = 384, 6, 48
PART_CHUNKS, MOST_PARTS = 8, 5  # chunks of a part, a warp each; parts of the real width
FEW = 4  # scores a lane of 128 experts


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


def make_scores(*, k: int) -> Kernel:
    """grid (ceil E / 16, parts): a block makes 16 experts' scores over one part of K, a warp one chunk of it."""
    WIDTH = chunk_width(k, BF16_CHUNK)
    GROUPS, CHUNKS, SIZE = WIDTH // 32, k // WIDTH, bf16_chunk_bytes(k)

    @kernel(threads=32 * PART_CHUNKS, grid=(1, -(-CHUNKS // PART_CHUNKS)), shared=512 * PART_CHUNKS, name=f"scores_{k}")
    def scores(gate: s64, x: s64, out: s64, live: s32, experts: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        tile = int32(block_index())
        part = int32(block_index_y())
        chunk = int32(part * PART_CHUNKS + warp)
        sm = shared_base()
        at = gate + (int64(tile) * CHUNKS + min(chunk, CHUNKS - 1)) * SIZE + lane * 16
        w = regs(8 * GROUPS)
        for i in unroll(2 * GROUPS):
            w[4 * i : 4 * i + 4] = ldw_u32x4(at + i * 512)
        wait_for_previous_kernel()
        let_next_kernel_start()
        for first in range(0, live, 8):
            at_x = x + (int64(min(first + g, live - 1)) * k + min(chunk, CHUNKS - 1) * WIDTH + t * 8) * 2
            b = regs(4 * GROUPS)
            for i in unroll(GROUPS):
                b[4 * i : 4 * i + 4] = ldg_u32x4(at_x + i * 64)
            p = (0.0, 0.0, 0.0, 0.0)
            if chunk < CHUNKS:
                for i in unroll(GROUPS):
                    p = mma_bf16(w[8 * i : 8 * i + 4], b[4 * i : 4 * i + 2], p)
                    p = mma_bf16(w[8 * i + 4 : 8 * i + 8], b[4 * i + 2 : 4 * i + 4], p)
            sync_threads()
            sts_f32x4(uint32(sm + tid * 16), p)
            sync_threads()
            if tid < 128:  # the sums of four lanes' worth of results, chunk by chunk
                total = lds_f32(uint32(sm + tid * 4))
                for c in unroll(1, PART_CHUNKS):
                    total = total + lds_f32(uint32(sm + tid * 4 + c * 512))
                # word 4l + j of a warp: expert g + 8 (j / 2), row 2t + j mod 2, of its lane l
                expert = int32(tile * 16 + (tid >> 4) + 8 * (tid >> 1 & 1))
                row = int32(first + 2 * (tid >> 2 & 3) + (tid & 1))
                if expert < experts and row < live:
                    stg_f32(out + ((int64(part) * live + row) * experts + expert) * 4, total)

    return scores


def make(*, most_experts: int, most_chosen: int, rows: int) -> Kernel:
    """most_experts and rows * most_chosen up to 512, most_chosen up to 8, rows up to 64; 128 experts a pass."""
    THREADS, PER_LANE, PAIRS = WARPS * 32, -(-most_experts // (32 * FEW)) * FEW, rows * most_chosen
    AT_SORT = 4 * PAIRS
    AT_PLAN = AT_SORT + WARPS * 8 * most_chosen

    @kernel(threads=THREADS, shared=AT_PLAN + scratch_bytes(most_experts), name=f"route_{most_experts}_r{rows}")
    def route_rows(
        parts: s64, count: s32, bias: s64, image: s64, sequence: s64, chosen: s64, weights: s64, plan: s64,
        counter: s64, live: s32, experts: s32, topk: s32, scaling: f32, first: s32, own: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        sm = shared_base()
        sort = uint32(sm + AT_SORT + warp * (8 * most_chosen))
        # the row table is older than the scores: a warp's first row knows its bias before the wait
        at_row = int64(min(warp, live - 1)) * 4
        active = int32(ldg_u32(sequence + at_row)) >= 0
        table = bias + int64(ldg_u32(image + at_row)) * (4 * experts)
        held = regs(FEW)
        for i in unroll(FEW):
            held[i] = ldw_f32(table + int64(min(i * 32 + lane, experts - 1)) * 4)
        wait_for_previous_kernel()
        let_next_kernel_start()
        for row in range(warp, live, WARPS):
            if row >= WARPS:
                active = int32(ldg_u32(sequence + int64(row) * 4)) >= 0
                table = bias + int64(ldg_u32(image + int64(row) * 4)) * (4 * experts)
                for i in unroll(FEW):
                    held[i] = ldw_f32(table + int64(min(i * 32 + lane, experts - 1)) * 4)
            # the parts of four scores are asked for before the first is used: no branch may stand between the loads
            s = regs(PER_LANE, 0.0)
            key = regs(PER_LANE, LOWEST)
            for piece in unroll(PER_LANE // FEW):
                if piece == 0 or experts > piece * FEW * 32:
                    for i in unroll(FEW * piece, FEW * piece + FEW):
                        at = parts + (int64(row) * experts + min(i * 32 + lane, experts - 1)) * 4
                        key[i] = held[i % FEW]
                        if piece > 0:
                            key[i] = ldw_f32(table + int64(min(i * 32 + lane, experts - 1)) * 4)
                        v = regs(MOST_PARTS)
                        for p in unroll(MOST_PARTS):
                            v[p] = ldg_f32(at + int64(min(p, count - 1)) * (live * experts * 4))
                        s[i] = v[0]
                        for p in unroll(1, MOST_PARTS):
                            s[i] = s[i] + (v[p] if p < count else 0.0)
                    for i in unroll(FEW * piece, FEW * piece + FEW):
                        s[i] = sqrt(softplus(s[i]))
                        known = s[i] + key[i] if active else 0.0  # inactive: ranks stay distinct, and -1 is written
                        key[i] = known if i * 32 + lane < experts else LOWEST
            mine = int32(0)  # lane j keeps the j-th choice
            mine_s = 0.0
            for j in range(topk):
                best = LOWEST
                best_s = 0.0
                at = int32(0x7FFFFFFF)
                for piece in unroll(PER_LANE // FEW):
                    if piece == 0 or experts > piece * FEW * 32:
                        for i in unroll(FEW * piece, FEW * piece + FEW):
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
                local = int32(number - first)
                sts_u32(uint32(sm + pair * 4), uint32(local if local >= 0 and local < own else -1))
        sync_threads()
        make_groups(sm, uint32(sm + AT_PLAN), plan, counter, tid, THREADS, int32(live * topk), own, topk)

    return route_rows


def parts_of(k: int) -> int:
    """Parts that the scores of K columns come in."""
    return -(-k // chunk_width(k, BF16_CHUNK) // PART_CHUNKS)


def entries(width: Width) -> list[Entry]:
    """Scores of a width; one router for backbone and drafter of every checkpoint."""
    spec, d = width.spec, width.spec.hidden_size
    product_bytes = spec.n_routed_experts * d * 2
    found = [
        Entry(f"route.scores/{width.label}", make_scores, {"k": d}, width.chips, product, product_bytes,
              2 * MOST_ROWS * spec.n_routed_experts * d)
    ]  # fmt: skip
    if width.label == "v41":
        shape = {"most_experts": MOST_EXPERTS, "most_chosen": MOST_CHOSEN, "rows": MOST_ROWS}
        scores = MOST_ROWS * spec.n_routed_experts * MOST_PARTS
        found.append(Entry("route", make, shape, width.chips, route, 4 * scores, 10 * scores))
    return found
