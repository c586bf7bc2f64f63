"""The cache tier of `dsuf.kv` as the engine asks for it: questions to the agent, bytes in the mapped arena.

The agent answers in well under a millisecond; where one answer is waited for (RESERVE), it is for WAIT_S at most. A
request whose answer does not come starts without a hit, and a save that finds no answer is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dsuf.engine.backend import Limits
from dsuf.engine.messages import Request
from dsuf.engine.shared import NumberedPages, SharedPages
from dsuf.engine.tier import PENDING, Buffer, Hit, Pending, Reserved
from dsuf.kv import messages as m
from dsuf.kv.arena import runs
from dsuf.kv.client import EngineClient
from dsuf.kv.names import ids_bytes

WAIT_S = 0.2
STARTS_WITHIN_S = 15.0
GIVE_UP_S = 30.0  # of a claim; the agent's own deadline for a pull is shorter
_EXTRA_IDS = 3  # after the position of an entry, up to the end of a segment
_TELL_EVERY_S = 1.0


@dataclass(frozen=True)
class KvReserved(Reserved):
    """An entry of the agent that the engine fills."""

    entry: int = 0


@dataclass
class _Visit:
    """What is known of one request."""

    request: Request
    asked_s: float
    answer: Future[Any] | None = None  # to LOOKUP, then to CLAIM
    base: int = 0  # latest entry of the agent that this sequence goes on from, and its tokens
    base_tokens: int = 0
    refused: set[int] = field(default_factory=set)  # positions that need not be asked for again


def connect_tier(socket_path: Path, limits: Limits) -> KvTier:
    """The tier behind an agent's socket, for a backend with these limits; waits for an agent that is starting."""
    client = EngineClient(socket_path)
    deadline = time.monotonic() + STARTS_WITHIN_S
    while not client.connect() and time.monotonic() < deadline:
        time.sleep(0.02)
    return KvTier(client, limits)


class KvTier:
    """See `dsuf.engine.tier.Tier`. Without an agent there are no hits, and nothing is saved."""

    def __init__(self, client: EngineClient, limits: Limits) -> None:
        self._client, self._limits = client, limits
        self._visits: dict[str, _Visit] = {}
        self._rows, self._seconds, self._told_s = 0, 0.0, 0.0

    @property
    def memory(self) -> memoryview | None:
        return self._client.view

    def want(self, key: str, request: Request) -> None:
        visit = self._visits[key] = _Visit(request, time.monotonic())
        if request.lease == m.NONE or not self._fits():
            return
        if request.lease == m.FOUND:
            visit.answer = self._client.claim(key)
        else:
            visit.answer = self._client.lookup_ids(key, request.tenant, request.prompt_ids)

    def found(self, key: str) -> Hit | Pending | None:
        visit = self._visits[key]
        if visit.answer is None:
            return None
        if not visit.answer.done():
            if time.monotonic() - visit.asked_s < GIVE_UP_S:
                return PENDING
            visit.answer = None
            return None
        answer, visit.answer = visit.answer.result(), None
        if isinstance(answer, m.Found):
            visit.answer = self._client.claim(key)
            return PENDING
        return self._hit(visit, answer) if isinstance(answer, m.Claimed) else None

    def restored(self, key: str) -> None:
        self._client.release(key)

    def reserve(self, key: str, ids: Items[int], position: int, *, periodic: bool) -> Reserved | None:
        visit = self._visits.get(key)
        if visit is None or position in visit.refused or not self._fits():
            return None
        answer = self._ask(key, visit, ids, position, periodic)
        if isinstance(answer, m.Nothing) and answer.kind == "base":
            visit.base = visit.base_tokens = 0
            answer = self._ask(key, visit, ids, position, periodic)
        if not isinstance(answer, m.Reserved):
            visit.refused.add(position)
            return None
        visit.base, visit.base_tokens = answer.entry, position
        if not answer.slots:  # it is saved already
            visit.refused.add(position)
            return None
        new, slots = np.frombuffer(answer.new, "<u4").astype(np.int64), np.frombuffer(answer.slots, "<u4")
        pages = NumberedPages(new, self._pages(slots[: len(new)]))
        return KvReserved(pages, self._buffers(runs(slots[len(new) :])), answer.entry)

    def ready(self, reserved: Reserved) -> None:
        self._client.ready(reserved.entry)

    def forget(self, key: str) -> None:
        if self._visits.pop(key, None) is not None:
            self._client.tell(m.Forget(key))

    def measured(self, rows: int, seconds: float) -> None:
        self._rows, self._seconds = self._rows + rows, self._seconds + seconds
        now = time.monotonic()
        if self._seconds > 0 and now - self._told_s > _TELL_EVERY_S:
            self._client.tell(m.Prefilled(self._rows / self._seconds))
            self._rows, self._seconds, self._told_s = 0, 0.0, now

    def wait(self, seconds: float) -> None:
        self._client.wait(seconds)

    def _fits(self) -> bool:
        """Whether there is an agent, and it was started for this backend and these sizes."""
        if not self._client.connected:
            return False
        geometry = self._client.geometry
        parts = -(-self._limits.snapshot_bytes // geometry.slot_bytes)
        ours = (self._limits.backend, self._limits.page_bytes, parts)
        return (geometry.backend, geometry.slot_bytes, geometry.snapshot_slots) == ours

    def _hit(self, visit: _Visit, claimed: m.Claimed) -> Hit | None:
        """The claimed entry, if it is one of this very prompt."""
        ids = ids_bytes(visit.request.prompt_ids[: claimed.tokens])
        if len(ids) != 4 * claimed.tokens or xxhash.xxh3_128_digest(ids) != claimed.proof:
            self._client.release(visit.request.id)
            return None
        visit.base, visit.base_tokens = claimed.entry, claimed.tokens
        slots = np.frombuffer(claimed.slots, "<u4")
        pages = self._pages(slots[: claimed.pages])
        return Hit(claimed.tokens, claimed.source, pages, self._buffers(runs(slots[claimed.pages :])))

    def _pages(self, slots: np.ndarray) -> SharedPages:
        return SharedPages(self._client.view, self._client.geometry.slot_bytes, slots)

    def _buffers(self, extents: list[tuple[int, int]]) -> list[Buffer]:
        """Memory of each (first slot, slots)."""
        size, memory = self._client.geometry.slot_bytes, self._client.view
        return [memory[first * size : (first + count) * size] for first, count in extents]

    def _ask(self, key: str, visit: _Visit, ids: Items[int], position: int, periodic: bool) -> m.Reserved | m.Nothing:
        """RESERVE, waiting a little for the answer."""
        request, start = visit.request, visit.base_tokens if visit.base_tokens <= position else 0
        near = [segment for segment in request.segments if 0 <= segment[0] - position <= _EXTRA_IDS]
        ask = m.Reserve(
            id=0,
            request=key,
            tenant=request.tenant,
            tokens=position,
            ids=ids_bytes(ids[start : position + _EXTRA_IDS]),
            base=visit.base if start else 0,
            periodic=periodic,
            segments=near,
        )
        future = self._client.reserve(ask)
        try:
            return future.result(WAIT_S)
        except TimeoutError:
            future.add_done_callback(self._abandon)
            return m.Nothing(0, "late", "the kv agent is busy")

    def _abandon(self, future: Future[Any]) -> None:
        """An answer that came too late: nobody will fill that entry."""
        answer = None if future.cancelled() else future.result()
        if isinstance(answer, m.Reserved) and answer.slots:
            self._client.tell(m.Abandon(answer.entry))
