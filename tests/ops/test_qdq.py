"""Quantisation points against the reference's unit vectors and a slow float64 statement of the rules."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from dsuf.ops import qdq

UNITS = json.loads((Path(__file__).parents[1] / "golden/tiny.json").read_text())["units"]
E4M3 = [c * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(x: float, grid: list[float]) -> float:
    best = min(range(len(grid)), key=lambda code: (abs(grid[code] - abs(x)), code % 2))
    return math.copysign(grid[best], x)


def slow(x: np.ndarray, group: int, scale_of, grid: list[float]) -> np.ndarray:
    """Group by group and value by value, straight from the table of the module."""
    out = []
    for at in range(0, x.size, group):
        values = x[at : at + group]
        scale = scale_of(np.float32(np.abs(values).max()))
        for value in values:
            scaled = float(np.float32(value) / np.float32(scale))
            out.append(nearest(max(-grid[-1], min(grid[-1], scaled)), grid) * scale)
    return np.array(out)


def power_scale(smallest: float, inverse: float):
    return lambda amax: (
        2.0 ** math.ceil(math.log2(float(np.float32(np.maximum(amax, np.float32(smallest)) * np.float32(inverse)))))
    )


RULES = {
    "q8": (32, power_scale(1e-4, 1 / 448), E4M3),
    "q4p": (32, power_scale(6 * 2.0**-126, 1 / 6), E2M1),
    "q4e": (
        16,
        lambda amax: nearest(float(np.float32(max(amax, np.float32(6 * 2.0**-9)) / np.float32(6))), E4M3),
        E2M1,
    ),
}


def q4e(x: np.ndarray) -> np.ndarray:
    return qdq.q4e_decode(*qdq.q4e_encode(x))


@pytest.mark.parametrize(
    ("point", "golden"), [(qdq.q8, "fp8_group32"), (qdq.q4p, "fp4_group32_pow2"), (q4e, "fp4_group16_e4m3")]
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unit_vectors_of_the_reference(point, golden, dtype):
    np.testing.assert_array_equal(point(np.array(UNITS["x"], dtype)), UNITS[golden])


@pytest.mark.parametrize(
    ("amax", "scale"), [(448, 1), (450, 2), (7 / 8, 2**-9), (1e-5, 2**-22), (0, 2**-22), (np.nextafter(448, 999), 1)]
)
def test_q8_scale(amax, scale):
    codes, scales = qdq.q8_encode(np.full(32, amax, np.float32))
    assert scales[0] == 127 + math.log2(scale)
    assert qdq.q8_decode(codes, scales)[0] == qdq.q8(np.full(32, amax))[0]


@pytest.mark.parametrize(("amax", "scale"), [(6, 1), (7, 2), (1, 2**-2), (0, 2**-126)])
def test_q4p_scale(amax, scale):
    assert qdq.q4p_encode(np.full(32, amax, np.float32))[1][0] == 127 + math.log2(scale)


@pytest.mark.parametrize(("amax", "scale"), [(7, 1.125), (1, 0.171875), (0, 2**-9)])
def test_q4e_scale(amax, scale):
    assert E4M3[qdq.q4e_encode(np.full(16, amax, np.float32))[1][0]] == scale


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("magnitude", [1e-7, 1e-5, 1e-2, 1.0, 500.0, 1e6])
def test_points_equal_the_slow_statement(name, magnitude):
    x = np.random.default_rng(7).normal(size=96).astype(np.float32) * np.float32(magnitude)
    x[:32] = np.round(x[:32] / np.float32(magnitude) * 8) * np.float32(magnitude) / 8  # many ties
    point = q4e if name == "q4e" else getattr(qdq, name)
    np.testing.assert_array_equal(point(x), slow(x, *RULES[name]))


@pytest.mark.parametrize("name", ["q8", "q4p"])
def test_stored_codes_decode_to_the_values_of_the_point(name):
    x = np.random.default_rng(8).normal(size=(3, 5, 64)) * np.logspace(-8, 8, 15).reshape(3, 5, 1)
    codes, scales = getattr(qdq, f"{name}_encode")(x)
    assert scales.shape == (3, 5, 2)
    np.testing.assert_array_equal(getattr(qdq, f"{name}_decode")(codes, scales), getattr(qdq, name)(x))


def test_q8_of_its_own_values_changes_nothing():
    x = qdq.q8(np.random.default_rng(9).normal(size=(64, 64)))
    np.testing.assert_array_equal(qdq.q8(x), x)


def test_points_keep_shape_and_dtype():
    for dtype in (np.float32, np.float64):
        for point in (qdq.q8, qdq.q4p):
            out = point(np.ones((2, 3, 64), dtype))
            assert out.shape == (2, 3, 64) and out.dtype == dtype
