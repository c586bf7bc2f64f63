"""Rows of one forward: several consecutive tokens of each of several sequences, with all that their positions imply.

Rows stand one sequence after the other. Products run over all rows at once; what touches a cache runs a sequence at a
time over its span of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsuf.errors import PromptError
from dsuf.model.reference.caches import Caches
from dsuf.ops.rope import PhaseTable
from dsuf.spec import Spec


@dataclass(frozen=True)
class Phases:
    """e^{i p w} of each row's position [rows, r_d / 2] and its conjugate, which turns back."""

    forward: np.ndarray
    inverse: np.ndarray

    @classmethod
    def of(cls, table: PhaseTable, positions: np.ndarray) -> Phases:
        """Look up int positions [rows]."""
        forward = table.at(positions)
        return cls(forward, forward.conj())


@dataclass(frozen=True)
class Span:
    """The rows of one sequence: caches, slice of the batch, first position."""

    caches: Caches
    rows: slice
    start: int

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.stop - self.rows.start

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.count


@dataclass(frozen=True)
class Batch:
    """positions int [rows]; `plain` phases for layers without ratio, `compressed` for the others; `window_bias` and
    `decoder_window_bias` [rows, W] are 0 where a window slot holds a real row, -inf elsewhere.
    """

    spans: tuple[Span, ...]
    positions: np.ndarray
    plain: Phases
    compressed: Phases
    compressed_table: PhaseTable
    window_bias: np.ndarray
    decoder_window_bias: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[tuple[Caches, int, int]], tables: tuple[PhaseTable, PhaseTable], spec: Spec) -> Batch:
        """runs are (caches, first position, rows) in row order; tables the ropes without and with ratio."""
        spans, at = [], 0
        for caches, start, rows in runs:
            spans.append(Span(caches, slice(at, at + rows), start))
            at += rows
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        slots = positions[:, None] + np.arange(1 - spec.sliding_window, 1)  # oldest first
        dtype = spans[0].caches.numerics.dtype
        starts = np.concatenate([np.full(span.count, span.caches.decoder_start) for span in spans])
        return cls(
            spans=tuple(spans),
            positions=positions,
            plain=Phases.of(tables[0], positions),
            compressed=Phases.of(tables[1], positions),
            compressed_table=tables[1],
            window_bias=bias_of(slots >= 0, dtype),
            decoder_window_bias=bias_of(slots >= starts[:, None], dtype),
        )

    @property
    def rows(self) -> int:
        """Rows of all sequences together."""
        return self.positions.shape[0]


def bias_of(real: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """0 where `real`, -inf elsewhere."""
    return np.where(real, np.zeros((), dtype), np.full((), -np.inf, dtype))


def checked_ids(ids: Sequence[int], spec: Spec) -> np.ndarray:
    """Token ids as int64 [rows]. Raises PromptError for one that the vocabulary does not have."""
    array = np.asarray(ids, np.int64).reshape(-1)
    if array.size and not 0 <= array.min() <= array.max() < spec.vocab_size:
        wrong = next(int(i) for i in array if not 0 <= i < spec.vocab_size)
        raise PromptError(
            f"token id {wrong} found, expected 0 to {spec.vocab_size - 1}; use this checkpoint's tokenizer."
        )
    return array
