"""Prompt passes of the GPU backend: which rows of a prompt run next, and the decoder's tail at its end.

With N prompt tokens, rows 0 .. N - 2 are run here; the last one belongs to the decode path. In truncated mode the tail
covers the last sliding_window tokens of the prompt, that one included, and stands at every multiple of `resume_every`
too. Reference: dsuf.model.reference.prefill.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.gpu.machine import LOOKAHEAD
from dsuf.engine.gpu.prefill_pass import PrefillPass
from dsuf.engine.gpu.prompt_rows import PromptRows
from dsuf.engine.options import EngineOptions
from dsuf.kernels.slots import MOST_ROWS

if TYPE_CHECKING:
    from dsuf.engine.gpu.held import Held
    from dsuf.engine.gpu.machine import Machine


LEAST_ROWS = 256  # of a pass that others wait for: fewer would read all weights for little


class Prefilling:
    """Moves `sequence.prefilled`."""

    def __init__(self, machine: Machine, options: EngineOptions) -> None:
        self._machine, self._options = machine, options
        self._rate = 0.0  # rows a second of the latest pass
        self._few = PromptRows(machine.device, machine.model, machine.steps.rows, machine.slots)
        self._rows: PromptRows | PrefillPass = self._few
        if options.prefill_chunk > MOST_ROWS:
            context = machine.max_context + LOOKAHEAD
            self._rows = PrefillPass(machine.device, machine.model, machine.slots, options.prefill_chunk, context)

    def took(self, rows: int, seconds: float) -> None:
        """A pass of so many rows was over after so long: what the next one is cut by."""
        if seconds > 0:
            self._rate = rows / seconds

    def run(self, held: Held, rows: int, seconds: float) -> int:
        """One pass of at most `rows` prompt rows, of about `seconds` if that is enough for some; how many it was."""
        sequence, every = held.sequence, self._options.resume_every
        start = sequence.prefilled
        count = min(self._options.prefill_chunk, self._rows.most_rows, rows, every - start % every)
        if seconds < math.inf:
            count = min(count, max(int(self._rate * seconds) & -2, LEAST_ROWS))  # even: no group is left open
        end = start + count
        last = end == sequence.prompt_len
        ids = np.array(sequence.request.prompt_ids[start : end - last], np.int64)
        if self._options.prefill == "exact":
            self._exact(held, start, ids)
        else:
            self._truncated(held, start, ids, tail=last or end % every == 0, end=end)
        sequence.prefilled = end
        return count

    def again(self, held: Held, position: int) -> None:
        """The tokens from `position` to the last but one emitted, which a restored sequence has seen already."""
        ids = np.array(held.sequence.ids[position : held.sequence.last_position], np.int64)
        for at in range(0, len(ids), MOST_ROWS):
            self._few.exact(held.slot, position + at, ids[at : at + MOST_ROWS], held.decoder_start)

    def _exact(self, held: Held, start: int, ids: np.ndarray) -> None:
        trace = held.sequence.trace
        if trace is not None and trace.keep_prompt_argmax:
            trace.prompt_argmax = (trace.prompt_argmax or []) + self._with_argmax(held, start, ids)
        elif len(ids):
            self._rows.exact(held.slot, start, ids, held.decoder_start)

    def _with_argmax(self, held: Held, start: int, ids: np.ndarray) -> list[int]:
        """Run the rows through the decode walk, which has logits of each."""
        found: list[int] = []
        for at in range(0, len(ids), MOST_ROWS):
            part = ids[at : at + MOST_ROWS]
            self._few.exact(held.slot, start + at, part, held.decoder_start)
            found += np.argmax(self._few.logits(len(part)), axis=-1).tolist()
        return found

    def _truncated(self, held: Held, start: int, ids: np.ndarray, *, tail: bool, end: int) -> None:
        if held.tail_from is None:
            held.tail_from = start
        if len(ids):
            self._rows.encode(held.slot, start, ids)
        if tail:
            self._tail(held, end, start + len(ids))

    def _tail(self, held: Held, end: int, encoded: int) -> None:
        """The decoder on the carried rows before `encoded` of the last window before `end`."""
        first = max(held.tail_from, end - self._machine.spec.sliding_window)
        if first > held.tail_from:
            held.decoder_start = first
        for at in range(first, encoded, self._rows.most_rows):
            self._rows.decode(held.slot, at, min(self._rows.most_rows, encoded - at), held.decoder_start)
        held.tail_from = None
