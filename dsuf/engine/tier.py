"""What the engine asks of the thing that keeps caches of earlier conversations; `dsuf.kv` answers it.

Every call comes from the engine's thread, returns within about a millisecond and never raises: in any doubt there is no
hit, or nothing is saved. `key` is the id of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, TypeAlias

from dsuf.engine.messages import Request

Buffer: TypeAlias = memoryview | bytearray  # bytes of the host


class Pending(Enum):
    """A look-up or a transfer is still under way."""

    PENDING = "pending"


PENDING = Pending.PENDING


@dataclass(frozen=True)
class Hit:
    """The cache of the first `position` tokens of a prompt; its bytes stay until `restored` or `forget`."""

    position: int
    source: Literal["local", "remote"]
    pages: Items[Buffer]  # all pages of `position` tokens
    state: Items[Buffer]  # parts of the snapshot, in order


@dataclass(frozen=True)
class Reserved:
    """Memory for an entry that the engine fills: the pages that are not there yet by number, and the snapshot."""

    pages: Mapping[int, Buffer]
    state: Items[Buffer]


class Tier(Protocol):
    """Finds, takes and gives caches at resume points."""

    @property
    def memory(self) -> memoryview | None:
        """Where all bytes of hits and entries lie: another object once it was replaced, None while there is none."""
        ...

    def want(self, key: str, request: Request) -> None:
        """A request came: take over its lease, look it up, begin a transfer."""
        ...

    def found(self, key: str) -> Hit | Pending | None:
        """Asked every turn until it is not PENDING any more; the request does not start before."""
        ...

    def restored(self, key: str) -> None:
        """The hit's bytes have been copied."""
        ...

    def reserve(self, key: str, ids: Items[int], position: int, *, periodic: bool) -> Reserved | None:
        """Memory for the first `position` of `ids`, which are all the tokens so far; None: do not save.

        `periodic`: inside a long prompt or reply, not at an end of either.
        """
        ...

    def ready(self, reserved: Reserved) -> None:
        """Every byte is there."""
        ...

    def forget(self, key: str) -> None:
        """The request ended and nothing is copied for it any more: what it still holds may go."""
        ...

    def measured(self, rows: int, seconds: float) -> None:
        """So long did it take to compute so many prompt rows: what a transfer is weighed against."""
        ...

    def wait(self, seconds: float) -> None:
        """There is nothing to do but wait for what is PENDING: sleep at most this long."""
        ...
