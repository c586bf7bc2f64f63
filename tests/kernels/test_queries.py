"""Queries and window rows in one launch on the interpreter, against the ops in float64 and against latents."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import latents, pack, queries, rope
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.product import product
from tests.kernels.helpers import BF16_STEP, assert_near, bf16, execute, fp8_weight, made, values

D, ROPE, EPS, RING = 64, 16, 1e-20, 64
ROW = latents.window_row_bytes(D)


class Layer:
    """Random latents of 48 rows and the weights of a layer; each sequence has a ring."""

    def __init__(self, q: int, n: int, index_n: int, seed: int):
        rng = np.random.default_rng(seed)
        self.q, self.n, self.index_n = q, n, index_n
        self.y, self.norms = bf16(rng, 48, q + D), (bf16(rng, q), bf16(rng, D))
        self.weights = fp8_weight(rng, n, q), fp8_weight(rng, max(index_n, 32), q)
        self.packed = [pack.pack_fp8(*weight) for weight in self.weights]
        self.table = rope.tables(160000.0 ** (-np.arange(0, ROPE, 2) / ROPE), 8192)
        self.sequence, self.position = np.arange(48, dtype=np.int32), rng.integers(0, 5000, 48).astype(np.int32)

    def run(self, rows: int, tile: int, blocks: int = 3, warps: int = 3) -> list[np.ndarray]:
        """q, index_q and rings of the first rows."""
        y = self.y[:tile].copy()
        y[rows:] = 0x7FC0
        out, index_out = (np.full((tile, n), 0x7FC0, np.uint16) for n in (self.n, max(self.index_n, 1)))
        windows = np.full((48, RING, ROW), 0xEE, np.uint8)
        kernel = made(queries.make, q=self.q, d=D, rope=ROPE, eps=EPS, rows=tile, warps=warps, stages=2)
        execute(kernel, [y, *self.norms, self.table, self.sequence, self.position, windows, RING * ROW, RING,
                         self.packed[0], self.n, out, self.packed[1], self.index_n, index_out, rows],
                grid=(blocks, 1))  # fmt: skip
        return [out[:rows], index_out[:rows], windows]

    def latents(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """What the launch of their own makes of the first rows: values of c float64, and rings."""
        codes, scales = np.zeros((rows, self.q), np.uint8), np.zeros((rows, scale_stride(self.q)), np.uint8)
        windows = np.full((48, RING, ROW), 0xEE, np.uint8)
        execute(made(latents.make, q=self.q, d=D, rope=ROPE, eps=EPS), [self.y[:rows].copy(), *self.norms, self.table,
                self.sequence, self.position, codes, scales, windows, RING * ROW, RING], grid=(rows, 2))  # fmt: skip
        return qdq.q8_decode(codes, scales[:, : self.q // 32]).astype(np.float64), windows


@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (2, 8), (7, 8), (16, 16), (48, 48)])
@pytest.mark.parametrize(("q", "n", "index_n"), [(64, 96, 32), (320, 160, 64), (1280, 48, 0)])
def test_queries_and_window_rows_agree_with_the_ops(q: int, n: int, index_n: int, rows: int, tile: int):
    layer = Layer(q, n, index_n, rows)
    layer.sequence[1:2] = -1
    got, index_got, windows = layer.run(rows, tile)
    c, want_windows = layer.latents(rows)  # their agreement with the ops is tested by themselves
    for bits, width, weight in zip((got, index_got), (n, index_n), layer.weights, strict=True):
        if width:
            exact = product(c, formats.dequantise_fp8_blocks(*weight)[:width].astype(np.float64).T)
            assert_near(values(bits), exact, BF16_STEP, 1e-4)
    assert np.array_equal(windows, want_windows)


def test_a_row_is_the_same_bits_in_any_company_and_grid():
    layer = Layer(320, 96, 64, 9)
    many = layer.run(48, 48)
    for rows, tile, blocks, warps in ((1, 8, 1, 2), (6, 8, 4, 3), (16, 16, 2, 4)):
        q, index_q, windows = layer.run(rows, tile, blocks, warps)
        assert np.array_equal(q, many[0][:rows]) and np.array_equal(index_q, many[1][:rows])
        assert np.array_equal(windows[:rows], many[2][:rows])
        assert (windows[rows:] == 0xEE).all()
