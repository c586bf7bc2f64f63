"""Cache memory of all sequences on one device: page pool, page tables, window rings, open pairs, Engram history.

    pages = Pages(device, spec, slots=8, count=4096, most_pages=8192)
    slot = pages.open()
    pages.reserve(slot, tokens)          pages for the tokens 0 .. tokens - 1
    pages.release(slot)                  given back when the queued work has ended

    pool      uint8 [count, page_bytes]                          layout.PageLayout
    table     uint32 [slots, most_pages]                         page of each 128 tokens
    windows   uint8 [slots, layers + stages, ring, row pitch]    position mod ring; latents.window_row_bytes
    pairs     float32 [slots, PAIR_RING, 2 head_dim]             of each ratio-2 source
    history   int32 [slots, HISTORY]                             class ids by position

A ring has RING_EXTRA slots more than the window: a sequence can go back 24 tokens while two queued steps have written
12 rows past its end, so that more than 35 are needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.gpu.launches import Pool
from dsuf.engine.gpu.step_walk import Caches
from dsuf.errors import DeviceError
from dsuf.kernels.compress import PAIR_RING
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.latents import window_row_bytes
from dsuf.layout import PageLayout, SourceLayout, pages_for
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event
    from dsuf.engine.gpu.ranks import Marks

RING_EXTRA = 64
MANY = 8  # pages that are taken at once for a prompt or a restore, not for the next tokens


@dataclass(frozen=True)
class Sizes:
    """Bytes of what sequences need, from a spec alone."""

    page: int
    window_pitch: int  # windows of one slot, backbone and drafter
    drafter_windows: int  # part of it
    pairs: int  # of one slot, all sources
    history: int

    @classmethod
    def of(cls, spec: Spec) -> Sizes:
        """Of one page, and of one slot."""
        ring = (spec.sliding_window + RING_EXTRA) * window_row_bytes(spec.head_dim)
        stages = spec.num_nextn_predict_layers
        sources = sum(source.ratio > 1 for source in PageLayout.of(spec).sources)
        pairs = sources * PAIR_RING * 8 * spec.head_dim
        layers = spec.num_hidden_layers + stages
        return cls(PageLayout.of(spec).page_bytes, layers * ring, stages * ring, pairs, 4 * HISTORY)

    @property
    def slot(self) -> int:
        """Bytes of one slot beside its pages and its row of the page table."""
        return self.window_pitch + self.pairs + self.history


class _Free:
    """Free pages, ascending: many are taken from the front, where they lie side by side and are copied as one, a few
    from the back.
    """

    def __init__(self, count: int) -> None:
        self._pages, self._sorted = list(range(count)), True

    def __len__(self) -> int:
        return len(self._pages)

    def take(self, count: int) -> list[int]:
        if not self._sorted:
            self._pages.sort()
            self._sorted = True
        if count < MANY:
            taken = self._pages[-count:]
            del self._pages[-count:]
        else:
            taken = self._pages[:count]
            del self._pages[:count]
        return taken

    def give(self, pages: list[int]) -> None:
        self._pages += pages
        self._sorted = False


@dataclass
class _Leaving:
    """Memory that queued work may still touch."""

    slot: int
    pages: list[int]
    event: Event | Marks
    copies: int  # number of the last copy that reads it


@dataclass
class Pages:
    """See the module. `copied` is the number of the last copy that has ended (copies.py)."""

    device: Device
    spec: Spec
    slots: int
    count: int
    most_pages: int
    copied: int = 0
    copies: int = 0  # queued so far
    _held: dict[int, list[int]] = field(default_factory=dict)
    _leaving: deque[_Leaving] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Take the memory. Raises DeviceError when it does not fit."""
        spec, device = self.spec, self.device
        self.layout, self.sizes = PageLayout.of(spec), Sizes.of(spec)
        self.ring = spec.sliding_window + RING_EXTRA
        self.row_bytes, self.window_pitch = window_row_bytes(spec.head_dim), self.sizes.window_pitch
        self.page_bytes = self.layout.page_bytes
        self.pool = device.allocate(self.count * self.page_bytes, "pages")
        device.zero(self.pool, self.count * self.page_bytes)  # padding inside a page is part of a saved page
        self.table = device.allocate(4 * self.slots * self.most_pages, "page tables")
        device.zero(self.table, 4 * self.slots * self.most_pages)
        self.windows = device.allocate(self.slots * self.window_pitch, "windows")
        self.history = device.allocate(self.slots * 4 * HISTORY, "history")
        self.pairs = {
            source.layer: device.allocate(self.slots * PAIR_RING * 8 * spec.head_dim, "open pairs")
            for source in self.layout.sources
            if source.ratio > 1
        }
        self._mirror = device.pinned(4 * self.slots * self.most_pages).view(np.uint32)
        self._mirror = self._mirror.reshape(self.slots, self.most_pages)
        self._free_slots, self._free = deque(range(self.slots)), _Free(self.count)

    # ---- addresses

    def ring_of(self, layer: int) -> int:
        """The ring of a layer (drafter stages follow the layers) in slot 0; others lie window_pitch apart."""
        return self.windows + layer * self.ring * self.row_bytes

    def source(self, layer: int) -> SourceLayout:
        """Planes of the kv source `layer`; add their offsets to `pool`."""
        return next(source for source in self.layout.sources if source.layer == layer)

    def address(self, slot: int, number: int) -> int:
        """The page of tokens 128 number .. of a slot."""
        return self.pool + self._held[slot][number] * self.page_bytes

    @property
    def caches(self) -> Caches:
        """What the walks read and write."""
        pool = Pool(self.pool, self.table, self.most_pages, self.layout)
        layer_pitch = self.ring * self.row_bytes
        return Caches(self.windows, self.window_pitch, layer_pitch, self.ring, pool, self.pairs, self.history, HISTORY)

    # ---- slots and pages

    def open(self) -> int:
        """A slot without pages. Raises DeviceError when all are taken."""
        while not self._free_slots and self._leaving:
            self._reclaim(wait=True)
        if not self._free_slots:
            raise DeviceError(f"all {self.slots} sequence slots are taken; the engine asked for one more.")
        slot = self._free_slots.popleft()
        self._held[slot] = []
        return slot

    def reserve(self, slot: int, tokens: int) -> None:
        """Give a slot pages for so many tokens, in the order of the current stream. Raises DeviceError if short."""
        held = self._held[slot]
        before, wanted = len(held), pages_for(tokens)
        if wanted <= before:
            return
        if wanted > self.most_pages:
            raise DeviceError(f"{tokens} tokens need {wanted} pages, a sequence has at most {self.most_pages}.")
        while len(self._free) < wanted - before and self._leaving:
            self._reclaim(wait=True)
        if len(self._free) < wanted - before:
            raise DeviceError(
                f"{wanted - before} pages are needed and {len(self._free)} of {self.count} are free; the engine asked "
                "for more than limits.cache_pages."
            )
        self._add(slot, self._free.take(wanted - before))

    def _add(self, slot: int, numbers: list[int]) -> None:
        held = self._held[slot]
        before = len(held)
        held += numbers
        row = self._mirror[slot, before : len(held)]
        row[:] = numbers
        at = 4 * (slot * self.most_pages + before)
        self.device.copy_async(self.table + at, row.ctypes.data, row.nbytes)

    def release(self, slot: int, end: Event | Marks | None = None) -> None:
        """Give back a slot and its pages, once the work and the copies that are queued now have ended. `end`: until
        when they are in use, if not by this device alone.
        """
        self._leaving.append(_Leaving(slot, self._held.pop(slot), end or self.device.record(), self.copies))
        self._reclaim(wait=False)

    def follow(self, slot: int, leader: Pages) -> None:
        """Hold what the slot holds on another rank, pages of the same numbers. Who follows gives out none itself."""
        held, wanted = self._held.setdefault(slot, []), leader._held[slot]
        if len(held) < len(wanted):
            self._add(slot, wanted[len(held) :])

    def leave(self, slot: int) -> None:
        """The opposite of `follow`, before the leader gives the slot back."""
        del self._held[slot]

    def pages_of(self, slot: int) -> list[int]:
        """Numbers of the slot's pages in the pool."""
        return list(self._held[slot])

    def addresses(self, slot: int) -> np.ndarray:
        """int64 [n]: where the slot's pages lie."""
        return self.pool + self._mirror[slot, : len(self._held[slot])].astype(np.int64) * self.page_bytes

    @property
    def free(self) -> int:
        """Pages that nobody holds or is about to give back."""
        return self.count - sum(len(held) for held in self._held.values())

    def settle(self) -> None:
        """Take back what is no longer in use; `copied` has moved on."""
        self._reclaim(wait=False)

    def _reclaim(self, *, wait: bool) -> None:
        """Take back from the front; `wait` for the first one's work (never for copies: those need their own turn)."""
        while self._leaving:
            first = self._leaving[0]
            if first.copies > self.copied:
                if not wait:
                    return
                self.finish_copies(first.copies)  # which settles what it can, this one perhaps
                if not self._leaving or self._leaving[0] is not first:
                    return
            if wait:
                first.event.wait()
            elif not first.event.done():
                return
            self._leaving.popleft()
            self._free_slots.append(first.slot)
            self._free.give(first.pages)
            wait = False

    def finish_copies(self, number: int) -> None:
        """Block until copy `number` has ended; Copies puts its own method here."""
        raise DeviceError(f"copy {number} was queued by nobody.")
