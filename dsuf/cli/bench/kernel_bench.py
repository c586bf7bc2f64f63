"""Measures kernels on one GPU: right first, then microseconds of a launch in a graph whose operands are cold.

A case poisons its outputs, launches once and compares with the op in float64; only what agrees is timed. Its launches
rotate over more memory than the L2 holds and are captured in one graph with dependent launch; a sample is a replay of
that graph divided by its launches. The floor of a case is the larger of its bytes over the read ceiling of the same run
and its operations over the peak of the tensor cores in bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.cli.bench.gpu_decode import DENSE_BF16_GFLOPS
from dsuf.engine.gpu.launches import width_of
from dsuf.errors import DsufError
from dsuf.kernels import ceiling, pack
from dsuf.kernels.stream import scale_stride
from dsuf.ops import qdq
from dsuf.spec import Spec

if TYPE_CHECKING:
    from dsuf.engine.gpu.device import Device

COLD = 400 << 20  # bytes that a rotation covers at least: several times the L2
MOST_COPIES = 1024  # of a weight that is shorter
LEAST_LAUNCHES = 20
WARMUP = 3
CEILING_BYTES, CEILING_BLOCKS = 4 << 30, (4, 8, 16)  # blocks an SM
POISON = 0xFF
BF16_ERROR = 2.0**-8  # two roundings to bf16, relative to the norm of the expected values


@dataclass(frozen=True)
class Case:
    """One measurement: what is launched, what it must move, and how far it is from the op."""

    name: str
    rows: int
    launches: Sequence[Callable[[], None]]  # each on other operands; the first is what `error` looks at
    error: Callable[[], float]  # relative to the op in float64, after the first launch
    bound: float
    nbytes: int
    operations: int = 0
    peer: str = ""  # of kernel_peers, for --peers
    peer_shape: tuple[int, ...] = ()
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """Stem of its metrics."""
        return f"{self.name}_r{self.rows}"

    def floor(self, read_gb_per_s: float) -> tuple[float, str]:
        """Microseconds that it cannot avoid, and whether `bytes` or `operations` decide."""
        moved, multiplied = self.nbytes / read_gb_per_s / 1e3, self.operations / DENSE_BF16_GFLOPS / 1e3
        return (moved, "bytes") if moved >= multiplied else (multiplied, "operations")


@dataclass(frozen=True)
class Measured:
    """A case's outcome; no samples if it was wrong or could not run."""

    case: Case
    us: tuple[float, ...]
    error: float
    floor_us: float
    peers: dict[str, float] = field(default_factory=dict)
    problem: str = ""
    floor_of: str = "bytes"

    @property
    def median_us(self) -> float:
        """Of the replays."""
        return statistics.median(self.us)


class Bench:
    """A device, one block of its memory handed out case by case, and random operands for the kernels of a width."""

    def __init__(self, device: Device, spec: Spec, nbytes: int, seed: int, *, cold: int = COLD) -> None:
        self.device, self.spec, self.rng, self.cold = device, spec, np.random.default_rng(seed), cold
        self.width = width_of(spec)
        self._first = device.allocate(nbytes, "bench")
        self._size, self._used = nbytes, 0
        self.read_gb_per_s = 0.0

    @property
    def label(self) -> str:
        """What names of the kernels of this width end in."""
        return self.width.label

    # ---- memory

    def empty(self, nbytes: int) -> int:
        """Address of memory that lasts until the next `reset`."""
        at = self._used
        self._used += -(-max(nbytes, 1) // 256) * 256
        if self._used > self._size:
            raise DsufError(f"a case needs more than the {self._size >> 20} MiB that the bench set aside.")
        return self._first + at

    def reset(self) -> None:
        """Hand everything back."""
        self.device.synchronize()
        self._used = 0

    def put(self, array: np.ndarray) -> int:
        """Copy an array to the device."""
        at = self.empty(array.nbytes)
        self.device.upload(at, array)
        return at

    def poisoned(self, nbytes: int) -> int:
        """Memory full of NaN codes, so that what a kernel leaves out shows."""
        return self.put(np.full(nbytes, POISON, np.uint8))

    def get(self, at: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Copy an array back."""
        return self.device.download(at, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def repeated(self, block: np.ndarray, nbytes: int) -> int:
        """nbytes filled with copies of a block, each copy doubling what is there."""
        raw, at = np.ascontiguousarray(block).reshape(-1).view(np.uint8), self.empty(nbytes)
        done = min(raw.size, nbytes)
        self.device.upload(at, raw[:done])
        while done < nbytes:
            step = min(done, nbytes - done)
            self.device.copy_async(at + done, at, step)
            done += step
        self.device.synchronize()
        return at

    def copies(self, packed: np.ndarray, nbytes: int) -> list[int]:
        """Weights at as many places as make them cold."""
        return [self.repeated(packed, nbytes) for _ in range(max(2, min(40, self.cold // nbytes + 1)))]

    def many_copies(self, array: np.ndarray) -> list[int]:
        """A short weight (a multiple of 16 bytes) at places side by side that together are cold."""
        count = max(2, min(MOST_COPIES, self.cold // array.nbytes + 1))
        first = self.repeated(array, count * array.nbytes)
        return [first + i * array.nbytes for i in range(count)]

    def quantised(self, rows: int, k: int) -> tuple[int, int, np.ndarray]:
        """Random activations: addresses of codes and scales, and their values float64 [rows, k]."""
        codes, scales = qdq.q8_encode(self.rng.standard_normal((rows, k)))
        padded = np.zeros((rows, scale_stride(k)), np.uint8)
        padded[:, : k // pack.GROUP] = scales
        return self.put(codes), self.put(padded), qdq.q8_decode(codes, scales).astype(np.float64)

    # ---- time

    def replays(self, launches: Sequence[Callable[[], None]], repeat: int) -> list[float]:
        """Microseconds of a launch in each of `repeat` replays of a graph of all of them."""
        times = -(-LEAST_LAUNCHES // len(launches))
        with self.device.capture() as graph:
            for _ in range(times):
                for launch in launches:
                    launch()
        found = []
        for i in range(WARMUP + repeat):
            begin = self.device.record(timing=True)
            graph.launch()
            end = self.device.record(timing=True)
            end.wait()
            if i >= WARMUP:
                found.append(end.since(begin) * 1e6 / (times * len(launches)))
        return found

    def measure_ceiling(self) -> float:
        """GB/s that a kernel reaches which only reads; the best of a few grids."""
        block = self.rng.integers(0, 256, 1 << 26, dtype=np.uint8)
        size = min(CEILING_BYTES, self._size - (1 << 20))
        size -= size % ceiling.PIECE
        source, out = self.repeated(block, size), self.empty(4096)

        def read(blocks: int) -> float:
            def launch() -> None:
                self.device.launch(
                    "ceiling.read", source, size // ceiling.PIECE, out, grid=(132 * blocks, 1), dependent=False
                )

            return size / statistics.median(self.replays([launch], 7)) / 1e3

        self.read_gb_per_s = max(read(blocks) for blocks in CEILING_BLOCKS)
        self.reset()
        return self.read_gb_per_s

    def measure(
        self, make: Callable[[Bench], Case], repeat: int, peers: Callable[[Case], dict[str, float]]
    ) -> Measured:
        """Check a case, then time it and its peers."""
        try:
            case = make(self)
            floor, floor_of = case.floor(self.read_gb_per_s)
            case.launches[0]()
            error = case.error()
            if not error <= case.bound:  # NaN too
                problem = f"error {error:.2e} relative to the op, at most {case.bound:.1e} is expected"
                return Measured(case, (), error, floor, problem=problem)
            times = tuple(self.replays(case.launches, repeat))
            return Measured(case, times, error, floor, peers(case), floor_of=floor_of)
        finally:
            self.reset()


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def matching(names: Iterator[str] | Sequence[str], only: Sequence[str]) -> list[str]:
    """Names that begin with one of `only`; all without it."""
    return [name for name in names if not only or name.startswith(tuple(only))]


def row_of(measured: Measured) -> dict[str, Any]:
    """What the bench object's params keep of a case beside its times."""
    case = measured.case
    return {
        "bytes": case.nbytes, "operations": case.operations, "floor_us": measured.floor_us,
        "floor_of": measured.floor_of, "error": measured.error, "bound": case.bound,
        "launches": len(case.launches), **case.notes,
        **({"problem": measured.problem} if measured.problem else {}),
    }  # fmt: skip
