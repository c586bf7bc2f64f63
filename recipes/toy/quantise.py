"""Rounding to the checkpoint's grids with straight-through gradients: what is trained is what the file holds.

The grids are those of the reference (weights: FP8 in 32 x 32 blocks, FP4 and FP8 rows in groups of 32; activations and
caches: Q8, Q4p, Q4e). Every grid takes a tensor and returns the dequantised values in the tensor's own dtype; scales
are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Grid = Callable[[Tensor], Tensor]
FASTER: dict[Grid, Grid] = {}  # GPU kernels that do the same, put here by fused.install


def _power_of_two_above(x: Tensor) -> Tensor:
    """2^ceil(log2 x) for positive float32, read from the bits so that no logarithm rounds."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code, which is what rint does on each step width."""
    a = x.abs().clamp(max=6.0)
    rounded = torch.where(a < 2, torch.round(a * 2) * 0.5, torch.where(a < 4, torch.round(a), torch.round(a * 0.5) * 2))
    return torch.copysign(rounded, x)


def _grouped(x: Tensor, width: int) -> Tensor:
    return x.to(torch.float32).unflatten(-1, (-1, width))


def _back(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(like.shape).to(like.dtype)


def q8(x: Tensor) -> Tensor:
    """Activations and window latents: e4m3, one power of two for 32 values of the last axis."""
    g = _grouped(x, 32)
    scale = _power_of_two_above(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) * (1.0 / 448.0))
    return _back(_e4m3(g / scale) * scale, x)


def q4p(x: Tensor) -> Tensor:
    """Index queries and keys: e2m1, one power of two for 32 values."""
    g = _grouped(x, 32)
    scale = _power_of_two_above(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) * (1.0 / 6.0))
    return _back(_e2m1(g / scale) * scale, x)


def q4e(x: Tensor) -> Tensor:
    """Compressed entries: e2m1, one e4m3 scale for 16 values."""
    g = _grouped(x, 16)
    scale = _e4m3(g.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-9) / 6.0)
    return _back(_e2m1(g / scale) * scale, x)


def fp8_blocks(w: Tensor) -> Tensor:
    """Dense weights [N, K], both multiples of 32: e4m3, one power of two for a 32 x 32 block."""
    g = w.to(torch.float32).unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    scale = _power_of_two_above(g.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448.0)
    return _back(_e4m3(g / scale) * scale, w)


def fp8_rows(w: Tensor) -> Tensor:
    """Engram tables: e4m3, one power of two for 32 columns of a row."""
    g = _grouped(w, 32)
    scale = _power_of_two_above(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448.0)
    return _back(_e4m3(g / scale) * scale, w)


def fp4_rows(w: Tensor) -> Tensor:
    """Routed experts: e2m1, one power of two for 32 columns of a row."""
    g = _grouped(w, 32)
    scale = _power_of_two_above(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 6.0)
    return _back(_e2m1(g / scale) * scale, w)


def bf16(w: Tensor) -> Tensor:
    """Embedding, head, norms, router, compressor and Markov weights."""
    return w.to(torch.bfloat16).to(w.dtype)


def f32(w: Tensor) -> Tensor:
    """Hyper-connection coefficients, sinks and router biases stay as they are."""
    return w


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, grid: Grid) -> Tensor:
        return FASTER.get(grid, grid)(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, grid: Grid) -> Tensor:
    """grid(x) in the forward pass, the identity in the backward pass."""
    return _StraightThrough.apply(x, grid)
