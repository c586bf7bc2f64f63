"""The shared expert's activation on the interpreter against ops/expert.py."""

from __future__ import annotations

import numpy as np
import pytest

from dsuf import formats
from dsuf.kernels import swiglu
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.ops.expert import swiglu as op
from tests.kernels.helpers import execute, values


@pytest.mark.parametrize(("width", "limit"), [(64, 0.5), (2304, 10.0)])
def test_activation_agrees_with_the_op(width: int, limit: float):
    rng = np.random.default_rng(width)
    y = formats.float32_to_bf16(rng.standard_normal((3, 2 * width)) * 8)
    codes, scales = np.zeros((3, width), np.uint8), np.zeros((3, scale_stride(width)), np.uint8)
    execute(swiglu.make(), [y, codes, scales, width, limit], grid=(-(-width // swiglu.SPAN), 3))
    want_codes, want_scales = qdq.q8_encode(formats.round_bf16(op(values(y), limit)))
    assert np.array_equal(scales[:, : width // 32], want_scales) and (codes == want_codes).mean() > 0.98
