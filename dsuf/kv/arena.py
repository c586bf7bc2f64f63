"""Host memory for caches: one memfd of equal slots with reference counts, on huge pages where the machine has any.

A slot holds one cache page (128 tokens) or a part of a snapshot. Beside it the arena keeps 16 bytes of digest and the
128 token ids of a full page, so that pages shared by several entries are described once. Slots are handed out as runs
that are as long as possible, because a transfer moves runs. Invariant: slots in use + free slots = all slots.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np
import xxhash

from dsuf.errors import EnvironmentProblem

HUGE_PAGE = 2 << 20
RESERVE_SHARE = 0.05  # kept for pulls: what a peer sends can always land
DIGEST_BYTES = 16
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Arena:
    """The memory: `view` [slots * slot_bytes] writable, `fd` to map it elsewhere, `address` of its first byte."""

    def __init__(self, host_bytes: int, slot_bytes: int, page_tokens: int) -> None:
        if host_bytes < slot_bytes:
            raise EnvironmentProblem(
                f"--kv-host-bytes is {host_bytes}, one cache page is {slot_bytes} bytes. Give more, or 0 for none."
            )
        self.slot_bytes, self.slots = slot_bytes, host_bytes // slot_bytes
        self.nbytes = -(-self.slots * slot_bytes // HUGE_PAGE) * HUGE_PAGE
        self.fd, self._map, self.huge = _map_memory(self.nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.digests = np.zeros((self.slots, DIGEST_BYTES), np.uint8)
        self.ids = np.zeros((self.slots, page_tokens), np.uint32)

    def bytes_of(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def digest(self, slot: int) -> bytes:
        """xxh3-128 of a slot's bytes as they are now; long buffers are hashed without the interpreter lock."""
        return xxhash.xxh3_128_digest(self.bytes_of(slot))

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory that cannot be mapped for writing; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor. The mapping stays until the last view of it is gone."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _map_memory(nbytes: int) -> tuple[int, mmap.mmap, bool]:
    """(descriptor, mapping, whether on huge pages)."""
    for flags in (os.MFD_HUGETLB, 0):
        fd = os.memfd_create("dsuf-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)  # whoever maps it can rely on its size
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:  # fewer free huge pages than that, or no memory at all
            os.close(fd)
            if flags:
                continue
            raise EnvironmentProblem(
                f"cannot map {nbytes} bytes for caches: {error.strerror}. Give a smaller --kv-host-bytes."
            ) from None
        mapping.madvise(mmap.MADV_DONTFORK)
        if not flags:
            _ask_for_huge_pages(mapping)
        return fd, mapping, bool(flags)
    raise AssertionError("unreachable")


def _ask_for_huge_pages(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)


class Slots:
    """Which slots are in use and by how many: counts, and the free runs by their first slot."""

    def __init__(self, slots: int) -> None:
        self.total, self.free = slots, slots
        self.reserve = int(slots * RESERVE_SHARE)
        self.counts = np.zeros(slots, np.uint32)
        self._starts = [0] if slots else []  # sorted
        self._lengths = {0: slots} if slots else {}

    def take(self, count: int) -> np.ndarray | None:
        """`count` free slots with one reference each, in the fewest runs that are easy to find; None: too few."""
        if count > self.free:
            return None
        parts, left = [], count
        while left:
            start = self._best_run(left)
            used = min(self._lengths[start], left)
            self._cut(start, used)
            parts.append(np.arange(start, start + used, dtype=np.uint32))
            left -= used
        taken = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        self.counts[taken] = 1
        self.free -= count
        return taken

    def share(self, slots: np.ndarray) -> None:
        """One more reference to each of these used slots."""
        self.counts[slots] += 1

    def give(self, slots: np.ndarray) -> list[int]:
        """One reference less for each; the slots that nobody uses any more, which are free now."""
        self.counts[slots] -= 1
        freed = np.unique(slots[self.counts[slots] == 0])
        for start, length in runs(freed):
            self._add(start, length)
        self.free += len(freed)
        return freed.tolist()

    def check(self) -> None:
        """Raise AssertionError unless the free runs are exactly the slots without a reference (I4)."""
        free = np.zeros(self.total, bool)
        for start in self._starts:
            run = slice(start, start + self._lengths[start])
            assert not free[run].any(), "two free runs overlap"
            free[run] = True
        assert len(self._starts) == len(self._lengths), "a free run is lost"
        assert np.array_equal(free, self.counts == 0), "a slot is both free and in use, or neither"
        assert int(free.sum()) == self.free, "the number of free slots is wrong"

    def _best_run(self, count: int) -> int:
        """Start of the shortest run that holds `count`, else of the longest."""
        fitting = [start for start in self._starts if self._lengths[start] >= count]
        if fitting:
            return min(fitting, key=self._lengths.__getitem__)
        return max(self._starts, key=self._lengths.__getitem__)

    def _cut(self, start: int, count: int) -> None:
        length = self._lengths.pop(start)
        at = bisect_left(self._starts, start)
        if length == count:
            del self._starts[at]
        else:
            self._starts[at] = start + count
            self._lengths[start + count] = length - count

    def _add(self, start: int, length: int) -> None:
        """Put a run back, joined with its neighbours."""
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == start + length:
            length += self._lengths.pop(self._starts.pop(at))
        if at and self._starts[at - 1] + self._lengths[self._starts[at - 1]] == start:
            self._lengths[self._starts[at - 1]] += length
            return
        insort(self._starts, start)
        self._lengths[start] = length


def runs(slots: Iterable[int] | np.ndarray) -> list[tuple[int, int]]:
    """Slots in the order given as (first, count) of consecutive numbers."""
    array = np.asarray(slots, np.int64)
    if array.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(array) != 1) + 1
    starts, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [array.size]])
    return [(int(array[s]), int(e - s)) for s, e in zip(starts, ends, strict=True)]
