"""Compressor: `ratio` consecutive tokens become one latent, before norm and rope.

    ratio 1    c_j = kv_j
    ratio r    c_j = sum_i softmax_i(g_{rj+i}) kv_{rj+i}     i = 0..r-1, per channel, disjoint groups

Source: reference model.md 3.5.
"""

from __future__ import annotations

import numpy as np


def pool(kv: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """kv and gate [entries, ratio, d] -> pooled [entries, d]."""
    weights = np.exp(gate - gate.max(axis=1, keepdims=True))
    numerator, denominator = weights[:, 0] * kv[:, 0], weights[:, 0].copy()
    for i in range(1, kv.shape[1]):  # one after the other, so that the order never depends on the number of entries
        numerator += weights[:, i] * kv[:, i]
        denominator += weights[:, i]
    return numerator / denominator


def completed(first: int, rows: int, ratio: int) -> range:
    """Entries that exist only once tokens first .. first+rows-1 have been processed."""
    return range(first // ratio, (first + rows) // ratio)


def visible(positions: np.ndarray, ratio: int) -> np.ndarray:
    """Entries that the query at each position sees: floor((p + 1) / ratio)."""
    return (positions + 1) // ratio
