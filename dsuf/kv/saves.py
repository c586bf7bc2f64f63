"""Saving: room, digests, announcement, and the names under which the end of a reply is found.

An entry is found only after its writer said that the copy's own event has completed and after every new slot was
digested; what a writer left half-written is freed when it dies.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dsuf.kv import messages as m
from dsuf.kv.arena import Arena
from dsuf.kv.directory import Announcement, Directory
from dsuf.kv.entries import Store
from dsuf.kv.entry import EXTRA_IDS, Entry, NoRoom, State, Wanted
from dsuf.kv.names import Names, ids_array

ALIAS_WAIT_S = 0.25
MAX_SEGMENTS = 64


class Saves:
    """What the engine reserves and fills. `directory` is None where nothing is shared."""

    def __init__(self, store: Store, directory: Directory | None, outcomes: Counter[str]) -> None:
        self.store, self.outcomes = store, outcomes
        self._directory = directory
        self._ready = asyncio.Event()  # replaced whenever an entry became READY
        self._loop = asyncio.get_running_loop()

    def reserve(
        self, ask: m.Reserve, names: Names, writer: str, continues: bytes
    ) -> tuple[m.Reserved, Entry] | m.Nothing:
        """Room for a prefix, and which of its pages are to be filled: none where it is saved already."""
        base = self.store.entries.get(ask.base)
        if ask.base and (base is None or base.state is not State.READY):
            return m.Nothing(ask.id, "base", "the entry that this one goes on from is gone; send all ids")
        before = base.tokens if base else 0
        known = before + len(ask.ids) // 4
        if len(ask.ids) % 4 or not before <= ask.tokens <= known <= ask.tokens + EXTRA_IDS or ask.tokens <= 0:
            return m.Nothing(ask.id, "wrong", f"{len(ask.ids)} bytes of ids after {before} for {ask.tokens} tokens")
        wanted = Wanted(names, ids_array(ask.ids), ask.tokens, writer, base, ask.periodic)
        try:
            entry = self.store.reserve(wanted, self._loop.time())
        except NoRoom as error:
            self.outcomes["full"] += 1
            return m.Nothing(ask.id, "full", str(error))
        entry.wanted_keys += [(names.segment(digest), count) for count, digest in ask.segments[:MAX_SEGMENTS]]
        if entry.state is State.READY:
            self.publish(entry)
            return m.Reserved(ask.id, entry.id, b"", b""), entry
        entry.continues = continues
        new = entry.new_pages.astype("<u4").tobytes()
        return m.Reserved(ask.id, entry.id, new, entry.new_slots.astype("<u4").tobytes()), entry

    async def ready(self, ask: m.Ready, writer: str) -> m.Done:
        """Digest what was written, then let it be found."""
        entry = self.store.entries.get(ask.entry)
        if entry is None or (entry.state is State.WRITING and entry.writer != writer):
            return m.Done(ask.id, False)
        if entry.state is State.WRITING:
            slots = entry.new_slots.astype(np.int64)
            digests = await asyncio.to_thread(_digests, self.store.arena, slots)
            if entry.state is not State.WRITING:  # its writer died meanwhile
                return m.Done(ask.id, False)
            self.store.arena.digests[slots] = digests
            ready = self.store.ready(entry, self._loop.time())
            if ready is not entry:
                ready.wanted_keys += entry.wanted_keys
                entry.instead = ready
            entry = ready
        self.publish(entry)
        self._ready.set()
        self._ready = asyncio.Event()
        return m.Done(ask.id, True, entry.id)

    def abandon(self, entry_id: int, writer: str) -> None:
        """The writer gave up."""
        entry = self.store.entries.get(entry_id)
        if entry is not None and entry.state is State.WRITING and entry.writer == writer:
            self.store.drop(entry)

    async def alias(self, ask: m.Alias, names: Names, saved: Sequence[Entry]) -> m.Done:
        """Let the end of a reply be found by its rendered bytes, once it is READY and announced; waits a little."""
        done = False
        try:
            async with asyncio.timeout(ALIAS_WAIT_S):
                while (entry := _ending(saved, ask.boundary)) is not None and entry.state is State.WRITING:
                    await self._ready.wait()
                if entry is None or len(ask.last) % 4:
                    return m.Done(ask.id, False)
                done = self.store.extend_ids(entry, ask.boundary, ids_array(ask.last))
                done = done and self.store.add_key(entry, names.segment(ask.digest), ask.boundary)
                written = self.publish(entry) if done else None
                if written is not None:
                    await written.wait()
        except TimeoutError:  # it is found here, and by others as soon as Redis knows
            pass
        return m.Done(ask.id, done)

    def publish(self, entry: Entry) -> asyncio.Event | None:
        """Give a READY entry the keys it wants and announce it; the event is set when Redis knows."""
        for key, count in entry.wanted_keys:
            self.store.add_key(entry, key, count)
        entry.wanted_keys.clear()
        if self._directory is None:
            return None
        nbytes = len(entry.slots) * self.store.arena.slot_bytes
        said = Announcement(entry.id, tuple(entry.keys), entry.tokens, nbytes, entry.continues)
        return self._directory.announce(said)


def _ending(saved: Sequence[Entry], boundary: int) -> Entry | None:
    """The longest of the entries that ends at most three ids before `boundary`."""
    standing = [entry.instead or entry for entry in saved]
    near = [e for e in standing if e.state is not State.FREED and 0 <= boundary - e.tokens <= EXTRA_IDS]
    return max(near, key=lambda entry: entry.tokens, default=None)


def _digests(arena: Arena, slots: np.ndarray) -> np.ndarray:
    """In a thread: digests [slots, 16] of the bytes as they are now."""
    return np.frombuffer(b"".join(arena.digest(slot) for slot in slots.tolist()), np.uint8).reshape(-1, 16)
