"""Snapshots and pages between device and host, beside the steps: the bytes of model.reference.snapshot.

A snapshot is taken in the order of the main stream, at a step boundary: one kernel gathers windows and history, and the
pages that a rewind could still touch are copied, into a staging place on the device. From there, and from pages that no
step writes any more, the side stream copies to page-locked memory, whence `progress` hands them to the buffers. Pages
go to buffers directly where these are page-locked themselves (the arena of the cache tier).

A restore takes the buffers' bytes at once and copies on the side stream; the main stream waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.backend import MOST_REWOUND
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.tier import Buffer
from dsuf.errors import UsageError
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.state import ROWS
from dsuf.layout import PAGE_TOKENS, SnapshotLayout, pages_for, resume_step
from dsuf.model.reference.snapshot import blank

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Event

PIECE = 8 << 20  # bytes of a page-locked piece
PIECES = 2
THREADS = 4  # that copy between page-locked memory and buffers
RECENT = 2  # pages at most that the last 24 tokens lie in


@dataclass
class _Piece:
    """Page-locked memory on its way: where its parts go when `event` is over."""

    event: Event
    parts: list[tuple[np.ndarray | _Page, np.ndarray]]  # (from, to), uint8 alike
    place: int | None  # of the pieces; None: the staging place
    fixes: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # (from, to) in it, before that


@dataclass
class _Job:
    """One snapshot: pages still to be sent and pieces that are under way."""

    number: int
    waiting: deque[tuple[int, np.ndarray]] = field(default_factory=deque)  # page in the pool, buffer
    under_way: deque[_Piece] = field(default_factory=deque)


class Copies:
    """Copies of one device's pages; `number`s ascend by one a copy."""

    def __init__(self, pages: Pages) -> None:
        self.pages, self.device, self.spec = pages, pages.device, pages.spec
        self.layout = SnapshotLayout.of(self.spec)
        self._staged_bytes = self._pages_at + RECENT * pages.page_bytes
        self._on_device = self.device.allocate(self._staged_bytes, "workspace")
        self._on_host = self.device.pinned(self._staged_bytes)
        self._piece_pages = max(1, PIECE // pages.page_bytes)
        size = self._piece_pages * pages.page_bytes
        self._pieces = [self.device.pinned(size) for _ in range(PIECES)]
        self._free = deque(range(PIECES))
        self._threads = ThreadPoolExecutor(THREADS, "copies")  # its threads begin with the first use
        self._jobs: deque[_Job] = deque()
        self._restores: deque[tuple[int, Event]] = deque()
        pages.finish_copies = self.finish

    @property
    def _pages_at(self) -> int:
        return -(-self.layout.snapshot_bytes // 256) * 256

    # ---- saving

    def snapshot(
        self,
        slot: int,
        position: int,
        decoder_start: int,
        pages: Mapping[int, Buffer],
        state: Sequence[Buffer],
    ) -> int:
        """Queue copying what the first `position` tokens of a slot left; the copy's number. See Backend.snapshot."""
        self._check(position, pages, state)
        self._drain()
        held = self.pages.pages_of(slot)
        self.pages.copies += 1
        job = _Job(self.pages.copies)
        self._move("save", slot, position, decoder_start)
        parts: list[tuple[np.ndarray | _Page, np.ndarray]] = self._state_parts(state)
        settled = max(0, position - MOST_REWOUND) // PAGE_TOKENS
        recent = [number for number in pages if number >= settled]
        for place, number in enumerate(recent):
            at = self._pages_at + place * self.pages.page_bytes
            self.device.copy_async(self._on_device + at, self.pages.address(slot, number), self.pages.page_bytes)
            staged = self._on_host[at : at + self.pages.page_bytes]
            parts.append((_Page(staged, self.pages, number, position), _flat(pages[number])))
        gathered = self.device.record()
        with self.device.beside():
            self.device.wait(gathered)
            self.device.copy_async(self._on_host.ctypes.data, self._on_device, self._staged_bytes)
            fixes = self._fixes(min(decoder_start, position))
            job.under_way.append(_Piece(self.device.record(), parts, None, fixes))
        job.waiting.extend((held[number], _flat(pages[number])) for number in pages if number < settled)
        self._jobs.append(job)
        self.progress()
        return job.number

    def progress(self) -> int:
        """Hand over what has arrived and send what fits; the number of the last copy that has ended."""
        while self._jobs and self._advance(self._jobs[0]):
            self._jobs.popleft()
        while self._restores and self._restores[0][1].done():
            self._restores.popleft()
        pending = [self._jobs[0].number] if self._jobs else []
        pending += [self._restores[0][0]] if self._restores else []
        self.pages.copied = min(pending) - 1 if pending else self.pages.copies
        self.pages.settle()
        return self.pages.copied

    def finish(self, number: int) -> None:
        """Block until that copy has ended."""
        while self.progress() < number:
            if self._jobs and self._jobs[0].under_way:
                self._jobs[0].under_way[0].event.wait()
            elif self._restores:
                self._restores[0][1].wait()

    def _drain(self) -> None:
        """Wait until the staging place is free: one snapshot's state is under way at a time."""
        for job in list(self._jobs):
            if any(piece.place is None for piece in job.under_way):
                self.finish(job.number)

    def _advance(self, job: _Job) -> bool:
        """Whether the job is done."""
        while job.under_way and job.under_way[0].event.done():
            piece = job.under_way.popleft()
            for source, target in piece.fixes:
                target[:] = source
            self._hand_over(piece.parts)
            if piece.place is not None:
                self._free.append(piece.place)
        while job.waiting and self._free:
            self._send(job)
        return not job.under_way and not job.waiting

    def _hand_over(self, parts: Sequence[tuple[np.ndarray | _Page, np.ndarray]]) -> None:
        """Copy staged bytes to where they are wanted, in order where there are few, else by several threads."""

        def copy(some: Sequence[tuple[np.ndarray | _Page, np.ndarray]]) -> None:
            for source, target in some:
                target[:] = source.bytes() if isinstance(source, _Page) else source

        if len(parts) < 2 * THREADS:
            copy(parts)
            return
        for done in [self._threads.submit(copy, parts[i::THREADS]) for i in range(THREADS)]:
            done.result()

    def _send(self, job: _Job) -> None:
        """One piece of settled pages to the host."""
        place, size = self._free.popleft(), self.pages.page_bytes
        parts, numbers = [], []
        for i in range(min(self._piece_pages, len(job.waiting))):
            page, target = job.waiting.popleft()
            numbers.append(page)
            parts.append((self._pieces[place][i * size : (i + 1) * size], target[:size]))
        with self.device.beside():
            for i, page, count in _adjacent(numbers):
                staged = self._pieces[place].ctypes.data + i * size
                self.device.copy_async(staged, self.pages.pool + page * size, count * size)
            job.under_way.append(_Piece(self.device.record(), parts, place))

    def _fixes(self, decoder_start: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """What nothing on the device writes of a staged snapshot: padding, and decoder_start, which the host knows."""
        layout, staged = self.layout, self._on_host
        padding = (
            (layout.windows_bytes, layout.history_offset),
            (layout.history_offset + 4 * layout.history_ids, layout.decoder_start_offset),
        )
        fixes = [(np.zeros(end - first, np.uint8), staged[first:end]) for first, end in padding]
        start = np.array([decoder_start], "<i8").view(np.uint8)
        return [*fixes, (start, staged[layout.decoder_start_offset : layout.snapshot_bytes])]

    def _state_parts(self, state: Sequence[Buffer]) -> list[tuple[np.ndarray | _Page, np.ndarray]]:
        """Slices of the staged snapshot for the parts of `state`."""
        size, at, parts = self.layout.snapshot_bytes, 0, []
        for part in map(_flat, state):
            count = min(part.size, size - at)
            parts.append((self._on_host[at : at + count], part[:count]))
            at += count
        return parts

    def _check(self, position: int, pages: Mapping[int, Buffer], state: Sequence[Buffer]) -> None:
        step, last = resume_step(self.spec), pages_for(position)
        if position % step or position < 1:
            raise UsageError(f"save at {position}, expected a multiple of {step} from 1 on.")
        wrong = [number for number in pages if not 0 <= number < last]
        if wrong:
            raise UsageError(f"page {wrong[0]} wanted, expected 0 to {last - 1} at position {position}.")
        room = sum(_flat(part).size for part in state)
        if room < self.layout.snapshot_bytes:
            raise UsageError(f"room for {room} bytes of a snapshot, expected {self.layout.snapshot_bytes}.")

    # ---- restoring

    def restore(self, slot: int, position: int, pages: Sequence[Buffer], state: Sequence[Buffer]) -> tuple[int, int]:
        """Fill a slot, whose pages are reserved, from the pages of `position` tokens and their snapshot.

        (number of the copy, decoder_start). The buffers are free at once. Raises UsageError for wrong sizes.
        """
        if position < 1 or len(pages) != pages_for(position):
            raise UsageError(f"{len(pages)} pages for {position} tokens, expected {pages_for(position)}.")
        data = np.concatenate([_flat(part) for part in state])
        if data.size < self.layout.snapshot_bytes:
            raise UsageError(f"a snapshot of {data.size} bytes, expected {self.layout.snapshot_bytes}.")
        at = self.layout.decoder_start_offset
        decoder_start = int(data[at : at + 8].view("<i8")[0])
        if not 0 <= decoder_start <= position:
            raise UsageError(f"decoder_start {decoder_start} in a snapshot at {position}: the bytes are damaged.")
        self.finish(self.pages.copies)  # the staging place and all pieces are free
        self._on_host[: self.layout.snapshot_bytes] = data[: self.layout.snapshot_bytes]
        ready = self.device.record()  # memory that earlier work read may be written only after it
        with self.device.beside():
            self.device.wait(ready)
            self.device.copy_async(self._on_device, self._on_host.ctypes.data, self.layout.snapshot_bytes)
            self._pages_to_device(slot, pages)
            arrived = self.device.record()
        self.device.wait(arrived)
        self._move("restore", slot, position, decoder_start)
        self.pages.copies += 1
        self._restores.append((self.pages.copies, self.device.record()))
        return self.pages.copies, decoder_start

    def _pages_to_device(self, slot: int, pages: Sequence[Buffer]) -> None:
        events: list[Event | None] = [None] * PIECES
        held = self.pages.pages_of(slot)
        for turn, chunk in enumerate(_chunks(pages, self._piece_pages)):
            place, size = turn % PIECES, self.pages.page_bytes
            if events[place] is not None:
                events[place].wait()
            staged = self._pieces[place]
            self._hand_over([(_flat(page)[:size], staged[i * size :][:size]) for i, page in enumerate(chunk)])
            first = turn * self._piece_pages
            for i, page, count in _adjacent(held[first : first + len(chunk)]):
                self.device.copy_async(self.pages.pool + page * size, staged.ctypes.data + i * size, count * size)
            events[place] = self.device.record()

    def _move(self, direction: str, slot: int, position: int, decoder_start: int) -> None:
        pages, spec, layout = self.pages, self.spec, self.layout
        self.device.launch(
            f"state.{direction}",
            pages.windows + slot * pages.window_pitch, pages.ring, pages.row_bytes, layout.row_bytes,
            layout.window_rows, position, spec.decoder_start_layer, min(decoder_start, position),
            pages.history + slot * 4 * HISTORY, HISTORY, layout.history_ids,
            self._on_device, self._on_device + layout.history_offset,
            grid=(-(-layout.window_rows // ROWS), layout.window_layers),
        )  # fmt: skip


@dataclass
class _Page:
    """A staged page whose entries from `position` on are left out when it is handed over."""

    staged: np.ndarray
    pages: Pages
    number: int
    position: int

    def bytes(self) -> np.ndarray:
        """uint8 [page_bytes]."""
        page = self.staged.copy()
        for source in self.pages.layout.sources:
            blank(page, source, self.position // source.ratio - source.first_entry(self.number))
        return page


def _flat(buffer: Buffer) -> np.ndarray:
    return np.frombuffer(buffer, np.uint8)


def _adjacent(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, its page, count) of runs of pages that lie side by side: one copy each."""
    first = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield first, pages[first], i - first
            first = i


def _chunks(items: Sequence[Buffer], size: int) -> Iterator[Sequence[Buffer]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
