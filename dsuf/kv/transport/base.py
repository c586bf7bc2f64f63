"""What moves bytes from a peer's arena into ours, and nothing else: names, leases and digests are the caller's.

Everything is called from the agent's event loop. Offsets are bytes from the first byte of an arena. Order at the owner:

    lease granted -> expose() -> ticket travels ... released | lapsed | reader gone -> revoke() -> bytes are free

Order at the reader: link() once for a peer, read() for each pull; after a read that failed, was cancelled or was too
late: abort(), and only then may the destination be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dsuf.errors import EnvironmentProblem


class TransportUnavailable(EnvironmentProblem):
    """This machine, or this pair of machines, cannot use the path; the message is the reason."""


class TransferFailed(EnvironmentProblem):
    """A link broke, was refused or was cut off; the reader recomputes."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous range of the owner's arena."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Read:
    """A range that is contiguous on both sides: `remote` in the owner's arena, `local` in the reader's."""

    remote: int
    local: int
    length: int


class Place(Protocol):
    """Where an owner is, for a transport that makes a link to it."""

    key: str  # changes when that server restarts
    host: str  # address of the control connection
    offer: bytes  # what the owner's transport of the same name offered


class Peer(Place, Protocol):
    """An owner whose transport can be asked on the way to a link."""

    async def ask(self, body: bytes) -> bytes:
        """What the owner's transport answers, over the authenticated connection. Raises TransferFailed."""
        ...


class Link(Protocol):
    """One reader's way into one owner's arena; it does one read at a time."""

    @property
    def alive(self) -> bool:
        """False once it broke; it is then closed and made anew."""
        ...

    async def read(self, ticket: bytes, reads: Sequence[Read]) -> None:
        """Bring all ranges; every byte is in the local arena when it returns. Raises TransferFailed."""
        ...

    async def abort(self) -> None:
        """After this no byte arrives any more and the link is dead. Never raises."""
        ...

    async def close(self) -> None:
        """Give back what the link holds. Never raises."""
        ...


class Transport(Protocol):
    """One path: `shm`, `tcp` or `rdma`. Serves readers and is one."""

    name: str

    def offer(self) -> bytes | None:
        """What peers must know to link to this server; None while the path cannot be used."""
        ...

    def report(self) -> list[str]:
        """Lines for people: what is usable, or why nothing is."""
        ...

    async def answer(self, peer: str, body: bytes) -> bytes:
        """Owner: answer `Peer.ask` of the control connection `peer`. Raises TransferFailed."""
        ...

    async def expose(self, peer: str, lease: int, extents: Sequence[Extent]) -> bytes:
        """Owner: make exactly these ranges readable for `peer`; the ticket for its `Link.read`."""
        ...

    async def revoke(self, lease: int) -> None:
        """Owner: after this no read of the lease succeeds. Idempotent; never raises."""
        ...

    async def gone(self, peer: str) -> None:
        """Owner: that control connection has ended. Idempotent; never raises."""
        ...

    async def link(self, peer: Peer) -> Link:
        """Reader: connect. Raises TransportUnavailable or TransferFailed."""
        ...

    async def close(self) -> None:
        """Give back everything. Never raises."""
        ...
