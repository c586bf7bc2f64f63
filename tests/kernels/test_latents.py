"""Latents and window rows on the interpreter: norm, rope, codes, and where rows of several sequences land."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import latents as family
from dsuf.kernels import rope
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.norm import rms_norm
from tests.kernels.helpers import bf16, execute, made, values

Q, D, ROPE, WINDOW, EPS = 96, 64, 16, 8, 1e-20
RING = WINDOW + 32


def frequencies() -> np.ndarray:
    return 160000.0 ** (-np.arange(0, ROPE, 2) / ROPE)


def test_two_tables_give_the_phase_of_a_far_position():
    table = rope.tables(frequencies(), 1 << 20)
    positions = np.array([0, 1, 1023, 1024, 65537, 1048575])
    fine, coarse = table[positions % rope.FINE].astype(np.float64), table[rope.FINE + positions // rope.FINE]
    got = (fine[..., 0] + 1j * fine[..., 1]) * (coarse[..., 0] + 1j * coarse[..., 1])
    assert np.abs(got - np.exp(1j * np.multiply.outer(positions, frequencies()))).max() < 3e-7


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_latents_agree_with_the_ops_and_land_in_their_rings(rows: int):
    rng = np.random.default_rng(rows)
    y, q_norm, kv_norm = bf16(rng, rows, Q + D), bf16(rng, Q), bf16(rng, D)
    sequence = rng.permutation(rows).astype(np.int32)
    if rows > 2:
        sequence[1] = -1
    position = rng.integers(0, 5000, rows).astype(np.int32)
    codes, scales = np.zeros((rows, Q), np.uint8), np.zeros((rows, scale_stride(Q)), np.uint8)
    row_bytes = family.window_row_bytes(D)
    windows = np.full((rows, RING, row_bytes), 0xEE, np.uint8)
    kernel = made(family.make, q=Q, d=D, rope=ROPE, eps=EPS)
    execute(kernel, [y, q_norm, kv_norm, rope.tables(frequencies(), 8192), sequence, position, codes, scales, windows,
                     RING * row_bytes, RING], grid=(rows, 2))  # fmt: skip
    c = formats.round_bf16(rms_norm(values(y[:, :Q]), values(q_norm), EPS))
    expected_codes, expected_scales = qdq.q8_encode(c)
    same = (expected_codes == codes).mean()
    assert same > 0.99  # a value between two bf16 steps may fall either way
    assert np.array_equal(expected_scales, scales[:, : Q // 32])
    k = formats.round_bf16(rms_norm(values(y[:, Q:]), values(kv_norm), EPS)).astype(np.float64)
    pairs = k[:, D - ROPE :: 2] + 1j * k[:, D - ROPE + 1 :: 2]
    pairs = pairs * np.exp(1j * np.multiply.outer(position, frequencies()))
    k[:, D - ROPE :: 2], k[:, D - ROPE + 1 :: 2] = pairs.real, pairs.imag
    untouched = np.ones(windows.shape[:2], bool)
    for row in range(rows):
        if sequence[row] < 0:
            continue
        place = sequence[row], position[row] % RING
        untouched[place] = False
        got = qdq.q8_decode(windows[place][:D], windows[place][D : D + D // 32])
        want = qdq.q8(formats.round_bf16(k[row]).astype(np.float64))
        step = np.abs(want.reshape(-1, 32)).max(1).repeat(32)
        assert (np.abs(got - want) <= 2.0**-3 * np.abs(want) + 2.0**-9 * step).all()
        assert (got == want).mean() > 0.95
    assert (windows[untouched] == 0xEE).all()


@pytest.mark.parametrize("rows", [6, 16, 48])
def test_a_row_is_the_same_bits_in_any_launch(rows: int):
    rng, at = np.random.default_rng(rows), rows - 2
    y, q_norm, kv_norm = bf16(rng, rows, Q + D), bf16(rng, Q), bf16(rng, D)
    y[:3] = 0x7FC0
    sequence, position = np.full(rows, -1, np.int32), np.full(rows, 1 << 30, np.int32)
    sequence[3:], position[3:] = 0, 500 + np.arange(rows - 3)
    kernel, row_bytes = made(family.make, q=Q, d=D, rope=ROPE, eps=EPS), family.window_row_bytes(D)

    def run(which: slice) -> list[np.ndarray]:
        n = which.stop - which.start
        codes, scales = np.zeros((n, Q), np.uint8), np.zeros((n, scale_stride(Q)), np.uint8)
        windows = np.full((1, 64, row_bytes), 0xEE, np.uint8)
        execute(kernel, [y[which].copy(), q_norm, kv_norm, rope.tables(frequencies(), 8192), sequence[which].copy(),
                         position[which].copy(), codes, scales, windows, 64 * row_bytes, 64], grid=(n, 2))  # fmt: skip
        return [codes[at - which.start], scales[at - which.start], windows[0, position[at] % 64]]

    for one, many in zip(run(slice(at, at + 1)), run(slice(0, rows)), strict=True):
        assert np.array_equal(one, many)
