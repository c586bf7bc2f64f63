"""Products of chunk attention and index scores by single warps (mma.sync), for chips without warpgroup products.

Operands lie in panels of rows of 128 bytes (64 bf16) with the 128-byte swizzle, as warpgroup products want them too:
16-byte chunk c of row r at c ^ (r mod 8). The row that a lane names to ldmatrix keeps its r mod 8 all through, so a
lane's address is one sum and, for each two chunks inside a panel, one exclusive or.
"""

from __future__ import annotations

from typing import Any

from dsuf.kernels.lang import inline, int32, regs, uint32, unroll
from dsuf.kernels.ptx.convert import opaque
from dsuf.kernels.ptx.mma import ldmatrix_x4, ldmatrix_x4_trans, mma_bf16_tiles
from dsuf.kernels.ptx.sync import never_unroll

BLOCK = 16 * 128  # bytes of 16 rows
eight_tiles = mma_bf16_tiles(8)
four_tiles = mma_bf16_tiles(4)


@inline
def left_fragment(tile: Any, lane: Any, k: Any) -> Any:
    """A of m16n8k16: 16 rows from address `tile` on, columns 16 k .. + 15 of its panel."""
    at = uint32(tile + (lane & 15) * 128)
    return ldmatrix_x4(uint32(at + ((((lane >> 4) ^ (lane & 7)) << 4) ^ (k << 5))))


@inline
def right_fragments(b: Any, blocks: Any, tile: Any, lane: Any, k: Any) -> None:
    """B of `blocks` times two products, K-major: row n of `tile` is column n, columns 16 k .. + 15 are the depth."""
    at = uint32(tile + ((lane & 7) + ((lane >> 4) << 3)) * 128)
    at = uint32(at + (((((lane >> 3) & 1) ^ (lane & 7)) << 4) ^ (k << 5)))
    for j in unroll(blocks):
        b[4 * j : 4 * j + 4] = ldmatrix_x4(uint32(at + j * BLOCK))


@inline
def right_columns(b: Any, blocks: Any, tile: Any, lane: Any, first: Any, k: Any) -> None:
    """B of `blocks` times two products, transposed: rows 16 k .. + 15 of `tile` are the depth.

    Columns are 8 first .. of the panel, at most to its end; `first` 0 or 4.
    """
    at = uint32(tile + (lane & 15) * 128 + k * BLOCK)
    chunk = int32((first ^ (lane >> 4) ^ (lane & 7)) << 4)
    for j in unroll(blocks):
        b[4 * j : 4 * j + 4] = ldmatrix_x4_trans(uint32(at + (chunk ^ (j * 32))))


@inline
def scores_of_warp(v: Any, none: Any, q: Any, keys: Any, lane: Any, pitch: Any, panels: Any) -> None:
    """v, 32 registers = 16 rows of q times 64 keys, both K-major, over all panels, which are `pitch` bytes apart."""
    acc = none()
    b = regs(16)
    count = int32(opaque(int32(panels)))
    for panel in range(count):
        for k in unroll(4):
            a = left_fragment(uint32(q + panel * pitch), lane, k)
            right_fragments(b, 4, uint32(keys + panel * pitch), lane, k)
            acc = eight_tiles(a, b, acc)
    v[0:32] = acc


@inline
def multiply_rows(
    o: Any, down: Any, left: Any, left_pitch: Any, right: Any, right_pitch: Any, lane: Any, steps: Any
) -> None:  # fmt: skip
    """o[i] += left_i right^T: 16 `down` rows by 64 columns, both K-major, over 16 `steps` columns of their panels."""
    b = regs(16)
    count = int32(opaque(int32(steps)))
    for k in range(count):
        never_unroll()
        right_fragments(b, 4, uint32(right + (k >> 2) * right_pitch), lane, int32(k & 3))
        for i in unroll(down):
            a = left_fragment(uint32(left + (k >> 2) * left_pitch + i * BLOCK), lane, int32(k & 3))
            o[i] = eight_tiles(a, b, o[i])


@inline
def add_values(o: Any, down: Any, columns: Any, p: Any, values: Any, first: Any, lane: Any) -> None:
    """o[i] += p_i V of 16 `down` rows of p [row, 64 keys] and `columns` (64 or 32) columns of V [64 keys, column].

    `values` is the panel that has them, from chunk `first` (0 or 4) on. A loop of four steps, which the compiler must
    not unroll: it would ask for the operands of all of them at once, and these sums leave it few registers.
    """
    b = regs(columns // 4)
    count = int32(opaque(int32(4)))
    for k in range(count):
        never_unroll()
        right_columns(b, columns // 16, values, lane, first, k)
        for i in unroll(down):
            a = left_fragment(uint32(p + i * BLOCK), lane, k)
            if columns == 64:
                o[i] = eight_tiles(a, b, o[i])
            else:
                o[i] = four_tiles(a, b, o[i])
