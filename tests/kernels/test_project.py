"""FP8 projections on the interpreter against float64 products of dequantised operands."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import pack, project
from dsuf.ops.product import grouped_product, product
from tests.kernels.helpers import BF16_STEP, assert_near, bf16, execute, fp8_weight, q8_rows, values


def run_q8(rng, n, k, rows, tile, **shape):
    weight = fp8_weight(rng, n, k)
    codes, scales, x = q8_rows(rng.standard_normal((rows, k)), tile)
    y = np.full((tile, n), 0x7FC0, np.uint16)
    blocks = shape.pop("blocks")
    kernel = project.make(k=k, rows=tile, kind="q8", groups=1, **shape)
    execute(kernel, [pack.pack_fp8(*weight), codes, scales, y, rows, n], grid=(blocks, 1))
    return values(y[:rows]), product(x, formats.dequantise_fp8_blocks(*weight).astype(np.float64).T), y


@pytest.mark.parametrize(("n", "k"), [(32, 64), (48, 128), (64, 640), (32, 1280)])
@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (7, 8), (16, 16), (48, 48)])
def test_quantised_rows(n: int, k: int, rows: int, tile: int):
    rng = np.random.default_rng(n + k + rows)
    team = 1 if k < 256 else 2
    got, expected, _ = run_q8(rng, n, k, rows, tile, warps=4, team=team, stages=2, blocks=2)
    assert_near(got, expected, BF16_STEP, 1e-4)


def test_a_row_is_the_same_bits_whatever_runs_beside_it():
    rng = np.random.default_rng(5)
    n, k = 32, 640
    weight, x = pack.pack_fp8(*fp8_weight(rng, n, k)), rng.standard_normal((48, k))
    got = {}
    for rows, tile in ((1, 8), (6, 8), (16, 16), (48, 48)):
        codes, scales, _ = q8_rows(x[:rows], tile)
        y = np.zeros((tile, n), np.uint16)
        kernel = project.make(k=k, rows=tile, kind="q8", groups=1, warps=4, team=2, stages=2)
        execute(kernel, [weight, codes, scales, y, rows, n])
        got[rows] = y
    for rows in (1, 6, 16):
        assert np.array_equal(got[rows][:rows], got[48][:rows])


@pytest.mark.parametrize("rows", [1, 7])
def test_grouped_rows_in_bf16(rows: int):
    rng = np.random.default_rng(rows)
    groups, n, k = 2, 32, 192
    codes, scales = fp8_weight(rng, groups * n, k)
    x = bf16(rng, 8, groups, k)
    x[rows:] = 0x7FC0  # unused rows hold NaN
    y = np.full((8, groups * n), 0x7FC0, np.uint16)
    kernel = project.make(k=k, rows=8, kind="wo_a", groups=groups, warps=2, team=1, stages=3)
    execute(kernel, [pack.pack_fp8(codes, scales), x, 0, y, rows, n], grid=(4, 1))
    weight = formats.dequantise_fp8_blocks(codes, scales).astype(np.float64).reshape(groups, n, k)
    expected = grouped_product(values(x[:rows]), weight.transpose(0, 2, 1))
    assert_near(values(y[:rows]), expected, BF16_STEP, 1e-4)


@pytest.mark.parametrize(("n", "k", "rows", "tile"), [(16, 128, 1, 8), (24, 320, 7, 8), (40, 256, 16, 16)])
def test_bf16_weights_give_float32(n: int, k: int, rows: int, tile: int):
    rng = np.random.default_rng(n)
    weight, x = bf16(rng, n, k), bf16(rng, tile, k)
    x[rows:] = 0x7FC0
    y = np.full((tile, n), np.nan, np.float32)
    kernel = project.make(k=k, rows=tile, kind="bf16", groups=1, warps=4, team=2 if k > 128 else 1, stages=2)
    execute(kernel, [pack.pack_bf16(weight), x, 0, y, rows, n])
    assert_near(y[:rows].astype(np.float64), product(values(x[:rows]), values(weight).T), 1e-5, 1e-4)


def test_activations_too_wide_for_shared_memory_are_read_in_place(monkeypatch):
    monkeypatch.setattr(project, "STAGED", 0)
    rng = np.random.default_rng(7)
    got, expected, direct = run_q8(rng, 32, 256, 7, 8, warps=2, team=1, stages=2, blocks=1)
    assert_near(got, expected, BF16_STEP, 1e-4)
    monkeypatch.undo()
    _, _, staged = run_q8(np.random.default_rng(7), 32, 256, 7, 8, warps=2, team=1, stages=2, blocks=1)
    assert np.array_equal(direct[:7], staged[:7])
