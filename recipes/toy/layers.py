"""Parts that act on each token alone: weights on their grids, norms, rope, hyper-connections, experts, Engram.

Tokens of all sequences are one axis N. Parameter names are those of the checkpoint; the routed experts of a layer are
stacked into one parameter [experts, out, in].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsuf.spec import Spec
from recipes.toy import quantise
from recipes.toy.quantise import Grid, straight_through

TINY = 1e-20
FASTER: dict[str, Callable[..., Tensor]] = {}  # GPU kernels that do the same, put here by fused.install


@dataclass
class Mode:
    """Which roundings act; both are on in training, `exact32` of the reference has neither."""

    weights: bool = True
    activations: bool = True


class Weight(nn.Module):
    """One tensor of the checkpoint with the grid it is stored on."""

    def __init__(self, mode: Mode, grid: Grid, shape: tuple[int, ...], sigma: float, mean: float = 0.0) -> None:
        super().__init__()
        self.mode, self.grid, self.live = mode, grid, None
        self.weight = nn.Parameter(mean + sigma * torch.randn(shape))

    def value(self) -> Tensor:
        """The weight as the file will hold it; `prepare` of the model rounds it once for a step."""
        if self.live is not None:
            return self.live
        if not self.mode.weights or self.grid is quantise.f32:
            return self.weight
        flat = self.weight.flatten(0, -2) if self.weight.dim() > 2 else self.weight
        return straight_through(flat, self.grid).view(self.weight.shape)


class Linear(Weight):
    """y = w x; an FP8 weight takes its input through Q8 unless `plain`."""

    def __init__(self, mode: Mode, grid: Grid, rows: int, columns: int, gain: float = 1.0, plain: bool = False) -> None:
        super().__init__(mode, grid, (rows, columns), gain * columns**-0.5)
        self.quantised_input = grid is quantise.fp8_blocks and not plain

    def forward(self, x: Tensor) -> Tensor:
        if self.quantised_input and self.mode.activations:
            x = straight_through(x, quantise.q8)
        return F.linear(x, self.value())


class Norm(Weight):
    """RMSNorm over the last axis."""

    def __init__(self, mode: Mode, width: int, mean: float = 1.0) -> None:
        super().__init__(mode, quantise.bf16, (width,), 0.0, mean)

    def value(self) -> Tensor:
        if self.live is not None:
            return self.live
        return straight_through(self.weight, quantise.bf16) if self.mode.weights else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.value(), TINY)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the last values of x [..., width] or [..., heads, width]; tables [..., rope / 2]."""
    if "rope" in FASTER:
        return FASTER["rope"](x, cos, sin, -1 if inverse else 1)
    if x.dim() > cos.dim():
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    width = 2 * cos.shape[-1]
    kept, turned = x[..., :-width], x[..., -width:].unflatten(-1, (-1, 2))
    a, b = turned.unbind(-1)
    if inverse:
        sin = -sin
    return torch.cat((kept, torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)), -1)


def frequencies(spec: Spec, ratio: int) -> np.ndarray:
    """Angles per position, float64 [qk_rope_head_dim / 2]; YaRN for the layers with a ratio."""
    width = spec.qk_rope_head_dim
    pair = np.arange(width // 2)
    if ratio == 0:
        return spec.rope_theta ** (-2.0 * pair / width)
    yarn, base = spec.rope_scaling, spec.compress_rope_theta
    w = base ** (-2.0 * pair / width)

    def pair_that_turns(times: float) -> float:
        return width * math.log(yarn.original_max_position_embeddings / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    t = np.clip((pair - low) / max(high - low, 1e-3), 0.0, 1.0)
    return w / yarn.factor * t + w * (1 - t)


class Sinkhorn(torch.autograd.Function):
    """Alternating column and row normalisation; the backward pass walks the divisions back from their sums."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, c: Tensor, iterations: int, eps: float) -> Tensor:
        sums = []
        for step in range(2 * iterations - 1):
            s = c.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps
            c = c / s
            sums.append(s)
        ctx.save_for_backward(c, *sums)
        return c

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        c, *sums = ctx.saved_tensors
        for step in reversed(range(len(sums))):
            axis = -2 if step % 2 == 0 else -1
            grad = (grad - (grad * c).sum(axis, keepdim=True)) / sums[step]
            c = c * sums[step]
        return grad, None, None


class Mixes(nn.Module):
    """Hyper-connection coefficients of one sublayer from the streams [N, n, D]."""

    def __init__(self, spec: Spec, name: str) -> None:
        super().__init__()
        n = spec.hc_mult
        self.n, self.iterations, self.eps, self.name = n, spec.hc_sinkhorn_iters, spec.hc_eps, name
        base = 0.5 * torch.randn(spec.hc_mix_rows)
        base[:n] -= math.log(n - 1.0)  # the fold starts near the mean of the streams
        base[2 * n :] += 2.0 * torch.eye(n).flatten()  # and the mixing near the identity
        self.fn = nn.Parameter(0.02 * torch.randn(spec.hc_mix_rows, n * spec.hidden_size))
        self.base = nn.Parameter(base)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> pre [N, n], post [N, n], comb [N, n, n]."""
        n, x = self.n, streams.flatten(-2)
        m = F.linear(x, self.fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + TINY)
        scale = torch.cat([s.expand(count) for s, count in zip(self.scale, (n, n, n * n), strict=True)])
        pre, post, c = (m * scale + self.base).split((n, n, n * n), -1)
        pre, post = torch.sigmoid(pre) + self.eps, 2 * torch.sigmoid(post)
        c = torch.softmax(c.unflatten(-1, (n, n)), -1) + self.eps
        return pre, post, FASTER.get("sinkhorn", Sinkhorn.apply)(c, self.iterations, self.eps)


def fold(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre_j X_j: [N, n, D], [N, n] -> [N, D]."""
    return (streams * pre.unsqueeze(-1)).sum(1)


def unfold(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_k = post_k out + sum_j comb[j, k] X_j."""
    if "unfold" in FASTER:
        return FASTER["unfold"](out, streams, post, comb)
    return torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(-2), comb.transpose(-1, -2), streams)


class Experts(nn.Module):
    """Router, routed FP4 experts (all are computed, unchosen ones with weight 0) and the shared FP8 expert."""

    def __init__(self, spec: Spec, mode: Mode, experts: int, chosen: int) -> None:
        super().__init__()
        width, inner = spec.hidden_size, spec.moe_intermediate_size
        self.mode, self.chosen, self.factor, self.limit = mode, chosen, spec.routed_scaling_factor, spec.swiglu_limit
        self.gate = Linear(mode, quantise.bf16, experts, width)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.w1 = Weight(mode, quantise.fp4_rows, (experts, inner, width), width**-0.5)
        self.w3 = Weight(mode, quantise.fp4_rows, (experts, inner, width), width**-0.5)
        self.w2 = Weight(mode, quantise.fp4_rows, (experts, width, inner), inner**-0.5)
        self.shared_w1 = Linear(mode, quantise.fp8_blocks, inner, width)
        self.shared_w3 = Linear(mode, quantise.fp8_blocks, inner, width)
        self.shared_w2 = Linear(mode, quantise.fp8_blocks, width, inner)

    def _swiglu(self, g: Tensor, u: Tensor) -> Tensor:
        return F.silu(g.clamp(max=self.limit)) * u.clamp(-self.limit, self.limit)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sqrt(F.softplus(self.gate(x)))
        picked = torch.topk(scores + self.bias, self.chosen, -1).indices
        mask = torch.zeros_like(scores).scatter_(-1, picked, 1.0)
        if self.training:
            self.load.copy_(mask.mean(0))
        w = scores * mask
        w = self.factor * w / (w.sum(-1, keepdim=True) + TINY)
        xq = straight_through(x, quantise.q8) if self.mode.activations else x
        experts, inner, width = self.w1.weight.shape
        g = F.linear(xq, self.w1.value().view(experts * inner, width)).unflatten(-1, (experts, inner))
        u = F.linear(xq, self.w3.value().view(experts * inner, width)).unflatten(-1, (experts, inner))
        y = (self._swiglu(g, u) * w.unsqueeze(-1)).flatten(-2)
        if self.mode.activations:
            y = straight_through(y, quantise.q8)
        routed = y @ self.w2.value().transpose(1, 2).reshape(experts * inner, width)
        return routed + self.shared_w2(self._swiglu(self.shared_w1(x), self.shared_w3(x)))

    def balance(self, rate: float) -> None:
        """Move the selection bias of an over-used expert down and of an under-used one up."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)


class Engram(nn.Module):
    """Hashed n-gram memory of one layer: rows -> keys for each stream and one value."""

    def __init__(self, spec: Spec, mode: Mode, rows: int) -> None:
        super().__init__()
        n, width = spec.hc_mult, spec.hidden_size
        self.n = n
        self.embed = Weight(mode, quantise.fp8_rows, (rows, spec.engram_head_dim), 0.5)
        self.wkv = Linear(mode, quantise.fp8_blocks, width * (n + 1), spec.engram_columns * spec.engram_head_dim)
        self.q_weight = Weight(mode, quantise.bf16, (n, width), 0.0, 1.0)
        self.k_weight = Weight(mode, quantise.bf16, (n, width), 0.0, 1.0)

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """streams [N, n, D], rows int64 [N, columns] -> streams."""
        kv = self.wkv(F.embedding(rows, self.embed.value()).flatten(-2)).unflatten(-1, (self.n + 1, -1))
        key, value = kv[:, :-1], kv[:, -1:]
        width = streams.shape[-1]
        dot = (streams * (self.q_weight.value() * self.k_weight.value()) * key).sum(-1)
        dot = dot * torch.rsqrt(streams.square().mean(-1) + TINY) * torch.rsqrt(key.square().mean(-1) + TINY)
        dot = dot * width**-0.5
        gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
        return streams + gate.unsqueeze(-1) * value
