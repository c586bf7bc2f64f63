"""Cache entries: immutable, named by what they hold, leased while somebody reads, evicted by bytes.

    reserve -> WRITING -> ready -> READY (found, leased, announced) -> evicted -> FREED
                       -> drop (writer died, digest differs) -> FREED

An entry is all pages of its first `tokens` ids, its snapshot and its ids: reserved, written, digested and found
together. Full pages are shared between entries by count, under the chain's name; the last partial page and the snapshot
belong to one entry. A lease pins its entry; one that has lapsed still pins it until the reader is cut off (`unpin`).

Called from one thread; reads no clock: `now` is the caller's monotonic time in seconds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import numpy as np

from dsuf.kv.arena import Arena, Slots
from dsuf.kv.entry import EXTRA_IDS, Entry, Lease, NoRoom, State, Wanted
from dsuf.kv.names import BLOCK_TOKENS

EVICT_TO_FREE = 0.10  # once memory is short, free this share at one go


class Store:
    """All entries of one server over one arena."""

    def __init__(self, arena: Arena, snapshot_bytes: int) -> None:
        self.arena = arena
        self.snapshot_slots = -(-snapshot_bytes // arena.slot_bytes)
        self.slots = Slots(arena.slots)
        self.entries: dict[int, Entry] = {}
        self.leases: dict[int, Lease] = {}
        self.on_freed: Callable[[Entry], None] = lambda entry: None  # a READY entry is gone
        self._keys: dict[bytes, Entry] = {}
        self._blocks: dict[bytes, int] = {}  # name of a full block -> the slot of a READY page
        self._block_of: dict[int, bytes] = {}

    # ---- finding

    def find(self, key: bytes) -> Entry | None:
        """The READY entry under a name or segment."""
        return self._keys.get(key)

    def ready_entries(self) -> Iterator[Entry]:
        """All READY entries."""
        return (entry for entry in self.entries.values() if entry.state is State.READY)

    def ids(self, entry: Entry, count: int | None = None) -> np.ndarray:
        """The first `count` ids of an entry (default: its tokens), uint32."""
        count = entry.tokens if count is None else count
        full = entry.pages[: entry.full_pages]
        return np.concatenate([self.arena.ids[full].reshape(-1), entry.tail])[:count]

    def known_ids(self, entry: Entry) -> int:
        """How many ids an entry knows: its tokens and up to EXTRA_IDS more."""
        return entry.full_pages * BLOCK_TOKENS + len(entry.tail)

    # ---- writing

    def reserve(self, wanted: Wanted, now: float) -> Entry:
        """A WRITING entry with slots for what is not there yet; evicts for it. Raises NoRoom.

        Where there is a READY entry of that name already, it is that one.
        """
        base, ids = wanted.base, wanted.ids
        kept = base.full_pages if base is not None else 0
        start = base.last_block if base is not None else wanted.names.root
        if base is not None:
            ids = np.concatenate([base.tail[: base.tokens - kept * BLOCK_TOKENS], ids])
        here = wanted.tokens - kept * BLOCK_TOKENS  # tokens that `ids` covers
        chain = wanted.names.chain(ids[:here], start)
        full, last = kept + len(chain), chain[-1] if chain else start
        tail = ids[(full - kept) * BLOCK_TOKENS : here + EXTRA_IDS].copy()
        name = wanted.names.entry(last, tail[: wanted.tokens - full * BLOCK_TOKENS])
        if name in self._keys:
            return self._keys[name]
        pages, new, snapshot = self._place(base, chain, -(-here // BLOCK_TOKENS), wanted.fetched, now)
        for index in new[new < full]:
            self.arena.ids[pages[index]] = ids[(index - kept) * BLOCK_TOKENS : (index - kept + 1) * BLOCK_TOKENS]
        entry = Entry(
            id=secrets.randbits(62),
            name=name,
            names=wanted.names,
            tokens=wanted.tokens,
            pages=pages,
            snapshot=snapshot,
            new_pages=new,
            block_names=chain,
            last_block=last,
            tail=tail,
            periodic=wanted.periodic,
            fetched=wanted.fetched,
            writer=wanted.writer,
            used_s=now,
        )
        self.entries[entry.id] = entry
        return entry

    def ready(self, entry: Entry, now: float) -> Entry:
        """Every byte and digest of a WRITING entry is there: it can be found. An earlier one of that name stays."""
        assert entry.state is State.WRITING
        earlier = self._keys.get(entry.name)
        if earlier is not None:
            self._free(entry)
            earlier.used_s = now
            return earlier
        entry.state, entry.used_s = State.READY, now
        first = entry.full_pages - len(entry.block_names)
        for index in entry.new_pages[entry.new_pages < entry.full_pages]:
            name, slot = entry.block_names[index - first], int(entry.pages[index])
            if name not in self._blocks:
                self._blocks[name], self._block_of[slot] = slot, name
        entry.block_names = []
        self.add_key(entry, entry.name, entry.tokens)
        return entry

    def add_key(self, entry: Entry, key: bytes, ids: int) -> bool:
        """Find `entry` under `key` too, which stands for its first `ids` ids; False when it does not know that many."""
        if entry.state is not State.READY or not 0 <= ids - entry.tokens <= EXTRA_IDS:
            return False
        if ids > self.known_ids(entry):
            return False
        before = self._keys.get(key)
        if before is not None and before is not entry:
            before.keys.pop(key, None)
        self._keys[key] = entry
        entry.keys[key] = ids
        return True

    def extend_ids(self, entry: Entry, boundary: int, last: np.ndarray) -> bool:
        """Learn ids beyond `tokens`: `last` are the ids that end at `boundary`. False where they contradict."""
        have, begin = self.known_ids(entry), boundary - len(last)
        if boundary - entry.tokens > EXTRA_IDS or begin > have:
            return False
        before = self.arena.ids[entry.pages[entry.full_pages - 1]] if entry.full_pages else entry.tail[:0]
        known = np.concatenate([before, entry.tail])  # those that end at `have`
        start = max(begin, have - len(known))
        overlap = min(have, boundary) - start
        if overlap > 0 and not np.array_equal(
            known[start - have + len(known) :][:overlap], last[start - begin :][:overlap]
        ):
            return False
        if boundary > have:
            entry.tail = np.concatenate([entry.tail, last[have - begin :]])
        return True

    def drop(self, entry: Entry) -> None:
        """Free an entry that nobody has leased: its writer gave up, or its bytes are not what they should be."""
        assert not entry.leases
        if entry.state is not State.FREED:
            self._free(entry)

    def drop_writer(self, writer: str) -> int:
        """Free what a dead writer left half-written; how many entries."""
        half = [e for e in self.entries.values() if e.state is State.WRITING and e.writer == writer]
        for entry in half:
            self._free(entry)
        return len(half)

    # ---- leases

    def lease(self, entry: Entry, holder: str, ttl_s: float, now: float) -> Lease:
        """Pin a READY entry for a reader."""
        assert entry.state is State.READY
        lease = Lease(secrets.randbits(62), entry, holder, now + ttl_s)
        self.leases[lease.id] = lease
        entry.leases.add(lease.id)
        entry.used_s = now
        return lease

    def renew(self, lease_id: int, ttl_s: float, now: float) -> bool:
        """Prolong a lease; False when it has lapsed."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.until_s <= now:
            return False
        self.leases[lease_id] = Lease(lease.id, lease.entry, lease.holder, max(lease.until_s, now + ttl_s))
        return True

    def end(self, lease_id: int, now: float) -> Lease | None:
        """The lease counts no longer; returned if it had not lapsed before. `unpin` follows."""
        lease = self.leases.pop(lease_id, None)
        return lease if lease is not None and lease.until_s > now else None

    def lapse(self, lease_id: int, now: float) -> Lease | None:
        """If the lease has run out, it counts no longer and is returned: cut its reader off, then `unpin`."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.until_s > now:
            return None
        return self.leases.pop(lease_id)

    def unpin(self, lease_id: int, entry: Entry) -> None:
        """No read of that lease can succeed any more: its entry may be evicted."""
        assert lease_id not in self.leases
        entry.leases.discard(lease_id)

    # ---- memory

    def make_room(self, slots: int, now: float, *, pull: bool) -> bool:
        """Evict until `slots` can be taken; False when too little may go."""
        needed = slots + (0 if pull else self.slots.reserve)
        if self.slots.free >= needed:
            return True
        target = max(needed, int(self.slots.total * EVICT_TO_FREE))
        victims = [e for e in self.ready_entries() if not e.leases]
        for entry in sorted(victims, key=_worth):
            if self.slots.free >= target:
                break
            self._free(entry)
        return self.slots.free >= needed

    def check(self) -> None:
        """Raise AssertionError unless every count, name and key is accounted for (I2, I4)."""
        counts = np.zeros(self.slots.total, np.uint32)
        for entry in self.entries.values():
            np.add.at(counts, entry.slots, 1)
            for lease_id in entry.leases:
                assert self.leases.get(lease_id) is None or self.leases[lease_id].entry is entry
        assert np.array_equal(counts, self.slots.counts), "references and entries differ"
        self.slots.check()
        for name, slot in self._blocks.items():
            assert self.slots.counts[slot] and self._block_of[slot] == name, "a block's slot is free"
        assert len(self._blocks) == len(self._block_of)
        for key, entry in self._keys.items():
            assert entry.state is State.READY and key in entry.keys, "a key leads to no READY entry"
        own = [slot for entry in self.entries.values() for slot in entry.snapshot.tolist()]
        assert (self.slots.counts[np.array(own, np.int64)] == 1).all(), "a snapshot is shared"

    def damaged(self, entry: Entry) -> int | None:
        """The first slot of a READY entry whose bytes do not have the digest they were saved with; reads all."""
        for slot in entry.slots.tolist():
            if self.arena.digest(slot) != self.arena.digests[slot].tobytes():
                return slot
        return None

    def _place(
        self, base: Entry | None, chain: list[bytes], count: int, pull: bool, now: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots of the pages of `base` and `count` further ones, of which `chain` names the full ones.

        Returns (slots of all pages, indices of those that are new, slots of the snapshot). Raises NoRoom.
        """
        kept = base.full_pages if base is not None else 0
        pages = np.zeros(kept + count, np.uint32)
        if base is not None:
            pages[:kept] = base.pages[:kept]
        known = [self._blocks.get(name) for name in chain] + [None] * (count - len(chain))
        new = np.array([kept + i for i, slot in enumerate(known) if slot is None], np.int64)
        pages[kept:] = [0 if slot is None else slot for slot in known]
        old = np.delete(pages, new)
        self.slots.share(old)  # first, so that making room cannot free what is to be shared
        needed = len(new) + self.snapshot_slots
        taken = self.slots.take(needed) if self.make_room(needed, now, pull=pull) else None
        if taken is None:
            self._give(old)
            raise NoRoom(f"no room for {needed} slots: everything else is leased or being written.")
        pages[new] = taken[: len(new)]
        return pages, new, taken[len(new) :]

    def _free(self, entry: Entry) -> None:
        was_ready, entry.state = entry.state is State.READY, State.FREED
        for key in entry.keys:
            if self._keys.get(key) is entry:
                del self._keys[key]
        del self.entries[entry.id]
        self._give(entry.slots)
        if was_ready:
            self.on_freed(entry)

    def _give(self, slots: np.ndarray) -> None:
        for slot in self.slots.give(slots):
            name = self._block_of.pop(slot, None)
            if name is not None:
                del self._blocks[name]


def _worth(entry: Entry) -> tuple[int, float]:
    """Order of eviction: what is elsewhere, then points inside a turn, then ends of turns; the longest unused first."""
    return (0 if entry.fetched or entry.superseded else 1 if entry.periodic else 2), entry.used_s
