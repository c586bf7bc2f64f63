"""One pull: lease, read, digest, and whether the lease held all along; anything else is a reason to recompute.

    ask    connect, choose a path, lease; the grant's ids must give the name that was looked for
    run    reserve, read in batches, check each page's digest, release, and only then READY
    fail   stop the link, then free the destination: no late byte can land in memory that is used again

One function does it for every path, so that no path can leave a check out. The reader's clock starts before the lease
is asked for, so that it never believes in a lease longer than the owner does.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np

from dsuf.kv.directory import Holder
from dsuf.kv.entries import Store
from dsuf.kv.entry import EXTRA_IDS, Entry, NoRoom, State, Wanted
from dsuf.kv.frames import MAX_TTL_MS, Grant, Miss
from dsuf.kv.names import BLOCK_TOKENS, Names, ids_array
from dsuf.kv.peers import Connection, Peers
from dsuf.kv.rates import Rates
from dsuf.kv.transport.base import Link, Read, TransferFailed

MIN_TTL_S = 2.0
TRUST = 0.9  # of a lease's time on the reader's clock
BATCH_BYTES = 32 << 20  # read while the batch before is checked
MAX_KEYS = 16  # of a grant


class Fallback(Exception):
    """Not an error for the user: the prompt is computed instead. The message is the reason; `kind` counts it."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.tokens = 0  # that a peer has announced and that do not come


@dataclass(eq=False)
class Granted:
    """A lease at an owner, and what it is of."""

    holder: Holder
    key: bytes  # by which it was found
    names: Names
    connection: Connection
    path: str
    link: Link
    grant: Grant
    ids: np.ndarray  # uint32, all that the owner knows
    asked_s: float
    ttl_s: float
    deadline_s: float  # for the whole pull, on the loop's clock
    tried: set[str] = field(default_factory=set)


class Fetcher:
    """Pulls entries from peers into the store."""

    def __init__(self, store: Store, peers: Peers, rates: Rates) -> None:
        self.store, self.peers, self.rates = store, peers, rates
        self.bytes_by_path: dict[str, int] = {}
        self.undoing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    async def ask(self, holder: Holder, key: bytes, names: Names, here_tokens: int) -> Granted:
        """Lease what `holder` announced under `key`; `here_tokens` of it are here already. Raises Fallback.

        Returns with the ids in hand, before any byte of cache has moved.
        """
        asked_s = self._loop.time()
        try:
            connection = await self.peers.connection(holder)
        except TransferFailed as error:
            raise Fallback("unreachable", str(error)) from None
        kind, reason = "path", "no path to the owner can be used"
        for path in self.peers.paths(connection):
            tokens = holder.tokens - here_tokens
            nbytes = holder.nbytes * max(tokens, 1) // max(holder.tokens, 1)
            if not self.rates.worth_it(path, tokens, nbytes):
                kind = "slow"
                reason = f"pulling {nbytes} bytes by {path} would take longer than half of computing {tokens} tokens"
                continue
            deadline_s = asked_s + self.rates.deadline_s(path, tokens, nbytes)
            try:
                return await self._lease(holder, key, names, connection, path, asked_s, deadline_s)
            except TransferFailed as error:
                kind, reason = "path", str(error)
        raise Fallback(kind, reason)

    async def run(self, granted: Granted, writer: str) -> Entry:
        """Bring the entry here; READY when it returns. Raises Fallback, and then nothing of it is left."""
        try:
            async with asyncio.timeout_at(granted.deadline_s):
                while True:
                    try:
                        return await self._pull(granted, writer)
                    except TransferFailed as error:
                        granted = await self._another_path(granted, str(error))
        except TimeoutError:
            raise Fallback("deadline", "the transfer was not done in time") from None

    async def give_up(self, granted: Granted) -> None:
        """Release a lease whose bytes are not wanted."""
        await self.peers.give_back(granted.connection, granted.path, granted.link)
        with contextlib.suppress(TransferFailed):
            await granted.connection.release(granted.grant.lease)

    async def _lease(
        self,
        holder: Holder,
        key: bytes,
        names: Names,
        connection: Connection,
        path: str,
        asked_s: float,
        deadline_s: float,
    ) -> Granted:
        link = await self.peers.link(connection, path)
        kept = False
        try:
            ttl_s = min(max(MIN_TTL_S, (deadline_s - self._loop.time()) / TRUST), MAX_TTL_MS / 1000)
            since = self._loop.time()
            grant = await connection.lease(key, holder.entry, holder.boot, path, ttl_s)
            if isinstance(grant, Miss):
                kind = "stale" if grant.reason in ("gone", "boot") else "refused"
                raise Fallback(kind, f"the owner no longer gives it: {grant.reason}")
            ids = await self._ids(connection, grant)
            granted = Granted(
                holder, key, names, connection, path, link, grant, ids, since, grant.ttl_ms / 1000, deadline_s
            )
            if not self._fits(granted):
                await connection.release(grant.lease)
                raise Fallback("mismatch", "the owner's grant is not what its announcement said")
            kept = True
            return granted
        finally:
            if not kept:
                await self.peers.give_back(connection, path, link)

    async def _ids(self, connection: Connection, grant: Grant) -> np.ndarray:
        """All ids that the owner knows."""
        data = grant.ids
        while len(data) < 4 * grant.known_ids:
            more = await connection.more_ids(grant.lease, len(data) // 4)
            if not more or len(more) % 4:
                raise TransferFailed("the lease ended while ids were read")
            data += more
        try:
            return ids_array(data[: 4 * grant.known_ids])
        except ValueError:
            raise TransferFailed("the grant's ids are no ids") from None

    def _fits(self, granted: Granted) -> bool:
        """Whether a grant is whole, and of the entry that its name says."""
        grant, ids = granted.grant, granted.ids
        slots = -(-grant.tokens // BLOCK_TOKENS) + self.store.snapshot_slots
        return (
            grant.tokens == granted.holder.tokens > 0
            and grant.tokens <= grant.known_ids <= grant.tokens + EXTRA_IDS
            and len(ids) == grant.known_ids
            and grant.pages + self.store.snapshot_slots == slots
            and len(grant.slots) == 4 * slots
            and len(grant.digests) == 16 * slots
            and len(grant.keys) <= MAX_KEYS
            and granted.names.of_ids(ids[: grant.tokens]) == grant.name
            and (granted.key == grant.name or granted.key in dict(grant.keys))
        )

    async def _another_path(self, granted: Granted, reason: str) -> Granted:
        """The same entry by the next path that has not been tried. Raises Fallback when there is none."""
        self.peers.circuits.open(granted.connection.key, granted.path)
        granted.tried.add(granted.path)
        if granted.connection.alive:
            for path in self.peers.paths(granted.connection):
                if path in granted.tried:
                    continue
                granted.tried.add(path)
                with contextlib.suppress(TransferFailed):
                    again = await self._lease(
                        *(granted.holder, granted.key, granted.names, granted.connection, path),
                        *(granted.asked_s, granted.deadline_s),
                    )
                    again.tried |= granted.tried
                    return again
        raise Fallback("transfer", reason)

    async def _pull(self, granted: Granted, writer: str) -> Entry:
        """Reserve, read, check, release, publish. Raises TransferFailed or Fallback; frees what it reserved then."""
        grant, link = granted.grant, granted.link
        wanted = Wanted(granted.names, granted.ids, grant.tokens, writer, fetched=True)
        try:
            entry = self.store.reserve(wanted, self._loop.time())
        except NoRoom as error:
            await self.give_up(granted)
            raise Fallback("memory", str(error)) from None
        if entry.state is State.READY:  # it came here in another way meanwhile
            await self.give_up(granted)
            return entry
        done = False
        try:
            begin = self._loop.time()
            nbytes = await self._read(granted, entry)
            seconds = self._loop.time() - begin
            held = await granted.connection.release(grant.lease)
            if not held or self._loop.time() > granted.asked_s + TRUST * granted.ttl_s:
                raise Fallback("lease", "the lease ran out before the last byte was here")
            done = True
        finally:
            if not done:  # in the background: a request that waits must not wait for a link that is slow to stop
                task = asyncio.create_task(self._undo(granted, entry))
                self.undoing.add(task)
                task.add_done_callback(self.undoing.discard)
        await self.peers.give_back(granted.connection, granted.path, link)
        self.rates.moved(granted.path, nbytes, seconds)
        self.bytes_by_path[granted.path] = self.bytes_by_path.get(granted.path, 0) + nbytes
        ready = self.store.ready(entry, self._loop.time())
        for key, ids in grant.keys:
            self.store.add_key(ready, key, ids)
        return ready

    async def _undo(self, granted: Granted, entry: Entry) -> None:
        """Stop the link, free the destination, give the lease back: in this order."""
        await granted.link.abort()
        self.store.drop(entry)
        with contextlib.suppress(TransferFailed):
            await granted.connection.release(granted.grant.lease)

    async def _read(self, granted: Granted, entry: Entry) -> int:
        """Read what is not here, batch by batch, each checked while the next one comes; bytes read."""
        arena, size = self.store.arena, self.store.arena.slot_bytes
        remote = np.frombuffer(granted.grant.slots, "<u4").astype(np.int64)
        digests = np.frombuffer(granted.grant.digests, np.uint8).reshape(-1, 16)
        wanted = np.concatenate([entry.new_pages, np.arange(len(entry.pages), len(entry.slots))])
        remote, digests, local = remote[wanted], digests[wanted], entry.new_slots.astype(np.int64)
        per_batch = max(1, BATCH_BYTES // size)
        checking: asyncio.Future[int | None] | None = None
        try:
            for at in range(0, len(wanted), per_batch):
                part = slice(at, at + per_batch)
                await self._renew(granted)
                await granted.link.read(granted.grant.ticket, _ranges(remote[part], local[part], size))
                if checking is not None:
                    self._judge(await checking, granted)
                checking = asyncio.ensure_future(asyncio.to_thread(_damaged, arena, local[part], digests[part]))
            if checking is not None:
                self._judge(await checking, granted)
        finally:
            if checking is not None and not checking.done():
                await asyncio.wait({checking})  # it reads the slots that are freed next
        arena.digests[local] = digests
        return len(wanted) * size

    async def _renew(self, granted: Granted) -> None:
        """Prolong the lease when half of it is over. Raises Fallback when it has lapsed."""
        now = self._loop.time()
        if now > granted.asked_s + 0.5 * granted.ttl_s:
            if not await granted.connection.renew(granted.grant.lease, granted.ttl_s):
                raise Fallback("lease", "the lease ran out during the transfer")
            granted.asked_s = now

    def _judge(self, slot: int | None, granted: Granted) -> None:
        if slot is not None:
            sid, path = granted.holder.sid, granted.path
            raise Fallback("digest", f"a page pulled from {sid} by {path} is not what its owner saved")


def _damaged(arena: object, slots: np.ndarray, digests: np.ndarray) -> int | None:
    """In a thread: the first slot whose bytes do not have their digest."""
    for slot, digest in zip(slots.tolist(), digests, strict=True):
        if arena.digest(slot) != digest.tobytes():
            return slot
    return None


def _ranges(remote: np.ndarray, local: np.ndarray, size: int) -> list[Read]:
    """Slots as ranges that are contiguous on both sides."""
    breaks = np.flatnonzero((np.diff(remote) != 1) | (np.diff(local) != 1)) + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(remote)]
    return [
        Read(int(remote[s]) * size, int(local[s]) * size, (e - s) * size) for s, e in zip(starts, ends, strict=True)
    ]
