"""Rope frequencies of the real config and the rotation by complex arithmetic written out."""

from __future__ import annotations

import json
import math
from importlib import resources

import numpy as np
import pytest

from dsuf.ops.rope import PhaseTable, frequencies, phases, rotate
from dsuf.spec import Spec

REAL = Spec.from_config(json.loads(resources.files("dsuf").joinpath("configs/v41-flash.json").read_text()))
CHECKED = {0: 1, 1: 0.687656, 8: 0.05, 15: 0.00363554, 16: 0.00226563, 20: 0.000296978}
CHECKED |= {24: 1.95312e-5, 25: 5.37231e-6, 31: 5.68053e-7}


def test_yarn_frequencies_of_the_real_config():
    w = frequencies(REAL, compressed=True)
    for i, value in CHECKED.items():
        assert w[i] == pytest.approx(value, rel=3e-6)


def test_window_layers_have_plain_frequencies():
    np.testing.assert_allclose(frequencies(REAL, compressed=False), [10000 ** (-2 * i / 64) for i in range(32)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_only_the_last_values_turn_in_adjacent_pairs(dtype):
    w = np.array([1.0, 0.1])
    x = np.random.default_rng(0).normal(size=(3, 2, 10)).astype(dtype)
    positions = np.array([0, 5, 700])
    turned = x.copy()
    rotate(turned, phases(positions, w, np.dtype(dtype)))
    np.testing.assert_array_equal(turned[..., :6], x[..., :6])
    for row, p in enumerate(positions):
        for pair in range(2):
            a, b = x[row, :, 6 + 2 * pair], x[row, :, 7 + 2 * pair]
            c, s = math.cos(p * w[pair]), math.sin(p * w[pair])
            np.testing.assert_allclose(turned[row, :, 6 + 2 * pair], a * c - b * s, atol=1e-6)
            np.testing.assert_allclose(turned[row, :, 7 + 2 * pair], a * s + b * c, atol=1e-6)


def test_the_conjugate_turns_back():
    x = np.random.default_rng(1).normal(size=(4, 8))
    phase = phases(np.arange(4) * 1000, np.array([1.0, 0.3, 0.01]), x.dtype)
    turned = x.copy()
    rotate(turned, phase)
    rotate(turned, phase.conj())
    np.testing.assert_allclose(turned, x, atol=1e-14)


def test_the_table_grows_and_does_not_change():
    table = PhaseTable(np.array([1.0, 0.01]), np.dtype(np.float32))
    early = table.at(np.array([3, 200]))
    assert table.at(np.array([100_000])).shape == (1, 2)
    np.testing.assert_array_equal(table.at(np.array([3, 200])), early)
