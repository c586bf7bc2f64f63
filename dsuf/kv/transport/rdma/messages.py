"""What the two ends of RDMA tell each other over the control connection: ports, queue pairs, and keys for a lease.

    offer    Offer                      in the greeting: the ports that the owner has
    link     Connect -> Connected       a queue pair on each pair of ports that reach each other
    grant    Ticket                     the ranges of a lease
    read     Open -> Keys               windows over these ranges, bound to the queue pairs of this very link

Nothing of it is ever in the directory: a queue pair's number with a key is a capability.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from dsuf.kv.transport.base import TransferFailed

VERSION = 1


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """One end of a connection. `mtu` is verbs' code; `reads` is how many READs it serves at once."""

    kind: str
    gid: str
    lid: int
    number: int
    psn: int
    mtu: int
    reads: int


class OfferedPort(msgspec.Struct, frozen=True, array_like=True):
    """A port by name, the kinds of address it has, best first, and its rate."""

    name: str
    kinds: list[str]
    gbps: float


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Usable ports, fastest first."""

    version: int
    ports: list[OfferedPort]


class Connect(msgspec.Struct, frozen=True, array_like=True, tag="connect"):
    """`rails`: (the owner's port, our end). `closed`: numbers of links that have ended here."""

    rails: list[tuple[str, Hello]]
    closed: list[int]


class Connected(msgspec.Struct, frozen=True, array_like=True):
    """`address` of the owner's arena in its memory; `rails` in the order of Connect, None where it did not work."""

    link: int
    address: int
    rails: list[Hello | None]


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Open this lease for this link."""

    link: int
    lease: int


class Keys(msgspec.Struct, frozen=True, array_like=True):
    """For each rail of the link a key for each range of the ticket; no key at all for a rail that is out."""

    rails: list[list[int]]


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A lease and its ranges (offset, length) of the owner's arena, ascending."""

    lease: int
    windows: list[tuple[int, int]]


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """As msgpack."""
    return msgspec.msgpack.encode(message)


def decode(body: bytes, kind: type[Message]) -> Message:
    """A message of this kind. Raises TransferFailed."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise TransferFailed(f"rdma: a message of the peer cannot be read: {error}") from None


def pair_ports(own: list[OfferedPort], theirs: list[OfferedPort]) -> list[tuple[OfferedPort, OfferedPort, str]]:
    """(own, theirs, kind of address) of ports that reach each other, in the order of `own`, each used once."""
    pairs, free = [], list(theirs)
    for port in own:
        for other in free:
            common = [kind for kind in port.kinds if kind in other.kinds]
            if common:
                pairs.append((port, other, common[0]))
                free.remove(other)
                break
    return pairs
