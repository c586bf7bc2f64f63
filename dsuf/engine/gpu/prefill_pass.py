"""Prefill of one sequence in chunks of up to thousands of rows.

exact      every layer on every row
truncated  layers before the candidate source on every row, and that layer's compressed entries (`encode`); the decoder
           only on the last sliding_window rows (`decode`), from what `encode` carried of them

Twin of prompt_rows.py, which runs the same rows 48 at a time through the decode walk. A row's result does not depend on
the chunk in which it comes: any lengths leave the same pages, windows, history and carried rows, bit for bit.
`exact`, `encode` and `decode` are walks for ranks.in_turns; everything is queued on the current stream.
Reference: dsuf.model.reference.prefill; reference model.md 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.engine.gpu.prefill_buffers import ChunkBuffers, ChunkRows, carried_bytes, row_table, sizes_of
from dsuf.engine.gpu.prefill_walk import Chunk
from dsuf.engine.gpu.ranks import Launch, Turn
from dsuf.engine.gpu.step_walk import Model

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

TABLES = 4  # row tables on their way to the device


class PrefillPass:
    """See the module. `most_rows` is the longest chunk."""

    def __init__(self, device: Device, model: Model, slots: int, rows: int, context: int) -> None:
        spec = model.spec
        self.device, self.model, self.most_rows = device, model, max(rows, spec.sliding_window)
        self.buffers = ChunkBuffers.allocate(device, spec, self.most_rows, slots, context)
        self.rows = ChunkRows.at(self.buffers.table, self.most_rows)
        self.scores_bytes = sizes_of(spec, self.most_rows, slots, context)["scores"]
        nbytes = 4 * len(ChunkRows.__dataclass_fields__) * self.most_rows
        self._tables = device.pinned(TABLES * nbytes).view(np.int32).reshape(TABLES, -1, self.most_rows)
        self._events: list[Any] = [None] * TABLES
        self._turn = 0

    def exact(self, slot: int, start: int, ids: np.ndarray, decoder_start: int) -> Iterator[Turn]:
        """All layers on up to `most_rows` rows."""
        turn = Turn(self.device, self.model.rank)
        chunk = self._chunk(slot, start, ids, decoder_start, turn.launch)
        chunk.enter()
        for layer in range(self.model.spec.num_hidden_layers):
            chunk.layer(layer)
            yield turn
        chunk.drafter_windows()
        yield turn

    def encode(self, slot: int, start: int, ids: np.ndarray) -> Iterator[Turn]:
        """Encoder layers, the candidate source's entries, and the decoder's input of the last rows, carried."""
        turn, first = Turn(self.device, self.model.rank), self.model.spec.decoder_start_layer
        chunk = self._chunk(slot, start, ids, 0, turn.launch)
        chunk.enter()
        for layer in range(first):
            chunk.layer(layer, mix_next=layer + 1 < first)
            yield turn
        chunk.compress(self.model.spec.layers[first])
        yield turn
        self._carry(slot, start, len(ids), store=True)

    def decode(self, slot: int, start: int, count: int, decoder_start: int) -> Iterator[Turn]:
        """Decoder layers on carried rows."""
        turn, spec = Turn(self.device, self.model.rank), self.model.spec
        chunk = self._chunk(slot, start, np.zeros(count, np.int64), decoder_start, turn.launch)
        self._carry(slot, start, count, store=False)
        chunk.again(spec.decoder_start_layer)
        for layer in range(spec.decoder_start_layer, spec.num_hidden_layers):
            chunk.layer(layer, compress=layer != spec.decoder_start_layer)
            yield turn
        chunk.drafter_windows()
        yield turn

    def _chunk(self, slot: int, start: int, ids: np.ndarray, decoder_start: int, launch: Launch | None = None) -> Chunk:
        """Send the row table."""
        place, self._turn = self._turn, (self._turn + 1) % TABLES
        if self._events[place] is not None:
            self._events[place].wait()
        table, window = self._tables[place], self.model.spec.sliding_window
        table[:] = row_table(slot, start, ids, decoder_start, window, self.most_rows)
        self.device.copy_async(self.buffers.table, table.ctypes.data, table.nbytes)
        self._events[place] = self.device.record()
        return Chunk(
            launch or self.device.launch, self.model, self.buffers, self.rows, (self.most_rows, self.scores_bytes),
            slot, start, len(ids), decoder_start,
        )  # fmt: skip

    def _carry(self, slot: int, start: int, count: int, *, store: bool) -> None:
        """Copy the last window of rows to the slot's carried rows, or `count` of them back."""
        window, b = self.model.spec.sliding_window, self.buffers
        kept = min(count, window)
        rings = (b.carried_streams, b.carried_coefficients)
        for ring, rows, size in zip(rings, (b.streams, b.coefficients), carried_bytes(self.model.spec), strict=True):
            for row, at, many in pieces(start + count - kept, kept, window):
                there, here = ring + (slot * window + at) * size, rows + (count - kept + row) * size
                self.device.copy_async(*((there, here) if store else (here, there)), many * size)


def pieces(start: int, count: int, ring: int) -> list[tuple[int, int, int]]:
    """(row, place in the ring, rows) of at most two runs that hold positions start .. start + count - 1."""
    first = start % ring
    head = min(count, ring - first)
    return [(0, first, head)] + ([(head, 0, count - head)] if count > head else [])
