"""One GPU: memory by kind, copies, launches by catalogue name, captured graphs, events: what an engine sees of CUDA.

    device = Device.open(0, cubins)
    x = device.allocate(1 << 20, "workspace")
    with device.capture() as graph:
        device.launch("embed/v41", x, ..., grid=(6, 1))
    graph.launch()

Launches go to the current stream: the main one, a side stream inside `with device.beside(OUT):`, or the graph that is
being captured. Several devices can be used by turns, and by several threads: each call makes its own one current.
Memory lives as long as the device. A CUDA error becomes a DeviceError; after a sticky one (`lost`) nothing works any
more in this process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dsuf.engine.gpu.batches import CopyBatch
from dsuf.engine.gpu.chips import look
from dsuf.errors import DeviceError
from dsuf.kernels.launch import Cubin, Launcher, LaunchFailed

if TYPE_CHECKING:
    from types import TracebackType

ALIGNMENT = 256
GIB = 1 << 30
OUT, IN = 0, 1  # side streams: to the host and from it, which the link carries at the same time
FEW = 4  # copies that are queued one by one
LARGE = 1 << 20  # bytes of copies that are: the host queues one in 3 us, the link takes 20
# after these the context is gone: every later call gives the same error
STICKY = (
    "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS",
    "INVALID_ADDRESS_SPACE", "INVALID_PC", "HARDWARE_STACK_ERROR", "ASSERT", "ECC_UNCORRECTABLE", "UNKNOWN",
)  # fmt: skip
_here = threading.local()  # .device: the one that is current in this thread


class Event:
    """A point in a stream's work."""

    def __init__(self, device: Device, handle: Any) -> None:
        self._device, self._event = device, handle

    def done(self) -> bool:
        """Whether everything before it has ended. Raises DeviceError if that work failed."""
        with self._device.faults("the work before an event"):
            return bool(self._event.is_done)

    def wait(self) -> None:
        """Block the host until then."""
        with self._device.faults("the work before an event"):
            self._event.sync()

    def since(self, earlier: Event) -> float:
        """Seconds between two events that were recorded with timing and have ended."""
        return (self._event - earlier._event) * 1e-3


class Graph:
    """Captured launches; `launch` queues them all on the current stream."""

    def __init__(self, device: Device) -> None:
        self._device, self._graph = device, None
        self.launches = 0  # kernels and copies in it

    def launch(self) -> None:
        """Queue the graph."""
        self._device.make_current()
        with self._device.faults("a graph"):
            self._graph.launch(self._device.stream)

    def _complete(self, builder: Any) -> None:
        self._graph = builder.end_building().complete()


class Device:
    """See the module. `dependent`: kernels may start before their predecessor has ended (they wait inside)."""

    def __init__(self, index: int, chip: str, name: str, handle: Any, *, dependent: bool = True) -> None:
        self.index, self.chip, self.name, self.dependent = index, chip, name, dependent
        self.lost: str | None = None  # the sticky error that ended it
        self._device = handle
        self.stream = handle.create_stream()
        self._sides = (handle.create_stream(), handle.create_stream())
        self._main = self.stream
        self._builder: Any = None
        self._graph: Graph | None = None
        self._launchers: dict[str, Launcher] = {}
        self._held: Counter[str] = Counter()
        self._addresses: list[int] = []
        self._pinned: list[int] = []
        self._batches = True  # whether the driver knows batches of copies
        self._batch: CopyBatch | None = None
        self._registered: list[int] = []

    @classmethod
    def open(cls, index: int, cubins: Iterable[Cubin] | None = None, *, dependent: bool = True) -> Device:
        """The device of that number, current in this thread. Raises DeviceError for what is missing, by name."""
        chip, name = look(index)
        import cuda.core

        handle = cuda.core.Device(index)
        handle.set_current()
        device = cls(index, chip, name, handle, dependent=dependent)
        _here.device = device
        device.add_kernels(cubins or ())
        return device

    def add_kernels(self, cubins: Iterable[Cubin]) -> None:
        """Load kernels, so that nothing is loaded inside a step."""
        self.make_current()
        with self.faults("loading kernels"):
            self._launchers.update((cubin.name, Launcher(cubin)) for cubin in cubins)

    def make_current(self) -> None:
        """Let this thread use the device, if it does not already."""
        if getattr(_here, "device", None) is not self:
            self._device.set_current()
            _here.device = self

    def see(self, other: Device) -> None:
        """Let kernels of this device read and write the other's memory. Raises DeviceError where no path exists."""
        driver = self._driver()
        pair = (driver.CUdevice(device._device.device_id) for device in (self, other))
        if not driver.cuDeviceCanAccessPeer(*pair)[1]:
            raise DeviceError(
                f"GPU {self.index} ({self.name}) cannot reach the memory of GPU {other.index} ({other.name}), as an "
                "engine over both must. Name GPUs of one NVLink or PCIe fabric, or one alone."
            )
        status = driver.cuCtxEnablePeerAccess(int(other._device.context.handle), 0)[0]
        if status.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
            self.check(status, f"reaching the memory of GPU {other.index}")

    # ---- memory

    def allocate(self, nbytes: int, what: str) -> int:
        """Address of nbytes of device memory, aligned to 256, counted under `what`. Raises DeviceError when full."""
        driver = self._driver()
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        status, address = driver.cuMemAlloc(size)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise out_of_memory(self.name, self.index, what, size, self.memory(), self.held())
        self.check(status, f"allocating {size} bytes for {what}")
        self._addresses.append(int(address))
        self._held[what] += size
        return int(address)

    def held(self) -> dict[str, int]:
        """Bytes allocated so far, by kind."""
        return dict(self._held)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        driver = self._driver()
        status, free, total = driver.cuMemGetInfo()
        self.check(status, "reading the memory's state")
        return int(free), int(total)

    def pinned(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of page-locked host memory; `.ctypes.data` is its address on the device too."""
        import ctypes

        driver = self._driver()
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        status, address = driver.cuMemHostAlloc(nbytes, flags)
        self.check(status, f"page-locking {nbytes} bytes of host memory")
        self._pinned.append(int(address))
        array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(int(address)), np.uint8)
        array[:] = 0
        return array

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory that exists, so that kernels and copies reach it at its own address."""
        driver = self._driver()
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        (status,) = driver.cuMemHostRegister(address, nbytes, flags)
        self.check(status, f"registering {nbytes} bytes of host memory")
        self._registered.append(address)

    def unregister(self, address: int) -> None:
        """The opposite of `register`."""
        driver = self._driver()
        self._registered.remove(address)
        self.check(driver.cuMemHostUnregister(address)[0], "unregistering host memory")

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device and wait; for set-up only."""
        from cuda.bindings import driver

        array = np.ascontiguousarray(array)
        self.synchronize()
        # on our stream: the plain copy returns once a small array is staged, before it is on the device
        status = driver.cuMemcpyHtoDAsync(address, array.ctypes.data, array.nbytes, self._handle())[0]
        self.check(status, "copying to the device")
        self.synchronize()

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of device memory, after all queued work."""
        driver = self._driver()
        out = np.empty(nbytes, np.uint8)
        self.synchronize()
        self.check(driver.cuMemcpyDtoH(out.ctypes.data, address, nbytes)[0], "copying from the device")
        return out

    def zero(self, address: int, nbytes: int) -> None:
        """Clear memory, in the order of the current stream."""
        from cuda.bindings import driver

        self._count()
        self.check(driver.cuMemsetD8Async(address, 0, nbytes, self._handle())[0], "clearing memory")

    def copy_async(self, target: int, source: int, nbytes: int) -> None:
        """Copy between any two addresses (device, pinned or registered) in the order of the current stream."""
        from cuda.bindings import driver

        self._count()
        self.check(driver.cuMemcpyAsync(target, source, nbytes, self._handle())[0], "copying")

    def copy_many(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        """The same for int64 [n] addresses and bytes, in any order among themselves; small ones as one batch."""
        if self._batches and len(sizes) > FEW and sizes.sum() < LARGE * len(sizes):
            try:
                self._copy_batch(targets, sources, sizes)
                return
            except (RuntimeError, DeviceError):  # the driver is older than the call, or takes no such batch
                if self.lost is not None:
                    raise
                self._batches = False
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy_async(target, source, nbytes)

    def _copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        self.make_current()
        if self._batch is None:
            self._batch = CopyBatch()
        status = self._batch(targets, sources, sizes, int(self._handle()))
        self.check(status, f"copying {len(sizes)} pieces")

    # ---- work

    def launch(
        self,
        name: str,
        *args: float,
        grid: tuple[int, int] | None = None,
        shared: int | None = None,
        dependent: bool | None = None,
    ) -> None:
        """Queue the kernel of a catalogue entry. `shared`: bytes of dynamic shared memory, if fewer than the kernel's
        most; `dependent` overrides the device's.
        """
        launcher = self._launchers.get(name)
        if launcher is None:
            raise DeviceError(
                f"no kernel {name} for {self.chip} is loaded ({len(self._launchers)} are). "
                f"Run `dsuf build --sm {self.chip}` with this version of dsuf."
            )
        self._count()
        where = self._builder if self._builder is not None else self.stream
        early = self.dependent if dependent is None else dependent
        try:
            launcher.launch(where, *args, grid=grid, shared=shared, dependent=early)
        except LaunchFailed as failed:
            self._fail(failed.status, f"launching {name}")

    @property
    def kernels(self) -> frozenset[str]:
        """Names of the loaded kernels."""
        return frozenset(self._launchers)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is launched inside instead of running it."""
        self.make_current()
        graph = self._graph = Graph(self)
        with self.faults("capturing a graph"):
            self._builder = self.stream.create_graph_builder()
            self._builder.begin_building()
        try:
            yield graph
            with self.faults("completing a graph"):
                graph._complete(self._builder)
        finally:
            self._builder = self._graph = None

    @contextlib.contextmanager
    def beside(self, side: int) -> Iterator[None]:
        """Use the side stream OUT or IN inside: for copies that run beside the step."""
        self.stream = self._sides[side]
        try:
            yield
        finally:
            self.stream = self._main

    def record(self, *, timing: bool = False) -> Event:
        """An event after what is queued on the current stream."""
        from cuda.core import EventOptions

        self.make_current()
        with self.faults("recording an event"):
            return Event(self, self.stream.record(options=EventOptions(timing_enabled=timing)))

    def wait(self, event: Event) -> None:
        """Let the current stream wait for an event of another."""
        with self.faults("waiting for an event"):
            self.stream.wait(event._event)

    def synchronize(self) -> None:
        """Block until all streams are empty. Raises DeviceError if their work failed."""
        self.make_current()
        with self.faults("the queued work"):
            for stream in (self._main, *self._sides):
                stream.sync()

    # ---- faults and end

    def check(self, status: Any, doing: str) -> None:
        """Raise DeviceError unless a driver call succeeded."""
        if int(status) != 0:
            self._fail(status.name, doing)

    @contextlib.contextmanager
    def faults(self, doing: str) -> Iterator[None]:
        """Turn what cuda.core raises into DeviceError."""
        try:
            yield
        except DeviceError:
            raise
        except Exception as error:  # cuda.core's own errors have no common public base
            if type(error).__module__.partition(".")[0] != "cuda":
                raise
            self._fail(str(error).partition(":")[0], doing)

    def _fail(self, name: str, doing: str) -> None:
        if any(name.startswith(f"CUDA_ERROR_{sticky}") for sticky in STICKY):
            self.lost = self.lost or name
            raise DeviceError(
                f"GPU {self.index} ({self.name}) failed with {name} at {doing}. Its work is lost and this process "
                "cannot use it any more; start again, and report the step if it comes back."
            )
        raise DeviceError(f"GPU {self.index} ({self.name}): {name} at {doing}.")

    def close(self) -> None:
        """Free everything; nothing may be queued any more."""
        from cuda.bindings import driver

        if self.lost is None:
            self.synchronize()
        self.make_current()
        for address in self._registered:
            driver.cuMemHostUnregister(address)
        for address in self._addresses:
            driver.cuMemFree(address)
        for address in self._pinned:
            driver.cuMemFreeHost(address)
        self._registered, self._addresses, self._pinned = [], [], []
        self._held.clear()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _driver(self) -> Any:
        from cuda.bindings import driver

        self.make_current()
        return driver

    def _handle(self) -> Any:
        return self._builder.stream.handle if self._builder is not None else self.stream.handle

    def _count(self) -> None:
        self.make_current()
        if self._graph is not None:
            self._graph.launches += 1


def out_of_memory(
    name: str, index: int, what: str, size: int, memory: tuple[int, int], held: dict[str, int]
) -> DeviceError:
    """What did not fit, what is there and who holds it."""
    free, total = memory
    mine = ", ".join(f"{kind} {count / GIB:.2f}" for kind, count in sorted(held.items(), key=lambda x: -x[1]))
    others = total - free - sum(held.values())
    return DeviceError(
        f"GPU {index} ({name}) is full: {what} needs {size / GIB:.2f} GiB, {free / GIB:.2f} of {total / GIB:.2f} GiB "
        f"are free. Held in GiB: {mine or 'nothing'}, by others {others / GIB:.2f}. "
        "Use a smaller --max-context or fewer --max-sequences, or end what else uses the GPU."
    )
