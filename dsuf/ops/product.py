"""The one matrix product of activations and weights: y = x W^T in tiles of exactly 8 rows.

A BLAS picks its kernel, and so its order of summation, by the shape of the product. With every tile of one shape, the
bits of a row do not depend on how many rows ran beside it (row invariance, DESIGN.md 4).
"""

from __future__ import annotations

import numpy as np

TILE_ROWS = 8


def padded_rows(rows: int) -> int:
    """Rows after padding to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def product(x: np.ndarray, weight_t: np.ndarray) -> np.ndarray:
    """x [rows, K], weight_t [K, N] (transposed, same dtype) -> [rows, N]."""
    rows, width = x.shape
    if rows % TILE_ROWS:
        padded = np.zeros((padded_rows(rows), width), x.dtype)
        padded[:rows] = x
        x = padded
    tiles = x.reshape(-1, TILE_ROWS, width)
    return np.matmul(tiles, weight_t).reshape(-1, weight_t.shape[1])[:rows]


def grouped_product(x: np.ndarray, weights_t: np.ndarray) -> np.ndarray:
    """Block-diagonal product: x [rows, groups, K], weights_t [groups, K, N] -> [rows, groups * N]."""
    rows, groups, width = x.shape
    if rows % TILE_ROWS:
        padded = np.zeros((padded_rows(rows), groups, width), x.dtype)
        padded[:rows] = x
        x = padded
    tiles = x.reshape(-1, TILE_ROWS, groups, width).swapaxes(1, 2)
    out = np.matmul(tiles, weights_t)  # [tiles, groups, 8, N]
    return out.swapaxes(1, 2).reshape(x.shape[0], groups * weights_t.shape[2])[:rows]
