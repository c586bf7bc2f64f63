"""What a reader asks an owner over a control connection, and what it is answered. `id` pairs the two.

Token ids travel as little-endian u32, slots as u32, digests as 16 bytes each. A grant carries at most IDS_IN_GRANT ids;
the reader asks for the others by `More`.
"""

from __future__ import annotations

import msgspec

IDS_IN_GRANT = 65_536
MAX_TTL_MS = 60_000


class Frame(msgspec.Struct, frozen=True, tag=str.lower):
    """One question or answer; its kind travels as the name of its class in lower case."""

    id: int


class LeaseAsk(Frame):
    """Let me read the entry that your announcement named, by this path."""

    key: bytes
    entry: int
    boot: str
    path: str
    ttl_ms: int


class Grant(Frame):
    """The entry, held for `ttl_ms` from now, and how to read it."""

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


class Miss(Frame):
    """Not to be had here."""

    reason: str  # gone, boot, leaving, busy, path


class More(Frame):
    """Further ids of a leased entry, from `start`."""

    lease: int
    start: int


class Part(Frame):
    """Ids from where they were asked for; empty when the lease is no more."""

    ids: bytes


class Renew(Frame):
    """Hold it longer."""

    lease: int
    ttl_ms: int


class Release(Frame):
    """I have read what I wanted, or given up."""

    lease: int


class Held(Frame):
    """Whether the lease had been held without a gap until now; if not, what was read does not count."""

    held: bool


class Ask(Frame):
    """One transport's question to its twin."""

    path: str
    body: bytes


class Answer(Frame):
    """The twin's answer, or why there is none."""

    body: bytes
    error: str = ""


ToOwner = LeaseAsk | More | Renew | Release | Ask
ToReader = Grant | Miss | Part | Held | Answer
