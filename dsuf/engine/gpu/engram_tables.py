"""Where Engram's tables are: on the device, or in page-locked host memory that the gather kernel reads over PCIe.

    device          all rows on the device: when the ledger allows
    device-sharded  each rank holds a share of the rows and reads the others' in their memory: several GPUs
    host            a memfd, on 2 MiB pages where the machine has them free, registered with CUDA in pieces of 1 GiB

A token reads 24 rows of 264 bytes a layer, so that even over PCIe the bytes are few; what host memory costs is latency,
and page-locking at start: 0.06 s a GiB with 4 KiB pages, 0.02 s with 2 MiB pages, once the memory has been touched. The
memfd can outlive the engine process that filled it (who starts engines keeps the descriptor): then a restart only
registers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dsuf.engine.gpu.weight_plan import Part, plan, row_share
from dsuf.engine.gpu.weights import TABLES, Weights
from dsuf.errors import EnvironmentProblem
from dsuf.model.fingerprint import fingerprint
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device
    from dsuf.model.checkpoint import Checkpoint

Placement = Literal["device", "device-sharded", "host"]
PIECE = 1 << 30  # registered at a time
HUGE_PAGE = 2 << 20
HEADER = 4096  # of the memfd: the mark of complete tables
# seconds a GiB by page size, measured on an H200's host (docs/results/memory-h200.json): the first touch by one thread,
# which reading the tables into it does, and page-locking
TOUCH_S_PER_GIB = {4096: 0.74, HUGE_PAGE: 0.15}
REGISTER_S_PER_GIB = {4096: 0.057, HUGE_PAGE: 0.021}
MEMINFO = Path("/proc/meminfo")


def table_parts(spec: Spec) -> list[Part]:
    """The tables' parts, all rows."""
    return [part for part in plan(spec) if part.name in TABLES]


def table_bytes(spec: Spec) -> int:
    """Bytes of all tables."""
    return sum(part.nbytes for part in table_parts(spec))


def choose(spec: Spec, free: int, ranks: int) -> Placement:
    """The placement for `free` bytes a device beside everything else: the fastest that fits."""
    nbytes = table_bytes(spec)
    if ranks > 1 and -(-nbytes // ranks) <= free:
        return "device-sharded"
    return "device" if nbytes <= free else "host"


@dataclass(frozen=True)
class Forecast:
    """What the tables of a checkpoint would cost in host memory on this machine."""

    nbytes: int
    free_bytes: int  # of memory
    huge_bytes: int  # free in 2 MiB pages
    page_bytes: int  # of the pages that would be used
    touch_s: float
    register_s: float


def forecast(spec: Spec, meminfo: Path = MEMINFO) -> Forecast:
    """For `dsuf doctor`: pages, memory, seconds."""
    fields = {}
    for line in meminfo.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0])
    nbytes = table_bytes(spec)
    huge = fields.get("HugePages_Free", 0) * fields.get("Hugepagesize", 0) * 1024
    page = HUGE_PAGE if huge >= nbytes else 4096
    free = max(fields.get("MemAvailable", 0) * 1024, huge)
    gib = nbytes / PIECE
    return Forecast(nbytes, free, huge, page, gib * TOUCH_S_PER_GIB[page], gib * REGISTER_S_PER_GIB[page])


def place_on_device(weights: Weights) -> None:
    """Take device memory for the tables (of the rank's rows); load or fill them like other parts."""
    for part in weights.parts:
        if part.name in TABLES:
            address = weights.device.allocate(part.nbytes, f"weights, {part.kind}")
            setattr(weights.owner(part), part.name, address)


def place_shares(every: Sequence[Weights]) -> None:
    """The same for all ranks, each of which finds the others' rows."""
    for weights in every:
        place_on_device(weights)
    if len(every) > 1:
        join_shares(every)


def join_shares(every: Sequence[Weights]) -> None:
    """Tell each rank's layers where all ranks' rows are. The rows never change, so nobody has to wait for anybody."""
    spec, count = every[0].spec, len(every)
    for layer in spec.engram_layer_ids:
        places = [(w.layers[layer].engram_table, w.layers[layer].engram_table_scales) for w in every]
        for weights in every:
            mine, ordinal = weights.layers[layer], spec.layers[layer].engram
            mine.engram_tables = weights.device.allocate(16 * count, "weights, dense")
            mine.engram_rows = row_share(spec.engram_num_embeddings[ordinal], 0, count)[1]
            weights.device.upload(mine.engram_tables, np.array(places, np.int64))


def place(
    every: Sequence[Weights], checkpoint: Checkpoint, placement: Placement, left: Path | None = None
) -> Future[bool] | None:
    """Give the tables of all ranks their place. In host memory they are filled and registered in a thread, while other
    weights are loaded: wait for the result. On the device they are loaded like other parts. `left`: memory of an engine
    before.
    """
    if placement != "host":
        place_shares(every)
        return None
    tables = HostTables(every[0].device, every[0].spec, _opened(left))
    for weights in every:
        tables.place(weights)

    def fill_and_register() -> bool:
        return tables.load(checkpoint, fingerprint(checkpoint))

    pool = ThreadPoolExecutor(1, "engram-tables")
    done = pool.submit(fill_and_register)
    pool.shutdown(wait=False)
    return done


class HostTables:
    """Tables in host memory; `fd` is the memfd, for whoever wants to keep it, `huge` whether it is on 2 MiB pages."""

    def __init__(self, device: Device, spec: Spec, fd: int | None = None) -> None:
        self.device, self.parts = device, table_parts(spec)
        self.nbytes = HEADER + sum(_whole(part.nbytes) for part in self.parts)
        self.nbytes = -(-self.nbytes // HUGE_PAGE) * HUGE_PAGE
        self.fd, self._map, self.huge = _map(self.nbytes, fd)
        self._view = np.frombuffer(self._map, np.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._registered: list[int] = []

    def load(self, checkpoint: Checkpoint | None, mark: bytes, progress: Callable[[int], None] | None = None) -> bool:
        """Fill from the checkpoint and register, a piece at a time. True if the memory held `mark`'s tables already.

        `mark` names the checkpoint (at most 64 bytes). None: leave the bytes as they are, for measurements.
        """
        kept = bytes(self._view[: len(mark)]) == mark
        for first in range(0, self.nbytes, PIECE):
            size = min(PIECE, self.nbytes - first)
            if not kept and checkpoint is not None:
                self._fill(checkpoint, first, size)
            self.device.register(self.address + first, size)
            self._registered.append(self.address + first)
            if progress is not None:
                progress(size)
        self._view[: len(mark)] = np.frombuffer(mark, np.uint8)
        return kept

    def place(self, weights: Weights) -> None:
        """Let the gather kernel read here."""
        weights.host_tables = self
        for part, at in self._places():
            setattr(weights.owner(part), part.name, self.address + at)

    @property
    def path(self) -> Path:
        """Where another process of this user can open the memory, as long as this one lives or keeps it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def close(self) -> None:
        """Unregister; the memory goes with its last descriptor and mapping."""
        for address in self._registered:
            self.device.unregister(address)
        self._registered = []
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _places(self) -> Iterator[tuple[Part, int]]:
        at = HEADER
        for part in self.parts:
            yield part, at
            at += _whole(part.nbytes)

    def _fill(self, checkpoint: Checkpoint, first: int, size: int) -> None:
        """Copy what falls into `size` bytes from `first` on."""
        for part, at in self._places():
            low, high = max(first, at), min(first + size, at + part.nbytes)
            if low < high:
                raw = checkpoint.raw(part.tensors[0]).reshape(-1).view(np.uint8)
                self._view[low:high] = raw[low - at : high - at]


def _opened(left: Path | None) -> int | None:
    with contextlib.suppress(OSError):  # whoever kept it is gone
        return os.open(left, os.O_RDWR | os.O_CLOEXEC) if left is not None else None
    return None


def _whole(nbytes: int) -> int:
    """Up to a multiple of a small page."""
    return -(-nbytes // HEADER) * HEADER


def _map(nbytes: int, fd: int | None) -> tuple[int, mmap.mmap, bool]:
    """(descriptor, mapping, whether on huge pages) of given or new memory."""
    if fd is not None and os.fstat(fd).st_size != nbytes:
        os.close(fd)  # of another checkpoint
    elif fd is not None:
        return fd, mmap.mmap(fd, nbytes), os.fstat(fd).st_blksize == HUGE_PAGE
    for flags in (os.MFD_HUGETLB, 0):
        new = os.memfd_create("dsuf-engram", os.MFD_CLOEXEC | flags)
        with contextlib.suppress(OSError):  # fewer free huge pages than that
            os.ftruncate(new, nbytes)
            return new, mmap.mmap(new, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), bool(flags)
        os.close(new)
    raise EnvironmentProblem(
        f"cannot map {nbytes / PIECE:.1f} GiB of host memory for Engram's tables. Use more GPUs, or a larger machine."
    )
