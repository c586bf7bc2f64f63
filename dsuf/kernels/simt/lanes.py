"""The lanes that run in lockstep, as the twins of PTX operations see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dsuf.kernels.simt.errors import Divergence, KernelFault
from dsuf.kernels.simt.memory import GlobalMemory, SharedMemory

WAIT = object()  # a twin returns it to be asked again later


class TensorMaps:
    """Stand-ins for 2D tensor maps (K-major, 128-byte swizzle): address -> (array, box columns, box rows)."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[np.ndarray, int, int]] = {}

    def add(self, array: np.ndarray, box_columns: int, box_rows: int) -> int:
        """Register an array [rows, columns]; the box must be 128 bytes wide."""
        if box_columns * array.dtype.itemsize != 128:
            raise KernelFault(f"a box of {box_columns} columns is not 128 bytes wide")
        address = 0x7000_0000_0000 + 128 * len(self.known)
        self.known[address] = (array, box_columns, box_rows)
        return address

    def box(self, address: int, x: int, y: int) -> np.ndarray:
        """[box rows, 128] bytes; outside the array zeros, as the hardware fills."""
        array, columns, rows = self.known[address]
        out = np.zeros((rows, columns), array.dtype)
        part = array[max(y, 0) : y + rows, x : x + columns]
        out[: len(part), : part.shape[1]] = part
        return np.ascontiguousarray(out).view(np.uint8)


class Lanes:
    """`count` threads of one or more blocks in lockstep; `mask` says which take part in the current statement."""

    def __init__(
        self,
        memory: GlobalMemory,
        maps: TensorMaps,
        shared: SharedMemory,
        thread: np.ndarray,
        slot: np.ndarray,
        blocks: Sequence[tuple[int, int]],
        grid: tuple[int, int],
        threads: int,
    ) -> None:
        self.memory, self.maps, self.shared, self.thread, self.slot = memory, maps, shared, thread, slot
        self.blocks, self.grid, self.threads = np.array(blocks, np.int64), grid, threads
        self.count = len(thread)
        self.mask = np.ones(self.count, bool)
        self.token: tuple[Any, int] | None = None

    # ---- values

    @property
    def active(self) -> int:
        """How many lanes take part."""
        return int(self.mask.sum())

    def vector(self, value: Any, dtype: type = np.int64) -> np.ndarray:
        """A value for every lane."""
        if isinstance(value, np.ndarray) and value.ndim == 1:
            return value if value.dtype == dtype else value.astype(dtype)
        return np.full(self.count, value, dtype)

    def one(self, value: Any) -> int:
        """The value on which all active lanes must agree."""
        held = self.vector(value)[self.mask]
        if (held != held[0]).any():
            raise Divergence(f"lanes disagree on an operand that must be uniform: {held[0]} and others")
        return int(held[0])

    def warps(self, value: np.ndarray) -> np.ndarray:
        """[lanes] as [warps, 32]."""
        return value.reshape(-1, 32)

    def block_index(self, axis: int) -> Any:
        """Index of each lane's block; a plain number if there is one block."""
        if len(self.blocks) == 1:
            return int(self.blocks[0, axis])
        return self.blocks[self.slot, axis]

    def whole_warps(self, name: str) -> None:
        """Raise unless every warp takes part whole or not at all."""
        held = self.warps(self.mask)
        if (held.any(1) != held.all(1)).any():
            raise Divergence(f"{name} is reached by only some lanes of a warp")

    # ---- memory

    def _gather(self, raw: np.ndarray, dtype: type, n: int) -> Any:
        wide = np.float32 if dtype is np.float32 else np.int64
        out = np.zeros((self.count, n), wide)
        out[self.mask] = raw.view(dtype).astype(wide)
        return tuple(out[:, i] for i in range(n)) if n > 1 else out[:, 0]

    def load_global(self, address: Any, dtype: type, n: int) -> Any:
        """n values of a type from each active lane's address."""
        size = n * np.dtype(dtype).itemsize
        return self._gather(self.memory.load(self.vector(address)[self.mask], size), dtype, n)

    def load_shared(self, address: Any, dtype: type, n: int) -> Any:
        """The same from shared memory."""
        size, mask = n * np.dtype(dtype).itemsize, self.mask
        raw = self.shared.load(self.slot[mask], self.vector(address)[mask], size, self.thread[mask])
        return self._gather(raw, dtype, n)

    def _bytes(self, value: Any, dtype: type) -> np.ndarray:
        parts = [self.vector(v, np.float32 if dtype is np.float32 else np.int64)[self.mask] for v in value]
        table = np.ascontiguousarray(np.stack(parts, 1).astype(dtype))
        return table.view(np.uint8).reshape(len(table), -1)

    def store_global(self, address: Any, value: Any, dtype: type) -> None:
        """Write a tuple of values at each active lane's address."""
        if self.active:
            self.memory.store(self.vector(address)[self.mask], self._bytes(value, dtype))

    def store_shared(self, address: Any, value: Any, dtype: type, *, uniform: bool = False) -> None:
        """The same to shared memory; uniform: the warp writes once."""
        mask = self.mask.copy()
        if uniform:
            mask[np.flatnonzero(mask)[1:]] = False
        if mask.any():
            raw = self._bytes(value, dtype)[: int(mask.sum())] if uniform else self._bytes(value, dtype)
            self.shared.store(self.slot[mask], self.vector(address)[mask], raw, self.thread[mask])

    def load_cluster(self, address: Any, dtype: type) -> np.ndarray:
        """One 32-bit word from the shared memory of a block of the cluster."""
        held, out = self.vector(address), np.zeros(self.count, np.int64)
        for rank in np.unique(held[self.mask] >> 32):
            lanes = self.mask & (held >> 32 == rank)
            where = held[lanes] & 0xFFFFFFFF
            raw = self.shared.peer(int(rank)).load(np.zeros(len(where), np.int64), where, 4, self.thread[lanes])
            out[lanes] = raw.view(dtype)[:, 0]
        return out

    def atomic_add(self, address: Any, value: Any, *, shared: bool) -> np.ndarray:
        """uint32 addition lane by lane; the value before."""
        out, mask = np.zeros(self.count, np.int64), self.mask
        where, amount = self.vector(address)[mask], self.vector(value)[mask]
        out[mask] = (
            self.shared.add_words(self.slot[mask], where, amount) if shared else self.memory.add_words(where, amount)
        )
        return out

    # ---- asynchronous copies

    def bulk_copy(self, target: Any, source: Any, count: Any, barrier: Any) -> None:
        """cp.async.bulk of each active lane: 16-byte units, delivered at once, counted by the mbarrier."""
        operands = (self.vector(x)[self.mask].tolist() for x in (target, source, count))
        for where, origin, size in zip(*operands, strict=True):
            if where % 16 or origin % 16 or size % 16:
                raise KernelFault(f"bulk copy of {size} bytes from {origin:#x} to {where:#x}: not in units of 16 bytes")
            raw = self.memory.load(origin + np.arange(0, size, 16), 16).reshape(-1)
            self.shared.fill(where, raw)
            self.shared.barrier(self.one(barrier)).step(0, -size)

    def push(self, target: Any, value: Any, barrier: Any) -> None:
        """st.async of each active lane: words to a block of the cluster, delivered at once."""
        raw, wheres = self._bytes(value, np.uint32), self.vector(target)[self.mask].tolist()
        for data, where, at in zip(raw, wheres, self.vector(barrier)[self.mask].tolist(), strict=True):
            self.deliver(where, data, at)

    def bulk_push(self, target: Any, source: Any, count: Any, barrier: Any) -> None:
        """cp.async.bulk of each active lane from shared memory to a block of the cluster."""
        operands = (self.vector(x)[self.mask].tolist() for x in (target, source, count, barrier))
        for where, origin, size, at in zip(*operands, strict=True):
            if where % 16 or origin % 16 or size % 16:
                raise KernelFault(f"bulk copy of {size} bytes from {origin:#x} to {where:#x}: not in units of 16 bytes")
            self.deliver(where, self.shared.raw(origin, size), at)

    def deliver(self, target: int, data: np.ndarray, barrier: int) -> None:
        """Bytes arrive at a block of the cluster; `target` and `barrier` are addresses of the cluster."""
        peer = self.shared.peer(target >> 32)
        peer.fill(target & 0xFFFFFFFF, data)
        peer.barrier(barrier & 0xFFFFFFFF).step(0, -data.size)

    def copy16(self, target: Any, source: Any) -> None:
        """cp.async of 16 bytes a lane."""
        self.store_shared(target, self.load_global(source, np.uint32, 4), np.uint32)

    def tensor_load(self, target: Any, tensor_map: Any, x: Any, y: Any, barrier: Any, *, ranks: int | None) -> None:
        """A box of a tensor map, to this block or to every block whose bit is set in `ranks`."""
        box = self.maps.box(self.one(tensor_map), self.one(x), self.one(y))
        blocks = [self.shared] if ranks is None else [p for r, p in enumerate(self.shared.peers) if ranks >> r & 1]
        for block in blocks:
            block.fill_swizzled(self.one(target), box)
            block.barrier(self.one(barrier)).step(0, -box.size)

    # ---- mbarriers

    def barrier_init(self, address: Any, count: Any) -> None:
        """Make an mbarrier."""
        self.shared.barrier_init(self.one(address), self.one(count))

    def barrier_step(self, address: Any, expected: Any) -> None:
        """Each active lane arrives; together they expect so many bytes."""
        self.shared.barrier(self.one(address)).step(self.active, self.one(expected))

    def barrier_step_cluster(self, address: Any) -> None:
        """Each active lane arrives at an address of the cluster."""
        for one in self.vector(address)[self.mask]:
            self.shared.peer(int(one) >> 32).barrier(int(one) & 0xFFFFFFFF).step(1, 0)

    def barrier_wait(self, address: Any, parity: Any) -> Any:
        """None once the phase of that parity has ended."""
        return self.wait_until(self.shared.barrier(self.one(address)).passed(self.one(parity)))

    def cluster_rank(self) -> Any:
        """Rank of the block in its cluster."""
        return self.shared.rank

    # ---- waiting

    @staticmethod
    def wait_until(condition: bool) -> Any:
        """None if the condition holds, else WAIT."""
        return None if condition else WAIT

    def sync_warp(self) -> None:
        """bar.warp.sync: orders shared memory inside each warp."""
        self.whole_warps("sync_warp")
        warps = np.unique(np.stack([self.slot[self.mask], self.thread[self.mask] >> 5]), axis=1)
        self.shared.warp_epoch[warps[0], warps[1]] += 1

    def sync_block(self) -> Any:
        """bar.sync 0."""
        if self.count % self.threads == 0:  # this unit holds whole blocks
            held = self.mask.reshape(-1, self.threads)
            if (held.any(1) != held.all(1)).any():
                raise Divergence("sync_threads is reached by only some threads of a block")
            blocks = self.slot.reshape(-1, self.threads)[held.all(1), 0]
            self.shared.block_epoch[blocks] += 1
            self.shared.warp_epoch[blocks] += 1
            return None
        return self._meet(self.shared, 0, self.threads)

    def sync_named_of(self, barrier: Any, threads: Any) -> Any:
        """bar.sync with a number and a count."""
        return self._meet(self.shared, self.one(barrier) + 1000, self.one(threads))

    def sync_cluster(self) -> Any:
        """barrier.cluster.wait: all threads of all blocks of the cluster."""
        return self._meet(self.shared.peers[0], "cluster", self.threads * len(self.shared.peers))

    def _meet(self, shared: SharedMemory, key: Any, wanted: int) -> Any:
        state = shared.arrived.setdefault(key, [0, 0])
        if self.token is None:
            self.token = (key, state[1])
            state[0] += self.active
            if state[0] == wanted:
                state[0], state[1] = 0, state[1] + 1
        if state[1] == self.token[1]:
            return WAIT
        self.token = None
        return None
