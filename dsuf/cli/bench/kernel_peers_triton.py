"""A plain Triton user's product of FP8 weights with 32x32 scales, for --peers; imported only where Triton is installed.

    y[r, n] = sum_k x[r, k] w[n, k] 2^(e[n / 32, k / 32] - 127)        x bf16, sums in float32

One program makes 32 outputs of 16 rows in steps of 128 columns; weights become bf16, scaled before the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

OUTPUTS, STEP, ROWS = 32, 128, 16


@triton.jit
def _product(x, w, e, y, rows, n, k, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr):  # noqa: ANN001, ANN202
    outputs = tl.program_id(0) * N + tl.arange(0, N)
    row, column = tl.arange(0, M), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, k, K):
        at = start + column
        a = tl.load(x + row[:, None] * k + at[None, :], mask=row[:, None] < rows, other=0.0)
        b = tl.load(w + outputs[:, None] * k + at[None, :]).to(tl.float32)
        exponent = tl.load(e + (outputs[:, None] // 32) * (k // 32) + at[None, :] // 32).to(tl.float32)
        scaled = (b * tl.exp2(exponent - 127.0)).to(tl.bfloat16)
        total += tl.dot(a, tl.trans(scaled))
    tl.store(y + row[:, None] * n + outputs[None, :], total.to(tl.bfloat16), mask=row[:, None] < rows)


def products(rows: int, n: int, k: int, copies: int) -> list[Callable[[], Any]]:
    """Calls on as many random weights; rows up to 16, n a multiple of 32, k of 128."""
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(copies)]
    scales = torch.randint(118, 122, (n // 32, k // 32), device="cuda", dtype=torch.uint8)
    grid = (n // OUTPUTS,)
    return [lambda w=w: _product[grid](x, w, scales, y, rows, n, k, OUTPUTS, STEP, ROWS, num_warps=4) for w in weights]
