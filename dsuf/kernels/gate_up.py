"""First products of a decode step's experts, routed (FP4) and shared (FP8), without the host knowing the routing.

    h = f16(2^SHIFT q8(bf16(silu(min(w1 x, limit)) clamp(w3 x, -limit, limit) w_e)))

A pair is row * k + slot. x16 f16 [rows, D]: 2^SHIFT times the quantised row (mixes.py writes it), so the inner loop has
no scales of x. h f16 [(k + 1) rows, I]: the pairs, then the shared expert's rows (w_e = 1). The routing weight enters
before the quantisation of h. Weights: w is pack_gate_up of every expert, one after the other; shared is pack_fp8 of w1
above w3. Reference: dsuf.ops.expert.swiglu and ops.qdq.q8 on dequantised weights. Bytes: I D of codes and I D / 16 of
scales for each expert that a row chose, 2 I D for the shared one; operations 4 I D a pair.

The plan, pairs grouped by expert, is made by the router (route.py, expert_plan.py). An item is 32 channels (two gate
tiles, two up tiles) of a group of up to eight pairs. Four warps, a crew, share K: each takes every fourth chunk, and
their sums are added in warp order. Routed items are a crew's. A shared item is four crews', a tile each: its weights
are twice as large, and do not wait for the router, so a block asks for as much of them as it holds before its wait.

    hand-off            who writes        who waits           reused
    ring stage          bulk copy         its warp            once every lane of the warp has loaded it (sync_warp)
    partial sums        warps of an item  one warp in turn    at the next item, behind the crew's or the block's barrier
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dsuf.kernels.expert_plan import GROUP_PAIRS, PLAN_HEAD, PLAN_RECORD, plan_bytes
from dsuf.kernels.expert_walk import Shape, fp4_on, fp4_tiles, fp8_tile, leave_part, sum_of_parts
from dsuf.kernels.hidden import CHANNELS, store_hidden
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.pack import interleave, pack_fp4
from dsuf.kernels.ptx.copy import (
    bulk_load_hint,
    fence_async,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    policy_evict_first,
)
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_u32, shared_base, sts_f32x4, sts_u32
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    let_next_kernel_start,
    sync_threads,
    sync_warp,
    thread_index,
    wait_for_previous_kernel,
)
from dsuf.kernels.quantise import WIDE_SHIFT
from dsuf.kernels.stream import stage_words

GATE_UP_CHUNK, GATE_UP_TILES = 128, 2  # columns of a chunk; gate tiles, then up tiles, lie together
# Measured on an H200 with routed items alone: 16 warps in crews of four 4.93 ms a step of 1 row, 12 in crews of three
# 4.91, of four 5.10, and 16 ahead at 12 rows; three stages cost 0.02 to 0.2 ms more. A shared item of one crew took as
# long as all that 1 row routes: 29.4 us a launch, as it is 26.5.
TILES, CREW, CREWS, STAGES = 2 * GATE_UP_TILES, 4, 4, 2
WARPS, THREADS = CREW * CREWS, 32 * CREW * CREWS
SM_COUNT = 132
Fp4 = tuple[np.ndarray, np.ndarray]  # packed codes and scales


def pack_gate_up(w1: Fp4, w3: Fp4, chip: str) -> np.ndarray:
    """An expert's w1 and w3 (codes [I, D/2], scales [I, D/32]) as gate_up reads them."""
    return interleave(*(pack_fp4(*w, chip, GATE_UP_CHUNK) for w in (w1, w3)), GATE_UP_TILES)


# What a warp remembers of what it fetches: the next address, chunks left of its run and the bytes of one; the next
# shared item and where they end, the same of its crew's items.
AT, LEFT, SIZE, SHARED, SHARED_END, OWN, OWN_END, WALK = range(8)


@inline
def chunks_of(chunks: Any, part: Any) -> Any:
    """Chunks of a warp: every fourth from its part on."""
    return int32((chunks + CREW - 1 - part) >> 2)


@inline
def aim(walk: Any, shape: Any, w: Any, shared: Any, records: Any, crew: Any, part: Any) -> None:
    """Where the next item's weights lie: a crew's tile of a shared item, or all tiles of its own."""
    if walk[SHARED] < walk[SHARED_END]:
        place = int32(walk[SHARED] % shape.items * GATE_UP_TILES + (crew & 1))
        place = int32(place + (crew >> 1) * (shape.items * GATE_UP_TILES))
        walk[AT] = shared + (int64(place) * shape.shared_chunks + part) * shape.shared_run
        walk[LEFT] = chunks_of(shape.shared_chunks, part)
        walk[SIZE] = int32(shape.shared_run)
        walk[SHARED] = int32(walk[SHARED] + block_count())
    else:
        item = walk[OWN]
        expert = int64(int32(lds_u32(uint32(records + item // shape.items * (PLAN_RECORD * 4)))))
        walk[AT] = w + ((expert * shape.items + item % shape.items) * shape.chunks + part) * shape.run
        walk[LEFT] = chunks_of(shape.chunks, part)
        walk[SIZE] = int32(shape.run)
        walk[OWN] = int32(item + CREWS * block_count())


@inline
def ask(walk: Any, shape: Any, stage: Any, ring: Any, bar: Any, w: Any, shared: Any, records: Any, crew: Any, part: Any,
        lane: Any, policy: Any) -> None:  # fmt: skip
    """Fetch what a warp needs next into a ring stage (one lane does)."""
    if walk[LEFT] == 0 and (walk[SHARED] < walk[SHARED_END] or walk[OWN] < walk[OWN_END]):
        aim(walk, shape, w, shared, records, crew, part)
    if walk[LEFT] > 0:
        if lane == 0:
            ready = uint32(bar + 8 * stage)
            mbarrier_expect(ready, uint32(walk[SIZE]))
            bulk_load_hint(uint32(ring + stage * shape.stage), walk[AT], uint32(walk[SIZE]), ready, policy)
        walk[AT] = walk[AT] + CREW * walk[SIZE]
        walk[LEFT] = int32(walk[LEFT] - 1)


def make_gate_up(*, d: int, i: int, chip: str, pairs: int) -> Kernel:
    """pairs: the most of a launch; a launch says its rows, experts of a row k, and the checkpoint's swiglu_limit."""
    SHAPE = Shape.of(d, GATE_UP_CHUNK, i // CHANNELS, TILES, 1, CREW)
    ITEMS, WIDTH, SHARED_WIDTH = SHAPE.items, SHAPE.width, SHAPE.shared_width
    AT_PLAN = WARPS * STAGES * SHAPE.stage
    AT_BAR = AT_PLAN + plan_bytes(pairs)
    AT_SUM = AT_BAR + WARPS * STAGES * 8
    expand, UNIT = fp4_on(chip)

    @kernel(
        threads=THREADS, grid=(SM_COUNT,), shared=AT_SUM + WARPS * TILES * 512, name=f"experts_gate_up_{d}x{i}"
    )  # fmt: skip
    def gate_up(w: s64, shared: s64, x: s64, plan: s64, weights: s64, h: s64, live: s32, k: s32, limit: f32) -> None:
        tid = int32(thread_index())
        lane = int32(tid & 31)
        warp = int32(tid >> 5)
        g = int32(lane >> 2)
        crew = int32(warp >> 2)
        part = int32(warp & 3)
        sm = shared_base()
        bar = uint32(sm + AT_BAR + warp * (STAGES * 8))
        ring = uint32(sm + warp * (STAGES * SHAPE.stage))
        records = uint32(sm + AT_PLAN + PLAN_HEAD * 4)
        sums = uint32(sm + AT_SUM + lane * 16)  # of the block's items; of a crew's:
        own_sums = uint32(sums + crew * (CREW * TILES * 512))
        if lane == 0:
            for s in unroll(STAGES):
                mbarrier_init(uint32(bar + 8 * s), uint32(1))
            fence_async()
        sync_warp()
        policy = policy_evict_first()
        walk = regs(WALK, int32(0))
        walk[AT] = int64(0)
        item = int32(block_index())
        walk[SHARED] = item
        walk[SHARED_END] = int32((live + GROUP_PAIRS - 1) // GROUP_PAIRS * ITEMS)
        steps = chunks_of(SHAPE.shared_chunks, part)
        if steps == 0:  # there are fewer chunks than warps: nothing to fetch
            walk[SHARED] = walk[SHARED_END]
        nth = int32((1 if item < walk[SHARED_END] else 0) + (1 if item + block_count() < walk[SHARED_END] else 0))
        asked = int32(min(nth * steps, STAGES))
        for s in range(asked):
            ask(walk, SHAPE, s, ring, bar, w, shared, records, crew, part, lane, policy)
        # blocks without a shared item, or with one less, have the first of the others
        after = int32(uint32(walk[SHARED_END]) % uint32(block_count()))
        place = int32(block_index() - after + (block_count() if block_index() < after else 0))
        words = int32(PLAN_HEAD + live * k * PLAN_RECORD)  # of the longest plan: its length comes with its beginning
        wait_for_previous_kernel()
        let_next_kernel_start()
        if tid < words:
            sts_u32(uint32(sm + AT_PLAN + 4 * tid), ldg_u32(plan + 4 * int64(tid)))
        sync_threads()
        groups = int32(lds_u32(uint32(sm + AT_PLAN)))
        if PLAN_HEAD + groups * PLAN_RECORD > THREADS:
            rest = int32((PLAN_HEAD + groups * PLAN_RECORD - THREADS) * 4)
            stage_words(sm + AT_PLAN + 4 * THREADS, plan + 4 * THREADS, rest, tid, THREADS)
            sync_threads()
        items = int32(groups * ITEMS)
        walk[OWN] = int32(crew * block_count() + place if part < SHAPE.chunks else items)
        walk[OWN_END] = items
        for s in range(asked, STAGES):
            ask(walk, SHAPE, s, ring, bar, w, shared, records, crew, part, lane, policy)
        stage = int32(0)
        phase = int32(0)
        turn = int32(0)
        acc = regs(TILES, (0.0, 0.0, 0.0, 0.0))
        of_lane = x + (lane & 3) * 16
        own = int32(crew * block_count() + place)
        own_steps = chunks_of(SHAPE.chunks, part)
        while item < walk[SHARED_END] or own < items:
            is_shared = item < walk[SHARED_END]
            now = int32(item if is_shared else own)
            base = int32(now // ITEMS * GROUP_PAIRS)  # of the shared expert's rows
            record = uint32(records + (0 if is_shared else now // ITEMS) * (PLAN_RECORD * 4))
            count = int32(min(live - base, GROUP_PAIRS))
            row = int64(base + (g if g < count else 0))
            if not is_shared:
                count = int32(lds_u32(uint32(record + 4)))
                row = int64(lds_u32(uint32(record + 8 + (g if g < count else 0) * 4)) // uint32(k))
            at_x = of_lane + row * (2 * d)
            for n in unroll(TILES):
                acc[n] = (0.0, 0.0, 0.0, 0.0)
            if is_shared:
                at_x = at_x + part * (2 * SHARED_WIDTH)
                for _ in range(steps):
                    mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                    fp8_tile(acc, uint32(ring + stage * SHAPE.stage), SHAPE, lane, at_x)
                    at_x = at_x + CREW * SHARED_WIDTH * 2
                    sync_warp()
                    ask(walk, SHAPE, stage, ring, bar, w, shared, records, crew, part, lane, policy)
                    phase = int32(phase ^ stage)
                    stage = int32(stage ^ 1)
                sync_threads()
                sts_f32x4(uint32(sums + (part * TILES + crew) * 512), acc[0])
                sync_threads()
                item = int32(item + block_count())
            else:
                at_x = at_x + part * (2 * WIDTH)
                for _ in range(own_steps):
                    mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
                    fp4_tiles(acc, uint32(ring + stage * SHAPE.stage), SHAPE, lane, expand, at_x)
                    at_x = at_x + CREW * WIDTH * 2
                    sync_warp()
                    ask(walk, SHAPE, stage, ring, bar, w, shared, records, crew, part, lane, policy)
                    phase = int32(phase ^ stage)
                    stage = int32(stage ^ 1)
                leave_part(acc, TILES, own_sums, part, CREW, uint32(1 + crew))
                own = int32(own + CREWS * block_count())
            if part == turn and (crew == 0 or not is_shared):
                sum_of_parts(acc, TILES, own_sums, CREW)
                unit = 2.0**-WIDE_SHIFT if is_shared else UNIT
                channel = int32(now % ITEMS * CHANNELS + g)
                for column in unroll(2):
                    mine = int32(2 * (lane & 3) + column)
                    pair = int32(live * k + base + mine)
                    share = 1.0
                    if mine < count and not is_shared:
                        pair = int32(lds_u32(uint32(record + 8 + mine * 4)))
                        share = ldg_f32(weights + int64(pair) * 4)
                    to = h + (int64(pair) * i + channel) * 2
                    store_hidden(acc, column, unit, limit, share, to, mine < count)
            turn = int32(turn + 1 & 3)

    return gate_up
