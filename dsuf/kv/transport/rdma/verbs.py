"""pyverbs, imported when asked for, and an opened device with the arena registered on it.

The only file that imports pyverbs. It belongs to the distribution, not to PyPI, because it must match the machine's
libibverbs. No call of it releases the interpreter lock, so completions and device events are announced on non-blocking
descriptors. Objects are closed by hand, children first: left to the interpreter they go in the wrong order.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import sysconfig
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from dsuf.kv.transport.base import TransportUnavailable

PIECE_BYTES = 1 << 30  # of the arena a registration: each holds the interpreter lock
DEPTH = 256  # work requests posted on one queue pair
MAX_READS = 16  # READs in flight on one queue pair, and segments of one READ; what adapters commonly allow
CAP_IPC_LOCK = 14
PACKAGES = "python3-pyverbs ibverbs-providers"

Made = TypeVar("Made")
_making = threading.Lock()


@functools.cache
def load() -> SimpleNamespace:
    """The parts of pyverbs in use. Raises TransportUnavailable, with what to do."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:  # importing it calls logging.basicConfig
        from pyverbs import addr, cq, device, mr, pd, pyverbs_error, qp, wr

        try:
            from pyverbs import libibverbs_enums as enums
        except ImportError:  # the name up to rdma-core 49
            from pyverbs import enums
    except ImportError as error:
        raise TransportUnavailable(_import_problem(error)) from None
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    return SimpleNamespace(
        addr=addr, cq=cq, device=device, mr=mr, pd=pd, qp=qp, wr=wr, enums=enums, Error=pyverbs_error.PyverbsError
    )


def _import_problem(error: ImportError) -> str:
    text = str(error)
    link = f"ln -s /usr/lib/python3/dist-packages/pyverbs {sysconfig.get_path('platlib')}/"
    if "IBVERBS_PRIVATE" in text:
        return (
            f"pyverbs was built for another libibverbs ({text}). Use the pair of one source: apt-get install {PACKAGES}"
        )
    if "lib" in text and ".so" in text and "cannot open" in text:
        return f"a library is missing ({text}). Run: apt-get install {PACKAGES}"
    if isinstance(error, ModuleNotFoundError) and error.name == "pyverbs":
        return f"this Python has no pyverbs. Run: apt-get install {PACKAGES} && {link}"
    return f"pyverbs does not fit this Python ({text}). Use the distribution's Python, or one of the same minor version"


def with_new_descriptor(make: Callable[[], Made]) -> tuple[Made, int | None]:
    """(what make() returns, the event descriptor that it opened): older pyverbs do not tell it."""

    def present() -> set[int]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                    found.add(int(name))
        return found

    with _making:
        before = present()
        made = make()
        fresh = present() - before
    return made, fresh.pop() if len(fresh) == 1 else None


class Device:
    """An opened device; `register` makes the arena usable through it."""

    def __init__(self, name: str) -> None:
        self.verbs = load()
        self.name = name
        try:
            self._context, self._events = with_new_descriptor(lambda: self.verbs.device.Context(name=name))
        except self.verbs.Error as error:
            raise TransportUnavailable(f"the RDMA device {name} cannot be opened: {error}") from None
        limits = self._context.query_device()
        self.reads_served = min(limits.max_qp_rd_atom, MAX_READS)
        self.reads_asked = min(limits.max_qp_init_rd_atom, MAX_READS)
        self.max_segments = min(limits.max_sge, limits.max_sge_rd or limits.max_sge, MAX_READS)
        enums = self.verbs.enums
        window_flags = enums.IBV_DEVICE_MEM_WINDOW_TYPE_2A | enums.IBV_DEVICE_MEM_WINDOW_TYPE_2B
        self.has_windows = bool(limits.device_cap_flags & window_flags)
        self.domain = self.verbs.pd.PD(self._context)
        self.address = 0
        self._pieces: list[Any] = []

    def register(self, address: int, nbytes: int) -> None:
        """Register [address, address + nbytes) for reading into it. Raises TransportUnavailable."""
        enums = self.verbs.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | (enums.IBV_ACCESS_MW_BIND if self.has_windows else 0)
        self.address = address
        for offset in range(0, nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, nbytes - offset)
            try:
                piece = self.verbs.mr.MR(self.domain, length, access, address=address + offset)
            except self.verbs.Error as error:
                raise TransportUnavailable(
                    f"{self.name} could not register {length} bytes at {offset} of {nbytes}: {error}. If memory is "
                    "not short, the limit for locked memory is (ulimit -l, LimitMEMLOCK, capability IPC_LOCK)"
                ) from None
            self._pieces.append(piece)

    def active_mtu(self, number: int) -> int:
        """The port's active MTU as verbs' code."""
        return self._context.query_port(number).active_mtu

    def piece(self, offset: int) -> Any:
        """The registration that holds this byte of the arena."""
        return self._pieces[offset // PIECE_BYTES]

    def make_queue(self) -> tuple[Any, Any, int]:
        """(completion channel, completion queue for one queue pair, non-blocking descriptor of the channel)."""
        channel, descriptor = with_new_descriptor(lambda: self.verbs.cq.CompChannel(self._context))
        descriptor = getattr(channel, "fd", descriptor)
        if descriptor is None:
            channel.close()
            raise TransportUnavailable(f"the descriptor for completions of {self.name} was not found")
        os.set_blocking(descriptor, False)
        return channel, self.verbs.cq.CQ(self._context, 2 * DEPTH, None, channel, 0), descriptor

    def watch(self, changed: Callable[[bool], None]) -> None:
        """Call `changed(device is lost)` in the running loop when a port or an address of the device changes."""
        if self._events is None:
            return
        os.set_blocking(self._events, False)
        asyncio.get_running_loop().add_reader(self._events, self._take_event, changed)

    def _take_event(self, changed: Callable[[bool], None]) -> None:
        enums = self.verbs.enums
        try:
            event = self._context.get_async_event()
        except self.verbs.Error:  # taken already
            return
        kind = event.event_type
        event.ack()
        if kind == enums.IBV_EVENT_DEVICE_FATAL:
            changed(True)
        elif kind in (enums.IBV_EVENT_PORT_ERR, enums.IBV_EVENT_PORT_ACTIVE, enums.IBV_EVENT_GID_CHANGE):
            changed(False)

    def close(self) -> None:
        """Close it; its queue pairs and windows are closed before. With a watch: from the loop."""
        if self._events is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._events)
        for made in (*self._pieces, self.domain, self._context):
            made.close()


def locked_memory_problem(nbytes: int) -> str | None:
    """Why this process may not lock so much memory, None if it may. Raises its own limit as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = [limit for limit in (soft, hard) if limit == resource.RLIM_INFINITY or limit >= nbytes]
    if soft in allowed or may_lock_any():
        return None
    if hard in allowed:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        return None
    return (
        f"this process may lock {hard} bytes of memory and the adapter needs {nbytes}. Raise the limit: "
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or the capability IPC_LOCK in a container"
    )


def may_lock_any() -> bool:
    """Whether this process has the capability IPC_LOCK."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False
