"""Caches of one sequence: recent rows by position, compressed entries, packed pages, and the lengths that rule them.

A forward writes its rows behind `length`; `pending` counts them. Keeping rows means raising `length`, forgetting rows
means nothing at all: what lies at or behind `length` is never read and is written again. So a rejected block leaves no
trace, and a rewind of up to REWIND_TOKENS only lowers `length`.

In quantised numerics the packed pages (dsuf/layout.py) are the truth; `Entries` mirrors them as floats for reading.
"""

from __future__ import annotations

import numpy as np

from dsuf.errors import UsageError
from dsuf.layout import BLOCKED, PageLayout, SourceLayout
from dsuf.ops.index import key_tiles
from dsuf.ops.numerics import Numerics
from dsuf.ops.qdq import q4e_decode, q4p_decode
from dsuf.spec import Spec

REWIND_TOKENS = 24  # stop strings and cancels are seen late
_SPARE = 8  # rows kept beyond what a rewind needs

Packed = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # codes, scales, key codes, key scales: uint8 [n, width]


class RecentRows:
    """Rows of the last `keep` positions and of up to `room` new ones, contiguous and in position order.

    data [lead, keep + room, ...]; slot s holds position first + s. When the end is reached, the kept rows move to the
    front; until then any run of positions is a view.
    """

    def __init__(self, lead: int, width: tuple[int, ...], keep: int, room: int, dtype: type, fill: int = 0) -> None:
        self.keep, self.room = keep, room
        self.data = np.full((lead, keep + room, *width), fill, dtype)
        self.first = -keep

    def make_room(self, length: int, rows: int) -> None:
        """Give slots to positions length .. length+rows-1, rows at most `room`; keeps those before `length`."""
        if length + rows - self.first > self.keep + self.room:
            start = length - self.keep - self.first
            self.data[:, : self.keep] = self.data[:, start : start + self.keep].copy()
            self.first = length - self.keep

    def rows(self, start: int, end: int) -> np.ndarray:
        """View [lead, end - start, ...] of positions start .. end-1."""
        return self.data[:, start - self.first : end - self.first]


class Entries:
    """Compressed entries and index keys of one kv source as floats: latents [capacity, d], keys [capacity, di]."""

    def __init__(self, spec: Spec, dtype: np.dtype) -> None:
        capacity = key_tiles(spec.index_topk) * 64
        self.latents = np.zeros((capacity, spec.head_dim), dtype)
        self.keys = np.zeros((capacity, spec.index_head_dim), dtype)

    def write(self, first: int, latents: np.ndarray, keys: np.ndarray) -> None:
        """Entries first, first+1, ...; capacity doubles as needed."""
        end = first + latents.shape[0]
        while end > self.latents.shape[0]:
            self.latents = np.concatenate([self.latents, np.zeros_like(self.latents)])
            self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
        self.latents[first:end] = latents
        self.keys[first:end] = keys


class Pages:
    """Packed pages uint8 [pages, page_bytes] of one sequence."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.data = np.zeros((1, layout.page_bytes), np.uint8)

    def write(self, source: SourceLayout, first: int, packed: Packed) -> None:
        """Store entries first, first+1, ... of a source."""
        entries = np.arange(first, first + packed[0].shape[0])
        page, row = self._places(source, entries)
        while page[-1] >= self.data.shape[0]:
            self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        for plane, values in zip(self._planes(source), packed, strict=True):
            plane[page, row] = values

    def read(self, source: SourceLayout, count: int) -> Packed:
        """Entries 0 .. count-1 of a source."""
        page, row = self._places(source, np.arange(count))
        codes, scales, key_codes, key_scales = (plane[page, row] for plane in self._planes(source))
        return codes, scales, key_codes, key_scales

    def _planes(self, source: SourceLayout) -> list[np.ndarray]:
        planes = (source.codes, source.scales, source.key_codes, source.key_scales)
        return [self.data[:, p.offset : p.end].reshape(-1, p.rows, p.width) for p in planes]

    @staticmethod
    def _places(source: SourceLayout, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        page = source.page_of(entries)
        return page, entries - source.first_entry(page)


class Caches:
    """Everything that a sequence remembers.

    length         positions that count; the next row stands there
    pending        rows behind `length` that a forward wrote and nobody kept yet
    decoder_start  first position whose decoder and drafter rows are real; earlier ones are masked
    oldest         length at which the caches were restored: the rows before its window are not there
    tail_from      truncated prefill is under way and the decoder has seen nothing from this position on; else None
    """

    def __init__(self, spec: Spec, numerics: Numerics, *, packed: bool, room: int) -> None:
        self.spec, self.numerics, self.room = spec, numerics, room
        self.length = self.pending = self.decoder_start = self.oldest = 0
        self.tail_from: int | None = None
        depth, window, dtype = (
            spec.num_hidden_layers + spec.num_nextn_predict_layers,
            spec.sliding_window,
            numerics.dtype,
        )
        spare = REWIND_TOKENS + _SPARE
        # A truncated prefill runs the decoder up to one window behind `length`, and that row looks back one more.
        self.windows = RecentRows(depth, (spec.head_dim,), 2 * window + spare, room, dtype)
        self.history = RecentRows(1, (), window + spec.engram_max_ngram_size + spare, room, np.int64, fill=BLOCKED)
        sources = [role for role in spec.layers if role.is_kv_source]
        self.entries = {role.index: Entries(spec, dtype) for role in sources}
        self.open_groups = {  # (kv, gate) of recent tokens, of which the last `length % ratio` await their group
            role.index: RecentRows(1, (2 * spec.head_dim,), role.ratio + spare, room, dtype)
            for role in sources
            if role.ratio > 1
        }
        self.pages = Pages(PageLayout.of(spec)) if packed else None
        self.pending_taps: np.ndarray | None = None  # [pending, taps * D]
        self.tail: RecentRows | None = None  # decoder inputs of the last window, while tail_from is set

    def make_room(self, rows: int) -> None:
        """Give every kind of row a slot for positions length .. length+rows-1."""
        for recent in (self.windows, self.history, *self.open_groups.values()):
            recent.make_room(self.length, rows)

    def write_entries(
        self, layer: int, first: int, latents: np.ndarray, keys: np.ndarray, packed: Packed | None
    ) -> None:
        """Store entries first, first+1, ... of a kv source, as floats and, where there are pages, packed."""
        self.entries[layer].write(first, latents, keys)
        if self.pages is not None and packed is not None:
            self.pages.write(self._source(layer), first, packed)

    def _source(self, layer: int) -> SourceLayout:
        return next(source for source in self.pages.layout.sources if source.layer == layer)

    def reload_entries(self) -> None:
        """Read the float mirrors back from the pages."""
        for source in self.pages.layout.sources if self.pages is not None else ():
            codes, scales, key_codes, key_scales = self.pages.read(source, self.length // source.ratio)
            self.entries[source.layer].write(0, q4e_decode(codes, scales), q4p_decode(key_codes, key_scales))

    def keep(self, rows: int) -> None:
        """Count the first `rows` pending rows and forget the rest."""
        self.length += rows
        self.pending, self.pending_taps = 0, None

    def rewind(self, length: int) -> None:
        """Go back to `length`, at most REWIND_TOKENS before the present one."""
        if self.tail_from is not None:
            raise UsageError("a sequence cannot be rewound inside its prefill; finish the prefill first.")
        if not max(self.oldest, self.length - REWIND_TOKENS) <= length <= self.length:
            raise UsageError(
                f"rewind from {self.length} to {length}: expected 0 to {REWIND_TOKENS} tokens back and not before "
                f"{self.oldest}, where the sequence was restored; prefill again instead."
            )
        self.length, self.pending, self.pending_taps = length, 0, None
        self.decoder_start = min(self.decoder_start, length)

    def live_state(self) -> dict[str, np.ndarray]:
        """Copies of all that later rows can depend on, by name; two equal sequences have equal states."""
        spec, end = self.spec, self.length
        first = spec.decoder_start_layer
        start, decoder_start = (max(low, end - spec.sliding_window + 1, 0) for low in (0, self.decoder_start))
        state = {
            "length": np.array(end),
            "decoder_start": np.array(self.decoder_start),
            "windows": self.windows.rows(start, end)[:first].copy(),
            "decoder_windows": self.windows.rows(min(decoder_start, end), end)[first:].copy(),
            "history": self.history.rows(end - spec.engram_max_ngram_size + 1, end).copy(),
        }
        for layer, entries in self.entries.items():
            ratio = spec.layers[layer].ratio
            count = end // ratio
            state[f"latents.{layer}"] = entries.latents[:count].copy()
            state[f"keys.{layer}"] = entries.keys[:count].copy()
            if layer in self.open_groups:
                state[f"open.{layer}"] = self.open_groups[layer].rows(end - end % ratio, end).copy()
            if self.pages is not None:
                planes = ("codes", "scales", "key_codes", "key_scales")
                packed = self.pages.read(self._source(layer), count)
                state |= {f"{plane}.{layer}": values for plane, values in zip(planes, packed, strict=True)}
        return state

    @property
    def nbytes(self) -> int:
        """Memory of all arrays."""
        recent = [self.windows, self.history, *self.open_groups.values(), *([self.tail] if self.tail else [])]
        held = [rows.data for rows in recent] + [a for e in self.entries.values() for a in (e.latents, e.keys)]
        return sum(array.nbytes for array in held) + (self.pages.data.nbytes if self.pages else 0)
