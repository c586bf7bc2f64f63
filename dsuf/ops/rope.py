"""Rope: rotates the last r_d values of a vector, adjacent pairs as complex numbers, (a + ib) e^{i p w}.

    ratio 0      w_i = rope_theta^(-2i / r_d)
    ratio >= 1   w_i = compress_rope_theta^(-2i / r_d), then YaRN: w_i / factor * t_i + w_i * (1 - t_i),
                 t_i = clamp((i - low) / (high - low), 0, 1),
                 low, high = floor, ceil of r_d ln(original / (2 pi rot)) / (2 ln theta) at rot = beta_fast, beta_slow

A layer has one table for queries, window latents, compressed latents and index vectors.
Source: reference model.md 3.1.
"""

from __future__ import annotations

import math

import numpy as np

from dsuf.spec import Spec


def frequencies(spec: Spec, compressed: bool) -> np.ndarray:
    """w float64 [r_d / 2]; `compressed` chooses the table of layers with a ratio."""
    width = spec.qk_rope_head_dim
    theta = spec.compress_rope_theta if compressed else spec.rope_theta
    w = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if not compressed:
        return w
    scaling = spec.rope_scaling

    def dimension(rotations: float) -> float:
        full_turn = 2 * math.pi * rotations
        return width * math.log(scaling.original_max_position_embeddings / full_turn) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return w / scaling.factor * ramp + w * (1 - ramp)


def phases(positions: np.ndarray, w: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """e^{i p w}: positions int [rows], w [r_d / 2] -> complex [rows, r_d / 2] of the precision of `dtype`."""
    return np.exp(1j * np.multiply.outer(positions.astype(np.float64), w)).astype(np.result_type(dtype, np.complex64))


def rotate(x: np.ndarray, phase: np.ndarray) -> None:
    """In place: x [rows, ..., K] with a contiguous last axis, phase complex [rows, r_d / 2].

    The inverse rotation takes the conjugated phase.
    """
    pairs = x[..., x.shape[-1] - 2 * phase.shape[-1] :].view(phase.dtype)
    pairs *= phase.reshape(phase.shape[0], *(1,) * (x.ndim - 2), phase.shape[1])


class PhaseTable:
    """Phases of positions 0, 1, 2, ..., computed once and grown by doubling."""

    def __init__(self, w: np.ndarray, dtype: np.dtype) -> None:
        self._w, self._dtype = w, dtype
        self._phases = phases(np.arange(256), w, dtype)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Positions int [rows] -> complex [rows, r_d / 2]."""
        size = self._phases.shape[0]
        highest = int(positions.max()) if positions.size else 0
        if highest >= size:
            size = max(2 * size, highest + 1)
            self._phases = phases(np.arange(size), self._w, self._dtype)
        return self._phases[positions]
