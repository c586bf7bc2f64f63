"""Prefill products on the interpreter against float64 products of dequantised operands."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import dense, pack, product_rows
from dsuf.ops import qdq
from dsuf.ops.product import grouped_product, product
from tests.kernels.helpers import BF16_STEP, assert_near, bf16, execute, fp8_weight, made, q8_rows, values

ORDER = np.array([8 * t + 4 * m + 2 * h + j for m in (0, 1) for h in (0, 1) for t in range(4) for j in (0, 1)])
SMALL = {"wide": False, "columns": 64, "stages": 3, "span": 2, "chip": "sm_90a"}
CHIPS = ("sm_90a", "sm_103a")


def in_product_order(bits: np.ndarray) -> np.ndarray:
    """[rows, K] with every 32 columns as the kernels' docstring says."""
    rows, k = bits.shape
    return np.ascontiguousarray(bits.reshape(rows, k // 32, 32)[:, :, ORDER]).reshape(rows, k)


def decoded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q8 rows: bits in product order, values float64."""
    value = qdq.q8_decode(*qdq.q8_encode(x)).astype(np.float32)
    return in_product_order(formats.float32_to_bf16(value)), value.astype(np.float64)


def chunk_for(kind: str, k: int) -> int:
    return pack.chunk_width(k, pack.BF16_CHUNK if kind == "bf16" else pack.FP8_CHUNK)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("rows", "n", "k", "grid"), [(1, 16, 64, 1), (65, 144, 192, 3), (130, 144, 1280, 2)])
def test_quantised_rows(chip: str, rows: int, n: int, k: int, grid: int):
    rng = np.random.default_rng(rows)
    weight = fp8_weight(rng, n, k)
    bits, x = decoded(rng.standard_normal((rows, k)))
    y = np.full((rows, n), 0x7FC0, np.uint16)
    kernel = made(dense.make, kind="fp8", **{**SMALL, "chip": chip})
    execute(kernel, [pack.pack_fp8(*weight), bits, y, rows, n, k, 1, chunk_for("fp8", k)], grid=(grid, 1))
    expected = product(x, formats.dequantise_fp8_blocks(*weight).astype(np.float64).T)
    assert_near(values(y), expected, BF16_STEP, 1e-4)


@pytest.mark.parametrize("columns", [128, 192, 256])
def test_wider_tiles(columns: int):
    rng = np.random.default_rng(columns)
    rows, n, k = columns + 7, 32, 128
    weight = fp8_weight(rng, n, k)
    bits, x = decoded(rng.standard_normal((rows, k)))
    y = np.full((rows, n), 0x7FC0, np.uint16)
    kernel = made(dense.make, kind="fp8", wide=False, columns=columns, stages=2, span=2, chip="sm_90a")
    execute(kernel, [pack.pack_fp8(*weight), bits, y, rows, n, k, 1, chunk_for("fp8", k)], grid=(1, 1))
    expected = product(x, formats.dequantise_fp8_blocks(*weight).astype(np.float64).T)
    assert_near(values(y), expected, BF16_STEP, 1e-4)


def test_grouped_rows():
    rng = np.random.default_rng(4)
    rows, groups, n, k = 70, 2, 32, 128
    codes, scales = fp8_weight(rng, groups * n, k)
    x = bf16(rng, rows, groups * k)
    y = np.full((rows, groups * n), 0x7FC0, np.uint16)
    kernel = made(dense.make, kind="fp8", **SMALL)
    execute(
        kernel,
        [pack.pack_fp8(codes, scales), in_product_order(x), y, rows, n, k, groups, chunk_for("fp8", k)],
        grid=(2, 1),
    )
    weight = formats.dequantise_fp8_blocks(codes, scales).astype(np.float64).reshape(groups, n, k)
    expected = grouped_product(values(x).reshape(rows, groups, k), weight.transpose(0, 2, 1))
    assert_near(values(y), expected, BF16_STEP, 1e-4)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 16, 64), (66, 48, 1152)])
def test_bf16_weights_give_float32(chip: str, rows: int, n: int, k: int):
    rng = np.random.default_rng(n)
    weight, x = bf16(rng, n, k), bf16(rng, rows, k)
    y = np.full((rows, n), np.nan, np.float32)
    kernel = made(dense.make, kind="bf16", **{**SMALL, "wide": True, "chip": chip})
    arguments = [pack.pack_bf16(weight), in_product_order(x), y, rows, n, k, 1, chunk_for("bf16", k)]
    execute(kernel, arguments, grid=(2, 1))
    assert_near(y.astype(np.float64), product(values(x), values(weight).T), 1e-5, 1e-4)


def test_a_row_is_the_same_bits_whatever_runs_beside_it():
    rng = np.random.default_rng(5)
    n, k = 32, 192
    weight, x = pack.pack_fp8(*fp8_weight(rng, n, k)), rng.standard_normal((130, k))
    got = {}
    for rows, columns in ((1, 64), (65, 64), (130, 64), (130, 128)):
        y = np.zeros((rows, n), np.uint16)
        kernel = made(dense.make, kind="fp8", wide=False, columns=columns, stages=2, span=2, chip="sm_90a")
        execute(kernel, [weight, decoded(x[:rows])[0], y, rows, n, k, 1, chunk_for("fp8", k)])
        got[rows, columns] = y
    for rows in ((1, 64), (65, 64), (130, 128)):
        assert np.array_equal(got[rows], got[130, 64][: rows[0]])


@pytest.mark.parametrize(("rows", "k"), [(1, 64), (5, 2112)])
def test_rows_are_expanded_into_product_order(rows: int, k: int):
    rng = np.random.default_rng(k)
    x = rng.standard_normal((rows, k)) * 10.0 ** rng.integers(-4, 5, (rows, 1))
    codes, scales, _ = q8_rows(x, rows)
    out = np.zeros((rows, k), np.uint16)
    execute(made(product_rows.make_q8), [codes, scales, out, rows, k], grid=(2, 1))
    assert np.array_equal(out, decoded(x)[0])
