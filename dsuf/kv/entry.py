"""What an entry, a lease and a wish for an entry are; `entries.py` says what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from dsuf.errors import EnvironmentProblem
from dsuf.kv.names import BLOCK_TOKENS, Names

EXTRA_IDS = 3  # ids beyond `tokens` that an entry may know, up to the end of a segment


class NoRoom(EnvironmentProblem):
    """Everything else is leased, being written, or too small to help."""


class State(Enum):
    """Where an entry is in its life."""

    WRITING = "writing"
    READY = "ready"
    FREED = "freed"


@dataclass(eq=False)
class Entry:
    """One saved prefix."""

    id: int  # random; tells this very entry from an earlier one of the same name
    name: bytes
    names: Names  # of its tenant
    tokens: int
    pages: np.ndarray  # slots uint32 [ceil(tokens / 128)]
    snapshot: np.ndarray  # slots uint32 [snapshot_slots]
    new_pages: np.ndarray  # indices into `pages` that its writer fills; the others are shared
    block_names: list[bytes]  # of its full pages from the first new one on, while WRITING
    last_block: bytes  # name of its last full block, or the chain's root
    tail: np.ndarray  # ids after the last full block, up to EXTRA_IDS beyond `tokens`
    periodic: bool  # saved inside a long prefill or reply, not at an end of a turn
    fetched: bool  # came from a peer, which may have it still
    writer: str  # whose death frees it while WRITING
    used_s: float
    state: State = State.WRITING
    superseded: bool = False  # a longer continuation lives on another server
    continues: bytes = b""  # name of a peer's entry that its conversation was continued from
    wanted_keys: list[tuple[bytes, int]] = field(default_factory=list)  # keys to get once it is READY
    instead: Entry | None = None  # the equal one that was READY before, if this one was freed for it
    keys: dict[bytes, int] = field(default_factory=dict)  # found by: its name and segments -> ids up to there
    leases: set[int] = field(default_factory=set)

    @property
    def full_pages(self) -> int:
        """Pages whose 128 tokens are all there."""
        return self.tokens // BLOCK_TOKENS

    @property
    def slots(self) -> np.ndarray:
        """All its slots, pages first."""
        return np.concatenate([self.pages, self.snapshot])

    @property
    def new_slots(self) -> np.ndarray:
        """The slots that are its own from the start: those its writer fills."""
        return np.concatenate([self.pages[self.new_pages], self.snapshot])


@dataclass(frozen=True)
class Lease:
    """One reader's right to an entry's bytes until `until_s`."""

    id: int
    entry: Entry
    holder: str
    until_s: float


@dataclass(frozen=True)
class Wanted:
    """What to reserve: the first `tokens` of `ids`, where `ids` follows the ids of `base` if there is one."""

    names: Names
    ids: np.ndarray  # uint32; up to EXTRA_IDS beyond `tokens`
    tokens: int  # in all, base included
    writer: str
    base: Entry | None = None
    periodic: bool = False
    fetched: bool = False
