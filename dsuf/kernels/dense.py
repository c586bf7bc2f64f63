"""Dense products of a prefill chunk, hundreds to thousands of rows (gemm.py and gemm_tensor.py have the inner loops).

    y[r, g n + j] = sum_k x[r, g K + k] W[g n + j, k]        g = 0 .. groups - 1 (one, or the groups of wo_a)

    kind   W                                    y
    fp8    e4m3, ue8m0 per 32x32 (pack_fp8)     bf16 [rows, groups * n]      projections
    bf16   bf16 (pack_bf16)                     float32 [rows, n]            router, compressor, index weights

x bf16 [rows, groups * K] in product order: decoded Q8 rows, or plain bf16 ones. n a multiple of 16, K of 64; `chunk`
says how many columns a packed chunk has. Any grid will do: blocks walk the tiles.

Reference: dsuf.ops.product.product and grouped_product. Operations: 2 rows groups n K. Rows of x may be poisoned beyond
`rows`: they are not read.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.catalogue import Entry, Width
from dsuf.kernels.gemm import (
    BF16,
    FP8,
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
from dsuf.kernels.lang import Kernel, inline, int32, int64, kernel, regs, s32, s64, uint32, unroll
from dsuf.kernels.ptx.fragments import quotient
from dsuf.kernels.ptx.memory import lds_u32x4, shared_base, stg_u32x4, sts_f32
from dsuf.kernels.ptx.op import ALL_CHIPS, BLACKWELL
from dsuf.kernels.ptx.sync import (
    block_count,
    block_index,
    give_some_registers,
    let_next_kernel_start,
    sync_threads,
    take_most_registers,
    thread_index,
    wait_for_previous_kernel,
    warp_min_u32,
)
from dsuf.ops.product import product

WIDE = 68 * 4  # bytes of a row of 64 float32 outputs while they are turned: 4 words more, so that no banks meet
TURN_WIDE = 64 * WIDE
SM_COUNT = 132


@inline
def tile_of(number: Any, down: Any, across: Any, groups: Any, span: Any) -> Any:
    """(activation tile, group, weight tile of it): `span` activation tiles run beside each other, so that L2 serves."""
    weights = int32(across * groups)
    band = quotient(number, int32(span * weights))
    rest = int32(number - band * (span * weights))
    wide = int32(min(span, down - band * span))
    place = quotient(rest, wide)
    group = quotient(place, across)
    return int32(band * span + rest - place * wide), group, int32(place - group * across)


@inline
def store_bf16(
    blackwell: Any, acc: Any, most: Any, at: Any, crew: Any, warp: Any, t: Any, y: Any, pitch: Any, n: Any, left: Any
) -> None:  # fmt: skip
    """64 outputs of `left` rows: y is row 0's first output of this warpgroup, n says how many outputs exist."""
    lane = int32(t & 31)
    r = int32(t >> 3)
    piece = int32(t & 7)
    source = uint32(at + r * 128 + ((piece ^ (r & 7)) << 4))
    target = y + (int64(r) * pitch + piece * 8) * 2
    for q in unroll(0, most, 64):
        if q < left:
            if blackwell:
                turn_tensor(acc, q, at, 0, warp, lane)
            else:
                turn(acc, q, at, int32(warp & 3), lane)
            group_barrier(crew)
            for i in unroll(4):
                if q + 16 * i + r < left and piece * 8 < n:
                    stg_u32x4(target + int64(q + 16 * i) * pitch * 2, lds_u32x4(uint32(source + i * 2048)))
            group_barrier(crew)


@inline
def store_f32(
    blackwell: Any, acc: Any, most: Any, at: Any, crew: Any, warp: Any, t: Any, y: Any, pitch: Any, n: Any, left: Any
) -> None:  # fmt: skip
    """The same for float32 outputs."""
    lane = int32(t & 31)
    r = int32(t >> 4)
    piece = int32(t & 15)
    corner = uint32(at + (lane & 3) * (2 * WIDE) + (16 * (warp & 3) + (lane >> 2)) * 4)
    source = uint32(at + r * WIDE + piece * 16)
    target = y + (int64(r) * pitch + piece * 4) * 4
    for q in unroll(0, most, 64):
        if q < left:
            if blackwell:
                turn_tensor(acc, q, at, WIDE, warp, lane)
            for i in unroll(0 if blackwell else 32):
                sts_f32(uint32(corner + (8 * (i // 4) + i % 2) * WIDE + (i // 2 % 2) * 32), acc[q // 2 + i])
            group_barrier(crew)
            for i in unroll(8):
                if q + 8 * i + r < left and piece * 4 < n:
                    stg_u32x4(target + int64(q + 8 * i) * pitch * 4, lds_u32x4(uint32(source + 8 * i * WIDE)))
            group_barrier(crew)


def make(*, kind: str, wide: bool, columns: int, stages: int, span: int, chip: str) -> Kernel:
    """wide: float32 outputs; columns: rows of x in a tile, multiple of 64 up to 256; span: tiles beside each other."""
    WEIGHTS = FP8 if kind == "fp8" else BF16
    TURNING = TURN_WIDE if wide else TURN
    TENSOR = chip in BLACKWELL
    STAGES, TILES = (min(stages, 4), 2 * WEIGHT_TILE) if TENSOR else (stages, 0)
    RING = Ring.of(WEIGHTS, columns, STAGES, 2 * TURNING + TILES)
    READERS = 1 if TENSOR else 8
    BYTES = 4 if wide else 2
    pair, zero, finish = products((columns,))

    @kernel(threads=THREADS, grid=(SM_COUNT,), shared=RING.size, name=f"dense_{kind}_{columns}_s{stages}_g{span}")
    def dense(w: s64, x: s64, y: s64, rows: s32, n: s32, k: s32, groups: s32, chunk: s32) -> None:
        tid = int32(thread_index())
        sm = shared_base()
        if tid == 0:
            start_barriers(uint32(sm + RING.bars), STAGES, READERS)
        if TENSOR:
            tensor = start_tensor(RING, sm, tid)
        else:
            sync_threads()
        wait_for_previous_kernel()
        let_next_kernel_start()
        shift = int32(chunk >> 7)
        steps = int32(k >> 6)
        across = int32((n + 127) >> 7)
        blocks = int32(block_count())
        down = quotient(int32(rows + columns - 1), columns)
        tiles = int32(down * across * groups)
        number = int32(block_index())
        stage = int32(0)
        phase = int32(0)
        role = int32(warp_min_u32(uint32(tid >> 7)))  # for the compiler: uniform
        if role == 0:
            if not TENSOR:
                give_some_registers()
            scale_bytes = int32(WEIGHTS.scales)
            chunk_bytes = int32(chunk * (WEIGHTS.codes // 64) + scale_bytes)
            last = int32(((n + 15) >> 4) - 1)
            pitch = int32(k * groups * 2)
            offsets = regs(columns // 16)
            mine, _ = copy_of(tid, WEIGHTS)
            while number < tiles:
                row, group, place = tile_of(number, down, across, groups, span)
                row = int32(row * columns)
                for i in unroll(columns // 16):
                    offsets[i] = uint32(min(row + (tid >> 3) + 16 * i, rows - 1) * pitch)
                part = int32(min(place * PARTS + mine, last))
                base = w + (int64(group) * (last + 1) + part) * (int64(steps >> shift) * chunk_bytes)
                if tid >= 64:
                    base = base + chunk * (WEIGHTS.codes // 64)
                source = x + (int64(group) * k * 2 + (tid & 7) * 16)
                pieces = int32(columns // 16)
                stage, phase = produce(RING, WEIGHTS, sm, tid, steps, shift, source, offsets, pieces, base,
                                             chunk_bytes, scale_bytes, stage, phase)  # fmt: skip
                number = int32(number + blocks)
        else:
            lane = int32(tid & 31)
            warp = int32((tid >> 5) - 4)
            if TENSOR:
                crew = int32((warp & 3) >> 1)  # whose outputs this warp can read, and its place among those
                t = int32(((warp >> 2) * 2 + (warp & 1)) * 32 + lane)
                count = int32(0)
                finished = int32(0)
            else:
                take_most_registers()
                crew = int32(role - 1)
                t = int32(tid & 127)
            at = uint32(sm + RING.rest + TILES + crew * TURNING)
            pitch = int32(n * groups)
            while number < tiles:
                row, group, place = tile_of(number, down, across, groups, span)
                row = int32(row * columns)
                if TENSOR:
                    acc = tensor
                    stage, phase, count, finished = multiply_tensor(
                        RING, WEIGHTS, sm, tensor, uint32(sm + RING.rest), warp, lane, columns, steps, shift,
                        stage, phase, count, finished,
                    )  # fmt: skip
                else:
                    acc, stage, phase = multiply(
                        RING, WEIGHTS, pair, zero, finish, sm, warp, lane, columns, steps, shift, stage, phase
                    )
                first = int32(place * TILE_ROWS + crew * 64)
                to = y + (int64(row) * pitch + group * n + first) * BYTES
                left = int32(min(columns, rows - row))
                if wide:
                    store_f32(TENSOR, acc, columns, at, crew, warp, t, to, pitch, int32(n - first), left)
                else:
                    store_bf16(TENSOR, acc, columns, at, crew, warp, t, to, pitch, int32(n - first), left)
                number = int32(number + blocks)
        if TENSOR:
            end_tensor(tensor, tid)

    return dense


def entries(width: Width) -> list[Entry]:
    """One kernel a kind, for all widths: sizes are arguments. The floor is that of wo_b at 4,096 rows."""
    if width.label != "v41":
        return []
    rows, n, k = 4096, width.spec.hidden_size, width.spec.o_groups * width.spec.o_lora_rank
    found = []
    for kind, shape in SHAPES.items():
        size = n * k * (2 if kind == "bf16" else 1) + rows * (2 * k + 2 * n)
        found.append(Entry(f"dense.{kind}", make, {"kind": kind, **shape}, ALL_CHIPS, product, size, 2 * rows * n * k))
    return found


SHAPES = {
    "fp8": {"wide": False, "columns": 256, "stages": 5, "span": 8},
    "bf16": {"wide": True, "columns": 128, "stages": 4, "span": 16},
}
