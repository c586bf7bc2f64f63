"""Router of a decode step: the gate's scores, each row's experts chosen from them, and the pairs grouped by expert.

    parts_p = x[:, K_p] gate[:, K_p]^T                                       K in parts of PART_CHUNKS chunks
    z = sum of the parts, in order;  s_e = sqrt(softplus(z_e))
    chosen = the k largest s_e + bias_e, lowest number among equals, ascending
    w_e = scaling s_e / (sum over the chosen, in ascending order, + 1e-20)

x bf16 [rows, K], gate pack_bf16 of [E, K], parts float32 [parts, rows, E], bias float32 [2, E] (text, image), image
int32 [rows] (0 or 1), sequence int32 [rows] (negative: inactive row, its experts are -1). experts int32 [rows, k],
weights float32 [rows, k], plan as expert_plan.py describes. E, k and scaling are arguments. counter: address of a u32
that grows by the number of distinct experts of the plan (0: not counted). The plan has the pairs of experts first ..
first + own - 1 alone, as 0 .. own - 1: with several ranks each has its own. Reference: dsuf.ops.product.product and
ops.route.route. Bytes: the gate. Latency decides: weights are asked for before the wait, and spread over K so that a
warp has one chunk. The plan needs every row, so the block that ends last makes it, while nothing else runs: what it
runs once is kept short, because its instructions come from far away, and every block runs through it once before the
wait, which brings them near.

    hand-off                who writes          who waits               reused
    parts                   every block         the last to arrive      by the next launch
    arrivals, in plan       a thread a block    (released, acquired)    by the next launch: the last block puts back 0
    chunk of weights        bulk copy           its warp                never
    sums, sort, scratch     the block           the block               for the next eight rows, behind a barrier
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.expert_plan import PLAN_ARRIVED, make_groups, scratch_bytes
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import BF16_CHUNK, bf16_chunk_bytes, chunk_width
from dsuf.kernels.ptx.convert import as_bits, div, exp2_approx, fabs, fma, fmax, opaque, sqrt
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first
from dsuf.kernels.ptx.memory import (
    atom_add,
    ldg_f32,
    ldg_u32,
    lds_f32,
    lds_u32,
    prefetch_l2,
    shared_base,
    stg_f32,
    stg_u32,
    sts_f32,
    sts_f32x4,
    sts_u32,
)
from dsuf.kernels.ptx.sync import (
    block_count,
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
from dsuf.kernels.stream import bf16_chunk, fetch
from dsuf.ops.route import route

LOG2_E = 1.4426950408889634
LOWEST = -3.0e38
WARPS = 16
MOST_EXPERTS, MOST_CHOSEN, MOST_ROWS = 384, 6, 48
PART_CHUNKS, TILES = 8, 2  # of a block: chunks of its part, a warp each, for so many tiles of 16 experts
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


@inline
def add_part(
    chunk_at: Any, x: Any, out: Any, k: Any, width: Any, part: Any, first_expert: Any, chunk: Any, live: Any,
    experts: Any, sm: Any, tid: Any,
) -> None:  # fmt: skip
    """A part of the scores of a block's experts; chunk_at: a warp's chunk of weights, eight warps share 16 experts."""
    lane = int32(tid & 31)
    at_x = regs(1)
    for first in range(0, live, 8):
        at_x[0] = x + (int64(min(first + (lane >> 2), live - 1)) * k + (lane & 3) * 8) * 2
        acc = regs(1, (0.0, 0.0, 0.0, 0.0))
        if chunk < k // width:
            bf16_chunk(acc, chunk_at, 1, width // 32, lane, at_x, int64(chunk * (2 * width)), False)
        sync_threads()
        sts_f32x4(uint32(sm + tid * 16), acc[0])
        sync_threads()
        if tid < 128 * TILES:  # the sums of four lanes' worth of results, chunk by chunk
            word = int32(tid & 127)
            at = uint32(sm + (tid >> 7) * (512 * PART_CHUNKS) + word * 4)
            total = lds_f32(at)
            for c in unroll(1, PART_CHUNKS):
                total = total + lds_f32(uint32(at + c * 512))
            # word 4l + j of a warp: expert g + 8 (j / 2), row 2t + j mod 2, of its lane l
            expert = int32(first_expert + (tid >> 7) * 16 + (word >> 4) + 8 * (word >> 1 & 1))
            row = int32(first + 2 * (word >> 2 & 3) + (word & 1))
            if expert < experts and row < live:
                stg_f32(out + ((int64(part) * live + row) * experts + expert) * 4, total)


@inline
def scores_of(s: Any, key: Any, piece: Any, parts: Any, count: Any, table: Any, row: Any, live: Any, experts: Any,
              active: Any, lane: Any) -> None:  # fmt: skip
    """s and, with the bias, key of a lane's FEW experts of a piece; all parts are asked for before one is used."""
    v = regs(FEW * count)
    for i in unroll(FEW):
        expert = int32(min((FEW * piece + i) * 32 + lane, experts - 1))
        key[FEW * piece + i] = ldg_f32(table + expert * 4)
        for p in unroll(count):
            v[i * count + p] = ldg_f32(parts + int32(((p * live + row) * experts + expert) * 4))
    for i in unroll(FEW):
        s[FEW * piece + i] = v[i * count]
        for p in unroll(1, count):
            s[FEW * piece + i] = s[FEW * piece + i] + v[i * count + p]
    for n in range(opaque(int32(FEW))):  # one copy of the code: each turn takes the first and puts it last
        one = sqrt(softplus(s[FEW * piece]))
        known = one + key[FEW * piece] if active else 0.0  # inactive: ranks stay distinct, and -1 is written
        known = known if (FEW * piece + n) * 32 + lane < experts else LOWEST
        for i in unroll(FEW - 1):
            s[FEW * piece + i] = s[FEW * piece + i + 1]
            key[FEW * piece + i] = key[FEW * piece + i + 1]
        s[FEW * piece + FEW - 1] = one
        key[FEW * piece + FEW - 1] = known


@inline
def pick(s: Any, key: Any, per_lane: Any, topk: Any, experts: Any, lane: Any) -> Any:
    """A row's choices: lane j's, the j-th largest key, with its s and its place in ascending order (a warp)."""
    mine = int32(0)
    mine_s = 0.0
    for j in range(topk):
        best = LOWEST
        best_s = 0.0
        at = int32(0x7FFFFFFF)
        for piece in unroll(per_lane // FEW):
            if piece == 0 or experts > piece * FEW * 32:
                for i in unroll(FEW * piece, FEW * piece + FEW):
                    better = key[i] > best
                    best = key[i] if better else best
                    best_s = s[i] if better else best_s
                    at = int32(i * 32 + lane if better else at)
        top = warp_max_u32(ordered(best))
        winner = int32(warp_min_u32(uint32(at if ordered(best) == top else 0x7FFFFFFF)))
        winner_s = shuffle_f32(best_s, uint32(winner & 31))
        for i in unroll(per_lane):
            key[i] = LOWEST if i * 32 + lane == winner else key[i]
        mine = int32(winner if lane == j else mine)
        mine_s = winner_s if lane == j else mine_s
    rank = int32(0)
    for j in range(topk):
        rank = int32(rank + (1 if int32(shuffle_u32(uint32(mine), uint32(j))) < mine else 0))
    return mine, mine_s, rank


def parts_of(k: int) -> int:
    """Parts that the scores of K columns come in."""
    return -(-k // chunk_width(k, BF16_CHUNK) // PART_CHUNKS)


def grid(k: int, experts: int) -> tuple[int, int]:
    """Blocks of a launch."""
    return -(-experts // (16 * TILES)), parts_of(k)


def make(*, k: int, most_experts: int, most_chosen: int, rows: int) -> Kernel:
    """grid (ceil E / 32, parts). most_experts and rows * most_chosen up to 512, most_chosen up to 8, rows up to 64; 128
    experts a pass.
    """
    THREADS, PER_LANE, PAIRS = WARPS * 32, -(-most_experts // (32 * FEW)) * FEW, rows * most_chosen
    WIDTH, PARTS, SIZE = chunk_width(k, BF16_CHUNK), parts_of(k), bf16_chunk_bytes(k)
    AT_SORT = 4 * PAIRS
    AT_PLAN = AT_SORT + WARPS * 8 * most_chosen
    AT_RING = max(AT_PLAN + scratch_bytes(most_experts), 512 * WARPS)  # a chunk of weights for each warp
    AT_BAR = AT_RING + WARPS * SIZE
    AT_LAST = AT_BAR + 8 * WARPS

    @kernel(
        threads=THREADS, grid=grid(k, most_experts), shared=AT_LAST + 4, min_blocks=2, name=f"route_{k}_{most_experts}"
    )  # fmt: skip
    def route_rows(
        gate: s64, x: s64, parts: s64, bias: s64, image: s64, sequence: s64, chosen: s64, weights: s64, plan: s64,
        counter: s64, live: s32, experts: s32, topk: s32, scaling: f32, first: s32, own: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        sm = shared_base()
        sort = uint32(sm + AT_SORT + warp * (8 * most_chosen))
        ring = uint32(sm + AT_RING + warp * SIZE)
        bar = uint32(sm + AT_BAR + warp * 8)
        tile = int32(block_index() * TILES + warp // PART_CHUNKS)
        chunk = int32(block_index_y() * PART_CHUNKS + (warp & (PART_CHUNKS - 1)))
        if lane == 0:
            mbarrier_init(bar, uint32(1))
            fence_async()
            place = int64(min(tile, (experts - 1) >> 4)) * (k // WIDTH) + min(chunk, k // WIDTH - 1)
            fetch(ring, bar, 0, SIZE, gate + place * SIZE, policy_evict_first())
        if warp == 1 and 32 * lane < 2 * experts:
            prefetch_l2(bias + 128 * int64(lane))
        sync_warp()
        # all of it runs once before x is there, on one row whose result nobody sees: code that has run is near
        for turn in range(opaque(int32(2))):
            last = int32(1)
            if turn == 1:
                wait_for_previous_kernel()
                let_next_kernel_start()
                mbarrier_wait(bar, uint32(0))
                first_expert = int32(block_index() * (16 * TILES))
                add_part(ring, x, parts, k, WIDTH, int32(block_index_y()), first_expert, chunk, live, experts, sm, tid)
                sync_threads()
                if tid == 0:
                    sts_u32(uint32(sm + AT_LAST), atom_add(plan + 4 * PLAN_ARRIVED, uint32(1)))
                sync_threads()
                last = int32(1 if int32(lds_u32(uint32(sm + AT_LAST))) == block_count() * PARTS - 1 else 0)
                if last == 1 and tid == 0:
                    stg_u32(plan + 4 * PLAN_ARRIVED, uint32(0))
            if last == 1:
                scores = parts if turn == 1 else bias  # a rehearsal reads what is there
                span = int32(live * turn)
                for row in range(warp * turn, max(span, 1), WARPS):
                    active = int32(ldg_u32(sequence + int64(row) * 4)) >= 0
                    table = bias + int64(ldg_u32(image + int64(row) * 4)) * (4 * experts)
                    s = regs(PER_LANE, 0.0)
                    key = regs(PER_LANE, LOWEST)
                    for piece in unroll(PER_LANE // FEW):
                        if piece == 0 or experts > piece * FEW * 32:
                            scores_of(s, key, piece, scores, PARTS, table, row, span, experts, active, lane)
                    mine, mine_s, rank = pick(s, key, PER_LANE, topk, experts, lane)
                    sync_warp()
                    if lane < topk:
                        sts_u32(uint32(sort + 8 * rank), uint32(mine))
                        sts_f32(uint32(sort + 8 * rank + 4), mine_s)
                    sync_warp()
                    if lane < topk and turn == 1:
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
                make_groups(sm, uint32(sm + AT_PLAN), plan, counter, tid, THREADS, int32(span * topk), own, topk)

    return route_rows


def entries(width: Width) -> list[Entry]:
    """One router for the backbone and the drafter of every checkpoint of a width."""
    spec, d = width.spec, width.spec.hidden_size
    shape = {"k": d, "most_experts": MOST_EXPERTS, "most_chosen": MOST_CHOSEN, "rows": MOST_ROWS}
    experts = spec.n_routed_experts
    return [
        Entry(f"route/{width.label}", make, shape, width.chips, route, 2 * experts * d, 2 * MOST_ROWS * experts * d)
    ]  # fmt: skip
