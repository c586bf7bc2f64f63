"""The one matrix product of activations and weights: y = x W^T in tiles of exactly 8 rows.

A BLAS picks its kernel, and so its order of summation, by the shape of the product. With every tile of one shape, the
bits of a row do not depend on how many rows ran beside it (row invariance, DESIGN.md 4).
"""

from __future__ import annotations

import numpy as np

TILE_ROWS = 8


def in_tiles(x: np.ndarray) -> np.ndarray:
    """x [rows, ...] -> [tiles, 8, ...], padded with zero rows; a view where nothing is to be padded."""
    rows = x.shape[0]
    tiles = -(-rows // TILE_ROWS)
    if rows != tiles * TILE_ROWS:
        padded = np.zeros((tiles * TILE_ROWS, *x.shape[1:]), x.dtype)
        padded[:rows] = x
        x = padded
    return x.reshape(tiles, TILE_ROWS, *x.shape[1:])


def tile_product(tiles: np.ndarray, weight_t: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """tiles [tiles, 8, K], weight_t [K, N] -> [tiles, 8, N], one product of the same shape for each tile."""
    return np.matmul(tiles, weight_t, out=out)


def product(x: np.ndarray, weight_t: np.ndarray) -> np.ndarray:
    """x [rows, K], weight_t [K, N] (transposed) -> [rows, N] in x's dtype, which is at least weight_t's."""
    rows = x.shape[0]
    return tile_product(in_tiles(x), weight_t).reshape(-1, weight_t.shape[1])[:rows]


def row_product(x: np.ndarray, weight_t: np.ndarray) -> np.ndarray:
    """The same one row at a time: for few rows and a huge N, where a tile would mostly multiply padding."""
    return np.matmul(x[:, None], weight_t)[:, 0]


def grouped_product(x: np.ndarray, weights_t: np.ndarray) -> np.ndarray:
    """Block-diagonal product: x [rows, groups, K], weights_t [groups, K, N] -> [rows, groups * N]."""
    rows, groups, _ = x.shape
    out = np.matmul(in_tiles(x).swapaxes(1, 2), weights_t)  # [tiles, groups, 8, N]
    return out.swapaxes(1, 2).reshape(-1, groups * weights_t.shape[2])[:rows]
