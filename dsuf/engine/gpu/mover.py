"""A snapshot in one launch (kernels/moves.py): state and pages that lie in registered memory and are few enough."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device, Event

MOVED = 1024  # pieces at most, 2 ms of the link: a kernel takes a few processors from a step meanwhile
TABLES = 4  # of where they lie
WORD = 16  # bytes

Run = tuple[int, int, int]  # target, source, bytes


class Mover:
    """Pieces of `page_bytes` each, of which a state has as many as it takes."""

    def __init__(self, device: Device, page_bytes: int, state_bytes: int, most: int = MOVED) -> None:
        self.most = most
        self._device, self._size = device, page_bytes
        self._steps = page_bytes * np.arange(-(-state_bytes // page_bytes))
        pinned = (device.pinned(24 * max(most, 1)).view(np.int64).reshape(3, -1) for _ in range(TABLES))
        self._tables: deque[tuple[np.ndarray, Event | None]] = deque((table, None) for table in pinned)

    def takes(self, state: list[Run], pages: int) -> bool:
        """Whether it is over soon, and no part of the state begins or ends amid a word."""
        if pages + len(state) + len(self._steps) > self.most:
            return False
        return all((to | of | count) % WORD == 0 for to, of, count in state)

    def move(self, state: list[Run], targets: np.ndarray, sources: np.ndarray) -> None:
        """Queue it on the current stream: `state`, then pages by their addresses, int64 [n]."""
        table, event = self._tables.popleft()
        if event is not None:  # a kernel reads it where it is
            event.wait()
        (to, of, words), size, done = table, self._size, 0
        for target, source, count in state:
            steps = self._steps[: -(-count // size)]
            part = slice(done, done := done + len(steps))
            to[part], of[part], words[part] = steps + target, steps + source, size // WORD
            words[done - 1] = (count - steps[-1]) // WORD
        part = slice(done, done := done + len(targets))
        to[part], of[part], words[part] = targets, sources, size // WORD
        self._device.launch("pieces.move", table.ctypes.data, len(to), done, dependent=False)
        self._tables.append((table, self._device.record()))
