"""The drafter's taps on the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf.kernels import taps
from dsuf.kernels.stream import scale_stride
from dsuf.ops.qdq import q8_encode
from tests.kernels.helpers import bf16, execute, made, values


@pytest.mark.parametrize(("rows", "d"), [(1, 128), (7, 1280), (2, 5120)])
def test_three_taps_become_one_quantised_row(rows: int, d: int):
    rng = np.random.default_rng(d)
    three = [bf16(rng, rows, d) for _ in range(3)]
    codes, scales = np.full((rows, 3 * d), 0x55, np.uint8), np.full((rows, scale_stride(3 * d)), 0x55, np.uint8)
    execute(made(taps.make_join, most_d=5120), [*three, codes, scales, d], grid=(-(-d // 1024), 3 * rows))
    want, want_scales = q8_encode(np.concatenate([values(x) for x in three], axis=1).astype(np.float32))
    assert (codes == want).all() and (scales[:, : 3 * d // 32] == want_scales).all()
