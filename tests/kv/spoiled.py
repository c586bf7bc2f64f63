"""Transports and clocks that go wrong on purpose, and an owner in a process of its own."""

import asyncio
import multiprocessing
import os
import signal

from dsuf.kv.transport.base import TransferFailed
from tests.kv.fleet import conversation, digest, fleet

POINTS = ("link", "read", "half", "after")


class Spoiled:
    """A transport of which `act(point)` is called at each of POINTS; what that raises or does, happens there."""

    def __init__(self, inner, act):
        self._inner, self.act = inner, act
        self.name = inner.name

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def link(self, peer):
        await self.act("link")
        return SpoiledLink(await self._inner.link(peer), self)


class SpoiledLink:
    def __init__(self, inner, transport):
        self._inner, self._transport = inner, transport

    @property
    def alive(self):
        return self._inner.alive

    async def read(self, ticket, reads):
        act = self._transport.act
        await act("read")
        middle = max(1, len(reads) // 2)
        await self._inner.read(ticket, reads[:middle])
        await act("half")
        if reads[middle:]:
            await self._inner.read(ticket, reads[middle:])
        await act("after")

    async def abort(self):
        await self._inner.abort()

    async def close(self):
        await self._inner.close()


def spoil(node, act):
    """Let `act` into every transport of a node."""
    transports = node.agent.transports
    for name in list(transports):
        transports[name] = Spoiled(getattr(transports[name], "_inner", transports[name]), act)


def at(point, deed):
    """An `act` that does `deed()` the first time that `point` comes."""
    done = []

    async def act(where):
        if where == point and not done:
            done.append(where)
            result = deed()
            if asyncio.iscoroutine(result):
                await result

    return act


def fail():
    raise TransferFailed("on purpose")


class OwnerProcess:
    """An agent in another process, with entries `0`, `1`, ... of 1,280 tokens that can be found by their digests."""

    def __init__(self, folder, redis_url, paths, entries=3):
        self._here, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_own, args=(there, folder, redis_url, paths, entries), daemon=True
        )
        self._process.start()
        there.close()
        self._here.recv()

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.join()

    def freeze(self):
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self):
        os.kill(self.pid, signal.SIGCONT)


def _own(pipe, folder, redis_url, paths, entries):
    async def main():
        async with fleet(folder, "o", redis_url, paths=paths) as (node,):
            for i in range(entries):
                await node.save(conversation(i, 1280), segments=[(1280, digest(str(i)))])
            await node.announced()
            pipe.send("ready")
            await asyncio.sleep(3600)

    asyncio.run(main())
