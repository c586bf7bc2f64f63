"""Copies between the device and host memory that is not page-locked, through pieces that are: slow, and always right.

Saving goes on in turns: `advance` hands what has arrived to the buffers and sends what fits into the free pieces.
Loading copies every byte into the pieces before it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.gpu.device import IN, OUT

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event
    from dsuf.engine.tier import Buffer

PIECE = 8 << 20  # bytes of a page-locked piece
PIECES = 2
THREADS = 4  # that copy between page-locked memory and buffers

Part = tuple[np.ndarray, np.ndarray]  # uint8 alike: from, to


class Staging:
    """The pieces, and page-locked memory for `staged_bytes` of a snapshot's state and latest pages."""

    def __init__(self, device: Device, staged_bytes: int, page_bytes: int) -> None:
        self.device, self.page_bytes = device, page_bytes
        self.staged = device.pinned(staged_bytes)
        self.piece_pages = max(1, PIECE // page_bytes)
        self.pieces = [device.pinned(self.piece_pages * page_bytes) for _ in range(PIECES)]
        self.free = deque(range(PIECES))
        self._threads = ThreadPoolExecutor(THREADS, "copies")  # its threads begin with the first use

    def hand_over(self, parts: Sequence[Part]) -> None:
        """Copy each part, in order where there are few, else by several threads."""
        if len(parts) < 2 * THREADS:
            hand_over(parts)
            return
        for done in [self._threads.submit(hand_over, parts[i::THREADS]) for i in range(THREADS)]:
            done.result()

    def load(
        self, state: Sequence[Buffer], place: int, count: int, pages: Sequence[Buffer], targets: np.ndarray
    ) -> Event:
        """Copy `count` bytes of `state` to the device address `place` and pages to `targets`; the event after that.

        The pieces must be free. The buffers are free when this returns.
        """
        size, events = self.page_bytes, deque()
        with self.device.beside(IN):
            hand_over(spread(self.staged[:count], state, into=False))
            self.device.copy_async(place, self.staged.ctypes.data, count)
            for turn, first in enumerate(range(0, len(pages), self.piece_pages)):
                if len(events) == PIECES:
                    events.popleft().wait()
                staged, end = self.pieces[turn % PIECES], min(first + self.piece_pages, len(pages))
                chunk = (flat(pages[i])[:size] for i in range(first, end))
                self.hand_over([(page, staged[i * size :][:size]) for i, page in enumerate(chunk)])
                for i, address, run in _adjacent(targets[first:end].tolist(), size):
                    self.device.copy_async(address, staged.ctypes.data + i * size, run * size)
                events.append(self.device.record())
            last = self.device.record()
        last.wait()  # the pieces are free for whoever comes next
        return last


@dataclass
class _Piece:
    """Page-locked memory on its way: its parts go where they belong when `event` is over."""

    event: Event
    parts: list[Part]
    place: int | None  # of the pieces; None: the state


class StagedSave:
    """One snapshot: `state` and latest pages from the device address `place`, then pages from `sources`.

    Like transfer.Transfer; only one at a time uses the memory for the state, until `state_there`.
    """

    def __init__(
        self,
        number: int,
        staging: Staging,
        place: int,
        parts: list[Part],
        pages: deque[tuple[int, np.ndarray]],
        finish: Callable[[], None],
    ) -> None:
        """`parts`: from staging.staged to buffers; `pages`: device address and buffer of each other page."""
        self.number, self._staging, self._waiting, self._finish = number, staging, pages, finish
        with staging.device.beside(OUT):
            staging.device.copy_async(staging.staged.ctypes.data, place, staging.staged.size)
            self.first = staging.device.record()
        self._under_way = deque([_Piece(self.first, parts, None)])

    @property
    def state_there(self) -> bool:
        """Whether the memory for the state can be used again."""
        return not self._under_way or self._under_way[0].place is not None

    def advance(self) -> bool:
        """Hand over what has arrived and send what fits; whether that was all."""
        while self._under_way and self._under_way[0].event.done():
            piece = self._under_way.popleft()
            self._staging.hand_over(piece.parts)
            if piece.place is not None:
                self._staging.free.append(piece.place)
        while self._waiting and self._staging.free:
            self._send()
        if self._under_way or self._waiting:
            return False
        self._finish()
        return True

    def wait(self) -> None:
        """Until something more has arrived."""
        if self._under_way:
            self._under_way[0].event.wait()

    def _send(self) -> None:
        """One piece of pages to the host."""
        staging, size = self._staging, self._staging.page_bytes
        place, parts, sources = staging.free.popleft(), [], []
        for i in range(min(staging.piece_pages, len(self._waiting))):
            source, target = self._waiting.popleft()
            sources.append(source)
            parts.append((staging.pieces[place][i * size : (i + 1) * size], target[:size]))
        with staging.device.beside(OUT):
            for i, address, run in _adjacent(sources, size):
                staging.device.copy_async(staging.pieces[place].ctypes.data + i * size, address, run * size)
            self._under_way.append(_Piece(staging.device.record(), parts, place))


def flat(buffer: Buffer) -> np.ndarray:
    """uint8 [n], the same memory."""
    return np.frombuffer(buffer, np.uint8)


def hand_over(parts: Iterable[Part]) -> None:
    """Copy each part."""
    for source, target in parts:
        target[:] = source


def spread(data: np.ndarray, parts: Sequence[Buffer], *, into: bool, at: int = 0) -> Iterator[Part]:
    """(from, to) between `data` and the bytes from `at` on of buffers in a row; `into` these or out of them."""
    done = 0
    for part in map(flat, parts):
        skipped = min(at, part.size)
        count, at = min(part.size - skipped, data.size - done), at - skipped
        if count > 0:
            there, here = part[skipped : skipped + count], data[done : done + count]
            yield (here, there) if into else (there, here)
            done += count


def _adjacent(addresses: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """(index of the first, its address, count) of runs of pages that lie side by side: one copy each."""
    first = 0
    for i in range(1, len(addresses) + 1):
        if i == len(addresses) or addresses[i] != addresses[i - 1] + size:
            yield first, addresses[first], i - first
            first = i
