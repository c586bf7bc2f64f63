"""Runs all warps of many blocks in one lockstep unit: tens of times as fast as warp by warp, for kernels that bear it.

What warps do one after the other in run.py they do here at once, statement by statement. So a kernel whose warps wait
for each other inside branches of their own (producer and consumer) cannot run like this: it stands still, or reaches
barriers in parts, and that is told by an error. Shared memory is checked for bounds and unwritten reads, not for races.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsuf.kernels.lang import Kernel
from dsuf.kernels.simt.errors import Deadlock, Divergence, KernelFault, Misaligned, OutOfBounds, Unwritten
from dsuf.kernels.simt.interpreter import Unit
from dsuf.kernels.simt.lanes import WAIT, Lanes, TensorMaps
from dsuf.kernels.simt.memory import POISON, SHARED_BASE, Barrier, GlobalMemory, check_fits, elements

LANES = 8192  # of one unit
SHARED_BYTES = 64 << 20
BEARABLE = (
    "mbarrier_init", "mbarrier_expect", "mbarrier_arrive", "mbarrier_wait", "bulk_load", "bulk_load_hint", "sync_named",
    "cluster_arrive", "cluster_wait", "cluster_address", "ld_cluster_f32", "ld_cluster_u32", "ld_cluster_u32x4",
    "mbarrier_arrive_cluster", "mbarrier_wait_cluster", "async_arrive",
    "cluster_arrive_relaxed", "push_u32", "push_u32x2", "bulk_push",
)  # fmt: skip


def bears(kernel: Kernel) -> bool:
    """Whether the operations of a kernel exist here; it may still turn out that its warps wait for each other."""
    return all(op.name in BEARABLE for op in kernel.ops.values() if op.unit is not None)


def run_together(kernel: Kernel, memory: GlobalMemory, args: Sequence[Any], grid: tuple[int, int] | None) -> None:
    """Execute every block. Raises a KernelFault on a wrong access, a barrier met in parts or a standstill."""
    width, height = grid or kernel.grid
    blocks = [(x, y) for y in range(height) for x in range(width)]
    fits = min(LANES // kernel.threads, SHARED_BYTES // max(kernel.shared, 1))
    count = max(1, fits // kernel.cluster) * kernel.cluster
    for first in range(0, len(blocks), count):
        group = blocks[first : first + count]
        unit = Unit(kernel, TogetherLanes(memory, kernel, group, (width, height)), tuple(args))
        for _ in unit.run():
            raise Deadlock(f"{kernel.name}: blocks {group[0]} to {group[-1]} wait for each other")


class TogetherShared:
    """Shared memory of many blocks, side by side with a stride of 16 bytes."""

    def __init__(self, blocks: int, size: int, cluster: int) -> None:
        check_fits(size)
        self.base, self.size, self.cluster, self.rank = SHARED_BASE, size, cluster, 0
        self.stride = -(-size // 16) * 16
        self.bytes = np.full(blocks * self.stride, POISON, np.uint8)
        self.written = np.zeros(blocks * self.stride, bool)
        self.barriers: dict[tuple[int, int], Barrier] = {}

    def places(self, slot: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        """Byte of each lane's access in `bytes`, checked."""
        offset = address - self.base
        outside = (offset < 0) | (offset + size > self.size)
        if outside.any():
            raise OutOfBounds(f"shared access of {size} bytes at offset {int(offset[outside][0])} of {self.size} bytes")
        if (address % size).any():
            raise Misaligned(f"shared access of {size} bytes at offset {int(offset[0])}: not a multiple of {size}")
        return slot * self.stride + offset

    def load(self, slot: np.ndarray, address: np.ndarray, size: int) -> np.ndarray:
        """[lanes, size] bytes."""
        at = self.places(slot, address, size) // size
        if not elements(self.written, size)[at].view(np.uint8).all():
            raise Unwritten(f"shared read of {size} bytes that nobody wrote, at offset {int(address.min())}")
        return elements(self.bytes, size)[at].view(np.uint8).reshape(-1, size)

    def store(self, slot: np.ndarray, address: np.ndarray, raw: np.ndarray) -> None:
        """Write [lanes, size] bytes."""
        size = raw.shape[1]
        at = self.places(slot, address, size) // size
        elements(self.bytes, size)[at] = elements(np.ascontiguousarray(raw).reshape(-1), size)
        elements(self.written, size)[at] = elements(np.ones(size, np.uint8), size)[0]

    def fill(self, slot: int, address: int, data: np.ndarray) -> None:
        """What an asynchronous copy delivers."""
        offset = address - self.base
        if offset < 0 or offset + data.size > self.size:
            raise OutOfBounds(f"asynchronous copy of {data.size} bytes to shared offset {offset} of {self.size} bytes")
        at = slot * self.stride + offset
        self.bytes[at : at + data.size], self.written[at : at + data.size] = data, True

    def barrier(self, slot: int, address: int) -> Barrier:
        """The mbarrier of a block at an address."""
        if (slot, address) not in self.barriers:
            raise Unwritten(f"no mbarrier was initialised at shared offset {address - self.base}")
        return self.barriers[slot, address]


class TogetherLanes(Lanes):
    """All threads of some blocks; whatever must be uniform in a warp may differ between warps."""

    def __init__(
        self, memory: GlobalMemory, kernel: Kernel, blocks: list[tuple[int, int]], grid: tuple[int, int]
    ) -> None:
        shared: Any = TogetherShared(len(blocks), kernel.shared, kernel.cluster)
        thread = np.tile(np.arange(kernel.threads, dtype=np.int64), len(blocks))
        slot = np.repeat(np.arange(len(blocks), dtype=np.int64), kernel.threads)
        super().__init__(memory, TensorMaps(), shared, thread, slot, blocks, grid, kernel.threads)
        self.clusters = kernel.cluster

    # ---- shared memory

    def load_shared(self, address: Any, dtype: type, n: int) -> Any:
        size, mask = n * np.dtype(dtype).itemsize, self.mask
        return self._gather(self.shared.load(self.slot[mask], self.vector(address)[mask], size), dtype, n)

    def store_shared(self, address: Any, value: Any, dtype: type, *, uniform: bool = False) -> None:
        if self.active:
            self.shared.store(self.slot[self.mask], self.vector(address)[self.mask], self._bytes(value, dtype))

    def load_cluster(self, address: Any, dtype: type) -> np.ndarray:
        mask, held, out = self.mask, self.vector(address), np.zeros(self.count, np.int64)
        if mask.any():
            own, rank = self.slot[mask], held[mask] >> 32
            slot = np.where(rank > 0, own - own % self.clusters + rank - 1, own)
            out[mask] = self.shared.load(slot, held[mask] & 0xFFFFFFFF, 4).view(dtype)[:, 0]
        return out

    def atomic_add(self, address: Any, value: Any, *, shared: bool) -> np.ndarray:
        if not shared:
            return super().atomic_add(address, value, shared=False)
        out, mask = np.zeros(self.count, np.int64), self.mask
        where, before = self.shared.places(self.slot[mask], self.vector(address)[mask], 4) // 4, []
        words, known = self.shared.bytes.view(np.uint32), self.shared.written.view(np.uint32)
        if (known[where] != 0x01010101).any():
            raise Unwritten("atomic addition to shared memory that nobody wrote")
        for place, amount in zip(where.tolist(), self.vector(value)[mask].tolist(), strict=True):
            before.append(int(words[place]))
            words[place] = (before[-1] + amount) & 0xFFFFFFFF
        out[mask] = before
        return out

    # ---- barriers

    def cluster_rank(self) -> Any:
        return self.slot % self.clusters

    def barrier_init(self, address: Any, count: Any) -> None:
        for slot, at, n in self._each(address, count):
            self.shared.places(np.array([slot]), np.array([at]), 8)
            self.shared.barriers[slot, at] = Barrier(n)

    def barrier_step(self, address: Any, expected: Any) -> None:
        for slot, at, n in self._each(address, expected):
            self.shared.barrier(slot, at).step(1, n)

    def barrier_step_cluster(self, address: Any) -> None:
        for slot, at, _ in self._each(address, 0):
            rank = at >> 32
            owner = slot - slot % self.clusters + rank - 1 if rank else slot
            self.shared.barrier(owner, at & 0xFFFFFFFF).step(1, 0)

    def barrier_wait(self, address: Any, parity: Any) -> Any:
        waits = set(self._each(address, parity))
        return None if all(self.shared.barrier(slot, at).passed(n) for slot, at, n in waits) else WAIT

    def bulk_copy(self, target: Any, source: Any, count: Any, barrier: Any) -> None:
        operands = (self.vector(x)[self.mask].tolist() for x in (target, source, count, barrier))
        for slot, where, origin, size, at in zip(self.slot[self.mask].tolist(), *operands, strict=True):
            if where % 16 or origin % 16 or size % 16:
                raise KernelFault(f"bulk copy of {size} bytes from {origin:#x} to {where:#x}: not in units of 16 bytes")
            self.shared.fill(slot, where, self.memory.load_run(origin, size))
            self.shared.barrier(slot, at).step(0, -size)

    def push(self, target: Any, value: Any, barrier: Any) -> None:
        raw = self._bytes(value, np.uint32)
        for data, (slot, where, at) in zip(raw, self._each(target, barrier), strict=True):
            self._deliver(slot, where, data, at)

    def bulk_push(self, target: Any, source: Any, count: Any, barrier: Any) -> None:
        operands = (self.vector(x)[self.mask].tolist() for x in (target, source, count, barrier))
        for slot, where, origin, size, at in zip(self.slot[self.mask].tolist(), *operands, strict=True):
            if where % 16 or origin % 16 or size % 16:
                raise KernelFault(f"bulk copy of {size} bytes from {origin:#x} to {where:#x}: not in units of 16 bytes")
            units = origin + np.arange(0, size, 16)
            self._deliver(slot, where, self.shared.load(np.full(len(units), slot), units, 16).reshape(-1), at)

    def _deliver(self, slot: int, target: int, data: np.ndarray, barrier: int) -> None:
        owner = slot - slot % self.clusters + (target >> 32) - 1
        self.shared.fill(owner, target & 0xFFFFFFFF, data)
        self.shared.barrier(owner, barrier & 0xFFFFFFFF).step(0, -data.size)

    def sync_warp(self) -> None:
        self.whole_warps("sync_warp")

    def sync_block(self) -> Any:
        self._whole(self.threads, "sync_threads")

    def sync_cluster(self) -> Any:
        self._whole(self.threads * self.clusters, "cluster_wait")

    def sync_named_of(self, barrier: Any, threads: Any) -> Any:
        """All threads of a named barrier must be here at once."""
        found: dict[tuple[int, int], list[int]] = {}
        for slot, number, wanted in self._each(barrier, threads):
            found.setdefault((slot, number), [0, wanted])[0] += 1
        if any(here != wanted for here, wanted in found.values()):
            raise Divergence("sync_named is reached by only some of its threads")

    def _whole(self, size: int, name: str) -> None:
        held = self.mask.reshape(-1, size)
        if (held.any(1) != held.all(1)).any():
            raise Divergence(f"{name} is reached by only some of its threads")

    def _each(self, address: Any, value: Any) -> list[tuple[int, int, int]]:
        """(slot, address, value) of each active lane."""
        mask = self.mask
        return list(
            zip(
                self.slot[mask].tolist(),
                self.vector(address)[mask].tolist(),
                self.vector(value)[mask].tolist(),
                strict=True,
            )
        )
