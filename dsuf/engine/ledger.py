"""Who holds how many cache pages, and what may be promised to whom so that everybody can still end.

A sequence grows token by token, up to its budget if it must, and few ever do: so more is promised than there is. An
action (start, grow, park, resume) is done only if afterwards there is still an order in which all can end, each with
the room it may need at most, the others ended or set aside in host memory by then (the banker's rule). Then there is
always somebody who can go on, and nobody ever has to be dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsuf.engine.backend import Limits
from dsuf.engine.sequence import Sequence
from dsuf.layout import pages_for


@dataclass(frozen=True)
class _Held:
    """Pages of one sequence: those it has, and those it may need at most."""

    pages: int
    most: int


class Ledger:
    """Pages on the device and bytes in host memory, by sequence; without a bound on pages everything is granted."""

    def __init__(self, limits: Limits, park_bytes: int) -> None:
        self.limits = limits
        self.park_bytes = park_bytes if limits.page_bytes else 0
        self._device: dict[str, _Held] = {}
        self._parked: dict[str, _Held] = {}

    @property
    def pages(self) -> int:
        """Pages that are given out."""
        return sum(held.pages for held in self._device.values())

    @property
    def parked_bytes(self) -> int:
        """Host memory that is given out, at most."""
        return sum(self._parked_size(held) for held in self._parked.values())

    def start(self, sequence: Sequence) -> bool:
        """Room for a whole prompt and its first steps."""
        most = pages_for(sequence.prompt_len + sequence.budget + self.limits.lookahead)
        return self._try({**self._device, sequence.id: _Held(self._need(sequence), most)}, self._parked)

    def grow(self, sequence: Sequence) -> bool:
        """Room for the next steps."""
        held, need = self._device[sequence.id], self._need(sequence)
        return need <= held.pages or self._try({**self._device, sequence.id: _Held(need, held.most)}, self._parked)

    def park(self, sequence: Sequence) -> bool:
        """Move a sequence to host memory."""
        device = dict(self._device)
        held = device.pop(sequence.id)
        return self.limits.cache_pages is not None and self._try(device, {**self._parked, sequence.id: held})

    def resume(self, sequence: Sequence, spare: int) -> bool:
        """Move it back, with `spare` pages still free after that."""
        parked = dict(self._parked)
        held = parked.pop(sequence.id)
        pages = max(held.pages, self._need(sequence))
        return self._try({**self._device, sequence.id: _Held(pages, held.most)}, parked, spare)

    def drop(self, sequence: Sequence) -> None:
        """The sequence is no more."""
        self._device.pop(sequence.id, None)
        self._parked.pop(sequence.id, None)

    def _need(self, sequence: Sequence) -> int:
        return pages_for(sequence.prompt_len + len(sequence.emitted) + self.limits.lookahead)

    def _parked_size(self, held: _Held) -> int:
        return held.pages * self.limits.page_bytes + self.limits.snapshot_bytes

    def _try(self, device: dict[str, _Held], parked: dict[str, _Held], spare: int = 0) -> bool:
        """Take this as the new state if it is safe."""
        if self.limits.cache_pages is not None:
            free = self.limits.cache_pages - sum(held.pages for held in device.values())
            host = self.park_bytes - sum(self._parked_size(held) for held in parked.values())
            if free < spare or host < 0 or not self._all_can_end(list(device.values()), free, host):
                return False
        self._device, self._parked = device, parked
        return True

    def _all_can_end(self, left: list[_Held], free: int, host: int) -> bool:
        """Whether those on the device can all end or be parked, from `free` pages and `host` bytes. Parked ones can
        come back then, one after the other, because each fits alone.
        """
        left.sort(key=lambda held: held.most - held.pages)
        while left:
            if left[0].most - left[0].pages <= free:
                free += left.pop(0).pages
                continue
            fitting = [held for held in left if self._parked_size(held) <= host]
            if not fitting:
                return False
            largest = max(fitting, key=lambda held: held.pages)
            left.remove(largest)
            free, host = free + largest.pages, host - self._parked_size(largest)
        return True
