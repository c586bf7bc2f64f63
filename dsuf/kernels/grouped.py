"""Routed FP4 experts of a prefill chunk: each multiplies the rows that chose it (loops: gemm.py, gemm_tensor.py).

    gate_up   h = q8(silu(min(w1 x, limit)) clamp(w3 x, -limit, limit) w_e)       one row for each (row, slot) pair
    down      y = w2 h

x bf16 [rows, D] in product order (decoded Q8 rows); weights float32 [pairs]; h bf16 [pairs, I] decoded, in product
order and in the order of the plan, so that an expert's rows lie together; y bf16 [pairs, D] by pair = row * top + slot:
whoever reads it adds a row's slots in ascending order, the shared expert last. Pairs that the plan leaves out are not
written. Packed weights and `chunk` are those of gate_up.py and experts.py. Plan: plan.py.

An expert's rows are cut into equal tiles of up to 256, rounded up to the next of WIDTHS, each with a loop of its own. A
tile has 128 weight rows: for gate_up two runs of 2 gate and 2 up tiles (64 channels), one a warpgroup.

Reference: dsuf.ops.expert.experts_sum (its parts before they are summed). Operations: 6 D I a pair.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.gemm import (
    FP4,
    FP4_NIBBLES,
    PARTS,
    THREADS,
    TILE_ROWS,
    TURN,
    Ring,
    copy_of,
    group_barrier,
    multiply,
    produce,
    products,
    start_barriers,
    turn,
)
from dsuf.kernels.gemm_tensor import WEIGHT_TILE, end_tensor, multiply_tensor, start_tensor, turn_tensor
from dsuf.kernels.hidden import silu
from dsuf.kernels.lang import Kernel, f32, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.plan import MOST_EXPERTS, job_of, read_plan, tiles_of
from dsuf.kernels.ptx.convert import (
    bf16_high,
    bf16_low,
    bf16x2,
    e4m3x2,
    e4m3x4_f16,
    f16_high,
    f16_low,
    fabs,
    fmax,
    fmin,
    round_bf16,
    ue8m0,
)
from dsuf.kernels.ptx.fragments import quotient
from dsuf.kernels.ptx.memory import ldg_f32, ldg_u32, lds_u32x4, shared_base, stg_u32, stg_u32x4
from dsuf.kernels.ptx.op import ALL_CHIPS, BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    give_some_registers,
    let_next_kernel_start,
    take_most_registers,
    thread_index,
    wait_for_previous_kernel,
    warp_min_u32,
)
from dsuf.kernels.quantise import inverse_scale, max_over, q8_exponent
from dsuf.ops.expert import experts_sum

SM_COUNT = 132
PLAN_BYTES = 8 * (MOST_EXPERTS + 1)
WIDTHS, STAGES = (192, 256), 5


@inline
def hidden_rows(
    tile: Any, t: Any, first: Any, left: Any, order: Any, weights: Any, h: Any, i: Any, channel: Any, limit: Any
) -> None:  # fmt: skip
    """Finished channels `channel` .. + 31 of 64 rows that stand in a turning tile: 4 lanes a row, 8 channels each.

    first: position of row 0 in the plan's order, left: how many rows are real.
    """
    octet = int32(t & 3)
    for row in range(t >> 2, 64, 32):
        at = uint32(tile + row * 128)
        gate = lds_u32x4(uint32(at + ((octet ^ (row & 7)) << 4)))
        up = lds_u32x4(uint32(at + (((4 + octet) ^ (row & 7)) << 4)))
        position = int32(first + min(row, left - 1))
        factor = ldg_f32(weights + int64(ldg_u32(order + int64(position) * 4)) * 4)
        v = regs(8)
        amax = 0.0
        for j in unroll(4):
            g0 = fmin(bf16_low(gate[j]), limit)
            g1 = fmin(bf16_high(gate[j]), limit)
            v[2 * j] = round_bf16(silu(g0) * fmax(fmin(bf16_low(up[j]), limit), -limit) * factor)
            v[2 * j + 1] = round_bf16(silu(g1) * fmax(fmin(bf16_high(up[j]), limit), -limit) * factor)
            amax = fmax(amax, fmax(fabs(v[2 * j]), fabs(v[2 * j + 1])))
        amax = max_over(amax, (1, 2))
        e = q8_exponent(amax)
        f = inverse_scale(e)
        scale = ue8m0[0](e)
        to = h + (int64(position) * i + channel) * 2 + octet * 4
        for j in unroll(4):
            pair = e4m3x4_f16(e4m3x2(v[2 * j + 1] * f, v[2 * j] * f))
            word = bf16x2(f16_high(pair[0]) * scale, f16_low(pair[0]) * scale)
            if row < left and channel < i:
                stg_u32(to + j * 16, word)


@inline
def scatter(tile: Any, t: Any, first: Any, left: Any, order: Any, y: Any, d: Any, n: Any) -> None:
    """Outputs n .. n + 63 of 64 rows that stand in a turning tile, each to its pair's row of y."""
    piece = int32(t & 7)
    r = int32(t >> 3)
    at = uint32(tile + r * 128 + ((piece ^ (r & 7)) << 4))
    for i in unroll(4):
        row = int32(16 * i + r)
        if row < left and n + piece * 8 < d:
            pair = int64(ldg_u32(order + int64(first + row) * 4))
            stg_u32x4(y + (pair * d + n + piece * 8) * 2, lds_u32x4(uint32(at + i * 2048)))


@inline
def width_of(widths: Any, count: Any) -> Any:
    """The first of the widths that holds so many rows."""
    width = int32(widths[0])
    for v in unroll(1, len(widths)):
        width = int32(widths[v] if count > widths[v - 1] else width)
    return width


def make_gate_up(*, widths: tuple[int, ...], stages: int, chip: str) -> Kernel:
    """widths: rows of a tile, multiples of 16 in ascending order, the last a multiple of 64 up to 256."""
    TENSOR, MOST = chip in BLACKWELL, widths[-1]
    WEIGHTS = FP4_NIBBLES if TENSOR else FP4
    STAGES_, TILES = (min(stages, 4), 2 * WEIGHT_TILE) if TENSOR else (stages, 0)
    RING = Ring.of(WEIGHTS, MOST, STAGES_, TILES + 2 * TURN + PLAN_BYTES)
    READERS = 1 if TENSOR else 8
    pair, zero, finish = products(widths)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=RING.size, name=f"grouped_gate_up_{len(widths)}_s{stages}")
    def gate_up(
        w: s64, x: s64, offsets: s64, order: s64, weights: s64, h: s64, experts: s32, top: s32, d: s32, i: s32,
        limit: f32, chunk: s32,
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        sm = shared_base()
        plan = uint32(sm + RING.rest + TILES + 2 * TURN)
        if tid == 0:
            start_barriers(uint32(sm + RING.bars), STAGES_, READERS)
        if TENSOR:
            tensor = start_tensor(RING, sm, tid)
        wait_for_previous_kernel()
        let_next_kernel_start()
        read_plan(plan, offsets, experts, MOST, tid, THREADS)
        across = int32((i + 63) >> 6)
        shift = int32(chunk >> 7)
        steps = int32(d >> 6)
        stage = int32(0)
        phase = int32(0)
        role = int32(warp_min_u32(uint32(tid >> 7)))  # for the compiler: uniform
        if role == 0:
            if not TENSOR:
                give_some_registers()
            number = int32(block_index())
            tiles = int32(tiles_of(plan, experts) * across)
            scale_bytes = int32(chunk >> 1)
            size = int32(chunk * 8 + scale_bytes)
            last = int32((i >> 5) - 1)
            rows = regs(MOST // 16)
            mine, _ = copy_of(tid, WEIGHTS)
            while number < tiles:
                job = quotient(number, across)
                place = int32(number - job * across)
                expert, first, count = job_of(plan, job, experts)
                for j in unroll(MOST // 16):
                    at = int32(first + min((tid >> 3) + 16 * j, count - 1))
                    rows[j] = uint32(quotient(int32(ldg_u32(order + int64(at) * 4)), top) * (d * 2))
                item = int32(min(place * 2 + (mine >> 2), last))
                base = w + ((int64(expert) * (last + 1) + item) * int64(steps >> shift) * 4 + (mine & 3)) * size
                if tid >= 64:
                    base = base + chunk * 8
                source = x + (tid & 7) * 16
                pieces = int32(width_of(widths, count) >> 4)
                stage, phase = produce(RING, WEIGHTS, sm, tid, steps, shift, source, rows, pieces, base,
                                       int32(4 * size), scale_bytes, stage, phase)  # fmt: skip
                number = int32(number + block_count())
        else:
            number = int32(block_index())
            tiles = int32(tiles_of(plan, experts) * across)
            lane = int32(tid & 31)
            warp = int32((tid >> 5) - 4)
            if TENSOR:
                crew = int32((warp & 3) >> 1)  # whose outputs this warp can read, and its place among those
                t = int32(((warp >> 2) * 2 + (warp & 1)) * 32 + lane)
                turns = int32(0)
                finished = int32(0)
            else:
                take_most_registers()
                crew = int32(role - 1)
                t = int32(tid & 127)
            tile = uint32(sm + RING.rest + TILES + crew * TURN)
            while number < tiles:
                job = quotient(number, across)
                channel = int32((number - job * across) * 64 + crew * 32)
                expert, first, count = job_of(plan, job, experts)
                if TENSOR:
                    stage, phase, turns, finished = multiply_tensor(
                        RING, WEIGHTS, sm, tensor, uint32(sm + RING.rest), warp, lane, count, steps, shift,
                        stage, phase, turns, finished,
                    )  # fmt: skip
                else:
                    acc = zero()
                    for v in unroll(len(widths)):
                        if count > (widths[v - 1] if v > 0 else 0) and count <= widths[v]:
                            acc, stage, phase = multiply(
                                RING, WEIGHTS, pair, zero, finish, sm, warp, lane, widths[v], steps, shift, stage, phase
                            )
                for q in unroll(0, MOST, 64):
                    if q < count:
                        if TENSOR:
                            turn_tensor(tensor, q, tile, 0, warp, lane)
                        else:
                            turn(acc, q, tile, int32(warp & 3), lane)
                        group_barrier(crew)
                        hidden_rows(tile, t, int32(first + q), int32(count - q), order, weights, h, i, channel, limit)
                        group_barrier(crew)
                number = int32(number + block_count())
        if TENSOR:
            end_tensor(tensor, tid)

    return gate_up


def make_down(*, widths: tuple[int, ...], stages: int, chip: str) -> Kernel:
    """The same for the second product."""
    TENSOR, MOST = chip in BLACKWELL, widths[-1]
    WEIGHTS = FP4_NIBBLES if TENSOR else FP4
    STAGES_, TILES = (min(stages, 4), 2 * WEIGHT_TILE) if TENSOR else (stages, 0)
    RING = Ring.of(WEIGHTS, MOST, STAGES_, TILES + 2 * TURN + PLAN_BYTES)
    READERS = 1 if TENSOR else 8
    pair, zero, finish = products(widths)

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=RING.size, name=f"grouped_down_{len(widths)}_s{stages}")
    def down(
        w: s64, h: s64, offsets: s64, order: s64, y: s64, experts: s32, d: s32, i: s32, chunk: s32
    ) -> None:  # fmt: skip
        tid = int32(thread_index())
        sm = shared_base()
        plan = uint32(sm + RING.rest + TILES + 2 * TURN)
        if tid == 0:
            start_barriers(uint32(sm + RING.bars), STAGES_, READERS)
        if TENSOR:
            tensor = start_tensor(RING, sm, tid)
        wait_for_previous_kernel()
        let_next_kernel_start()
        read_plan(plan, offsets, experts, MOST, tid, THREADS)
        across = int32((d + 127) >> 7)
        shift = int32(chunk >> 7)
        steps = int32(i >> 6)
        stage = int32(0)
        phase = int32(0)
        role = int32(warp_min_u32(uint32(tid >> 7)))  # for the compiler: uniform
        if role == 0:
            if not TENSOR:
                give_some_registers()
            number = int32(block_index())
            tiles = int32(tiles_of(plan, experts) * across)
            scale_bytes = int32(chunk >> 1)
            size = int32(chunk * 8 + scale_bytes)
            last = int32((d >> 4) - 1)
            rows = regs(MOST // 16)
            mine, _ = copy_of(tid, WEIGHTS)
            while number < tiles:
                job = quotient(number, across)
                place = int32(number - job * across)
                expert, first, count = job_of(plan, job, experts)
                for j in unroll(MOST // 16):
                    rows[j] = uint32((first + min((tid >> 3) + 16 * j, count - 1)) * (i * 2))
                part = int32(min(place * PARTS + mine, last))
                base = w + (int64(expert) * (last + 1) + part) * (int64(steps >> shift) * size)
                if tid >= 64:
                    base = base + chunk * 8
                source = h + (tid & 7) * 16
                pieces = int32(width_of(widths, count) >> 4)
                stage, phase = produce(RING, WEIGHTS, sm, tid, steps, shift, source, rows, pieces, base, size,
                                       scale_bytes, stage, phase)  # fmt: skip
                number = int32(number + block_count())
        else:
            number = int32(block_index())
            tiles = int32(tiles_of(plan, experts) * across)
            lane = int32(tid & 31)
            warp = int32((tid >> 5) - 4)
            if TENSOR:
                crew = int32((warp & 3) >> 1)  # whose outputs this warp can read, and its place among those
                t = int32(((warp >> 2) * 2 + (warp & 1)) * 32 + lane)
                turns = int32(0)
                finished = int32(0)
            else:
                take_most_registers()
                crew = int32(role - 1)
                t = int32(tid & 127)
            tile = uint32(sm + RING.rest + TILES + crew * TURN)
            while number < tiles:
                job = quotient(number, across)
                n = int32((number - job * across) * TILE_ROWS + crew * 64)
                expert, first, count = job_of(plan, job, experts)
                if TENSOR:
                    stage, phase, turns, finished = multiply_tensor(
                        RING, WEIGHTS, sm, tensor, uint32(sm + RING.rest), warp, lane, count, steps, shift,
                        stage, phase, turns, finished,
                    )  # fmt: skip
                else:
                    acc = zero()
                    for v in unroll(len(widths)):
                        if count > (widths[v - 1] if v > 0 else 0) and count <= widths[v]:
                            acc, stage, phase = multiply(
                                RING, WEIGHTS, pair, zero, finish, sm, warp, lane, widths[v], steps, shift, stage, phase
                            )
                for q in unroll(0, MOST, 64):
                    if q < count:
                        if TENSOR:
                            turn_tensor(tensor, q, tile, 0, warp, lane)
                        else:
                            turn(acc, q, tile, int32(warp & 3), lane)
                        group_barrier(crew)
                        scatter(tile, t, int32(first + q), int32(count - q), order, y, d, n)
                        group_barrier(crew)
                number = int32(number + block_count())
        if TENSOR:
            end_tensor(tensor, tid)

    return down


def entries(width: Width) -> list[Entry]:
    """One kernel each, for all widths: sizes are arguments. The floor is that of 4,096 rows of the real model."""
    if width.label != "v41":
        return []
    spec, rows = width.spec, 4096
    d, i, pairs = spec.hidden_size, spec.moe_intermediate_size, rows * spec.num_experts_per_tok
    matrix = spec.n_routed_experts * (d * i // 2 + d * i // 32)
    shape = {"widths": WIDTHS, "stages": STAGES}
    return [
        Entry("grouped.gate_up", make_gate_up, shape, ALL_CHIPS, experts_sum, 2 * matrix, 4 * pairs * d * i),
        Entry("grouped.down", make_down, shape, ALL_CHIPS, experts_sum, matrix, 2 * pairs * d * i),
    ]
