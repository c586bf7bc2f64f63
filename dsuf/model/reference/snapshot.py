"""The caches of one sequence as pages and a snapshot (dsuf/layout.py), and back.

`save` writes what the first `position` tokens left behind: a cache page for each 128 of them and one snapshot. `load`
makes caches of that length from these bytes. Running the tokens after `position` again then gives, bit for bit, the
caches of the sequence that stayed: codes and power-of-two scales hold the cached values without loss.

Bytes that no reader looks at are zero: entries at or after `position`, rows before position 0 and, in decoder layers
and drafter stages, rows before decoder_start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dsuf.errors import NotSupported, UsageError
from dsuf.layout import PageLayout, SnapshotLayout, SourceLayout, pages_for, resume_step
from dsuf.model.reference.caches import REWIND_TOKENS, Caches
from dsuf.ops.numerics import Numerics
from dsuf.ops.qdq import q8_decode, q8_encode
from dsuf.spec import Spec

Buffer: TypeAlias = memoryview | bytearray | np.ndarray


@dataclass(frozen=True)
class Sizes:
    """Bytes of a page and of a snapshot, and the step of the positions at which they can be taken; 0 bytes: never."""

    page_bytes: int
    snapshot_bytes: int
    step: int

    @classmethod
    def of(cls, spec: Spec, numerics: Numerics) -> Sizes:
        """Sizes in quantised numerics; without packed pages there is nothing to save."""
        if not numerics.quantise:
            return cls(0, 0, 1)
        return cls(PageLayout.of(spec).page_bytes, SnapshotLayout.of(spec).snapshot_bytes, resume_step(spec))


def save(caches: Caches, position: int, pages: Mapping[int, Buffer], state: Sequence[Buffer]) -> None:
    """Write the wanted pages, by number, and the snapshot, whose bytes fill the parts of `state` in order.

    `position` is a multiple of `resume_step`, at most 24 behind the length and not before where the caches came from.
    """
    _check_position(caches, position)
    for number, buffer in pages.items():
        if not 0 <= number < pages_for(position):
            raise UsageError(f"page {number} wanted, expected 0 to {pages_for(position) - 1} at position {position}.")
        page = _bytes_of(buffer)
        page[: caches.pages.layout.page_bytes] = caches.pages.data[number]
        for source in caches.pages.layout.sources:
            blank(page, source, position // source.ratio - source.first_entry(number))
    _scatter(_snapshot_of(caches, position), state)


def load(caches: Caches, position: int, pages: Sequence[Buffer], state: Sequence[Buffer]) -> None:
    """Fill fresh caches with all pages of `position` tokens and their snapshot."""
    if caches.pages is None:
        raise _no_pages()
    if caches.length or caches.tail_from is not None:
        raise UsageError(f"restore over {caches.length} positions, expected a sequence without any.")
    if len(pages) != pages_for(position) or position < 1:
        raise UsageError(f"{len(pages)} pages for {position} tokens, expected {pages_for(position)}.")
    page_bytes = caches.pages.layout.page_bytes
    caches.pages.data = np.stack([_bytes_of(page)[:page_bytes] for page in pages])
    caches.length = caches.oldest = position
    caches.reload_entries()
    for recent in (caches.windows, caches.history, *caches.open_groups.values()):
        recent.first = position - recent.keep
    _read_snapshot(caches, np.concatenate([_bytes_of(part) for part in state]))


def _check_position(caches: Caches, position: int) -> None:
    step = resume_step(caches.spec)
    if caches.pages is None:
        raise _no_pages()
    if caches.tail_from is not None:
        raise UsageError("a sequence cannot be saved inside a truncated prefill; finish the prefill first.")
    first = max(1, caches.oldest, caches.length - REWIND_TOKENS)
    if position % step or not first <= position <= caches.length:
        raise UsageError(f"save at {position}, expected a multiple of {step} from {first} to {caches.length}.")


def _no_pages() -> NotSupported:
    return NotSupported("these caches have no packed pages (exact32): they can be neither saved nor restored.")


def blank(page: np.ndarray, source: SourceLayout, first: int) -> None:
    """Zero the page's entries from row `first` on."""
    for plane in (source.codes, source.scales, source.key_codes, source.key_scales):
        page[plane.offset + min(first, plane.rows) * plane.width : plane.end] = 0


def _snapshot_of(caches: Caches, position: int) -> np.ndarray:
    """uint8 [snapshot_bytes]."""
    spec, layout = caches.spec, SnapshotLayout.of(caches.spec)
    data = np.zeros(layout.snapshot_bytes, np.uint8)
    windows, history, decoder_start = _planes(data, layout)
    decoder_start[0] = min(caches.decoder_start, position)
    for layers, start in _live_rows(caches, position, int(decoder_start[0])):
        codes, scales = q8_encode(caches.windows.rows(start, position)[layers])
        rows = windows[layers, spec.sliding_window - (position - start) :]
        rows[..., : layout.code_bytes], rows[..., layout.code_bytes :] = codes, scales
    history[:] = caches.history.rows(position - layout.history_ids, position)[0]
    return data


def _read_snapshot(caches: Caches, data: np.ndarray) -> None:
    spec, layout, position = caches.spec, SnapshotLayout.of(caches.spec), caches.length
    if data.size < layout.snapshot_bytes:
        raise UsageError(f"a snapshot of {data.size} bytes, expected {layout.snapshot_bytes}.")
    windows, history, decoder_start = _planes(data[: layout.snapshot_bytes], layout)
    caches.decoder_start = int(decoder_start[0])
    if not 0 <= caches.decoder_start <= position:
        raise UsageError(f"decoder_start {caches.decoder_start} in a snapshot at {position}: the bytes are damaged.")
    for layers, start in _live_rows(caches, position, caches.decoder_start):
        rows = windows[layers, spec.sliding_window - (position - start) :]
        decoded = q8_decode(rows[..., : layout.code_bytes], rows[..., layout.code_bytes :])
        caches.windows.rows(start, position)[layers] = decoded
    caches.history.rows(position - layout.history_ids, position)[0] = history


def _live_rows(caches: Caches, position: int, decoder_start: int) -> Iterator[tuple[slice, int]]:
    """(layers, first position) of the window rows that a later token can see: encoder layers, then all others."""
    spec = caches.spec
    oldest = max(0, position - spec.sliding_window)
    yield slice(0, spec.decoder_start_layer), oldest
    if decoder_start < position:
        yield slice(spec.decoder_start_layer, None), max(oldest, decoder_start)


def _planes(data: np.ndarray, layout: SnapshotLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Views of a snapshot's bytes: windows uint8 [layers, rows, row bytes], history int32, decoder_start int64 [1]."""
    windows = data[: layout.windows_bytes].reshape(layout.window_layers, layout.window_rows, layout.row_bytes)
    history = data[layout.history_offset : layout.history_offset + 4 * layout.history_ids].view("<i4")
    return windows, history, data[layout.decoder_start_offset : layout.snapshot_bytes].view("<i8")


def _bytes_of(buffer: Buffer) -> np.ndarray:
    """A flat uint8 view."""
    return np.frombuffer(buffer, np.uint8)


def _scatter(data: np.ndarray, parts: Sequence[Buffer]) -> None:
    """Fill the parts with `data`, one after the other."""
    at = 0
    for part in map(_bytes_of, parts):
        count = min(part.size, data.size - at)
        part[:count] = data[at : at + count]
        at += count
    if at < data.size:
        raise UsageError(f"room for {at} bytes of a snapshot, expected {data.size}.")
