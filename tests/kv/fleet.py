"""Agents in one event loop, with a stand-in for the engine whose cache bytes are a known function of the ids."""

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass

import numpy as np

from dsuf.kv import messages as m
from dsuf.kv.agent import Agent, AgentOptions
from dsuf.kv.names import ids_array, ids_bytes

SLOT, SNAPSHOT = 512, 700  # a snapshot takes two slots


def conversation(seed, tokens):
    return np.random.default_rng(seed).integers(0, 100_000, tokens, dtype=np.uint32)


def page_bytes(ids, index):
    """What the engine would have in page `index` of a sequence that begins with `ids`."""
    return _stretch(b"page" + ids_bytes(ids[: 128 * (index + 1)]), SLOT)


def snapshot_bytes(ids):
    """What it would have in the snapshot after `ids`, filled up to whole slots."""
    return _stretch(b"snapshot" + ids_bytes(ids), 2 * SLOT)


def _stretch(seed, count):
    return hashlib.shake_128(seed).digest(count)


def digest(text):
    return hashlib.sha256(text.encode()).digest()


@dataclass
class Turn:
    """What one request got."""

    source: str
    tokens: int
    ids: list[int]
    why: str = ""


class Node:
    """One server's agent and its engine."""

    def __init__(self, agent):
        self.agent, self.desk = agent, agent.desk

    async def save(self, ids, tokens=None, *, request="save", tenant="", segments=(), **more):
        """What the engine does: RESERVE, fill, READY. The answer to READY, or the refusal."""
        tokens = len(ids) if tokens is None else tokens
        ask = m.Reserve(1, request, tenant, tokens, ids_bytes(ids), segments=list(segments), **more)
        reserved = self.desk.reserve(ask, "engine")
        if isinstance(reserved, m.Nothing):
            return reserved
        self.fill(reserved, ids, tokens)
        return await self.desk.saves.ready(m.Ready(2, reserved.entry), "engine")

    def fill(self, reserved, ids, tokens):
        slots, new = ids_array(reserved.slots).tolist(), ids_array(reserved.new).tolist()
        for slot, index in zip(slots, new, strict=False):
            self.agent.arena.bytes_of(slot)[:] = page_bytes(ids[:tokens], index)
        for i, slot in enumerate(slots[len(new) :]):
            self.agent.arena.bytes_of(slot)[:] = snapshot_bytes(ids[:tokens])[i * SLOT : (i + 1) * SLOT]

    async def announced(self):
        """Wait until Redis knows what this node has."""
        while self.agent.directory._dirty:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.005)

    async def turn(self, segments=(), *, ids=None, request="turn", tenant="", reference=None):
        """LOOKUP, CLAIM, compare every byte with what the engine would have computed, RELEASE, FORGET."""
        try:
            return await self.held_turn(segments, ids=ids, request=request, tenant=tenant)
        finally:
            self.forget(request)

    def forget(self, request):
        """Whoever reads and whoever asked say that the request has ended."""
        visit = self.desk.visits.get(request)
        for client in (visit.reader, visit.owner) if visit else ():
            if client:
                self.desk.forget(request, client)

    async def held_turn(self, segments=(), *, ids=None, request="turn", tenant="", owner="web"):
        data = b"" if ids is None else ids_bytes(ids)
        found = await self.desk.lookup(m.Lookup(1, request, tenant, list(segments), data), owner)
        if isinstance(found, m.Nothing):
            return Turn("none", 0, [], found.kind)
        claimed = await self.desk.claim(m.Claim(2, request), "reader")
        if isinstance(claimed, m.Nothing):
            return Turn("none", 0, ids_array(found.ids).tolist(), claimed.kind)
        got = ids_array(found.ids)
        self.compare(claimed, got[: claimed.tokens])
        assert self.desk.release(request)
        return Turn(claimed.source, claimed.tokens, got.tolist())

    def compare(self, claimed, ids):
        """I1: the bytes are those of these ids."""
        slots = ids_array(claimed.slots).tolist()
        for index, slot in enumerate(slots[: claimed.pages]):
            assert bytes(self.agent.arena.bytes_of(slot)) == page_bytes(ids, index), f"page {index}"
        got = b"".join(bytes(self.agent.arena.bytes_of(slot)) for slot in slots[claimed.pages :])
        assert got == snapshot_bytes(ids), "snapshot"

    async def settled(self):
        """I7: after everything, nothing is held."""
        for _ in range(400):
            store, pulls = self.agent.store, self.desk.pulls
            busy = pulls.running or self.agent.fetcher.undoing or pulls._background or store.leases
            if not busy and all(e.state.name == "READY" for e in store.entries.values()):
                break
            await asyncio.sleep(0.01)
        assert not store.leases and not pulls.running and not self.agent.fetcher.undoing
        assert all(entry.state.name == "READY" and not entry.leases for entry in store.entries.values())
        store.check()


def options(folder, name, redis_url=None, **changes):
    runtime = folder / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    defaults = dict(
        host_bytes=1000 * SLOT,
        slot_bytes=SLOT,
        snapshot_bytes=SNAPSHOT,
        namespace=b"n" * 32,
        runtime_dir=runtime,
        socket_path=folder / f"{name}.sock",
        backend="none",
        redis_url=redis_url,
        paths=("shm", "tcp"),
        resume_tokens=512,
    )
    return AgentOptions(**{**defaults, **changes})


@contextlib.asynccontextmanager
async def fleet(folder, names="ab", redis_url=None, **changes):
    """Nodes of these names that share one Redis."""
    agents, nodes = [], []
    try:
        for name in names:
            agents.append(Agent(options(folder, name, redis_url, **changes)))
            await agents[-1].open()
            nodes.append(Node(agents[-1]))
        yield nodes
    finally:
        for agent in reversed(agents):
            await agent.close()
