"""What the web and engine processes ask the agent over its Unix socket, and what it answers; `id` pairs the two.

A request is known by its id from LOOKUP or RESERVE until FORGET. Token ids and slots travel as little-endian u32.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Source = Literal["local", "remote"]
FOUND, NONE = b"found", b"none"  # what web tells the engine of its look-up: the engine claims, or does not look again


class Lookup(msgspec.Struct, frozen=True, tag="lookup", omit_defaults=True):
    """The longest saved prefix, by SHA-256 of rendered bytes (longest first) or by the prompt's ids; leases it."""

    id: int
    request: str
    tenant: str
    segments: list[bytes] = []
    ids: bytes = b""
    beyond: int = 0  # only prefixes longer than this are of use


class Found(msgspec.Struct, frozen=True, tag="found"):
    """There is one. `ids` reach to the end of the segment that was found, `tokens` of them are in the cache."""

    id: int
    tokens: int
    source: Source
    ids: bytes


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """There is none, or it did not come; `kind` is one word for the counters."""

    id: int
    kind: str
    reason: str


class Claim(msgspec.Struct, frozen=True, tag="claim"):
    """Engine: give me what LOOKUP found; answered when its bytes are in the arena."""

    id: int
    request: str


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """The entry's slots, pages first; they stay until RELEASE."""

    id: int
    entry: int
    tokens: int
    source: Source
    pages: int
    slots: bytes
    proof: bytes  # xxh3-128 of the entry's ids, for a check against the prompt's


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Engine: the bytes have been copied out. Answered by Done: whether they were what they are until now."""

    id: int
    request: str


class Reserve(msgspec.Struct, frozen=True, tag="reserve", omit_defaults=True):
    """Engine: room for a prefix of `tokens` tokens."""

    id: int
    request: str
    tenant: str
    tokens: int
    ids: bytes  # those after `base`, up to three beyond `tokens`
    base: int = 0  # an entry that `ids` goes on from; 0: none
    periodic: bool = False
    segments: list[tuple[int, bytes]] = []  # ends of segments (ids up to there) with their SHA-256


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """Fill these: page number `new[i]` goes into `slots[i]`, the snapshot into the slots after them."""

    id: int
    entry: int
    new: bytes
    slots: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Engine: every byte is written (the copy's own event has completed). Answered by Done."""

    id: int
    entry: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """Engine: the reserved entry will not be filled."""

    entry: int


class Alias(msgspec.Struct, frozen=True, tag="alias"):
    """Web: the rendered bytes of what this request ended with; `last` are the ids that end at `boundary`.

    Answered by Done when the entry of that end has been announced, or cannot be any more.
    """

    id: int
    request: str
    digest: bytes
    boundary: int
    last: bytes


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The request has ended, however: whatever is held for it is let go."""

    request: str


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """Engine: what recomputing costs."""

    tokens_per_s: float


class StatusAsk(msgspec.Struct, frozen=True, tag="status"):
    """Ask for State."""

    id: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The server drains: peers may still read what is here, and soon no more."""

    draining: bool


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Done, or not; `entry` is the one that counts, where an equal one was there before."""

    id: int
    ok: bool
    entry: int = 0


class State(msgspec.Struct, frozen=True, tag="state"):
    """Counters and gauges, and what a person wants to know at the start."""

    id: int
    numbers: dict[str, float]
    lines: list[str]


class Geometry(msgspec.Struct, frozen=True, tag="geometry"):
    """Sent once to whoever connects: the arena that the memory socket gives the descriptor of."""

    nbytes: int
    slot_bytes: int
    slots: int
    snapshot_slots: int
    backend: str  # that the agent's namespace is of


ToAgent = (
    Lookup | Claim | Release | Reserve | Ready | Abandon | Alias | Forget | Prefilled | StatusAsk | Leave
)  # fmt: skip
FromAgent = Geometry | Found | Nothing | Claimed | Reserved | Done | State
