"""Snapshots and pages between device and host, beside the steps: the bytes of model.reference.snapshot.

A snapshot is taken in the order of the main stream, at a step boundary: one kernel gathers windows and history, and the
pages that a rewind could still touch are copied, into one of a few places on the device. From there, and from pages
that no step writes any more, a side stream copies to the buffers themselves where these lie in registered memory (the
arena of the cache tier, registered.py), else through staging. While no stream runs, a kernel does so (mover.py).

A restore copies pages and the snapshot's bytes on the other side stream, beside steps of other sequences. `land` puts
the windows in their place and must come before anything reads the slot: the main stream waits there for the bytes.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsuf.engine.backend import MOST_REWOUND
from dsuf.engine.gpu.device import IN, OUT
from dsuf.engine.gpu.mover import MOVED, Mover
from dsuf.engine.gpu.pages import Pages
from dsuf.engine.gpu.registered import PIECE, Registered
from dsuf.engine.gpu.staging import StagedSave, Staging, flat, hand_over, spread
from dsuf.engine.gpu.transfer import CUT, Launch, Runs, Transfer
from dsuf.engine.shared import NumberedPages, SharedPages, address_of
from dsuf.engine.tier import Buffer
from dsuf.errors import UsageError
from dsuf.kernels.engram import HISTORY
from dsuf.kernels.state import ROWS
from dsuf.layout import PAGE_TOKENS, SnapshotLayout, pages_for, resume_step
from dsuf.model.reference.snapshot import blank

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Event

PLACES = 4  # on the device for what leaves it: so many snapshots can begin before one's state has arrived
LANDINGS = 2  # the same for what comes
RECENT = 2  # pages at most that the last 24 tokens lie in
SOON = 32  # pages that are on their way before the others are planned


@dataclass
class _Loaded:
    """A restore through staging: its bytes have arrived."""

    number: int
    last: Event

    def advance(self) -> bool:
        return self.last.done()

    def wait(self) -> None:
        self.last.wait()

    def send_all(self) -> Event:
        return self.last


@dataclass
class _Landing:
    """A restore whose windows are still to be put in their place."""

    job: Transfer | _Loaded
    place: int
    position: int
    decoder_start: int


class Copies:
    """Copies of one device's pages; `number`s ascend by one a copy."""

    def __init__(
        self,
        pages: Pages,
        streams: Callable[[], bool] = lambda: False,
        *,
        cut: int = CUT,
        piece: int = PIECE,
        moved: int = MOVED,
    ) -> None:
        """`piece`, a multiple of `cut`: memory that is registered at a time; `cut`: no run of bytes passes one.

        `moved`: pieces at most that a kernel moves, and none while there are `streams`: it takes processors from their
        steps (9 % at 100 K tokens every other step, where copies take 1 to 5).
        """
        self._cut, self._piece, self._streams = cut, piece, streams
        self.pages, self.device, self.spec = pages, pages.device, pages.spec
        self.layout = SnapshotLayout.of(self.spec)
        self._pages_at = -(-self.layout.snapshot_bytes // 256) * 256
        staged_bytes = self._pages_at + RECENT * pages.page_bytes
        self._places = deque((self.device.allocate(staged_bytes, "workspace"), None) for _ in range(PLACES))
        for place, _ in self._places:
            self.device.zero(place, staged_bytes)  # padding, which nobody writes
        ready = self.device.record()  # the pool is cleared too
        self._arrivals = deque((self.device.allocate(self._pages_at, "workspace"), ready) for _ in range(LANDINGS))
        self._mover = Mover(self.device, pages.page_bytes, self.layout.snapshot_bytes, moved)
        self._staging = Staging(self.device, staged_bytes, pages.page_bytes)
        self._registered: Registered | None = None
        self._jobs: list[Transfer | StagedSave | _Loaded] = []
        self._landings: dict[int, _Landing] = {}  # by slot, the oldest first
        pages.finish_copies = self.finish

    def share(self, memory: memoryview | None) -> Registered | None:
        """Register this memory instead of the one before, for buffers that lie in it."""
        self.finish(self.pages.copies)
        before = self._registered
        if before is not None:
            before.close()
        self._registered = None
        if memory is not None:
            self._registered = Registered(self.device, memory, self._piece, after=before)
        return self._registered

    def borrow(self, registered: Registered | None) -> None:
        """Use memory that another rank's copies have registered: it is page-locked for every GPU."""
        self.finish(self.pages.copies)
        self._registered = registered

    def close(self) -> None:
        """Wait for all copies and unregister."""
        last = self._registered
        self.share(None)
        if last is not None:
            last.join()

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
        numbers = pages.numbers if isinstance(pages, NumberedPages) else np.fromiter(pages, np.int64, len(pages))
        self._check(position, numbers, state)
        self.land(slot)
        place = self._place()
        self._move("save", slot, place, position, decoder_start)
        recent = numbers >= max(0, position - MOST_REWOUND) // PAGE_TOKENS
        sources = self.pages.addresses(slot)[numbers]
        latest = sources[recent].tolist()
        staged = [place + self._pages_at + i * self.pages.page_bytes for i in range(len(latest))]
        for to, source in zip(staged, latest, strict=True):
            self.device.copy_async(to, source, self.pages.page_bytes)
        sources[recent] = staged
        gathered = self.device.record()
        with self.device.beside(OUT):
            self.device.wait(gathered)
        number = self.pages.copies + 1
        finish = functools.partial(self._blank, pages, numbers, position)
        targets = self._direct(pages.shared, state) if isinstance(pages, NumberedPages) else None
        if targets is not None:
            runs = self._out_runs(place, state, sources, recent, targets)
            job = Transfer(number, self.device, OUT, runs, (pages, state), finish)
        else:
            job = self._staged(number, place, pages, state, numbers, recent, sources, finish)
        self.pages.copies = number
        self._places.append((place, job.first))
        self._jobs.append(job)
        self.progress()
        start = np.array([min(decoder_start, position)], "<i8").view(np.uint8)
        hand_over(spread(start, state, into=True, at=self.layout.decoder_start_offset))
        return number

    def progress(self) -> int:
        """Go on with everything; the number of the last copy that has ended, as have all before it."""
        self._jobs = [job for job in self._jobs if not job.advance()]
        self.pages.copied = min((job.number for job in self._jobs), default=self.pages.copies + 1) - 1
        self.pages.settle()
        return self.pages.copied

    def finish(self, number: int) -> None:
        """Block until that copy has ended."""
        while self.progress() < number:
            self._jobs[0].wait()

    def _place(self) -> int:
        """A place on the device for a snapshot's state, when nobody copies from there any more."""
        place, event = self._places.popleft()
        if event is not None:
            event.wait()
        return place

    def _out_runs(
        self, place: int, state: Sequence[Buffer], sources: np.ndarray, recent: np.ndarray, targets: np.ndarray
    ) -> Iterator[Runs | Launch]:
        """A snapshot's state and latest pages, whose place is to be used again, then the others."""
        first = [(there, here, count) for here, there, count in self._state_runs(place, state)]
        if not self._streams() and self._mover.takes(first, len(targets)):
            yield Launch(functools.partial(self._mover.move, first, targets, sources))
            return
        latest = zip(targets[recent].tolist(), sources[recent].tolist(), strict=True)
        first += [(to, of, self.pages.page_bytes) for to, of in latest]
        yield Runs.few(first, "targets", self._registered.begin, self._cut)
        yield from self._page_runs(targets[~recent], sources[~recent], "targets")

    def _state_runs(self, place: int, state: Sequence[Buffer]) -> Iterator[tuple[int, int, int]]:
        """(device address, host address, bytes) of the snapshot's parts, without decoder_start."""
        at, end = 0, self.layout.decoder_start_offset
        for part in state:
            count = min(len(part), end - at)
            if count > 0:
                yield place + at, address_of(part), count
            at += count

    def _page_runs(self, targets: np.ndarray, sources: np.ndarray, side: str) -> Iterator[Runs]:
        """The first ones by hand: the link has something to do while the others are planned."""
        base, size = self._registered.begin, self.pages.page_bytes
        soon = zip(targets[:SOON].tolist(), sources[:SOON].tolist(), strict=True)
        yield Runs.few([(to, of, size) for to, of in soon], side, base, self._cut)
        targets, sources = targets[SOON:], sources[SOON:]
        yield Runs.of(targets, sources, np.full(len(targets), size)).split(side, base, self._cut)

    def _direct(self, pages: SharedPages, state: Sequence[Buffer]) -> np.ndarray | None:
        """Addresses of the pages, if these and the state lie in registered memory."""
        memory = self._registered
        if memory is None or not all(memory.covers(at := address_of(part), at + len(part)) for part in state):
            return None
        at = pages.addresses
        if len(at) and not memory.covers(int(at.min()), int(at.max()) + pages.page_bytes):
            return None
        return at

    def _staged(
        self, number: int, place: int, pages: Mapping[int, Buffer], state: Sequence[Buffer], numbers: np.ndarray,
        recent: np.ndarray, sources: np.ndarray, finish: functools.partial[None],
    ) -> StagedSave:  # fmt: skip
        """The same through page-locked memory, whose part for the state one snapshot uses at a time."""
        for job in list(self._jobs):
            while isinstance(job, StagedSave) and not job.state_there:
                job.wait()
                self.progress()
        staged, size = self._staging.staged, self.pages.page_bytes
        parts = list(spread(staged[: self.layout.decoder_start_offset], state, into=True))
        for i, page in enumerate(numbers[recent].tolist()):
            parts.append((staged[self._pages_at + i * size :][:size], flat(pages[page])[:size]))
        others = zip(sources[~recent].tolist(), numbers[~recent].tolist(), strict=True)
        waiting = deque((source, flat(pages[page])) for source, page in others)
        return StagedSave(number, self._staging, place, parts, waiting, finish)

    def _blank(self, pages: Mapping[int, Buffer], numbers: np.ndarray, position: int) -> None:
        """Leave out what lies after `position`."""
        last = position // PAGE_TOKENS
        for i in np.flatnonzero(numbers == last):
            data = flat(pages.shared[i] if isinstance(pages, NumberedPages) else pages[last])
            for source in self.pages.layout.sources:
                blank(data, source, position // source.ratio - source.first_entry(last))

    def _check(self, position: int, numbers: np.ndarray, state: Sequence[Buffer]) -> None:
        step, last = resume_step(self.spec), pages_for(position)
        if position % step or position < 1:
            raise UsageError(f"save at {position}, expected a multiple of {step} from 1 on.")
        wrong = numbers[(numbers < 0) | (numbers >= last)]
        if wrong.size:
            raise UsageError(f"page {wrong[0]} wanted, expected 0 to {last - 1} at position {position}.")
        room = sum(len(part) for part in state)
        if room < self.layout.snapshot_bytes:
            raise UsageError(f"room for {room} bytes of a snapshot, expected {self.layout.snapshot_bytes}.")

    # ---- restoring

    def restore(self, slot: int, position: int, pages: Sequence[Buffer], state: Sequence[Buffer]) -> tuple[int, int]:
        """Queue filling a slot, whose pages are reserved, from the pages of `position` tokens and their snapshot.

        (number of the copy, decoder_start). Nothing may read the slot before `land`. Raises UsageError for wrong sizes.
        """
        decoder_start = self._check_restore(position, pages, state)
        place, moved = self._arrival()
        targets = self.pages.addresses(slot)[: len(pages)]
        if moved is not None:
            with self.device.beside(IN):
                self.device.wait(moved)
        number = self.pages.copies + 1
        sources = self._direct(pages, state) if isinstance(pages, SharedPages) else None
        if sources is not None:
            runs = self._in_runs(place, state, targets, sources)
            job: Transfer | _Loaded = Transfer(number, self.device, IN, runs, (pages, state))
        else:
            self.finish(self.pages.copies)  # all pieces are free
            last = self._staging.load(state, place, self.layout.snapshot_bytes, pages, targets)
            job = _Loaded(number, last)
        self.pages.copies = number
        self._landings[slot] = _Landing(job, place, position, decoder_start)
        self._jobs.append(job)
        return number, decoder_start

    def _in_runs(
        self, place: int, state: Sequence[Buffer], targets: np.ndarray, sources: np.ndarray
    ) -> Iterator[Runs | Launch]:
        """A snapshot's state, then the pages."""
        first = [(here, there, count) for here, there, count in self._state_runs(place, state)]
        if not self._streams() and self._mover.takes(first, len(targets)):
            yield Launch(functools.partial(self._mover.move, first, targets, sources))
            return
        yield Runs.few(first, "sources", self._registered.begin, self._cut)
        yield from self._page_runs(targets, sources, "sources")

    def land(self, slot: int, *, wait: bool = True) -> bool:
        """Put what was restored in its place, in the order of the main stream, which waits for what is under way.

        Not `wait`: only if everything has arrived; whether it is done, or there was nothing to do.
        """
        landing = self._landings.get(slot)
        if landing is None:
            return True
        self.progress()
        if landing.job in self._jobs:
            if not wait:
                return False
            self.device.wait(landing.job.send_all())
        self._move("restore", slot, landing.place, landing.position, landing.decoder_start)
        self._arrivals.append((landing.place, self.device.record()))
        del self._landings[slot]
        return True

    def forget(self, slot: int) -> None:
        """The slot is given back: nothing lands there any more."""
        landing = self._landings.pop(slot, None)
        if landing is not None:
            self._arrivals.append((landing.place, None))  # what comes next comes after it, on the same stream

    def _arrival(self) -> tuple[int, Event | None]:
        """A place for a snapshot's bytes, and what reads it still."""
        if not self._arrivals:
            self.land(next(iter(self._landings)))
        return self._arrivals.popleft()

    def _check_restore(self, position: int, pages: Sequence[Buffer], state: Sequence[Buffer]) -> int:
        """decoder_start, once the sizes are right."""
        if position < 1 or len(pages) != pages_for(position):
            raise UsageError(f"{len(pages)} pages for {position} tokens, expected {pages_for(position)}.")
        room = sum(len(part) for part in state)
        if room < self.layout.snapshot_bytes:
            raise UsageError(f"a snapshot of {room} bytes, expected {self.layout.snapshot_bytes}.")
        raw = np.zeros(8, np.uint8)
        hand_over(spread(raw, state, into=False, at=self.layout.decoder_start_offset))
        decoder_start = int(raw.view("<i8")[0])
        if not 0 <= decoder_start <= position:
            raise UsageError(f"decoder_start {decoder_start} in a snapshot at {position}: the bytes are damaged.")
        return decoder_start

    def _move(self, direction: str, slot: int, place: int, position: int, decoder_start: int) -> None:
        pages, spec, layout = self.pages, self.spec, self.layout
        self.device.launch(
            f"state.{direction}",
            pages.windows + slot * pages.window_pitch, pages.ring, pages.row_bytes, layout.row_bytes,
            layout.window_rows, position, spec.decoder_start_layer, min(decoder_start, position),
            pages.history + slot * 4 * HISTORY, HISTORY, layout.history_ids,
            place, place + layout.history_offset,
            grid=(-(-layout.window_rows // ROWS), layout.window_layers),
        )  # fmt: skip
