"""Hopper's warpgroup products (wgmma): four warps, operands in shared memory or A in registers. sm_90a only.

Descriptor of a K-major tile with the 128-byte swizzle: address >> 4 | 1 << 16 | (1024 >> 4) << 32 | 1 << 62; the next
32 bytes of k are +2. The result of row r (of 64) and column c sits in warp r / 16, lane 4 (r mod 8) + (c mod 8) / 2,
register 4 (c / 8) + 2 (r / 8 mod 2) + c mod 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.mma import decode_bf16, decode_e4m3, decode_f16
from dsuf.kernels.ptx.op import HOPPER, Op, ptx

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes

SWIZZLED_TILE = 1 << 62 | (1024 >> 4) << 32 | 1 << 16  # add shared address >> 4


def transposed_tile(leading: int) -> int:
    """Descriptor, less the address, of a tile [k, n]: `leading` bytes between groups of 64 n."""
    return 1 << 62 | (1024 >> 4) << 32 | (leading >> 4) << 16


DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": lambda raw: decode_bf16(raw.view(np.uint16)),
    "f16": lambda raw: decode_f16(raw.view(np.uint16)),
    "e4m3": decode_e4m3,
}


@cache
def _places(registers: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns [registers, 128 lanes] of a product [64, 2 registers] that the lanes of a warpgroup hold."""
    lane, i = np.arange(128), np.arange(registers)[:, None]
    rows = 16 * (lane >> 5) + (lane >> 2 & 7) + 8 * (i >> 1 & 1)
    return rows, 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)


def _spread(lanes: Lanes, d: np.ndarray, acc: Any, keep: bool) -> tuple[np.ndarray, ...]:
    """[64, n] to the registers of a warpgroup, added to the accumulators if `keep`."""
    value = d[_places(d.shape[1] // 2)]
    if keep:
        value = value + np.stack([lanes.vector(one, np.float32) for one in acc[: len(value)]])
    return tuple(value.astype(np.float32))


@cache
def wgmma(n: int, kind: str) -> Op:
    """wgmma.mma_async m64 x n x 32 bytes: (descriptor of A, descriptor of B, add to acc?, acc) -> acc."""
    depth, tail = (32, "") if kind == "e4m3" else (16, ", 0, 0")

    def twin(lanes: Lanes, a: Any, b: Any, add: Any, acc: Any) -> tuple[np.ndarray, ...]:
        left = DECODE[kind](lanes.shared.swizzled_tile(lanes.one(a), 64, 32)).astype(np.float64)
        right = DECODE[kind](lanes.shared.swizzled_tile(lanes.one(b), n, 32)).astype(np.float64)
        return _spread(lanes, left @ right.T, acc, lanes.one(add) != 0)

    twin.__name__ = f"wgmma_{kind}_n{n}"
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, <2>, 0; wgmma.mma_async.sync.aligned.m64n{n}k{depth}.f32.{kind}.{kind}"
        f" <d>, <0>, <1>, p, 1, 1{tail};}}"
    )
    return ptx(f"f32*{n // 2} = s64, s64, s32, +f32*{n // 2}", text, chips=HOPPER, unit="warpgroup")(twin)


@cache
def wgmma_registers(n: int, transposed: bool) -> Op:
    """wgmma.mma_async m64 x n x 16 of bf16, A from registers: (A as in mma_bf16 a warp, descriptor of B, add?, acc).

    transposed: B lies [k, n] with rows of 64 n (128 bytes, swizzled), groups of 8 k the descriptor's stride apart
    (1024 bytes) and groups of 64 n its leading offset (`transposed_tile`); else as in `wgmma`.
    """

    def twin(lanes: Lanes, a: Any, b: Any, add: Any, acc: Any) -> tuple[np.ndarray, ...]:
        words = np.stack([np.asarray(lanes.vector(w)).astype(np.uint32) for w in a], -1)
        pairs = np.ascontiguousarray(words).view(np.uint16).reshape(4, 8, 4, 4, 2)  # warp, g, t, register, half
        left = decode_bf16(np.ascontiguousarray(pairs.reshape(4, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5)))
        tile = lanes.shared.swizzled_columns if transposed else lanes.shared.swizzled_tile
        right = decode_bf16(tile(lanes.one(b), n, 32).view(np.uint16))
        product = left.reshape(64, 16).astype(np.float64) @ right.astype(np.float64).T
        return _spread(lanes, product, acc, lanes.one(add) != 0)

    twin.__name__ = f"wgmma_registers_n{n}" + ("_transposed" if transposed else "")
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, <2>, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
        f" <d>, <0>, <1>, p, 1, 1, {int(transposed)};}}"
    )
    return ptx(f"f32*{n // 2} = u32*4, s64, s32, +f32*{n // 2}", text, chips=HOPPER, unit="warpgroup")(twin)


@cache
def wgmma_transposed(n: int) -> Op:
    """wgmma.mma_async m64 x n x 16 of bf16, B lying [k, n] as in `wgmma_registers`: both operands by descriptor."""

    def twin(lanes: Lanes, a: Any, b: Any, add: Any, acc: Any) -> tuple[np.ndarray, ...]:
        left = decode_bf16(lanes.shared.swizzled_tile(lanes.one(a), 64, 32).view(np.uint16)).astype(np.float64)
        right = decode_bf16(lanes.shared.swizzled_columns(lanes.one(b), n, 32).view(np.uint16)).astype(np.float64)
        return _spread(lanes, left @ right.T, acc, lanes.one(add) != 0)

    twin.__name__ = f"wgmma_transposed_n{n}"
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, <2>, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
        f" <d>, <0>, <1>, p, 1, 1, 0, 1;}}"
    )
    return ptx(f"f32*{n // 2} = s64, s64, s32, +f32*{n // 2}", text, chips=HOPPER, unit="warpgroup")(twin)


@cache
def scale_rows(registers: int) -> Op:
    """mul.f32 of an accumulator tile: rows g by the first factor, rows g + 8 by the second."""

    def twin(first: Any, second: Any, acc: Any) -> tuple[np.ndarray, ...]:
        return tuple((np.float32(1) * a * (second if i & 2 else first)).astype(np.float32) for i, a in enumerate(acc))

    twin.__name__ = f"scale_rows_{registers}"
    text = " ".join(f"mul.f32 <2.{i}>, <2.{i}>, <{i >> 1 & 1}>;" for i in range(registers))
    return ptx(f"f32*{registers} = f32, f32, +f32*{registers}", text, pure=True)(twin)


@ptx("=", "wgmma.fence.sync.aligned;", chips=HOPPER, unit="warpgroup")
def wgmma_fence() -> None:
    """wgmma.fence.sync.aligned: registers and shared memory are ready for the products that follow"""


@ptx("=", "wgmma.commit_group.sync.aligned;", chips=HOPPER, unit="warpgroup")
def wgmma_commit() -> None:
    """wgmma.commit_group.sync.aligned"""


@ptx("=", "wgmma.wait_group.sync.aligned 1;", chips=HOPPER, unit="warpgroup")
def wgmma_wait_but_last() -> None:
    """wgmma.wait_group 1: every group but the last is done"""


@cache
def wgmma_wait(registers: int) -> Op:
    """wgmma.wait_group 0 that takes and returns the accumulators, so that no reader can be moved above it."""

    def twin(acc: Any) -> Any:
        return acc

    twin.__name__ = f"wgmma_wait_{registers}"
    text = "wgmma.wait_group.sync.aligned 0;"
    return ptx(f"f32*{registers} = +f32*{registers}", text, chips=HOPPER, unit="warpgroup")(twin)


@cache
def zeros(n: int) -> Op:
    """An n-tuple of float32 zeros: a register tile held in one variable (a constant, no instruction)."""

    def twin(lanes: Lanes) -> tuple[np.ndarray, ...]:
        return tuple(np.zeros(lanes.count, np.float32) for _ in range(n))

    twin.__name__ = f"zeros_{n}"
    return ptx(f"f32*{n} =", "", pure=True)(twin)
