"""Cache pages in memory that other processes map too: a slot each, so that thousands need no object of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np


class SharedPages(Sequence[memoryview]):
    """Pages by place: `slots` of `page_bytes` each in `memory`, which stays mapped as long as this lives."""

    def __init__(self, memory: memoryview, page_bytes: int, slots: np.ndarray) -> None:
        self.memory, self.page_bytes, self.slots = memory, page_bytes, slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, place: int) -> memoryview:
        first = int(self.slots[place]) * self.page_bytes
        return self.memory[first : first + self.page_bytes]

    @property
    def addresses(self) -> np.ndarray:
        """int64 [n]: of each page's first byte."""
        return address_of(self.memory) + self.slots.astype(np.int64) * self.page_bytes


class NumberedPages(Mapping[int, memoryview]):
    """Pages by number: `numbers` int64 [n], in the order of `shared`."""

    def __init__(self, numbers: np.ndarray, shared: SharedPages) -> None:
        self.numbers, self.shared = numbers, shared

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __getitem__(self, number: int) -> memoryview:
        return self.shared[self._places[number]]

    @cached_property
    def _places(self) -> dict[int, int]:
        return dict(zip(self.numbers.tolist(), range(len(self.numbers)), strict=True))


def address_of(memory: memoryview | bytearray | np.ndarray) -> int:
    """Of its first byte, as long as it lives."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
