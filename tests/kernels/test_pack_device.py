"""Packing on the interpreter against pack.py, bit for bit: chips, pieces, interleaved pairs, missing rows."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import pack, pack_device
from tests.kernels.helpers import bf16, execute, fp4_weight, fp8_weight, made

POISON = 0xCD


def test_fp8_in_pieces():
    rng = np.random.default_rng(0)
    for n, k in ((64, 128), (32, 1024)):
        codes, scales = fp8_weight(rng, n, k)
        want = pack.pack_fp8(codes, scales)
        got = np.full_like(want, POISON)
        for first in range(0, n, 32):
            piece = [codes[first : first + 32].copy(), scales[first // 32 : first // 32 + 1].copy()]
            execute(made(pack_device.make_fp8), [*piece, got, 32, k, pack.chunk_width(k), first // 16], grid=(2, 1))
        assert np.array_equal(got, want)


@pytest.mark.parametrize("n", [48, 8, 21])
def test_bf16_with_missing_rows(n: int):
    bits = bf16(np.random.default_rng(n), n, 128)
    want = pack.pack_bf16(bits)
    got = np.full_like(want, POISON)
    execute(made(pack_device.make_bf16), [bits, got, n, 128, pack.chunk_width(128, pack.BF16_CHUNK), 0], grid=(1, 1))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("chip", ["sm_90a", "sm_103a"])
@pytest.mark.parametrize(("k", "most"), [(128, 256), (1024, 256), (1024, 128)])
def test_fp4(chip: str, k: int, most: int):
    codes, scales = fp4_weight(np.random.default_rng(k), 32, k)
    want = pack.pack_fp4(codes, scales, chip, most)
    got = np.full_like(want, POISON)
    kernel, chunk = made(pack_device.make_fp4, chip=chip), pack.chunk_width(k, most)
    execute(kernel, [codes, scales, got, 32, k, chunk, 0, 1, 1, 0], grid=(2, 1))
    assert np.array_equal(got, want)


def test_fp4_pairs_are_interleaved():
    rng, k = np.random.default_rng(1), 128
    gate, up = (fp4_weight(rng, 64, k) for _ in range(2))
    want = pack.interleave(*(pack.pack_fp4(*one, "sm_90a", 128) for one in (gate, up)), 2)
    got, chunk = np.full_like(want, POISON), pack.chunk_width(k, 128)
    for which, one in enumerate((gate, up)):
        for first in (0, 32):
            piece = [part[first : first + 32].copy() for part in one]
            kernel = made(pack_device.make_fp4, chip="sm_90a")
            execute(kernel, [*piece, got, 32, k, chunk, first // 16, 2, 2, which], grid=(1, 1))
    assert np.array_equal(got, want)
