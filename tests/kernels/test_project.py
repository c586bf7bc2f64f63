"""FP8 projections on the interpreter against float64 products of dequantised operands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import catalogue, pack, project
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.product import grouped_product, product
from tests.kernels.helpers import BF16_STEP, assert_near, bf16, execute, fp8_weight, made, q8_rows, values


def run_q8(rng, n, k, rows, tile, **shape):
    weight = fp8_weight(rng, n, k)
    codes, scales, x = q8_rows(rng.standard_normal((rows, k)), tile)
    y = np.full((tile, n), 0x7FC0, np.uint16)
    team, chunk = shape.pop("team"), pack.chunk_width(k)
    kernel = made(project.make, kind="q8", rows=tile, chunk=chunk, warps=4, stages=2, most_k=k, **shape)
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
        execute(made(project.make, kind="q8", rows=tile, **shape), [weight, codes, scales, y, rows, n, k, 1, 2])
        got[rows] = y
    for rows in (1, 6, 16):
        assert np.array_equal(got[rows][:rows], got[48][:rows])


def grouped(weight: np.ndarray, x: np.ndarray, rows: int, shape: dict[str, int], n: int) -> list[np.ndarray]:
    """codes and scales of the first rows of x [tile, groups, K] times a packed weight."""
    tile, groups, k = x.shape
    codes = np.zeros((tile, groups * n), np.uint8)
    scales = np.zeros((tile, scale_stride(groups * n)), np.uint8)
    team = shape["team"]
    kernel = made(project.make, kind="wo_a", rows=tile, chunk=64, warps=shape["warps"], stages=2,
                          staged=tile < 48, most_k=k)  # fmt: skip
    execute(kernel, [weight, x, scales, codes, rows, n, k, groups, team], grid=(2 * groups, 1))
    return [codes[:rows], scales[:rows, : groups * n // 32]]


@pytest.mark.parametrize(("warps", "team"), [(2, 1), (4, 2), (16, 1)])
@pytest.mark.parametrize(("rows", "tile"), [(1, 8), (2, 8), (7, 8), (16, 16), (48, 48)])
def test_grouped_rows_leave_as_codes(rows: int, tile: int, warps: int, team: int):
    rng = np.random.default_rng(rows)
    groups, n, k = 2, 96, 256
    codes, scales = fp8_weight(rng, groups * n, k)
    x = values(bf16(rng, tile, groups, k)).astype(np.float16)
    x[rows:] = np.nan  # unused rows
    shape = {"warps": min(warps, 16 if tile <= 16 else 8), "team": team}  # registers
    got = grouped(pack.pack_fp8(codes, scales), x, rows, shape, n)
    weight = formats.dequantise_fp8_blocks(codes, scales).astype(np.float64).reshape(groups, n, k)
    exact = grouped_product(x[:rows].astype(np.float64), weight.transpose(0, 2, 1)).reshape(rows, groups * n)
    want = qdq.q8_encode(formats.round_bf16(exact.astype(np.float32)))
    # a value between two bf16 steps may fall either way, and with it a code or a scale
    assert (got[0] == want[0]).mean() > 0.98 and (got[1] == want[1]).mean() > 0.98
    assert_near(qdq.q8_decode(*got), exact, 2.0**-3, 2.0**-9 * np.abs(exact).max())


def test_grouped_codes_of_a_row_are_the_same_in_any_company():
    rng = np.random.default_rng(3)
    weight, x = pack.pack_fp8(*fp8_weight(rng, 2 * 64, 256)), values(bf16(rng, 48, 2, 256)).astype(np.float16)
    many = grouped(weight, x, 48, {"warps": 4, "team": 2}, 64)
    for rows, tile in ((1, 8), (6, 8), (16, 16)):
        few = grouped(weight, x[:tile].copy(), rows, {"warps": 4, "team": 2}, 64)
        assert all(np.array_equal(one, other[:rows]) for one, other in zip(few, many, strict=True))


@pytest.mark.parametrize(("n", "k", "rows", "tile"), [(16, 128, 1, 8), (24, 320, 7, 8), (40, 256, 16, 16)])
def test_bf16_weights_give_float32(n: int, k: int, rows: int, tile: int):
    rng = np.random.default_rng(n)
    weight, x = bf16(rng, n, k), bf16(rng, tile, k)
    x[rows:] = 0x7FC0
    y = np.full((tile, n), np.nan, np.float32)
    chunk, team = pack.chunk_width(k, pack.BF16_CHUNK), 2 if k > 128 else 1
    kernel = made(project.make, kind="bf16", rows=tile, chunk=chunk, warps=4, stages=2, staged=rows < 8, most_k=k)
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
        heads, groups = width.spec.num_attention_heads, width.spec.o_groups
        shares = [replace(width.spec, num_attention_heads=heads // n, o_groups=groups // n) for n in (1, 2)]
        for one in [one for spec in shares for one in project.projections(spec).values()]:
            for rows in (1, 6, 9, 48):
                launch = project.launch_of(width.label, one, rows)
                shape = found[launch.name].shape
                assert launch.shared <= project.SHARED_LIMIT and shape["rows"] >= rows and one.k <= shape["most_k"]
                assert launch.grid[0] % one.groups == 0 and shape["warps"] % launch.arguments[3] == 0
                assert one.kind != "wo_a" or shape["warps"] // launch.arguments[3] % 2 == 0
                assert one.k % shape["chunk"] == 0 and one.k // shape["chunk"] >= launch.arguments[3]
