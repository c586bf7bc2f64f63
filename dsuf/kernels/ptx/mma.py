"""Warp-level tensor core products (mma.sync) and the matrix loads and stores that feed them.

Lane l of a warp has g = l / 4 and t = l mod 4. For m16n8k16 with 16-bit operands the A registers hold rows (g, g+8, g,
g+8) and columns (2t, 2t, 2t+8, 2t+8) + {0, 1}; the B registers hold column g and rows (2t, 2t+8) + {0, 1}; the result
holds rows (g, g, g+8, g+8) and columns 2t + (0, 1, 0, 1). For m16n8k32 with bytes read 4t and 16 for 2t and 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.kernels.ptx.convert import E4M3
from dsuf.kernels.ptx.op import Op, ptx, u32, word

if TYPE_CHECKING:
    from dsuf.kernels.simt.lanes import Lanes

_G, _T = np.arange(32) >> 2, np.arange(32) & 3
Decoder = Callable[[np.ndarray], np.ndarray]


def decode_bf16(bits: np.ndarray) -> np.ndarray:
    """uint16 to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def decode_f16(bits: np.ndarray) -> np.ndarray:
    """uint16 to float16."""
    return bits.view(np.float16)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 to float32."""
    return E4M3[codes]


def _elements(lanes: Lanes, registers: Sequence[Any], dtype: type) -> np.ndarray:
    """Registers as [warps, 32, registers, elements of a register]."""
    words = np.stack([lanes.warps(u32(lanes.vector(r))) for r in registers], -1)
    return np.ascontiguousarray(words).view(dtype).reshape(*words.shape, 4 // np.dtype(dtype).itemsize)


def _product(lanes: Lanes, a: np.ndarray, b: np.ndarray, c: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """[warps, 16, k] x [warps, k, 8] + c in float64, one rounding to float32."""
    d = a.astype(np.float64) @ b.astype(np.float64)
    out = []
    for r in range(4):
        part = d[:, _G + 8 * (r >> 1), 2 * _T + (r & 1)].reshape(-1)
        out.append((part + lanes.vector(c[r], np.float32)).astype(np.float32))
    return tuple(out)


def _left(elements: np.ndarray) -> np.ndarray:
    """Decoded A registers [warps, 32, 4, elements of a register] as [warps, 16, k]."""
    per = elements.shape[-1]
    left = np.zeros((len(elements), 16, 8 * per), elements.dtype)
    for h in range(per):
        for r in range(4):
            left[:, _G + 8 * (r & 1), per * _T + h + 4 * per * (r >> 1)] = elements[:, :, r, h]
    return left


def _mma(name: str, kind: str, dtype: type, decode: Decoder) -> Op:
    per = 4 // np.dtype(dtype).itemsize  # elements of one register
    depth = 8 * per

    def twin(lanes: Lanes, a: Any, b: Any, c: Any) -> tuple[np.ndarray, ...]:
        lanes.whole_warps(name)
        ea, eb = decode(_elements(lanes, a, dtype)), decode(_elements(lanes, b, dtype))
        left, right = _left(ea), np.zeros((len(eb), depth, 8))
        for h in range(per):
            for r in range(2):
                right[:, per * _T + h + 4 * per * r, _G] = eb[:, :, r, h]
        return _product(lanes, left, right, c)

    twin.__name__ = name
    text = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 <d>, <0>, <1>, <2>;"
    return ptx("f32*4 = u32*4, u32*2, f32*4", text, pure=True)(twin)


mma_bf16 = _mma("mma_bf16", "bf16", np.uint16, decode_bf16)
mma_f16 = _mma("mma_f16", "f16", np.uint16, decode_f16)
# emulated with f16 products on sm_90a and sm_100a: exact, half the rate
mma_e4m3 = _mma("mma_e4m3", "e4m3", np.uint8, decode_e4m3)


@cache
def mma_bf16_tiles(tiles: int) -> Op:
    """m16n8k16 of one A and so many B side by side (two registers each): (A, B, acc of 4 registers a tile) -> acc."""

    def twin(lanes: Lanes, a: Any, b: Any, acc: Any) -> tuple[np.ndarray, ...]:
        lanes.whole_warps("mma_bf16_tiles")
        left, right = _left(decode_bf16(_elements(lanes, a, np.uint16))), decode_bf16(_elements(lanes, b, np.uint16))
        wide = np.zeros((len(left), 16, 8 * tiles), np.float32)
        for i, h in np.ndindex(2 * tiles, 2):
            wide[:, 2 * _T + h + 8 * (i & 1), 8 * (i >> 1) + _G] = right[:, :, i, h]
        d = left.astype(np.float64) @ wide.astype(np.float64)
        out = []
        for i in range(4 * tiles):
            part = d[:, _G + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * _T + (i & 1)].reshape(-1)
            out.append((part + lanes.vector(acc[i], np.float32)).astype(np.float32))
        return tuple(out)

    twin.__name__ = f"mma_bf16_tiles_{tiles}"
    text = " ".join(
        f"{mma_bf16.text.split()[0]} {{{acc}}}, <0>, {{<1.{2 * i}>,<1.{2 * i + 1}>}}, {{{acc}}};"
        for i, acc in ((i, ",".join(f"<2.{4 * i + j}>" for j in range(4))) for i in range(tiles))
    )
    return ptx(f"f32*{4 * tiles} = u32*4, u32*{2 * tiles}, +f32*{4 * tiles}", text, pure=True)(twin)


def _row_addresses(lanes: Lanes, address: Any) -> np.ndarray:
    """[warps, matrix 4, row 8]: lane 8m + r holds the address of row r of matrix m."""
    return lanes.warps(lanes.vector(address)).reshape(-1, 4, 8)


def _ldmatrix(name: str, transposed: bool) -> Op:
    def twin(lanes: Lanes, address: Any) -> tuple[np.ndarray, ...]:
        lanes.whole_warps(name)
        rows = _row_addresses(lanes, address)
        out = []
        for m in range(4):
            if not transposed:
                out.append(lanes.load_shared((rows[:, m, _G] + 4 * _T).reshape(-1), np.uint32, 1))
                continue
            halves = [lanes.load_shared((rows[:, m, 2 * _T + h] + 2 * _G).reshape(-1), np.uint16, 1) for h in range(2)]
            out.append(halves[0] | halves[1] << 16)
        return tuple(out)

    twin.__name__ = name
    shape = "m8n8.x4.trans" if transposed else "m8n8.x4"
    return ptx("u32*4 = u32", f"ldmatrix.sync.aligned.{shape}.shared.b16 <d>, [<0>];")(twin)


ldmatrix_x4 = _ldmatrix("ldmatrix_x4", transposed=False)
ldmatrix_x4_trans = _ldmatrix("ldmatrix_x4_trans", transposed=True)


@ptx("= u32, u32*4", "stmatrix.sync.aligned.m8n8.x4.shared.b16 [<0>], <1>;")
def stmatrix_x4(lanes: Lanes, address: Any, value: Any) -> None:
    """stmatrix.sync.aligned.m8n8.x4.shared.b16"""
    lanes.whole_warps("stmatrix_x4")
    rows = _row_addresses(lanes, address)
    for m in range(4):
        part = word(u32(lanes.vector(value[m])))
        lanes.store_shared((rows[:, m, _G] + 4 * _T).reshape(-1), (part,), np.uint32)


@ptx("= u32, u32*4", "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [<0>], <1>;")
def stmatrix_x4_trans(lanes: Lanes, address: Any, value: Any) -> None:
    """stmatrix.sync.aligned.m8n8.x4.trans.shared.b16: the columns of each matrix become rows in memory"""
    lanes.whole_warps("stmatrix_x4_trans")
    rows = _row_addresses(lanes, address)
    for m in range(4):
        held = word(u32(lanes.vector(value[m])))
        for half in range(2):
            part = held >> (16 * half) & 0xFFFF
            lanes.store_shared((rows[:, m, 2 * _T + half] + 2 * _G).reshape(-1), (part,), np.uint16)
