"""The pieces in which a prompt is read, each cut to the time that running streams can wait.

A piece is a pass over rows, or the decoder's tail that ends a prompt in truncated prefill and stands at every multiple
of `resume_every` too. Both read all weights of their layers, so that no piece is short: one that does not fit into what
is left of a chunk waits for the next chunk.

With N prompt tokens the passes read rows 0 .. N - 2: the last one belongs to the decode path. Before a tail,
`prefilled` stays one behind what has been read, because the resume point is not there yet.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from dsuf.engine.pace import Pace

LEAST_ROWS = 256  # of a pass that others wait for: fewer would read all weights for little
TILE = 128  # rows that kernels take together
REHEARSED = (256, 1024, 4096)  # rows of passes that tell what others take


@dataclass(frozen=True)
class Piece:
    """Rows start .. start + rows - 1 of a prompt, or the tail before position `start` (rows: 0)."""

    start: int
    rows: int
    prefilled: int  # where the prompt stands afterwards
    left: int  # tokens of the prompt beyond that; 0: the step that gives its first token follows


class Pieces:
    """Cuts prompts into pieces; `took` tells it what they cost."""

    def __init__(self, *, most_rows: int, resume_every: int, tails: bool) -> None:
        self._most_rows, self._every, self._tails = most_rows, resume_every, tails
        self._pace = Pace()
        self._tail_s: float | None = None
        self._first_s = 0.0

    def next(self, length: int, prefilled: int, read: int, rows: int, seconds: float) -> Piece:
        """The next piece of a prompt of `length` tokens, up to `rows` further than `prefilled`; `read` are read.

        `seconds`: how long it should take at most; the shortest piece there is where that is too little.
        """
        stop = min(length, prefilled - prefilled % self._every + self._every)
        last = stop - (stop == length)  # rows to be read before the tail
        until, at = min(prefilled + rows, last), max(read, prefilled)
        if at >= until:
            return Piece(at, 0, stop, length - stop)
        end = at + self._count(at, until, seconds)
        then = end if end < last else stop - 1 if self._tails else min(stop, prefilled + rows)
        return Piece(at, end - at, then, length - then)

    def rehearsal(self, most: int) -> list[Piece]:
        """All pieces of a prompt of at most `most` tokens that tell what pieces of others will take."""
        lengths = [rows for rows in REHEARSED if rows <= self._most_rows] or [self._most_rows]
        ends = [end for end in itertools.accumulate(lengths) if end < most] or [most - 1]
        length = ends[-1] + 1
        passes = [Piece(start, end - start, end, length - end) for start, end in itertools.pairwise([0, *ends])]
        return [*passes, Piece(length - 1, 0, length, 0)]

    def seconds(self, piece: Piece) -> float:
        """What it is expected to take, the first token's step included; 0.0 as long as nothing is known."""
        took = self._pace.seconds(piece.rows or LEAST_ROWS, piece.start)
        if not piece.rows:
            took = 0.0 if not self._tails else took if self._tail_s is None else self._tail_s
        return took + (0.0 if piece.left else self._first_s)

    def worth(self, piece: Piece, seconds: float) -> bool:
        """Whether to run it in what others have left of a chunk.

        It must fit; and half of it must be for its rows, unless they are the rest of the prompt.
        """
        few = piece.left > 1 and piece.rows and self._pace.share(piece.rows, piece.start) < 0.5
        return self.seconds(piece) <= seconds and not few

    def took(self, piece: Piece, seconds: float) -> None:
        """So long it was, without the first token's step."""
        if piece.rows:
            self._pace.took(piece.rows, piece.start, seconds)
        elif self._tails:
            self._tail_s = seconds if self._tail_s is None else (self._tail_s + seconds) / 2

    def first_took(self, seconds: float) -> None:
        """So long was the step that gives a first token."""
        self._first_s = seconds if not self._first_s else (self._first_s + seconds) / 2

    def _count(self, at: int, until: int, seconds: float) -> int:
        """Rows of the next pass: what fits, or less, so that the passes to `until` are about even."""
        left = min(until - at, self._most_rows)
        if seconds == math.inf:
            return left
        fit = min(max(self._pace.rows(seconds, at) & -2, LEAST_ROWS), self._most_rows)  # even: no group is left open
        passes = -(-(until - at) // fit)
        even = -(-(until - at) // passes)
        return min(-(-even // TILE) * TILE, fit, left)
