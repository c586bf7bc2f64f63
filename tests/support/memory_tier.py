"""A cache tier in a dictionary: finds the longest saved prefix after a while, and checks how the engine behaves."""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.backend import Limits
from dsuf.engine.tier import PENDING, Hit, Reserved
from dsuf.layout import PAGE_TOKENS, pages_for


@dataclass(frozen=True)
class Entry(Reserved):
    ids: tuple[int, ...] = ()
    periodic: bool = False


class MemoryTier:
    """`delay`: turns for which a look-up is pending; `full`: there is no room.

    Full pages are kept once, by all ids up to their end.
    """

    def __init__(self, limits: Limits, delay: int = 0) -> None:
        self.limits, self.delay, self.full = limits, delay, False
        self.entries: dict[tuple[int, ...], Entry] = {}
        self.pages: dict[tuple[int, ...], bytearray] = {}
        self.live: dict[str, int] = {}  # asked so often
        self.writing: list[Entry] = []
        self.leased: set[str] = set()
        self.memory = None
        self.written_pages = self.computed_rows = self.waits = 0

    def want(self, key, request):
        assert key == request.id and key not in self.live
        self.live[key] = 0
        self._prompt = {**getattr(self, "_prompt", {}), key: tuple(request.prompt_ids)}

    def found(self, key):
        self.live[key] += 1
        if self.live[key] <= self.delay:
            return PENDING
        prompt = self._prompt[key]
        hits = [ids for ids in self.entries if ids == prompt[: len(ids)] and len(ids) < len(prompt)]
        if not hits:
            return None
        ids = max(hits, key=len)
        self.leased.add(key)
        pages = [self.pages[self._page_name(ids, number)] for number in range(pages_for(len(ids)))]
        return Hit(len(ids), "local", pages, self.entries[ids].state)

    def restored(self, key):
        self.leased.remove(key)

    def reserve(self, key, ids, position, *, periodic):
        if self.full:
            return None
        assert key in self.live and position % self.limits.resume_step == 0 and 0 < position <= len(ids)
        names = {number: self._page_name(tuple(ids[:position]), number) for number in range(pages_for(position))}
        new = {number: bytearray(self.limits.page_bytes) for number, name in names.items() if name not in self.pages}
        self.pages.update({names[number]: page for number, page in new.items()})
        self.written_pages += len(new)
        half = self.limits.snapshot_bytes // 2
        state = [bytearray(half), bytearray(self.limits.snapshot_bytes - half)]
        entry = Entry(new, state, tuple(ids[:position]), periodic)
        self.writing.append(entry)
        return entry

    def ready(self, reserved):
        self.writing.remove(reserved)
        self.entries[reserved.ids] = reserved

    def forget(self, key):
        del self.live[key]
        self.leased.discard(key)

    def measured(self, rows, seconds):
        assert rows > 0 and seconds >= 0
        self.computed_rows += rows

    def wait(self, seconds):
        self.waits += 1

    def check_idle(self):
        assert (self.live, self.writing, self.leased) == ({}, [], set())

    def _page_name(self, ids, number):
        end = min((number + 1) * PAGE_TOKENS, len(ids))
        full = end == (number + 1) * PAGE_TOKENS
        return ids[:end] if full else (*ids, -1)
