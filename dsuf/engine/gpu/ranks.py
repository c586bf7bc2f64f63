"""Several ranks: access to each other's memory, and sums over all of them by push and join (kernels/reduce.py).

    ranks = Ranks([device0, device1])
    total = ranks.exchange(elements)
    total.push(rank, part)        of every rank, on its own stream
    total.join(rank, out)         out = sum over ranks, the same bits on each
    ranks.check({3: "attention output of layer 2"})

The same device may stand for several ranks: then all pushes must be queued before the first join, because a join waits
on the device for what comes behind it. A join that waits in vain ends after BOUND_US and leaves a fault word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsuf.errors import DeviceError
from dsuf.kernels.reduce import MOST_BLOCKS, MOST_RANKS, PIECE, THREADS, inbox_bytes

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

BOUND_US = 2_000_000  # a step is milliseconds; a rank that is this late is gone
KIND = "exchange"


class Ranks:
    """The devices of all ranks, in rank order; each sees the memory of the others."""

    def __init__(self, devices: Sequence[Device], *, bound_us: int = BOUND_US) -> None:
        if not 1 <= len(devices) <= MOST_RANKS:
            raise DeviceError(f"{len(devices)} ranks were asked for; the exchange is made for 1 to {MOST_RANKS}.")
        self.devices, self.bound_us = list(devices), bound_us
        self.several = len({id(device) for device in devices}) > 1
        self.faults = [device.pinned(4).view(np.uint32) for device in self.devices]
        self._exchanges: dict[int, Exchange] = {}
        if self.several:
            for device in self.devices:
                for other in self.devices:
                    if other is not device:
                        device.see(other)

    def device(self, rank: int) -> Device:
        """The rank's device, made current in this thread."""
        if self.several:
            self.devices[rank].make_current()
        return self.devices[rank]

    def exchange(self, elements: int) -> Exchange:
        """Sums of so many bf16 elements; one for each size, shared by all sums that follow each other in a step."""
        if elements not in self._exchanges:
            self._exchanges[elements] = Exchange(self, elements)
        return self._exchanges[elements]

    def check(self, sums: Mapping[int, str]) -> None:
        """Raise DeviceError if a join gave up; `sums` names the codes that joins were given."""
        for rank, fault in enumerate(self.faults):
            word = int(fault[0])
            if word:
                code, missing = word >> 8, (word & 0xFF) - 1
                what = sums.get(code, f"sum {code}")
                raise DeviceError(
                    f"rank {rank} waited {self.bound_us / 1e6:g} s for rank {missing} in {what} "
                    f"(reduce.join on GPU {self.devices[rank].index}). GPU {self.devices[missing].index} hangs or its "
                    "work was lost; the engine must be started again."
                )


class Exchange:
    """Inboxes and epochs for sums of one size."""

    def __init__(self, ranks: Ranks, elements: int) -> None:
        if elements % PIECE:
            raise DeviceError(f"a sum of {elements} elements; expected a multiple of {PIECE}.")
        self.ranks, self.elements, count = ranks, elements, len(ranks.devices)
        self.grid = (min(MOST_BLOCKS, -(-elements // (PIECE * THREADS))), 1)
        size = inbox_bytes(count, elements)
        self._inboxes = [_zeroed(ranks.device(rank), size) for rank in range(count)]
        self._epochs = [_zeroed(ranks.device(rank), 4 * MOST_BLOCKS) for rank in range(count)]
        for rank in range(count):
            ranks.device(rank).synchronize()

    def push(self, rank: int, part: int) -> None:
        """Send this rank's part, bf16 [elements], to every rank."""
        inboxes = self._inboxes + [0] * (MOST_RANKS - len(self._inboxes))
        self.ranks.device(rank).launch(
            "reduce.push", part, self._epochs[rank], rank, len(self._inboxes), self.elements, *inboxes, grid=self.grid
        )

    def join(self, rank: int, out: int, code: int = 0) -> None:
        """out bf16 [elements] = sum of all ranks' parts; `code` names the sum in a fault word."""
        self.ranks.device(rank).launch(
            "reduce.join", self._inboxes[rank], self._epochs[rank], out, self.ranks.faults[rank].ctypes.data,
            len(self._inboxes), self.elements, self.ranks.bound_us, code, grid=self.grid,
        )  # fmt: skip


def _zeroed(device: Device, size: int) -> int:
    address = device.allocate(size, KIND)
    device.zero(address, size)
    return address
