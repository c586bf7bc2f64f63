"""Attention of one query row over its own list of latents, which are key and value at once and shared by all heads.

    s_ht = q_h . k_t / sqrt(d);  o_h = sum_t e^(s_ht - M) k_t / (sum_t e^(s_ht - M) + e^(sink_h - M)),  M = max_t s_ht

The sink is a logit without a value and is not scaled. Each row has the same number of key slots, masked where empty, so
that a row's bits do not depend on the others. Source: reference model.md 3.4.
"""

from __future__ import annotations

import numpy as np

from dsuf.ops.numerics import Numerics


def attend(q: np.ndarray, keys: np.ndarray, bias: np.ndarray, sink: np.ndarray, numerics: Numerics) -> np.ndarray:
    """q [rows, H, d], keys [rows, slots, d] finite, bias [rows, slots] of 0 or -inf, sink [H] -> [rows, H, d].

    Every row must see at least one slot. In bf16 the probabilities of the value product are rounded; their sum is not.
    """
    scores = np.matmul(q, keys.swapaxes(1, 2))
    scores *= q.shape[-1] ** -0.5
    scores += bias[:, None, :]
    largest = np.maximum.reduce(scores, axis=-1, keepdims=True)
    scores -= largest
    np.exp(scores, out=scores)
    total = np.add.reduce(scores, axis=-1, keepdims=True)
    total += np.exp(sink[:, None] - largest)
    out = np.matmul(numerics.round(scores), keys)
    out /= total
    return out
