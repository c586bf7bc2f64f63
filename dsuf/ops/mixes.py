"""Hyper-connections: n residual streams a token, folded into a sublayer's input and unfolded from its output.

    m = (fn x) / sqrt(mean(x^2) + eps), x the streams flattened stream-major
    pre_j  = sigmoid(m_j scale_0 + base_j) + hc_eps
    post_j = 2 sigmoid(m_{n+j} scale_1 + base_{n+j})
    comb   = softmax over the rows of (m scale_2 + base) as [n, n], + hc_eps, then hc_sinkhorn_iters rounds that divide
             by (column sums + hc_eps), the first without, the others after dividing by (row sums + hc_eps)
    fold(X, p)               = sum_j p_j X_j
    unfold(o, X, post, comb)_k = post_k o + sum_j comb[j, k] X_j

Streams X are [rows, n, D]. `fn` must stay float32 or better. Source: reference model.md 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from dsuf.ops.norm import root_mean_square
from dsuf.ops.product import TILE_ROWS, product


@dataclass(frozen=True)
class MixWeights:
    """One sublayer's coefficient projection: fn_t [nD, (2+n)n], scale and base [(2+n)n], scale already repeated."""

    fn_t: np.ndarray
    scale: np.ndarray
    base: np.ndarray


@dataclass(frozen=True)
class Mixes:
    """Coefficients of one sublayer: pre and post [rows, n], comb [rows, n, n]."""

    pre: np.ndarray
    post: np.ndarray
    comb: np.ndarray


def repeat_scale(scale: np.ndarray, streams: int) -> np.ndarray:
    """The three scales [3] spread over pre, post and comb -> [(2+n)n]."""
    return np.repeat(scale, [streams, streams, streams * streams])


def mixes(streams: np.ndarray, weights: MixWeights, rounds: int, hc_eps: float, eps: float) -> Mixes:
    """X [rows, n, D] -> the coefficients that its sublayer's output and the next fold use."""
    rows, n, width = streams.shape
    flat = streams.reshape(rows, n * width)
    m = product(flat, weights.fn_t)
    m /= root_mean_square(flat, eps)
    return mixes_of(m, weights.scale, weights.base, n, rounds, hc_eps)


def mixes_of(m: np.ndarray, scale: np.ndarray, base: np.ndarray, n: int, rounds: int, hc_eps: float) -> Mixes:
    """Coefficients from the normalised projection m [rows, (2+n)n]."""
    rows = m.shape[0]
    m = m * scale
    m += base
    gates = 1 / (1 + np.exp(-m[:, : 2 * n]))
    post = gates[:, n:]
    post *= 2
    comb = sinkhorn(m[:, 2 * n :].reshape(rows, n, n), rounds, hc_eps)
    return Mixes(gates[:, :n] + hc_eps, post, comb)


def sinkhorn(logits: np.ndarray, rounds: int, hc_eps: float) -> np.ndarray:
    """logits [rows, n, n] -> comb [rows, n, n], nearly doubly stochastic.

    All entries of a row of `state` are divided at once: state @ sums gives beside each entry the sum it is divided by.
    The extra last column is 1, so that hc_eps enters through the same product; two calls a half round.
    """
    rows, n, _ = logits.shape
    row_sums, column_sums = _sum_matrices(n, hc_eps, logits.dtype)
    state = np.ones((-(-rows // TILE_ROWS) * TILE_ROWS, n * n + 1), logits.dtype)  # padding too: it divides by no zero
    weights = np.exp(logits - np.maximum.reduce(logits, axis=-1, keepdims=True))
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    weights += hc_eps
    state[:rows, :-1] = weights.reshape(rows, n * n)
    if rows <= TILE_ROWS:  # the same product with the least overhead a call: this loop is a tenth of a decode step
        tiles, multiply = state, state.dot
    else:
        tiles = state.reshape(-1, TILE_ROWS, n * n + 1)
        multiply = partial(np.matmul, tiles)
    divide, divisors = np.divide, np.empty_like(tiles)
    multiply(column_sums, divisors)
    divide(tiles, divisors, tiles)
    for _ in range(rounds - 1):
        multiply(row_sums, divisors)
        divide(tiles, divisors, tiles)
        multiply(column_sums, divisors)
        divide(tiles, divisors, tiles)
    return state[:rows, :-1].reshape(rows, n, n)


@cache
def _sum_matrices(n: int, hc_eps: float, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [n*n+1, n*n+1] that put beside each entry its row sum + eps, its column sum + eps."""
    row, column = np.divmod(np.arange(n * n), n)
    matrices = []
    for line in (row, column):
        sums = np.zeros((n * n + 1, n * n + 1), dtype)
        sums[:-1, :-1] = line[:, None] == line[None, :]
        sums[-1, :-1] = hc_eps
        sums[-1, -1] = 1
        matrices.append(sums)
    return matrices[0], matrices[1]


def fold(streams: np.ndarray, pre: np.ndarray) -> np.ndarray:
    """X [rows, n, D], pre [rows, n] -> [rows, D]."""
    return np.matmul(pre[:, None, :], streams)[:, 0]


def unfold(out: np.ndarray, streams: np.ndarray, post: np.ndarray, comb: np.ndarray) -> np.ndarray:
    """Sublayer output [rows, D], X [rows, n, D], post [rows, n], comb [rows, n, n] -> new X [rows, n, D]."""
    mixed = np.matmul(comb.swapaxes(1, 2), streams)
    mixed += post[:, :, None] * out[:, None, :]
    return mixed
