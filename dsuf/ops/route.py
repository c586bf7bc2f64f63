"""Router: z = gate x, s = sqrt(softplus(z)); the k experts with the largest s + bias, weighted by s.

    w_e = routed_scaling_factor * s_e / (sum over the chosen s + 1e-20)

The bias only chooses. Source: reference model.md 5.
"""

from __future__ import annotations

import numpy as np

_FLOOR = 1e-20


def route(z: np.ndarray, bias: np.ndarray, count: int, scaling: float) -> tuple[np.ndarray, np.ndarray]:
    """z [rows, E], bias [E] -> experts int [rows, count] ascending, weights [rows, count].

    Among equals the lowest number is chosen.
    """
    scores = np.sqrt(np.logaddexp(0, z))
    experts = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :count]
    experts.sort(axis=-1)
    weights = scores[np.arange(z.shape[0])[:, None], experts]
    total = weights[:, 0].copy()
    for i in range(1, count):  # in expert order, whatever the number of rows
        total += weights[:, i]
    total += _FLOOR
    weights *= scaling / total[:, None]
    return experts, weights
