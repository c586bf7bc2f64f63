"""Verification of a drafted block: how many drafts stand, and the token that follows them.

Row i of the target (i = 0..n) is the distribution after i accepted drafts.

    greedy    accept while draft i equals argmax of row i; then emit the argmax of the first row that disagrees
    sampled   accept draft d of distribution Q with probability min(1, P(d) / Q(d)); at the first rejection draw from
              max(P - Q, 0) normalised; if all stand, draw from the last row

Source: reference model.md 7.2. Acceptance is exact: what is emitted has the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsuf.ops.sample import pick

_SMALLEST_RESIDUAL = 1e-8  # below this the residual is rounding noise and the target itself is drawn from


def accept_greedy(drafts: Sequence[int], target_argmax: Sequence[int]) -> tuple[int, int]:
    """drafts [n], target_argmax [n + 1] -> (accepted drafts, token emitted after them)."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target_argmax[accepted]:
        accepted += 1
    return accepted, int(target_argmax[accepted])


def accept_sampled(
    drafts: Sequence[int],
    draft_probabilities: np.ndarray,
    target_probabilities: np.ndarray,
    accept_uniforms: Sequence[float],
    residual_uniforms: Sequence[float],
    bonus_uniform: float,
) -> tuple[int, int]:
    """drafts [n], Q [n, V], P [n + 1, V], uniforms [n], [n] and one -> (accepted drafts, token emitted after them).

    Uniform i belongs to draft i; the bonus uniform is used when all drafts stand.
    """
    for i, draft in enumerate(drafts):
        q, p = draft_probabilities[i], target_probabilities[i]
        if accept_uniforms[i] * q[draft] < p[draft]:
            continue
        residual = np.maximum(p - q, 0)
        mass = residual.sum()
        return i, pick(residual if mass > _SMALLEST_RESIDUAL else p, residual_uniforms[i])
    return len(drafts), pick(target_probabilities[len(drafts)], bonus_uniform)


def verify_length(confidence_logits: Sequence[float], threshold: float) -> int:
    """Drafts worth verifying: the longest prefix over which the product of the confidences is at least `threshold`."""
    kept = np.cumprod(1 / (1 + np.exp(-np.asarray(confidence_logits, np.float64)))) >= threshold
    return len(kept) if kept.all() else int(np.argmin(kept))
