"""FP8 projections on the interpreter against float64 products of dequantised operands."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import catalogue, pack, project
from dsuf.ops.product import grouped_product, product
from tests.kernels.helpers import BF16_STEP, assert_near, bf16, execute, fp8_weight, q8_rows, values


def run_q8(rng, n, k, rows, tile, **shape):
    weight = fp8_weight(rng, n, k)
    codes, scales, x = q8_rows(rng.standard_normal((rows, k)), tile)
    y = np.full((tile, n), 0x7FC0, np.uint16)
    team, chunk = shape.pop("team"), pack.chunk_width(k)
    kernel = project.make(kind="q8", rows=tile, chunk=chunk, warps=4, stages=2, most_k=k, **shape)
    execute(kernel, [pack.pack_fp8(*weight), codes, scales, y, rows, n, k, 1, team], grid=(2, 1))
    return values(y[:rows]), product(x, formats.dequantise_fp8_blocks(*weight).astype(np.float64).T), y


@pytest.mark.parametrize(("n", "k"), [(32, 64), (48, 128), (64, 640), (32, 1280)])
@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (7, 8), (16, 16), (48, 48)])
def test_quantised_rows(n: int, k: int, rows: int, tile: int):
    rng = np.random.default_rng(n + k + rows)
    team = 1 if k < 256 else 2
    got, expected, _ = run_q8(rng, n, k, rows, tile, team=team, staged=True)
    assert_near(got, expected, BF16_STEP, 1e-4)


def test_a_row_is_the_same_bits_whatever_runs_beside_it():
    rng = np.random.default_rng(5)
    n, k = 32, 640
    weight, x = pack.pack_fp8(*fp8_weight(rng, n, k)), rng.standard_normal((48, k))
    got = {}
    for rows, tile in ((1, 8), (6, 8), (16, 16), (48, 48)):
        codes, scales, _ = q8_rows(x[:rows], tile)
        y = np.zeros((tile, n), np.uint16)
        shape = {"chunk": 64, "warps": 4, "stages": 2, "staged": tile < 48, "most_k": 1280}
        execute(project.make(kind="q8", rows=tile, **shape), [weight, codes, scales, y, rows, n, k, 1, 2])
        got[rows] = y
    for rows in (1, 6, 16):
        assert np.array_equal(got[rows][:rows], got[48][:rows])


@pytest.mark.parametrize("rows", [1, 7])
def test_grouped_rows_in_f16(rows: int):
    rng = np.random.default_rng(rows)
    groups, n, k = 2, 32, 192
    codes, scales = fp8_weight(rng, groups * n, k)
    exact = values(bf16(rng, 8, groups, k))
    x = exact.astype(np.float16)
    x[rows:] = np.nan  # unused rows
    y = np.full((8, groups * n), 0x7FC0, np.uint16)
    kernel = project.make(kind="wo_a", rows=8, chunk=64, warps=2, stages=3, staged=True, most_k=k)
    execute(kernel, [pack.pack_fp8(codes, scales), x, 0, y, rows, n, k, groups, 1], grid=(4, 1))
    weight = formats.dequantise_fp8_blocks(codes, scales).astype(np.float64).reshape(groups, n, k)
    expected = grouped_product(exact[:rows], weight.transpose(0, 2, 1))
    assert_near(values(y[:rows]), expected, BF16_STEP, 1e-4)


@pytest.mark.parametrize(("n", "k", "rows", "tile"), [(16, 128, 1, 8), (24, 320, 7, 8), (40, 256, 16, 16)])
def test_bf16_weights_give_float32(n: int, k: int, rows: int, tile: int):
    rng = np.random.default_rng(n)
    weight, x = bf16(rng, n, k), bf16(rng, tile, k)
    x[rows:] = 0x7FC0
    y = np.full((tile, n), np.nan, np.float32)
    chunk, team = pack.chunk_width(k, pack.BF16_CHUNK), 2 if k > 128 else 1
    kernel = project.make(kind="bf16", rows=tile, chunk=chunk, warps=4, stages=2, staged=rows < 8, most_k=k)
    execute(kernel, [pack.pack_bf16(weight), x, 0, y, rows, n, k, 1, team])
    assert_near(y[:rows].astype(np.float64), product(values(x[:rows]), values(weight).T), 1e-5, 1e-4)


def test_activations_too_wide_for_shared_memory_are_read_in_place():
    shape = {"n": 32, "k": 256, "rows": 7, "tile": 8, "team": 1}
    got, expected, direct = run_q8(np.random.default_rng(7), **shape, staged=False)
    assert_near(got, expected, BF16_STEP, 1e-4)
    _, _, staged = run_q8(np.random.default_rng(7), **shape, staged=True)
    assert np.array_equal(direct[:7], staged[:7])


def test_a_launch_names_an_entry_that_holds_it():
    found = {entry.name: entry for entry in catalogue.entries()}
    for width in catalogue.widths():
        for one in project.projections(width.spec).values():
            for rows in (1, 6, 9, 48):
                launch = project.launch_of(width.label, one, rows)
                shape = found[launch.name].shape
                assert launch.shared <= project.SHARED_LIMIT and shape["rows"] >= rows and one.k <= shape["most_k"]
                assert launch.grid[0] % one.groups == 0 and shape["warps"] % launch.arguments[3] == 0
                assert one.k % shape["chunk"] == 0 and one.k // shape["chunk"] >= launch.arguments[3]
