"""Runs a whole grid of a kernel on the CPU.

    memory = GlobalMemory()
    run(kernel, memory, [memory.add(x), memory.add(y, initial=False)])

Kernels with plain loads, barriers of the whole block and warp exchanges run many blocks in one lockstep unit, with
watched shared memory. Kernels with mbarriers, named barriers or flags run warp by warp (wgmma: warpgroup by warpgroup).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsuf.kernels.lang import Kernel
from dsuf.kernels.simt.errors import Deadlock
from dsuf.kernels.simt.interpreter import Unit
from dsuf.kernels.simt.lanes import Lanes, TensorMaps
from dsuf.kernels.simt.memory import GlobalMemory, SharedMemory

LOCKSTEP_LANES = 16384  # of one unit: wide enough that numpy's cost per call does not matter
LOCKSTEP_SHARED = 16 << 20


def run(
    kernel: Kernel,
    memory: GlobalMemory,
    args: Sequence[Any],
    *,
    maps: TensorMaps | None = None,
    grid: tuple[int, int] | None = None,
) -> None:
    """Execute every block. Raises a KernelFault on the first wrong access, race or standstill."""
    width, height = grid or kernel.grid
    blocks = [(x, y) for y in range(height) for x in range(width)]
    maps = maps or TensorMaps()
    needs = {op.unit for op in kernel.ops.values()} - {None}
    if not needs:
        for group in _split(blocks, kernel):
            _finish([_lockstep(kernel, memory, maps, group, (width, height), args)], group)
        return
    size = 128 if "warpgroup" in needs else kernel.threads if "block" in needs else 32
    together = kernel.cluster
    if any(name.startswith("ld_acquire") for name in kernel.ops):
        together = len(blocks)  # blocks wait for each other's flags
    for first in range(0, len(blocks), together):
        group = blocks[first : first + together]
        _finish(_apart(kernel, memory, maps, group, (width, height), args, size), group)


def _split(blocks: list[tuple[int, int]], kernel: Kernel) -> Iterator[list[tuple[int, int]]]:
    count = max(1, min(LOCKSTEP_LANES // kernel.threads, LOCKSTEP_SHARED // max(kernel.shared, 1)))
    for first in range(0, len(blocks), count):
        yield blocks[first : first + count]


def _lockstep(
    kernel: Kernel,
    memory: GlobalMemory,
    maps: TensorMaps,
    blocks: list[tuple[int, int]],
    grid: tuple[int, int],
    args: Sequence[Any],
) -> Unit:
    shared = SharedMemory(len(blocks), kernel.shared, kernel.threads, watch=True)
    thread = np.tile(np.arange(kernel.threads, dtype=np.int64), len(blocks))
    slot = np.repeat(np.arange(len(blocks), dtype=np.int64), kernel.threads)
    return Unit(kernel, Lanes(memory, maps, shared, thread, slot, blocks, grid, kernel.threads), tuple(args))


def _apart(
    kernel: Kernel,
    memory: GlobalMemory,
    maps: TensorMaps,
    blocks: list[tuple[int, int]],
    grid: tuple[int, int],
    args: Sequence[Any],
    size: int,
) -> list[Unit]:
    rank_of = [i % kernel.cluster for i in range(len(blocks))]
    memories = [SharedMemory(1, kernel.shared, kernel.threads, watch=False, rank=r) for r in rank_of]
    units = []
    for i, (block, shared) in enumerate(zip(blocks, memories, strict=True)):
        first = i - rank_of[i]
        shared.peers = memories[first : first + kernel.cluster]
        for start in range(0, kernel.threads, size):
            thread = np.arange(start, start + size, dtype=np.int64)
            slot = np.zeros(size, np.int64)
            lanes = Lanes(memory, maps, shared, thread, slot, [block], grid, kernel.threads)
            units.append(Unit(kernel, lanes, tuple(args)))
    return units


def _finish(units: list[Unit], blocks: list[tuple[int, int]]) -> None:
    live = [(unit, unit.run()) for unit in units]
    done = object()
    while live:
        before = sum(unit.steps for unit, _ in live)
        waiting = [(unit, steps) for unit, steps in live if next(steps, done) is not done]
        if len(waiting) == len(live) and before == sum(unit.steps for unit, _ in waiting):
            raise Deadlock(f"blocks {blocks[0]} to {blocks[-1]}: {len(waiting)} units wait for ever")
        live = waiting
