"""Copies between the device and registered host memory: lists of (target, source, bytes), queued a batch at a time.

    runs = Runs.of(targets, sources, sizes).split(side, base, CUT)
    transfer = Transfer(number, device, OUT, iter([runs, ...]), ...)
    while not transfer.advance(): ...

Neighbours on both sides become one run, and runs are cut at multiples of CUT from the memory's first byte: memory is
registered in pieces of a multiple of that, a copy may not span two, and what another stream copies meanwhile waits for
no more than one run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event

CUT = 2 << 20  # 40 us of the link
BATCH = 256  # runs at most that are queued at once
FIRST = 40  # at first, then as many as before: the link takes twice as long for a page as the host, and shall not wait
MOST = 3 * BATCH  # runs under way: with more, the driver lets the host wait


@dataclass(frozen=True)
class Runs:
    """int64 [n] each: addresses and bytes."""

    targets: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> Runs:
        """Neighbours joined."""
        if len(sizes) < 2:
            return cls(targets, sources, sizes)
        follows = (targets[1:] == targets[:-1] + sizes[:-1]) & (sources[1:] == sources[:-1] + sizes[:-1])
        starts = np.flatnonzero(np.concatenate([[True], ~follows]))
        return cls(targets[starts], sources[starts], np.add.reduceat(sizes, starts))

    @classmethod
    def few(cls, runs: Iterable[tuple[int, int, int]], side: str, base: int, cut: int) -> Runs:
        """Cut like `split`, without its dozens of array operations, which a few runs are over before."""
        parts = []
        for target, source, size in runs:
            at, done = (target if side == "targets" else source) - base, 0
            while done < size:
                count = min(size - done, cut - (at + done) % cut)
                parts.append((target + done, source + done, count))
                done += count
        return cls(*np.array(list(zip(*parts, strict=True)), np.int64).reshape(3, len(parts)))

    def split(self, side: str, base: int, cut: int) -> Runs:
        """Cut where the "targets" or "sources", which lie in memory from `base` on, pass a multiple of `cut`."""
        at = getattr(self, side) - base
        first = at // cut
        counts = (at + self.sizes - 1) // cut - first + 1
        run = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        border = (first[run] + nth) * cut
        begin = np.maximum(at[run], border)
        end = np.minimum((at + self.sizes)[run], border + cut)
        inside = begin - at[run]
        return Runs(self.targets[run] + inside, self.sources[run] + inside, end - begin)

    def send(self, device: Device, first: int, count: int) -> None:
        """Queue so many of them on the current stream."""
        part = slice(first, first + count)
        device.copy_many(self.targets[part], self.sources[part], self.sizes[part])

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Launch:
    """A part that is one kernel: `queue` queues it on the current stream."""

    queue: Callable[[], None]

    def send(self, device: Device, first: int, count: int) -> None:
        self.queue()

    def __len__(self) -> int:
        return 1


class Transfer:
    """One copy of many runs on a side stream, in their order of batches. `finish` is called once all have arrived.

    The first batch of the first part is queued at once, before the next part is made; `advance` queues the others as
    earlier ones end.
    """

    def __init__(
        self,
        number: int,
        device: Device,
        side: int,
        parts: Iterator[Runs | Launch],
        kept: object,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """`kept`: what must stay mapped until then."""
        self.number = number
        self._device, self._side, self._parts, self._kept, self._finish = device, side, parts, kept, finish
        self._runs, self._sent = next(parts), 0
        self._under_way: deque[tuple[Event, int]] = deque()  # and runs
        self._queued, self._ended = 0, 0
        self.first = self._send()

    def advance(self) -> bool:
        """Whether everything has arrived."""
        self._settle()
        while self._queued - self._ended <= MOST - BATCH and self._more:
            self._send()
            self._settle()
        if self._under_way:
            return False
        if self._finish is not None:
            self._finish()
        self._finish = self._kept = None
        return True

    def wait(self) -> None:
        """Until something more has arrived."""
        if self._under_way:
            self._under_way[0][0].wait()

    def send_all(self) -> Event:
        """Queue what is left, if the driver must let the host wait for it; the event after everything."""
        while self._more:
            self._send()
        return self.last

    @property
    def _more(self) -> bool:
        """Whether a run is left to be queued."""
        while self._sent >= len(self._runs):
            following = next(self._parts, None)
            if following is None:
                return False
            self._runs, self._sent = following, 0
        return True

    def _settle(self) -> None:
        while self._under_way and self._under_way[0][0].done():
            self._ended += self._under_way.popleft()[1]

    def _send(self) -> Event:
        count = min(BATCH, max(FIRST, self._queued), len(self._runs) - self._sent)
        with self._device.beside(self._side):
            self._runs.send(self._device, self._sent, count)
            self.last = self._device.record()
        self._sent, self._queued = self._sent + count, self._queued + count
        self._under_way.append((self.last, count))
        return self.last
