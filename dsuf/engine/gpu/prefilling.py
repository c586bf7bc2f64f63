"""Prompt passes of the GPU backend: the pieces of a prompt (engine/pieces) on the device.

The prompt's last token belongs to the decode path. In truncated mode the tail covers the last sliding_window tokens of
the prompt, that one included, and stands at every multiple of `resume_every` too. Reference:
dsuf.model.reference.prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.gpu.machine import LOOKAHEAD
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.gpu.ranks import in_turns
from dsuf.engine.options import EngineOptions
from dsuf.engine.pieces import Piece, Pieces
from dsuf.kernels.slots import MOST_ROWS

if TYPE_CHECKING:
    from dsuf.engine.gpu.held import Held
    from dsuf.engine.gpu.machine import Machine


class Prefilling:
    """Moves `sequence.prefilled`. Every piece runs on all ranks."""

    def __init__(self, machines: Sequence[Machine], options: EngineOptions) -> None:
        self._machine, self._options = machines[0], options
        self._few = [PromptRows(m.device, m.model, m.steps.rows, m.slots) for m in machines]
        self._rows: Sequence[PromptRows | PrefillPass] = self._few
        if options.prefill_chunk > MOST_ROWS:
            rows, context = options.prefill_chunk, self._machine.max_context + LOOKAHEAD
            self._rows = [PrefillPass(m.device, m.model, m.slots, rows, context) for m in machines]
        self._most_rows = self._rows[0].most_rows
        self.pieces = Pieces(
            most_rows=min(options.prefill_chunk, self._most_rows),
            resume_every=options.resume_every,
            tails=options.prefill == "truncated",
        )

    def next(self, held: Held, rows: int, seconds: float) -> Piece:
        """What comes next of at most `rows` prompt rows, cut to `seconds`."""
        sequence = held.sequence
        return self.pieces.next(sequence.prompt_len, sequence.prefilled, held.read, rows, seconds)

    def run(self, held: Held, piece: Piece) -> None:
        """Queue it."""
        sequence, end = held.sequence, piece.start + piece.rows
        if self._options.prefill == "exact":
            self._exact(held, piece.start, np.array(sequence.request.prompt_ids[piece.start : end], np.int64))
        elif piece.rows:
            if held.tail_from is None:
                held.tail_from = piece.start
            ids = np.array(sequence.request.prompt_ids[piece.start : end], np.int64)
            in_turns(rows.encode(held.slot, piece.start, ids) for rows in self._rows)
        else:
            self._tail(held, piece.prefilled, end)
        held.read, sequence.prefilled = end, piece.prefilled

    def again(self, held: Held, position: int) -> None:
        """The tokens from `position` to the last but one emitted, which a restored sequence has seen already."""
        ids = np.array(held.sequence.ids[position : held.sequence.last_position], np.int64)
        for at in range(0, len(ids), MOST_ROWS):
            part = ids[at : at + MOST_ROWS]
            in_turns(rows.exact(held.slot, position + at, part, held.decoder_start) for rows in self._few)

    def _exact(self, held: Held, start: int, ids: np.ndarray) -> None:
        trace = held.sequence.trace
        if trace is not None and trace.keep_prompt_argmax:
            trace.prompt_argmax = (trace.prompt_argmax or []) + self._with_argmax(held, start, ids)
        elif len(ids):
            in_turns(rows.exact(held.slot, start, ids, held.decoder_start) for rows in self._rows)

    def _with_argmax(self, held: Held, start: int, ids: np.ndarray) -> list[int]:
        """Run the rows through the decode walk, which has logits of each."""
        found: list[int] = []
        for at in range(0, len(ids), MOST_ROWS):
            part = ids[at : at + MOST_ROWS]
            in_turns(rows.exact(held.slot, start + at, part, held.decoder_start) for rows in self._few)
            in_turns(rows.head(len(part)) for rows in self._few)
            found += np.argmax(self._few[0].logits(len(part)), axis=-1).tolist()
        return found

    def _tail(self, held: Held, end: int, encoded: int) -> None:
        """The decoder on the carried rows before `encoded` of the last window before `end`."""
        start = encoded if held.tail_from is None else held.tail_from
        first = max(start, end - self._machine.spec.sliding_window)
        if first > start:
            held.decoder_start = first
        for at in range(first, encoded, self._most_rows):
            count = min(self._most_rows, encoded - at)
            in_turns(rows.decode(held.slot, at, count, held.decoder_start) for rows in self._rows)
        held.tail_from = None
