"""Parts of the prefill products on Blackwell: the same ring (gemm.py), products by tcgen05 into tensor memory.

Eight warps turn the packed weights of a stage to bf16, as on Hopper, but store them as a swizzled tile of 128 rows in
shared memory (two of them, in turn); one thread multiplies it with the stage's activation rows. The result lies in
tensor memory, weight row by lane, activation row by column. Compiled and right under the interpreter; not run on
hardware.

    hand-off         who writes      who waits            reused
    ring stage       as in gemm.py   8 warps              when the products that read it are done (commit)
    weight tile [2]  8 warps         the issuing thread   the same, two stages later
    tensor memory    products        8 warps              behind the barrier of the next tile's first stage
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.gemm import PARTS, fragments, next_stage
from dsuf.kernels.lang import inline, int32, int64, regs, uint32, unroll
from dsuf.kernels.ptx.convert import as_float, bf16x2
from dsuf.kernels.ptx.copy import fence_async, mbarrier_init, mbarrier_wait
from dsuf.kernels.ptx.memory import lds_u32, sts_f32, sts_u16
from dsuf.kernels.ptx.mma import stmatrix_x4
from dsuf.kernels.ptx.sync import sync_named, sync_threads, sync_warp
from dsuf.kernels.ptx.tcgen05 import (
    SWIZZLED_TILE,
    tensor_alloc,
    tensor_commit,
    tensor_fence_after,
    tensor_fence_before,
    tensor_free,
    tensor_load32,
    tensor_mma_bf16,
    tensor_no_more,
    tensor_wait32,
)

WEIGHT_TILE = 128 * 128  # bytes: 128 rows of 64 bf16
TENSOR_COLUMNS = 256
BF16_PRODUCT = 128 >> 4 << 24 | 1 << 4 | 1 << 7 | 1 << 10  # instruction descriptor of 128 rows; add columns >> 3 << 17


@inline
def start_tensor(ring: Any, sm: Any, tid: Any) -> Any:
    """All threads: barriers of the weight tiles and the result, and the block's tensor memory; returns its address."""
    more = uint32(sm + ring.bars + 16 * ring.stages)
    if tid == 0:
        for i in unroll(3):
            mbarrier_init(uint32(more + 8 * i), uint32(1))
        fence_async()
    if tid >> 5 == 1:
        tensor_alloc(uint32(more + 24), uint32(TENSOR_COLUMNS))
        tensor_no_more()
    tensor_fence_before()
    sync_threads()
    tensor_fence_after()
    return lds_u32(uint32(more + 24))


@inline
def end_tensor(tensor: Any, tid: Any) -> None:
    """All threads: give the tensor memory back."""
    tensor_fence_before()
    sync_threads()
    if tid >> 5 == 1:
        tensor_free(tensor, uint32(TENSOR_COLUMNS))


@inline
def store_fragments(tile: Any, half: Any, part: Any, lane: Any, a: Any) -> None:
    """Eight A registers, 32 columns of packed tile `part`, as rows 16 part .. + 15 of a swizzled tile of 64 columns."""
    row = int32(16 * part + (lane & 15))
    for j in unroll(2):
        piece = int32(4 * half + 2 * j + (lane >> 4))
        stmatrix_x4(uint32(tile + row * 128 + ((piece ^ (row & 7)) << 4)),
                    (a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]))  # fmt: skip


@inline
def multiply_tensor(
    ring: Any, weights: Any, sm: Any, tensor: Any, tiles: Any, part: Any, lane: Any, columns: Any, steps: Any,
    shift: Any, stage: Any, phase: Any, number: Any, finished: Any,
) -> Any:  # fmt: skip
    """128 weight rows by `columns` activation rows over all steps, into tensor memory from its first column on.

    Eight warps call, `part` 0 .. 7; `tiles` is the address of the two weight tiles. Returns stage, phase, and `number`
    and `finished`, which count steps and results of this block. The result is there on return.
    """
    bar = uint32(sm + ring.bars)
    more = uint32(bar + 16 * ring.stages)
    wide = int32(2 << shift)
    a = regs(8)
    product = uint32(BF16_PRODUCT + (((columns + 15) >> 4) << 18))
    k = int32(0)
    while k < steps:
        mbarrier_wait(uint32(bar + 8 * stage), uint32(phase))
        codes = uint32(sm + ring.codes + stage * (PARTS * weights.codes) + part * weights.codes)
        scales = uint32(sm + ring.scales + stage * (PARTS * weights.scales) + part * weights.scales)
        group = int32((k & ((1 << shift) - 1)) * 2)
        turn_ = int32(number & 1)
        tile = uint32(tiles + turn_ * WEIGHT_TILE)
        mbarrier_wait(uint32(more + 8 * turn_), uint32(((number >> 1) & 1) ^ 1))
        for half in unroll(2):
            a = fragments(weights, half, codes, scales, group, wide, lane)
            store_fragments(tile, half, part, lane, a)
        fence_async()
        tensor_fence_before()
        sync_named(uint32(3), uint32(256))
        if part == 0:
            if lane == 0:
                tensor_fence_after()
                left = int64(SWIZZLED_TILE) + (int64(tile) >> 4)
                right = int64(SWIZZLED_TILE) + (int64(uint32(sm + stage * (ring.rows * 128))) >> 4)
                for q in unroll(4):
                    tensor_mma_bf16(tensor, left + 2 * q, right + 2 * q, product, uint32(1 if q > 0 else min(k, 1)))
                tensor_commit(uint32(more + 8 * turn_))
                tensor_commit(uint32(bar + 8 * (ring.stages + stage)))
                if k == steps - 1:
                    tensor_commit(uint32(more + 16))
            sync_warp()
        number = int32(number + 1)
        stage, phase = next_stage(stage, phase, ring.stages)
        k = int32(k + 1)
    mbarrier_wait(uint32(more + 16), uint32(finished & 1))
    tensor_fence_after()
    return stage, phase, number, int32(finished + 1)


@inline
def turn_tensor(tensor: Any, first: Any, tile: Any, pitch: Any, warp: Any, lane: Any) -> None:
    """64 activation rows of the result, from column `first`, to a turning tile (gemm.turn; float32 rows if pitch > 0).

    warp 0 .. 7: warps 2 c and 2 c + 1 of each group of four hold outputs 64 c .. + 63; the groups halve the rows.
    """
    rows = int32(32 * (warp >> 2))
    held = regs(32)
    held = tensor_wait32(tensor_load32(uint32(tensor + ((warp & 3) << 21) + first + rows)))
    out = int32(32 * (warp & 1) + lane)
    for i in unroll(32):
        if pitch > 0:
            sts_f32(uint32(tile + (rows + i) * pitch + out * 4), as_float(held[i]))
        else:
            value = as_float(held[i])
            place = uint32(tile + (rows + i) * 128 + (((out >> 3) ^ (i & 7)) << 4) + (out & 7) * 2)
            sts_u16(place, bf16x2(value, value))
