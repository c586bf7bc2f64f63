"""RMS norm: rms(x; w) = w * x / sqrt(mean(x^2) + eps), eps really 1e-20 in this model.

Source: reference model.md 2.1.
"""

from __future__ import annotations

import numpy as np


def root_mean_square(x: np.ndarray, eps: float) -> np.ndarray:
    """x [..., K] -> sqrt(mean(x^2) + eps) [..., 1]."""
    mean = np.vecdot(x, x)[..., None]
    mean /= x.shape[-1]
    mean += eps
    return np.sqrt(mean, out=mean)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., K], weight [K] -> [..., K] in x's dtype."""
    out = x / root_mean_square(x, eps)
    out *= weight
    return out
