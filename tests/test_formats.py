"""Number formats against the published grids, hand-written ties and an independent float64 rounding."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats

E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_even_code(x: float, grid: np.ndarray) -> int:
    """Index of the nearest grid value, ties to the even index; plain float64 search."""
    distance = np.abs(grid - abs(x))
    best = np.flatnonzero(distance == distance.min())
    return int(next((code for code in best if code % 2 == 0), best[0]))


def e4m3_grid() -> np.ndarray:
    """Magnitudes of codes 0..126 from the definition: subnormals 2^-9, then (8 + m) 2^(e - 10)."""
    return np.array([c * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)])


def test_e4m3_decodes_every_code_of_the_ocp_table():
    values = formats.e4m3_decode(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(values[:127], e4m3_grid())
    np.testing.assert_array_equal(values[128:255], -e4m3_grid())
    assert values[126] == 448 and np.isnan(values[[127, 255]]).all()


def test_e4m3_encode_rounds_to_nearest_even():
    grid = e4m3_grid()
    ties = (grid[1:] + grid[:-1]) / 2
    samples = np.concatenate([grid, ties, np.random.default_rng(1).uniform(0, 448, 500), [1e-9, 2**-10, 3 * 2**-10]])
    samples = samples.astype(np.float32)
    expected = [nearest_even_code(x, grid) for x in samples]
    np.testing.assert_array_equal(formats.e4m3_encode(samples), expected)
    np.testing.assert_array_equal(formats.e4m3_encode(-samples), np.array(expected) | 128)


def test_e2m1_ties_go_to_the_even_code():
    boundaries = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    values = formats.e2m1_decode(formats.e2m1_encode(boundaries))
    np.testing.assert_array_equal(values, [0, 1, 1, 2, 2, 4, 4])


def test_e2m1_encode_rounds_to_nearest():
    samples = np.linspace(-6, 6, 2401).astype(np.float32)
    expected = [nearest_even_code(x, E2M1_MAGNITUDES) | (8 if np.signbit(x) else 0) for x in samples]
    np.testing.assert_array_equal(formats.e2m1_encode(samples), expected)


def test_nibbles_hold_the_even_column_low():
    codes = np.array([[1, 2, 15, 0]], np.uint8)
    packed = formats.pack_nibbles(codes)
    np.testing.assert_array_equal(packed, [[0x21, 0x0F]])
    np.testing.assert_array_equal(formats.unpack_nibbles(packed), codes)
    np.testing.assert_array_equal(formats.e2m1_decode_packed(packed), [[0.5, 1, -6, 0]])


@pytest.mark.parametrize(
    ("value", "exponent"), [(1.0, 0), (450 / 448, 1), (7 / 8 / 448, -9), (2.0**-100, -100), (1.5, 1), (4.0, 2)]
)
def test_ceil_log2_is_exact_at_powers_of_two(value, exponent):
    assert formats.ceil_log2_float32(np.float32(value)) == exponent


def test_bf16_rounds_to_nearest_even():
    ulp = 2.0**-7
    x = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 0.51 * ulp, -1 - ulp / 2], np.float32)
    expected = np.array([1, 1 + 2 * ulp, 1 + ulp, -1], np.float32)
    np.testing.assert_array_equal(formats.round_bf16(x), expected)
    np.testing.assert_array_equal(formats.bf16_to_float32(formats.float32_to_bf16(x)), expected)


def test_ue8m0_is_a_power_of_two():
    np.testing.assert_array_equal(formats.ue8m0_decode(np.uint8([127, 120, 128, 1])), [1, 2**-7, 2, 2.0**-126])


@pytest.mark.parametrize("shape", [(64, 96), (40, 72), (1, 160)])
def test_fp8_blocks_come_back_within_half_a_step(shape):
    w = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    weight, scale = formats.quantise_fp8_blocks(w)
    assert weight.shape == shape and scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = formats.dequantise_fp8_blocks(weight, scale)
    largest_scale = formats.ue8m0_decode(scale).max()
    assert np.all(np.abs(back - w) <= np.maximum(np.abs(w) / 16, largest_scale * 2.0**-10))


def test_fp4_and_fp8_rows_have_one_scale_for_32_columns_of_a_row():
    w = np.random.default_rng(4).normal(size=(5, 64)).astype(np.float32)
    w[:, 32:] *= 1000
    weight, scale = formats.quantise_fp4_rows(w)
    assert weight.shape == (5, 32) and scale.shape == (5, 2)
    assert np.abs(formats.dequantise_fp4_rows(weight, scale) - w).max() < 0.17 * np.abs(w).max()
    weight, scale = formats.quantise_fp8_rows(w)
    assert weight.shape == (5, 64) and scale.shape == (5, 2)
    np.testing.assert_allclose(formats.dequantise_fp8_rows(weight, scale), w, rtol=1 / 16, atol=2e-4)


def test_zero_weights_stay_zero():
    for quantise, dequantise in (
        (formats.quantise_fp8_blocks, formats.dequantise_fp8_blocks),
        (formats.quantise_fp4_rows, formats.dequantise_fp4_rows),
        (formats.quantise_fp8_rows, formats.dequantise_fp8_rows),
    ):
        assert not dequantise(*quantise(np.zeros((32, 32), np.float32))).any()
