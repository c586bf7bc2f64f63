"""Routed FP4 experts and the shared FP8 expert of a decode step, without the host knowing the routing: two launches.

    gate_up   h = f16(2^SHIFT q8(bf16(silu(min(w1 x, limit)) clamp(w3 x, -limit, limit) w_e)))
    down      y = w2 h, one row of bf16 for each (row, chosen expert) pair, and one a row of the shared expert

A pair is row * k + slot. x16 f16 [rows, D]: 2^SHIFT times the quantised row (mixes.py writes it). h f16 [(k + 1) rows,
I]: the pairs, then the shared expert's rows (w_e = 1). y bf16 [pairs, D], shared_y bf16 [rows, D]; whoever reads them
adds a row's slots in ascending order, the shared expert last. The routing weight enters before the quantisation of h.

Weights: w13 is pack_gate_up and w2 pack_down, experts one after the other; shared_gate_up is pack_fp8 of w1 above w3.
Reference: dsuf.ops.expert.experts_sum (its parts before they are summed). Bytes: for each expert that a row chose
3 I D / 2 of codes and 3 I D / 32 of scales, for the shared one twice that less its coarser scales; operations 6 I D a
pair.

A quantised value is code * 2^e with e >= -22, so that f16 of 16 times it is exact but for codes under 2^-28, and
overflows from 4,094 on: normalised rows and hidden rows stay far below. So the inner loop has no scales of x.

The plan, pairs grouped by expert, is made by the router (route.py, expert_plan.py).

Work is cut into items of 32 channels (or outputs) of a group of up to eight pairs; a team of warps makes an item,
each taking every team-th chunk of K, and their sums are added in warp order. Shared items come first, as they do not
wait for the router, and count twice. down reads the plan before its wait: the router is two launches back.

    hand-off            who writes        who waits           reused
    ring stage          bulk copies       its warp            once every lane of the warp has loaded it (sync_warp)
    partial sums        warps of a team   one warp in turn    at the next item, behind the team's barrier
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.expert_plan import GROUP_PAIRS, PLAN_HEAD, PLAN_RECORD, plan_bytes
from dsuf.kernels.expert_walk import (
    LAST,
    PART,
    SHARED,
    STATE,
    STRIDE,
    TEAMS,
    Shape,
    add_up,
    ask,
    begin,
    multiply,
)
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import ROWS, interleave, pack_fp4
from dsuf.kernels.ptx.convert import (
    bf16x2,
    e4m3x2,
    e4m3x4_f16,
    exp2_approx,
    fabs,
    fmax,
    fmin,
    fp4x8_f16_bits,
    fp4x8_f16_cvt,
    mul_f16x2,
    rcp_approx,
    round_bf16,
)
from dsuf.kernels.ptx.copy import (
    fence_async,
    mbarrier_init,
    policy_evict_first,
)
from dsuf.kernels.ptx.memory import (
    ldg_f32,
    ldg_u32,
    lds_u32,
    shared_base,
    stg_u16,
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
from dsuf.kernels.quantise import WIDE_SHIFT, inverse_scale, max_over, q8_exponent, wide_scale
from dsuf.kernels.stream import FP4_BIAS, stage_words
from dsuf.ops.expert import experts_sum

GATE_UP_CHUNK, GATE_UP_TILES, DOWN_CHUNK = 128, 2, 256  # columns of chunks; gate tiles, then up tiles, lie together
Fp4 = tuple[np.ndarray, np.ndarray]  # packed codes and scales
LOG2_E = 1.4426950408889634
SM_COUNT, MOST_ROWS, MOST_CHOSEN = 132, 48, 6
QUAD_ROWS = (4, 8, 16)  # lanes that hold the same columns
SHIFT = WIDE_SHIFT  # activations are f16 of 2^SHIFT times the value


def pack_gate_up(w1: Fp4, w3: Fp4, chip: str) -> np.ndarray:
    """An expert's w1 and w3 (codes [I, D/2], scales [I, D/32]) as gate_up reads them."""
    return interleave(*(pack_fp4(*w, chip, GATE_UP_CHUNK) for w in (w1, w3)), GATE_UP_TILES)


def pack_down(w2: Fp4, chip: str) -> np.ndarray:
    """An expert's w2 (codes [D, I/2], scales [D, I/32]) as down reads it."""
    return pack_fp4(*w2, chip)


@inline
def silu(x: Any) -> Any:
    """x / (1 + e^-x)."""
    return x * rcp_approx(1.0 + exp2_approx(x * -LOG2_E))


def make_gate_up(*, d: int, i: int, chip: str, warps: int, team: int, stages: int, pairs: int) -> Kernel:
    """pairs: the most of a launch; a launch says its rows, experts of a row k, and the checkpoint's swiglu_limit."""
    SHAPE = Shape.of(d, GATE_UP_CHUNK, i // 32, 2 * GATE_UP_TILES, 1, i // ROWS, team)
    AT_PLAN = warps * stages * SHAPE.stage
    AT_BAR = AT_PLAN + plan_bytes(pairs)
    AT_SUM = AT_BAR + -(-warps * stages * 8 // 16) * 16
    THREADS, TEAMS_HERE, ITEMS = warps * 32, warps // team, SHAPE.items
    expand, BIAS = (fp4x8_f16_cvt, 2.0**-SHIFT) if chip in BLACKWELL else (fp4x8_f16_bits, FP4_BIAS * 2.0**-SHIFT)
    SHARED_BYTES = AT_SUM + warps * SHAPE.tiles * 512

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=SHARED_BYTES, name=f"experts_gate_up_{d}x{i}")
    def gate_up(w: s64, shared: s64, x: s64, plan: s64, weights: s64, h: s64, live: s32, k: s32, limit: f32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        crew = int32(warp // team)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + warp * (stages * SHAPE.stage))
        records = uint32(sm + AT_PLAN + PLAN_HEAD * 4)
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        sync_warp()
        policy = policy_evict_first()
        state = regs(STATE)
        item = int32(crew * block_count() + block_index())
        begin(state, live, ITEMS, item, int32(block_count() * TEAMS_HERE), int32(warp - crew * team))
        stride = state[STRIDE]
        early = int32(1 if item < state[SHARED] else 0)
        if early == 1:  # the shared expert's weights do not wait for the router
            for s in range(stages):
                ask(state, s, SHAPE, ring, bar, w, shared, records, lane, policy)
        wait_for_previous_kernel()
        let_next_kernel_start()
        groups = int32(ldg_u32(plan))
        stage_words(sm + AT_PLAN, plan, (PLAN_HEAD + groups * PLAN_RECORD) * 4, tid, THREADS)
        sync_threads()
        state[LAST] = int32(state[SHARED] + groups * ITEMS)
        if early == 0:
            for s in range(stages):
                ask(state, s, SHAPE, ring, bar, w, shared, records, lane, policy)
        turn = int32(0)
        while item < state[LAST]:
            is_shared = item < state[SHARED]
            base = int32(item // ITEMS * GROUP_PAIRS)  # of the shared expert's rows
            record = uint32(records + max(item - state[SHARED], 0) // ITEMS * (PLAN_RECORD * 4))
            count = int32(min(live - base, GROUP_PAIRS))
            row = int64(base + (g if g < count else 0))
            if not is_shared:
                count = int32(lds_u32(uint32(record + 4)))
                row = int64(lds_u32(uint32(record + 8 + (g if g < count else 0) * 4)) // uint32(k))
            acc = regs(SHAPE.tiles, (0.0, 0.0, 0.0, 0.0))
            multiply(acc, state, SHAPE, stages, is_shared, expand, x + (row * (2 * d) + t * 16), ring, bar, w, shared,
                     records, lane, policy)  # fmt: skip
            if team > 1:
                add_up(acc, SHAPE.tiles, uint32(sm + AT_SUM + crew * (team * SHAPE.tiles * 512) + lane * 16),
                       state[PART], turn, team, uint32(1 + crew))  # fmt: skip
            if state[PART] == turn:
                bias = 2.0**-SHIFT if is_shared else BIAS
                channel = int32(max(item - state[SHARED], 0) % ITEMS)
                if is_shared:
                    channel = int32(item % ITEMS)
                for column in unroll(2):
                    mine = int32(2 * t + column)
                    pair = int32(live * k + base + mine)
                    factor = 1.0
                    if mine < count and not is_shared:
                        pair = int32(lds_u32(uint32(record + 8 + mine * 4)))
                        factor = ldg_f32(weights + int64(pair) * 4)
                    v = regs(4)  # channels g, g + 8, g + 16, g + 24
                    for j in unroll(2):
                        for r in unroll(2):
                            gate = fmin(round_bf16(acc[j][2 * r + column] * bias), limit)
                            up = fmax(fmin(round_bf16(acc[2 + j][2 * r + column] * bias), limit), -limit)
                            a = silu(gate)
                            v[2 * j + r] = round_bf16(a * up * factor)
                    amax = fmax(fmax(fabs(v[0]), fabs(v[1])), fmax(fabs(v[2]), fabs(v[3])))
                    e = q8_exponent(max_over(amax, QUAD_ROWS))
                    f = inverse_scale(e)
                    code = uint32(e4m3x2(v[1] * f, v[0] * f) | e4m3x2(v[3] * f, v[2] * f) << 16)
                    two = e4m3x4_f16(code)
                    m = wide_scale(e)
                    if mine < count:
                        to = h + (int64(pair) * i + channel * 32 + g) * 2
                        for j in unroll(2):
                            z = mul_f16x2(two[j], m)
                            stg_u16(to + 32 * j, z)
                            stg_u16(to + 32 * j + 16, uint32(z >> 16))
            turn = int32(turn + 1 if turn < team - 1 else 0)
            item = int32(item + stride)
            stride = state[TEAMS]

    return gate_up


def make_down(*, d: int, i: int, chip: str, warps: int, team: int, stages: int, pairs: int) -> Kernel:
    """pairs: the most of a launch."""
    SHAPE = Shape.of(i, DOWN_CHUNK, d // 32, 2, 2, 0, team)
    AT_PLAN = warps * stages * SHAPE.stage
    AT_BAR = AT_PLAN + plan_bytes(pairs)
    AT_SUM = AT_BAR + -(-warps * stages * 8 // 16) * 16
    THREADS, TEAMS_HERE, ITEMS = warps * 32, warps // team, SHAPE.items
    expand, BIAS = (fp4x8_f16_cvt, 2.0**-SHIFT) if chip in BLACKWELL else (fp4x8_f16_bits, FP4_BIAS * 2.0**-SHIFT)
    SHARED_BYTES = AT_SUM + (warps * SHAPE.tiles * 512 if team > 1 else 0)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=SHARED_BYTES, name=f"experts_down_{d}x{i}")
    def down(w: s64, shared: s64, h: s64, plan: s64, y: s64, shared_y: s64, live: s32, k: s32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        t = int32(lane & 3)
        crew = int32(warp // team)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (stages * 8))
        ring = uint32(sm + warp * (stages * SHAPE.stage))
        records = uint32(sm + AT_PLAN + PLAN_HEAD * 4)
        if lane == 0:
            for s in unroll(stages):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        policy = policy_evict_first()
        # the router is two launches back, so its plan stands, and weights can be asked for
        groups = int32(ldg_u32(plan))
        stage_words(sm + AT_PLAN, plan, (PLAN_HEAD + groups * PLAN_RECORD) * 4, tid, THREADS)
        sync_threads()
        state = regs(STATE)
        item = int32(crew * block_count() + block_index())
        begin(state, live, ITEMS, item, int32(block_count() * TEAMS_HERE), int32(warp - crew * team))
        stride = state[STRIDE]
        state[LAST] = int32(state[SHARED] + groups * ITEMS)
        for s in range(stages):
            ask(state, s, SHAPE, ring, bar, w, shared, records, lane, policy)
        wait_for_previous_kernel()
        let_next_kernel_start()
        turn = int32(0)
        while item < state[LAST]:
            is_shared = item < state[SHARED]
            base = int32(item // ITEMS * GROUP_PAIRS)
            record = uint32(records + max(item - state[SHARED], 0) // ITEMS * (PLAN_RECORD * 4))
            count = int32(min(live - base, GROUP_PAIRS))
            row = int64(live * k + base + (g if g < count else 0))
            if not is_shared:
                count = int32(lds_u32(uint32(record + 4)))
                row = int64(int32(lds_u32(uint32(record + 8 + (g if g < count else 0) * 4))))
            acc = regs(SHAPE.tiles, (0.0, 0.0, 0.0, 0.0))
            multiply(acc, state, SHAPE, stages, is_shared, expand, h + (row * (2 * i) + t * 16), ring, bar, w, shared,
                     records, lane, policy)  # fmt: skip
            if team > 1:
                add_up(acc, SHAPE.tiles, uint32(sm + AT_SUM + crew * (team * SHAPE.tiles * 512) + lane * 16),
                       state[PART], turn, team, uint32(1 + crew))  # fmt: skip
            if state[PART] == turn:
                bias = 2.0**-SHIFT if is_shared else BIAS
                n = int32(max(item - state[SHARED], 0) % ITEMS * 32 + g)
                if is_shared:
                    n = int32(item % ITEMS * 32 + g)
                for column in unroll(2):
                    mine = int32(2 * t + column)
                    if mine < count:
                        to = shared_y + (int64(base + mine) * d + n) * 2
                        if not is_shared:
                            to = y + (int64(int32(lds_u32(uint32(record + 8 + mine * 4)))) * d + n) * 2
                        for j in unroll(2):
                            for r in unroll(2):
                                v = acc[j][2 * r + column] * bias
                                stg_u16(to + 32 * j + 16 * r, bf16x2(v, v))
            turn = int32(turn + 1 if turn < team - 1 else 0)
            item = int32(item + stride)
            stride = state[TEAMS]

    return down


# Measured on an H200 at 6 rows (32 experts) and 1: 12 warps of 128 registers beat 16 and 8; teams that share K even out
# the last round (gate_up 4: 98 us, 5: 110; down 3 of two tiles: 52, no team: 52); two stages beat three.
GATE_UP = {"v41": {"warps": 12, "team": 4, "stages": 2}, "small": {"warps": 4, "team": 2, "stages": 2}}
DOWN = {"v41": {"warps": 12, "team": 3, "stages": 2}, "small": {"warps": 4, "team": 1, "stages": 2}}


def blocks(label: str) -> int:
    """Grid of both launches; any is right, small widths have little to share out."""
    return SM_COUNT if label == "v41" else 8


def entries(width: Width) -> list[Entry]:
    """Experts of a checkpoint, for backbone and drafter; the floor is the backbone's with one row."""
    spec, label = width.spec, width.label
    d, i = spec.hidden_size, spec.moe_intermediate_size
    topk = max(spec.num_experts_per_tok, spec.dspark_num_experts_per_tok)
    shape = {"d": d, "i": i, "pairs": MOST_ROWS * MOST_CHOSEN}
    matrix, shared = topk * (d * i // 2 + d * i // 32), d * i + d * i // 1024
    operations = 2 * (topk + 1) * d * i
    return [
        Entry(f"experts.gate_up/{label}", make_gate_up, {**shape, **GATE_UP[label]}, width.chips, experts_sum,
              2 * (matrix + shared), 2 * operations),
        Entry(f"experts.down/{label}", make_down, {**shape, **DOWN[label]}, width.chips, experts_sum, matrix + shared,
              operations),
    ]  # fmt: skip
