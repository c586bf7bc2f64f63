"""Where web and engine ask: look a prefix up, claim it, save one, let go. One `Visit` a request.

    web     LOOKUP -> local index, then the directory and a lease at the owner; its ids are the answer, while the pull
            has begun. ALIAS at the end of a reply, FORGET at the end of the request, whatever happened.
    engine  CLAIM waits for the pull and gets slots, RELEASE after copying them out; RESERVE, fill, READY to save.

Whatever goes wrong is an answer `Nothing` with the reason, and the prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from dsuf.kv import messages as m
from dsuf.kv.directory import Directory
from dsuf.kv.entries import Store
from dsuf.kv.entry import Entry, Lease, State
from dsuf.kv.fetch import Fallback, Fetcher
from dsuf.kv.names import BLOCK_TOKENS, RESUME_TOKENS, Names, ids_array, ids_bytes
from dsuf.kv.pulls import Pull, Pulls
from dsuf.kv.saves import Saves

MAX_VISITS = 100_000


@dataclass(eq=False)
class Visit:
    """One request's dealings with the agent."""

    request: str
    names: Names
    owner: str  # the connection that brought it; it ends with it
    reader: str = ""  # the connection that claimed it, and may be copying until it says otherwise
    ended: bool = False  # the owner has forgotten it, the reader not yet
    lease: Lease | None = None  # what CLAIM hands out
    pull: Pull | None = None  # or what it waits for
    spare: Lease | None = None  # a shorter entry that is here, should the pull fail
    source: m.Source = "local"
    continues: bytes = b""  # name of the peer's entry that it goes on from
    saved: list[Entry] = field(default_factory=list)


class Desk:
    """All visits of one agent. `directory` and `fetcher` are None where nothing is shared."""

    def __init__(
        self,
        store: Store,
        names: Callable[[str], Names],
        directory: Directory | None = None,
        fetcher: Fetcher | None = None,
        resume_tokens: int = RESUME_TOKENS,
    ) -> None:
        self.store = store
        self.visits: dict[str, Visit] = {}
        self.outcomes: Counter[str] = Counter()  # of look-ups and claims, by kind
        self.lost: Counter[str] = Counter()  # tokens that a peer had and that are computed anew, by why
        self.saves = Saves(store, directory, self.outcomes)
        self.pulls = Pulls(directory, fetcher, self._landed) if directory and fetcher else None
        self._names, self._directory, self._resume_tokens = names, directory, resume_tokens
        self._loop = asyncio.get_running_loop()
        store.on_freed = self._freed

    async def lookup(self, ask: m.Lookup, owner: str) -> m.Found | m.Nothing:
        """The longest prefix, here or at a peer; held for the request when it is told."""
        visit = self._visit(ask.request, ask.tenant, owner)
        if visit is None or len(ask.ids) % 4:
            return m.Nothing(ask.id, "busy", "too many requests, or ids that are none")
        keys = [visit.names.segment(digest) for digest in ask.segments]
        keys = keys or self._keys_of_ids(visit.names, ids_array(ask.ids))
        at, local = self._local(keys, ask.beyond)
        try:
            pull = await self._remote(visit.names, keys[:at], max(local.tokens if local else 0, ask.beyond))
        except Fallback as error:
            why, announced = m.Nothing(ask.id, error.kind, str(error)), error.tokens
        else:
            return self._remotely(visit, pull, local, ask.id)
        at, local = self._local(keys, ask.beyond)  # as things are by now
        self._lose(why.kind, announced - (local.tokens if local else ask.beyond))
        if local is None or self.visits.get(visit.request) is not visit:
            self.outcomes[why.kind] += 1
            return why
        self._let_go(visit)
        visit.lease, visit.source = self._lease(local, visit), "local"
        return m.Found(ask.id, local.tokens, "local", ids_bytes(self.store.ids(local, local.keys[keys[at]])))

    async def claim(self, ask: m.Claim, reader: str) -> m.Claimed | m.Nothing:
        """Wait until the bytes are here."""
        visit = self.visits.get(ask.request)
        if visit is None or (visit.lease is None and visit.pull is None):
            return m.Nothing(ask.id, "none", "nothing was found for this request")
        if visit.pull is not None and visit.lease is None:
            why = await self._arrival(visit, ask.id)
            if why is not None:
                return why
        if self.visits.get(ask.request) is not visit:  # forgotten in the same moment
            self._let_go(visit)
            return m.Nothing(ask.id, "forgotten", "the request has ended")
        entry, visit.reader = visit.lease.entry, reader
        self.outcomes[visit.source] += 1
        slots = entry.slots.astype("<u4").tobytes()
        proof = xxhash.xxh3_128_digest(ids_bytes(self.store.ids(entry)))
        return m.Claimed(ask.id, entry.id, entry.tokens, visit.source, len(entry.pages), slots, proof)

    def release(self, request: str) -> bool:
        """The bytes were copied out; whether they stood still until now."""
        visit = self.visits.get(request)
        if visit is None or visit.lease is None:
            return False
        lease, visit.lease = visit.lease, None
        return self._end(lease)

    def forget(self, request: str, client: str) -> None:
        """A client says that the request has ended; what its reader has claimed stays until the reader says so too."""
        visit = self.visits.get(request)
        if visit is None or client not in (visit.owner, visit.reader):
            return
        if visit.reader and client != visit.reader:
            visit.ended = True
            return
        visit.reader = ""
        self._let_go(visit)
        if client == visit.owner or visit.ended:
            del self.visits[request]

    def client_gone(self, client: str) -> None:
        """A connection ended: so have its requests, and its copying."""
        for visit in [visit for visit in self.visits.values() if client in (visit.owner, visit.reader)]:
            self.forget(visit.request, client)

    def reserve(self, ask: m.Reserve, writer: str) -> m.Reserved | m.Nothing:
        """Room for a prefix that the engine is about to write."""
        visit = self._visit(ask.request, ask.tenant, writer)
        if visit is None:
            return m.Nothing(ask.id, "busy", f"{MAX_VISITS} requests are known already")
        answer = self.saves.reserve(ask, visit.names, writer, visit.continues)
        if isinstance(answer, m.Nothing):
            return answer
        reserved, entry = answer
        visit.saved.append(entry)
        return reserved

    async def alias(self, ask: m.Alias) -> m.Done:
        """A further name for what the request ended with."""
        visit = self.visits.get(ask.request)
        return await self.saves.alias(ask, visit.names, visit.saved) if visit else m.Done(ask.id, False)

    def continued(self, name: bytes) -> None:
        """Another server has gone on from our entry of that name: ours may go before others."""
        entry = self.store.find(name)
        if entry is not None:
            entry.superseded = True

    # ---- pulls

    async def _remote(self, names: Names, keys: Sequence[bytes], beyond: int) -> Pull:
        if self.pulls is None:
            raise Fallback("none", "nothing is shared")
        return await self.pulls.find(names, keys, beyond)

    def _remotely(self, visit: Visit, pull: Pull, local: Entry | None, number: int) -> m.Found | m.Nothing:
        """Let the visit wait for a pull; `local` is a shorter entry that was here."""
        if self.visits.get(visit.request) is not visit:
            self.pulls.leave(pull)
            return m.Nothing(number, "forgotten", "the request has ended")
        self._let_go(visit)
        granted = pull.granted
        visit.pull, visit.source, visit.continues = pull, "remote", granted.grant.name
        pull.users.add(visit)
        if pull.entry is not None and pull.entry.state is State.READY:
            visit.lease = self._lease(pull.entry, visit)
        here = local is not None and local.state is State.READY
        if here and np.array_equal(self.store.ids(local), granted.ids[: local.tokens]):
            visit.spare = self._lease(local, visit)
        count = dict(granted.grant.keys).get(pull.key, granted.grant.tokens)
        return m.Found(number, granted.grant.tokens, "remote", ids_bytes(granted.ids[:count]))

    def _landed(self, pull: Pull, entry: Entry) -> None:
        for visit in pull.users:
            visit.lease = self._lease(entry, visit)
        self.saves.publish(entry)

    async def _arrival(self, visit: Visit, number: int) -> m.Nothing | None:
        """Wait for the visit's pull; None when its lease is there, else why not."""
        pull = visit.pull
        await asyncio.wait({pull.task})
        if visit.lease is not None:
            return None
        error = None if pull.task.cancelled() else pull.task.exception()
        kind = error.kind if isinstance(error, Fallback) else "fault" if error else "forgotten"
        self.outcomes[kind] += 1
        self._lose(kind, pull.granted.grant.tokens - (visit.spare.entry.tokens if visit.spare is not None else 0))
        visit.pull, visit.lease, visit.spare, visit.source = None, visit.spare, None, "local"
        return None if visit.lease is not None else m.Nothing(number, kind, str(error or "the request has ended"))

    def _lose(self, kind: str, tokens: int) -> None:
        if tokens > 0 and kind != "forgotten":
            self.lost[kind] += tokens

    # ---- visits

    def _visit(self, request: str, tenant: str, owner: str) -> Visit | None:
        visit = self.visits.get(request)
        if visit is None and len(self.visits) < MAX_VISITS:
            visit = self.visits[request] = Visit(request, self._names(tenant), owner)
        return visit

    def _let_go(self, visit: Visit) -> None:
        for lease in (visit.lease, visit.spare):
            if lease is not None:
                self._end(lease)
        pull, visit.lease, visit.spare, visit.pull = visit.pull, None, None, None
        if pull is not None:
            self.pulls.leave(pull, visit)

    def _lease(self, entry: Entry, visit: Visit) -> Lease:
        """Held until the visit lets go: it ends with the process that it is for."""
        return self.store.lease(entry, f"request {visit.request}", float("inf"), self._loop.time())

    def _end(self, lease: Lease) -> bool:
        held = self.store.end(lease.id, self._loop.time()) is not None
        self.store.unpin(lease.id, lease.entry)
        return held

    def _local(self, keys: Sequence[bytes], beyond: int) -> tuple[int, Entry | None]:
        """Index of the first key that leads to an entry here, with the entry; all keys otherwise."""
        for i, key in enumerate(keys):
            entry = self.store.find(key)
            if entry is not None and entry.tokens > beyond:
                return i, entry
        return len(keys), None

    def _keys_of_ids(self, names: Names, ids: np.ndarray) -> list[bytes]:
        """Names of the points that a prompt of these ids may have been saved at, the longest first."""
        chain = names.chain(ids)
        last = (len(ids) - 1) // 2 * 2
        points = {last, *range(self._resume_tokens, last + 1, self._resume_tokens)}
        keys = []
        for point in sorted((point for point in points if point > 0), reverse=True):
            full = point // BLOCK_TOKENS
            keys.append(names.entry(chain[full - 1] if full else names.root, ids[full * BLOCK_TOKENS : point]))
        return keys

    def _freed(self, entry: Entry) -> None:
        self.outcomes["evicted"] += 1
        if self._directory is not None:
            self._directory.withdraw(entry.id)
