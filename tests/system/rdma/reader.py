"""What the checks work with at the reader's side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from dsuf.kv.arena import Arena
from dsuf.kv.transport.base import TransferFailed
from dsuf.kv.transport.rdma import RdmaTransport, queue_pair
from dsuf.kv.transport.rdma.link import RdmaLink
from tests.system.rdma.owner import SLOT_BYTES, RemoteOwner, slot_reads


@dataclass
class Given:
    """What a check works with."""

    arena: Arena
    transport: RdmaTransport
    owner: RemoteOwner

    async def link(self) -> RdmaLink:
        return await self.transport.link(self.owner)

    async def lease(self, slots: list[int]) -> tuple[int, bytes]:
        return await self.owner.expose([(slot * SLOT_BYTES, SLOT_BYTES) for slot in slots])

    def arrived(self) -> int:
        """How many slots of our arena are not empty."""
        starts = range(0, self.arena.slots * SLOT_BYTES, SLOT_BYTES)
        return sum(
            any(self.arena.view[start : start + 16]) or any(self.arena.view[start + SLOT_BYTES // 2 :][:16])
            for start in starts
        )

    @property
    def slots(self) -> list[int]:
        """All slots of the owner's arena, which is as large as ours."""
        return list(range(self.arena.slots))

    async def under_way(self, link: RdmaLink, ticket: bytes) -> asyncio.Task[None]:
        """A read of all slots into our emptied arena, of which the first bytes have come."""
        self.arena.view[:] = bytes(self.arena.nbytes)
        reading = asyncio.create_task(link.read(ticket, slot_reads(self.slots, self.slots)))
        await until(lambda: self.arrived() > 0)
        return reading

    async def new_link_works(self) -> None:
        """A small read over a fresh link."""
        link = await self.link()
        lease, ticket = await self.lease([3])
        await link.read(ticket, slot_reads([3], [0]))
        await self.owner.call("revoke", lease)
        await link.close()


@contextmanager
def few_posted() -> Iterator[None]:
    """Few READs on their way at once: with many the kernel is busy until the last byte, and a check gets no turn."""
    with mock.patch.object(queue_pair, "DEPTH", 2):
        yield


@contextmanager
def refused(reason: str) -> Iterator[None]:
    """The transfer must fail with this reason."""
    try:
        yield
    except TransferFailed as error:
        assert reason in str(error), error
    else:
        raise AssertionError("the transfer was let through")


def usable_ports(report: list[str]) -> int:
    return sum("keys by" in line for line in report)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.02)
