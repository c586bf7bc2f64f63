"""Triton kernels for the parts of a training step that would otherwise be thousands of tiny launches.

Each function computes what its plain PyTorch twin in quantise.py or layers.py computes; `check` compares them on random
data. A recipe's helper, not a statement of the model.
"""

# ruff: noqa: ANN001, ANN202 - the arguments of a Triton kernel are typed when it is compiled

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.toy import layers, quantise

KINDS = {"q8": 0, "fp8_rows": 1, "q4p": 2, "fp4_rows": 3, "q4e": 4}


@triton.jit
def _even(x):
    """Nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _power_of_two_above(x):
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)


@triton.jit
def _e4m3(x):
    a = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((a.to(tl.int32, bitcast=True) >> 23), 121)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    a = _even(a * inverse) * step
    return tl.where(x < 0, -a, a)


@triton.jit
def _e2m1(x):
    a = tl.minimum(tl.abs(x), 6.0)
    a = tl.where(a < 2.0, _even(a * 2.0) * 0.5, tl.where(a < 4.0, _even(a), _even(a * 0.5) * 2.0))
    return tl.where(x < 0, -a, a)


@triton.jit
def _round_groups(x_ptr, y_ptr, groups, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at, mask=row[:, None] < groups, other=0.0)
    amax = tl.max(tl.abs(x), 1)[:, None]
    if KIND == 4:
        scale = _e4m3(tl.div_rn(tl.maximum(amax, 0.01171875), tl.full(amax.shape, 6.0, tl.float32)))
        y = _e2m1(tl.div_rn(x, scale + tl.zeros_like(x))) * scale
    else:
        if KIND == 0:
            e = _power_of_two_above(tl.maximum(amax, 1e-4) * 0.002232142857142857)
        elif KIND == 1:
            e = _power_of_two_above(tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32)))
        elif KIND == 2:
            e = _power_of_two_above(tl.maximum(amax, 7.052966104933725e-38) * 0.16666666666666666)
        else:
            e = _power_of_two_above(tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 6.0, tl.float32)))
        scale = (e << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - e) << 23).to(tl.float32, bitcast=True)
        y = (_e4m3(x * inverse) if KIND < 2 else _e2m1(x * inverse)) * scale
    tl.store(y_ptr + at, y, mask=row[:, None] < groups)


@triton.jit
def _round_blocks(x_ptr, y_ptr, columns):
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    at = row[:, None] * columns + tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at)
    amax = tl.max(tl.max(tl.abs(x), 1)[:, None], 0)[:, None]
    e = _power_of_two_above(tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32)))
    inverse = ((254 - e) << 23).to(tl.float32, bitcast=True)
    tl.store(y_ptr + at, _e4m3(x * inverse) * (e << 23).to(tl.float32, bitcast=True))


def round_groups(x: Tensor, kind: str) -> Tensor:
    """One of the group grids of quantise.py on float32 of any shape."""
    x = x.contiguous()
    width = 16 if kind == "q4e" else 32
    y, groups, block = torch.empty_like(x), x.numel() // width, 64
    _round_groups[(triton.cdiv(groups, block),)](x, y, groups, width, KINDS[kind], block)
    return y


def round_blocks(x: Tensor) -> Tensor:
    """quantise.fp8_blocks on float32 [N, K]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _round_blocks[(x.shape[0] // 32, x.shape[1] // 32)](x, y, x.shape[1])
    return y


@triton.jit
def _sinkhorn_forward(c_ptr, y_ptr, sums_ptr, n, EPS: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    four = tl.arange(0, 4)
    at = token[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
    inside = token < n
    c = tl.load(c_ptr + at, mask=inside[:, None, None], other=1.0)
    at_sum = token[:, None] * 4 + four[None, :]
    s = tl.sum(c, 1) + EPS
    tl.store(sums_ptr + at_sum, s, mask=inside[:, None])
    c = c / s[:, None, :]
    for i in range(ITERATIONS - 1):
        s = tl.sum(c, 2) + EPS
        tl.store(sums_ptr + (2 * i + 1) * n * 4 + at_sum, s, mask=inside[:, None])
        c = c / s[:, :, None]
        s = tl.sum(c, 1) + EPS
        tl.store(sums_ptr + (2 * i + 2) * n * 4 + at_sum, s, mask=inside[:, None])
        c = c / s[:, None, :]
    tl.store(y_ptr + at, c, mask=inside[:, None, None])


@triton.jit
def _sinkhorn_backward(g_ptr, c_ptr, sums_ptr, out_ptr, n, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    four = tl.arange(0, 4)
    at = token[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
    inside = token < n
    g = tl.load(g_ptr + at, mask=inside[:, None, None], other=0.0)
    c = tl.load(c_ptr + at, mask=inside[:, None, None], other=1.0)
    at_sum = token[:, None] * 4 + four[None, :]
    for back in range(ITERATIONS - 1):
        i = ITERATIONS - 2 - back
        s = tl.load(sums_ptr + (2 * i + 2) * n * 4 + at_sum, mask=inside[:, None], other=1.0)
        g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
        c = c * s[:, None, :]
        s = tl.load(sums_ptr + (2 * i + 1) * n * 4 + at_sum, mask=inside[:, None], other=1.0)
        g = (g - tl.sum(g * c, 2)[:, :, None]) / s[:, :, None]
        c = c * s[:, :, None]
    s = tl.load(sums_ptr + at_sum, mask=inside[:, None], other=1.0)
    g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
    tl.store(out_ptr + at, g, mask=inside[:, None, None])


class Sinkhorn(torch.autograd.Function):
    """layers.Sinkhorn for [N, 4, 4]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, c: Tensor, iterations: int, eps: float) -> Tensor:
        c = c.contiguous()
        n, y = c.shape[0], torch.empty_like(c)
        sums = c.new_empty(2 * iterations - 1, n, 4)
        _sinkhorn_forward[(triton.cdiv(n, 64),)](c, y, sums, n, eps, iterations, 64)
        ctx.save_for_backward(y, sums)
        ctx.iterations = iterations
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        y, sums = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(y)
        n = y.shape[0]
        _sinkhorn_backward[(triton.cdiv(n, 64),)](grad, y, sums, out, n, ctx.iterations, 64)
        return out, None, None


@triton.jit
def _rope(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None]
    at = row[:, None] * WIDTH + column[None, :]
    turned = column >= WIDTH - ROPE
    x = tl.load(x_ptr + at, mask=inside)
    partner = tl.load(x_ptr + row[:, None] * WIDTH + (column ^ 1)[None, :], mask=inside & turned[None, :], other=0.0)
    pair = (row // HEADS)[:, None] * (ROPE // 2) + tl.where(turned, (column - (WIDTH - ROPE)) // 2, 0)[None, :]
    cos = tl.load(cos_ptr + pair, mask=inside & turned[None, :], other=1.0)
    sin = tl.load(sin_ptr + pair, mask=inside & turned[None, :], other=0.0)
    sign = tl.where(column % 2 == 0, -TURN, TURN)[None, :]
    tl.store(y_ptr + at, x * cos + partner * sin * sign, mask=inside)


class Rope(torch.autograd.Function):
    """layers.rope: x [..., heads, width] or [..., width], tables [..., rope / 2]; turn 1 forward, -1 inverse."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor, turn: int) -> Tensor:
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        return _turn(x, cos, sin, turn)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _turn(grad.contiguous(), *ctx.saved_tensors, -ctx.turn), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, turn: int) -> Tensor:
    y, width, rope = torch.empty_like(x), x.shape[-1], 2 * cos.shape[-1]
    rows, tokens = x.numel() // width, cos.numel() // cos.shape[-1]
    _rope[(triton.cdiv(rows, 32),)](x, cos, sin, y, rows, rows // tokens, width, rope, turn, 32)
    return y


@triton.jit
def _unfold_forward(out_ptr, x_ptr, post_ptr, comb_ptr, y_ptr, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    column = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None]
    out = tl.load(out_ptr + token[:, None] * WIDTH + column, mask=mask, other=0.0)
    for k in tl.static_range(4):
        y = tl.load(post_ptr + token * 4 + k, mask=inside, other=0.0)[:, None] * out
        for j in tl.static_range(4):
            x = tl.load(x_ptr + (token * 4 + j)[:, None] * WIDTH + column, mask=mask, other=0.0)
            y += tl.load(comb_ptr + token * 16 + j * 4 + k, mask=inside, other=0.0)[:, None] * x
        tl.store(y_ptr + (token * 4 + k)[:, None] * WIDTH + column, y, mask=mask)


@triton.jit
def _unfold_backward(
    g_ptr,
    out_ptr,
    x_ptr,
    post_ptr,
    comb_ptr,
    dout_ptr,
    dx_ptr,
    dpost_ptr,
    dcomb_ptr,
    n,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < n
    column = tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None]
    out = tl.load(out_ptr + token[:, None] * WIDTH + column, mask=mask, other=0.0)
    dout = tl.zeros_like(out)
    for k in tl.static_range(4):
        g = tl.load(g_ptr + (token * 4 + k)[:, None] * WIDTH + column, mask=mask, other=0.0)
        dout += tl.load(post_ptr + token * 4 + k, mask=inside, other=0.0)[:, None] * g
        tl.store(dpost_ptr + token * 4 + k, tl.sum(out * g, 1), mask=inside)
    tl.store(dout_ptr + token[:, None] * WIDTH + column, dout, mask=mask)
    for j in tl.static_range(4):
        x = tl.load(x_ptr + (token * 4 + j)[:, None] * WIDTH + column, mask=mask, other=0.0)
        dx = tl.zeros_like(out)
        for k in tl.static_range(4):
            g = tl.load(g_ptr + (token * 4 + k)[:, None] * WIDTH + column, mask=mask, other=0.0)
            dx += tl.load(comb_ptr + token * 16 + j * 4 + k, mask=inside, other=0.0)[:, None] * g
            tl.store(dcomb_ptr + token * 16 + j * 4 + k, tl.sum(x * g, 1), mask=inside)
        tl.store(dx_ptr + (token * 4 + j)[:, None] * WIDTH + column, dx, mask=mask)


class Unfold(torch.autograd.Function):
    """layers.unfold: out [N, D], streams [N, 4, D], post [N, 4], comb [N, 4, 4] -> [N, 4, D]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *given: Tensor) -> Tensor:
        given = tuple(t.contiguous() for t in given)
        ctx.save_for_backward(*given)
        out, streams = given[:2]
        y = torch.empty_like(streams)
        _unfold_forward[(triton.cdiv(len(out), 8),)](*given, y, len(out), out.shape[1], 8)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        given = ctx.saved_tensors
        found = tuple(torch.empty_like(t) for t in given)
        n, width = given[0].shape
        _unfold_backward[(triton.cdiv(n, 8),)](grad.contiguous(), *given, *found, n, width, 8)
        return found


def install() -> None:
    """Use these kernels from now on, after comparing them with their twins on this GPU."""
    check()
    for kind in KINDS:
        quantise.FASTER[getattr(quantise, kind)] = partial(round_groups, kind=kind)
    quantise.FASTER[quantise.fp8_blocks] = round_blocks
    layers.FASTER.update(sinkhorn=Sinkhorn.apply, rope=Rope.apply, unfold=Unfold.apply)


def check() -> None:
    """Raise AssertionError where a kernel and its twin differ on random data."""
    x = torch.randn(512, 128, device="cuda") * torch.exp(3 * torch.randn(512, 1, device="cuda"))
    for kind in KINDS:
        assert torch.equal(round_groups(x, kind), getattr(quantise, kind)(x)), kind
    assert torch.equal(round_blocks(x), quantise.fp8_blocks(x)), "fp8_blocks"
    c = torch.softmax(2 * torch.randn(512, 4, 4, device="cuda"), -1) + 1e-6
    _compare(lambda t: Sinkhorn.apply(t, 20, 1e-6), lambda t: layers.Sinkhorn.apply(t, 20, 1e-6), c)
    angle = torch.randn(512, 8, device="cuda")
    q = torch.randn(512, 4, 64, device="cuda")
    _compare(
        lambda t: Rope.apply(t, angle.cos(), angle.sin(), -1),
        lambda t: layers.rope(t, angle.cos(), angle.sin(), True),
        q,
    )
    given = [torch.randn(shape, device="cuda") for shape in ((512, 128), (512, 4, 128), (512, 4), (512, 4, 4))]
    _compare(Unfold.apply, layers.unfold, *given)


def _compare(one: Callable[..., Tensor], other: Callable[..., Tensor], *given: Tensor) -> None:
    results = []
    for function in (one, other):
        leaves = [t.clone().requires_grad_() for t in given]
        y = function(*leaves)
        y.backward(torch.sin(torch.arange(y.numel(), device=y.device, dtype=y.dtype)).view_as(y))
        results.append([y.detach(), *(t.grad for t in leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-2, atol=3e-2), (one, (a - b).abs().max())
