"""What this processor can do at most, measured in the run itself, so that a result can be held against it.

read_gb_per_s    best of several passes that sum a buffer with one thread a core. The buffer is as large as what a step
                 reads: weights that stay in the caches between steps are held against the caches, not against DRAM.
gflops           best of several square matrix products in the dtype of the numerics.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from dsuf.cli.bench.gpu_decode import ceilings_of
from dsuf.cli.machine import cpu_cores
from dsuf.ops.numerics import NUMERICS

if TYPE_CHECKING:
    from dsuf.engine.engine import Engine

PASSES, GEMM_PASSES = 7, 25
SMALLEST_READ, LARGEST_READ = 1 << 20, 1 << 28  # bytes
GEMM_SIDE = 512


def cpu_ceilings(read_bytes: int, dtype: str) -> dict[str, float]:
    """Ceilings for a step that reads `read_bytes` and multiplies in `dtype` (float32 or float64)."""
    return {
        "read_gb_per_s": _read_bytes_per_s(min(max(read_bytes, SMALLEST_READ), LARGEST_READ)) / 1e9,
        f"{dtype}_gflops": _flops(np.dtype(dtype)) / 1e9,
    }


def engine_ceilings(engine: Engine, read_bytes: int) -> dict[str, float]:
    """Ceilings of what an engine runs on: its GPUs, or this processor for a step that reads so much."""
    if engine.limits.backend == "gpu":
        return ceilings_of([machine.device for machine in engine.backend.machines])
    return cpu_ceilings(read_bytes, NUMERICS[engine.options.numerics].dtype.name)


def _read_bytes_per_s(size: int) -> float:
    cores = cpu_cores()
    parts = np.array_split(np.ones(size // 8, np.float64), cores)
    rounds = max(1, LARGEST_READ // 4 // size)  # enough work a thread that starting it does not count
    times = []

    def read(part: np.ndarray) -> None:
        for _ in range(rounds):
            part.max()  # a reduction reads all of it, without the interpreter lock

    with ThreadPoolExecutor(cores) as threads:
        for _ in range(PASSES):
            begin = time.perf_counter()
            list(threads.map(read, parts))
            times.append(time.perf_counter() - begin)
    return size * rounds / min(times)


def _flops(dtype: np.dtype) -> float:
    square = np.ones((GEMM_SIDE, GEMM_SIDE), dtype)
    out = np.empty_like(square)
    times = []
    for _ in range(GEMM_PASSES):
        begin = time.perf_counter()
        np.matmul(square, square, out=out)
        times.append(time.perf_counter() - begin)
    return 2 * GEMM_SIDE**3 / min(times)
