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
from dsuf.ops.product import TILE_ROWS, tile_product
from dsuf.ops.qdq import q8


def swiglu(gate_up: np.ndarray, limit: float) -> np.ndarray:
    """[..., 2I] = (g, u) -> silu(min(g, limit)) * clamp(u, -limit, limit), [..., I]; overwrites gate_up."""
    np.minimum(gate_up, limit, out=gate_up)
    width = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :width], gate_up[..., width:]
    hidden = np.maximum(up, -limit)
    hidden *= gate
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += 1
    hidden /= gate
    return hidden


@dataclass(frozen=True)
class Dispatch:
    """Where each (row, chosen expert) pair stands when rows are grouped by expert in tiles of 8.

    slots int [rows, k]: row of the grouped array, which has `tiles` tiles; groups: (expert, first tile, end tile) in
    ascending expert number.
    """

    slots: np.ndarray
    tiles: int
    groups: list[tuple[int, int, int]]

    @classmethod
    def of(cls, experts: np.ndarray) -> Dispatch:
        """experts int [rows, k], no expert twice in a row."""
        rows, chosen = experts.shape
        if rows == 1:  # every pair has a tile of its own
            groups = [(expert, i, i + 1) for i, expert in enumerate(experts[0].tolist())]
            return cls(np.arange(0, chosen * TILE_ROWS, TILE_ROWS)[None], chosen, groups)
        flat = experts.ravel()
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat)
        tile_counts = -(-counts // TILE_ROWS)
        ends = np.cumsum(tile_counts)
        starts = ends - tile_counts
        # A pair's slot: its expert's first slot plus its rank among that expert's pairs.
        shift = starts * TILE_ROWS - (np.cumsum(counts) - counts)
        slots = np.empty(flat.size, np.intp)
        slots[order] = np.arange(flat.size) + shift[flat[order]]
        hit = np.flatnonzero(counts)
        groups = list(zip(hit.tolist(), starts[hit].tolist(), ends[hit].tolist(), strict=True))
        return cls(slots.reshape(experts.shape), int(ends[-1]), groups)

    def product(self, pairs: np.ndarray, weight_t: Callable[[int], np.ndarray], width: int) -> np.ndarray:
        """pairs [rows, k or 1, K], each times its expert's weight_t [K, width] -> [rows, k, width]."""
        grouped = np.zeros((self.tiles * TILE_ROWS, pairs.shape[-1]), pairs.dtype)
        grouped[self.slots] = pairs
        grouped = grouped.reshape(self.tiles, TILE_ROWS, -1)
        out = np.empty((self.tiles, TILE_ROWS, width), pairs.dtype)
        for expert, first, end in self.groups:
            tile_product(grouped[first:end], weight_t(expert), out[first:end])
        return out.reshape(-1, width)[self.slots]


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
    dispatch = Dispatch.of(experts)
    inner = w2_t(dispatch.groups[0][0]).shape[0]
    gate_up = dispatch.product(x[:, None], w13_t, 2 * inner)
    hidden = swiglu(numerics.round(gate_up), limit)
    hidden *= weights[..., None]
    hidden = numerics.round(hidden)
    parts = dispatch.product(q8(hidden) if numerics.quantise else hidden, w2_t, x.shape[1])
    parts = numerics.round(parts)
    total = parts[:, 0].copy()
    for i in range(1, parts.shape[1]):
        total += parts[:, i]
    return total
