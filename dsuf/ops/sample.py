"""Sampling: logits -> filtered probabilities -> a token; and log probabilities for those who ask.

    p = softmax(logits / temperature), kept where among the top_k largest, then in the smallest set that reaches top_p

Among equal probabilities the lowest token wins. float64 throughout.
"""

from __future__ import annotations

import numpy as np


def filtered_probabilities(logits: np.ndarray, temperature: float, top_p: float = 1.0, top_k: int = 0) -> np.ndarray:
    """logits [V] -> float64 [V] that sums to 1; temperature 0 puts everything on the argmax; top_k 0 is off."""
    scaled = np.asarray(logits, np.float64)
    if temperature == 0:
        greedy = np.zeros(scaled.shape)
        greedy[np.argmax(scaled)] = 1
        return greedy
    p = np.exp((scaled - scaled.max()) / temperature)  # the largest is 0 first, so that no temperature overflows it
    p /= p.sum()
    if top_k or top_p < 1:
        p[~_kept(p, top_p, top_k or p.size)] = 0
        p /= p.sum()
    return p


def _kept(p: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Tokens that stay, bool [V]."""
    order = np.argsort(-p, kind="stable")[:top_k]
    before = np.cumsum(p[order])
    # A token stays while the mass before it is short of top_p of what top_k left; the first one always does.
    keep = np.concatenate([[0.0], before[:-1]]) < top_p * before[-1]
    keep[0] = True
    kept = np.zeros(p.shape, bool)
    kept[order[keep]] = True
    return kept


def pick(probabilities: np.ndarray, u: float) -> int:
    """The token at which the running sum passes u in [0, 1); never one of probability 0."""
    running = np.cumsum(probabilities)
    token = int(np.searchsorted(running, u * running[-1], side="right"))
    if token >= running.size or not probabilities[token]:
        token = int(np.flatnonzero(probabilities)[-1])
    return token


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """logits [..., V] -> log softmax, float64 [..., V]."""
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def top_logprobs(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens of logits [V] as (token, log probability), best first."""
    log_p = log_probabilities(logits)
    order = np.argsort(-log_p, kind="stable")[:count]
    return [(int(token), float(log_p[token])) for token in order]
