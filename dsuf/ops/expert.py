"""Mixture of experts: each row's chosen experts, summed in ascending expert number, the shared expert last.

    g = w1 x, u = w3 x;  u = clamp(u, -limit, limit), g = min(g, limit)
    y = w2 q8(silu(g) u w_e)          the routing weight enters before w2 and so before its quantisation

The shared expert is the one after the routed ones, with weight 1. Source: reference model.md 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dsuf.ops.numerics import Numerics
from dsuf.ops.product import TILE_ROWS
from dsuf.ops.qdq import q8


def swiglu(gate_up: np.ndarray, limit: float) -> np.ndarray:
    """[..., 2I] = (g, u) -> silu(min(g, limit)) * clamp(u, -limit, limit), [..., I]."""
    width = gate_up.shape[-1] // 2
    gate = np.minimum(gate_up[..., :width], limit)
    up = np.minimum(gate_up[..., width:], limit)
    np.maximum(up, -limit, out=up)
    up *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    up /= gate
    return up


@dataclass(frozen=True)
class Dispatch:
    """Where each (row, chosen expert) pair stands when rows are grouped by expert in tiles of 8.

    slots int [rows, k]: row of the grouped array; tiles: (expert, first slot, end slot) in ascending expert number.
    """

    slots: np.ndarray
    tiles: list[tuple[int, int, int]]

    @classmethod
    def of(cls, experts: np.ndarray) -> Dispatch:
        """experts int [rows, k]."""
        flat = experts.ravel()
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat)
        ends = np.cumsum(-(-counts // TILE_ROWS) * TILE_ROWS)
        hit = np.flatnonzero(counts)
        tiles = [(int(e), int(ends[e - 1]) if e else 0, int(ends[e])) for e in hit]
        # A pair's slot: its expert's first slot plus its rank among that expert's pairs.
        shift = np.concatenate([[0], ends[:-1]]) - (np.cumsum(counts) - counts)
        slots = np.empty(flat.size, np.intp)
        slots[order] = np.arange(flat.size) + shift[flat[order]]
        return cls(slots.reshape(experts.shape), tiles)

    def product(self, grouped: np.ndarray, weight_t: Callable[[int], np.ndarray], width: int) -> np.ndarray:
        """grouped [slots, K] times each tile's weight_t(expert) [K, width] -> [slots, width]."""
        out = np.empty((grouped.shape[0], width), grouped.dtype)
        for expert, first, end in self.tiles:
            shape = (-1, TILE_ROWS)
            into = out[first:end].reshape(*shape, width)
            np.matmul(grouped[first:end].reshape(*shape, grouped.shape[1]), weight_t(expert), out=into)
        return out


def experts_sum(
    x: np.ndarray,
    experts: np.ndarray,
    weights: np.ndarray,
    w13_t: Callable[[int], np.ndarray],
    w2_t: Callable[[int], np.ndarray],
    limit: float,
    numerics: Numerics,
) -> np.ndarray:
    """x [rows, D] (already quantised), experts int [rows, k] ascending, weights [rows, k] -> [rows, D].

    w13_t(e) [D, 2I] holds w1 then w3, w2_t(e) [I, D].
    """
    width = x.shape[1]
    dispatch = Dispatch.of(experts)
    slots = dispatch.slots
    grouped = np.zeros((dispatch.tiles[-1][2], width), x.dtype)
    grouped[slots] = x[:, None]
    inner = w2_t(dispatch.tiles[0][0]).shape[0]
    gate_up = dispatch.product(grouped, w13_t, 2 * inner)[slots]
    hidden = swiglu(numerics.round(gate_up), limit)
    hidden *= weights[..., None]
    hidden = numerics.round(hidden)
    grouped = np.zeros((grouped.shape[0], inner), x.dtype)
    grouped[slots] = q8(hidden) if numerics.quantise else hidden
    parts = numerics.round(dispatch.product(grouped, w2_t, width)[slots])
    total = parts[:, 0].copy()
    for i in range(1, parts.shape[1]):
        total += parts[:, i]
    return total
