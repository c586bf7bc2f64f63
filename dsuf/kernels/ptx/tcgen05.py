"""Blackwell's tensor core (tcgen05): products from shared memory into tensor memory. sm_100a and sm_103a.

Tensor memory is 128 lanes x 512 columns of 32 bits; an address is lane << 16 | column, and a warp reads only the 32
lanes of its own number mod 4. Instruction descriptor: N >> 3 at bit 17, M >> 4 at 24, f32 result 1 << 4, formats at 7
and 10 (bf16 1; e4m3 0), block-scaled: 1 << 23 for ue8m0 scales, scale ids at 29 (A) and 4 (B). The twins encode the
documentation; nothing here has run on hardware.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.op import BLACKWELL, ptx, u32, word
from dsuf.kernels.ptx.wgmma import DECODE

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes

SWIZZLED_TILE = 1 << 62 | 1 << 46 | (1024 >> 4) << 32 | 1 << 16  # add shared address >> 4
SCALE_TILE = 1 << 46 | 8 << 32  # scales: no swizzle, 8 rows of 16 bytes
COLUMNS = 512


@ptx(
    "= u32, u32",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [<0>], <1>;",
    chips=BLACKWELL,
    unit="warp",
)
def tensor_alloc(lanes: Lanes, slot: Any, columns: Any) -> None:
    """tcgen05.alloc: columns (32, 64, ..., 512) of tensor memory; the address is written to shared memory"""
    lanes.shared.tensor_memory_alloc(lanes.one(columns))
    lanes.store_shared(lanes.vector(slot), (lanes.vector(0),), np.uint32, uniform=True)


@ptx("= u32, u32", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 <0>, <1>;", chips=BLACKWELL, unit="warp")
def tensor_free(lanes: Lanes, address: Any, columns: Any) -> None:
    """tcgen05.dealloc"""
    lanes.shared.tensor_memory_free(lanes.one(columns))


@ptx("=", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", chips=BLACKWELL)
def tensor_no_more() -> None:
    """tcgen05.relinquish_alloc_permit"""


def _multiply(lanes: Lanes, target: Any, a: np.ndarray, b: np.ndarray, add: Any) -> None:
    memory, column = lanes.shared.tensor_memory, lanes.one(target) & 0xFFFF
    product = a.astype(np.float64) @ b.astype(np.float64).T
    window = memory[:, column : column + product.shape[1]]
    old = window.view(np.float32) if lanes.one(add) else np.float32(0)
    window[:] = (product + old).astype(np.float32).view(np.uint32)


def _sizes(descriptor: int) -> tuple[int, int]:
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    if m != 128:
        raise ValueError(f"tcgen05.mma of {m} rows; the twin knows 128")
    return m, n


@ptx(
    "= u32, u64, u64, u32, u32",
    "{.reg .pred p; setp.ne.b32 p, <4>, 0; tcgen05.mma.cta_group::1.kind::f16 [<0>], <1>, <2>, <3>, p;}",
    chips=BLACKWELL,
    unit="warp",
)
def tensor_mma_bf16(lanes: Lanes, target: Any, a: Any, b: Any, descriptor: Any, add: Any) -> None:
    """tcgen05.mma kind::f16 with bf16 operands: D [128, N] (+)= A [128, 16] B [N, 16]^T"""
    m, n = _sizes(lanes.one(descriptor))
    left = DECODE["bf16"](lanes.shared.swizzled_tile(lanes.one(a), m, 32))
    right = DECODE["bf16"](lanes.shared.swizzled_tile(lanes.one(b), n, 32))
    _multiply(lanes, target, left, right, add)


@ptx(
    "= u32, u64, u64, u32, u32, u32, u32",
    "{.reg .pred p; setp.ne.b32 p, <4>, 0; tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32"
    " [<0>], <1>, <2>, <3>, [<5>], [<6>], p;}",
    chips=BLACKWELL,
    unit="warp",
)
def tensor_mma_mxfp8(
    lanes: Lanes, target: Any, a: Any, b: Any, descriptor: Any, add: Any, scale_a: Any, scale_b: Any
) -> None:
    """tcgen05.mma kind::mxf8f6f4, e4m3 x e4m3 with one ue8m0 scale per 32 on both sides, applied by the tensor core"""
    flags = lanes.one(descriptor)
    m, n = _sizes(flags)
    memory = lanes.shared.tensor_memory

    def scales(column: int, rows: int, part: int) -> np.ndarray:
        held = np.array([memory[r % 32, column + r // 32] for r in range(rows)])
        return 2.0 ** ((held >> np.uint32(8 * part) & np.uint32(255)).astype(np.float64) - 127)

    left = DECODE["e4m3"](lanes.shared.swizzled_tile(lanes.one(a), m, 32))
    right = DECODE["e4m3"](lanes.shared.swizzled_tile(lanes.one(b), n, 32))
    factor_a = scales(lanes.one(scale_a) & 0xFFFF, m, flags >> 29 & 3)
    factor_b = scales(lanes.one(scale_b) & 0xFFFF, n, flags >> 4 & 3)
    _multiply(lanes, target, left * factor_a[:, None], right * factor_b[:, None], add)


@ptx(
    "= u32",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [<0>];",
    chips=BLACKWELL,
    unit="warp",
)
def tensor_commit(lanes: Lanes, barrier: Any) -> None:
    """tcgen05.commit: the mbarrier gets an arrival when the products issued so far are done"""
    lanes.shared.barrier(lanes.one(barrier)).step(1, 0)


@ptx("= u32, u64", "tcgen05.cp.cta_group::1.32x128b.warpx4 [<0>], <1>;", chips=BLACKWELL, unit="warp")
def tensor_copy_scales(lanes: Lanes, target: Any, descriptor: Any) -> None:
    """tcgen05.cp 32x128b.warpx4: a 512-byte block of scales to 4 columns, repeated for the 4 warps"""
    raw = lanes.shared.raw((lanes.one(descriptor) & 0x3FFF) << 4, 512).reshape(32, 16).view(np.uint32)
    column = lanes.one(target) & 0xFFFF
    lanes.shared.tensor_memory[:, column : column + 4] = np.tile(raw, (4, 1))


@ptx("u32*32 = u32", "tcgen05.ld.sync.aligned.32x32b.x32.b32 <d>, [<0>];", chips=BLACKWELL, unit="warp")
def tensor_load32(lanes: Lanes, address: Any) -> tuple[np.ndarray, ...]:
    """tcgen05.ld 32x32b.x32: 32 columns of this warp's 32 lanes; wait with tensor_wait32"""
    where = lanes.one(address)
    first, column = where >> 16, where & 0xFFFF
    if first != 32 * (int(lanes.thread[0]) >> 5 & 3):
        raise ValueError(f"a warp reads only its own quarter of tensor memory, not lane {first}")
    held = word(lanes.shared.tensor_memory[first : first + 32, column : column + 32])
    return tuple(held[:, i] for i in range(32))


@ptx("u32*32 = +u32*32", "tcgen05.wait::ld.sync.aligned;", chips=BLACKWELL, unit="warp")
def tensor_wait32(value: Any) -> Any:
    """tcgen05.wait::ld, tied to the loaded registers"""
    return tuple(word(u32(part)) for part in value)


@ptx("=", "tcgen05.fence::before_thread_sync;", chips=BLACKWELL)
def tensor_fence_before() -> None:
    """tcgen05.fence::before_thread_sync"""


@ptx("=", "tcgen05.fence::after_thread_sync;", chips=BLACKWELL)
def tensor_fence_after() -> None:
    """tcgen05.fence::after_thread_sync"""


@cache
def instruction(m: int, n: int, scaled: bool) -> int:
    """Instruction descriptor: bf16 operands, or e4m3 with ue8m0 scales (scale ids are added by the kernel)."""
    return n >> 3 << 17 | m >> 4 << 24 | (1 << 23 if scaled else 1 << 4 | 1 << 7 | 1 << 10)
