"""Global buffers and the shared memory of blocks, with the shadows that tell who wrote and read each byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsuf.kernels.lang import SHARED_LIMIT
from dsuf.kernels.simt.errors import Deadlock, KernelFault, Misaligned, OutOfBounds, Race, Unwritten

POISON = 0xCD
ELEMENT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # types by size, as far as there are
SHARED_BASE = 0x400  # shared addresses start here, so that 0 is never a valid one
MANY, SEVERAL = -2, -10  # in a shadow: threads of several warps; several threads of warp w: SEVERAL - w


@dataclass
class Buffer:
    """One registered array as bytes; `written` is None where everything may be read from the start."""

    first: int
    raw: np.ndarray
    written: np.ndarray | None
    array: np.ndarray  # kept alive: the addresses are those of this array


class GlobalMemory:
    """Registered arrays at their real addresses; every access must fall into one of them."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.starts = np.zeros(0, np.int64)

    def add(self, array: np.ndarray, *, initial: bool = True) -> int:
        """Register a contiguous array and return its address. initial=False: poisoned, unreadable until written."""
        if not array.flags.c_contiguous:
            raise KernelFault("a kernel buffer must be contiguous; copy it first")
        raw = array.reshape(-1).view(np.uint8)
        if not initial:
            raw[:] = POISON
        address = array.ctypes.data
        self.buffers.append(Buffer(address, raw, None if initial else np.zeros(raw.size, bool), array))
        self.buffers.sort(key=lambda b: b.first)
        self.starts = np.array([b.first for b in self.buffers], np.int64)
        return address

    def unwritten(self, address: int) -> int:
        """How many bytes of a poisoned buffer no thread wrote."""
        buffer = next(b for b in self.buffers if b.first == address)
        return 0 if buffer.written is None else int((~buffer.written).sum())

    def groups(self, address: np.ndarray, size: int) -> list[tuple[Buffer, np.ndarray, np.ndarray]]:
        """(buffer, lanes, offsets) for lanes that access `size` bytes at `address`."""
        which = np.searchsorted(self.starts, address, side="right") - 1
        first = int(which[0]) if which.size else 0
        parts = [first] if (which == first).all() else np.unique(which).tolist()
        out = []
        for index in parts:
            lanes = np.arange(which.size) if len(parts) == 1 else np.flatnonzero(which == index)
            buffer = self.buffers[max(index, 0)]
            offset = address[lanes] - buffer.first
            outside = (offset < 0) | (offset + size > buffer.raw.size)
            if outside.any():
                bad = int(offset[outside][0])
                raise OutOfBounds(
                    f"global access of {size} bytes at offset {bad} of a buffer of {buffer.raw.size} bytes"
                    f" {buffer.array.shape} {buffer.array.dtype}"
                )
            if (offset % size).any():
                raise Misaligned(f"global access of {size} bytes at offset {int(offset[0])}: not a multiple of {size}")
            out.append((buffer, lanes, offset))
        return out

    def load(self, address: np.ndarray, size: int) -> np.ndarray:
        """[lanes, size] bytes."""
        raw = np.empty((len(address), size), np.uint8)
        for buffer, lanes, offset in self.groups(address, size):
            at = offset // size
            if buffer.written is not None and not elements(buffer.written, size)[at].view(np.uint8).all():
                raise Unwritten(f"global read of {size} bytes that nobody wrote, in a buffer {buffer.array.shape}")
            raw[lanes] = elements(buffer.raw, size)[at].view(np.uint8).reshape(-1, size)
        return raw

    def load_run(self, address: int, size: int) -> np.ndarray:
        """`size` neighbouring bytes, a multiple of 16 at a multiple of 16."""
        ((buffer, _, offset),) = self.groups(np.array([address, address + size - 16]), 16)
        first = int(offset[0])
        if buffer.written is not None and not buffer.written[first : first + size].all():
            raise Unwritten(f"global read of {size} bytes that nobody wrote, in a buffer {buffer.array.shape}")
        return buffer.raw[first : first + size]

    def store(self, address: np.ndarray, raw: np.ndarray) -> None:
        """Write [lanes, size] bytes; lanes that meet at one address must agree."""
        size = raw.shape[1]
        for buffer, lanes, offset in self.groups(address, size):
            at, new = offset // size, np.ascontiguousarray(raw[lanes])
            held = elements(buffer.raw, size)
            held[at] = elements(new.reshape(-1), size)
            if (held[at].view(np.uint8) != new.reshape(-1)).any():
                raise Race(f"lanes write different values to one place of a buffer {buffer.array.shape}")
            if buffer.written is not None:
                elements(buffer.written, size)[at] = elements(np.ones(size, np.uint8), size)[0]

    def add_words(self, address: np.ndarray, value: np.ndarray) -> np.ndarray:
        """uint32 atomic addition in lane order; returns the values before."""
        before = np.zeros(len(address), np.int64)
        for buffer, lanes, offset in self.groups(address, 4):
            if buffer.written is not None and not buffer.written[offset].all():
                raise Unwritten("atomic addition to global memory that nobody wrote")
            words = buffer.raw[: buffer.raw.size // 4 * 4].view(np.uint32)
            for lane, place in zip(lanes, offset // 4, strict=True):
                before[lane] = words[place]
                words[place] = np.uint32((int(words[place]) + int(value[lane])) & 0xFFFFFFFF)
        return before


def elements(array: np.ndarray, size: int) -> np.ndarray:
    """Flat bytes as elements of `size` bytes; what is left over at the end is not seen."""
    return array[: array.size // size * size].view(ELEMENT.get(size, f"V{size}"))


def check_fits(size: int) -> None:
    """Raise KernelFault for more shared memory than a GPU launches a block with."""
    if size > SHARED_LIMIT:
        raise KernelFault(f"a block asks for {size} bytes of shared memory; there are {SHARED_LIMIT} at most")


class Barrier:
    """An mbarrier: pending arrivals and bytes; `phase` counts completed phases."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def step(self, arrivals: int, expected: int) -> None:
        """Arrive, and expect (or with a negative number deliver) bytes."""
        self.pending -= arrivals
        self.bytes += expected
        if self.pending < 0:
            raise Deadlock(f"mbarrier: more arrivals than its count of {self.count}")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Has the phase of this parity ended?"""
        return self.phase & 1 != parity


class SharedMemory:
    """Shared memory of `blocks` blocks that run in one unit (one block where warps run apart).

    With `watch`, each byte remembers its last writer and reader and their barrier epochs: a read of another thread's
    write, or a write over another thread's read, without a barrier between them is a Race.
    """

    def __init__(self, blocks: int, size: int, threads: int, *, watch: bool, rank: int = 0) -> None:
        check_fits(size)
        self.base, self.size, self.rank, self.watch = SHARED_BASE, size, rank, watch
        self.bytes = np.full((blocks, size), POISON, np.uint8)
        self.written = np.zeros((blocks, size), bool)
        self.block_epoch = np.zeros(blocks, np.int64)
        self.warp_epoch = np.zeros((blocks, -(-threads // 32)), np.int64)
        if watch:
            shadow = {name: np.full((blocks, size), -1, np.int32) for name in ("writer", "reader")}
            self.writer, self.reader = shadow["writer"], shadow["reader"]
            self.written_at, self.read_at = (np.zeros((blocks, size, 2), np.int32) for _ in range(2))
        self.barriers: dict[int, Barrier] = {}
        self.peers: list[SharedMemory] = [self]
        self.arrived: dict[object, list[int]] = {}  # barrier -> [arrived threads, generation]
        self._tensor_memory: np.ndarray | None = None

    # ---- plain accesses

    def offsets(self, address: np.ndarray, size: int) -> np.ndarray:
        """[lanes, size] byte offsets, checked."""
        offset = address - self.base
        outside = (offset < 0) | (offset + size > self.size)
        if outside.any():
            raise OutOfBounds(f"shared access of {size} bytes at offset {int(offset[outside][0])} of {self.size} bytes")
        if (address % size).any():
            raise Misaligned(f"shared access of {size} bytes at offset {int(offset[0])}: not a multiple of {size}")
        return offset[:, None] + np.arange(size)

    def load(self, slot: np.ndarray, address: np.ndarray, size: int, thread: np.ndarray) -> np.ndarray:
        """[lanes, size] bytes of each lane's own block."""
        where = (slot[:, None], self.offsets(address, size))
        if not self.written[where].all():
            raise Unwritten(f"shared read of {size} bytes that nobody wrote, at offset {int(where[1].min())}")
        if self.watch:
            self._check(where, slot, thread, self.writer, self.written_at, "reads what another thread wrote")
            self._note(where, slot, thread, self.reader, self.read_at)
        return self.bytes[where]

    def store(self, slot: np.ndarray, address: np.ndarray, raw: np.ndarray, thread: np.ndarray) -> None:
        """Write [lanes, size] bytes."""
        where = (slot[:, None], self.offsets(address, raw.shape[1]))
        if self.watch:
            self._check(where, slot, thread, self.writer, self.written_at, "overwrites what another thread wrote")
            self._check(where, slot, thread, self.reader, self.read_at, "overwrites what another thread has read")
        self.bytes[where] = raw
        if (self.bytes[where] != raw).any():
            raise Race("lanes write different values to one place of shared memory")
        self.written[where] = True
        if self.watch:
            self._note(where, slot, thread, self.writer, self.written_at)

    def add_words(self, slot: np.ndarray, address: np.ndarray, value: np.ndarray) -> np.ndarray:
        """uint32 atomic addition in lane order; returns the values before."""
        offset = self.offsets(address, 4)
        where = (slot[:, None], offset)
        if not self.written[where].all():
            raise Unwritten(f"atomic addition to shared memory that nobody wrote, at offset {int(offset.min())}")
        before = np.zeros(len(slot), np.int64)
        words = self.bytes[:, : self.size // 4 * 4].view(np.uint32)
        for lane, (block, place) in enumerate(zip(slot, offset[:, 0] // 4, strict=True)):
            before[lane] = words[block, place]
            words[block, place] = np.uint32((int(words[block, place]) + int(value[lane])) & 0xFFFFFFFF)
        if self.watch:
            self.writer[where] = MANY
            self.written_at[where] = self._epochs(slot, np.zeros_like(slot))[:, None]
        return before

    def _epochs(self, slot: np.ndarray, thread: np.ndarray) -> np.ndarray:
        return np.stack([self.block_epoch[slot], self.warp_epoch[slot, thread >> 5]], -1)

    def _note(self, where: Any, slot: np.ndarray, thread: np.ndarray, who: np.ndarray, when: np.ndarray) -> None:
        now, last, mine = self._epochs(slot, thread), who[where], thread[:, None]
        same_warp = _warp_of(last) == mine >> 5
        fresh = (last != -1) & (last != mine) & (when[where][..., 0] == now[:, None, 0])
        fresh &= ~(same_warp & (when[where][..., 1] < now[:, None, 1]))  # what a barrier ordered before is forgotten
        who[where] = np.where(fresh, np.where(same_warp, SEVERAL - (mine >> 5), MANY), mine)
        when[where] = now[:, None]

    def _check(
        self, where: Any, slot: np.ndarray, thread: np.ndarray, who: np.ndarray, when: np.ndarray, what: str
    ) -> None:
        now, last, mine = self._epochs(slot, thread), who[where], thread[:, None]
        fresh = (last != -1) & (last != mine) & (when[where][..., 0] == now[:, None, 0])
        fresh &= ~((_warp_of(last) == mine >> 5) & (when[where][..., 1] < now[:, None, 1]))
        if fresh.any():
            lane, byte = (int(x[0]) for x in np.nonzero(fresh))
            raise Race(
                f"thread {int(thread[lane])} {what} (thread {int(last[lane, byte])}; negative: several) at offset"
                f" {int(where[1][lane, byte])} of shared memory without a barrier between them"
            )

    # ---- barriers, asynchronous copies, tensor memory

    def barrier_init(self, address: int, count: int) -> None:
        """Make the mbarrier at an address."""
        self.offsets(np.array([address]), 8)
        self.barriers[address] = Barrier(count)

    def barrier(self, address: int) -> Barrier:
        """The mbarrier at an address."""
        if address not in self.barriers:
            raise Unwritten(f"no mbarrier was initialised at shared offset {address - self.base}")
        return self.barriers[address]

    def peer(self, mapped_rank: int) -> SharedMemory:
        """The shared memory of a block of the cluster; `mapped_rank` is 1 + its rank, 0 this block."""
        return self if mapped_rank == 0 else self.peers[mapped_rank - 1]

    def raw(self, address: int, size: int) -> np.ndarray:
        """A copy of `size` bytes of the only block."""
        offset = address - self.base
        if offset < 0 or offset + size > self.size:
            raise OutOfBounds(f"shared access of {size} bytes at offset {offset} of {self.size} bytes")
        if not self.written[0, offset : offset + size].all():
            raise Unwritten(f"shared read of {size} bytes that nobody wrote, at offset {offset}")
        return self.bytes[0, offset : offset + size].copy()

    def fill(self, address: int, data: np.ndarray) -> None:
        """What an asynchronous copy delivers."""
        offset = address - self.base
        if offset < 0 or offset + data.size > self.size:
            raise OutOfBounds(f"asynchronous copy of {data.size} bytes to shared offset {offset} of {self.size} bytes")
        self.bytes[0, offset : offset + data.size] = data
        self.written[0, offset : offset + data.size] = True

    def swizzled_tile(self, descriptor: int, rows: int, width: int) -> np.ndarray:
        """[rows, width bytes] of a K-major tile with 128-byte rows and the 128-byte swizzle."""
        start = (descriptor & 0x3FFF) << 4
        address = start + np.arange(rows)[:, None] * 128 + np.arange(width)
        address = address ^ (address >> 7 & 7) << 4  # the swizzle acts on address bits
        offset = self.offsets(address.reshape(-1), 1)[:, 0]
        if not self.written[0, offset].all():
            raise Unwritten("a tensor core operand in shared memory that nobody wrote")
        return np.ascontiguousarray(self.bytes[0, offset].reshape(rows, width))

    def swizzled_columns(self, descriptor: int, columns: int, width: int) -> np.ndarray:
        """[columns, width bytes of k] of a tile that lies [k, n]: rows of 64 n of 2 bytes with the 128-byte swizzle."""
        start, leading = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4
        n, k = np.arange(columns)[:, None], np.arange(width // 2)
        address = start + n // 64 * leading + k // 8 * ((descriptor >> 32 & 0x3FFF) << 4) + k % 8 * 128 + n % 64 * 2
        address = address ^ (address >> 7 & 7) << 4
        offset = self.offsets(address.reshape(-1), 2)
        if not self.written[0, offset].all():
            raise Unwritten("a tensor core operand in shared memory that nobody wrote")
        return np.ascontiguousarray(self.bytes[0, offset].reshape(columns, width))

    def fill_swizzled(self, address: int, tile: np.ndarray) -> None:
        """Deliver [rows, 128 bytes] with the 128-byte swizzle."""
        where = address + np.arange(len(tile))[:, None] * 128 + np.arange(128)
        where = where ^ (where >> 7 & 7) << 4
        offset = self.offsets(where.reshape(-1), 1)[:, 0]
        self.bytes[0, offset] = tile.reshape(-1)
        self.written[0, offset] = True

    @property
    def tensor_memory(self) -> np.ndarray:
        """[128 lanes, 512 columns] of uint32."""
        if self._tensor_memory is None:
            raise Unwritten("tensor memory is used before tensor_alloc")
        return self._tensor_memory

    def tensor_memory_alloc(self, columns: int) -> None:
        """Make the block's tensor memory."""
        if columns not in (32, 64, 128, 256, 512):
            raise KernelFault(f"tensor_alloc of {columns} columns; a power of two from 32 to 512 is needed")
        self._tensor_memory = np.full((128, 512), 0xCDCDCDCD, np.uint32)

    def tensor_memory_free(self, columns: int) -> None:
        """Give it back."""
        self._tensor_memory = None


def _warp_of(who: np.ndarray) -> np.ndarray:
    """Warp of a shadow's entry; -1 if there is none or there are many."""
    return np.where(who >= 0, who >> 5, np.where(who <= SEVERAL, SEVERAL - who, -1))
