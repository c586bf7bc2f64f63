"""What the web and engine processes ask the agent over its Unix socket, and what it answers; `id` pairs the two.

A request is known by its id from LOOKUP or RESERVE until FORGET. Token ids and slots travel as little-endian u32.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Source = Literal["local", "remote"]
FOUND, NONE = b"found", b"none"  # what web tells the engine of its look-up: the engine claims, or does not look again


class Message(msgspec.Struct, frozen=True, tag=str.lower):
    """Its kind travels as the name of its class in lower case."""


class Numbered(Message):
    """A question that is answered, or its answer."""

    id: int


class Lookup(Numbered, omit_defaults=True):
    """The longest saved prefix, by SHA-256 of rendered bytes (longest first) or by the prompt's ids; leases it."""

    request: str
    tenant: str
    segments: list[bytes] = []
    ids: bytes = b""
    beyond: int = 0  # only prefixes longer than this are of use


class Found(Numbered):
    """There is one. `ids` reach to the end of the segment that was found, `tokens` of them are in the cache."""

    tokens: int
    source: Source
    ids: bytes


class Nothing(Numbered):
    """There is none, or it did not come; `kind` is one word for the counters."""

    kind: str
    reason: str


class Claim(Numbered):
    """Engine: give me what LOOKUP found; answered when its bytes are in the arena."""

    request: str


class Claimed(Numbered):
    """The entry's slots, pages first; they stay until RELEASE."""

    entry: int
    tokens: int
    source: Source
    pages: int
    slots: bytes
    proof: bytes  # xxh3-128 of the entry's ids, for a check against the prompt's


class Release(Numbered):
    """Engine: the bytes have been copied out. Answered by Done: whether they were what they are until now."""

    request: str


class Reserve(Numbered, omit_defaults=True):
    """Engine: room for a prefix of `tokens` tokens."""

    request: str
    tenant: str
    tokens: int
    ids: bytes  # those after `base`, up to three beyond `tokens`
    base: int = 0  # an entry that `ids` goes on from; 0: none
    periodic: bool = False
    segments: list[tuple[int, bytes]] = []  # ends of segments (ids up to there) with their SHA-256


class Reserved(Numbered):
    """Fill these: page number `new[i]` goes into `slots[i]`, the snapshot into the slots after them."""

    entry: int
    new: bytes
    slots: bytes


class Ready(Numbered):
    """Engine: every byte is written (the copy's own event has completed). Answered by Done."""

    entry: int


class Abandon(Message):
    """Engine: the reserved entry will not be filled."""

    entry: int


class Alias(Numbered):
    """Web: the rendered bytes of what this request ended with; `last` are the ids that end at `boundary`.

    Answered by Done when the entry of that end has been announced, or cannot be any more.
    """

    request: str
    digest: bytes
    boundary: int
    last: bytes


class Forget(Message):
    """The request has ended, however: whatever is held for it is let go."""

    request: str


class Prefilled(Message):
    """Engine: what recomputing costs."""

    tokens_per_s: float


class StatusAsk(Numbered):
    """Ask for State."""


class Leave(Message):
    """The server drains: peers may still read what is here, and soon no more."""

    draining: bool


class Done(Numbered):
    """Done, or not; `entry` is the one that counts, where an equal one was there before."""

    ok: bool
    entry: int = 0


class State(Numbered):
    """Counters and gauges, and what a person wants to know at the start."""

    numbers: dict[str, float]
    lines: list[str]


class Geometry(Message):
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
