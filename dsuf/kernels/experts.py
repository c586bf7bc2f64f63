"""Second products of a decode step's experts, routed (FP4) and shared (FP8); the first ones are gate_up.py's.

    y = w2 h, one row of bf16 for each (row, chosen expert) pair, and one a row of the shared expert

A pair is row * k + slot. h f16 [(k + 1) rows, I] as gate_up leaves it: the pairs, then the shared expert's rows. y bf16
[pairs, D], shared_y bf16 [rows, D]; whoever reads them adds a row's slots in ascending order, the shared expert last.
Weights: w2 is pack_down, experts one after the other, the shared one's pack_fp8. Reference: dsuf.ops.expert.experts_sum
(its parts before they are summed). Bytes: for each expert that a row chose I D / 2 of codes and I D / 32 of scales, I D
for the shared one; operations 2 I D a pair.

Work is cut into items of 32 outputs of a group of up to eight pairs; a team of warps makes an item, each taking every
team-th chunk of K, and their sums are added in warp order. Shared items come first and count twice. The plan
(expert_plan.py) is read before the wait: the router is two launches back.

    hand-off            who writes        who waits           reused
    ring stage          bulk copies       its warp            once every lane of the warp has loaded it (sync_warp)
    partial sums        warps of a team   one warp in turn    at the next item, behind the team's barrier
"""

from __future__ import annotations

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
    ask,
    begin,
    fp4_on,
    leave_part,
    multiply,
    sum_of_parts,
)
from dsuf.kernels.gate_up import SM_COUNT, Fp4, make_gate_up
from dsuf.kernels.lang import Kernel, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import pack_fp4
from dsuf.kernels.ptx.convert import (
    bf16x2,
)
from dsuf.kernels.ptx.copy import (
    fence_async,
    mbarrier_init,
    policy_evict_first,
)
from dsuf.kernels.ptx.memory import (
    ldg_u32,
    lds_u32,
    shared_base,
    stg_u16,
)
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    sync_threads,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import WIDE_SHIFT
from dsuf.kernels.stream import stage_words
from dsuf.ops.expert import experts_sum

DOWN_CHUNK = 256  # columns of a chunk
MOST_ROWS, MOST_CHOSEN = 48, 6
SHIFT = WIDE_SHIFT  # activations are f16 of 2^SHIFT times the value


def pack_down(w2: Fp4, chip: str) -> np.ndarray:
    """An expert's w2 (codes [D, I/2], scales [D, I/32]) as down reads it."""
    return pack_fp4(*w2, chip)


def make_down(*, d: int, i: int, chip: str, warps: int, team: int, stages: int, pairs: int) -> Kernel:
    """pairs: the most of a launch."""
    SHAPE = Shape.of(i, DOWN_CHUNK, d // 32, 2, 2, team)
    AT_PLAN = warps * stages * SHAPE.stage
    AT_BAR = AT_PLAN + plan_bytes(pairs)
    AT_SUM = AT_BAR + -(-warps * stages * 8 // 16) * 16
    THREADS, TEAMS_HERE, ITEMS = warps * 32, warps // team, SHAPE.items
    expand, BIAS = fp4_on(chip)
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
            sums = uint32(sm + AT_SUM + crew * (team * SHAPE.tiles * 512) + lane * 16)
            if team > 1:
                leave_part(acc, SHAPE.tiles, sums, state[PART], team, uint32(1 + crew))
            if state[PART] == turn:
                if team > 1:
                    sum_of_parts(acc, SHAPE.tiles, sums, team)
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


# Measured on an H200 at 6 rows (32 experts) and 1: 12 warps beat 16 and 8; teams that share K even out the last round
# (three of two tiles: 52 us, no team: 52, but 1.3 us slower at 1 row); two stages beat three.
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
        Entry(f"experts.gate_up/{label}", make_gate_up, shape, width.chips, experts_sum,
              2 * (matrix + shared), 2 * operations),
        Entry(f"experts.down/{label}", make_down, {**shape, **DOWN[label]}, width.chips, experts_sum, matrix + shared,
              operations),
    ]  # fmt: skip
