"""What a reader asks an owner over a control connection, and what it is answered. `id` pairs the two.

Token ids travel as little-endian u32, slots as u32, digests as 16 bytes each. A grant carries at most IDS_IN_GRANT ids;
the reader asks for the others by `More`.
"""

from __future__ import annotations

import msgspec

IDS_IN_GRANT = 65_536
MAX_TTL_MS = 60_000


class LeaseAsk(msgspec.Struct, frozen=True, tag="lease"):
    """Let me read the entry that your announcement named, by this path."""

    id: int
    key: bytes
    entry: int
    boot: str
    path: str
    ttl_ms: int


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The entry, held for `ttl_ms` from now, and how to read it."""

    id: int
    lease: int
    ttl_ms: int
    name: bytes
    tokens: int
    known_ids: int  # tokens and up to three more
    keys: list[tuple[bytes, int]]  # what else it is found by -> ids up to there
    pages: int  # of the slots, the first ones
    slots: bytes
    digests: bytes
    ids: bytes  # the first ones
    ticket: bytes  # for the transport


class Miss(msgspec.Struct, frozen=True, tag="miss"):
    """Not to be had here."""

    id: int
    reason: str  # gone, boot, leaving, busy, path


class More(msgspec.Struct, frozen=True, tag="more"):
    """Further ids of a leased entry, from `start`."""

    id: int
    lease: int
    start: int


class Part(msgspec.Struct, frozen=True, tag="part"):
    """Ids from where they were asked for; empty when the lease is no more."""

    id: int
    ids: bytes


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Hold it longer."""

    id: int
    lease: int
    ttl_ms: int


class Release(msgspec.Struct, frozen=True, tag="release"):
    """I have read what I wanted, or given up."""

    id: int
    lease: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Whether the lease had been held without a gap until now; if not, what was read does not count."""

    id: int
    held: bool


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """One transport's question to its twin."""

    id: int
    path: str
    body: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The twin's answer, or why there is none."""

    id: int
    body: bytes
    error: str = ""


ToOwner = LeaseAsk | More | Renew | Release | Ask
ToReader = Grant | Miss | Part | Held | Answer
