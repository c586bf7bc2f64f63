"""Prompts through the decode walk, up to 48 rows at a time: the slow twin of prefill_pass, and the rows run again after
a restore.

exact      every layer on every row
truncated  layers before the candidate source on every row, and that layer's compressed entries; the decoder only on the
           last sliding_window rows. What enters the decoder is carried in a ring of that many rows a slot.

Rows write windows, pages, open pairs, history and drafter windows as decode rows do. Nothing is emitted: the prompt's
last token is the first row of the decode path. `exact`, `encode` and `decode` are walks for ranks.in_turns.
Reference: dsuf.model.reference.prefill; reference model.md 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.gpu import draft_walk, step_walk
from dsuf.engine.gpu.buffers import KIND, Rows, prompt_rows
from dsuf.engine.gpu.launches import Launches
from dsuf.engine.gpu.ranks import Launch, Turn
from dsuf.engine.gpu.step_walk import Model, Residual
from dsuf.kernels import mixes
from dsuf.kernels.slots import MOST_ROWS, TABLE_BYTES
from dsuf.kernels.stream import scale_stride

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

TABLES = 4  # row tables on their way to the device


class PromptRows:
    """Runs rows of one sequence; everything is queued on the current stream, nothing waits but for its own tables."""

    most_rows = MOST_ROWS

    def __init__(self, device: Device, model: Model, rows: Rows, slots: int) -> None:
        self.device, self.rows = device, rows
        self.model = replace(model, expert_counter=0, draft_expert_counter=0)  # counted are decode steps alone
        spec, w = model.spec, model.work
        d = spec.hidden_size
        self._carried = {  # parts of a decoder input row: (address in the workspace, bytes of a row)
            "streams": (w.streams[0], 2 * mixes.STREAMS * d),
            "sums": (w.sums[0], 4 * mixes.SUMS),
            "x": (w.x, 2 * d),
            "codes": (w.x_codes, d),
            "scales": (w.x_scales, scale_stride(d)),
        }
        self._rings = {
            name: device.allocate(slots * spec.sliding_window * size, KIND) for name, (_, size) in self._carried.items()
        }
        self._tables = device.pinned(TABLES * TABLE_BYTES).view(np.int32).reshape(TABLES, -1, MOST_ROWS)
        self._events: list[object] = [None] * TABLES
        self._turn = 0

    def exact(self, slot: int, start: int, ids: np.ndarray, decoder_start: int) -> Iterator[Turn]:
        """All layers on up to 48 rows; afterwards work.x is the head's input of each."""
        m, turn = self.model, self._turn_of()
        k = self._rows_of(slot, start, ids, decoder_start, turn.launch)
        residual = step_walk.enter(k, m)
        for layer in range(m.spec.num_hidden_layers):
            step_walk.layer_walk(k, m, residual, layer)
            yield turn
        draft_walk.windows(k, m)
        yield turn

    def encode(self, slot: int, start: int, ids: np.ndarray) -> Iterator[Turn]:
        """Encoder layers, the candidate source's entries, and the decoder's input into the ring."""
        m, turn = self.model, self._turn_of()
        k = self._rows_of(slot, start, ids, 0, turn.launch)
        first = m.spec.decoder_start_layer
        residual = step_walk.enter(k, m)
        for layer in range(first):
            step_walk.layer_walk(k, m, residual, layer)
            yield turn
        step_walk.compress_rows(k, m, m.spec.layers[first])
        yield turn
        self._carry(slot, start, len(ids), residual)

    def decode(self, slot: int, start: int, count: int, decoder_start: int) -> Iterator[Turn]:
        """Decoder layers on `count` carried rows, at most 48."""
        m, turn = self.model, self._turn_of()
        k = self._rows_of(slot, start, np.zeros(count, np.int64), decoder_start, turn.launch)
        first = m.spec.decoder_start_layer
        self._fetch(slot, start, count)
        residual = Residual.at(k, m.work, m.weights.layers[first])
        for layer in range(first, m.spec.num_hidden_layers):
            step_walk.layer_walk(k, m, residual, layer, compress=layer != first)
            yield turn
        draft_walk.windows(k, m)
        yield turn

    def head(self, count: int) -> Iterator[Turn]:
        """The head over the rows that `exact` ran last."""
        turn = self._turn_of()
        k = Launches(turn.launch, self.model.spec, self.rows, count, self.model.rank)
        step_walk.head(k, self.model, self.model.work.logits)
        yield turn

    def logits(self, count: int) -> np.ndarray:
        """float32 [count, V] that `head` gave; waits for them."""
        m = self.model
        raw = self.device.download(m.work.logits, 4 * count * m.spec.vocab_size)
        return raw.view(np.float32).reshape(count, -1)

    def _turn_of(self) -> Turn:
        return Turn(self.device, self.model.rank)

    def _rows_of(
        self, slot: int, start: int, ids: np.ndarray, decoder_start: int, launch: Launch | None = None
    ) -> Launches:
        """Send the row table."""
        place, self._turn = self._turn, (self._turn + 1) % TABLES
        if self._events[place] is not None:
            self._events[place].wait()
        table = self._tables[place]
        table[:] = prompt_rows(slot, start, ids, decoder_start, self.model.spec.sliding_window)
        self.device.copy_async(self.rows.table, table.ctypes.data, TABLE_BYTES)
        self._events[place] = self.device.record()
        return Launches(launch or self.device.launch, self.model.spec, self.rows, len(ids), self.model.rank)

    def _carry(self, slot: int, start: int, count: int, residual: Residual) -> None:
        window = self.model.spec.sliding_window
        kept = min(count, window)
        for name, (_, size) in self._carried.items():
            source = {"streams": residual.streams, "sums": residual.sums}.get(name, self._carried[name][0])
            for row, at, rows in _pieces(start + count - kept, kept, window):
                target = self._rings[name] + (slot * window + at) * size
                self.device.copy_async(target, source + (count - kept + row) * size, rows * size)

    def _fetch(self, slot: int, start: int, count: int) -> None:
        window = self.model.spec.sliding_window
        for name, (target, size) in self._carried.items():
            for row, at, rows in _pieces(start, count, window):
                source = self._rings[name] + (slot * window + at) * size
                self.device.copy_async(target + row * size, source, rows * size)


def _pieces(start: int, count: int, ring: int) -> list[tuple[int, int, int]]:
    """(row, place in the ring, rows) of at most two runs that hold positions start .. start + count - 1."""
    first = start % ring
    head = min(count, ring - first)
    return [(0, first, head)] + ([(head, 0, count - head)] if count > head else [])
