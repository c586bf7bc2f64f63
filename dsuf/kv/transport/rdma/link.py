"""A reader's way into one owner's arena over RDMA: one queue pair a rail, requests dealt by rate.

A read becomes READs of up to 1 MiB, each one range at the owner scattered over a few ranges here. They wait in one
line; each goes to the rail with the least on its way for its rate. A rail that breaks gives its requests back, and they
are asked for once more on the others. Completions may come in any order; a read is done when all have come, and it
fails only when nothing of it is on its way any more. Only `abort` and `close` end with requests on their way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsuf.kv.transport.base import Peer, Read, TransferFailed
from dsuf.kv.transport.rdma.messages import Keys, Open, Ticket, decode, encode
from dsuf.kv.transport.rdma.queue_pair import (
    FATAL,
    FLUSHED,
    GENERAL,
    LOCAL_OPERATION,
    RESPONSE_TIMEOUT,
    RETRIES_EXCEEDED,
    RNR_RETRIES_EXCEEDED,
    SUCCESS,
)
from dsuf.kv.transport.rdma.verbs import PIECE_BYTES

log = logging.getLogger(__name__)

# Completion statuses that say something of the rail and nothing against the request: another rail may do it. Soft-RoCE
# gives LOCAL_OPERATION when our own port went down.
REPEATED = (LOCAL_OPERATION, FLUSHED, RETRIES_EXCEEDED, RNR_RETRIES_EXCEEDED, FATAL, RESPONSE_TIMEOUT, GENERAL)
REQUEST_BYTES = 1 << 20
FLUSH_S = 1.0  # then the queue pair is destroyed, which waits for the adapter itself
REJOIN_S = 30.0  # a link that lost a rail is made anew after this


class Pair(Protocol):
    """What a link needs of a queue pair."""

    reason: str | None

    @property
    def room(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    def post_read(
        self, address: int, key: int, segments: Sequence[tuple[int, int]], done: Callable[[int], None]
    ) -> None: ...
    def fail(self, reason: str) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Rail:
    """One queue pair of a link. `keys`: one for each window of the lease being read, opened by the owner."""

    index: int  # its place in what is asked of the owner and answered
    name: str
    pair: Pair
    gbps: float
    keys: Sequence[int] = ()
    bytes_posted: int = 0
    lost: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """One READ: `length` bytes at `remote` in the owner's arena, scattered over `segments` (offset, length) of ours."""

    window: int
    remote: int
    length: int
    segments: list[tuple[int, int]]
    repeated: bool = False


class RdmaLink:
    """Reads from one owner, one read at a time. `address` is where the owner's arena begins in its memory."""

    def __init__(
        self,
        peer: Peer,
        number: int,
        address: int,
        rails: Sequence[Rail],
        max_segments: int,
        on_end: Callable[[int], None],
    ) -> None:
        self._peer, self._number, self._address, self._rails = peer, number, address, rails
        self._max_segments, self._on_end = max_segments, on_end
        self._waiting: deque[Request] = deque()
        self._posted, self._error = 0, None
        self._lease: int | None = None  # whose keys the rails have
        self._done: asyncio.Future[None] | None = None
        self._lost_rail_s: float | None = None
        self._ended: str | None = None
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether a read may succeed; also False when it is time to look for lost rails again."""
        if self._ended or not any(rail.pair.reason is None for rail in self._rails):
            return False
        return self._lost_rail_s is None or time.monotonic() - self._lost_rail_s < REJOIN_S

    async def read(self, ticket: bytes, reads: Sequence[Read]) -> None:
        """Bring all ranges. Raises TransferFailed, with nothing on its way any more."""
        if self._ended:
            raise TransferFailed(f"rdma: {self._ended}")
        granted = decode(ticket, Ticket)
        requests = split(reads, granted.windows, REQUEST_BYTES, self._max_segments)
        self._waiting, self._error = deque(requests), None
        if not self._waiting:
            return
        if granted.lease != self._lease:
            await self._open(granted)
        self._done = asyncio.get_running_loop().create_future()
        self._post()
        try:
            await self._done
        except asyncio.CancelledError:
            self._error = "cancelled"  # what waits is dropped, what is on its way is abort's
            self._waiting.clear()
            raise

    async def _open(self, granted: Ticket) -> None:
        """Have the owner open the lease for our queue pairs."""
        self._lease = None
        opened = decode(await self._peer.ask(encode(Open(self._number, granted.lease))), Keys).rails
        for rail in self._rails:
            rail.keys = opened[rail.index] if rail.index < len(opened) else ()
            if len(rail.keys) not in (0, len(granted.windows)):
                raise TransferFailed("rdma: the owner did not send one key for each range")
        self._lease = granted.lease

    def _post(self) -> None:
        """Post what waits as long as a rail has room; settle the read when nothing is left to do."""
        while self._waiting and self._error is None:
            usable = [rail for rail in self._rails if rail.pair.reason is None and rail.keys]
            if not usable:
                self._error = self._why()
                break
            free = [rail for rail in usable if rail.pair.room]
            if not free:
                return
            request = self._waiting.popleft()
            rail = min(free, key=lambda rail: (rail.bytes_posted + request.length) / rail.gbps)
            self._post_on(rail, request)
        self._settle()

    def _post_on(self, rail: Rail, request: Request) -> None:
        try:
            rail.pair.post_read(
                self._address + request.remote,
                rail.keys[request.window],
                request.segments,
                lambda status: self._completed(rail, request, status),
            )
        except TransferFailed as error:
            self._error = str(error)
        else:
            self._posted += 1
            rail.bytes_posted += request.length

    def _completed(self, rail: Rail, request: Request, status: int) -> None:
        self._posted -= 1
        rail.bytes_posted -= request.length
        if status != SUCCESS:
            self._note_loss(rail)
            if status in REPEATED and not request.repeated and not self._ended:
                request.repeated = True
                self._waiting.appendleft(request)
            else:
                self._error = self._error or f"{rail.name}: {rail.pair.reason}"
        self._post()

    def _settle(self) -> None:
        """End the read once nothing of a failed one can arrive any more, or all of a good one has."""
        if self._posted or self._done is None or self._done.done():
            return
        if self._error is not None:
            self._waiting.clear()
            self._done.set_exception(TransferFailed(f"rdma: {self._error}"))
        elif not self._waiting:
            self._done.set_result(None)

    def _note_loss(self, rail: Rail) -> None:
        if rail.lost or self._ended:
            return
        rail.lost, self._lost_rail_s = True, time.monotonic()
        log.warning("rdma: lost the rail %s: %s", rail.name, rail.pair.reason)

    def _why(self) -> str:
        return self._ended or "; ".join(f"{rail.name}: {rail.pair.reason or 'not opened'}" for rail in self._rails)

    async def abort(self) -> None:
        """Cut every READ off; after this no byte arrives any more. Never raises."""
        self._ended = self._ended or "given up"
        for rail in self._rails:
            rail.pair.fail(self._ended)
        until_s = time.monotonic() + FLUSH_S
        while any(not rail.pair.idle for rail in self._rails) and time.monotonic() < until_s:
            await asyncio.sleep(0.001)
        await self.close()

    async def close(self) -> None:
        """Destroy the queue pairs. Never raises."""
        if self._closed:
            return
        self._closed = True
        self._ended = self._ended or "closed"
        for rail in self._rails:
            rail.pair.close()
        self._post()  # fails what still waits
        self._on_end(self._number)


def split(
    reads: Sequence[Read], windows: Sequence[tuple[int, int]], max_request: int, max_segments: int
) -> Iterator[Request]:
    """READs of one contiguous remote range each, inside one window, from reads in the order given.

    Neighbours whose remote ranges follow each other share a request. Raises TransferFailed outside the windows.
    """
    current: Request | None = None
    for window, remote, local, length in _cut(reads, windows):
        while length:
            if current is None or not _continues(current, window, remote, max_request, max_segments):
                if current is not None:
                    yield current
                current = Request(window, remote, 0, [])
            taken = min(length, max_request - current.length)
            current.segments.append((local, taken))
            current.length += taken
            remote, local, length = remote + taken, local + taken, length - taken
    if current is not None:
        yield current


def _continues(current: Request, window: int, remote: int, max_request: int, max_segments: int) -> bool:
    follows = current.window == window and current.remote + current.length == remote
    return follows and current.length < max_request and len(current.segments) < max_segments


def _cut(reads: Sequence[Read], windows: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(window, remote, local, length): the reads, cut where a window ends or a registered piece of our arena does."""
    starts = [start for start, _ in windows]
    for read in reads:
        remote, local, left = read.remote, read.local, read.length
        while left:
            window = bisect_right(starts, remote) - 1
            end = sum(windows[window]) if window >= 0 else 0
            if remote >= end:
                raise TransferFailed(f"rdma: the lease does not cover byte {remote} of the owner's arena")
            taken = min(left, end - remote, PIECE_BYTES - local % PIECE_BYTES)
            yield window, remote, local, taken
            remote, local, left = remote + taken, local + taken, left - taken
