"""Routed FP4 experts of a decode step, all experts of a layer in one launch, without the host knowing the routing.

    gate_up   h = silu(min(w1 x, limit)) clamp(w3 x, -limit, limit) w_e, quantised in groups of 32 channels
    down      y = w2 h, one row of bf16 for each (row, chosen expert) pair

A pair is row * k + slot. x: codes e4m3 [rows, D], scales ue8m0 [rows, scale_stride(D)]. h: codes e4m3 [pairs, I],
scales ue8m0 [pairs, scale_stride(I)]. y bf16 [pairs, D]; whoever reads it adds a row's slots in ascending order, the
shared expert last. The routing weight enters before the quantisation of h.

Weights: w13 is pack.interleave(pack_fp4(w1), pack_fp4(w3), 2), w2 is pack_fp4; experts one after the other.
Reference: dsuf.ops.expert.experts_sum (its parts before they are summed). Bytes: for each expert that a row chose
3 I D / 2 of codes and 3 I D / 32 of scales; operations 6 I D a pair.

The plan is made by the router (route.py) with make_groups. int32: [0] = number of groups, then from PLAN_HEAD on
records of PLAN_RECORD: expert, pairs in it, its pairs. Groups ascend by expert, pairs inside a group by number; a pair
whose expert is negative (inactive row) is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.catalogue import ROW_TILES, Entry, Width, tile_of
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import chunk_width, fp4_chunk_bytes, interleave, pack_fp4
from dsuf.kernels.ptx.convert import (
    bf16x2,
    e4m3x2,
    exp2_approx,
    fabs,
    fmax,
    fmin,
    fp4x8_f16_bits,
    fp4x8_f16_cvt,
    rcp_approx,
    round_bf16,
)
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait, policy_evict_first
from dsuf.kernels.ptx.memory import (
    atom_add,
    ldg_f32,
    ldg_u32,
    lds_u32,
    shared_base,
    stg_u8,
    stg_u16,
    stg_u32,
    sts_u32,
)
from dsuf.kernels.ptx.op import BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent
from dsuf.kernels.stream import (
    FP4_BIAS,
    fetch,
    fp4_chunk,
    scale_stride,
    shared_stride,
    stage_rows,
    stage_words,
)
from dsuf.ops.expert import experts_sum

PLAN_HEAD, PLAN_RECORD = 4, 12  # int32s
GROUP_PAIRS = 8
GATE_UP_CHUNK, GATE_UP_TILES = 128, 2  # columns of a chunk; tiles of gate, then of up, that lie together
Fp4 = tuple[np.ndarray, np.ndarray]  # packed codes and scales
LOG2_E = 1.4426950408889634
STAGED = 132 * 1024
SM_COUNT = 132
QUAD_ROWS = (4, 8, 16)  # lanes that hold the same columns


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


def pack_gate_up(w1: Fp4, w3: Fp4, chip: str) -> np.ndarray:
    """An expert's w1 and w3 (codes [I, D/2], scales [I, D/32]) as gate_up reads them."""
    return interleave(*(pack_fp4(*w, chip, GATE_UP_CHUNK) for w in (w1, w3)), GATE_UP_TILES)


def pack_down(w2: Fp4, chip: str) -> np.ndarray:
    """An expert's w2 (codes [D, I/2], scales [D, I/32]) as down reads it."""
    return pack_fp4(*w2, chip)


@inline
def make_groups(pair_experts: Any, leaders: Any, out: Any, counter: Any, tid: Any, live: Any) -> None:
    """Write the plan of `live` pairs, whose experts stand in shared memory; a thread a pair, all threads call.

    Ranks are found by counting, so the plan depends on the routing alone; `leaders` is scratch of the same size. The
    number of distinct experts is added to the u32 at `counter`, unless that is 0.
    """
    mine = int32(-1)
    if tid < live:
        mine = int32(lds_u32(uint32(pair_experts + tid * 4)))
    rank = int32(0)
    count = int32(0)
    for q in range(live):
        same = int32(1 if int32(lds_u32(uint32(pair_experts + q * 4))) == mine else 0)
        count = int32(count + same)
        rank = int32(rank + (same if q < tid else 0))
    leader = int32(1 if mine >= 0 and (rank & (GROUP_PAIRS - 1)) == 0 else 0)
    if tid < live:
        sts_u32(uint32(leaders + tid * 4), uint32(leader))
    sync_threads()
    group = int32(-1)  # leaders up to and including that of my own group
    total = int32(0)
    for q in range(live):
        lead = int32(lds_u32(uint32(leaders + q * 4)))
        other = int32(lds_u32(uint32(pair_experts + q * 4)))
        before = int32(1 if other < mine or (other == mine and q <= tid) else 0)
        group = int32(group + lead * before)
        total = int32(total + lead)
    if mine >= 0:
        record = out + (PLAN_HEAD + int64(group) * PLAN_RECORD) * 4
        place = int32(rank & (GROUP_PAIRS - 1))
        stg_u32(record + (2 + int64(place)) * 4, uint32(tid))
        if leader == 1:
            stg_u32(record, uint32(mine))
            stg_u32(record + 4, uint32(min(count - rank, GROUP_PAIRS)))
    if tid == 0:
        stg_u32(out, uint32(total))
    if counter != 0 and mine >= 0 and rank == 0:
        atom_add(counter, uint32(1))


@inline
def ask(
    ring: Any, bar: Any, stage: Any, size: Any, w: Any, records: Any, item: Any, chunk: Any, items: Any, chunks: Any,
    policy: Any,
) -> None:  # fmt: skip
    """Fetch a chunk of an item: its expert is that of its group's record."""
    expert = int64(int32(lds_u32(uint32(records + item // items * (PLAN_RECORD * 4)))))
    fetch(ring, bar, stage, size, w + ((expert * items + item % items) * chunks + chunk) * size, policy)


@inline
def following(item: Any, chunk: Any, step: Any, chunks: Any) -> Any:
    """The item and chunk that a warp needs after these."""
    done = int32(1 if chunk == chunks - 1 else 0)
    return int32(item + done * step), int32(0 if done == 1 else chunk + 1)


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return x * rcp_approx(1.0 + exp2_approx(x * -LOG2_E))


def make_gate_up(*, d: int, i: int, topk: int, rows: int, chip: str, most: int, warps: int, stages: int) -> Kernel:
    """A warp makes 32 finished channels of one group: 2 gate and 2 up tiles, chunk by chunk from its own ring.

    topk is the most experts of a row; a launch says its own number, k, so the drafter shares the kernel. limit is the
    checkpoint's swiglu_limit.
    """
    WIDTH, SIZE = chunk_width(d, most), fp4_chunk_bytes(d, most)
    STAGE = 4 * SIZE
    CHUNKS, GROUPS32, ITEMS = d // WIDTH, WIDTH // 32, i // 32
    XSTRIDE, SSTRIDE, HSTRIDE = shared_stride(d), scale_stride(d), scale_stride(i)
    STAGE_X = rows * XSTRIDE <= STAGED
    AT_S = rows * XSTRIDE if STAGE_X else 0
    AT_PLAN = AT_S + rows * SSTRIDE
    AT_RING = -(-(AT_PLAN + plan_bytes(rows * topk)) // 16) * 16
    AT_BAR = AT_RING + warps * stages * STAGE
    THREADS = warps * 32
    expand, BIAS = (fp4x8_f16_cvt, 1.0) if chip in BLACKWELL else (fp4x8_f16_bits, FP4_BIAS)

    @kernel(
        threads=THREADS, grid=(SM_COUNT,), shared=AT_BAR + warps * stages * 8, name=f"experts_gate_up_{d}x{i}_r{rows}"
    )
    def gate_up(
        w: s64, x: s64, sx: s64, plan: s64, weights: s64, h: s64, sh: s64, live: s32, k: s32, limit: f32
    ) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + AT_RING + warp * (stages * STAGE))
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        policy = policy_evict_first()
        wait_for_previous_kernel()
        let_next_kernel_start()
        groups = int32(ldg_u32(plan))
        stage_words(sm + AT_PLAN, plan, (PLAN_HEAD + groups * PLAN_RECORD) * 4, tid, THREADS)
        stage_words(sm + AT_S, sx, live * SSTRIDE, tid, THREADS)
        sync_threads()
        records = uint32(sm + AT_PLAN + PLAN_HEAD * 4)
        # consecutive warps take consecutive items: neighbours in memory are read at the same time
        item = int32(warp * block_count() + block_index())
        step = int32(block_count() * warps)
        last = int32(groups * ITEMS)
        ahead = item
        chunk = int32(0)
        for s in unroll(stages):
            if ahead < last and lane == 0:
                ask(ring, bar, s, STAGE, w, records, ahead, chunk, ITEMS, CHUNKS, policy)
            ahead, chunk = following(ahead, chunk, step, CHUNKS)
        if STAGE_X:
            stage_rows(sm, x, live, d, d, XSTRIDE, tid, THREADS)
            sync_threads()
        stage = int32(0)
        phase = int32(0)
        while item < last:
            record = uint32(records + item // ITEMS * (PLAN_RECORD * 4))
            count = int32(lds_u32(uint32(record + 4)))
            pair_x = int32(lds_u32(uint32(record + 8 + (g if g < count else 0) * 4)))
            pair0 = int32(lds_u32(uint32(record + 8 + (2 * t if 2 * t < count else 0) * 4)))
            pair1 = int32(lds_u32(uint32(record + 8 + (2 * t + 1 if 2 * t + 1 < count else 0) * 4)))
            s0 = uint32(sm + AT_S + pair0 // k * SSTRIDE)
            s1 = uint32(sm + AT_S + pair1 // k * SSTRIDE)
            row = int64(pair_x // k)
            xa = int64(sm + row * XSTRIDE + t * 8) if STAGE_X else x + (row * d + t * 8)
            acc = regs(4, (0.0, 0.0, 0.0, 0.0))
            c = int32(0)
            while c < CHUNKS:
                mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                fp4_chunk(acc, 0, 4, uint32(ring + stage * STAGE), SIZE, GROUPS32, lane, expand, xa + c * WIDTH,
                          uint32(s0 + c * GROUPS32), uint32(s1 + c * GROUPS32), STAGE_X)  # fmt: skip
                sync_warp()
                if ahead < last and lane == 0:
                    ask(ring, bar, stage, STAGE, w, records, ahead, chunk, ITEMS, CHUNKS, policy)
                ahead, chunk = following(ahead, chunk, step, CHUNKS)
                stage = int32(stage + 1)
                if stage == stages:
                    stage = int32(0)
                    phase = int32(phase ^ 1)
                c = int32(c + 1)
            f0 = ldg_f32(weights + int64(pair0) * 4)
            f1 = ldg_f32(weights + int64(pair1) * 4)
            v = regs(8)  # channels g, g+8, g+16, g+24 of column 2t, then of column 2t+1
            for j in unroll(2):
                for r in unroll(2):
                    for column in unroll(2):
                        gate = fmin(round_bf16(acc[j][2 * r + column] * BIAS), limit)
                        up = fmax(fmin(round_bf16(acc[2 + j][2 * r + column] * BIAS), limit), -limit)
                        a = silu(gate)
                        v[4 * column + 2 * j + r] = round_bf16(a * up * (f0 if column == 0 else f1))
            channel = int32(item % ITEMS)
            for column in unroll(2):
                amax = fmax(
                    fmax(fabs(v[4 * column]), fabs(v[4 * column + 1])),
                    fmax(fabs(v[4 * column + 2]), fabs(v[4 * column + 3])),
                )
                amax = max_over(amax, QUAD_ROWS)
                e = q8_exponent(amax)
                f = inverse_scale(e)
                if 2 * t + column < count:
                    pair = pair0 if column == 0 else pair1
                    to = h + (int64(pair) * i + channel * 32 + g)
                    for j in unroll(4):
                        stg_u8(to + 8 * j, e4m3x2(0.0, v[4 * column + j] * f))
                    if g == 0:
                        stg_u8(sh + (int64(pair) * HSTRIDE + channel), e)
            item = int32(item + step)

    return gate_up


def make_down(*, d: int, i: int, topk: int, rows: int, chip: str, warps: int, stages: int) -> Kernel:
    """A warp makes 16 outputs of one group."""
    WIDTH, SIZE = chunk_width(i), fp4_chunk_bytes(i)
    CHUNKS, GROUPS32, ITEMS, PAIRS = i // WIDTH, WIDTH // 32, d // 16, rows * topk
    XSTRIDE, SSTRIDE = shared_stride(i), scale_stride(i)
    STAGE_X = PAIRS * XSTRIDE <= STAGED
    AT_S = PAIRS * XSTRIDE if STAGE_X else 0
    AT_PLAN = AT_S + PAIRS * SSTRIDE
    AT_RING = -(-(AT_PLAN + plan_bytes(PAIRS)) // 16) * 16
    AT_BAR = AT_RING + warps * stages * SIZE
    THREADS = warps * 32
    expand, BIAS = (fp4x8_f16_cvt, 1.0) if chip in BLACKWELL else (fp4x8_f16_bits, FP4_BIAS)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=AT_BAR + warps * stages * 8, name=f"experts_down_{d}x{i}_r{rows}")
    def down(w: s64, h: s64, sh: s64, plan: s64, y: s64, live: s32, k: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + AT_RING + warp * (stages * SIZE))
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        policy = policy_evict_first()
        wait_for_previous_kernel()
        let_next_kernel_start()
        groups = int32(ldg_u32(plan))
        stage_words(sm + AT_PLAN, plan, (PLAN_HEAD + groups * PLAN_RECORD) * 4, tid, THREADS)
        sync_threads()
        records = uint32(sm + AT_PLAN + PLAN_HEAD * 4)
        item = int32(warp * block_count() + block_index())
        step = int32(block_count() * warps)
        last = int32(groups * ITEMS)
        ahead = item
        chunk = int32(0)
        for s in unroll(stages):
            if ahead < last and lane == 0:
                ask(ring, bar, s, SIZE, w, records, ahead, chunk, ITEMS, CHUNKS, policy)
            ahead, chunk = following(ahead, chunk, step, CHUNKS)
        stage_words(sm + AT_S, sh, live * k * SSTRIDE, tid, THREADS)
        if STAGE_X:
            stage_rows(sm, h, live * k, i, i, XSTRIDE, tid, THREADS)
        sync_threads()
        stage = int32(0)
        phase = int32(0)
        while item < last:
            record = uint32(records + item // ITEMS * (PLAN_RECORD * 4))
            count = int32(lds_u32(uint32(record + 4)))
            pair_x = int32(lds_u32(uint32(record + 8 + (g if g < count else 0) * 4)))
            pair0 = int32(lds_u32(uint32(record + 8 + (2 * t if 2 * t < count else 0) * 4)))
            pair1 = int32(lds_u32(uint32(record + 8 + (2 * t + 1 if 2 * t + 1 < count else 0) * 4)))
            s0 = uint32(sm + AT_S + pair0 * SSTRIDE)
            s1 = uint32(sm + AT_S + pair1 * SSTRIDE)
            xa = int64(sm + pair_x * XSTRIDE + t * 8) if STAGE_X else h + (int64(pair_x) * i + t * 8)
            acc = regs(1, (0.0, 0.0, 0.0, 0.0))
            c = int32(0)
            while c < CHUNKS:
                mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                fp4_chunk(acc, 0, 1, uint32(ring + stage * SIZE), SIZE, GROUPS32, lane, expand, xa + c * WIDTH,
                          uint32(s0 + c * GROUPS32), uint32(s1 + c * GROUPS32), STAGE_X)  # fmt: skip
                sync_warp()
                if ahead < last and lane == 0:
                    ask(ring, bar, stage, SIZE, w, records, ahead, chunk, ITEMS, CHUNKS, policy)
                ahead, chunk = following(ahead, chunk, step, CHUNKS)
                stage = int32(stage + 1)
                if stage == stages:
                    stage = int32(0)
                    phase = int32(phase ^ 1)
                c = int32(c + 1)
            n = int32(item % ITEMS * 16 + g)
            for column in unroll(2):
                if 2 * t + column < count:
                    to = y + (int64(pair0 if column == 0 else pair1) * d + n) * 2
                    for r in unroll(2):
                        v = acc[0][2 * r + column] * BIAS
                        stg_u16(to + 16 * r, bf16x2(v, v))
            item = int32(item + step)

    return down


# (warps, stages) by rows; by rule for sm_90a, unmeasured. A stage of gate_up is 4.4 KB (128 columns of 4 tiles, so that
# one row's 432 items occupy enough warps); 16 and 24 staged rows leave room for fewer. down never has that problem.
GATE_UP = {8: (16, 2), 16: (8, 3), 24: (8, 2), 48: (16, 2)}
DOWN = (16, 2)
SMALL = (4, 2)


def tile_for(label: str, rows: int) -> int:
    """The row tile of the experts' kernels: small widths have one, as it decides only what is staged."""
    return ROW_TILES[label][-1] if label == "small" else tile_of(label, rows)


def entries(width: Width) -> list[Entry]:
    """Experts of a checkpoint, for backbone and drafter; the floor is the backbone's."""
    spec, found = width.spec, []
    d, i, count = spec.hidden_size, spec.moe_intermediate_size, spec.n_routed_experts
    topk = max(spec.num_experts_per_tok, spec.dspark_num_experts_per_tok)
    for rows in sorted({tile_for(width.label, rows) for rows in width.row_tiles}):
        shape = {"d": d, "i": i, "topk": topk, "rows": rows}
        warps, stages = GATE_UP[rows] if width.label == "v41" else SMALL
        gate_up = {**shape, "most": GATE_UP_CHUNK, "warps": warps, "stages": stages}
        down = {**shape, "warps": warps if width.label == "small" else DOWN[0], "stages": DOWN[1]}
        expected = count * (1 - (1 - topk / count) ** rows)  # distinct experts of independent rows
        matrix, operations = int(expected * (d * i // 2 + d * i // 32)), 2 * rows * topk * d * i
        for part, factory, arguments, matrices in (
            ("gate_up", make_gate_up, gate_up, 2),
            ("down", make_down, down, 1),
        ):
            label = f"experts.{part}/{width.label}/r{rows}"
            floor = (matrices * matrix, matrices * operations)
            found.append(Entry(label, factory, arguments, width.chips, experts_sum, *floor))
    return found
