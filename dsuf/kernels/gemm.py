"""Parts of the prefill products on Hopper: a ring of weights and activations, and a warpgroup's products from it.

A block has a producer warpgroup and two that multiply. Its tile is 128 weight rows (8 packed tiles of 16) by up to 256
activation rows; the weights are the A operand, turned to bf16 in registers from the packed codes, activations are B in
shared memory. So weights are stored once, in the order of the decode kernels, and never written out as bf16.

Activations are bf16 in *product order*: inside every 32 columns, column 8t + 4m + 2h + j (t 0..3; m, h, j bits) stands
at 16m + 8h + 2t + j, which is the order in which the packed weights meet the tensor core.

A stage is 64 columns. Sums run over K in steps of 16, one accumulator a result, whatever the shape of the tile: a row's
bits depend on the row alone.

    hand-off        who writes                                    who waits            reused
    ring stage      128 producer threads (cp.async), bulk copies  8 multiplying warps  after 8 arrivals, behind the wait
                                                                                       for the products that read it
    turning tile    a warpgroup, 64 rows at a time                the same             behind the warpgroup's barrier
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import bf16x2
from dsuf.kernels.ptx.copy import (
    async_arrive,
    async_load16,
    bulk_load,
    fence_async,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from dsuf.kernels.ptx.fragments import (
    fp4_multiplier,
    fp4x16_bf16,
    fp4x16_bf16_nibbles,
    fp8_multiplier,
    fp8x16_bf16,
    opaque_address,
)
from dsuf.kernels.ptx.memory import lds_u8, lds_u32x2, lds_u32x4
from dsuf.kernels.ptx.mma import stmatrix_x4_trans
from dsuf.kernels.ptx.sync import sync_named
from dsuf.kernels.ptx.wgmma import (
    SWIZZLED_TILE,
    wgmma_wait,
    wgmma_wait_but_last,
    zeros,
)
from dsuf.kernels.ptx.wgmma_pair import wgmma_pair

TILE_ROWS = 128  # weight rows of a block
PARTS = 8  # packed tiles of 16 of them
DEPTH = 64  # columns of a stage
THREADS = 384
TURN = 64 * 128  # bytes of a warpgroup's turning tile of 64 rows by 64 bf16 outputs
ALIGN = 1024  # of swizzled rows
MORE_BARS = 64  # bytes behind the ring's barriers


@dataclass(frozen=True)
class Format:
    """Packed weights: bytes of 64 columns of a tile, largest size of a chunk's scales."""

    name: str
    codes: int
    scales: int


FP8, FP4, BF16 = Format("fp8", 1024, 16), Format("fp4", 512, 128), Format("bf16", 2048, 0)
FP4_NIBBLES = Format("fp4 nibbles", 512, 128)  # as pack_fp4 has them for Blackwell


@dataclass(frozen=True)
class Ring:
    """Shared memory of a block: activation rows, codes, scales, barriers, then `more` bytes; offsets in bytes."""

    rows: int  # activation rows of a tile
    stages: int
    codes: int
    scales: int
    bars: int
    rest: int
    size: int

    @classmethod
    def of(cls, weights: Format, rows: int, stages: int, more: int) -> Ring:
        """Lay them one after the other; the rest begins at a multiple of 1024 bytes."""
        codes = stages * rows * 128
        scales = codes + stages * PARTS * weights.codes
        bars = scales + stages * PARTS * weights.scales
        rest = -(-(bars + 16 * stages + MORE_BARS) // ALIGN) * ALIGN
        return cls(rows, stages, codes, scales, bars, rest, rest + more)


@inline
def product_column(c: Any) -> Any:
    """Where column c of activations stands in product order."""
    return int32((c & ~31) | ((c & 4) << 2) | ((c & 2) << 2) | ((c & 24) >> 2) | (c & 1))


@inline
def start_barriers(bar: Any, stages: Any, readers: Any) -> None:
    """One thread: `full` barriers (128 threads' copies and one expectation), then `empty` ones (`readers` arrivals)."""
    for s in unroll(stages):
        mbarrier_init(uint32(bar + 8 * s), uint32(129))
        mbarrier_init(uint32(bar + 8 * (stages + s)), uint32(readers))
    fence_async()


@inline
def copy_of(tid: Any, weights: Any) -> Any:
    """Which packed tile of the block a producer thread brings, and whether it brings any (lanes 0..3 of its warp)."""
    mine = int32(1 if (tid & 31) < 4 and tid < (128 if weights.scales > 0 else 64) else 0)
    return int32(((tid >> 5) & 1) * 4 + (tid & 3)), mine


@inline
def produce(
    ring: Any, weights: Any, sm: Any, tid: Any, steps: Any, shift: Any, source: Any, offsets: Any, pieces: Any,
    base: Any, chunk_bytes: Any, scale_bytes: Any, stage: Any, phase: Any,
) -> Any:  # fmt: skip
    """The producer warpgroup fills `steps` stages; returns the next stage and its phase.

    Thread t copies 16 bytes at (t & 7) * 16 of rows (t >> 3) + 16 i, i < pieces, from source + offsets[i]. Lane j < 4
    of warp w brings packed tile 4 (w & 1) + j: its codes if w < 2, else its scales, whose first chunk is at `base`.
    """
    bar = uint32(sm + ring.bars)
    place = uint32(sm + (tid >> 3) * 128 + (((tid & 7) ^ ((tid >> 3) & 7)) << 4))
    tile, copies = copy_of(tid, weights)
    scales = int32(tid >> 6)
    target = uint32(sm + (ring.codes + tile * weights.codes if scales == 0 else ring.scales + tile * weights.scales))
    pitch = int32(PARTS * (weights.codes if scales == 0 else weights.scales))
    within = int32(weights.codes if scales == 0 else 0)
    amount = uint32(weights.codes if scales == 0 else scale_bytes)
    at = source
    k = int32(0)
    while k < steps:
        mbarrier_wait(uint32(bar + 8 * (ring.stages + stage)), uint32(phase ^ 1))
        full = uint32(bar + 8 * stage)
        if tid == 0:
            mbarrier_expect(full, uint32(PARTS * weights.codes + PARTS * scale_bytes))
        if copies == 1:
            chunk = int32(k >> shift)
            piece = base + (int64(chunk) * chunk_bytes + (k - (chunk << shift)) * within)
            bulk_load(uint32(target + stage * pitch), piece, amount, full)
        to = uint32(place + stage * (ring.rows * 128))
        for i in unroll(ring.rows // 16):
            if i < pieces:
                async_load16(uint32(to + i * 2048), at + int64(offsets[i]))
        async_arrive(full)
        at = opaque_address(at + 128)
        stage, phase = next_stage(stage, phase, ring.stages)
        k = int32(k + 1)
    return stage, phase


@inline
def next_stage(stage: Any, phase: Any, stages: Any) -> Any:
    """The stage after this one and its phase."""
    last = int32(1 if stage == stages - 1 else 0)
    return int32(0 if last == 1 else stage + 1), int32(phase ^ last)


@inline
def fragments(weights: Any, half: Any, codes: Any, scales: Any, group: Any, wide: Any, lane: Any) -> Any:
    """Eight A registers of 32 columns: those of `half` of a stage, whose first group of 32 in its chunk is `group`.

    codes and scales are the shared addresses of this warp's packed tile; wide: groups of a chunk. The loads stand here
    so that the conversion cannot be moved before the products that it has to run beside.
    """
    a = regs(8)
    if weights.name == "fp8":
        factor = fp8_multiplier(lds_u8(uint32(scales + group + half)))
        a = fp8x16_bf16(lds_u32x4(uint32(codes + half * 512 + lane * 16)), factor)
    if weights.name == "fp4" or weights.name == "fp4 nibbles":
        at = uint32(scales + (lane >> 2) * 2 * wide + group + half)
        even, odd = fp4_multiplier(lds_u8(at)), fp4_multiplier(lds_u8(uint32(at + wide)))
        raw = lds_u32x2(uint32(codes + lane * 16 + half * 8))
        a = fp4x16_bf16(raw, even, odd) if weights.name == "fp4" else fp4x16_bf16_nibbles(raw, even, odd)
    if weights.name == "bf16":
        a[0:4] = lds_u32x4(uint32(codes + half * 1024 + lane * 16))
        a[4:8] = lds_u32x4(uint32(codes + half * 1024 + 512 + lane * 16))
    return (a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])


@inline
def multiply(
    ring: Any, weights: Any, pair: Any, zero: Any, finish: Any, sm: Any, part: Any, lane: Any, columns: Any, steps: Any,
    shift: Any, stage: Any, phase: Any,
) -> Any:  # fmt: skip
    """A warpgroup's 64 weight rows (packed tile `part` is this warp's) by `columns` activation rows over all steps.

    Returns the accumulators, the next stage and its phase; pair, zero and finish are what `products` gives, columns is
    one of its widths. The registers of one half of a stage are made while the other half is multiplied.
    """
    bar = uint32(sm + ring.bars)
    codes = uint32(sm + ring.codes + part * weights.codes)
    scales = uint32(sm + ring.scales + part * weights.scales)
    wide = int32(2 << shift)
    a = regs(8)
    b = regs(8)
    acc = zero()
    before = stage
    mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
    fence_async()
    at = uint32(codes + stage * (PARTS * weights.codes))
    of = uint32(scales + stage * (PARTS * weights.scales))
    group = int32(0)
    a = fragments(weights, 0, at, of, group, wide, lane)
    k = int32(0)
    while k < steps:
        rows = int64(SWIZZLED_TILE) + (int64(uint32(sm + stage * (ring.rows * 128))) >> 4)
        acc = pair[columns]((a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]), rows, int32(min(k, 1)), acc)
        wgmma_wait_but_last()  # the stage before is read
        if k > 0 and lane == 0:
            mbarrier_arrive(uint32(bar + 8 * (ring.stages + before)))
        b = fragments(weights, 1, at, of, group, wide, lane)
        acc = pair[columns]((b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]), rows + 4, int32(1), acc)
        before = stage
        stage, phase = next_stage(stage, phase, ring.stages)
        k = int32(k + 1)
        at = uint32(codes + stage * (PARTS * weights.codes))
        of = uint32(scales + stage * (PARTS * weights.scales))
        group = int32((k & ((1 << shift) - 1)) * 2)
        if k < steps:
            mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
            fence_async()
        wgmma_wait_but_last()  # the registers of the first half are free
        if k < steps:
            a = fragments(weights, 0, at, of, group, wide, lane)
    acc = finish(acc)
    if lane == 0:
        mbarrier_arrive(uint32(bar + 8 * (ring.stages + before)))
    return acc, stage, phase


@inline
def turn(acc: Any, first: Any, tile: Any, part: Any, lane: Any) -> None:
    """64 rows of an accumulator, from column `first`, to shared memory as bf16 [row][64 outputs], swizzled.

    16-byte piece c of row r lies at tile + r * 128 + ((c ^ (r & 7)) << 4). `part` is the warp's number in its group.
    """
    r8 = int32(lane & 7)
    piece = int32(2 * part + ((lane >> 3) & 1))
    at = uint32(tile + (r8 + ((lane >> 4) & 1) * 8) * 128 + ((piece ^ r8) << 4))
    for j in unroll(0, 8, 2):
        stmatrix_x4_trans(
            uint32(at + j * 1024),
            (
                bf16x2(acc[first // 2 + 4 * j + 1], acc[first // 2 + 4 * j]),
                bf16x2(acc[first // 2 + 4 * j + 3], acc[first // 2 + 4 * j + 2]),
                bf16x2(acc[first // 2 + 4 * j + 5], acc[first // 2 + 4 * j + 4]),
                bf16x2(acc[first // 2 + 4 * j + 7], acc[first // 2 + 4 * j + 6]),
            ),
        )


@inline
def group_barrier(crew: Any) -> None:
    """Barrier of one multiplying warpgroup."""
    sync_named(uint32(1 + crew), uint32(128))


def products(widths: tuple[int, ...]) -> tuple[dict[int, Any], Any, Any]:
    """The operations of tiles of so many activation rows, ascending: two products by width, zeros, wait."""
    most = widths[-1]
    return {n: wgmma_pair(n, most) for n in widths}, zeros(most // 2), wgmma_wait(most // 2)
