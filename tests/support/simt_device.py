"""A stand-in for engine.gpu.device.Device on host memory: launches run the catalogue's kernels in the interpreter.

Every allocation is poisoned and registered, so a kernel that reads what nobody wrote, or writes past a buffer, says so.
A captured graph is a list of calls that `launch` runs again. Work is done when a call returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from dsuf.engine.gpu.device import ALIGNMENT, out_of_memory
from dsuf.errors import DeviceError
from dsuf.kernels import catalogue
from dsuf.kernels.lang import Kernel
from dsuf.kernels.simt.errors import Deadlock, Divergence
from dsuf.kernels.simt.memory import Buffer, GlobalMemory
from dsuf.kernels.simt.run import run
from dsuf.kernels.simt.together import bears, run_together

CHIP = "sm_90a"
MEMORY = 4 << 30
together_works: dict[str, bool] = {}  # by name: whether all warps of a kernel can run at once


@cache
def expanded(name: str) -> Kernel:
    """The kernel of a catalogue entry. Raises KeyError."""
    for entry in catalogue.entries():
        if entry.name == name:
            return entry.kernel(CHIP)
    raise KeyError(name)


@cache
def with_shared(name: str, shared: int) -> Kernel:
    """The kernel of an entry with another amount of shared memory: one object, as the interpreter keeps programs of."""
    return replace(expanded(name), shared=shared)


class SimtEvent:
    """Everything has ended already."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def since(self, earlier: SimtEvent) -> float:
        return self.at - earlier.at


class SimtGraph:
    """Calls in the order in which they were captured."""

    def __init__(self, working: threading.RLock) -> None:
        self.calls: list[Callable[[], None]] = []
        self._working = working

    @property
    def launches(self) -> int:
        return len(self.calls)

    def launch(self) -> None:
        with self._working:
            for call in self.calls:
                call()


class SimtDevice:
    """See engine.gpu.device.Device for what each method does. `log` counts launches by name, `seconds` their time."""

    chip, name, lost = CHIP, "interpreter", None

    def __init__(self, memory_bytes: int = MEMORY, index: int = 0) -> None:
        self.index, self.dependent, self.memory_bytes = index, True, memory_bytes
        self.global_memory = GlobalMemory()
        self.log: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._graph: SimtGraph | None = None
        self._working = threading.RLock()  # against a thread that registers memory meanwhile

    def make_current(self) -> None:
        pass

    def see(self, other: SimtDevice) -> None:
        """All memory is the host's."""

    # ---- memory

    def allocate(self, nbytes: int, what: str) -> int:
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        free, total = self.memory()
        if size > free:
            raise out_of_memory(self.name, self.index, what, size, (free, total), self.held())
        self._held[what] += size
        return self.global_memory.add(_aligned(size), initial=False)

    def held(self) -> dict[str, int]:
        return dict(self._held)

    def memory(self) -> tuple[int, int]:
        return self.memory_bytes - sum(self._held.values()), self.memory_bytes

    def pinned(self, nbytes: int) -> np.ndarray:
        array = _aligned(nbytes)
        array[:] = 0
        self.global_memory.add(array)
        return array

    def register(self, address: int, nbytes: int) -> None:
        with self._working:
            self.global_memory.add(np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8))

    def unregister(self, address: int) -> None:
        with self._working:
            memory = self.global_memory
            memory.buffers = [b for b in memory.buffers if b.first != address]
            memory.starts = np.array([b.first for b in memory.buffers], np.int64)

    def upload(self, address: int, array: np.ndarray) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._into(address, raw.size)[:] = raw

    def download(self, address: int, nbytes: int) -> np.ndarray:
        buffer, offset = self._find(address, nbytes)
        return buffer.raw[offset : offset + nbytes].copy()

    def zero(self, address: int, nbytes: int) -> None:
        self._do(lambda: self._into(address, nbytes).fill(0))

    def copy_async(self, target: int, source: int, nbytes: int) -> None:
        self._do(lambda: self._copy(target, source, nbytes))

    def copy_many(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy_async(target, source, nbytes)

    # ---- work

    def launch(
        self,
        name: str,
        *args: float,
        grid: tuple[int, int] | None = None,
        shared: int | None = None,
        dependent: bool | None = None,
    ) -> None:
        try:
            kernel = expanded(name)
        except KeyError:
            raise DeviceError(f"no kernel {name} in the catalogue") from None
        if len(args) != len(kernel.parameters):
            raise DeviceError(f"{name} takes {len(kernel.parameters)} arguments, {len(args)} given")
        values = [
            np.float32(value) if kind == "f32" else int(value)
            for (_, kind), value in zip(kernel.parameters, args, strict=True)
        ]
        if shared is not None and shared != kernel.shared:
            kernel = with_shared(name, shared)
        self._do(lambda: self._run(name, kernel, values, grid))

    @property
    def kernels(self) -> frozenset[str]:
        return frozenset(e.name for e in catalogue.entries() if CHIP in e.chips)

    @contextlib.contextmanager
    def capture(self) -> Iterator[SimtGraph]:
        self._graph = graph = SimtGraph(self._working)
        try:
            yield graph
        finally:
            self._graph = None

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        yield

    def record(self, *, timing: bool = False) -> SimtEvent:
        return SimtEvent()

    def wait(self, event: SimtEvent) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.global_memory = GlobalMemory()
        self._held.clear()

    def __enter__(self) -> SimtDevice:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def unwritten(self, address: int, nbytes: int) -> int:
        """Bytes of a range that nobody wrote yet."""
        buffer, offset = self._find(address, nbytes)
        return 0 if buffer.written is None else int((~buffer.written[offset : offset + nbytes]).sum())

    # ---- inside

    def _do(self, call: Callable[[], None]) -> None:
        if self._graph is not None:
            self._graph.calls.append(call)
        else:
            with self._working:
                call()

    def _run(self, name: str, kernel: Kernel, values: list[float], grid: tuple[int, int] | None) -> None:
        begun = time.perf_counter()
        try:
            self._execute(name, kernel, values, grid)
        except Exception as error:
            error.add_note(f"in {name}, grid {grid or kernel.grid}")
            raise
        self.log[name] += 1
        self.seconds[name] += time.perf_counter() - begun

    def _execute(self, name: str, kernel: Kernel, values: list[float], grid: tuple[int, int] | None) -> None:
        """All warps at once where the kernel bears it; the first launch of each finds out."""
        if name not in together_works:
            together_works[name] = bears(kernel) and self._tried(kernel, values, grid)
            if together_works[name]:
                return
        if together_works[name]:
            run_together(kernel, self.global_memory, values, grid)
        else:
            run(kernel, self.global_memory, values, grid=grid)

    def _tried(self, kernel: Kernel, values: list[float], grid: tuple[int, int] | None) -> bool:
        """Whether it ran together; if not, memory is as before."""
        kept = [(b, b.raw.copy(), None if b.written is None else b.written.copy()) for b in self.global_memory.buffers]
        try:
            run_together(kernel, self.global_memory, values, grid)
        except (Deadlock, Divergence):
            for buffer, raw, written in kept:
                buffer.raw[:] = raw
                if written is not None:
                    buffer.written[:] = written
            return False
        return True

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        buffer, offset = self._find(source, nbytes)
        known = True if buffer.written is None else buffer.written[offset : offset + nbytes].copy()
        raw = buffer.raw[offset : offset + nbytes].copy()
        self._into(target, nbytes)[:] = raw
        there, at = self._find(target, nbytes)
        if there.written is not None:
            there.written[at : at + nbytes] = known

    def _find(self, address: int, nbytes: int) -> tuple[Buffer, int]:
        index = int(np.searchsorted(self.global_memory.starts, address, side="right")) - 1
        buffer = self.global_memory.buffers[index] if index >= 0 else None
        if buffer is None or not 0 <= address - buffer.first <= buffer.raw.size - nbytes:
            raise DeviceError(f"{nbytes} bytes at {address:#x} are in no allocation")
        return buffer, address - buffer.first

    def _into(self, address: int, nbytes: int) -> np.ndarray:
        """A view that is about to be written whole."""
        buffer, offset = self._find(address, nbytes)
        if buffer.written is not None:
            buffer.written[offset : offset + nbytes] = True
        return buffer.raw[offset : offset + nbytes]


def _aligned(size: int) -> np.ndarray:
    """uint8 [size] at a multiple of 256, with a gap behind it so that no access runs into another buffer."""
    room = np.empty(size + 2 * ALIGNMENT, np.uint8)
    first = -room.ctypes.data % ALIGNMENT
    return room[first : first + size]
