"""The four numerics: which dtype carries values, whether activations and caches are quantised, where bf16 rounds.

    exact32  float32 everywhere, nothing quantised
    qdq32    float32, activations and caches pass through their quantisation points
    qdq64    the same in float64 between the points; sums of exact operands are exact: the binding one
    bf16     qdq32 plus the official code's roundings to bf16

Source: reference model.md 3.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsuf import formats


@dataclass(frozen=True)
class Numerics:
    """One numerics; ops take it where their result depends on more than the dtype of their arguments."""

    name: str
    dtype: np.dtype
    quantise: bool
    bf16: bool

    def round(self, x: np.ndarray) -> np.ndarray:
        """x as the official code would store it: on the bf16 grid in `bf16`, unchanged otherwise."""
        return formats.round_bf16(x) if self.bf16 else x


NUMERICS = {
    "exact32": Numerics("exact32", np.dtype(np.float32), quantise=False, bf16=False),
    "qdq32": Numerics("qdq32", np.dtype(np.float32), quantise=True, bf16=False),
    "qdq64": Numerics("qdq64", np.dtype(np.float64), quantise=True, bf16=False),
    "bf16": Numerics("bf16", np.dtype(np.float32), quantise=True, bf16=True),
}
