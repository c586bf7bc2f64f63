"""Host memory of the cache tier, page-locked so that the device copies to and from it directly.

A thread of its own populates and registers it piece by piece: hundreds of GB take seconds to minutes (0.06 s a GiB with
4 KiB pages, 0.02 s with 2 MiB pages, and ten times as much where nobody has touched it), and nothing waits for that.
What is not registered, yet or at all, is copied through staging, which is slow and right. A machine that refuses is
told of once.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from typing import TYPE_CHECKING

from dsuf.engine.shared import address_of
from dsuf.errors import DeviceError

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

GIB = 1 << 30
PIECE = 64 << 20  # registered at a time: the driver answers nobody else meanwhile, for 4 ms with 4 KiB pages
EAGER_S = 2.0  # without pauses from the start on; then as much pause as work, for streams that run
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: pages are made, and what they hold stays


class Registered:
    """One memory, registered from its first byte on up to `end`, which grows; unregistered after `close`.

    It stays mapped until it is unregistered. `after`: what was registered before, and is closed; it ends first.
    """

    def __init__(self, device: Device, memory: memoryview, piece: int, *, after: Registered | None = None) -> None:
        self.begin = self.end = address_of(memory)
        self._device, self._piece = device, piece
        self._settled, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory, after), name="dsuf-register", daemon=True)
        self._thread.start()

    def covers(self, first: int, last: int) -> bool:
        """Whether the bytes at `first` to before `last` are registered."""
        return self.begin <= first and last <= self.end

    def settle(self, seconds: float | None = None) -> None:
        """Wait until everything is registered that will be, or so long."""
        self._settled.wait(seconds)

    def close(self) -> None:
        """Have it unregistered; no copy may be under way."""
        self.end = self.begin
        self._closed.set()

    def join(self) -> None:
        """Wait until it is unregistered; after `close`."""
        self._thread.join()

    def _run(self, memory: memoryview, after: Registered | None) -> None:
        if after is not None:
            after.join()
        pieces: list[int] = []
        try:
            self._device.make_current()
            self._register(memory, pieces)
        except Exception as error:  # whatever it is, staging is right
            done, total = len(pieces) * self._piece / GIB, len(memory) / GIB
            print(
                f"dsuf engine: {done:.1f} of {total:.1f} GiB of cache memory are page-locked, no more can be: {error} "
                "Saving and restoring through the rest takes about ten times as long. Use a smaller "
                "--kv-host-bytes, or allow this process more locked memory.",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._settled.set()
        self._closed.wait()
        with contextlib.suppress(DeviceError):  # of a device that is lost
            for address in pieces:
                self._device.unregister(address)

    def _register(self, memory: memoryview, pieces: list[int]) -> None:
        begun, first, size = time.monotonic(), self.begin, len(memory)
        for at in range(0, size, self._piece):
            before, count = time.monotonic(), min(self._piece, size - at)
            _populate(first + at, count)
            self._device.register(first + at, count)
            pieces.append(first + at)
            if self._closed.is_set():
                return
            self.end = first + at + count
            spent = time.monotonic() - before
            if before - begun > EAGER_S and self._closed.wait(spent):
                return


def _populate(address: int, nbytes: int) -> None:
    """Make the pages here, where the driver holds none of its locks; a kernel that cannot leaves it to the driver."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE)
